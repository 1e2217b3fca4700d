"""Standard output for people: wide enough for every table, and nobody has to read it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeedge.base.streams import stop_printing, unprinted
from pipeedge.base.wording import printable, shortened

__all__ = ["StandardOutput", "fitted"]

_WIDTH = 120
"""Where nothing says how wide: a file, a pipe. A narrower table would cut its figures off."""

_ANY_WIDTH = 10_000
_SHORTEST = 6
"""A name is not cut further: the table then folds."""
_TITLE = "host"


def fitted(table: Callable[[Sequence[str]], Table], names: Sequence[str], console: Console) -> Table:
    """Return the table with its names shortened to the room that its other columns leave, still distinct.

    Args:
        table: makes it, given a name for each row.
        names: as they are.
        console: where it is to be printed.
    """
    wide = console.options.update(width=_ANY_WIDTH)
    room = console.width - console.measure(table([""] * len(names)), options=wide).maximum
    # The column is at least as wide as its title, which was counted.
    return table(shortened(names, max(_SHORTEST, room + len(_TITLE))))


class StandardOutput(Console):
    """Tables and lines on standard output.

    Where the reader goes away, as ``head`` does when it has seen enough, or the disk is full, the rest is
    thrown away and the program goes on: what it computes is not what it shows.

    Args:
        result: whether what is printed is what the user asked for, so that a full disk is an error.
    """

    def __init__(self, *, result: bool = False) -> None:
        self._result = result
        width = None if sys.stdout.isatty() else shutil.get_terminal_size((_WIDTH, 24)).columns
        super().__init__(width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, with everything in plain text that a terminal would act upon made visible."""
        visible = (_visible(each) if isinstance(each, str) else each for each in objects)
        try:
            super().print(*visible, **options)
        except OSError as error:
            self.on_broken_pipe()
            if self._result:
                raise unprinted(error) from error

    def on_broken_pipe(self) -> None:
        """Nobody reads any longer."""
        self.quiet = True
        stop_printing()


def _visible(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
