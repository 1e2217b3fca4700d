"""Standard output for people: wide enough for every table, and nobody has to read it."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from rich.console import Console

from pipeedge.wording import printable

__all__ = ["StandardOutput"]

_WIDTH = 120
"""Where nothing says how wide: a file, a pipe. A narrower table would cut its figures off."""


class StandardOutput(Console):
    """Tables and lines on standard output.

    Where the reader goes away, as ``head`` does when it has seen enough, the rest is thrown away and the
    program goes on: what it computes is not what it shows.
    """

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else shutil.get_terminal_size((_WIDTH, 24)).columns
        super().__init__(width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, with everything in plain text that a terminal would act upon made visible."""
        super().print(*(_visible(each) if isinstance(each, str) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        """Nobody reads any longer."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _visible(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
