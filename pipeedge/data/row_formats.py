"""Formats of result files: how the outputs of a microbatch become rows.

    .csv       item, source, label, the sentence if it is text, then class, name and score of the best five
    .jsonl     a document in each line (``row_documents.py``)
    .parquet   the same documents as columns (``parquet.py``)
    .npz       ``outputs`` float32 [items, ...]; ``items`` int64 [items], positions in the input; ``labels``
               int64 [items], -1 where unknown, if any is known

If every token has a class, an ``.npz`` has ``outputs`` float32 [tokens of all items, classes], and ``tokens``
int64 [items], the number of tokens of each.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
import torch
from msgspec import structs

from pipeedge.base.errors import PipeEdgeError
from pipeedge.data.row_documents import Document, Documents, best_classes, class_name, real_tokens
from pipeedge.data.source import Microbatch
from pipeedge.data.unfinished import Rows, UnfinishedOutput

__all__ = ["ArrayRows", "CsvRows", "JsonRows", "RowFormat", "TokenArrayRows"]

UNKNOWN_LABEL = -1
# Earliest date that a zip file can hold. It is fixed so that equal results give equal files.
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


class RowFormat(ABC):
    """A format of result files; an instance makes one file."""

    @abstractmethod
    def encode(self, outputs: torch.Tensor, items: Microbatch, *, is_first: bool) -> bytes:
        """Return the rows of ``outputs`` [items, ...]; ``is_first`` if no rows precede them."""

    def describe(self, outputs: torch.Tensor, items: Microbatch) -> Rows:
        """Return what must be known of the rows of ``outputs`` when the file is assembled."""
        del outputs
        labels = tuple(UNKNOWN_LABEL if label is None else label for label in items.labels)
        return Rows(tuple(items.numbers), labels)

    def assemble(self, unfinished: UnfinishedOutput, target: BinaryIO) -> None:
        """Write the complete file."""
        for payload in unfinished.payloads():
            target.write(payload)


class CsvRows(RowFormat):
    """A header and a line for each item; models with few classes have fewer columns.

    Args:
        labels: Names of the classes, or None if not known.
    """

    def __init__(self, labels: Sequence[str] | None) -> None:
        self._labels = labels

    def encode(self, outputs: torch.Tensor, items: Microbatch, *, is_first: bool) -> bytes:
        """Return a line for each item, the first of them after the header."""
        stream = io.StringIO(newline="")
        writer = csv.writer(stream, lineterminator="\n")
        named = ["item", "source", "label", *(("text",) if items.texts is not None else ())]
        for row, best in enumerate(best_classes(outputs)):
            if is_first:
                places = range(1, len(best) + 1)
                columns = [f"{column}_{place}" for place in places for column in ("class", "name", "score")]
                writer.writerow([*named, *columns])
                is_first = False
            label = items.labels[row]
            cells: list[object] = [items.numbers[row], items.sources[row], "" if label is None else label]
            if items.texts is not None:
                cells.append(items.texts[row])
            for number, score in best:
                cells += [number, class_name(self._labels, number) or "", f"{score:.6g}"]
            writer.writerow(cells)
        return stream.getvalue().encode(errors="backslashreplace")


class JsonRows(RowFormat):
    """One JSON object per line. Unknown values are left out; a value of NaN or infinity is null.

    Args:
        documents: Makes the rows.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def encode(self, outputs: torch.Tensor, items: Microbatch, *, is_first: bool) -> bytes:
        """Return a line for each item."""
        del is_first  # all lines are alike
        lines = map(self._line, self._documents.of(outputs, items))
        # The name of a file may have bytes that are no text; in JSON, their escapes are.
        return "".join(lines).encode(errors="backslashreplace")

    def _line(self, row: Document) -> str:
        known = {"label": row.label, "text": row.text}
        given = {key: value for key, value in known.items() if value is not None}
        line = {"item": row.item, "source": row.source, **given, self._documents.key: row.content}
        return json.dumps(line, ensure_ascii=False, allow_nan=False, default=_plain) + "\n"


def _plain(values: torch.Tensor) -> list[object]:
    """Return float32 values as lists of the shortest numbers that stand for them."""
    if values.dim() > 1:
        return list(map(_plain, values))
    finite = values.isfinite().tolist()
    texts = map(str, values.numpy())
    return [float(text) if is_finite else None for text, is_finite in zip(texts, finite, strict=True)]


class ArrayRows(RowFormat):
    """The raw outputs as an array, which begins with its shape, so the number of items must be known."""

    def __init__(self) -> None:
        self._shape: tuple[int, ...] | None = None

    def encode(self, outputs: torch.Tensor, items: Microbatch, *, is_first: bool) -> bytes:
        """Return the outputs of each item."""
        del is_first  # all values are alike
        values = self._values(outputs, items).detach().to("cpu", torch.float32).contiguous().numpy()
        return values.astype("<f4", copy=False).tobytes()

    def describe(self, outputs: torch.Tensor, items: Microbatch) -> Rows:
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

    def _values(self, outputs: torch.Tensor, items: Microbatch) -> torch.Tensor:
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
        return {**known, "items": numbers}

    @staticmethod
    def _add(archive: zipfile.ZipFile, name: str, values: list[int]) -> None:
        with archive.open(zipfile.ZipInfo(f"{name}.npy", ZIP_EPOCH), "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, np.array(values, dtype="<i8"), allow_pickle=False)


class TokenArrayRows(ArrayRows):
    """The raw outputs of all tokens in one array, item after item, without padding."""

    def describe(self, outputs: torch.Tensor, items: Microbatch) -> Rows:
        """Return the description of the rows with the number of tokens of each item."""
        tokens = tuple(map(len, real_tokens(outputs, items)))
        return structs.replace(super().describe(outputs, items), tokens=tokens)

    def _values(self, outputs: torch.Tensor, items: Microbatch) -> torch.Tensor:
        """Return the values of the tokens of ``outputs`` [items, tokens, classes] that are not padding."""
        return torch.cat(real_tokens(outputs, items))

    def _companions(self, described: Sequence[Rows]) -> dict[str, list[int]]:
        counts = [count for rows in described for count in rows.tokens]
        return {"tokens": counts, **super()._companions(described)}
