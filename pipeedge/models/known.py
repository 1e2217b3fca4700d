"""The models that are known by name: their configurations are in the package, so they need no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pipeedge.models.architecture import Architecture, ImageInput, TextInput
from pipeedge.models.families.bert import BERT
from pipeedge.models.families.deit import DEIT
from pipeedge.models.families.vit import VIT
from pipeedge.models.family import Family
from pipeedge.models.outline import Outline

__all__ = ["KNOWN"]


def _image(
    family: Family, hidden: int, blocks: int, heads: int, *, patch: int = 16, labels: int = 1000
) -> Architecture:
    distilled = family is DEIT
    return Architecture(
        family=family.name,
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        intermediate=4 * hidden,
        eps=1e-12,
        input=ImageInput((224, 224), (patch, patch), 3, prefix_tokens=2 if distilled else 1),
        head="distilled" if distilled else "classifier",
        num_labels=labels,
    )


def _text(hidden: int, blocks: int, heads: int, *, labels: int = 0) -> Architecture:
    return Architecture(
        family=BERT.name,
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        intermediate=4 * hidden,
        eps=1e-12,
        input=TextInput(30522, 512, 2),
        head="classifier" if labels else "vector",
        num_labels=labels,
        pooler=True,
        pooler_size=hidden,
    )


KNOWN: Mapping[str, Outline] = MappingProxyType(
    {
        name: Outline(name=name, config=config, labels=labels, directory=None, default_weights=Path(file))
        for name, config, file, labels in (
            ("google/vit-base-patch16-224", _image(VIT, 768, 12, 12), "ViT-B_16-224.npz", None),
            ("google/vit-large-patch16-224", _image(VIT, 1024, 24, 16), "ViT-L_16-224.npz", None),
            (
                "google/vit-huge-patch14-224-in21k",
                _image(VIT, 1280, 32, 16, patch=14, labels=21843),
                "ViT-H_14.npz",
                None,
            ),
            (
                "facebook/deit-base-distilled-patch16-224",
                _image(DEIT, 768, 12, 12),
                "DeiT_B_distilled.npz",
                None,
            ),
            (
                "facebook/deit-small-distilled-patch16-224",
                _image(DEIT, 384, 12, 6),
                "DeiT_S_distilled.npz",
                None,
            ),
            (
                "facebook/deit-tiny-distilled-patch16-224",
                _image(DEIT, 192, 12, 3),
                "DeiT_T_distilled.npz",
                None,
            ),
            ("bert-base-uncased", _text(768, 12, 12), "BERT-B.npz", None),
            ("bert-large-uncased", _text(1024, 24, 16), "BERT-L.npz", None),
            (
                "textattack/bert-base-uncased-CoLA",
                _text(768, 12, 12, labels=2),
                "BERT-B-CoLA.npz",
                ("unacceptable", "acceptable"),
            ),
        )
    }
)
