"""``.npz`` files whose arrays are named as the model's inputs, optionally with ``labels``."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeedge.data.model_inputs import ModelInputs
from pipeedge.data.source import Item
from pipeedge.errors import InputError
from pipeedge.wording import count

__all__ = ["ArrayItems"]

LABELS = "labels"
PIXELS = "pixel_values"
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"


@dataclass(frozen=True)
class ArrayItems:
    """The rows of the arrays of one file."""

    path: Path
    tensors: tuple[torch.Tensor, ...]
    """One for each of the model's inputs, [items, ...]."""
    labels: tuple[int | None, ...]
    max_tokens: int | None

    in_memory = True
    pixels = None

    @property
    def has_labels(self) -> bool:
        """Whether some row has a label."""
        return any(label is not None for label in self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def source(self, index: int) -> str:
        """The file and the row."""
        return f"{self.path}[{index}]"

    def read(self, index: int) -> Item:
        """Row ``index``."""
        return Item(tuple(tensor[index] for tensor in self.tensors), self.labels[index], self.source(index))

    @classmethod
    def open(cls, path: Path, model: ModelInputs) -> ArrayItems:
        """Read ``path`` and check every array against ``model``.

        ``pixel_values`` is floating point [items, channels, height, width]; ``input_ids``,
        ``attention_mask`` and ``token_type_ids`` are integers [items, tokens], the last of them zeros if
        left out; ``labels`` are integers [items], negative where unknown.

        Raises:
            InputError: the file cannot be read, or an array is missing or does not fit.
        """
        arrays, stored = read_arrays(path, (*model.input_names, LABELS))
        if IDS in model.input_names and TYPES not in arrays and IDS in arrays:
            arrays[TYPES] = np.zeros_like(arrays[IDS])
        missing = [name for name in model.input_names if name not in arrays]
        if missing:
            raise InputError(
                f"{path}: no array {missing[0]!r}, which {model.name} needs (found: {listed(stored)})"
            )
        inputs = {name: arrays[name] for name in model.input_names}
        for name, array in inputs.items():
            if name == PIXELS:
                check_pixels(path, array, model)
            else:
                check_tokens(path, name, array, model)
        if IDS in inputs and len({array.shape[1] for array in inputs.values()}) > 1:
            tokens = listed(f"{name} {array.shape[1]}" for name, array in inputs.items())
            raise InputError(f"{path}: the arrays have different numbers of tokens an item ({tokens})")
        counts = {name: len(array) for name, array in inputs.items()}
        labels = arrays.get(LABELS)
        if labels is not None:
            check_labels(path, labels)
            counts[LABELS] = len(labels)
        if len(set(counts.values())) > 1:
            rows = listed(f"{name} {count}" for name, count in counts.items())
            raise InputError(f"{path}: the arrays have different numbers of items ({rows})")
        items = counts[model.input_names[0]]
        if items == 0:
            raise InputError(f"{path}: the arrays hold no item")
        with np.errstate(over="ignore"):  # the next check says it better
            tensors = tuple(
                torch.from_numpy(np.ascontiguousarray(array, np.float32 if name == PIXELS else np.int64))
                for name, array in inputs.items()
            )
        if PIXELS in inputs and not all(bool(row.isfinite().all()) for row in tensors[0]):
            raise InputError(f"{path}: {PIXELS} has values that are not finite")
        known = [None] * items if labels is None else [int(label) if label >= 0 else None for label in labels]
        return cls(path, tensors, tuple(known), inputs[IDS].shape[1] if IDS in inputs else None)


def read_arrays(path: Path, names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Those of the arrays ``names`` that the file has, and the names of all it has."""
    try:
        stored = np.load(path, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise InputError(f"{path}: holds one plain array; np.savez writes named ones")
        with stored:
            return {name: stored[name] for name in names if name in stored.files}, stored.files
    except (OSError, ValueError, EOFError, MemoryError, zlib.error, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: cannot be read as .npz ({error})") from error


def listed(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(names) or "none"


def check_pixels(path: Path, array: np.ndarray, model: ModelInputs) -> None:
    """Floating point, and of the model's size."""
    size = (model.config.channels, *model.config.image_size)
    if array.ndim != 4 or array.shape[1:] != size:
        takes = ", ".join(map(str, size))
        raise InputError(f"{path}: {PIXELS} is {list(array.shape)}, {model.name} takes [items, {takes}]")
    if array.dtype.kind != "f":
        raise InputError(
            f"{path}: {PIXELS} is {array.dtype}, not floating point: values must be normalised as in training"
        )


def check_tokens(path: Path, name: str, array: np.ndarray, model: ModelInputs) -> None:
    """Integers [items, tokens] in the range that the model has for ``name``."""
    if array.ndim != 2:
        raise InputError(f"{path}: {name} is {list(array.shape)}, {model.name} takes [items, tokens]")
    if array.dtype.kind not in ("iub" if name == MASK else "iu"):
        raise InputError(f"{path}: {name} is {array.dtype}, not a type of integers")
    tokens = array.shape[1]
    if not 1 <= tokens <= model.config.max_positions:
        raise InputError(
            f"{path}: {name} has {count(tokens, 'token')} an item, "
            f"{model.name} takes 1 to {model.config.max_positions}"
        )
    if not len(array):
        return
    limit = {IDS: model.config.vocab, MASK: 2, TYPES: model.config.type_vocab}[name]
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= limit:
        raise InputError(
            f"{path}: {name} has {low if low < 0 else high}, {model.name} takes 0 to {limit - 1}"
        )
    if name == MASK and not array.any(axis=1).all():
        row = int(np.flatnonzero(~array.any(axis=1))[0])
        raise InputError(f"{path}: {name} hides every token of item {row}")


def check_labels(path: Path, labels: np.ndarray) -> None:
    """Integers [items]."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InputError(f"{path}: {LABELS} is {labels.dtype} {list(labels.shape)}, not integers [items]")
