"""Layers of the towers of SigLIP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import MaskBias, norm
from pipeedge.models.layers.clip import PlainTextEmbeddings
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.layers.patches import PatchEmbedding
from pipeedge.models.layers.positions import placed
from pipeedge.models.layers.vit import pre_norm_part
from pipeedge.models.linear import Linear

__all__ = ["SIGLIP_TEXT_LAYERS", "SIGLIP_VISION_LAYERS"]


class PatchEmbeddings(nn.Module):
    """Patches with learnt positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, image = architecture.hidden, architecture.image
        self.patch = PatchEmbedding(image, hidden)
        self.position = nn.Parameter(torch.empty(image.trained_tokens, hidden, device="meta"))
        self.image = image

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        patches = self.patch(pixel_values)
        return (patches.contiguous().add_(placed(self.position, self.image)),)


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


SIGLIP_VISION_LAYERS = FamilyLayers(embeddings=PatchEmbeddings, part=pre_norm_part, head=SiglipImageHead)

SIGLIP_TEXT_LAYERS = FamilyLayers(
    embeddings=PlainTextEmbeddings, part=pre_norm_part, head=LastTokenHead, shared=MaskBias
)
