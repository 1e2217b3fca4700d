"""The layers of every family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pipeedge.models.architecture import Architecture
from pipeedge.models.layers.albert import ALBERT_LAYERS
from pipeedge.models.layers.bert import BERT_LAYERS
from pipeedge.models.layers.clip import CLIP_TEXT_LAYERS, CLIP_VISION_LAYERS
from pipeedge.models.layers.deit import DEIT_LAYERS
from pipeedge.models.layers.dinov2 import DINOV2_LAYERS
from pipeedge.models.layers.dinov3 import DINOV3_LAYERS
from pipeedge.models.layers.distilbert import DISTILBERT_LAYERS
from pipeedge.models.layers.electra import ELECTRA_LAYERS
from pipeedge.models.layers.modernbert import MODERNBERT_LAYERS
from pipeedge.models.layers.mpnet import MPNET_LAYERS
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.layers.roberta import ROBERTA_LAYERS
from pipeedge.models.layers.siglip import SIGLIP_TEXT_LAYERS, SIGLIP_VISION_LAYERS
from pipeedge.models.layers.vit import VIT_LAYERS

__all__ = ["LAYERS", "layers_of"]

LAYERS: Mapping[str, FamilyLayers] = MappingProxyType(
    {
        "vit": VIT_LAYERS,
        "deit": DEIT_LAYERS,
        "dinov2": DINOV2_LAYERS,
        "dinov2_with_registers": DINOV2_LAYERS,
        "dinov3": DINOV3_LAYERS,
        "clip_vision": CLIP_VISION_LAYERS,
        "siglip_vision": SIGLIP_VISION_LAYERS,
        "bert": BERT_LAYERS,
        "roberta": ROBERTA_LAYERS,
        "distilbert": DISTILBERT_LAYERS,
        "mpnet": MPNET_LAYERS,
        "albert": ALBERT_LAYERS,
        "electra": ELECTRA_LAYERS,
        "modernbert": MODERNBERT_LAYERS,
        "clip_text": CLIP_TEXT_LAYERS,
        "siglip_text": SIGLIP_TEXT_LAYERS,
    }
)
"""Layers by the name of their family (``Family.name``)."""


def layers_of(architecture: Architecture) -> FamilyLayers:
    """Return the layers of the family of ``architecture``."""
    return LAYERS[architecture.family]
