"""Results of a run: one row for every input item, in input order, and the accuracy.

Rows are written to a temporary file beside the target as they arrive, so memory does not grow with the input.
The file gets its name after the last row. A run that fails leaves nothing under that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.files import check_writable, temporary_beside
from pipeedge.data.row_formats import FORMATS, TOKEN_FORMATS, NoRows, ResultItems, RowFormat

__all__ = ["Accuracy", "ResultItems", "ResultModel", "ResultWriter", "check_output_path"]


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
        """Kind of output: ``logits``, one value per class; ``tokens``, the same of each token; ``vector``."""


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


def check_output_path(path: Path, model: ResultModel) -> None:
    """Check before a run that a result file can be written at its end.

    Raises:
        RequestError: The suffix is unknown or does not suit the model, or the directory is not writable.
    """
    suffix = path.suffix.lower()
    if model.output_kind == "tokens" and suffix in FORMATS and suffix not in TOKEN_FORMATS:
        raise RequestError(
            f"--output {path}: {model.name} classifies every token; such results are written to "
            f"{' and '.join(TOKEN_FORMATS)} only"
        )
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
        self._formats = TOKEN_FORMATS if model.output_kind == "tokens" else FORMATS
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
                self._rows = self._formats[self._path.suffix.lower()](self._temporary, self._model.labels)
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
