"""Granite 3: Llama's blocks with factors of embeddings, attention, residuals and scores."""

from __future__ import annotations

from pipeedge.base.errors import ModelError
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

__all__ = ["GRANITE"]


def _read(config: HubConfig, head: Head) -> Architecture:
    bias, divisor = config.flag("attention_bias", False), config.number("logits_scaling", 1.0)
    if divisor <= 0:
        raise ModelError(f"logits_scaling is {divisor}; it must be above 0")
    return read_decoder(
        "granite",
        config,
        head,
        scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / divisor,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


GRANITE = Family(
    name="granite",
    model_types=("granite",),
    classes=causal_class("GraniteForCausalLM"),
    read=_read,
    dialects=lambda _: (decoder_names(), gguf_names()),
    shapes=decoder_shapes,
    prefix="model.",
    unprefixed=("lm_head",),
    decodes=True,
)
