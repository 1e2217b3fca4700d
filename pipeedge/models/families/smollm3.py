"""SmolLM3: some blocks do not rotate queries and keys."""

from __future__ import annotations

from pipeedge.base.errors import ModelError
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

__all__ = ["SMOLLM3"]


def _rotates(config: HubConfig, blocks: int) -> tuple[bool, ...]:
    """Return whether each block rotates: as listed, or all but every fourth."""
    listed = config.values.get("no_rope_layers")
    if listed is None:
        period = config.integer("no_rope_layer_interval", 4)
        return tuple((block + 1) % max(period, 1) != 0 for block in range(blocks))
    if not isinstance(listed, list) or len(listed) != blocks:
        raise ModelError(f"no_rope_layers must list 0 or 1 for each of {blocks} blocks")
    return tuple(map(bool, listed))


def _read(config: HubConfig, head: Head) -> Architecture:
    given = {key: value for key, value in config.values.items() if value is not None}
    sizes = {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "vocab_size": 128_256}
    config = HubConfig({**sizes, "max_position_embeddings": 32_768, **given})
    blocks = config.integer("num_hidden_layers", 36)
    rotates = _rotates(config, blocks)
    window = config.integer("sliding_window", 0) if config.flag("use_sliding_window", False) else 0
    default = [SLIDING if window and not turned else FULL for turned in rotates]
    kinds = layer_kinds(config, blocks, default)
    bias = config.flag("attention_bias", False)
    return read_decoder(
        "smollm3",
        config,
        head,
        kv_heads=4,
        base=2_000_000.0,
        tied=True,
        rotation=tuple(0 if turned else -1 for turned in rotates),
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


SMOLLM3 = Family(
    name="smollm3",
    model_types=("smollm3",),
    classes=causal_class("SmolLM3ForCausalLM"),
    read=_read,
    dialects=lambda _: (decoder_names(), gguf_names()),
    shapes=decoder_shapes,
    prefix="model.",
    unprefixed=("lm_head",),
    decodes=True,
)
