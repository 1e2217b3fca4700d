"""What the user asked to run, and the little that reading it needs to know of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeedge.errors import InputError

__all__ = ["DEFAULT_BATCH_SIZE", "InputRequest", "ModelConfig", "ModelInputs"]

DEFAULT_BATCH_SIZE = 64
DATASET_NAMES = ("CoLA", "ImageNet")


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


@dataclass(frozen=True)
class InputRequest:
    """Which items to run. Without ``paths`` and ``dataset_name``, the default input that is shipped."""

    paths: tuple[Path, ...] = ()
    """Image files, folders of images, ``.txt`` or ``.npz`` files; all of one kind."""
    dataset_name: str | None = None
    """``CoLA`` or ``ImageNet``."""
    dataset_root: Path | None = None
    """Where the data set's files are (ImageNet: its archives or an image folder)."""
    dataset_split: str | None = None
    """``train``, ``val``/``validation`` or ``test``; None: ``train``, as in the original."""
    dataset_indices_file: Path | None = None
    """A text file with the index of one item of the data set a line."""
    dataset_shuffle: bool = False
    """Take the items of the data set in a random order that ``seed`` fixes."""
    seed: int = 0
    """Fixes the order of ``dataset_shuffle``."""
    batch_size: int | None = None
    """At most this many items; None: all of ``paths``, all of ``dataset_indices_file``, or 64."""
    skip_bad_input: bool = False
    """Leave out images that cannot be read, and report them, instead of failing at the first."""
    companion_directory: Path | None = None
    """One more directory that may hold a tokenizer or image processor: that of the weights file."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch size {self.batch_size}: must be at least 1")
        if self.dataset_name is not None and self.dataset_name not in DATASET_NAMES:
            known = " or ".join(DATASET_NAMES)
            raise InputError(f"data set {self.dataset_name!r} is not known: choose {known}")
        if self.paths and self.dataset_name is not None:
            raise InputError("give either --input or --dataset-name, not both")
        if self.dataset_name is None:
            self._refuse_without_dataset()
        if self.seed < 0:
            raise InputError(f"seed {self.seed}: must not be negative")

    def _refuse_without_dataset(self) -> None:
        set_without_effect = {
            "--dataset-root": self.dataset_root is not None,
            "--dataset-split": self.dataset_split is not None,
            "--dataset-indices-file": self.dataset_indices_file is not None,
            "--dataset-shuffle": self.dataset_shuffle,
        }
        for option, is_set in set_without_effect.items():
            if is_set:
                raise InputError(f"{option} needs --dataset-name {{{','.join(DATASET_NAMES)}}}")
