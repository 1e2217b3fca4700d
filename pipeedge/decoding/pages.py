"""Which pages of the cache each sequence has; the data rank decides for all stages.

Two pools of page numbers serve the whole pipeline: one for blocks that attend to everything, one for blocks
with a window, whose sequences keep no more pages than the window and the rows of a step reach. A list of a
sequence has a number for each page from its beginning; in that of windows, numbers that the window has left
come again.

    positions        0-31  32-63  64-95  96-127  128-159
    pages               4      0      7       2        5
    window pages        1      3      1       3        1       a window of up to 33 positions
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeedge.base.errors import RequestError
from pipeedge.base.wording import count

__all__ = ["PageLists", "PagePool", "pages_of", "window_pages_of"]


def pages_of(positions: int, page: int) -> int:
    """Return the number of pages that so many positions need."""
    return -(-positions // page)


def window_pages_of(window: int, page: int) -> int:
    """Return the number of pages that a sequence needs for a window, however long it is.

    Rows are written and attend page by page. A row in the first place of a page reaches ``window`` - 1
    positions back.
    """
    return 1 + pages_of(window - 1, page)


class PagePool:
    """Numbers of pages, of which the lowest free one is given out first.

    Args:
        size: Number of pages.
    """

    def __init__(self, size: int) -> None:
        self._free = list(range(size))
        self.size = size

    @property
    def free(self) -> int:
        """Number of pages that nobody has."""
        return len(self._free)

    def take(self, wanted: int) -> list[int]:
        """Return the numbers of ``wanted`` pages.

        Raises:
            RequestError: There are fewer. None is taken then.
        """
        if wanted > len(self._free):
            raise RequestError(
                f"the cache has {count(len(self._free), 'free page')} of {self.size}, and {wanted} are needed"
            )
        return [heapq.heappop(self._free) for _ in range(wanted)]

    def give_back(self, pages: list[int]) -> None:
        """Take pages back."""
        for page in pages:
            heapq.heappush(self._free, page)


@dataclass
class PageLists:
    """The pages of one sequence, taken from two pools as it grows.

    Args:
        pool: Pages of blocks that attend to everything, or None without such blocks.
        window_pool: Pages of blocks with a window, or None without such blocks.
        window: Widest window in positions.
        page: Positions of a page.
    """

    pool: PagePool | None
    window_pool: PagePool | None
    window: int
    page: int
    _pages: list[int] = field(default_factory=list)
    _ring: list[int] = field(default_factory=list)
    """Pages of windows; page number n of the sequence is the one n places on, round and round."""

    def reserve(self, positions: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return both lists for the first ``positions`` positions, taking the pages that are missing.

        Raises:
            RequestError: A pool has too few. What was taken stays with the sequence.
        """
        wanted = pages_of(positions, self.page)
        if self.pool is not None and wanted > len(self._pages):
            self._pages += self.pool.take(wanted - len(self._pages))
        around: list[int] = []
        if self.window_pool is not None:
            most = window_pages_of(self.window, self.page)
            if min(wanted, most) > len(self._ring):
                self._ring += self.window_pool.take(min(wanted, most) - len(self._ring))
            around = [self._ring[number % most] for number in range(wanted)]
        return np.array(self._pages[:wanted], np.int32), np.array(around, np.int32)

    def give_back(self) -> None:
        """Give all pages back."""
        if self.pool is not None:
            self.pool.give_back(self._pages)
        if self.window_pool is not None:
            self.window_pool.give_back(self._ring)
        self._pages, self._ring = [], []
