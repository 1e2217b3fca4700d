"""RoBERTa, https://arxiv.org/abs/1907.11692, and XLM-R and CamemBERT, which differ from it in their words.

The blocks are BERT's. Positions are counted from the padding id + 1 and skip padding: layer 1 derives them
from the token ids, so that nothing but the mask travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture, FamilyOptions, HeadKind, TextInput, check_range
from pipeedge.models.families.bert import BERT_ENCODER, encoder_pooler_names
from pipeedge.models.family import MASK, Family, Head, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.shapes import block_shapes, first_token_shapes, word_shapes
from pipeedge.models.weights.names import Dialect, modules

__all__ = ["DENSE_HEADS", "PaddingOptions", "ROBERTA"]

_MOST_PADDING_ID = 1 << 20


@dataclass(frozen=True)
class PaddingOptions(FamilyOptions):
    """Option of families whose positions skip padding."""

    padding_id: int
    """Token id of padding, and number of its row in the position table."""

    def __post_init__(self) -> None:
        check_range("pad_token_id", self.padding_id, _MOST_PADDING_ID, least=0)


def _read(config: HubConfig, head: Head) -> Architecture:
    sizes = config.block_sizes()
    options = PaddingOptions(config.integer("pad_token_id", 1))
    positions = config.integer("max_position_embeddings", 512) - options.padding_id - 1
    types = config.integer("type_vocab_size", 2)
    check_range("type_vocab_size", types, _MOST_PADDING_ID)
    return Architecture(
        family="roberta",
        **sizes,
        input=TextInput(config.integer("vocab_size", 50265), positions, types),
        head=head.kind,
        pooler=head.pooler,
        pooler_size=sizes["hidden"] if head.pooler else 0,
        num_labels=head.num_labels,
        options=options,
    )


def padded_shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    """Return the tensors of a model whose positions skip padding, as ``Family.shapes`` does."""
    return {
        **word_shapes(architecture, unused=architecture.own(PaddingOptions).padding_id + 1),
        **block_shapes(architecture),
        **first_token_shapes(architecture),
    }


DENSE_HEADS: MappingProxyType[HeadKind, Dialect] = MappingProxyType(
    {
        "classifier": modules(
            {"head.pooler": ("classifier.dense",), "head.classifier": ("classifier.out_proj",)}
        ),
        "tokens": modules({"head.classifier": ("classifier",)}),
        "vector": modules({"head.pooler": ("pooler.dense",)}),
    }
)
"""Heads whose classifier has a dense layer of its own in place of the pooler."""
_DIALECTS = MappingProxyType({kind: ({**BERT_ENCODER, **head},) for kind, head in DENSE_HEADS.items()})
_CLASSES = {
    "ForSequenceClassification": ModelClass("classifier", pooler=True, sign="classifier.out_proj.weight"),
    "ForTokenClassification": ModelClass("tokens", sign="classifier.weight"),
    "Model": ModelClass("vector", pooler=True),
    "ForMaskedLM": ModelClass("vector", pooler=True),
}

ROBERTA = Family(
    name="roberta",
    model_types=("roberta", "xlm-roberta", "camembert"),
    classes=MappingProxyType(
        {
            **classes_of("Roberta", _CLASSES),
            **classes_of("XLMRoberta", _CLASSES),
            **classes_of("Camembert", _CLASSES),
        }
    ),
    read=_read,
    dialects=lambda architecture: _DIALECTS[architecture.head],
    shapes=padded_shapes,
    prefix="roberta.",
    carried=(MASK,),
    optional_pooler=encoder_pooler_names,
)
