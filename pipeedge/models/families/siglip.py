"""SigLIP, https://arxiv.org/abs/2303.15343: a vision and a text tower, whose vectors are compared.

Both have ViT's blocks. The vision tower has no class token: its vector is what a learnt query gets from all
patches. The vector of the text tower is the last token's, so every sentence is padded to the same length;
padding is attended to like words, unless a mask says otherwise.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.base.errors import ModelError
from pipeedge.models.architecture import Architecture, ImageInput, TextInput
from pipeedge.models.attention import MASK, MaskBias, norm
from pipeedge.models.families.clip import TOWER_BLOCKS, TOWER_TEXT, PlainTextEmbeddings, tower_config
from pipeedge.models.families.vit import pre_norm_part
from pipeedge.models.family import Family, Head, ImageDefaults, ModelClass
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.linear import Linear
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["SIGLIP_TEXT", "SIGLIP_VISION"]


class PatchEmbeddings(nn.Module):
    """Patches with learnt positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, image = architecture.hidden, architecture.image
        patch = image.patch_size
        self.patch = nn.Conv2d(image.channels, hidden, patch, stride=patch, device="meta")
        self.position = nn.Parameter(torch.empty(image.tokens, hidden, device="meta"))

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        patches = self.patch(pixel_values.to(self.position.dtype)).flatten(2).transpose(1, 2)
        return (patches.contiguous().add_(self.position),)


class QueryPooling(nn.Module):
    """Attention of one learnt query to all tokens, then an MLP with a residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, inner = architecture.hidden, architecture.intermediate
        self.heads = architecture.heads
        self.probe = nn.Parameter(torch.empty(1, 1, hidden, device="meta"))
        self.in_proj = Linear(hidden, 3 * hidden)
        self.out_proj = Linear(hidden, hidden)
        self.norm = norm(architecture)
        self.up = Linear(hidden, inner, activation=architecture.activation)
        self.down = Linear(inner, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, D]."""
        items, _, width = hidden.shape
        weight, bias = self.in_proj.weight, self.in_proj.bias
        query = F.linear(self.probe, weight[:width], bias[:width]).expand(items, -1, -1)
        key, value = F.linear(hidden, weight[width:], bias[width:]).chunk(2, -1)
        by_head = (items, -1, self.heads, width // self.heads)
        query, key, value = (each.reshape(by_head).transpose(1, 2) for each in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(items, width)
        pooled: torch.Tensor = self.out_proj(context)
        result: torch.Tensor = self.down(self.up(self.norm(pooled)), residual=pooled)
        return result


class SiglipImageHead(nn.Module):
    """Final norm, then the pooled vector, or the classes of the mean of the patches."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm = norm(architecture)
        vector = architecture.head == "vector"
        self.pooling = QueryPooling(architecture) if vector else None
        self.classifier = None if vector else Linear(architecture.hidden, architecture.num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, classes], or [N, D] without a classifier."""
        result: torch.Tensor = self.norm(hidden)
        if self.pooling is not None:
            result = self.pooling(result)
        if self.classifier is not None:
            result = self.classifier(result.mean(1))
        return result.float()


class LastTokenHead(nn.Module):
    """Final norm and projection of the last token."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm = norm(architecture)
        self.projection = Linear(architecture.hidden, architecture.pooler_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, output]."""
        last: torch.Tensor = self.projection(self.norm(hidden[:, -1].contiguous()))
        return last.float()


# The configuration ------------------------------------------------------------------------------------


def _read_vision(config: HubConfig, head: Head) -> Architecture:
    own = tower_config(config, "vision")
    if not own.flag("vision_use_head", True) and head.kind == "vector":
        raise ModelError("vision_use_head is false: a vision tower without its pooling head is not supported")
    sizes = own.block_sizes(activation="gelu_pytorch_tanh")
    return Architecture(
        family="siglip_vision",
        **{**sizes, "eps": own.number("layer_norm_eps", 1e-6)},
        input=ImageInput(
            own.square("image_size", 224),
            own.square("patch_size", 16),
            own.integer("num_channels", 3),
            prefix_tokens=0,
        ),
        head=head.kind,
        num_labels=head.num_labels,
    )


def _read_text(config: HubConfig, head: Head) -> Architecture:
    own = tower_config(config, "text")
    sizes = own.block_sizes(activation="gelu_pytorch_tanh")
    return Architecture(
        family="siglip_text",
        **{**sizes, "eps": own.number("layer_norm_eps", 1e-6)},
        input=TextInput(
            own.integer("vocab_size", 32000),
            own.integer("max_position_embeddings", 64),
        ),
        head=head.kind,
        pooler=True,
        pooler_size=own.integer("projection_size", sizes["hidden"]),
    )


# Names in files ---------------------------------------------------------------------------------------

_VISION: Dialect = {
    **TOWER_BLOCKS,
    **tensors(
        {
            "embeddings.position": "embeddings.position_embedding.weight",
            "head.pooling.probe": "head.probe",
            "head.pooling.in_proj.weight": "head.attention.in_proj_weight",
            "head.pooling.in_proj.bias": "head.attention.in_proj_bias",
        }
    ),
    **modules(
        {
            "embeddings.patch": ("embeddings.patch_embedding",),
            "head.norm": ("post_layernorm",),
            "head.pooling.out_proj": ("head.attention.out_proj",),
            "head.pooling.norm": ("head.layernorm",),
            "head.pooling.up": ("head.mlp.fc1",),
            "head.pooling.down": ("head.mlp.fc2",),
            "head.classifier": ("classifier",),
        }
    ),
}
_TEXT: Dialect = {
    **TOWER_TEXT,
    **modules({"head.norm": ("final_layer_norm",), "head.projection": ("head",)}),
}

SIGLIP_VISION = Family(
    name="siglip_vision",
    model_types=("siglip", "siglip_vision_model"),
    classes=MappingProxyType(
        {
            "SiglipModel": ModelClass("vector"),
            "SiglipVisionModel": ModelClass("vector"),
            "SiglipForImageClassification": ModelClass("classifier", sign="classifier.weight"),
        }
    ),
    tower="vision",
    read=_read_vision,
    dialects=lambda _: (_VISION,),
    embeddings=PatchEmbeddings,
    part=pre_norm_part,
    head=SiglipImageHead,
    prefix="vision_model.",
    image_defaults=ImageDefaults(bicubic=True),
)

SIGLIP_TEXT = Family(
    name="siglip_text",
    model_types=("siglip", "siglip_text_model"),
    classes=MappingProxyType({"SiglipModel": ModelClass("vector"), "SiglipTextModel": ModelClass("vector")}),
    tower="text",
    read=_read_text,
    dialects=lambda _: (_TEXT,),
    embeddings=PlainTextEmbeddings,
    part=pre_norm_part,
    head=LastTokenHead,
    prefix="text_model.",
    carried=(MASK,),
    shared=MaskBias,
    full_length=True,
)
