"""Results of a run: one row for every input item, in input order, and the accuracy.

    .csv     item, source, label, the sentence if it is text, then class, name and score of the best five
    .jsonl   {"item": 0, "source": "a.png", "label": 3, "top": [{"class": 3, "name": "3", "score": 0.98}]}
    .npz     ``outputs`` float32 [items, ...]; ``labels`` int64 [items], -1 where unknown, if any is known;
             ``items`` int64 [items], positions in the input, if some item was skipped

Rows are written to a temporary file beside the target as they arrive, so memory does not grow with the input.
The file gets its name after the last row. A run that fails leaves nothing under that name.
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
# Earliest date that a zip file can hold. It is fixed so that equal results give equal files.
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


class ResultModel(Protocol):
    """Properties of a model that matter for results; ``pipeedge.models.Model`` has them."""

    @property
    def name(self) -> str:
        """Name as given by the user."""

    @property
    def labels(self) -> Sequence[str] | None:
        """Names of the classes, or None if not known."""

    @property
    def output_kind(self) -> str:
        """Kind of output: ``logits``, one value per class, or ``vector`` for a model without a head."""


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
    def texts(self) -> Sequence[str] | None:
        """Sentence of each item, or None if they are not text."""


@dataclass(frozen=True)
class Accuracy:
    """Number of items whose best class is the true one."""

    correct: int = 0
    labelled: int = 0
    """Number of items whose true class is known."""

    @property
    def top1(self) -> float | None:
        """Fraction of labelled items that are correct, or None if there are none."""
        return self.correct / self.labelled if self.labelled else None

    def with_outputs(self, outputs: torch.Tensor, labels: Sequence[int | None]) -> Accuracy:
        """Return this count plus that of logits ``outputs`` [items, classes] against ``labels`` [items].

        A single output is no choice among classes, so it is not counted.
        """
        if outputs.shape[1] == 1:
            return self
        best = outputs.argmax(dim=1).tolist()
        known = [(first, label) for first, label in zip(best, labels, strict=True) if label is not None]
        correct = sum(first == label for first, label in known)
        return Accuracy(self.correct + correct, self.labelled + len(known))


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
        """Do nothing: every line is written already."""

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

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
        """Write the shape and the values to the file."""
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
    """Return the name of class ``number``, or None if not known."""
    return labels[number] if labels is not None and number < len(labels) else None


def check_output_path(path: Path, model: ResultModel) -> None:
    """Check before a run that a result file can be written at its end.

    Raises:
        RequestError: The suffix is unknown or does not suit the model, or the directory is not writable.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise RequestError(f"--output {path}: unknown suffix {suffix!r}; use {', '.join(FORMATS)}")
    if model.output_kind == "vector" and suffix != ".npz":
        raise RequestError(
            f"--output {path}: {model.name} gives vectors, not classes; vectors are written to .npz only"
        )
    check_writable(path, "--output")


class ResultWriter:
    """Writer of the results of a run; a context manager.

    Leaving the context normally completes the file; leaving it by an exception removes the file. Without
    ``path`` only the order and the number of the results are checked.

    Raises:
        RequestError: On creation, before anything runs, if ``path`` cannot take results of ``model``.
    """

    def __init__(self, path: Path | None, model: ResultModel, expected_items: int | None) -> None:
        if path is not None:
            check_output_path(path, model)
            path = path.resolve()  # follow a link, so that the link itself is not replaced
        self._path = path
        self._model = model
        self._expected_items = expected_items
        self._temporary: Path | None = None
        self._rows: RowFormat = NoRows()
        self._next_microbatch = 0
        self._items = 0

    @property
    def items(self) -> int:
        """Number of items written so far."""
        return self._items

    def __enter__(self) -> ResultWriter:
        if self._path is not None:
            self._temporary = temporary_beside(self._path)
            with self._naming_the_file():
                self._rows = FORMATS[self._path.suffix.lower()](self._temporary, self._model.labels)
        return self

    def write(self, microbatch_number: int, outputs: torch.Tensor, microbatch: ResultItems) -> None:
        """Append the results of one microbatch; they must come in the order of their numbers, from 0.

        ``outputs`` is [items, classes] or, for a model without a head, [items, ...].
        """
        if microbatch_number != self._next_microbatch:
            raise PipeEdgeError(
                f"received results of microbatch {microbatch_number}, expected {self._next_microbatch}"
            )
        if len(outputs) != len(microbatch.sources):
            raise PipeEdgeError(
                f"microbatch {microbatch_number} has {len(microbatch.sources)} items, "
                f"but {len(outputs)} results"
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
            with suppress(OSError):  # a full disk fails again when buffers are flushed
                self._rows.close()
            if self._temporary is not None:
                self._temporary.unlink(missing_ok=True)  # missing if it was renamed

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
