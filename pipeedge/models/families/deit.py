"""Data-efficient image Transformers, https://arxiv.org/abs/2012.12877: a ViT with a distillation token.

A distilled model has a second classifier on that token. At inference, the output is the mean of both
classifiers (section 4 of the paper).
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import norm
from pipeedge.models.families.vit import (
    IMAGE_HUB,
    IMAGE_MEMORY,
    TIMM,
    FirstTokenHead,
    ImageEmbeddings,
    pooler_names,
    pre_norm_part,
    read_image_model,
)
from pipeedge.models.family import Family, ImageDefaults, ModelClass
from pipeedge.models.linear import Linear
from pipeedge.models.weights.names import Dialect, modules

__all__ = ["DEIT"]


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


def _tables(classifier: str) -> tuple[Dialect, ...]:
    named = modules({"head.classifier": (classifier,)})
    return {**IMAGE_HUB, **named}, {**IMAGE_MEMORY, **named}, TIMM


_PLAIN, _DISTILLED = _tables("classifier"), _tables("cls_classifier")


DEIT = Family(
    name="deit",
    model_types=("deit",),
    classes=MappingProxyType(
        {
            "DeiTForImageClassification": ModelClass("classifier", sign="classifier.weight"),
            "DeiTForImageClassificationWithTeacher": ModelClass("distilled", sign="cls_classifier.weight"),
            "DeiTModel": ModelClass("vector", pooler=True),
        }
    ),
    read=partial(read_image_model, "deit", 2),
    dialects=lambda architecture: _DISTILLED if architecture.head == "distilled" else _PLAIN,
    embeddings=DistilledEmbeddings,
    part=pre_norm_part,
    head=_head,
    prefix="deit.",
    unprefixed=("classifier", "cls_classifier", "distillation_classifier"),
    optional_pooler=pooler_names,
    image_defaults=ImageDefaults(
        resize=256 / 224, bicubic=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    ),
)
