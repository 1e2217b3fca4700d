"""Form microbatches from the items that wait. Pure: item numbers and times go in, item numbers come out.

    offer ──> waiting, in order of arrival ──form──> microbatch
                  └── cancel, expire ──> gone

A microbatch is formed when the pipeline has room for one, from what waits at that moment. The item that has
waited longest is always part of it. Others join it if that is cheaper than travelling in a microbatch of
their own: a microbatch costs as many tokens as its longest item has, for each of its items, and a fixed
overhead. So sentences of like length travel together. Younger items may pass an older one in this way, but at
most ``max_passes`` microbatches with younger items leave before it, or as many as all that wait would fill.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

__all__ = ["Batcher", "BatchLimits", "WaitingItem"]


@dataclass(frozen=True)
class BatchLimits:
    """Limits of microbatches, and of the queue that they are formed from."""

    max_items: int
    """Largest number of items in a microbatch."""
    max_tokens: int
    """Largest number of tokens in a microbatch, padding included; a longer item travels alone."""
    max_waiting: int
    """Largest number of items that wait."""
    max_passes: int = 8
    """Largest number of microbatches with younger items that may leave before an item, while few wait."""
    overhead_tokens: int = 16
    """Cost of a microbatch besides its tokens, in tokens."""

    def __post_init__(self) -> None:
        if min(self.max_items, self.max_tokens, self.max_waiting) < 1:
            raise ValueError("a microbatch and the queue must have room for an item")
        if min(self.max_passes, self.overhead_tokens) < 0:
            raise ValueError("passes and overhead must not be negative")


class WaitingItem(NamedTuple):
    """An item that waits for a microbatch."""

    number: int
    """Number of the item, above those of all earlier ones."""
    tokens: int = 1
    """Number of its tokens; 1 for images, which are all of one size."""
    deadline_s: float | None = None
    """Time after which it is not to be computed any more, or None."""


class Batcher:
    """The items that wait, and the choice among them.

    An item has been passed by each microbatch whose youngest item is younger. So the youngest items of
    microbatches are all that has to be kept, and no item was passed more often than an older one.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._waiting: dict[int, WaitingItem] = {}  # a dict keeps the order of arrival
        self._alike: dict[int, dict[int, None]] = {}  # numbers by their tokens, in order of arrival
        self._furthest: list[int] = []
        """Youngest items of those microbatches that have passed some item that waits, in order."""
        self._latest = -1
        self._earliest_s = math.inf
        """Time before which no deadline is over."""

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return len(self._waiting)

    @property
    def room(self) -> int:
        """Number of further items that may wait."""
        return self._limits.max_waiting - len(self._waiting)

    def offer(self, items: Sequence[WaitingItem]) -> bool:
        """Add ``items``, all or none. Return whether there was room for them.

        Raises:
            ValueError: Their numbers do not go up.
        """
        if len(items) > self.room:
            return False
        numbers = [self._latest, *(item.number for item in items)]
        if any(number <= before for before, number in pairwise(numbers)):
            raise ValueError("the numbers of items must go up")
        self._latest = numbers[-1]
        for item in items:
            self._waiting[item.number] = item
            self._alike.setdefault(item.tokens, {})[item.number] = None
            if item.deadline_s is not None:
                self._earliest_s = min(self._earliest_s, item.deadline_s)
        return True

    def cancel(self, numbers: Iterable[int]) -> None:
        """Remove the items that nobody wants any more; those that have left already are ignored."""
        for number in numbers:
            if (item := self._waiting.pop(number, None)) is None:
                continue
            alike = self._alike[item.tokens]
            del alike[number]
            if not alike:
                del self._alike[item.tokens]

    def expire(self, now_s: float) -> tuple[int, ...]:
        """Remove the items whose deadline is over, and return their numbers."""
        if now_s < self._earliest_s:
            return ()
        deadlines = {
            item.number: item.deadline_s for item in self._waiting.values() if item.deadline_s is not None
        }
        over = tuple(number for number, deadline_s in deadlines.items() if deadline_s <= now_s)
        self._earliest_s = min((each for each in deadlines.values() if each > now_s), default=math.inf)
        self.cancel(over)
        return over

    def form(self) -> tuple[int, ...]:
        """Remove the items of the next microbatch and return their numbers, in order of arrival.

        Nothing is returned only if nothing waits.
        """
        if not self._waiting:
            return ()
        numbers = tuple(sorted(self._choose()))
        self.cancel(numbers)
        bisect.insort(self._furthest, numbers[-1])
        oldest = next(iter(self._waiting), math.inf)
        del self._furthest[: bisect.bisect(self._furthest, oldest)]
        return numbers

    def _choose(self) -> set[int]:
        """Return the numbers of the next microbatch's items."""
        if len(self._alike) == 1:  # as images are, and without a choice: nobody passes anybody
            (tokens,) = self._alike
            most = min(self._limits.max_items, self._limits.max_tokens // tokens)
            return set(islice(self._waiting, max(1, most)))
        oldest, *urgent = self._urgent()
        load, chosen = _Load(self._limits, oldest.tokens), {oldest.number}
        for item in urgent:
            if not load.join(item.tokens, 1):
                return chosen  # nobody passes this item any more
            chosen.add(item.number)
        lengths = sorted(self._alike, key=lambda tokens: (abs(tokens - oldest.tokens), tokens))
        for tokens in lengths:
            others = islice(self._alike[tokens], self._limits.max_items)
            company = [number for number in others if number not in chosen]
            chosen.update(company[: load.join(tokens, len(company))])
            if not load.room:
                break
        return chosen

    def _urgent(self) -> Iterator[WaitingItem]:
        """Yield the item that has waited longest, and those after it that must not be passed again."""
        yield from islice(self._waiting.values(), 1)
        most = max(self._limits.max_passes, math.ceil(len(self._waiting) / self._limits.max_items))
        if len(self._furthest) < most:
            return
        for item in islice(self._waiting.values(), 1, None):
            if item.number > self._furthest[-most]:
                return
            yield item


class _Load:
    """Size of a microbatch while items join it."""

    def __init__(self, limits: BatchLimits, tokens: int) -> None:
        self._limits = limits
        self._items = 1
        self._longest = tokens

    @property
    def room(self) -> int:
        """Largest number of further items."""
        return self._limits.max_items - self._items

    def join(self, tokens: int, count: int) -> int:
        """Add up to ``count`` equal items, as far as they fit and are cheaper here than alone.

        Returns:
            Number of items that were added.
        """
        longest = max(self._longest, tokens)
        together = (self._items + 1) * longest
        apart = self._items * self._longest + tokens + self._limits.overhead_tokens
        if together > apart:
            return 0
        fits = min(self._limits.max_items, self._limits.max_tokens // longest) - self._items
        added = max(0, min(count, fits))
        if added:
            self._items, self._longest = self._items + added, longest
        return added
