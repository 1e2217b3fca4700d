"""Layers of Vision Transformers: norms come before attention and MLP."""

from __future__ import annotations

import torch
from torch import nn

from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import Bias, attend, norm
from pipeedge.models.layers.parts import FamilyLayers, cycle
from pipeedge.models.layers.patches import PatchEmbedding
from pipeedge.models.layers.positions import placed
from pipeedge.models.linear import Linear

__all__ = ["FirstTokenHead", "ImageEmbeddings", "VIT_LAYERS", "pre_norm_part"]


class ImageEmbeddings(nn.Module):
    """Patches and class token, with learnt positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden = architecture.hidden
        image = architecture.image
        self.patch = PatchEmbedding(image, hidden)
        self.cls_token = nn.Parameter(torch.empty(1, 1, hidden, device="meta"))
        self.position = nn.Parameter(torch.empty(1, image.trained_tokens, hidden, device="meta"))
        self.image = image

    def prefix(self) -> tuple[torch.Tensor, ...]:
        """Return the tokens in front of the patches, [1, 1, D] each."""
        return (self.cls_token,)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        patches = self.patch(pixel_values)
        prefix = [token.expand(patches.shape[0], -1, -1) for token in self.prefix()]
        return (torch.cat([*prefix, patches], dim=1).add_(placed(self.position, self.image)),)


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


VIT_LAYERS = FamilyLayers(embeddings=ImageEmbeddings, part=pre_norm_part, head=FirstTokenHead)
