"""Results as ``.parquet``: the documents of a ``.jsonl`` as columns.

    item int64, source string, label int64, text string (of sentences only), and one of
    top, tokens    list<struct<class int64, name string, score double>>
    vector         list<float>

What is not known is null. Until the file is made, the rows of each microbatch are an Arrow stream, so a run
can go on from them as from those of other formats.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cached_property
from types import ModuleType
from typing import Any, BinaryIO

import torch

from pipeedge.base.errors import RequestError
from pipeedge.data.row_documents import Documents, VectorDocuments
from pipeedge.data.row_formats import RowFormat
from pipeedge.data.source import Microbatch
from pipeedge.data.unfinished import UnfinishedOutput

__all__ = ["ParquetRows", "check_pyarrow"]

_GROUP_ROWS = 1 << 16
"""Largest number of rows of a row group, which a reader takes into memory as a whole."""
_GROUP_BYTES = 1 << 25
"""Size of the values, in bytes, at which a row group ends."""


def check_pyarrow() -> None:
    """Check that the package which writes these files is here.

    Raises:
        RequestError: It is not installed.
    """
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise RequestError("a .parquet needs the package pyarrow: pip install 'pipeedge[parquet]'") from error


class ParquetRows(RowFormat):
    """A row for each item, in row groups of limited size.

    Args:
        documents: Makes the rows.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    @cached_property
    def _arrow(self) -> ModuleType:
        return importlib.import_module("pyarrow")  # takes a third of a second, and other formats do without

    def encode(self, outputs: torch.Tensor, items: Microbatch, *, is_first: bool) -> bytes:
        """Return an Arrow stream of one batch."""
        del is_first  # all streams are alike
        rows = list(self._documents.of(outputs, items))
        columns: dict[str, Any] = {
            "item": [row.item for row in rows],
            # The name of a file may have bytes that are no text.
            "source": [row.source.encode(errors="backslashreplace").decode() for row in rows],
            "label": [row.label for row in rows],
        }
        if items.texts is not None:
            columns["text"] = [row.text for row in rows]
        if isinstance(self._documents, VectorDocuments):
            columns[self._documents.key] = self._vectors(torch.stack([row.content for row in rows]))
        else:
            columns[self._documents.key] = [row.content for row in rows]
        schema = self._schema(has_texts=items.texts is not None, dimensions=outputs.dim() - 1)
        batch = self._arrow.record_batch(columns, schema=schema)
        sink = self._arrow.BufferOutputStream()
        with self._arrow.ipc.new_stream(sink, schema) as stream:
            stream.write_batch(batch)
        encoded: bytes = sink.getvalue().to_pybytes()
        return encoded

    def _vectors(self, values: torch.Tensor) -> Any:
        """Return float32 values [items, ...] as an array of lists, without making objects of them."""
        array = self._arrow.array(values.contiguous().numpy().ravel())
        for size in reversed(values.shape[1:]):
            ends = range(0, len(array) + 1, size)
            array = self._arrow.ListArray.from_arrays(self._arrow.array(ends, self._arrow.int32()), array)
        return array

    def _schema(self, *, has_texts: bool, dimensions: int = 1) -> Any:
        arrow = self._arrow
        if isinstance(self._documents, VectorDocuments):
            content = arrow.float32()
            for _ in range(dimensions):
                content = arrow.list_(content)
        else:
            entry = {"class": arrow.int64(), "name": arrow.string(), "score": arrow.float64()}
            content = arrow.list_(arrow.struct(entry))
        columns = {"item": arrow.int64(), "source": arrow.string(), "label": arrow.int64()}
        texts = {"text": arrow.string()} if has_texts else {}
        return arrow.schema({**columns, **texts, self._documents.key: content})

    def assemble(self, unfinished: UnfinishedOutput, target: BinaryIO) -> None:
        """Write the row groups."""
        parquet = importlib.import_module("pyarrow.parquet")
        groups = self._groups(unfinished)
        first = next(groups, None)
        schema = self._schema(has_texts=False) if first is None else first.schema
        with parquet.ParquetWriter(target, schema) as writer:
            while first is not None:
                writer.write_table(first, row_group_size=len(first))
                first = next(groups, None)

    def _groups(self, unfinished: UnfinishedOutput) -> Iterator[Any]:
        """Yield the table of each row group; the microbatches decide alone where one ends."""
        waiting: list[Any] = []
        rows, size = 0, 0
        for payload in unfinished.payloads():
            table = self._arrow.ipc.open_stream(payload).read_all()
            if waiting and (rows + len(table) > _GROUP_ROWS or size >= _GROUP_BYTES):
                yield self._arrow.concat_tables(waiting)
                waiting, rows, size = [], 0, 0
            waiting.append(table)
            rows += len(table)
            size += table.nbytes
        if waiting:
            yield self._arrow.concat_tables(waiting)
