"""GPT-2: learned positions, LayerNorms, biases, and weights that are stored transposed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeedge.models.architecture import Architecture
from pipeedge.models.families.decoder import decoder_shapes, gguf_names, read_decoder
from pipeedge.models.family import Family, Head, ModelClass
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.weights.names import Dialect, FileTensor, modules, tensors

if TYPE_CHECKING:
    import torch

__all__ = ["GPT2"]


def _read(config: HubConfig, head: Head) -> Architecture:
    config.refuse("scale_attn_by_inverse_layer_idx", "attention with a factor of each block is not supported")
    hidden = config.integer("n_embd", 768)
    same = {
        "hidden_size": hidden,
        "num_hidden_layers": config.integer("n_layer", 12),
        "num_attention_heads": config.integer("n_head", 12),
        "intermediate_size": config.integer("n_inner", 4 * hidden),
        "max_position_embeddings": config.integer("n_positions", 1024),
        "vocab_size": config.integer("vocab_size", 50_257),
        "rms_norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }
    options: dict[str, Any] = {} if config.flag("scale_attn_weights", True) else {"scale": 1.0}
    return read_decoder(
        "gpt2",
        HubConfig(same),
        head,
        rotary=(),
        rotation=(-1,) * config.integer("n_layer", 12),
        activation=config.text("activation_function", "gelu_new"),
        qkv_bias=True,
        proj_bias=True,
        mlp_bias=True,
        layer_norm=True,
        gated=False,
        fused=True,
        learned_positions=True,
        **options,
    )


def _transposed(tensor: torch.Tensor, _heads: int) -> torch.Tensor:
    return tensor.t()


def _dialect() -> Dialect:
    layers = {
        "qkv": "attn.c_attn",
        "proj": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
    names = modules(
        {
            "block.{n}.norm1": ("h.{n}.ln_1",),
            "block.{n}.norm2": ("h.{n}.ln_2",),
            "head.norm": ("ln_f",),
            **{f"block.{{n}}.{ours}": (f"h.{{n}}.{theirs}",) for ours, theirs in layers.items()},
        }
    )
    turned = {
        f"block.{{n}}.{ours}.weight": (FileTensor(f"h.{{n}}.{theirs}.weight", _transposed),)
        for ours, theirs in layers.items()
    }
    ends = {
        "embeddings.word": "wte.weight",
        "embeddings.position": "wpe.weight",
        "head.scores.weight": "lm_head.weight",
    }
    return {**names, **turned, **tensors(ends)}


_NAMES = _dialect()
_GGUF_NAMES = gguf_names(qkv="attn_qkv")

GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    classes={"GPT2LMHeadModel": ModelClass("next", sign="wte.weight")},
    read=_read,
    dialects=lambda _: (_NAMES, _GGUF_NAMES),
    shapes=decoder_shapes,
    prefix="transformer.",
    unprefixed=("lm_head",),
    decodes=True,
)
