"""The dimensions and options of a model, and how to read them from a Hugging Face ``config.json``.

The file is parsed as plain JSON: importing ``transformers`` to learn a dozen numbers would cost every rank
seconds of start-up and tens of megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from pipeedge.base.errors import ModelError
from pipeedge.base.wording import count, excerpt
from pipeedge.models.activations import ACTIVATIONS

__all__ = ["Architecture", "FamilyName", "HeadKind", "hf_config", "parse_hf_config"]

FamilyName: TypeAlias = Literal["vit", "deit", "bert"]
HeadKind: TypeAlias = Literal["classifier", "distilled", "vector"]

LAYERS_PER_BLOCK = 4
_MOST: Mapping[str, int] = MappingProxyType(
    {
        "hidden": 1 << 16,
        "blocks": 1000,
        "heads": 1 << 12,
        "intermediate": 1 << 20,
        "num_labels": 1 << 20,
        "pooler_size": 1 << 16,
        "channels": 1 << 10,
        "vocab": 1 << 22,
        "max_positions": 1 << 20,
        "type_vocab": 1 << 16,
    }
)
"""Upper bounds far above any real model of these families. A larger number is a mistake, and acting on it
could exhaust the memory.
"""
_MOST_PIXELS = 4096
"""Largest height and width of an image in pixels; such an image takes 200 MB."""


@dataclass(frozen=True)
class Architecture:
    """The dimensions of a transformer encoder of one of the three families, valid by construction.

    Raises:
        ModelError: A dimension is not positive, sizes do not divide evenly, or an activation is unknown.
    """

    family: FamilyName
    hidden: int
    """Width D of the hidden state."""
    blocks: int
    heads: int
    """Number of attention heads, which divides ``hidden``."""
    intermediate: int
    """Width of the MLP's inner layer."""
    eps: float
    """Value that every LayerNorm adds to the variance."""
    head: HeadKind
    """Head: ``classifier`` gives the logits of the first token, ``distilled`` the mean of the logits of the
    class and the distillation token, ``vector`` the pooled first token itself.
    """
    activation: str = "gelu"
    qkv_bias: bool = True
    pooler: bool = False
    """Whether a dense layer and an activation process the first token, before any classifier."""
    pooler_size: int = 0
    """Width of the pooler's output, or 0 without a pooler."""
    pooler_activation: str = "tanh"
    num_labels: int = 0
    """Number of classes of the head, or 0 for ``vector``."""
    image_size: tuple[int, int] = (0, 0)
    """Height and width in pixels (images only)."""
    patch_size: tuple[int, int] = (0, 0)
    channels: int = 0
    vocab: int = 0
    """Number of rows of the word embedding (text only)."""
    max_positions: int = 0
    """Longest sentence in tokens (text only)."""
    type_vocab: int = 0
    """Number of rows of the token type embedding (text only)."""

    def __post_init__(self) -> None:
        positive = ["hidden", "blocks", "heads", "intermediate"]
        if self.family == "bert":
            positive += ["vocab", "max_positions", "type_vocab"]
        else:
            positive += ["channels"]
            for name, pair in (("image_size", self.image_size), ("patch_size", self.patch_size)):
                if min(pair) < 1 or max(pair) > _MOST_PIXELS:
                    shown = excerpt(list(pair))
                    raise ModelError(f"{name} is {shown}; height and width must be 1 to {_MOST_PIXELS}")
            if self.image_size[0] < self.patch_size[0] or self.image_size[1] < self.patch_size[1]:
                raise ModelError(
                    f"image_size {list(self.image_size)} is smaller than patch_size {list(self.patch_size)}"
                )
        if self.head != "vector":
            positive.append("num_labels")
        if self.pooler:
            positive.append("pooler_size")
        for name in positive:
            if not 1 <= getattr(self, name) <= _MOST[name]:
                shown = excerpt(getattr(self, name))
                raise ModelError(f"{name} is {shown}; it must be 1 to {_MOST[name]}")
        if self.hidden % self.heads:
            raise ModelError(f"hidden_size {self.hidden} is not a multiple of {self.heads} attention heads")
        if not 0 <= self.eps < math.inf:
            raise ModelError(f"layer_norm_eps {self.eps} is negative or not finite")
        for name in (self.activation, self.pooler_activation):
            if name not in ACTIVATIONS:
                supported = ", ".join(sorted(ACTIVATIONS))
                raise ModelError(
                    f"the activation {excerpt(repr(name))} is not supported; supported are {supported}"
                )

    @property
    def n_layers(self) -> int:
        """Number of layers, four per block."""
        return LAYERS_PER_BLOCK * self.blocks

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens in front of the patches: class token, and distillation token for DeiT."""
        return {"vit": 1, "deit": 2, "bert": 0}[self.family]

    @property
    def image_tokens(self) -> int:
        """Number of tokens of an image: one per patch, and the prefix tokens."""
        rows = self.image_size[0] // self.patch_size[0]
        columns = self.image_size[1] // self.patch_size[1]
        return rows * columns + self.prefix_tokens

    @property
    def output_size(self) -> int:
        """Number of output values per item."""
        if self.head != "vector":
            return self.num_labels
        return self.pooler_size if self.pooler else self.hidden

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values by name, for comparing the models of two ranks."""
        return asdict(self)


_ARCHITECTURES: Mapping[str, tuple[FamilyName, HeadKind, bool]] = {
    # Class name of the checkpoint: family, head, pooler. Pre-training checkpoints of BERT are used as the
    # encoder they contain; their language heads are not read.
    "ViTForImageClassification": ("vit", "classifier", False),
    "ViTModel": ("vit", "vector", True),
    "DeiTForImageClassification": ("deit", "classifier", False),
    "DeiTForImageClassificationWithTeacher": ("deit", "distilled", False),
    "DeiTModel": ("deit", "vector", True),
    "BertForSequenceClassification": ("bert", "classifier", True),
    "BertModel": ("bert", "vector", True),
    "BertForMaskedLM": ("bert", "vector", True),
    "BertForPreTraining": ("bert", "vector", True),
    "BertForNextSentencePrediction": ("bert", "vector", True),
}
_FAMILIES: tuple[FamilyName, ...] = ("vit", "deit", "bert")
_DEFAULT_LABELS = 2
"""Number of classes that Hugging Face implies by a ``config.json`` without ``id2label``."""


def parse_hf_config(
    config: Mapping[str, Any], *, tensor_names: Sequence[str] = ()
) -> tuple[Architecture, tuple[str, ...] | None]:
    """Return the architecture and the label names defined by a ``config.json``.

    Args:
        config: Contents of the file.
        tensor_names: Names of the tensors stored next to it, which reveal the head if ``architectures`` is
            missing.

    Raises:
        ModelError: A model type, class or option is not supported, or a value is invalid.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ModelError(
            f"model_type {excerpt(repr(family))} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    _reject_options(config)
    head, pooler = _head(config, family, tensor_names)
    labels = _labels(config)
    num_labels = len(labels) if labels is not None else _integer(config, "num_labels", _DEFAULT_LABELS)
    if head == "classifier" and num_labels == 0:
        # Hugging Face replaces a head without classes by an identity.
        head = "vector"
    hidden = _integer(config, "hidden_size", 768)
    pooler_size = _integer(config, "pooler_output_size", hidden) or hidden
    common: dict[str, Any] = {
        "family": family,
        "hidden": hidden,
        "blocks": _integer(config, "num_hidden_layers", 12),
        "heads": _integer(config, "num_attention_heads", 12),
        "intermediate": _integer(config, "intermediate_size", 3072),
        "eps": _number(config, "layer_norm_eps", 1e-12),
        "activation": _text(config, "hidden_act", "gelu"),
        "head": head,
        "num_labels": num_labels if head != "vector" else 0,
        "pooler": pooler,
        "pooler_size": pooler_size if pooler else 0,
    }
    if family == "bert":
        architecture = Architecture(
            **{**common, "pooler_size": hidden if pooler else 0},
            vocab=_integer(config, "vocab_size", 30522),
            max_positions=_integer(config, "max_position_embeddings", 512),
            type_vocab=_integer(config, "type_vocab_size", 2),
        )
    else:
        architecture = Architecture(
            **common,
            pooler_activation=_text(config, "pooler_act", "tanh"),
            qkv_bias=_flag(config, "qkv_bias", True),
            image_size=_pair(config, "image_size", 224),
            patch_size=_pair(config, "patch_size", 16),
            channels=_integer(config, "num_channels", 3),
        )
    named = labels is not None and any(label != f"LABEL_{n}" for n, label in enumerate(labels))
    return architecture, labels if named and head != "vector" else None


def hf_config(architecture: Architecture, labels: Sequence[str] | None) -> dict[str, Any]:
    """Return the content of a ``config.json`` for an image classifier; ``parse_hf_config`` reads it back."""
    kinds = {(family, head): name for name, (family, head, _) in reversed(list(_ARCHITECTURES.items()))}
    names = labels or [f"LABEL_{number}" for number in range(architecture.num_labels)]
    return {
        "architectures": [kinds[architecture.family, architecture.head]],
        "model_type": architecture.family,
        "hidden_size": architecture.hidden,
        "num_hidden_layers": architecture.blocks,
        "num_attention_heads": architecture.heads,
        "intermediate_size": architecture.intermediate,
        "layer_norm_eps": architecture.eps,
        "hidden_act": architecture.activation,
        "qkv_bias": architecture.qkv_bias,
        "image_size": list(architecture.image_size),
        "patch_size": list(architecture.patch_size),
        "num_channels": architecture.channels,
        "id2label": {str(number): name for number, name in enumerate(names)},
    }


def _reject_options(config: Mapping[str, Any]) -> None:
    """Raise ModelError for options that would change the computation and are not implemented here."""
    if config.get("is_decoder"):
        raise ModelError("is_decoder is set: only encoders are supported")
    if config.get("is_encoder_decoder"):
        raise ModelError("is_encoder_decoder is set: only encoders are supported")
    if config.get("add_cross_attention"):
        raise ModelError("add_cross_attention is set: cross-attention is not supported")
    position = config.get("position_embedding_type") or "absolute"
    if position != "absolute":
        raise ModelError(f"position_embedding_type {excerpt(repr(position))} is not supported; 'absolute' is")
    if config.get("pruned_heads"):
        raise ModelError("pruned_heads is set: models with pruned heads are not supported")
    if config.get("quantization_config"):
        raise ModelError("quantization_config is set: quantised checkpoints are not supported")


def _head(
    config: Mapping[str, Any], family: FamilyName, tensor_names: Sequence[str]
) -> tuple[HeadKind, bool]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("architectures must be a list of class names")
    for name in names:
        if name in _ARCHITECTURES:
            of_family, head, pooler = _ARCHITECTURES[name]
            if of_family != family:
                raise ModelError(f"the architecture {name} does not belong to model_type {family!r}")
            return head, pooler
    if names:
        supported = ", ".join(name for name, known in _ARCHITECTURES.items() if known[0] == family)
        raise ModelError(
            f"the architecture {excerpt(names[0], 80)} is not supported; supported are {supported}"
        )
    if "cls_classifier.weight" in tensor_names:
        return "distilled", False
    if "classifier.weight" in tensor_names:
        return "classifier", family == "bert"
    return "vector", True


def _labels(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    id2label = config.get("id2label")
    if id2label is None:
        return None
    try:
        by_index = {int(index): str(label) for index, label in id2label.items()}
    except (AttributeError, ValueError, RecursionError):
        raise ModelError("id2label does not map class numbers to names") from None
    if sorted(by_index) != list(range(len(by_index))):
        raise ModelError(f"id2label must number its {count(len(by_index), 'class')} from 0 without gaps")
    return tuple(by_index[index] for index in range(len(by_index)))


def _integer(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key} is {excerpt(repr(value))}; a whole number is needed")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"{key} is {excerpt(repr(value))}; a number is needed")
    try:
        return float(value)
    except OverflowError:
        raise ModelError(f"{key} is {excerpt(value)}; a number is needed") from None


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {excerpt(repr(value))}; true or false is needed")
    return value


def _text(config: Mapping[str, Any], key: str, default: str) -> str:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ModelError(f"{key} is {excerpt(repr(value))}; a name is needed")
    return value


def _pair(config: Mapping[str, Any], key: str, default: int) -> tuple[int, int]:
    """Return a size that is given as one number for a square, or as ``[height, width]``."""
    value = config.get(key)
    if value is None:
        return default, default
    pair = value if isinstance(value, (list, tuple)) else [value, value]
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in pair):
        raise ModelError(f"{key} is {excerpt(repr(value))}; one whole number or [height, width] is needed")
    return pair[0], pair[1]
