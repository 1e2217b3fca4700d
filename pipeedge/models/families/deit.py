"""Data-efficient image Transformers, https://arxiv.org/abs/2012.12877: a ViT with a distillation token.

A distilled model has a second classifier on that token. At inference, the output is the mean of both
classifiers (section 4 of the paper).
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture
from pipeedge.models.families.vit import (
    IMAGE_HUB,
    IMAGE_MEMORY,
    TIMM,
    class_token_shapes,
    first_token_head,
    pooler_names,
    read_image_model,
)
from pipeedge.models.family import Family, ImageDefaults, ModelClass
from pipeedge.models.shapes import block_shapes, linear_shapes
from pipeedge.models.weights.names import Dialect, modules

__all__ = ["DEIT"]


def _shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    hidden, labels = architecture.hidden, architecture.num_labels
    head = first_token_head(architecture)
    if architecture.head == "distilled":
        head |= linear_shapes("head.distillation_classifier", labels, hidden)
    return {
        **class_token_shapes(architecture),
        "embeddings.distillation_token": (1, 1, hidden),
        **block_shapes(architecture),
        **head,
    }


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
    shapes=_shapes,
    prefix="deit.",
    unprefixed=("classifier", "cls_classifier", "distillation_classifier"),
    optional_pooler=pooler_names,
    image_defaults=ImageDefaults(
        resize=256 / 224, bicubic=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    ),
)
