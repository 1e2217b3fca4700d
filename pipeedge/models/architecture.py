"""The dimensions and options of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar

from pipeedge.base.errors import ModelError
from pipeedge.base.wording import excerpt
from pipeedge.models.pooling import Pooling

__all__ = [
    "ACTIVATION_NAMES",
    "LAYERS_PER_BLOCK",
    "Architecture",
    "FamilyOptions",
    "HeadKind",
    "ImageInput",
    "TextInput",
    "check_range",
]

HeadKind: TypeAlias = Literal["classifier", "distilled", "next", "tokens", "vector"]

LAYERS_PER_BLOCK = 4
ACTIVATION_NAMES = (
    "gelu",
    "gelu_10",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "hardswish",
    "leaky_relu",
    "linear",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "swish",
    "tanh",
)
"""Activations that ``config.json`` may name, as listed in ``activations.ACTIVATIONS``."""
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
"""Upper bounds far above any real encoder. A larger number is a mistake, and acting on it could exhaust the
memory.
"""
_MOST_PIXELS = 4096
"""Largest height and width of an image in pixels; such an image takes 200 MB."""


def check_range(name: str, value: int, most: int, least: int = 1) -> None:
    """Raise ModelError unless ``value``, which the message calls ``name``, is ``least`` to ``most``."""
    if not least <= value <= most:
        raise ModelError(f"{name} is {excerpt(value)}; it must be {least} to {most}")


@dataclass(frozen=True)
class ImageInput:
    """Sizes of the images that a model takes.

    Raises:
        ModelError: A size is out of range, or an image is smaller than a patch.
    """

    image_size: tuple[int, int]
    """Height and width in pixels."""
    patch_size: tuple[int, int]
    """Height and width of the patch that becomes a token, in pixels."""
    channels: int
    prefix_tokens: int = 1
    """Number of tokens in front of the patches, such as the class token."""
    trained: tuple[int, int] | None = None
    """Height and width that the stored positions are for, or None: ``image_size``."""

    def __post_init__(self) -> None:
        check_range("channels", self.channels, _MOST["channels"])
        for name, pair in (("image_size", self.image_size), ("patch_size", self.patch_size)):
            if min(pair) < 1 or max(pair) > _MOST_PIXELS:
                shown = excerpt(list(pair))
                raise ModelError(f"{name} is {shown}; height and width must be 1 to {_MOST_PIXELS}")
        if self.image_size[0] < self.patch_size[0] or self.image_size[1] < self.patch_size[1]:
            raise ModelError(
                f"image_size {list(self.image_size)} is smaller than patch_size {list(self.patch_size)}"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens of an image: one per patch, and the prefix tokens."""
        return math.prod(self.grid) + self.prefix_tokens

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of an image."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def trained_grid(self) -> tuple[int, int]:
        """Rows and columns of patches that the stored positions are for."""
        return self.as_trained().grid

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that the stored positions are for."""
        return self.as_trained().tokens

    def of_size(self, size: tuple[int, int]) -> ImageInput:
        """Return the sizes with images of another height and width, to which positions are interpolated.

        Raises:
            ModelError: The size is out of range, or smaller than a patch.
        """
        stored = self.trained or self.image_size
        return replace(self, image_size=size, trained=None if size == stored else stored)

    def as_trained(self) -> ImageInput:
        """Return the sizes with images as those that the stored positions are for."""
        return self if self.trained is None else self.of_size(self.trained)


@dataclass(frozen=True)
class TextInput:
    """Sizes of the sentences that a model takes.

    Raises:
        ModelError: A size is out of range.
    """

    vocab: int
    """Number of rows of the word embedding."""
    max_positions: int
    """Longest sentence in tokens."""
    type_vocab: int = 0
    """Number of rows of the token type embedding, or 0 without one."""

    def __post_init__(self) -> None:
        check_range("vocab", self.vocab, _MOST["vocab"])
        check_range("max_positions", self.max_positions, _MOST["max_positions"])
        check_range("type_vocab", self.type_vocab, _MOST["type_vocab"], least=0)


@dataclass(frozen=True)
class FamilyOptions:
    """Base of the options of a single family: a frozen dataclass of plain values, defined in its module."""


OptionsT = TypeVar("OptionsT", bound=FamilyOptions)


@dataclass(frozen=True)
class Architecture:
    """The dimensions of a transformer, valid by construction.

    Raises:
        ModelError: A dimension is not positive, sizes do not divide evenly, or an activation is unknown.
    """

    family: str
    """Name of the family (``Family.name``)."""
    hidden: int
    """Width D of the hidden state."""
    blocks: int
    heads: int
    """Number of attention heads, which divides ``hidden`` unless they have a ``head_size``."""
    intermediate: int
    """Width of the MLP's inner layer, as it crosses a cut."""
    eps: float
    """Value that every LayerNorm adds to the variance."""
    input: ImageInput | TextInput
    head: HeadKind
    """Head: ``classifier`` gives the logits of an item, ``distilled`` the mean of the logits of the class and
    the distillation token, ``tokens`` the logits of every token, ``vector`` the pooled first token itself,
    ``next`` the scores of the token that follows each one.
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
    options: FamilyOptions | None = None
    """Options that only this family has."""
    pooling: Pooling | None = None
    """Pooling that makes the vector of a sentence, or None for the family's own."""
    head_size: int | None = None
    """Width of an attention head, or None if the heads divide ``hidden``."""

    def __post_init__(self) -> None:
        positive = ["hidden", "blocks", "heads", "intermediate"]
        if self.head != "vector":
            positive.append("num_labels")
        if self.pooler:
            positive.append("pooler_size")
        for name in positive:
            check_range(name, getattr(self, name), _MOST[name])
        if self.head_size is None and self.hidden % self.heads:
            raise ModelError(f"hidden_size {self.hidden} is not a multiple of {self.heads} attention heads")
        if not 0 <= self.eps < math.inf:
            raise ModelError(f"layer_norm_eps {self.eps} is negative or not finite")
        for name in (self.activation, self.pooler_activation):
            if name not in ACTIVATION_NAMES:
                supported = ", ".join(ACTIVATION_NAMES)
                raise ModelError(
                    f"the activation {excerpt(repr(name))} is not supported; supported are {supported}"
                )

    @property
    def n_layers(self) -> int:
        """Number of layers, four per block."""
        return LAYERS_PER_BLOCK * self.blocks

    @property
    def width_of_head(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    def own(self, kind: type[OptionsT]) -> OptionsT:
        """Return the family's own options. Raises TypeError if it has options of another kind."""
        if not isinstance(self.options, kind):
            raise TypeError(f"{self.family} has no {kind.__name__}")
        return self.options

    @property
    def takes_text(self) -> bool:
        """Whether the model takes sentences, rather than images."""
        return isinstance(self.input, TextInput)

    @property
    def image(self) -> ImageInput:
        """Sizes of the images. Raises TypeError for a model that takes text."""
        if not isinstance(self.input, ImageInput):
            raise TypeError(f"{self.family} takes text")
        return self.input

    @property
    def text(self) -> TextInput:
        """Sizes of the sentences. Raises TypeError for a model that takes images."""
        if not isinstance(self.input, TextInput):
            raise TypeError(f"{self.family} takes images")
        return self.input

    def of_image_size(self, size: tuple[int, int]) -> Architecture:
        """Return a model of images as it takes those of another height and width.

        Raises:
            ModelError: The size is out of range, or smaller than a patch.
        """
        return replace(self, input=self.image.of_size(size))

    def as_trained(self) -> Architecture:
        """Return a model as it takes images of the size that its positions are for; others as they are."""
        return self if self.takes_text else replace(self, input=self.image.as_trained())

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels (images only)."""
        return self.image.image_size

    @property
    def interpolated(self) -> bool:
        """Whether images are of another size than the stored positions are for (images only)."""
        return self.image.trained is not None

    @property
    def channels(self) -> int:
        """Number of colour channels (images only)."""
        return self.image.channels

    @property
    def vocab(self) -> int:
        """Number of words; token ids are below it (text only)."""
        return self.text.vocab

    @property
    def max_positions(self) -> int:
        """Longest sentence in tokens (text only)."""
        return self.text.max_positions

    @property
    def type_vocab(self) -> int:
        """Number of token types (text only)."""
        return self.text.type_vocab

    @property
    def output_size(self) -> int:
        """Number of output values per item, or per token for ``tokens``."""
        if self.head != "vector":
            return self.num_labels
        if self.pooling is not None:
            return self.pooling.output_size(self.hidden)
        return self.pooler_size if self.pooler else self.hidden

    def output_shape(self, items: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of the output for ``items`` items of ``tokens`` tokens."""
        if self.head == "tokens":
            return items, tokens, self.output_size
        return items, self.output_size

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values by name, for comparing the models of two ranks.

        The sizes of the input stand beside the others, with zeros for those of the other kind of input:
        fingerprints that are stored with converted weights depend on this form.
        """
        fields = asdict(self)
        own = fields.pop("input")
        for derived in ("prefix_tokens", "trained"):  # follow from the family and the weights
            own.pop(derived, None)
        fields.update({**_NO_INPUT, **own})
        return {
            name: value
            for name, value in fields.items()
            if value is not None or name not in ("options", "pooling", "head_size")
        }


_NO_INPUT: Mapping[str, Any] = MappingProxyType(
    {
        "image_size": (0, 0),
        "patch_size": (0, 0),
        "channels": 0,
        "vocab": 0,
        "max_positions": 0,
        "type_vocab": 0,
    }
)
