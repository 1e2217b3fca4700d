"""Layers of ELECTRA: BERT's, with or without narrow embeddings."""

from __future__ import annotations

from torch import nn

from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import MaskBias
from pipeedge.models.families.albert import NarrowOptions
from pipeedge.models.layers.albert import NarrowEmbeddings
from pipeedge.models.layers.bert import TextEmbeddings, post_norm_part, text_head
from pipeedge.models.layers.parts import FamilyLayers

__all__ = ["ELECTRA_LAYERS"]


def _embeddings(architecture: Architecture) -> nn.Module:
    narrow = architecture.own(NarrowOptions).embedding != architecture.hidden
    return NarrowEmbeddings(architecture) if narrow else TextEmbeddings(architecture)


ELECTRA_LAYERS = FamilyLayers(embeddings=_embeddings, part=post_norm_part, head=text_head, shared=MaskBias)
