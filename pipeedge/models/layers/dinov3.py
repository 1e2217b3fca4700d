"""Layers of DINOv3: DINOv2's with rotary positions of patches."""

from __future__ import annotations

import math

import torch
from torch import nn

from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.attention import attend, norm
from pipeedge.models.families.dinov3 import Dinov3Options
from pipeedge.models.layers.dinov2 import GatedExpansion, ScaledContraction, ScaledProjection
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.layers.patches import PatchEmbedding
from pipeedge.models.layers.vit import ViTExpansion
from pipeedge.models.linear import Linear
from pipeedge.models.rotary import Rotation

__all__ = ["DINOV3_LAYERS"]


class UnplacedEmbeddings(nn.Module):
    """Class token, registers and patches, without positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, image = architecture.hidden, architecture.image
        registers = architecture.own(Dinov3Options).registers
        self.patch = PatchEmbedding(image, hidden)
        self.cls_token = nn.Parameter(torch.empty(1, 1, hidden, device="meta"))
        tokens = torch.empty(1, registers, hidden, device="meta")
        self.registers = nn.Parameter(tokens) if registers else None

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        patches = self.patch(pixel_values)
        tokens = (self.cls_token,) if self.registers is None else (self.cls_token, self.registers)
        return (torch.cat([*(each.expand(len(patches), -1, -1) for each in tokens), patches], dim=1),)


class PatchRotation(nn.Module):
    """Rotation of the patches by the places of their centres, from -1 to 1 along both sides of the image."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        image = architecture.image
        sides = zip(image.image_size, image.patch_size, strict=True)
        self.rows, self.columns = (side // patch for side, patch in sides)
        self.width = architecture.hidden // architecture.heads
        self.base = architecture.own(Dinov3Options).base

    def forward(self, state: torch.Tensor) -> Rotation:
        """Return the rotation, on the device of ``state`` [N, T, D]."""
        frequency = 1 / self.base ** torch.arange(0, 1, 4 / self.width, dtype=torch.float32)
        centres = [2 * torch.arange(0.5, count) / count - 1 for count in (self.rows, self.columns)]
        places = torch.stack(torch.meshgrid(*centres, indexing="ij"), -1).flatten(0, 1)
        return Rotation.by((2 * math.pi * places[:, :, None] * frequency).flatten(1).to(state.device))


class RotatedAttention(nn.Module):
    """Part 0: norm, queries, keys and values in one product, biases of all but keys, then attention."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden = architecture.hidden
        self.heads = architecture.heads
        self.norm1 = norm(architecture)
        self.qkv = Linear(hidden, 3 * hidden, bias=False)
        self.query_bias = nn.Parameter(torch.empty(hidden, device="meta"))
        self.value_bias = nn.Parameter(torch.empty(hidden, device="meta"))

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> context [N, T, D], skip [N, T, D]."""
        qkv = self.qkv(hidden, norm=self.norm1)
        query, _, value = qkv.chunk(3, -1)
        query.add_(self.query_bias)
        value.add_(self.value_bias)
        return attend(qkv, self.heads, None, rotation=rotation), hidden


def _part(architecture: Architecture, layer: int) -> nn.Module:
    expansion = GatedExpansion if architecture.own(Dinov3Options).gated else ViTExpansion
    parts = (RotatedAttention, ScaledProjection, expansion, ScaledContraction)
    return parts[layer % LAYERS_PER_BLOCK](architecture)


class ClassTokenHead(nn.Module):
    """Final norm of the class token."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm = norm(architecture)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, D]."""
        first: torch.Tensor = self.norm(hidden[:, 0].contiguous())
        return first.float()


DINOV3_LAYERS = FamilyLayers(
    embeddings=UnplacedEmbeddings, part=_part, head=ClassTokenHead, shared=PatchRotation
)
