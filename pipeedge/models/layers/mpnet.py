"""Layers of MPNet: BERT's, with a bias for relative positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import DistanceBias, MaskBias
from pipeedge.models.families.mpnet import BUCKETS, MPNetOptions
from pipeedge.models.layers.bert import post_norm_part, text_head
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.layers.roberta import PaddedEmbeddings

__all__ = ["MPNET_LAYERS"]

_FARTHEST = 128
"""Distance in tokens from which on all share the last bucket."""


class RelativeBias(nn.Module):
    """A bias for the distance of each pair of tokens, and the mask."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.padding = MaskBias(architecture)
        buckets = architecture.own(MPNetOptions).buckets
        self.table = nn.Parameter(torch.empty(buckets, architecture.heads, device="meta"))

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> DistanceBias:
        """Return the biases of the mask and of the distance of each pair of tokens."""
        tokens = mask.shape[1]
        ahead = torch.arange(1 - tokens, tokens, device=mask.device)
        return DistanceBias(F.embedding(relative_buckets(ahead), self.table).t(), self.padding(state, mask))


def relative_buckets(ahead: torch.Tensor) -> torch.Tensor:
    """Return the row of the table for each distance, in tokens, from a query to a key.

    Near distances have a row each. Far ones share rows on a logarithmic scale,
    https://arxiv.org/abs/1910.10683, section 2.1.
    """
    half = BUCKETS // 2
    near = half // 2
    distance = ahead.abs()
    share = torch.log(distance.clamp(min=1).float() / near) / math.log(_FARTHEST / near)
    far = near + (share * (half - near)).long()
    return torch.where(distance < near, distance, far.clamp(max=half - 1)) + half * (ahead > 0)


MPNET_LAYERS = FamilyLayers(
    embeddings=PaddedEmbeddings, part=post_norm_part, head=text_head, shared=RelativeBias
)
