"""Gemma, Gemma 2, https://arxiv.org/abs/2408.00118, and the text of Gemma 3, https://arxiv.org/abs/2503.19786.

Norms stand before and, from Gemma 2 on, behind attention and MLP, with weights that are stored minus 1;
embeddings are scaled by the root of their width. Gemma 3 rotates with another base where a window limits
attention.
"""

from __future__ import annotations

from typing import Any

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

__all__ = ["GEMMA"]

_SIZES: dict[str, dict[str, int]] = {
    "gemma": {
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 24_576,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    },
    "gemma2": {"vocab_size": 256_000, "max_position_embeddings": 8192},
    "gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072},
}
"""Sizes that a file may leave out, besides those of ``_LATER``."""
_LATER = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 9216,
}
_HEAD = 256


def _read(config: HubConfig, head: Head) -> Architecture:
    kind = config.text("model_type", "gemma2")
    given = {key: value for key, value in config.values.items() if value is not None}
    config = HubConfig({**_LATER, **_SIZES[kind], **given})
    config.refuse("use_bidirectional_attention", "a text cannot be generated with attention to what follows")
    blocks, size = config.integer("num_hidden_layers", 0), config.integer("head_dim", _HEAD)
    activation = config.text("hidden_act" if kind == "gemma" else "hidden_activation", "gelu_pytorch_tanh")
    if kind == "gemma" and activation == "gelu":  # as the first files said, meaning the other one
        activation = "gelu_pytorch_tanh"
    bias = config.flag("attention_bias", False)
    common: dict[str, Any] = {
        "activation": activation,
        "tied": True,
        "head_size": size,
        "norm_offset": True,
        "embedding_scale": config.integer("hidden_size", 0) ** 0.5,
        "qkv_bias": bias,
        "proj_bias": bias,
    }
    if kind == "gemma":
        return read_decoder("gemma", config, head, **common)
    period = 2 if kind == "gemma2" else config.integer("sliding_window_pattern", 6)
    default = [SLIDING if (block + 1) % max(period, 1) else FULL for block in range(blocks)]
    kinds = layer_kinds(config, blocks, default)
    window = config.integer("sliding_window", 4096)
    common |= {
        "norms": "both",
        "windows": tuple(window if one == SLIDING else 0 for one in kinds),
        "scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "logit_cap": config.number(
            "final_logit_softcapping",
            30.0 if kind == "gemma2" and "final_logit_softcapping" not in given else 0.0,
        ),
        "score_cap": config.number(
            "attn_logit_softcapping",
            50.0 if kind == "gemma2" and "attn_logit_softcapping" not in given else 0.0,
        ),
    }
    if kind == "gemma3_text":
        everywhere = read_rotary(config, size, base=1_000_000.0, kind=FULL)
        nearby = read_rotary(config, size, base_key="rope_local_base_freq", kind=SLIDING, scaled=False)
        common |= {
            "head_norm": "each",
            "rotary": (everywhere, nearby),
            "rotation": tuple(int(one == SLIDING) for one in kinds),
        }
    return read_decoder("gemma", config, head, **common)


def _names(architecture: Architecture) -> Any:
    if architecture.options is not None and getattr(architecture.options, "norms", "") == "before":
        return (decoder_names(), gguf_names())
    return (
        decoder_names(
            end1="post_attention_layernorm",
            norm2="pre_feedforward_layernorm",
            end2="post_feedforward_layernorm",
        ),
        gguf_names(end1="post_attention_norm", end2="post_ffw_norm"),
    )


GEMMA = Family(
    name="gemma",
    model_types=("gemma", "gemma2", "gemma3_text"),
    classes={
        **causal_class("GemmaForCausalLM"),
        **causal_class("Gemma2ForCausalLM"),
        **causal_class("Gemma3ForCausalLM"),
    },
    read=_read,
    dialects=_names,
    shapes=decoder_shapes,
    prefix="model.",
    unprefixed=("lm_head",),
    decodes=True,
)
