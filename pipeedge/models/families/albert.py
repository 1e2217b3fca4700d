"""ALBERT, https://arxiv.org/abs/1909.11942: blocks that share their weights, and narrow embeddings.

All blocks of a group, usually all blocks, have the same weights: a shard holds them once. Embeddings are
projected to the hidden size in layer 1. The mask travels, as in BERT.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeedge.base.errors import ModelError
from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture, FamilyOptions, TextInput, check_range
from pipeedge.models.family import MASK, Family, Head, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.shapes import block_shapes, first_token_shapes, linear_shapes, word_shapes
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["ALBERT", "NarrowOptions"]

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


def narrow_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return the tensors of narrow embeddings that are projected to the hidden size."""
    width = architecture.own(NarrowOptions).embedding
    projection = linear_shapes("embeddings.projection", architecture.hidden, width)
    return {**word_shapes(architecture, width=width), **projection}


def _shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    return {
        **narrow_shapes(architecture),
        **block_shapes(architecture),
        **first_token_shapes(architecture),
    }


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
    shapes=_shapes,
    prefix="albert.",
    carried=(MASK,),
    optional_pooler=lambda architecture: ("pooler.bias",) if architecture.head == "vector" else (),
    stored_block=_group,
)
