"""Layers of ALBERT: BERT's, with narrow embeddings."""

from __future__ import annotations

import torch

from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import MaskBias
from pipeedge.models.families.albert import NarrowOptions
from pipeedge.models.layers.bert import TextEmbeddings, post_norm_part, text_head
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.linear import Linear

__all__ = ["ALBERT_LAYERS", "NarrowEmbeddings"]


class NarrowEmbeddings(TextEmbeddings):
    """Embeddings of width E, projected to the hidden size."""

    def __init__(self, architecture: Architecture) -> None:
        width = architecture.own(NarrowOptions).embedding
        super().__init__(architecture, width=width)
        self.projection = Linear(width, architecture.hidden)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embed inputs [N, T] -> [N, T, D], mask [N, T]."""
        embedded, mask = super().forward(input_ids, attention_mask, token_type_ids)
        return self.projection(embedded), mask


ALBERT_LAYERS = FamilyLayers(
    embeddings=NarrowEmbeddings, part=post_norm_part, head=text_head, shared=MaskBias
)
