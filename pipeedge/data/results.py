"""Results of a run: one row for every input item, in input order, and the accuracy.

Rows go to the unfinished output (``unfinished.py``) as they arrive, so memory does not grow with the input.
The file is made of them after the last one. A run that fails leaves nothing under its name, but a later run
can go on from the unfinished output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.files import check_writable
from pipeedge.base.streams import print_data
from pipeedge.data.output_rows import OutputRows
from pipeedge.data.parquet import ParquetRows, check_pyarrow
from pipeedge.data.row_documents import ClassDocuments, Documents, TokenDocuments, VectorDocuments
from pipeedge.data.row_formats import ArrayRows, CsvRows, JsonRows, RowFormat, TokenArrayRows
from pipeedge.data.source import Microbatch
from pipeedge.data.unfinished import Found, UnfinishedOutput
from pipeedge.models.outline import Outline
from pipeedge.request.files import STANDARD_OUTPUT

__all__ = ["Accuracy", "ResultWriter", "check_output_path"]


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
        known = [row for row, label in enumerate(labels) if label is not None]
        if outputs.shape[1] == 1 or not known:
            return self
        best = outputs.argmax(dim=1).tolist()
        correct = sum(best[row] == labels[row] for row in known)
        return Accuracy(self.correct + correct, self.labelled + len(known))


_KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "logits": ("classifies", (".csv", ".jsonl", ".npz", ".parquet")),
        "tokens": ("classifies every token", (".jsonl", ".npz", ".parquet")),
        "vector": ("gives vectors, not classes", (".jsonl", ".npz", ".parquet")),
        "text": ("generates text", (".jsonl",)),
    }
)
"""What a model does, by its kind of output, and the suffixes of the files that have room for it."""
_DOCUMENTS: Mapping[str, type[Documents]] = MappingProxyType(
    {"logits": ClassDocuments, "tokens": TokenDocuments, "vector": VectorDocuments}
)


def _row_format(suffix: str, model: Outline) -> RowFormat:
    """Return the format of a file with one of the suffixes for the ``model``."""
    if suffix == ".csv":
        return CsvRows(model.labels)
    if suffix == ".npz":
        return TokenArrayRows() if model.output_kind == "tokens" else ArrayRows()
    documents = _DOCUMENTS[model.output_kind](model.labels)
    return ParquetRows(documents) if suffix == ".parquet" else JsonRows(documents)


def check_output_path(path: Path, model: Outline) -> None:
    """Check before a run that its results can be written.

    Raises:
        RequestError: The suffix is unknown or does not suit the model, its package is not installed, or the
            directory is not writable.
    """
    if path == STANDARD_OUTPUT:
        return
    suffix = path.suffix.lower()
    known = _KINDS["logits"][1]
    if suffix not in known:
        raise RequestError(
            f"--output {path}: unknown suffix {suffix!r}; use {', '.join(known)}, or - for standard output"
        )
    does, suited = _KINDS[model.output_kind]
    if suffix not in suited:
        raise RequestError(
            f"--output {path}: {model.name} {does}; such results are written to {_listed(suited)} only"
        )
    if suffix == ".parquet":
        try:
            check_pyarrow()
        except RequestError as error:
            raise RequestError(f"--output {path}: {error}") from error
    check_writable(path, "--output")


def _listed(suffixes: Sequence[str]) -> str:
    return " and ".join((*((", ".join(suffixes[:-1]),) if len(suffixes) > 1 else ()), suffixes[-1]))


class ResultWriter(OutputRows):
    """Writer of the results of a run, which come in input order; a context manager.

    Standard output has a line of JSON for each item as soon as it is known. Without ``path`` only the order
    and the number of the results are checked.

    Args:
        path: Path of the file, ``STANDARD_OUTPUT``, or None.
        model: Model whose results they are.
        expected_items: Number of items that there must be in the end, or None if that is not known.
        depends_on: Fingerprints of what the rows depend on, by what a message calls them.
        found: What an earlier run has left and this one goes on from, or None to begin with the first item.
        made_with: What else the unfinished output says of the run, which another run may differ in.

    Raises:
        RequestError: On creation, before anything runs, if ``path`` cannot take results of ``model``.
    """

    def __init__(
        self,
        path: Path | None,
        model: Outline,
        expected_items: int | None,
        depends_on: Mapping[str, str] | None = None,
        found: Found | None = None,
        made_with: Mapping[str, str] | None = None,
    ) -> None:
        self._format: RowFormat | None = None
        self._prints = path == STANDARD_OUTPUT
        if path is not None:
            check_output_path(path, model)
            self._format = _row_format(".jsonl" if self._prints else path.suffix.lower(), model)
        super().__init__(None if self._prints else path, depends_on, found, made_with)
        self._expected_items = expected_items
        self._next_microbatch = 0
        self._items = 0

    @property
    def items(self) -> int:
        """Number of items written so far by this run."""
        return self._items

    def write(self, microbatch_number: int, outputs: torch.Tensor, microbatch: Microbatch) -> None:
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
        if self._prints and self._format is not None:
            print_data(self._format.encode(outputs, microbatch, is_first=not self._items))
        elif self._format is not None and self._has_file:
            rows = self._format.describe(outputs, microbatch)
            self._append(rows, self._format.encode(outputs, microbatch, is_first=self._is_empty))
        self._next_microbatch += 1
        self._items += len(outputs)

    def _complete(self) -> None:
        if self._expected_items is not None and self._items != self._expected_items:
            raise PipeEdgeError(f"{self._items} results for {self._expected_items} items")
        super()._complete()

    def _assemble(self, unfinished: UnfinishedOutput, target: BinaryIO) -> None:
        if self._format is not None:
            self._format.assemble(unfinished, target)
