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
import io
import json
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO, Protocol

import numpy as np
import torch
from msgspec import structs

from pipeedge.base.errors import PipeEdgeError
from pipeedge.data.unfinished import Rows, UnfinishedOutput

__all__ = ["FORMATS", "TOKEN_FORMATS", "ResultItems", "RowFormat", "class_name", "class_scores"]

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


def class_scores(outputs: torch.Tensor) -> torch.Tensor:
    """Return the scores of all classes, as float64, for logits ``outputs`` [items, classes]."""
    # float64 makes scores independent of how a processor sums many small float32 values. A single output is a
    # score by itself: of a regression, or of how well a passage answers a query.
    return outputs.double() if outputs.shape[1] == 1 else outputs.double().softmax(dim=1)


def top_rows(outputs: torch.Tensor, items: ResultItems) -> list[ResultRow]:
    """Return the rows for logits ``outputs`` [items, classes]."""
    scores, classes = class_scores(outputs).topk(min(TOP_CLASSES, outputs.shape[1]), dim=1)
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
    """A format of result files; an instance makes one file.

    Args:
        labels: Names of the classes, or None if not known.
    """

    def __init__(self, labels: Sequence[str] | None) -> None:
        self._labels = labels

    @abstractmethod
    def encode(self, outputs: torch.Tensor, items: ResultItems, *, is_first: bool) -> bytes:
        """Return the rows of ``outputs`` [items, ...]; ``is_first`` if no rows precede them."""

    def describe(self, outputs: torch.Tensor, items: ResultItems) -> Rows:
        """Return what must be known of the rows of ``outputs`` when the file is assembled."""
        del outputs
        labels = tuple(UNKNOWN_LABEL if label is None else label for label in items.labels)
        return Rows(tuple(items.numbers), labels)

    def assemble(self, unfinished: UnfinishedOutput, target: BinaryIO) -> None:
        """Write the complete file."""
        for payload in unfinished.payloads():
            target.write(payload)


class CsvRows(RowFormat):
    """A header and a line for each item; models with few classes have fewer columns."""

    def encode(self, outputs: torch.Tensor, items: ResultItems, *, is_first: bool) -> bytes:
        """Return a line for each item, the first of them after the header."""
        stream = io.StringIO(newline="")
        writer = csv.writer(stream, lineterminator="\n")
        for row in top_rows(outputs, items):
            if is_first:
                places = range(1, len(row.classes) + 1)
                best = [f"{column}_{place}" for place in places for column in ("class", "name", "score")]
                named = ["item", "source", "label", *(("text",) if row.text is not None else ())]
                writer.writerow([*named, *best])
                is_first = False
            cells: list[object] = [row.number, row.source, "" if row.label is None else row.label]
            if row.text is not None:
                cells.append(row.text)
            for number, score in zip(row.classes, row.scores, strict=True):
                cells += [number, class_name(self._labels, number) or "", f"{score:.6g}"]
            writer.writerow(cells)
        return stream.getvalue().encode()


class JsonRows(RowFormat):
    """One JSON object per line. Unknown values are left out; a score of NaN or infinity is null."""

    def encode(self, outputs: torch.Tensor, items: ResultItems, *, is_first: bool) -> bytes:
        """Return a line for each item."""
        del is_first  # all lines are alike
        return "".join(self._lines(outputs, items)).encode()

    def _lines(self, outputs: torch.Tensor, items: ResultItems) -> Iterator[str]:
        for row in top_rows(outputs, items):
            best = zip(row.classes, row.scores, strict=True)
            content = {"top": [self._entry(number, score) for number, score in best]}
            yield self._line(row.number, row.source, row.label, row.text, content)

    @staticmethod
    def _line(
        item: int, source: str, label: int | None, text: str | None, content: Mapping[str, object]
    ) -> str:
        known = {"label": label, "text": text}
        given = {key: value for key, value in known.items() if value is not None}
        document = {"item": item, "source": source, **given, **content}
        return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"

    def _entry(self, number: int, score: float) -> dict[str, object]:
        name = class_name(self._labels, number)
        named: dict[str, object] = {} if name is None else {"name": name}
        return {"class": number, **named, "score": float(f"{score:.6g}") if math.isfinite(score) else None}


class ArrayRows(RowFormat):
    """The raw outputs as an array, which begins with its shape, so the number of items must be known."""

    def __init__(self, labels: Sequence[str] | None) -> None:
        super().__init__(labels)
        self._shape: tuple[int, ...] | None = None

    def encode(self, outputs: torch.Tensor, items: ResultItems, *, is_first: bool) -> bytes:
        """Return the outputs of each item."""
        del is_first  # all values are alike
        values = self._values(outputs, items).detach().to("cpu", torch.float32).contiguous().numpy()
        return values.astype("<f4", copy=False).tobytes()

    def describe(self, outputs: torch.Tensor, items: ResultItems) -> Rows:
        """Return the description of the rows with their number and shape.

        Raises:
            PipeEdgeError: The shape is not that of the rows before.
        """
        values = self._values(outputs, items)
        shape = tuple(values.shape[1:])
        if self._shape not in (None, shape):
            raise PipeEdgeError(f"outputs of {shape} values an item follow outputs of {self._shape}")
        self._shape = shape
        return structs.replace(super().describe(outputs, items), count=len(values), shape=shape)

    def _values(self, outputs: torch.Tensor, items: ResultItems) -> torch.Tensor:
        """Return the values to write, [rows, ...]."""
        del items
        return outputs

    def assemble(self, unfinished: UnfinishedOutput, target: BinaryIO) -> None:
        """Write the shape and the values, and the arrays beside them."""
        described = list(unfinished.rows())
        shape = (sum(rows.count for rows in described), *described[0].shape) if described else (0,)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            member = zipfile.ZipInfo("outputs.npy", ZIP_EPOCH)
            with archive.open(member, "w", force_zip64=True) as stream:
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(stream, header)
                for payload in unfinished.payloads():
                    stream.write(payload)
            for name, values in self._companions(described).items():
                self._add(archive, name, values)

    def _companions(self, described: Sequence[Rows]) -> dict[str, list[int]]:
        """Return the arrays beside the values, by name."""
        labels = [label for rows in described for label in rows.labels]
        numbers = [number for rows in described for number in rows.numbers]
        known = {"labels": labels} if any(label != UNKNOWN_LABEL for label in labels) else {}
        return {**known, **({"items": numbers} if numbers != list(range(len(numbers))) else {})}

    @staticmethod
    def _add(archive: zipfile.ZipFile, name: str, values: list[int]) -> None:
        with archive.open(zipfile.ZipInfo(f"{name}.npy", ZIP_EPOCH), "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, np.array(values, dtype="<i8"), allow_pickle=False)


class TokenJsonRows(JsonRows):
    """One JSON object per line, with the best class of each token that is not padding."""

    def _lines(self, outputs: torch.Tensor, items: ResultItems) -> Iterator[str]:
        """Yield a line for each item of ``outputs`` [items, tokens, classes]."""
        scores, classes = outputs.double().softmax(dim=2).max(dim=2)
        for row, length in enumerate(token_counts(outputs, items)):
            best = zip(classes[row, :length].tolist(), scores[row, :length].tolist(), strict=True)
            text = None if items.texts is None else items.texts[row]
            yield self._line(
                items.numbers[row],
                items.sources[row],
                items.labels[row],
                text,
                {"tokens": [self._entry(number, score) for number, score in best]},
            )


class TokenArrayRows(ArrayRows):
    """The raw outputs of all tokens in one array, item after item, without padding."""

    def describe(self, outputs: torch.Tensor, items: ResultItems) -> Rows:
        """Return the description of the rows with the number of tokens of each item."""
        tokens = tuple(token_counts(outputs, items))
        return structs.replace(super().describe(outputs, items), tokens=tokens)

    def _values(self, outputs: torch.Tensor, items: ResultItems) -> torch.Tensor:
        """Return the values of the tokens of ``outputs`` [items, tokens, classes] that are not padding."""
        counts = token_counts(outputs, items)
        return torch.cat([outputs[row, :length] for row, length in enumerate(counts)])

    def _companions(self, described: Sequence[Rows]) -> dict[str, list[int]]:
        counts = [count for rows in described for count in rows.tokens]
        return {"tokens": counts, **super()._companions(described)}


def token_counts(outputs: torch.Tensor, items: ResultItems) -> list[int]:
    """Return the number of tokens of each item of ``outputs`` [items, tokens, classes]."""
    return [outputs.shape[1]] * len(outputs) if items.tokens is None else list(items.tokens)


FORMATS: Mapping[str, type[RowFormat]] = MappingProxyType(
    {".csv": CsvRows, ".jsonl": JsonRows, ".npz": ArrayRows}
)
TOKEN_FORMATS: Mapping[str, type[RowFormat]] = MappingProxyType(
    {".jsonl": TokenJsonRows, ".npz": TokenArrayRows}
)
"""Formats of results that have a class for each token."""


def class_name(labels: Sequence[str] | None, number: int) -> str | None:
    """Return the name of class ``number``, or None if not known."""
    return labels[number] if labels is not None and number < len(labels) else None
