"""Phi-3, 3.5 and 4-mini, https://arxiv.org/abs/2404.14219: fused weights, scaled rotations."""

from __future__ import annotations

from pipeedge.models.architecture import Architecture
from pipeedge.models.families.decoder import (
    causal_class,
    decoder_names,
    decoder_shapes,
    gguf_names,
    read_decoder,
)
from pipeedge.models.family import Family, Head
from pipeedge.models.hub_config import HubConfig

__all__ = ["PHI3"]


def _read(config: HubConfig, head: Head) -> Architecture:
    given = {key: value for key, value in config.values.items() if value is not None}
    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32_064, "rms_norm_eps": 1e-5}
    lengths = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
    config = HubConfig({**sizes, **lengths, **given})
    window = config.integer("sliding_window", 0)
    return read_decoder(
        "phi3", config, head, fused=True, windows=(window,) * config.integer("num_hidden_layers", 32)
    )


PHI3 = Family(
    name="phi3",
    model_types=("phi3",),
    classes=causal_class("Phi3ForCausalLM"),
    read=_read,
    dialects=lambda _: (
        decoder_names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
        gguf_names(qkv="attn_qkv", gate_up="ffn_up"),
    ),
    shapes=decoder_shapes,
    prefix="model.",
    unprefixed=("lm_head",),
    decodes=True,
)
