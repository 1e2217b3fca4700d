"""Vision Transformers, https://arxiv.org/abs/2010.11929: norms come before attention and MLP."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.architecture import Architecture, ImageInput
from pipeedge.models.attention import Bias, attend, norm
from pipeedge.models.family import Family, Head, ModelClass, cycle
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.linear import Linear
from pipeedge.models.weights.names import Dialect, FileTensor, modules, same, tensors

__all__ = [
    "IMAGE_HUB",
    "IMAGE_MEMORY",
    "TIMM",
    "VIT",
    "FirstTokenHead",
    "ImageEmbeddings",
    "pooler_names",
    "pre_norm_part",
    "read_image_model",
]


class ImageEmbeddings(nn.Module):
    """Patches and class token, with learnt positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden = architecture.hidden
        image = architecture.image
        patch = image.patch_size
        self.patch = nn.Conv2d(image.channels, hidden, patch, stride=patch, device="meta")
        self.cls_token = nn.Parameter(torch.empty(1, 1, hidden, device="meta"))
        self.position = nn.Parameter(torch.empty(1, image.tokens, hidden, device="meta"))

    def prefix(self) -> tuple[torch.Tensor, ...]:
        """Return the tokens in front of the patches, [1, 1, D] each."""
        return (self.cls_token,)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        patches = self.patch(pixel_values.to(self.position.dtype)).flatten(2).transpose(1, 2)
        prefix = [token.expand(patches.shape[0], -1, -1) for token in self.prefix()]
        return (torch.cat([*prefix, patches], dim=1).add_(self.position),)


class ViTAttention(nn.Module):
    """Part 0: norm, queries, keys and values in one product, then attention."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.heads = architecture.heads
        self.norm1 = norm(architecture)
        self.qkv = Linear(architecture.hidden, 3 * architecture.hidden, bias=architecture.qkv_bias)

    def forward(self, hidden: torch.Tensor, bias: Bias) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> context [N, T, D], skip [N, T, D]."""
        return attend(self.qkv(hidden, norm=self.norm1), self.heads, bias), hidden


class ViTProjection(nn.Module):
    """Part 1: projection of the heads' outputs, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.proj = Linear(architecture.hidden, architecture.hidden)

    def forward(self, context: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute context [N, T, D], skip [N, T, D] -> [N, T, D]."""
        return (self.proj(context, residual=skip),)


class ViTExpansion(nn.Module):
    """Part 2: norm, then the upper half of the MLP."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm2 = norm(architecture)
        self.up = Linear(architecture.hidden, architecture.intermediate, activation=architecture.activation)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> inner [N, T, I], skip [N, T, D]."""
        return self.up(hidden, norm=self.norm2), hidden


class ViTContraction(nn.Module):
    """Part 3: the lower half of the MLP, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.down = Linear(architecture.intermediate, architecture.hidden)

    def forward(self, inner: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute inner [N, T, I], skip [N, T, D] -> [N, T, D]."""
        return (self.down(inner, residual=skip),)


pre_norm_part = cycle(ViTAttention, ViTProjection, ViTExpansion, ViTContraction)
"""The four parts of a block whose norms come first."""


class FirstTokenHead(nn.Module):
    """Final norm, then pooler and classifier on the first token, as far as the model has them."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm = norm(architecture)
        self.pooler = Linear(architecture.hidden, architecture.pooler_size) if architecture.pooler else None
        self.activation = ACTIVATIONS[architecture.pooler_activation]
        width = architecture.pooler_size if architecture.pooler else architecture.hidden
        self.classifier = None if architecture.head == "vector" else Linear(width, architecture.num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, classes], or [N, D] without a classifier."""
        # The norm treats each token separately, so only the first token needs it.
        first: torch.Tensor = self.norm(hidden[:, 0].contiguous())
        if self.pooler is not None:
            first = self.activation(self.pooler(first))
        if self.classifier is not None:
            first = self.classifier(first)
        return first.float()


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
    embeddings=ImageEmbeddings,
    part=pre_norm_part,
    head=FirstTokenHead,
    prefix="vit.",
    optional_pooler=pooler_names,
)
