"""Layers of DINOv2: ViT's with a factor for each channel, positions that are interpolated, registers."""

from __future__ import annotations

import math

import torch
from torch import nn

from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.attention import norm
from pipeedge.models.families.dinov2 import DinoOptions
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.layers.patches import PatchEmbedding
from pipeedge.models.layers.positions import placed
from pipeedge.models.layers.vit import ViTAttention, ViTExpansion
from pipeedge.models.linear import Linear

__all__ = ["DINOV2_LAYERS", "GatedExpansion", "ScaledContraction", "ScaledProjection"]


class InterpolatedEmbeddings(nn.Module):
    """Class token, registers and patches, with positions that are interpolated to the size of the images."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, image, options = architecture.hidden, architecture.image, architecture.own(DinoOptions)
        self.image, self.antialias = image, options.antialias
        self.patch = PatchEmbedding(image, hidden)
        self.cls_token = nn.Parameter(torch.empty(1, 1, hidden, device="meta"))
        placed_tokens = 1 + math.prod(image.trained_grid)
        self.position = nn.Parameter(torch.empty(1, placed_tokens, hidden, device="meta"))
        tokens = torch.empty(1, options.registers, hidden, device="meta")
        self.registers = nn.Parameter(tokens) if options.registers else None

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        patches = self.patch(pixel_values)
        items = len(patches)
        position = placed(self.position, self.image, antialias=self.antialias)
        first = (self.cls_token + position[:, :1]).expand(items, -1, -1)
        registers = () if self.registers is None else (self.registers.expand(items, -1, -1),)
        return (torch.cat([first, *registers, patches + position[:, 1:]], dim=1),)


class ScaledProjection(nn.Module):
    """Part 1: projection of the heads' outputs, times a factor for each channel, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.proj = Linear(architecture.hidden, architecture.hidden)
        self.scale1 = nn.Parameter(torch.empty(architecture.hidden, device="meta"))

    def forward(self, context: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute context [N, T, D], skip [N, T, D] -> [N, T, D]."""
        return (torch.addcmul(skip, self.proj(context), self.scale1),)


class GatedExpansion(nn.Module):
    """Part 2: norm, then the upper half of a gated MLP, https://arxiv.org/abs/2002.05202."""

    def __init__(self, architecture: Architecture, *, bias: bool = True) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[architecture.activation]
        self.norm2 = norm(architecture)
        self.up = Linear(architecture.hidden, 2 * architecture.intermediate, bias=bias)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> inner [N, T, I], skip [N, T, D]."""
        inner, gate = self.up(hidden, norm=self.norm2).chunk(2, -1)
        return self.activation(inner.clone(memory_format=torch.contiguous_format)).mul_(gate), hidden


class ScaledContraction(nn.Module):
    """Part 3: the lower half of the MLP, times a factor for each channel, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.down = Linear(architecture.intermediate, architecture.hidden)
        self.scale2 = nn.Parameter(torch.empty(architecture.hidden, device="meta"))

    def forward(self, inner: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute inner [N, T, I], skip [N, T, D] -> [N, T, D]."""
        return (torch.addcmul(skip, self.down(inner), self.scale2),)


def _part(architecture: Architecture, layer: int) -> nn.Module:
    expansion = GatedExpansion if architecture.own(DinoOptions).gated else ViTExpansion
    parts = (ViTAttention, ScaledProjection, expansion, ScaledContraction)
    return parts[layer % LAYERS_PER_BLOCK](architecture)


class TokenAndMeanHead(nn.Module):
    """Final norm, then the first token itself, or the classes of it and of the mean of the patches."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.first_patch = architecture.image.prefix_tokens
        self.norm = norm(architecture)
        vector = architecture.head == "vector"
        self.classifier = None if vector else Linear(2 * architecture.hidden, architecture.num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, classes], or [N, D] without a classifier."""
        if self.classifier is None:
            first: torch.Tensor = self.norm(hidden[:, 0].contiguous())
            return first.float()
        normed = self.norm(hidden)
        both = torch.cat([normed[:, 0], normed[:, self.first_patch :].mean(1)], dim=1)
        logits: torch.Tensor = self.classifier(both)
        return logits.float()


DINOV2_LAYERS = FamilyLayers(embeddings=InterpolatedEmbeddings, part=_part, head=TokenAndMeanHead)
