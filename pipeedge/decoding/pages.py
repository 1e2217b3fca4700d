"""Which pages of the cache each sequence has; the data rank decides for all stages.

Two pools of page numbers serve the whole pipeline: one for blocks that attend to everything, one for blocks
with a window, whose sequences keep no more pages than the window reaches. A list of a sequence has a number
for each page from its beginning; in that of windows, numbers that the window has left come again.

    positions        0-31  32-63  64-95  96-127  128-159
    pages               4      0      7       2        5
    window pages        1      3      6       1        3       a window of up to 33 positions

A full page can be *kept* under a key that stands for all tokens from the beginning to its end. Sequences
that begin alike refer to the same pages, and those that nobody refers to any more stay until their place is
needed, the least recently used first.

When stages are lost, the kept pages are still there in the others. Those pages are *stale*: layers have to
compute them again, from the first to the last lost one.

    layers     1-8           9-16          17-24
               has page 4    lost          has page 4      layers 1-16 compute page 4 again, or 9-16 alone:
               └> outputs of page 4 kept                   from the outputs of layer 8, if these are kept
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pipeedge.base.errors import RequestError
from pipeedge.base.schedule import LayerRange
from pipeedge.base.wording import count

__all__ = ["LostLayers", "LostPart", "PageLists", "PagePool", "page_key", "pages_of", "window_pages_of"]


def pages_of(positions: int, page: int) -> int:
    """Return the number of pages that so many positions need."""
    return -(-positions // page)


def window_pages_of(window: int, page: int) -> int:
    """Return the number of pages that a sequence needs for a window, however long it is.

    Rows are written and attend page by page. A row in the first place of a page reaches ``window`` - 1
    positions back.
    """
    return 1 + pages_of(window - 1, page)


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a full page.

    Args:
        before: Key of the page before it; empty for the first page.
        tokens: Tokens of the page.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class LostPart:
    """Layers that have lost what they had in their pages, or have copies of some."""

    layers: LayerRange
    copied: Sequence[int] = ()
    """For each page that may have been copied, step before which it has to be full, or else it is lost; 0
    if it was not copied.
    """

    def has_lost(self, page: int, filled: int) -> bool:
        """Return whether a page is lost that the step ``filled`` has filled."""
        return page >= len(self.copied) or self.copied[page] <= filled


@dataclass(frozen=True)
class LostLayers:
    """What stages have lost, and what is left of their outputs."""

    layers: int
    """Number of layers of the model."""
    parts: Sequence[LostPart] = ()
    outputs: frozenset[int] = frozenset()
    """Cuts, by the number of layers before, of whose payloads is still there what was kept."""

    def of(self, page: int, filled: int) -> LayerRange | None:
        """Return the layers that have lost a page, and those between; None if none has.

        Args:
            page: The page.
            filled: Step that has filled it.
        """
        return LayerRange.around(*(one.layers for one in self.parts if one.has_lost(page, filled)))


class PagePool:
    """Numbers of pages with the number of sequences that refer to each.

    The lowest number that is neither referred to nor kept is given out first.

    Args:
        size: Number of pages.
        outputs: Cuts, by the number of layers before, whose payloads are kept by page.
    """

    def __init__(self, size: int, outputs: frozenset[int] = frozenset()) -> None:
        self.size = size
        self._kept_outputs = outputs
        self._empty = list(range(size))
        self._references = [0] * size
        self._keys: dict[int, bytes] = {}
        self._filled: dict[int, int] = {}
        """Step that has filled each kept page."""
        self._stale: dict[int, LayerRange] = {}
        """Layers that have to compute each stale page again."""
        self._outputs: dict[int, frozenset[int]] = {}
        """Cuts of whose payloads the rows of each kept page are there."""
        self._kept: dict[bytes, int] = {}
        self._unused: dict[int, None] = {}
        """Kept pages that nobody refers to, the least recently used first."""

    @property
    def free(self) -> int:
        """Number of pages that nobody refers to."""
        return len(self._empty) + len(self._unused)

    @property
    def kept(self) -> int:
        """Number of pages that nobody refers to and that a sequence with their beginning could use."""
        return len(self._unused)

    def take(self, wanted: int) -> list[int]:
        """Return the numbers of ``wanted`` pages.

        Raises:
            RequestError: There are fewer. None is taken then.
        """
        if wanted > self.free:
            raise RequestError(
                f"the cache has {count(self.free, 'free page')} of {self.size}, and {wanted} are needed"
            )
        found = []
        for _ in range(wanted):
            if self._empty:
                page = heapq.heappop(self._empty)
            else:
                page = next(iter(self._unused))
                del self._unused[page]
                self._forget(page)
            self._references[page] = 1
            found.append(page)
        return found

    def has(self, key: bytes) -> bool:
        """Return whether a page is kept under ``key``."""
        return key in self._kept

    def refer(self, key: bytes) -> int:
        """Return the page that is kept under ``key``, for one more sequence."""
        page = self._kept[key]
        self._unused.pop(page, None)
        self._references[page] += 1
        return page

    def keep(self, page: int, key: bytes, step: int) -> int:
        """Keep a full page, and return it; or the page with the same contents that is kept already.

        In the latter case, the reference to ``page`` becomes one to the other, unless that is stale.

        Args:
            page: The page, all layers of which are filled.
            key: Its key.
            step: Number of the step that fills the last of it.
        """
        other = self._kept.get(key, page)
        if other != page:
            if other not in self._stale:
                self.refer(key)
                self.give_back([page])
                return other
            self._forget(other)
            if other in self._unused:
                del self._unused[other]
                heapq.heappush(self._empty, other)
        if page not in self._keys:
            self._outputs[page] = self._kept_outputs
        elif stale := self._stale.pop(page, None):
            again = {cut for cut in self._kept_outputs if stale.start < cut <= stale.stop}
            self._outputs[page] |= again
        self._kept[key], self._keys[page] = page, key
        self._filled[page] = step
        return page

    def known(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Return how many of the first pages of a sequence are kept, without stale ones, and with them."""
        known = next((index for index, key in enumerate(keys) if key not in self._kept), len(keys))
        pages = [self._kept[key] for key in keys[:known]]
        return next((index for index, page in enumerate(pages) if page in self._stale), known), known

    def repeating_layers(self, page: int) -> LayerRange | None:
        """Return the layers that have to compute a page again; None if it is not stale."""
        return self._stale.get(page)

    def restart(self, size: int, step: int, lost: LostLayers, outputs: frozenset[int] = frozenset()) -> None:
        """Go on with kept pages, to which nobody refers any longer.

        Args:
            size: Number of pages from now on; others are gone.
            step: First step that has no result: what steps from there on have filled is gone.
            lost: Layers that have lost pages.
            outputs: Cuts whose payloads are kept by page from now on.
        """
        for page in tuple(self._keys):
            self._outputs[page] &= lost.outputs
            stale = LayerRange.around(lost.of(page, self._filled[page]), self._stale.get(page))
            if stale is not None:
                before = max((cut for cut in self._outputs[page] if cut <= stale.start), default=0)
                stale = LayerRange(before, stale.stop)
            if page >= size or self._filled[page] >= step or (stale and len(stale) >= lost.layers):
                self._forget(page)
            elif stale is not None:
                self._stale[page] = stale
        self.size, self._kept_outputs = size, outputs
        self._references = [0] * size
        self._unused = {page: None for page in self._unused if page in self._keys}
        self._empty = [page for page in range(size) if page not in self._keys]

    def _forget(self, page: int) -> None:
        """Keep a page no longer."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._kept[key]
            del self._filled[page], self._outputs[page]
            self._stale.pop(page, None)

    def reuse(self, page: int) -> bool:
        """Return whether a page that its only sequence needs no more can be written anew.

        It is no longer kept then.
        """
        if self._references[page] != 1:
            return False
        self._forget(page)
        return True

    def shared(self, page: int) -> bool:
        """Return whether several sequences refer to a page."""
        return self._references[page] > 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Take back one reference to each page; of those that are kept, the first is evicted last."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._keys:
                self._unused[page] = None
            else:
                heapq.heappush(self._empty, page)


class PageLists:
    """The pages of one sequence, taken from two pools as it grows.

    Args:
        pool: Pages of blocks that attend to everything, or None without such blocks.
        window_pool: Pages of blocks with a window, or None without such blocks.
        window: Widest window in positions.
        page: Positions of a page.
    """

    def __init__(self, pool: PagePool | None, window_pool: PagePool | None, window: int, page: int) -> None:
        self._pool = pool
        self._window_pool = window_pool
        self._window = window
        self._page = page
        self.pages: list[int] = []
        """Numbers of the pages from the beginning."""
        self.window_pages: list[int] = []
        """Numbers of pages of windows, from the beginning; those that the window has left do not count."""
        self._first = 0
        """First page that the window has not left."""
        self._left: list[int] = []
        """Pages that the window has left and that a step under way may still read."""
        self._kept = 0
        """Number of pages from the beginning that are kept, as far as they are still here."""

    def room(self, positions: int) -> int:
        """Return how many positions, up to ``positions``, could be reserved."""
        wanted = pages_of(positions, self._page)
        if self._pool is not None:
            wanted = min(wanted, len(self.pages) + self._pool.free)
        if self._window_pool is not None and wanted > len(self.window_pages):
            spare = self._window_pool.free + sum(not self._window_pool.shared(page) for page in self._left)
            first = self._first
            for index in range(len(self.window_pages), wanted):
                while first < self._reach(index * self._page):
                    new = first >= len(self.window_pages)
                    spare += new or not self._window_pool.shared(self.window_pages[first])
                    first += 1
                if not spare:
                    wanted = index
                    break
                spare -= 1
        return min(positions, wanted * self._page)

    def reserve(self, positions: int) -> None:
        """Take the pages that are missing for the first ``positions`` positions.

        Raises:
            RequestError: A pool has too few. What was taken stays with the sequence.
        """
        wanted = pages_of(positions, self._page)
        if self._pool is not None and wanted > len(self.pages):
            self.pages += self._pool.take(wanted - len(self.pages))
        if self._window_pool is not None:
            for index in range(len(self.window_pages), wanted):
                self._pass(index * self._page)
                self.window_pages.append(self._fresh(self._window_pool))

    def share(self, keys: Sequence[bytes], position: int) -> tuple[int, int]:
        """Refer to kept pages for the positions that follow.

        Args:
            keys: Keys of the pages of the sequence, of all that may be shared.
            position: Number of positions that are known, which fill whole pages.

        Returns:
            How many positions are known then, and how many in some layers at least.
        """
        start = position // self._page
        best, run = start, 0
        for index in range(start, len(keys)):
            if self._pool is not None and not self._pool.has(keys[index]):
                break
            if self._window_pool is not None:
                run = run + 1 if self._window_pool.has(keys[index]) else 0
                if index + 1 - run > max(self._reach((index + 1) * self._page), start):
                    continue
            best = index + 1
        if best == start:
            return position, position
        first = self._reach(best * self._page)
        if self._pool is not None:
            self._pool.give_back(self.pages[start:])
            self.pages[start:] = [self._pool.refer(key) for key in keys[start:best]]
        if self._window_pool is not None:
            self._window_pool.give_back(self.window_pages[max(start, self._first) :])
            del self.window_pages[start:]
            self._pass(best * self._page)
            self.window_pages += [0] * (first - start)
            self.window_pages += [self._window_pool.refer(key) for key in keys[max(first, start) : best]]
            self._first = max(first, self._first)
        known = range(start, best)
        self._kept = next((index for index in known if self.repeating_layers(index, index + 1)), best)
        return self._kept * self._page, best * self._page

    def repeating_layers(self, first: int, stop: int) -> LayerRange | None:
        """Return the layers that have to compute pages again, of those from ``first`` to ``stop``."""
        if self._pool is None:
            return None
        return LayerRange.around(*map(self._pool.repeating_layers, self.pages[first:stop]))

    def moved(self, keys: Sequence[bytes], position: int, step: int) -> None:
        """Keep full pages, and give back those that the window has left.

        The lists that steps refer to must have been copied before.

        Args:
            keys: Keys of all full pages among the first ``position`` positions, at least.
            position: Number of positions that are known once the steps so far are executed.
            step: Number of the last of them.
        """
        for index in range(self._kept, position // self._page):
            if self._pool is not None:
                self.pages[index] = self._pool.keep(self.pages[index], keys[index], step)
            if self._window_pool is not None and index >= self._first:
                page = self.window_pages[index]
                self.window_pages[index] = self._window_pool.keep(page, keys[index], step)
        self._kept = max(self._kept, position // self._page)
        self.leave(position)

    def leave(self, position: int) -> None:
        """Give back the pages of windows that rows from ``position`` on do not reach."""
        if self._window_pool is not None:
            self._pass(position)
            self._window_pool.give_back(self._left)
            self._left = []

    def give_back(self) -> None:
        """Give all pages back."""
        if self._pool is not None:
            self._pool.give_back(self.pages)
        if self._window_pool is not None:
            self._window_pool.give_back(self._left + self.window_pages[self._first :])
        self.pages, self.window_pages, self._left = [], [], []
        self._first = self._kept = 0

    def _reach(self, position: int) -> int:
        """Return the first page that a row at ``position`` reaches in blocks with a window."""
        return max(0, position - self._window + 1) // self._page

    def _pass(self, position: int) -> None:
        """Move the window to a row at ``position``."""
        first = min(self._reach(position), len(self.window_pages))
        if first > self._first:
            self._left += self.window_pages[self._first : first]
            self._first = first

    def _fresh(self, pool: PagePool) -> int:
        """Return a page of windows to write: one that is free, or one that the window has left."""
        if not pool.free:
            for place, page in enumerate(self._left):
                if pool.reuse(page):
                    return self._left.pop(place)
        return pool.take(1)[0]
