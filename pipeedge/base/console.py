"""Output for people: tables that fit the terminal, and safe if the reader goes away."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeedge.base.streams import stop_printing, unprinted
from pipeedge.base.wording import printable, shortened

__all__ = ["Column", "StandardError", "StandardOutput", "print_table"]

_WIDTH = 120
"""Columns assumed for a file or pipe, which has no width. A narrower table would truncate its figures."""

_ANY_WIDTH = 10_000
_SHORTEST = 6
"""Characters below which names are not shortened."""
_ROOMY = 100
"""Width in characters below which tables are compact, to leave room for names and figures."""


@dataclass(frozen=True)
class Column:
    """A column of a table that fits the terminal."""

    title: str
    cells: Sequence[str]
    left: bool = False
    """Whether it is aligned to the left."""
    names: bool = False
    """Whether its cells are names, which can be shortened and stay distinct."""
    rank: int = 0
    """The columns with the highest rank are left out first where there is no room; those of rank 0 never."""


def print_table(console: Console, columns: Sequence[Column]) -> None:
    """Print a table without wrapping it: shorten names, then leave columns out, and say which."""
    columns = [column for column in columns if any(column.cells)]
    shown, left_out = list(columns), list[Column]()
    while _width(_table(_shortened(shown, _SHORTEST), console), console) > console.width:
        last = max(shown, key=lambda column: column.rank)
        if not last.rank:
            break
        shown.remove(last)
        left_out.insert(0, last)
    without_names = [replace(one, cells=[""] * len(one.cells)) if one.names else one for one in shown]
    titles = sum(len(one.title) for one in shown if one.names)  # counted, and each column is as wide
    room = console.width - _width(_table(without_names, console), console) + titles
    console.print(_table(_shortened(shown, max(_SHORTEST, room)), console), highlight=False)
    if left_out:
        titles_left_out = ", ".join(dict.fromkeys(one.title for one in left_out))
        console.print(f"no room for: {titles_left_out}", highlight=False, markup=False, soft_wrap=True)


def _shortened(columns: Sequence[Column], width: int) -> list[Column]:
    return [replace(one, cells=shortened(one.cells, width)) if one.names else one for one in columns]


def _table(columns: Sequence[Column], console: Console) -> Table:
    padding = 1 if console.width >= _ROOMY else 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding, 0, 0))
    for one in columns:
        table.add_column(one.title, justify="left" if one.left else "right", overflow="fold")
    for cells in zip(*(one.cells for one in columns), strict=True):
        table.add_row(*map(escape, cells))
    return table


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum


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
