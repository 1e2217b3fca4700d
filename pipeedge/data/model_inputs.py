"""Properties of a model that matter for reading its input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pipeedge.models.family import ImageDefaults

__all__ = ["ModelConfig", "ModelInputs"]


class ModelConfig(Protocol):
    """Sizes of a model's input; only those of its own kind are used."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""

    @property
    def interpolated(self) -> bool:
        """Whether images are of another size than the model's positions are for."""

    @property
    def channels(self) -> int:
        """Number of colour channels of an image."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary; token ids are below it."""

    @property
    def max_positions(self) -> int:
        """Length of the longest sequence in tokens."""

    @property
    def type_vocab(self) -> int:
        """Number of token types."""

    @property
    def num_labels(self) -> int:
        """Number of classes of the head; 0 without one."""


class ModelInputs(Protocol):
    """Properties of a model that this package uses; ``pipeedge.models.Model`` has them."""

    @property
    def name(self) -> str:
        """Name as given by the user."""

    @property
    def takes_text(self) -> bool:
        """Whether the model takes sentences, rather than images."""

    @property
    def output_kind(self) -> str:
        """Kind of output: ``logits``, one value per class; ``tokens``, the same of each token; ``vector``."""

    @property
    def labels(self) -> Sequence[str] | None:
        """Names of the classes, or None if not known."""

    @property
    def full_length(self) -> bool:
        """Whether every sentence is padded to the longest length, because the result depends on it."""

    @property
    def image_defaults(self) -> ImageDefaults:
        """How images become its input where no file describes it."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the tensors of a payload, in order."""

    @property
    def config(self) -> ModelConfig:
        """Sizes of its input."""

    @property
    def directory(self) -> Path | None:
        """Local Hugging Face directory, which may hold its image processor or tokenizer."""
