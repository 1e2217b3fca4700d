"""What a run gives back: one row for every input item, in input order, and the accuracy.

    .csv     item, source, label, the sentence if it is text, then class, name and score of the best five
    .jsonl   {"item": 0, "source": "a.png", "label": 3, "top": [{"class": 3, "name": "3", "score": 0.98}]}
    .npz     ``outputs`` float32 [items, ...]; ``labels`` int64 [items], -1 where unknown, if any is known;
             ``items`` int64 [items], the places in the input, if some input was left out

Rows go to a temporary file beside the target as they arrive, so memory does not grow with the input; the
file takes its name when the last row is in. A run that fails leaves nothing under that name.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import BinaryIO, Protocol, TextIO

import numpy as np
import torch

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.files import check_writable, temporary_beside

__all__ = ["Accuracy", "ResultItems", "ResultModel", "ResultWriter", "TOP_CLASSES", "check_output_path"]

TOP_CLASSES = 5
UNKNOWN_LABEL = -1
# The earliest date a zip file can hold: equal results give equal files.
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


class ResultModel(Protocol):
    """What writing results needs to know of a model; ``pipeedge.models.Model`` fits."""

    @property
    def name(self) -> str:
        """The name it was asked for by."""

    @property
    def labels(self) -> Sequence[str] | None:
        """Names of its classes, if known."""

    @property
    def output_kind(self) -> str:
        """``logits``: one value for each class; ``vector``: a model without a head."""


class ResultItems(Protocol):
    """What writing results needs to know of a microbatch; ``pipeedge.data.Microbatch`` fits."""

    @property
    def numbers(self) -> Sequence[int]:
        """The place of each item in the input, from 0."""

    @property
    def labels(self) -> Sequence[int | None]:
        """The true class of each item, where known."""

    @property
    def sources(self) -> Sequence[str]:
        """Where each item came from."""

    @property
    def texts(self) -> Sequence[str] | None:
        """The sentence of each item; None if they are not text."""


@dataclass(frozen=True)
class Accuracy:
    """How often the first class was the true one."""

    correct: int = 0
    labelled: int = 0
    """Items whose true class is known."""

    @property
    def top1(self) -> float | None:
        """The fraction of labelled items that are correct; None without any."""
        return self.correct / self.labelled if self.labelled else None

    def with_outputs(self, outputs: torch.Tensor, labels: Sequence[int | None]) -> Accuracy:
        """This count and that of logits ``outputs`` [items, classes] against ``labels`` [items]."""
        best = outputs.argmax(dim=1).tolist()
        known = [(first, label) for first, label in zip(best, labels, strict=True) if label is not None]
        correct = sum(first == label for first, label in known)
        return Accuracy(self.correct + correct, self.labelled + len(known))


@dataclass(frozen=True)
class Row:
    """One item and its best classes."""

    number: int
    source: str
    label: int | None
    classes: tuple[int, ...]
    """Best first."""
    scores: tuple[float, ...]
    """Their softmax over all classes."""
    text: str | None = None
    """Its sentence, if it is one."""


def top_rows(outputs: torch.Tensor, items: ResultItems) -> list[Row]:
    """The rows of logits ``outputs`` [items, classes]."""
    # In float64, so that a score does not depend on how a processor sums many small float32 values.
    scores, classes = outputs.double().softmax(dim=1).topk(min(TOP_CLASSES, outputs.shape[1]), dim=1)
    texts: Sequence[str | None] = items.texts or [None] * len(items.sources)
    return [
        Row(number, source, label, tuple(best), tuple(values), text)
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
    """One kind of result file, while it is written."""

    @abstractmethod
    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Append the rows of ``outputs`` [items, ...]."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the file."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it, complete or not."""


class NoRows(RowFormat):
    """Nobody asked for a file."""

    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class CsvRows(RowFormat):
    """A header and a line for each item; columns of a class the model does not have are left out."""

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
        """Every line is written already."""

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class JsonRows(RowFormat):
    """A JSON object a line; what is not known is left out, a score that is no number is null."""

    def __init__(self, path: Path, labels: Sequence[str] | None) -> None:
        self._stream: TextIO = path.open("w", encoding="utf-8", newline="\n")
        self._labels = labels

    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Append a line for each item."""
        for row in top_rows(outputs, items):
            document: dict[str, object] = {"item": row.number, "source": row.source}
            if row.label is not None:
                document["label"] = row.label
            if row.text is not None:
                document["text"] = row.text
            document["top"] = [
                self._entry(number, score) for number, score in zip(row.classes, row.scores, strict=True)
            ]
            self._stream.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")

    def finish(self) -> None:
        """Every line is written already."""

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _entry(self, number: int, score: float) -> dict[str, object]:
        name = class_name(self._labels, number)
        named: dict[str, object] = {} if name is None else {"name": name}
        return {"class": number, **named, "score": float(f"{score:.6g}") if math.isfinite(score) else None}


class ArrayRows(RowFormat):
    """The raw outputs as an array.

    An array begins with its shape, and how many items come is known at the end, so the values wait in an
    unnamed file until then.
    """

    def __init__(self, path: Path, labels: Sequence[str] | None) -> None:
        del labels  # the names of classes have no place in an array of outputs
        self._target: BinaryIO = path.open("wb")
        self._values = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 (closed by close)
        self._shape: tuple[int, ...] | None = None
        self._labels: list[int] = []
        self._numbers: list[int] = []

    def write(self, outputs: torch.Tensor, items: ResultItems) -> None:
        """Append the outputs of each item."""
        shape = tuple(outputs.shape[1:])
        if self._shape not in (None, shape):
            raise PipeEdgeError(f"outputs of {shape} values an item follow outputs of {self._shape}")
        self._shape = shape
        values = outputs.detach().to("cpu", torch.float32).contiguous().numpy()
        self._values.write(values.astype("<f4", copy=False).data)
        self._labels += [UNKNOWN_LABEL if label is None else label for label in items.labels]
        self._numbers += items.numbers

    def finish(self) -> None:
        """Put shape and values together."""
        count = len(self._numbers)
        self._values.seek(0)
        with zipfile.ZipFile(self._target, "w", zipfile.ZIP_STORED) as archive:
            member = zipfile.ZipInfo("outputs.npy", ZIP_EPOCH)
            with archive.open(member, "w", force_zip64=True) as stream:
                header = {"descr": "<f4", "fortran_order": False, "shape": (count, *(self._shape or ()))}
                np.lib.format.write_array_header_1_0(stream, header)
                shutil.copyfileobj(self._values, stream, 1 << 20)
            if any(label != UNKNOWN_LABEL for label in self._labels):
                self._add(archive, "labels", self._labels)
            if self._numbers != list(range(count)):
                self._add(archive, "items", self._numbers)

    def close(self) -> None:
        """Close both files."""
        self._target.close()
        self._values.close()

    @staticmethod
    def _add(archive: zipfile.ZipFile, name: str, values: list[int]) -> None:
        with archive.open(zipfile.ZipInfo(f"{name}.npy", ZIP_EPOCH), "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, np.array(values, dtype="<i8"), allow_pickle=False)


FORMATS: Mapping[str, Callable[[Path, Sequence[str] | None], RowFormat]] = MappingProxyType(
    {".csv": CsvRows, ".jsonl": JsonRows, ".npz": ArrayRows}
)


def class_name(labels: Sequence[str] | None, number: int) -> str | None:
    """The name of class ``number``, if known."""
    return labels[number] if labels is not None and number < len(labels) else None


def check_output_path(path: Path, model: ResultModel) -> None:
    """Refuse a result file that could not be written at the end of the run.

    Raises:
        RequestError: the suffix is unknown or does not suit the model, or the place is not writable.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise RequestError(f"--output {path}: unknown suffix {suffix!r}; use {', '.join(FORMATS)}")
    if model.output_kind == "vector" and suffix != ".npz":
        raise RequestError(
            f"--output {path}: {model.name} gives vectors, not classes, and those go to .npz only"
        )
    check_writable(path, "--output")


class ResultWriter:
    """Writes the results of a run; a context manager.

    Leaving it normally completes the file, leaving it by an exception removes it. Without ``path`` only
    the order and the number of the results are checked.

    Raises:
        RequestError: on creation, before anything runs, if ``path`` cannot take results of ``model``.
    """

    def __init__(self, path: Path | None, model: ResultModel, expected_items: int | None) -> None:
        if path is not None:
            check_output_path(path, model)
            path = path.resolve()  # through a link, which is to stay one
        self._path = path
        self._model = model
        self._expected_items = expected_items
        self._temporary: Path | None = None
        self._rows: RowFormat = NoRows()
        self._next_microbatch = 0
        self._items = 0

    @property
    def items(self) -> int:
        """How many items are written so far."""
        return self._items

    def __enter__(self) -> ResultWriter:
        if self._path is not None:
            self._temporary = temporary_beside(self._path)
            with self._naming_the_file():
                self._rows = FORMATS[self._path.suffix.lower()](self._temporary, self._model.labels)
        return self

    def write(self, microbatch_number: int, outputs: torch.Tensor, microbatch: ResultItems) -> None:
        """Append the results of one microbatch; they come in the order of their numbers, from 0.

        ``outputs`` is [items, classes] or, for a model without a head, [items, ...].
        """
        if microbatch_number != self._next_microbatch:
            raise PipeEdgeError(
                f"results of microbatch {microbatch_number} came where {self._next_microbatch} was due"
            )
        if len(outputs) != len(microbatch.sources):
            raise PipeEdgeError(
                f"microbatch {microbatch_number} has {len(microbatch.sources)} items, "
                f"its results {len(outputs)}"
            )
        with self._naming_the_file():
            self._rows.write(outputs, microbatch)
        self._next_microbatch += 1
        self._items += len(outputs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            with suppress(OSError):  # a full disk shows again when what is buffered cannot be written
                self._rows.close()
            if self._temporary is not None:
                self._temporary.unlink(missing_ok=True)  # gone already if it got its name

    def _complete(self) -> None:
        if self._expected_items is not None and self._items != self._expected_items:
            raise PipeEdgeError(f"{self._items} results for {self._expected_items} items")
        with self._naming_the_file():
            self._rows.finish()
            self._rows.close()
            if self._temporary is not None and self._path is not None:
                self._temporary.replace(self._path)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestError(f"--output {self._path}: cannot be written ({error.strerror})") from error
