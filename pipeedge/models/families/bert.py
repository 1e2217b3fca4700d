"""BERT, https://arxiv.org/abs/1810.04805: norms come after each residual, attention takes a mask.

The mask travels, at a byte a token; each stage turns it into a bias on the scores.
"""

from __future__ import annotations

from pipeedge.base.errors import ModelError
from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture, TextInput
from pipeedge.models.family import MASK, Family, Head, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.shapes import block_shapes, first_token_shapes, word_shapes
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["BERT", "BERT_ENCODER", "encoder_pooler_names"]


# The configuration ------------------------------------------------------------------------------------


def _read(config: HubConfig, head: Head) -> Architecture:
    sizes = config.block_sizes()
    types = config.integer("type_vocab_size", 2)
    text = TextInput(
        config.integer("vocab_size", 30522), config.integer("max_position_embeddings", 512), types
    )
    if not types:
        raise ModelError("type_vocab_size is 0; a BERT has at least 1")
    return Architecture(
        family="bert",
        **sizes,
        input=text,
        head=head.kind,
        pooler=head.pooler,
        pooler_size=sizes["hidden"] if head.pooler else 0,
        num_labels=head.num_labels,
    )


def bert_shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    """Return the tensors of a BERT, as ``Family.shapes`` does."""
    return {
        **word_shapes(architecture),
        **block_shapes(architecture),
        **first_token_shapes(architecture),
    }


# Names in files ---------------------------------------------------------------------------------------

_BERT_NORMS = {
    "embeddings.norm": ("embeddings.LayerNorm",),
    "block.{n}.norm1": ("encoder.layer.{n}.attention.output.LayerNorm",),
    "block.{n}.norm2": ("encoder.layer.{n}.output.LayerNorm",),
}
BERT_ENCODER: Dialect = {
    **tensors(
        {
            "embeddings.word": "embeddings.word_embeddings.weight",
            "embeddings.position": "embeddings.position_embeddings.weight",
            "embeddings.token_type": "embeddings.token_type_embeddings.weight",
        }
    ),
    **modules(
        {
            **_BERT_NORMS,
            "block.{n}.qkv": tuple(
                f"encoder.layer.{{n}}.attention.self.{part}" for part in ("query", "key", "value")
            ),
            "block.{n}.proj": ("encoder.layer.{n}.attention.output.dense",),
            "block.{n}.up": ("encoder.layer.{n}.intermediate.dense",),
            "block.{n}.down": ("encoder.layer.{n}.output.dense",),
        }
    ),
}
"""Embeddings and blocks of BERT and RoBERTa."""
_BERT: Dialect = {
    **BERT_ENCODER,
    **modules({"head.pooler": ("pooler.dense",), "head.classifier": ("classifier",)}),
}
_BERT_GAMMA: Dialect = {**_BERT, **modules(_BERT_NORMS, weight="gamma", bias="beta")}
"""BERT checkpoints converted from TensorFlow, which keep its names for the norms."""


def encoder_pooler_names(architecture: Architecture) -> tuple[str, ...]:
    """Return the name of the pooler of a bare encoder, which a file may lack; classes with a head decide."""
    return ("pooler.dense.bias",) if architecture.head == "vector" else ()


BERT = Family(
    name="bert",
    model_types=("bert",),
    classes=classes_of(
        "Bert",
        {
            "ForSequenceClassification": ModelClass("classifier", pooler=True, sign="classifier.weight"),
            "ForTokenClassification": ModelClass("tokens"),
            "Model": ModelClass("vector", pooler=True),
            "ForMaskedLM": ModelClass("vector", pooler=True),
            "ForPreTraining": ModelClass("vector", pooler=True),
            "ForNextSentencePrediction": ModelClass("vector", pooler=True),
        },
    ),
    read=_read,
    dialects=lambda _: (_BERT, _BERT_GAMMA),
    shapes=bert_shapes,
    prefix="bert.",
    carried=(MASK,),
    optional_pooler=encoder_pooler_names,
)
