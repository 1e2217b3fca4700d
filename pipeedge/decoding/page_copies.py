"""Which pages of a stage another rank has copies of. Pure.

    steps ──executed──> PagesToCopy ──next──> pages to copy ──stored──> CopiesOfPages ──until──> the next plan

A page is copied once it is *past*: full, and in front of the rows of a step. Nothing writes it after that
until it is given to other tokens. Each copy is as of a step. It is good for what that step or an earlier one
has filled: what is written to the page later, whether or not the copy has some of it, is of a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["CopiesOfPages", "PagesToCopy", "WrittenRows"]


class WrittenRows(Protocol):
    """The rows of one sequence in a step."""

    @property
    def position(self) -> int:
        """Position of the first row."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        """Numbers of the pages from the beginning."""


class PagesToCopy:
    """Pages of a stage that are past and have no copy yet, in the order in which they were passed.

    Args:
        size: Number of pages.
        page: Number of positions of a page.
    """

    def __init__(self, size: int, page: int) -> None:
        self._page = page
        self._copied = np.zeros(size, bool)
        self._waiting: dict[int, int] = {}
        self._looked: dict[int, int] = {}
        """For pages that rows are written to, how many pages in front of them were looked at."""

    def executed(self, rows: Sequence[WrittenRows], step: int) -> bool:
        """Note that a step was executed, also if its rows were known; return whether there is more to copy.

        Args:
            rows: Its rows.
            step: Its number.
        """
        size, before = self._page, len(self._waiting)
        for one in rows:
            written = one.pages[one.position // size : -(-(one.position + one.rows) // size)].tolist()
            for page in written:
                if self._copied[page]:
                    self._copied[page] = False
                    self._waiting.pop(page, None)
            for page in written[1:]:
                self._looked.pop(page, None)
        for one in rows:
            first = one.position // size
            current = int(one.pages[first])
            if one.rows == 1 and one.position % size and self._looked.get(current) == first:
                continue  # as in the step before of this sequence
            self._looked[current] = first
            past = one.pages[:first]
            for page in past[~self._copied[past]].tolist():
                self._copied[page] = True
                self._waiting[page] = step
        return len(self._waiting) > before

    def next(self) -> tuple[int, int] | None:
        """Return the next page to copy, and the step as of which that is; None if there is none."""
        page = next(iter(self._waiting), None)
        return None if page is None else (page, self._waiting.pop(page))


class CopiesOfPages:
    """Copies of the pages of a stage.

    Args:
        size: Number of pages.
    """

    def __init__(self, size: int) -> None:
        self._until = [0] * size

    def replaces(self, page: int) -> None:
        """Note that a copy is about to be replaced."""
        self._until[page] = 0

    def stored(self, page: int, step: int) -> None:
        """Note that a page was copied, as of ``step``."""
        self._until[page] = step + 1

    @property
    def until(self) -> tuple[int, ...]:
        """For each page, step before which it has to be full for its copy to be good; 0 without a copy."""
        return tuple(self._until)
