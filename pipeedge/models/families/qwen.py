"""Qwen2 and 2.5, https://arxiv.org/abs/2412.15115: biases of q, k and v; Qwen3: norms of heads."""

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
)
from pipeedge.models.family import Family, Head
from pipeedge.models.hub_config import HubConfig

__all__ = ["QWEN"]


def _read(config: HubConfig, head: Head) -> Architecture:
    third = config.text("model_type", "qwen2") == "qwen3"
    blocks = config.integer("num_hidden_layers", 32)
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else 0
    first = config.integer("max_window_layers", 28)
    kinds = layer_kinds(
        config, blocks, [SLIDING if window and block >= first else FULL for block in range(blocks)]
    )
    bias = config.flag("attention_bias", False)
    return read_decoder(
        "qwen",
        config,
        head,
        kv_heads=32,
        head_size=config.integer("head_dim", 128) if third else None,
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        qkv_bias=bias if third else True,
        proj_bias=bias if third else False,
        head_norm="each" if third else "none",
    )


QWEN = Family(
    name="qwen",
    model_types=("qwen2", "qwen3"),
    classes={**causal_class("Qwen2ForCausalLM"), **causal_class("Qwen3ForCausalLM")},
    read=_read,
    dialects=lambda _: (decoder_names(), gguf_names()),
    shapes=decoder_shapes,
    prefix="model.",
    unprefixed=("lm_head",),
    decodes=True,
)
