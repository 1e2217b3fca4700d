"""Llama 2 and 3, https://arxiv.org/abs/2407.21783, SmolLM2, TinyLlama, Mistral and Ministral."""

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

__all__ = ["LLAMA"]

_YARN = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotation of Ministral 3 if the file does not say."""


def _read_mistral(config: HubConfig, head: Head, blocks: int) -> Architecture:
    """Read Mistral's and Ministral's: a window in all blocks, or in those that are listed."""
    kind = config.text("model_type", "mistral")
    window = config.integer("sliding_window", 4096 if "sliding_window" not in config.values else 0)
    if kind == "ministral3":
        window = config.integer("sliding_window", 0)
        if config.values.get("rope_parameters") is None:
            config = HubConfig({**config.values, "rope_parameters": _YARN})
    kinds = (SLIDING,) * blocks
    if kind == "ministral":
        kinds = layer_kinds(config, blocks, (SLIDING if window else FULL,) * blocks)
    rotary = config.section("rope_parameters")
    temper = rotary.number("llama_4_scaling_beta", 0.0) if kind == "ministral3" else 0.0
    return read_decoder(
        "llama",
        config,
        head,
        kv_heads=8,
        head_size=config.integer("head_dim", 128) if kind == "ministral3" else None,
        windows=tuple(window if one == SLIDING else 0 for one in kinds),
        temper=temper,
        temper_from=rotary.integer("original_max_position_embeddings", 16_384) if temper else 0,
    )


def _read(config: HubConfig, head: Head) -> Architecture:
    if config.text("model_type", "llama") != "llama":
        return _read_mistral(config, head, config.integer("num_hidden_layers", 32))
    bias = config.flag("attention_bias", False)
    return read_decoder(
        "llama", config, head, qkv_bias=bias, proj_bias=bias, mlp_bias=config.flag("mlp_bias", False)
    )


LLAMA = Family(
    name="llama",
    model_types=("llama", "mistral", "ministral", "ministral3"),
    classes={
        **causal_class("LlamaForCausalLM"),
        **causal_class("MistralForCausalLM"),
        **causal_class("MinistralForCausalLM"),
        **causal_class("Ministral3ForCausalLM"),
    },
    read=_read,
    dialects=lambda _: (decoder_names(), gguf_names()),
    shapes=decoder_shapes,
    prefix="model.",
    unprefixed=("lm_head",),
    decodes=True,
)
