"""MPNet, https://arxiv.org/abs/2004.09297: BERT's blocks, each with the same bias for relative positions.

The mask travels. Every stage that attends holds the table of the bias, 32 rows with a value for each head,
and computes the bias of each distance anew: sending it would save nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.architecture import Architecture, TextInput, check_range
from pipeedge.models.attention import MASK, DistanceBias, MaskBias
from pipeedge.models.families.bert import encoder_pooler_names, post_norm_part, text_head
from pipeedge.models.families.roberta import DENSE_HEADS, PaddedEmbeddings, PaddingOptions
from pipeedge.models.family import Family, Head, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["MPNET"]

_PADDING_ID = 1
_BUCKETS = 32
"""Number of rows of the table that are used: a half for each direction."""
_MOST_BUCKETS = 1 << 16
_FARTHEST = 128
"""Distance in tokens from which on all share the last bucket."""


@dataclass(frozen=True)
class MPNetOptions(PaddingOptions):
    """Options of an MPNet."""

    buckets: int
    """Number of rows of the table of the relative bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("relative_attention_num_buckets", self.buckets, _MOST_BUCKETS, least=_BUCKETS)


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
    half = _BUCKETS // 2
    near = half // 2
    distance = ahead.abs()
    share = torch.log(distance.clamp(min=1).float() / near) / math.log(_FARTHEST / near)
    far = near + (share * (half - near)).long()
    return torch.where(distance < near, distance, far.clamp(max=half - 1)) + half * (ahead > 0)


def _read(config: HubConfig, head: Head) -> Architecture:
    sizes = config.block_sizes()
    options = MPNetOptions(_PADDING_ID, config.integer("relative_attention_num_buckets", _BUCKETS))
    positions = config.integer("max_position_embeddings", 512) - _PADDING_ID - 1
    return Architecture(
        family="mpnet",
        **sizes,
        input=TextInput(config.integer("vocab_size", 30527), positions),
        head=head.kind,
        pooler=head.pooler,
        pooler_size=sizes["hidden"] if head.pooler else 0,
        num_labels=head.num_labels,
        options=options,
    )


_ENCODER: Dialect = {
    **tensors(
        {
            "embeddings.word": "embeddings.word_embeddings.weight",
            "embeddings.position": "embeddings.position_embeddings.weight",
            "shared.table": "encoder.relative_attention_bias.weight",
        }
    ),
    **modules(
        {
            "embeddings.norm": ("embeddings.LayerNorm",),
            "block.{n}.qkv": tuple(f"encoder.layer.{{n}}.attention.attn.{part}" for part in "qkv"),
            "block.{n}.proj": ("encoder.layer.{n}.attention.attn.o",),
            "block.{n}.norm1": ("encoder.layer.{n}.attention.LayerNorm",),
            "block.{n}.up": ("encoder.layer.{n}.intermediate.dense",),
            "block.{n}.down": ("encoder.layer.{n}.output.dense",),
            "block.{n}.norm2": ("encoder.layer.{n}.output.LayerNorm",),
        }
    ),
}
_DIALECTS = MappingProxyType({kind: ({**_ENCODER, **head},) for kind, head in DENSE_HEADS.items()})

MPNET = Family(
    name="mpnet",
    model_types=("mpnet",),
    classes=classes_of(
        "MPNet",
        {
            "ForSequenceClassification": ModelClass(
                "classifier", pooler=True, sign="classifier.out_proj.weight"
            ),
            "ForTokenClassification": ModelClass("tokens", sign="classifier.weight"),
            "Model": ModelClass("vector", pooler=True),
            "ForMaskedLM": ModelClass("vector", pooler=True),
        },
    ),
    read=_read,
    dialects=lambda architecture: _DIALECTS[architecture.head],
    embeddings=PaddedEmbeddings,
    part=post_norm_part,
    head=text_head,
    prefix="mpnet.",
    carried=(MASK,),
    shared=RelativeBias,
    optional_pooler=encoder_pooler_names,
)
