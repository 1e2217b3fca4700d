"""Layers of DeiT: a ViT with a distillation token."""

from __future__ import annotations

import torch
from torch import nn

from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import norm
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.layers.vit import FirstTokenHead, ImageEmbeddings, pre_norm_part
from pipeedge.models.linear import Linear

__all__ = ["DEIT_LAYERS"]


class DistilledEmbeddings(ImageEmbeddings):
    """Class token, distillation token and patches, with learnt positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture)
        self.distillation_token = nn.Parameter(torch.empty(1, 1, architecture.hidden, device="meta"))

    def prefix(self) -> tuple[torch.Tensor, ...]:
        """Return the tokens in front of the patches, [1, 1, D] each."""
        return self.cls_token, self.distillation_token


class DistilledHead(nn.Module):
    """Final norm, then the mean of the two classifiers' logits."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm = norm(architecture)
        self.classifier = Linear(architecture.hidden, architecture.num_labels)
        self.distillation_classifier = Linear(architecture.hidden, architecture.num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, classes]."""
        tokens = self.norm(hidden[:, :2].contiguous())
        logits: torch.Tensor = self.classifier(tokens[:, 0]) + self.distillation_classifier(tokens[:, 1])
        return (logits / 2).float()


def _head(architecture: Architecture) -> nn.Module:
    return DistilledHead(architecture) if architecture.head == "distilled" else FirstTokenHead(architecture)


DEIT_LAYERS = FamilyLayers(embeddings=DistilledEmbeddings, part=pre_norm_part, head=_head)
