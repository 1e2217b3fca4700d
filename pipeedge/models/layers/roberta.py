"""Layers of RoBERTa: BERT's, with positions that skip padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import MaskBias
from pipeedge.models.families.roberta import PaddingOptions
from pipeedge.models.layers.bert import TextEmbeddings, post_norm_part, text_head
from pipeedge.models.layers.parts import FamilyLayers

__all__ = ["PaddedEmbeddings", "ROBERTA_LAYERS"]


class PaddedEmbeddings(TextEmbeddings):
    """Embeddings whose positions are counted from the padding id + 1 and skip padding."""

    def __init__(self, architecture: Architecture) -> None:
        padding = architecture.own(PaddingOptions).padding_id
        super().__init__(architecture, unused=padding + 1)
        self.padding = padding

    def positions(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [N, T, E] of the positions of ``input_ids`` [N, T]."""
        present = input_ids != self.padding
        return F.embedding(present.cumsum(1) * present + self.padding, self.position)


ROBERTA_LAYERS = FamilyLayers(
    embeddings=PaddedEmbeddings, part=post_norm_part, head=text_head, shared=MaskBias
)
