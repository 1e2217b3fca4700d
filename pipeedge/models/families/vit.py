"""Vision Transformers, https://arxiv.org/abs/2010.11929: norms come before attention and MLP."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from pipeedge.models.architecture import Architecture, ImageInput
from pipeedge.models.family import Family, Head, ModelClass
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.weights.names import Dialect, FileTensor, modules, same, tensors

if TYPE_CHECKING:
    import torch
from pipeedge.base.shapes import Shape
from pipeedge.models.shapes import block_shapes, first_token_shapes, norm_shapes, patch_shapes

__all__ = ["IMAGE_HUB", "IMAGE_MEMORY", "TIMM", "VIT", "pooler_names", "read_image_model"]


# The configuration ------------------------------------------------------------------------------------


def read_image_model(family: str, prefix_tokens: int, config: HubConfig, head: Head) -> Architecture:
    """Return the architecture of a ViT or DeiT."""
    hidden = config.integer("hidden_size", 768)
    pooler_size = config.integer("pooler_output_size", hidden) or hidden
    return Architecture(
        family=family,
        **config.block_sizes(),
        input=ImageInput(
            config.pair("image_size", 224),
            config.pair("patch_size", 16),
            config.integer("num_channels", 3),
            prefix_tokens,
        ),
        head=head.kind,
        qkv_bias=config.flag("qkv_bias", True),
        pooler=head.pooler,
        pooler_size=pooler_size if head.pooler else 0,
        pooler_activation=config.text("pooler_act", "tanh"),
        num_labels=head.num_labels,
    )


def first_token_head(architecture: Architecture) -> dict[str, Shape]:
    """Return the tensors of ``layers.vit.FirstTokenHead``."""
    return {
        **norm_shapes("head.norm", architecture.hidden),
        **first_token_shapes(architecture, pooler_size=architecture.pooler_size),
    }


def class_token_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return the tensors of patches behind a class token, with learnt positions."""
    hidden = architecture.hidden
    return {
        "embeddings.cls_token": (1, 1, hidden),
        "embeddings.position": (1, architecture.image.trained_tokens, hidden),
        **patch_shapes(architecture),
    }


def _shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    return {
        **class_token_shapes(architecture),
        **block_shapes(architecture),
        **first_token_head(architecture),
    }


# Names in files ---------------------------------------------------------------------------------------


def _kernel(tensor: torch.Tensor, _heads: int) -> torch.Tensor:
    """View [out, in] as [in, out]."""
    return tensor.t()


def _kernel_to_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """View [out, in] as [in, heads, out / heads]."""
    return tensor.t().view(tensor.shape[1], heads, -1)


def _kernel_from_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """View [out, in] as [heads, in / heads, out]."""
    return tensor.t().view(heads, -1, tensor.shape[0])


def _bias_to_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """View [out] as [heads, out / heads]."""
    return tensor.view(heads, -1)


def _patch_kernel(tensor: torch.Tensor, _heads: int) -> torch.Tensor:
    """View [out, in, height, width] as [height, width, in, out]."""
    return tensor.permute(2, 3, 1, 0)


_IMAGE_TOKENS = tensors(
    {
        "embeddings.cls_token": "embeddings.cls_token",
        "embeddings.distillation_token": "embeddings.distillation_token",
        "embeddings.position": "embeddings.position_embeddings",
    }
)
_IMAGE_ENDS = {
    "embeddings.patch": ("embeddings.patch_embeddings.projection",),
    "head.norm": ("layernorm",),
    "head.pooler": ("pooler.dense",),
    "head.distillation_classifier": ("distillation_classifier",),
}

IMAGE_HUB: Dialect = {
    **_IMAGE_TOKENS,
    **modules(
        {
            **_IMAGE_ENDS,
            "block.{n}.norm1": ("encoder.layer.{n}.layernorm_before",),
            "block.{n}.qkv": tuple(
                f"encoder.layer.{{n}}.attention.attention.{part}" for part in ("query", "key", "value")
            ),
            "block.{n}.proj": ("encoder.layer.{n}.attention.output.dense",),
            "block.{n}.norm2": ("encoder.layer.{n}.layernorm_after",),
            "block.{n}.up": ("encoder.layer.{n}.intermediate.dense",),
            "block.{n}.down": ("encoder.layer.{n}.output.dense",),
        }
    ),
}
"""ViT and DeiT on the Hugging Face hub, and as transformers saves them."""

IMAGE_MEMORY: Dialect = {
    **_IMAGE_TOKENS,
    **modules(
        {
            **_IMAGE_ENDS,
            "block.{n}.norm1": ("layers.{n}.layernorm_before",),
            "block.{n}.qkv": tuple(f"layers.{{n}}.attention.{part}_proj" for part in ("q", "k", "v")),
            "block.{n}.proj": ("layers.{n}.attention.o_proj",),
            "block.{n}.norm2": ("layers.{n}.layernorm_after",),
            "block.{n}.up": ("layers.{n}.mlp.fc1",),
            "block.{n}.down": ("layers.{n}.mlp.fc2",),
        }
    ),
}
"""ViT and DeiT in a ``state_dict()`` of transformers 5."""

TIMM: Dialect = {
    **tensors(
        {
            "embeddings.cls_token": "cls_token",
            "embeddings.distillation_token": "dist_token",
            "embeddings.position": "pos_embed",
        }
    ),
    **modules(
        {
            "embeddings.patch": ("patch_embed.proj",),
            "block.{n}.norm1": ("blocks.{n}.norm1",),
            "block.{n}.qkv": ("blocks.{n}.attn.qkv",),
            "block.{n}.proj": ("blocks.{n}.attn.proj",),
            "block.{n}.norm2": ("blocks.{n}.norm2",),
            "block.{n}.up": ("blocks.{n}.mlp.fc1",),
            "block.{n}.down": ("blocks.{n}.mlp.fc2",),
            "head.norm": ("norm",),
            "head.pooler": ("pre_logits.fc",),
            "head.classifier": ("head",),
            "head.distillation_classifier": ("head_dist",),
        }
    ),
}
"""timm's files, and Facebook's own DeiT files."""


def _google() -> Dialect:
    block = "Transformer/encoderblock_{n}"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    table: dict[str, tuple[FileTensor, ...]] = {
        "embeddings.cls_token": (FileTensor("cls", same),),
        "embeddings.position": (FileTensor("Transformer/posembed_input/pos_embedding", same),),
        "embeddings.patch.weight": (FileTensor("embedding/kernel", _patch_kernel),),
        "embeddings.patch.bias": (FileTensor("embedding/bias", same),),
        "block.{n}.qkv.weight": tuple(
            FileTensor(f"{attention}/{part}/kernel", _kernel_to_heads) for part in ("query", "key", "value")
        ),
        "block.{n}.qkv.bias": tuple(
            FileTensor(f"{attention}/{part}/bias", _bias_to_heads) for part in ("query", "key", "value")
        ),
        "block.{n}.proj.weight": (FileTensor(f"{attention}/out/kernel", _kernel_from_heads),),
        "block.{n}.proj.bias": (FileTensor(f"{attention}/out/bias", same),),
    }
    for ours, theirs in {
        "block.{n}.norm1": f"{block}/LayerNorm_0",
        "block.{n}.norm2": f"{block}/LayerNorm_2",
        "head.norm": "Transformer/encoder_norm",
    }.items():
        table[f"{ours}.weight"] = (FileTensor(f"{theirs}/scale", same),)
        table[f"{ours}.bias"] = (FileTensor(f"{theirs}/bias", same),)
    for ours, theirs in {
        "block.{n}.up": f"{block}/MlpBlock_3/Dense_0",
        "block.{n}.down": f"{block}/MlpBlock_3/Dense_1",
        "head.pooler": "pre_logits",
        "head.classifier": "head",
    }.items():
        table[f"{ours}.weight"] = (FileTensor(f"{theirs}/kernel", _kernel),)
        table[f"{ours}.bias"] = (FileTensor(f"{theirs}/bias", same),)
    return table


_GOOGLE = _google()
"""Google's ViT files, https://github.com/google-research/vision_transformer."""


def pooler_names(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of a pooler that this head uses, if it is in the file.

    The hub's image classifiers use the first token directly, even if their file contains a pooler left over
    from pre-training. In Google's and timm's files, ``pre_logits`` does precede the classifier.
    """
    before_classifier = ("pre_logits/bias", "pre_logits.fc.bias")
    return (*before_classifier, "pooler.dense.bias") if architecture.head == "vector" else before_classifier


_CLASSIFIER = modules({"head.classifier": ("classifier",)})
_DIALECTS: tuple[Dialect, ...] = (
    {**IMAGE_HUB, **_CLASSIFIER},
    {**IMAGE_MEMORY, **_CLASSIFIER},
    _GOOGLE,
    TIMM,
)

VIT = Family(
    name="vit",
    model_types=("vit",),
    classes=MappingProxyType(
        {
            "ViTForImageClassification": ModelClass("classifier", sign="classifier.weight"),
            "ViTModel": ModelClass("vector", pooler=True),
        }
    ),
    read=partial(read_image_model, "vit", 1),
    dialects=lambda _: _DIALECTS,
    shapes=_shapes,
    prefix="vit.",
    optional_pooler=pooler_names,
)
