"""DistilBERT, https://arxiv.org/abs/1910.01108: BERT's blocks without token types and pooler.

The mask travels, as in BERT.
"""

from __future__ import annotations

from pipeedge.models.architecture import Architecture, TextInput
from pipeedge.models.families.bert import bert_shapes
from pipeedge.models.family import MASK, Family, Head, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["DISTILBERT"]


def _read(config: HubConfig, head: Head) -> Architecture:
    hidden = config.integer("dim", 768)
    return Architecture(
        family="distilbert",
        hidden=hidden,
        blocks=config.integer("n_layers", 6),
        heads=config.integer("n_heads", 12),
        intermediate=config.integer("hidden_dim", 3072),
        eps=1e-12,
        activation=config.text("activation", "gelu"),
        input=TextInput(config.integer("vocab_size", 30522), config.integer("max_position_embeddings", 512)),
        head=head.kind,
        pooler=head.pooler,
        pooler_size=hidden if head.pooler else 0,
        pooler_activation="relu" if head.pooler else "tanh",
        num_labels=head.num_labels,
    )


_DISTILBERT: Dialect = {
    **tensors(
        {
            "embeddings.word": "embeddings.word_embeddings.weight",
            "embeddings.position": "embeddings.position_embeddings.weight",
        }
    ),
    **modules(
        {
            "embeddings.norm": ("embeddings.LayerNorm",),
            "block.{n}.qkv": tuple(f"transformer.layer.{{n}}.attention.{part}_lin" for part in "qkv"),
            "block.{n}.proj": ("transformer.layer.{n}.attention.out_lin",),
            "block.{n}.norm1": ("transformer.layer.{n}.sa_layer_norm",),
            "block.{n}.up": ("transformer.layer.{n}.ffn.lin1",),
            "block.{n}.down": ("transformer.layer.{n}.ffn.lin2",),
            "block.{n}.norm2": ("transformer.layer.{n}.output_layer_norm",),
            "head.pooler": ("pre_classifier",),
            "head.classifier": ("classifier",),
        }
    ),
}

DISTILBERT = Family(
    name="distilbert",
    model_types=("distilbert",),
    classes=classes_of(
        "DistilBert",
        {
            "ForSequenceClassification": ModelClass("classifier", pooler=True, sign="pre_classifier.weight"),
            "ForTokenClassification": ModelClass("tokens", sign="classifier.weight"),
            "Model": ModelClass("vector"),
            "ForMaskedLM": ModelClass("vector"),
        },
    ),
    read=_read,
    dialects=lambda _: (_DISTILBERT,),
    shapes=bert_shapes,
    prefix="distilbert.",
    unprefixed=("classifier", "pre_classifier"),
    carried=(MASK,),
)
