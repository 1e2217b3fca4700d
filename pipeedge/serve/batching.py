"""Form microbatches from the items that wait. Pure: item numbers and times go in, item numbers come out.

    offer ──> waiting, in order of arrival ──form──> microbatch
                  └── cancel, expire ──> gone

A microbatch is formed when the pipeline has room for one, from what waits at that moment. The item that has
waited longest is always part of it. Others join it if that is cheaper than travelling in a microbatch of
their own: a microbatch costs as many tokens as its longest item has, for each of its items, and a fixed
overhead. So sentences of like length travel together. Younger items may pass an older one in this way, but at
most ``max_passes`` microbatches with younger items leave before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

__all__ = ["Batcher", "BatchLimits", "WaitingItem"]

_LOOKED_AT = 512
"""Number of waiting items among which the company of the oldest one is chosen."""


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
    """Largest number of microbatches with younger items that may leave before an item."""
    overhead_tokens: int = 16
    """Cost of a microbatch besides its tokens, in tokens."""

    def __post_init__(self) -> None:
        if min(self.max_items, self.max_tokens, self.max_waiting) < 1:
            raise ValueError("a microbatch and the queue must have room for an item")
        if min(self.max_passes, self.overhead_tokens) < 0:
            raise ValueError("passes and overhead must not be negative")


@dataclass(frozen=True)
class WaitingItem:
    """An item that waits for a microbatch."""

    number: int
    tokens: int = 1
    """Number of its tokens; 1 for images, which are all of one size."""
    deadline_s: float | None = None
    """Time after which it is not to be computed any more, or None."""


class Batcher:
    """The items that wait, and the choice among them."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._waiting: dict[int, WaitingItem] = {}  # a dict keeps the order of arrival
        self._passed: dict[int, int] = {}

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
            ValueError: An item of the same number waits already.
        """
        if len(items) > self.room:
            return False
        numbers = {item.number for item in items}
        if len(numbers) < len(items) or not numbers.isdisjoint(self._waiting):
            raise ValueError("two items have the same number")
        self._waiting |= {item.number: item for item in items}
        return True

    def cancel(self, numbers: Iterable[int]) -> None:
        """Remove the items that nobody wants any more; those that have left already are ignored."""
        for number in numbers:
            self._waiting.pop(number, None)
            self._passed.pop(number, None)

    def expire(self, now_s: float) -> tuple[int, ...]:
        """Remove the items whose deadline is over, and return their numbers."""
        over = tuple(
            item.number
            for item in self._waiting.values()
            if item.deadline_s is not None and item.deadline_s <= now_s
        )
        self.cancel(over)
        return over

    def form(self) -> tuple[int, ...]:
        """Remove the items of the next microbatch and return their numbers, in order of arrival.

        Nothing is returned only if nothing waits.
        """
        seen = list(islice(self._waiting.values(), _LOOKED_AT))
        if not seen:
            return ()
        chosen = self._choose(seen)
        last = max(place for place, item in enumerate(seen) if item.number in chosen)
        for item in seen[:last]:
            if item.number not in chosen:
                self._passed[item.number] = self._passed.get(item.number, 0) + 1
        numbers = tuple(item.number for item in seen if item.number in chosen)
        self.cancel(numbers)
        return numbers

    def _choose(self, seen: Sequence[WaitingItem]) -> set[int]:
        """Return the numbers of the next microbatch's items, among those ``seen``."""
        load = _Load(self._limits, seen[0].tokens)
        chosen, until = {seen[0].number}, len(seen)
        for place, item in enumerate(seen[1:], start=1):
            if self._passed.get(item.number, 0) < self._limits.max_passes:
                continue
            if not load.join(item.tokens):
                until = place  # nobody passes this item any more
                break
            chosen.add(item.number)
        others = [item for item in seen[1:until] if item.number not in chosen]
        others.sort(key=lambda item: abs(item.tokens - seen[0].tokens))  # stable: the older one first
        for item in others:
            if load.is_full:
                break
            if load.join(item.tokens):
                chosen.add(item.number)
        return chosen


class _Load:
    """Size of a microbatch while items join it."""

    def __init__(self, limits: BatchLimits, tokens: int) -> None:
        self._limits = limits
        self._items = 1
        self._longest = tokens

    @property
    def is_full(self) -> bool:
        """Whether no further item fits, however short."""
        return self._items == self._limits.max_items

    def join(self, tokens: int) -> bool:
        """Add an item if it fits and is cheaper here than alone. Return whether it was added."""
        longest = max(self._longest, tokens)
        together = (self._items + 1) * longest
        apart = self._items * self._longest + tokens + self._limits.overhead_tokens
        if self.is_full or together > min(apart, self._limits.max_tokens):
            return False
        self._items, self._longest = self._items + 1, longest
        return True
