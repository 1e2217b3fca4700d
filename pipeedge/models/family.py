"""Parts of a family of models; each module of ``families`` defines one or two families.

A family says what it has, so that nothing else asks for it by name:

    recognised by       model_types, classes                 read from config.json by
    input               architecture.input                   image_defaults, for images without a description
    beside the hidden   carried                              tensors that travel behind it in the payload
    on disk             dialects, prefix, unprefixed         names of the tensors, and their shapes

This and the modules of ``families`` do without torch, because a plan is to be there at once. What computes is
in ``layers``.

What every block needs besides the hidden state is either carried or recomputed. Carry what a later stage
cannot know, such as a mask, at a byte a token. Recompute what follows from the shapes, such as a bias for
relative positions: it is larger than the hidden state, and computing it takes less time than sending it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pipeedge.base.shapes import Shape, TensorShape
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture, HeadKind
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.weights.names import Dialect

__all__ = [
    "MASK",
    "Carried",
    "Family",
    "Head",
    "ImageDefaults",
    "ModelClass",
    "attends",
    "classes_of",
    "pools_tokens",
]


@dataclass(frozen=True)
class ModelClass:
    """Part that one class of transformers adds to the encoder."""

    head: HeadKind
    pooler: bool = False
    """Whether it has a pooler, or a dense layer in its place."""
    sign: str | None = None
    """Tensor that shows this class in a file whose ``config.json`` names none, or None for a bare encoder."""


@dataclass(frozen=True)
class Head:
    """The head of one checkpoint."""

    kind: HeadKind
    pooler: bool
    num_labels: int
    """Number of classes, or 0 for ``vector``."""


@dataclass(frozen=True)
class Carried:
    """A tensor that travels beside the hidden state, behind it in the payload."""

    name: str
    dtype: str
    """Name of its number type."""
    per_token: bool = True
    """Whether its shape is [N, T], rather than [N]."""
    attention: bool = True
    """Whether ``shared`` takes it, so that it travels up to the last layer that attends."""
    head: Callable[[Architecture], bool] = lambda _: False
    """Whether the head takes it, so that it travels up to the last layer."""

    def shape(self, items: int, tokens: int) -> TensorShape:
        """Return its shape and number type for ``items`` items of ``tokens`` tokens."""
        return TensorShape((items, tokens) if self.per_token else (items,), self.dtype)


@dataclass(frozen=True)
class ImageDefaults:
    """How images of three channels become ``pixel_values`` where no file describes it."""

    resize: float = 1.0
    """Size that an image is resized to, as a multiple of the model's; a larger one is cropped."""
    bicubic: bool = False
    """Whether to resize with bicubic interpolation, rather than bilinear."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Mean subtracted from each channel, after scaling it to 0 to 1."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Standard deviation that each channel is divided by, after subtracting the mean."""


def _no_pooler_names(_architecture: Architecture) -> tuple[str, ...]:
    return ()


def _own_block(_architecture: Architecture, block: int) -> int:
    return block


@dataclass(frozen=True)
class Family:
    """All that is particular to one family of models."""

    name: str
    model_types: tuple[str, ...]
    """Values of ``model_type`` in a ``config.json`` that mean this family."""
    classes: Mapping[str, ModelClass]
    """Supported classes of transformers by name. A checkpoint of pre-training is used as the encoder that it
    contains; its heads are not read.
    """
    read: Callable[[HubConfig, Head], Architecture]
    """Function from a ``config.json`` and the head found in it to the architecture. Raises ModelError for
    what is not supported, with the name of the feature.
    """
    dialects: Callable[[Architecture], tuple[Dialect, ...]]
    """Naming dialects in which a file may be written. The first one is that of the hub, and ours."""
    shapes: Callable[[Architecture, int], Mapping[str, Shape]]
    """Function to the shapes of the stored tensors of the embeddings, of the block with a number, and of the
    head, by the names that dialects have for them. The modules in ``layers`` have the same.
    """
    prefix: str
    """Beginning of the tensors' names in a file of a model with a head, such as ``bert.``."""
    unprefixed: tuple[str, ...] = ("classifier",)
    """Beginnings of the names, of heads, that never follow the prefix."""
    carried: tuple[Carried, ...] = ()
    """Tensors that travel beside the hidden state, in the order of the embeddings' results."""
    optional_pooler: Callable[[Architecture], tuple[str, ...]] = _no_pooler_names
    """Names, without prefix, of the pooler's bias if the weights file decides whether there is a pooler."""
    stored_block: Callable[[Architecture, int], int] = _own_block
    """Function to the number, in files, of the block whose weights a block has. Blocks with one number share
    them, and a shard holds them once.
    """
    image_defaults: ImageDefaults = field(default_factory=ImageDefaults)
    tower: str | None = None
    """``vision`` or ``text`` if a checkpoint may contain two models of which this is one, else None."""
    any_image_size: bool = False
    """Whether images may be of another size than ``config.json`` says, because positions are interpolated."""
    full_length: bool = False
    """Whether every sentence is padded to the longest length, because the result depends on its length."""

    decodes: bool = False
    """Whether it generates text: stages remember keys and values (``layers.decoder``)."""

    def inputs(self, architecture: Architecture) -> tuple[str, ...]:
        """Return the names of the arrays that the embeddings take, in payload order."""
        if not architecture.takes_text:
            return ("pixel_values",)
        types = ("token_type_ids",) if architecture.type_vocab > 1 else ()
        return ("input_ids", "attention_mask", *types)

    def crossing(self, architecture: Architecture, after_layer: int) -> tuple[Carried, ...]:
        """Return what crosses the cut after ``after_layer`` layers behind the hidden state."""
        attended = any(attends(layer) for layer in range(after_layer, architecture.n_layers))
        return tuple(
            each for each in self.carried if (each.attention and attended) or each.head(architecture)
        )


def attends(layer: int) -> bool:
    """Return whether ``layer``, counted from 0, contains the attention of a block."""
    return layer % LAYERS_PER_BLOCK == 0


def pools_tokens(architecture: Architecture) -> bool:
    """Return whether the vector of a sentence depends on which of its positions are padding."""
    return architecture.pooling is not None and architecture.pooling.needs_mask


MASK = Carried("mask", "bool", head=pools_tokens)
"""Mask of a microbatch of sentences: true for tokens and false for padding, one byte a token."""


def classes_of(prefix: str, kinds: Mapping[str, ModelClass]) -> Mapping[str, ModelClass]:
    """Return ``kinds`` with ``prefix`` before each name: ``Bert`` and ``Model`` give ``BertModel``."""
    return MappingProxyType({prefix + name: kind for name, kind in kinds.items()})
