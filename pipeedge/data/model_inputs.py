"""The little that reading input needs to know of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

__all__ = ["ModelConfig", "ModelInputs"]


class ModelConfig(Protocol):
    """Sizes of a model's input; only those of its own kind are read."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""

    @property
    def channels(self) -> int:
        """Colour channels of an image."""

    @property
    def vocab(self) -> int:
        """Token ids are below this."""

    @property
    def max_positions(self) -> int:
        """The longest sequence in tokens."""

    @property
    def type_vocab(self) -> int:
        """Token types are below this."""

    @property
    def num_labels(self) -> int:
        """Classes of the head; 0 without one."""


class ModelInputs(Protocol):
    """What this package needs to know of a model; ``pipeedge.models.Model`` fits."""

    @property
    def name(self) -> str:
        """The name it was asked for by."""

    @property
    def family(self) -> str:
        """``vit``, ``deit`` or ``bert``."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the tensors of a payload, in order."""

    @property
    def config(self) -> ModelConfig:
        """Sizes of its input."""

    @property
    def directory(self) -> Path | None:
        """A local Hugging Face directory that may hold its image processor or tokenizer."""
