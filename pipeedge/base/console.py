"""Output for people: wide enough for every table, and safe if the reader goes away."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeedge.base.streams import stop_printing, unprinted
from pipeedge.base.wording import printable, shortened

__all__ = ["StandardError", "StandardOutput", "fitted"]

_WIDTH = 120
"""Columns assumed for a file or pipe, which has no width. A narrower table would truncate its figures."""

_ANY_WIDTH = 10_000
_SHORTEST = 6
"""Characters below which names are not shortened further; the table then wraps."""
_TITLE = "host"


def fitted(table: Callable[[Sequence[str]], Table], names: Sequence[str], console: Console) -> Table:
    """Return the table with its names shortened to the width its other columns leave, still distinct.

    Args:
        table: Builds the table, given a name for each row.
        names: Full names, one a row.
        console: Console on which the table will be printed.
    """
    wide = console.options.update(width=_ANY_WIDTH)
    room = console.width - console.measure(table([""] * len(names)), options=wide).maximum
    # The column is at least as wide as its title, which was counted.
    return table(shortened(names, max(_SHORTEST, room + len(_TITLE))))


class _SafeConsole(Console):
    """A console of plain text that cannot steer a terminal, and of output that may be lost.

    Args:
        stderr: Whether to print on standard error rather than standard output.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        width = None if stream.isatty() else shutil.get_terminal_size((_WIDTH, 24)).columns
        super().__init__(width=width, stderr=stderr)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects, escaping control characters in plain text so that they cannot steer a terminal."""
        visible = (_visible(each) if isinstance(each, str) else each for each in objects)
        try:
            super().print(*visible, **options)
        except OSError as error:
            self._unprinted(error)

    def _unprinted(self, error: OSError) -> None:
        """Discard all further output."""
        del error
        self.quiet = True


class StandardOutput(_SafeConsole):
    """Tables and lines on standard output.

    If the reader goes away, as ``head`` does once it has seen enough, or if the disk is full, the rest is
    discarded and the program goes on: its computation does not depend on its output.

    Args:
        result: Whether the output is what the user asked for, so that a full disk is an error.
    """

    def __init__(self, *, result: bool = False) -> None:
        self._result = result
        super().__init__()

    def _unprinted(self, error: OSError) -> None:
        self.on_broken_pipe()
        if self._result:
            raise unprinted(error) from error

    def on_broken_pipe(self) -> None:
        """Discard all further output: the reader has gone away."""
        self.quiet = True
        stop_printing()


class StandardError(_SafeConsole):
    """Tables and lines on standard error, beside results on standard output."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """Discard all further output: the reader has gone away."""
        self.quiet = True


def _visible(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
