"""The file of the results of a run, made of its unfinished output (``unfinished.py``) in the end.

Rows go to the unfinished output as they arrive, so memory does not grow with the input. A run that fails
leaves nothing under its name, but a later run can go on from the unfinished output.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from pipeedge.base.errors import RequestError
from pipeedge.base.files import temporary_beside
from pipeedge.base.wording import printable
from pipeedge.data.unfinished import Found, Rows, UnfinishedOutput

__all__ = ["OutputRows"]


class OutputRows(ABC):
    """Writer of rows; a context manager.

    Leaving the context normally completes the file. Leaving it by an exception keeps the rows in the
    unfinished output.

    Args:
        path: Path of the file, or None without one.
        depends_on: Fingerprints of what the rows depend on, by what a message calls them.
        found: What an earlier run has left and this one goes on from, or None to begin with the first item.
        made_with: What else the unfinished output says of the run, which another run may differ in.
    """

    def __init__(
        self,
        path: Path | None,
        depends_on: Mapping[str, str] | None = None,
        found: Found | None = None,
        made_with: Mapping[str, str] | None = None,
    ) -> None:
        # Follow a link, so that the link itself is not replaced.
        self._path = None if path is None else path.resolve()
        self._depends_on = dict(depends_on or {})
        self._made_with = dict(made_with or {})
        self._found = found
        self._unfinished: UnfinishedOutput | None = None
        if found is not None:
            self._check(found)

    @property
    def unfinished(self) -> Path | None:
        """Path of the rows that a later run can go on from, or None if there are none."""
        part = self._unfinished
        return None if part is None or part.is_empty or not part.path.exists() else part.path

    def add_dependencies(self, depends_on: Mapping[str, str]) -> None:
        """Add fingerprints that are known later than the others, but before the first row.

        Raises:
            RequestError: The rows that are there already are of another kind.
        """
        self._depends_on |= depends_on
        if self._found is not None:
            self._check(self._found)

    def _check(self, found: Found) -> None:
        """Compare the fingerprints that are known so far with those of the rows that are there."""
        for what, value in self._depends_on.items():
            before = found.depends_on.get(what)
            if before != value:
                raise RequestError(
                    f"--resume: {printable(found.path)} was written with another value of {what} "
                    f"({before or 'unknown'}, now {value}); leave out --resume to begin with the first item"
                )

    def __enter__(self) -> Self:
        if self._path is not None:
            with self._naming_the_file():
                if self._found is not None:
                    self._unfinished = UnfinishedOutput.go_on(self._found)
                else:
                    self._unfinished = UnfinishedOutput.begin(self._path, self._depends_on | self._made_with)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            if self._unfinished is not None:
                self._unfinished.close()

    @property
    def _has_file(self) -> bool:
        """Whether rows can be appended."""
        return self._unfinished is not None

    @property
    def _is_empty(self) -> bool:
        """Whether the file has no rows so far."""
        return self._unfinished is None or self._unfinished.is_empty

    def _append(self, rows: Rows, payload: bytes) -> None:
        """Append rows, if there is a file.

        Raises:
            RequestError: They cannot be written.
        """
        if self._unfinished is not None:
            with self._naming_the_file():
                self._unfinished.append(rows, payload)

    @abstractmethod
    def _assemble(self, unfinished: UnfinishedOutput, target: BinaryIO) -> None:
        """Write the complete file."""

    def _complete(self) -> None:
        """Make the file of the rows, all of which are there."""
        if self._path is None or self._unfinished is None:
            return
        temporary = temporary_beside(self._path)
        try:
            with self._naming_the_file():
                with temporary.open("xb") as target:
                    self._assemble(self._unfinished, target)
                    # After a power failure, a file under the new name must have its contents.
                    target.flush()
                    os.fsync(target.fileno())
                temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)  # missing if it was renamed
        self._unfinished.remove()

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestError(f"--output {self._path}: cannot be written ({error.strerror})") from error
