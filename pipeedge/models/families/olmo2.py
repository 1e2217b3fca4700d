"""OLMo 2 and 3, https://arxiv.org/abs/2501.00656: norms follow attention and MLP."""

from __future__ import annotations

from pipeedge.models.architecture import Architecture
from pipeedge.models.families.decoder import (
    FULL,
    SLIDING,
    causal_class,
    decoder_names,
    decoder_shapes,
    gguf_names,
    layer_kinds,
    read_decoder,
    read_rotary,
)
from pipeedge.models.family import Family, Head
from pipeedge.models.hub_config import HubConfig

__all__ = ["OLMO2"]


def _read(config: HubConfig, head: Head) -> Architecture:
    given = {key: value for key, value in config.values.items() if value is not None}
    config = HubConfig({"vocab_size": 50_304, "rms_norm_eps": 1e-5, **given})
    blocks = config.integer("num_hidden_layers", 32)
    third = config.text("model_type", "olmo2") == "olmo3"
    default = [SLIDING if third and (block + 1) % 4 else FULL for block in range(blocks)]
    kinds = layer_kinds(config, blocks, default)
    window = config.integer("sliding_window", 4096) if third else 0
    heads, hidden = config.integer("num_attention_heads", 32), config.integer("hidden_size", 4096)
    size = config.integer("head_dim", hidden // max(heads, 1))
    # The third scales rotations only where attention has no window.
    rotary = (read_rotary(config, size, kind=FULL), read_rotary(config, size, kind=SLIDING))
    bias = config.flag("attention_bias", False)
    return read_decoder(
        "olmo2",
        config,
        head,
        rotary=rotary,
        rotation=tuple(int(kind == SLIDING) for kind in kinds),
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        norms="after",
        head_norm="all",
        qkv_bias=bias,
        proj_bias=bias,
    )


OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2", "olmo3"),
    classes={**causal_class("Olmo2ForCausalLM"), **causal_class("Olmo3ForCausalLM")},
    read=_read,
    dialects=lambda _: (
        decoder_names(end1="post_attention_layernorm", end2="post_feedforward_layernorm"),
        gguf_names(end1="post_attention_norm", end2="post_ffw_norm"),
    ),
    shapes=decoder_shapes,
    prefix="model.",
    unprefixed=("lm_head",),
    decodes=True,
)
