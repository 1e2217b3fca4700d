"""MPNet, https://arxiv.org/abs/2004.09297: BERT's blocks, each with the same bias for relative positions.

The mask travels. Every stage that attends holds the table of the bias, 32 rows with a value for each head,
and computes the bias of each distance anew: sending it would save nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture, TextInput, check_range
from pipeedge.models.families.bert import encoder_pooler_names
from pipeedge.models.families.roberta import DENSE_HEADS, PaddingOptions, padded_shapes
from pipeedge.models.family import MASK, Family, Head, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["BUCKETS", "MPNET", "MPNetOptions"]

_PADDING_ID = 1
BUCKETS = 32
"""Number of rows of the table that are used: a half for each direction."""
_MOST_BUCKETS = 1 << 16


@dataclass(frozen=True)
class MPNetOptions(PaddingOptions):
    """Options of an MPNet."""

    buckets: int
    """Number of rows of the table of the relative bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("relative_attention_num_buckets", self.buckets, _MOST_BUCKETS, least=BUCKETS)


def _read(config: HubConfig, head: Head) -> Architecture:
    sizes = config.block_sizes()
    options = MPNetOptions(_PADDING_ID, config.integer("relative_attention_num_buckets", BUCKETS))
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


def _shapes(architecture: Architecture, block: int) -> dict[str, Shape]:
    table = (architecture.own(MPNetOptions).buckets, architecture.heads)
    return {"shared.table": table, **padded_shapes(architecture, block)}


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
    shapes=_shapes,
    prefix="mpnet.",
    carried=(MASK,),
    optional_pooler=encoder_pooler_names,
)
