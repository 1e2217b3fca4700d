"""Formats of result files: how the outputs of a microbatch become rows.

    .csv     item, source, label, the sentence if it is text, then class, name and score of the best five
    .jsonl   {"item": 0, "source": "a.png", "label": 3, "top": [{"class": 3, "name": "3", "score": 0.98}]}
    .npz     ``outputs`` float32 [items, ...]; ``labels`` int64 [items], -1 where unknown, if any is known;
             ``items`` int64 [items], positions in the input, if some item was skipped

A model that classifies every token has a list for each item instead, in the order of its tokens:

    .jsonl   {"item": 0, "source": "a.txt:1", "tokens": [{"class": 3, "name": "B-PER", "score": 0.98}, ...]}
    .npz     ``outputs`` float32 [tokens of all items, classes]; ``tokens`` int64 [items], how many are whose
"""

from __future__ import annotations

import csv
import json
import math
import shutil
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Protocol, TextIO

import numpy as np
import torch

from pipeedge.base.errors import PipeEdgeError

__all__ = ["FORMATS", "TOKEN_FORMATS", "NoRows", "ResultItems", "RowFormat"]

TOP_CLASSES = 5
UNKNOWN_LABEL = -1
# Earliest date that a zip file can hold. It is fixed so that equal results give equal files.
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


class ResultItems(Protocol):
    """Properties of a microbatch that matter for results; ``pipeedge.data.Microbatch`` has them."""

    @property
    def numbers(self) -> Sequence[int]:
        """Position of each item in the input, from 0."""

    @property
    def labels(self) -> Sequence[int | None]:
        """True class of each item, or None if not known."""

    @property
    def sources(self) -> Sequence[str]:
        """Source of each item."""

    @property
    def tokens(self) -> Sequence[int] | None:
        """Number of tokens of each item, or None for images."""

    @property
    def texts(self) -> Sequence[str] | None:
        """Sentence of each item, or None if they are not text."""


@dataclass(frozen=True)
class ResultRow:
    """An item and its best classes."""

    number: int
    source: str
    label: int | None
    classes: tuple[int, ...]
    """Class numbers, best first."""
    scores: tuple[float, ...]
    """Softmax scores of these classes, over all classes; the output itself if it is the only one."""
    text: str | None = None
    """Sentence of the item, or None if it is not text."""


def top_rows(outputs: torch.Tensor, items: ResultItems) -> list[ResultRow]:
    """Return the rows for logits ``outputs`` [items, classes]."""
    # float64 makes scores independent of how a processor sums many small float32 values. A single output is a
    # score by itself: of a regression, or of how well a passage answers a query.
    values = outputs.double() if outputs.shape[1] == 1 else outputs.double().softmax(dim=1)
    scores, classes = values.topk(min(TOP_CLASSES, outputs.shape[1]), dim=1)
    texts: Sequence[str | None] = items.texts or [None] * len(items.sources)
    return [
        ResultRow(number, source, label, tuple(best), tuple(values), text)
        for number, source, label, best, values, text in zip(
            items.numbers,
            items.sources,
            items.labels,
            classes.tolist(),
            scores.tolist(),
            texts,
            strict=True,
        )
    ]


class RowFormat(ABC):
    """A format of result files; an instance writes one file."""

    @abstractmethod
    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Append the rows of ``outputs`` [items, ...]."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the file."""

    @abstractmethod
    def close(self) -> None:
        """Close the file, complete or not."""


class NoRows(RowFormat):
    """A format for runs without a result file."""

    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class CsvRows(RowFormat):
    """A header and a line for each item; models with few classes have fewer columns."""

    def __init__(self, path: Path, labels: Sequence[str] | None) -> None:
        self._stream: TextIO = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._stream, lineterminator="\n")
        self._labels = labels
        self._has_header = False

    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Append a line for each item."""
        for row in top_rows(outputs, items):
            if not self._has_header:
                places = range(1, len(row.classes) + 1)
                best = [f"{column}_{place}" for place in places for column in ("class", "name", "score")]
                named = ["item", "source", "label", *(("text",) if row.text is not None else ())]
                self._writer.writerow([*named, *best])
                self._has_header = True
            cells: list[object] = [row.number, row.source, "" if row.label is None else row.label]
            if row.text is not None:
                cells.append(row.text)
            for number, score in zip(row.classes, row.scores, strict=True):
                cells += [number, class_name(self._labels, number) or "", f"{score:.6g}"]
            self._writer.writerow(cells)

    def finish(self) -> None:
        """Do nothing: every line is written already."""

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class JsonRows(RowFormat):
    """One JSON object per line. Unknown values are left out; a score of NaN or infinity is null."""

    def __init__(self, path: Path, labels: Sequence[str] | None) -> None:
        self._stream: TextIO = path.open("w", encoding="utf-8", newline="\n")
        self._labels = labels

    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Append a line for each item."""
        for row in top_rows(outputs, items):
            best = zip(row.classes, row.scores, strict=True)
            content = {"top": [self._entry(number, score) for number, score in best]}
            self._write_line(row.number, row.source, row.label, row.text, content)

    def finish(self) -> None:
        """Do nothing: every line is written already."""

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _write_line(
        self, item: int, source: str, label: int | None, text: str | None, content: Mapping[str, object]
    ) -> None:
        known = {"label": label, "text": text}
        given = {key: value for key, value in known.items() if value is not None}
        document = {"item": item, "source": source, **given, **content}
        self._stream.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")

    def _entry(self, number: int, score: float) -> dict[str, object]:
        name = class_name(self._labels, number)
        named: dict[str, object] = {} if name is None else {"name": name}
        return {"class": number, **named, "score": float(f"{score:.6g}") if math.isfinite(score) else None}


class ArrayRows(RowFormat):
    """The raw outputs as an array.

    An array begins with its shape, and the number of items is known only at the end. The values are therefore
    kept in an unnamed file until then.
    """

    def __init__(self, path: Path, labels: Sequence[str] | None) -> None:
        del labels  # an array of outputs has no room for class names
        self._target: BinaryIO = path.open("wb")
        self._values = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 (closed by close)
        self._shape: tuple[int, ...] | None = None
        self._rows = 0
        self._labels: list[int] = []
        self._numbers: list[int] = []

    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Append the outputs of each item."""
        self._append(outputs)
        self._note(items)

    def _append(self, outputs: torch.Tensor) -> None:
        """Append rows of values, which all have one shape."""
        shape = tuple(outputs.shape[1:])
        if self._shape not in (None, shape):
            raise PipeEdgeError(f"outputs of {shape} values an item follow outputs of {self._shape}")
        self._shape = shape
        self._rows += len(outputs)
        values = outputs.detach().to("cpu", torch.float32).contiguous().numpy()
        self._values.write(values.astype("<f4", copy=False).data)

    def _note(self, items: ResultItems) -> None:
        """Append what is written of the items beside their values."""
        self._labels += [UNKNOWN_LABEL if label is None else label for label in items.labels]
        self._numbers += items.numbers

    def finish(self) -> None:
        """Write the shape and the values to the file."""
        self._values.seek(0)
        with zipfile.ZipFile(self._target, "w", zipfile.ZIP_STORED) as archive:
            member = zipfile.ZipInfo("outputs.npy", ZIP_EPOCH)
            with archive.open(member, "w", force_zip64=True) as stream:
                header = {"descr": "<f4", "fortran_order": False, "shape": (self._rows, *(self._shape or ()))}
                np.lib.format.write_array_header_1_0(stream, header)
                shutil.copyfileobj(self._values, stream, 1 << 20)
            for name, values in self._companions().items():
                self._add(archive, name, values)

    def _companions(self) -> dict[str, list[int]]:
        """Return the arrays beside the values, by name."""
        labels = {"labels": self._labels} if any(label != UNKNOWN_LABEL for label in self._labels) else {}
        skipped = self._numbers != list(range(len(self._numbers)))
        return {**labels, **({"items": self._numbers} if skipped else {})}

    def close(self) -> None:
        """Close both files."""
        self._target.close()
        self._values.close()

    @staticmethod
    def _add(archive: zipfile.ZipFile, name: str, values: list[int]) -> None:
        with archive.open(zipfile.ZipInfo(f"{name}.npy", ZIP_EPOCH), "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, np.array(values, dtype="<i8"), allow_pickle=False)


class TokenJsonRows(JsonRows):
    """One JSON object per line, with the best class of each token that is not padding."""

    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Append a line for each item of ``outputs`` [items, tokens, classes]."""
        scores, classes = outputs.double().softmax(dim=2).max(dim=2)
        for row, length in enumerate(token_counts(outputs, items)):
            best = zip(classes[row, :length].tolist(), scores[row, :length].tolist(), strict=True)
            text = None if items.texts is None else items.texts[row]
            self._write_line(
                items.numbers[row],
                items.sources[row],
                items.labels[row],
                text,
                {"tokens": [self._entry(number, score) for number, score in best]},
            )


class TokenArrayRows(ArrayRows):
    """The raw outputs of all tokens in one array, item after item, without padding."""

    def __init__(self, path: Path, labels: Sequence[str] | None) -> None:
        super().__init__(path, labels)
        self._counts: list[int] = []

    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Append the tokens of each item of ``outputs`` [items, tokens, classes]."""
        counts = token_counts(outputs, items)
        for row, length in enumerate(counts):
            self._append(outputs[row, :length])
        self._counts += counts
        self._note(items)

    def _companions(self) -> dict[str, list[int]]:
        return {"tokens": self._counts, **super()._companions()}


def token_counts(outputs: torch.Tensor, items: ResultItems) -> list[int]:
    """Return the number of tokens of each item of ``outputs`` [items, tokens, classes]."""
    return [outputs.shape[1]] * len(outputs) if items.tokens is None else list(items.tokens)


FORMATS: Mapping[str, Callable[[Path, Sequence[str] | None], RowFormat]] = MappingProxyType(
    {".csv": CsvRows, ".jsonl": JsonRows, ".npz": ArrayRows}
)
TOKEN_FORMATS: Mapping[str, Callable[[Path, Sequence[str] | None], RowFormat]] = MappingProxyType(
    {".jsonl": TokenJsonRows, ".npz": TokenArrayRows}
)
"""Formats of results that have a class for each token."""


def class_name(labels: Sequence[str] | None, number: int) -> str | None:
    """Return the name of class ``number``, or None if not known."""
    return labels[number] if labels is not None and number < len(labels) else None
