"""Layers of DistilBERT: BERT's."""

from __future__ import annotations

from pipeedge.models.attention import MaskBias
from pipeedge.models.layers.bert import TextEmbeddings, post_norm_part, text_head
from pipeedge.models.layers.parts import FamilyLayers

__all__ = ["DISTILBERT_LAYERS"]


DISTILBERT_LAYERS = FamilyLayers(
    embeddings=TextEmbeddings, part=post_norm_part, head=text_head, shared=MaskBias
)
