"""ALBERT, https://arxiv.org/abs/1909.11942: blocks that share their weights, and narrow embeddings.

All blocks of a group, usually all blocks, have the same weights: a shard holds them once. Embeddings are
projected to the hidden size in layer 1. The mask travels, as in BERT.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeedge.base.errors import ModelError
from pipeedge.models.architecture import Architecture, FamilyOptions, TextInput, check_range
from pipeedge.models.attention import MASK, MaskBias
from pipeedge.models.families.bert import TextEmbeddings, post_norm_part, text_head
from pipeedge.models.family import Family, Head, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.linear import Linear
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["ALBERT", "NarrowEmbeddings", "NarrowOptions"]

_MOST_EMBEDDING = 1 << 16


@dataclass(frozen=True)
class NarrowOptions(FamilyOptions):
    """Option of families whose embeddings are projected to the hidden size."""

    embedding: int
    """Width E of the embeddings."""

    def __post_init__(self) -> None:
        check_range("embedding_size", self.embedding, _MOST_EMBEDDING)


@dataclass(frozen=True)
class AlbertOptions(NarrowOptions):
    """Options of an ALBERT."""

    groups: int
    """Number of different blocks."""


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


def _group(architecture: Architecture, block: int) -> int:
    """Return the number of the group that ``block`` belongs to: groups are equal parts of the blocks."""
    return int(block / (architecture.blocks / architecture.own(AlbertOptions).groups))


def _read(config: HubConfig, head: Head) -> Architecture:
    inner = config.integer("inner_group_num", 1)
    if inner != 1:
        raise ModelError(f"inner_group_num is {inner}: groups of several layers are not supported; 1 is")
    sizes = config.block_sizes(hidden=4096, heads=64, intermediate=16384, activation="gelu_new")
    groups = config.integer("num_hidden_groups", 1)
    check_range("num_hidden_groups", groups, sizes["blocks"])
    types = config.integer("type_vocab_size", 2)
    check_range("type_vocab_size", types, _MOST_EMBEDDING)
    return Architecture(
        family="albert",
        **sizes,
        input=TextInput(
            config.integer("vocab_size", 30000), config.integer("max_position_embeddings", 512), types
        ),
        head=head.kind,
        pooler=head.pooler,
        pooler_size=sizes["hidden"] if head.pooler else 0,
        num_labels=head.num_labels,
        options=AlbertOptions(config.integer("embedding_size", 128), groups),
    )


_LAYER = "encoder.albert_layer_groups.{n}.albert_layers.0"
_ALBERT: Dialect = {
    **tensors(
        {
            "embeddings.word": "embeddings.word_embeddings.weight",
            "embeddings.position": "embeddings.position_embeddings.weight",
            "embeddings.token_type": "embeddings.token_type_embeddings.weight",
        }
    ),
    **modules(
        {
            "embeddings.norm": ("embeddings.LayerNorm",),
            "embeddings.projection": ("encoder.embedding_hidden_mapping_in",),
            "block.{n}.qkv": tuple(f"{_LAYER}.attention.{part}" for part in ("query", "key", "value")),
            "block.{n}.proj": (f"{_LAYER}.attention.dense",),
            "block.{n}.norm1": (f"{_LAYER}.attention.LayerNorm",),
            "block.{n}.up": (f"{_LAYER}.ffn",),
            "block.{n}.down": (f"{_LAYER}.ffn_output",),
            "block.{n}.norm2": (f"{_LAYER}.full_layer_layer_norm",),
            "head.pooler": ("pooler",),
            "head.classifier": ("classifier",),
        }
    ),
}

ALBERT = Family(
    name="albert",
    model_types=("albert",),
    classes=classes_of(
        "Albert",
        {
            "ForSequenceClassification": ModelClass("classifier", pooler=True, sign="classifier.weight"),
            "ForTokenClassification": ModelClass("tokens"),
            "Model": ModelClass("vector", pooler=True),
            "ForMaskedLM": ModelClass("vector", pooler=True),
            "ForPreTraining": ModelClass("vector", pooler=True),
        },
    ),
    read=_read,
    dialects=lambda _: (_ALBERT,),
    embeddings=NarrowEmbeddings,
    part=post_norm_part,
    head=text_head,
    prefix="albert.",
    carried=(MASK,),
    shared=MaskBias,
    optional_pooler=lambda architecture: ("pooler.bias",) if architecture.head == "vector" else (),
    stored_block=_group,
)
