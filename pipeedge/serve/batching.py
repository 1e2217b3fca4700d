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
from itertools import islice

__all__ = ["Batcher", "BatchLimits"]


@dataclass(frozen=True)
class BatchLimits:
    """Limits of microbatches, and of the queue that they are formed from."""

    max_items: int
    """Largest number of items in a microbatch."""
    max_tokens: int
    """Largest number of tokens in a microbatch, padding included; a longer item travels alone."""
    max_waiting: int
    """Largest number of items that wait, and of requests that do."""
    max_passes: int = 8
    """Largest number of microbatches with younger items that may leave before an item, while few wait."""
    overhead_tokens: int = 16
    """Cost of a microbatch besides its tokens, in tokens."""

    def __post_init__(self) -> None:
        if min(self.max_items, self.max_tokens, self.max_waiting) < 1:
            raise ValueError("a microbatch and the queue must have room for an item")
        if min(self.max_passes, self.overhead_tokens) < 0:
            raise ValueError("passes and overhead must not be negative")


class Batcher:
    """The items that wait, and the choice among them.

    An item has been passed by each microbatch whose youngest item is younger. So the youngest items of
    microbatches are all that has to be kept, and no item was passed more often than an older one.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._waiting: dict[int, int] = {}  # tokens by number; a dict keeps the order of arrival
        self._alike: dict[int, dict[int, None]] = {}  # numbers by their tokens, in order of arrival
        self._deadlines_s: dict[int, float] = {}
        self._furthest: list[int] = []
        """Youngest items of those microbatches that have passed some item, in order. What is older than all
        that waits does not count; it is dropped when another microbatch passes one.
        """
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

    def offer(self, first: int, tokens: Sequence[int], deadline_s: float | None = None) -> bool:
        """Add items, all or none. Return whether there was room for them.

        Args:
            first: Number of the first one, above those of all earlier items; the others follow.
            tokens: Number of tokens of each; 1 for images, which are all of one size.
            deadline_s: Time after which they are not to be computed any more, or None.

        Raises:
            ValueError: The number is not above those of earlier items.
        """
        if len(tokens) > self.room:
            return False
        if first <= self._latest:
            raise ValueError("the numbers of items must go up")
        numbers = range(first, first + len(tokens))
        self._latest = first + len(tokens) - 1
        self._waiting.update(zip(numbers, tokens, strict=True))
        if len(lengths := set(tokens)) == 1:
            self._alike.setdefault(lengths.pop(), {}).update(dict.fromkeys(numbers))
        else:
            for number, length in zip(numbers, tokens, strict=True):
                self._alike.setdefault(length, {})[number] = None
        if deadline_s is not None:
            self._deadlines_s.update(dict.fromkeys(numbers, deadline_s))
            self._earliest_s = min(self._earliest_s, deadline_s)
        return True

    def cancel(self, numbers: Iterable[int]) -> None:
        """Remove the items that nobody wants any more; those that have left already are ignored."""
        for number in numbers:
            if (tokens := self._waiting.pop(number, None)) is None:
                continue
            alike = self._alike[tokens]
            del alike[number]
            if not alike:
                del self._alike[tokens]
            if self._deadlines_s:
                self._deadlines_s.pop(number, None)

    def expire(self, now_s: float) -> tuple[int, ...]:
        """Remove the items whose deadline is over, and return their numbers."""
        if now_s < self._earliest_s:
            return ()
        over = tuple(number for number, deadline_s in self._deadlines_s.items() if deadline_s <= now_s)
        self.cancel(over)
        self._earliest_s = min(self._deadlines_s.values(), default=math.inf)
        return over

    def form(self) -> tuple[int, ...]:
        """Remove the items of the next microbatch and return their numbers, in order of arrival.

        Nothing is returned only if nothing waits.
        """
        if not self._waiting:
            return ()
        if len(self._alike) == 1:  # as images are, and without a choice: nobody passes anybody
            (tokens,) = self._alike
            most = min(self._limits.max_items, self._limits.max_tokens // tokens)
            numbers = tuple(islice(self._waiting, max(1, most)))
            self.cancel(numbers)
            return numbers
        numbers = tuple(sorted(self._choose()))
        self.cancel(numbers)
        bisect.insort(self._furthest, numbers[-1])
        oldest = next(iter(self._waiting), math.inf)
        del self._furthest[: bisect.bisect(self._furthest, oldest)]
        return numbers

    def _choose(self) -> set[int]:
        """Return the numbers of the next microbatch's items."""
        oldest, *urgent = self._urgent()
        length = self._waiting[oldest]
        load, chosen = _Load(self._limits, length), {oldest}
        for number in urgent:
            if not load.join(self._waiting[number], 1):
                return chosen  # nobody passes this item any more
            chosen.add(number)
        lengths = sorted(self._alike, key=lambda tokens: (abs(tokens - length), tokens))
        for tokens in lengths:
            others = islice(self._alike[tokens], self._limits.max_items)
            company = [number for number in others if number not in chosen]
            chosen.update(company[: load.join(tokens, len(company))])
            if not load.room:
                break
        return chosen

    def _urgent(self) -> Iterator[int]:
        """Yield the item that has waited longest, and those after it that must not be passed again."""
        yield from islice(self._waiting, 1)
        most = max(self._limits.max_passes, math.ceil(len(self._waiting) / self._limits.max_items))
        if len(self._furthest) < most:
            return
        for number in islice(self._waiting, 1, None):
            if number > self._furthest[-most]:
                return
            yield number


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
