"""ELECTRA, https://arxiv.org/abs/2003.10555: BERT's blocks and names, with narrow embeddings and no pooler.

Embeddings are projected to the hidden size in layer 1 unless they have it. The mask travels, as in BERT.
"""

from __future__ import annotations

from types import MappingProxyType

from pipeedge.base.errors import ModelError
from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture, TextInput
from pipeedge.models.families.albert import NarrowOptions, narrow_shapes
from pipeedge.models.families.bert import BERT_ENCODER, bert_shapes
from pipeedge.models.families.roberta import DENSE_HEADS
from pipeedge.models.family import MASK, Family, Head, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.weights.names import Dialect, modules

__all__ = ["ELECTRA"]


def _read(config: HubConfig, head: Head) -> Architecture:
    sizes = config.block_sizes(hidden=256, heads=4, intermediate=1024)
    types = config.integer("type_vocab_size", 2)
    if not types:
        raise ModelError("type_vocab_size is 0; an ELECTRA has at least 1")
    return Architecture(
        family="electra",
        **sizes,
        input=TextInput(
            config.integer("vocab_size", 30522), config.integer("max_position_embeddings", 512), types
        ),
        head=head.kind,
        pooler=head.pooler,
        pooler_size=sizes["hidden"] if head.pooler else 0,
        pooler_activation="gelu" if head.pooler else "tanh",
        num_labels=head.num_labels,
        options=NarrowOptions(config.integer("embedding_size", 128)),
    )


def _shapes(architecture: Architecture, block: int) -> dict[str, Shape]:
    narrow = architecture.own(NarrowOptions).embedding != architecture.hidden
    return {**bert_shapes(architecture, block), **(narrow_shapes(architecture) if narrow else {})}


_ENCODER: Dialect = {
    **BERT_ENCODER,
    **modules({"embeddings.projection": ("embeddings_project",)}),
}
_DIALECTS = MappingProxyType({kind: ({**_ENCODER, **head},) for kind, head in DENSE_HEADS.items()})

ELECTRA = Family(
    name="electra",
    model_types=("electra",),
    classes=classes_of(
        "Electra",
        {
            "ForSequenceClassification": ModelClass(
                "classifier", pooler=True, sign="classifier.out_proj.weight"
            ),
            "ForTokenClassification": ModelClass("tokens", sign="classifier.weight"),
            "Model": ModelClass("vector"),
            "ForMaskedLM": ModelClass("vector"),
            "ForPreTraining": ModelClass("vector"),
        },
    ),
    read=_read,
    dialects=lambda architecture: _DIALECTS[architecture.head],
    shapes=_shapes,
    prefix="electra.",
    carried=(MASK,),
)
