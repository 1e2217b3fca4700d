"""``.npz`` files whose arrays are named after the model's inputs, optionally with ``labels``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pipeedge.base.archive import ArrayHeader, NpzArchive, read_exactly
from pipeedge.base.errors import InputError
from pipeedge.base.machine import available_bytes
from pipeedge.base.wording import count, excerpt, figure
from pipeedge.data.items import NO_TOKENS, Item
from pipeedge.data.labels import MAX_LABEL, Classes
from pipeedge.models.outline import Outline

__all__ = ["ArrayItems"]

MB = 1 << 20
WIDEST_BYTES = 8
"""Size in bytes of a value when it is run: tokens are int64, pixels float32."""
LABELS = "labels"
PIXELS = "pixel_values"
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"


@dataclass(frozen=True)
class ArrayItems:
    """The rows of the arrays of one file."""

    path: Path
    tensors: tuple[torch.Tensor, ...]
    """One tensor for each of the model's inputs, [items, ...]."""
    labels: tuple[int | None, ...]
    max_tokens: int | None
    mask: torch.Tensor | None = None
    """Which positions hold tokens, bool [items, tokens], or None if all do."""

    in_memory = True
    pixels = None

    @property
    def token_counts(self) -> Mapping[int, int]:
        """How many rows there are of the one number of tokens; empty for images."""
        return NO_TOKENS if self.max_tokens is None else {self.max_tokens: len(self)}

    @property
    def has_labels(self) -> bool:
        """Whether some row has a label."""
        return any(label is not None for label in self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def source(self, index: int) -> str:
        """Return the file and the row."""
        return f"{self.path}[{index}]"

    def read(self, index: int) -> Item:
        """Return row ``index``."""
        return Item(
            tuple(tensor[index] for tensor in self.tensors),
            self.labels[index],
            self.source(index),
            mask=None if self.mask is None else self.mask[index],
        )

    @classmethod
    def open(cls, path: Path, model: Outline, limit: int | None = None) -> ArrayItems:
        """Check every array of ``path`` against ``model`` and read its first ``limit`` rows.

        ``pixel_values`` is floating point [items, channels, height, width]; ``input_ids``, ``attention_mask``
        and ``token_type_ids`` are integers [items, tokens], with zeros for the last if it is missing;
        ``labels`` are integers [items], negative if unknown.

        Raises:
            InputError: The file cannot be read, an array is missing or does not fit, or there is not enough
                memory.
        """
        with _opened(path) as archive:
            stored = list(archive.members)
            wanted = [name for name in (*model.input_names, LABELS) if name in stored]
            headers = {name: archive.header(name) for name in wanted}
            if IDS in headers and TYPES in model.input_names and TYPES not in headers:
                headers[TYPES] = headers[IDS]
            _check_headers(path, headers, stored, model)
            items = headers[model.input_names[0]].shape[0]
            rows = items if limit is None else min(limit, items)
            _check_memory(path, headers, rows, items)
            arrays = {name: _read_rows(path, archive, name, headers[name], rows) for name in wanted}
        return cls._checked(path, arrays, model)

    @classmethod
    def of(cls, name: str, arrays: Mapping[str, np.ndarray], model: Outline) -> ArrayItems:
        """Return the rows of arrays in memory, checked like those of a file that is called ``name``.

        Raises:
            InputError: An array is missing or does not fit.
        """
        path = Path(name)
        wanted = {key: arrays[key] for key in (*model.input_names, LABELS) if key in arrays}
        headers = {key: ArrayHeader(one.shape, one.dtype, column_major=False) for key, one in wanted.items()}
        if IDS in headers and TYPES in model.input_names and TYPES not in headers:
            headers[TYPES] = headers[IDS]
        _check_headers(path, headers, list(arrays), model)
        return cls._checked(path, wanted, model)

    @classmethod
    def _checked(cls, path: Path, arrays: dict[str, np.ndarray], model: Outline) -> ArrayItems:
        """Check the values of ``arrays``, whose headers fit, and return their rows."""
        rows = len(arrays[model.input_names[0]])
        if IDS in arrays and TYPES in model.input_names and TYPES not in arrays:
            arrays[TYPES] = np.zeros_like(arrays[IDS])
        inputs = {name: arrays[name] for name in model.input_names}
        for name, array in inputs.items():
            if name != PIXELS:
                check_tokens(path, name, array, model)
        labels = arrays.get(LABELS)
        if labels is not None:
            check_label_values(path, labels, Classes.of(model))
        with np.errstate(over="ignore"):  # the next check has a better message
            tensors = tuple(
                torch.from_numpy(np.ascontiguousarray(array, np.float32 if name == PIXELS else np.int64))
                for name, array in inputs.items()
            )
        if PIXELS in inputs and not all(bool(row.isfinite().all()) for row in tensors[0]):
            raise InputError(f"{path}: {PIXELS} has values that are not finite")
        known = [None] * rows if labels is None else [int(label) if label >= 0 else None for label in labels]
        mask = torch.from_numpy(inputs[MASK] != 0) if MASK in inputs else None
        return cls(
            path,
            tensors,
            tuple(known),
            inputs[IDS].shape[1] if IDS in inputs else None,
            None if mask is None or bool(mask.all()) else mask,
        )


def _opened(path: Path) -> NpzArchive:
    if path.exists() and not path.is_file():  # opening a pipe would block until somebody writes to it
        raise InputError(f"{path}: is not a regular file")
    try:
        with path.open("rb") as file:
            plain = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if plain:
        raise InputError(f"{path}: holds one plain array; np.savez writes named ones")
    return NpzArchive(path, InputError)


def _check_headers(
    path: Path, headers: Mapping[str, ArrayHeader], stored: Sequence[str], model: Outline
) -> None:
    """Compare shapes and number types with what ``model`` takes, before reading any data."""
    missing = [name for name in model.input_names if name not in headers]
    if missing:
        names = excerpt(listed(stored), 200)
        raise InputError(f"{path}: no array {missing[0]!r}, which {model.name} needs (found: {names})")
    inputs = {name: headers[name] for name in model.input_names}
    for name, header in inputs.items():
        if name == PIXELS:
            check_pixels(path, header, model)
        else:
            check_token_header(path, name, header, model)
    if IDS in inputs and len({header.shape[1] for header in inputs.values()}) > 1:
        tokens = listed(f"{name} {header.shape[1]}" for name, header in inputs.items())
        raise InputError(f"{path}: the arrays have different numbers of tokens an item ({tokens})")
    if LABELS in headers:
        check_labels(path, headers[LABELS])
    counts = {name: header.shape[0] for name, header in headers.items()}
    if len(set(counts.values())) > 1:
        rows = listed(f"{name} {number}" for name, number in counts.items())
        raise InputError(f"{path}: the arrays have different numbers of items ({rows})")
    if not counts[model.input_names[0]]:
        raise InputError(f"{path}: the arrays contain no items")


def _check_memory(path: Path, headers: Mapping[str, ArrayHeader], rows: int, items: int) -> None:
    """Check that the rows fit into memory, both as stored and as run. Column-major arrays are read whole."""
    needed = 0
    for header in headers.values():
        row = math.prod(header.shape[1:])
        needed += row * (items if header.column_major else rows) * header.dtype.itemsize
        needed += row * rows * WIDEST_BYTES
    free = available_bytes()
    if needed > free:
        raise InputError(
            f"{path}: reading {count(rows, 'item')} takes {figure(needed / MB)} MB, "
            f"{figure(free / MB)} MB are free; run fewer (-b)"
        )


def _read_rows(path: Path, archive: NpzArchive, name: str, header: ArrayHeader, rows: int) -> np.ndarray:
    """Read the first ``rows`` rows of an array, using no more memory than they take."""
    whole = header.column_major or rows == header.shape[0]
    shape = header.shape if whole else (rows, *header.shape[1:])
    with archive.data(name, to_the_end=whole) as stream:
        data = read_exactly(stream, math.prod(shape) * header.dtype.itemsize)
    if data is None:
        raise InputError(f"{path} is truncated: the data of {name}, shape {list(header.shape)}, ends early")
    order: Literal["C", "F"] = "F" if header.column_major else "C"
    return np.frombuffer(data, header.dtype).reshape(shape, order=order)[:rows]


def listed(names: Iterable[str]) -> str:
    """Return the names as a list for a message."""
    return ", ".join(names) or "none"


def check_pixels(path: Path, header: ArrayHeader, model: Outline) -> None:
    """Check that the array is floating point and has the model's image size."""
    size = (model.config.channels, *model.config.image_size)
    if len(header.shape) != 4 or header.shape[1:] != size:
        takes = ", ".join(map(str, size))
        raise InputError(
            f"{path}: {PIXELS} is {excerpt(list(header.shape))}, {model.name} takes [items, {takes}]"
        )
    if header.dtype.kind != "f":
        raise InputError(
            f"{path}: {PIXELS} is {excerpt(header.dtype)}, not floating point: "
            "values must be normalised as in training"
        )


def check_token_header(path: Path, name: str, header: ArrayHeader, model: Outline) -> None:
    """Check that the array is integers [items, tokens] with as many tokens as the model takes."""
    if len(header.shape) != 2:
        shape = excerpt(list(header.shape))
        raise InputError(f"{path}: {name} is {shape}, {model.name} takes [items, tokens]")
    if header.dtype.kind not in ("iub" if name == MASK else "iu"):
        raise InputError(f"{path}: {name} is {excerpt(header.dtype)}, not a type of integers")
    tokens = header.shape[1]
    if not 1 <= tokens <= model.config.max_positions:
        raise InputError(
            f"{path}: {name} has {count(tokens, 'token')} an item, "
            f"{model.name} takes 1 to {model.config.max_positions}"
        )


def check_tokens(path: Path, name: str, array: np.ndarray, model: Outline) -> None:
    """Check that values are in the model's range for ``name``."""
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
        raise InputError(f"{path}: {name} masks every token of item {row}")


def check_labels(path: Path, header: ArrayHeader) -> None:
    """Check that the labels are integers [items]."""
    if len(header.shape) != 1 or header.dtype.kind not in "iu":
        shown = f"{excerpt(header.dtype)} {excerpt(list(header.shape))}"
        raise InputError(f"{path}: {LABELS} is {shown}, not integers [items]")


def check_label_values(path: Path, labels: np.ndarray, classes: Classes) -> None:
    """Check that no label is beyond the model's classes."""
    beyond = np.flatnonzero(labels >= classes.count if classes.count else labels > MAX_LABEL)
    if len(beyond):
        row = int(beyond[0])
        what = f"of {classes.model}; {classes.described}" if classes.count else "number"
        raise InputError(f"{path}[{row}]: {LABELS} has {labels[row]}, not a class {what}")
