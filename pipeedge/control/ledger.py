"""The data rank's ledger: microbatches that are fed but not written yet. Pure.

            written            next
    ───────────┤──── under way ──┤·············       at most ``window`` are under way
     rows of   │ their entries   │ not read yet
     the output│ are kept        │

Microbatches have numbers, and a stage holds nothing between two of them, so computing one twice is harmless.
A new epoch feeds again from the lowest number that is not written. Exactly once and in order is decided here
alone, where results are written: those of an old epoch, or written already, are dropped.

A change of plan cuts the line in two. What was fed comes by the epoch before; what follows is fed to the new
one, whose results wait until all of the former is written:

            written      first           next
    ───────────┤── before ─┤── the new ────┤·······    at most ``window`` of the new are under way

Feeding begins with one, and goes on with one for each result that is written, of either epoch, and two for
every second: to read and send all at once, only to wait in the new stages, would take the data rank's
processor from the results that are due.

An entry is what it takes to read the microbatch again, and what the rows need besides the outputs: the
places of its items in the input, their labels and sources.
"""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

__all__ = ["Arrival", "Ledger"]

_Entry = TypeVar("_Entry")


class Arrival(enum.Enum):
    """Answer to a result that comes back."""

    WRITE = "write"
    """It is the next one: write it, then call ``wrote``."""
    HOLD = "hold"
    """It is early: ask again when all that the epoch before was fed is written."""
    DROP = "drop"
    """It belongs to an old epoch, or is written already."""


class Ledger(Generic[_Entry]):
    """Microbatches under way, by number.

    Args:
        window: largest number of microbatches under way.
        written: number of microbatches that are written already, by a run that ended.
    """

    def __init__(self, window: int, written: int = 0) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} microbatches lets none pass")
        self._window = window
        self._epoch = self._before = 0
        self._written = self._next = written
        self._first = written  # lowest number that the epoch is fed
        self._changed_at = written  # what was written when it was announced
        self._entries: dict[int, _Entry] = {}
        self._count: int | None = None

    @property
    def written(self) -> int:
        """Lowest number that is not written."""
        return self._written

    @property
    def under_way(self) -> int:
        """Number of microbatches that are fed and not written, by this epoch and by one that it follows."""
        return self._next - self._written

    @property
    def complete(self) -> bool:
        """Whether the input has ended and all of it is written."""
        return self._written == self._count

    def restart(self, epoch: int, window: int) -> None:
        """Prepare for ``epoch``: feed again from the lowest number that is not written.

        Args:
            epoch: number of the epoch, larger than the last.
            window: largest number of microbatches under way from now on.
        """
        if epoch <= self._epoch or window < 1:
            raise ValueError(f"epoch {epoch} with a window of {window} cannot follow epoch {self._epoch}")
        self._epoch, self._window = epoch, window
        self._before, self._first = 0, self._written
        self._next = self._changed_at = self._written

    def change(self, epoch: int, window: int) -> int:
        """Let ``epoch`` be fed what follows; return the lowest number of that.

        Args:
            epoch: number of the epoch, larger than the last.
            window: largest number of its microbatches under way.
        """
        if epoch <= self._epoch or window < 1:
            raise ValueError(f"epoch {epoch} with a window of {window} cannot follow epoch {self._epoch}")
        self._before, self._epoch = self._epoch, epoch
        self._window, self._first = window, self._next
        self._changed_at = self._written
        return self._first

    def next_number(self) -> int | None:
        """Return the number to feed next, or None while the window is full and once the input has ended."""
        is_full = self._next - max(self._written, self._first) >= self._window
        if self._before:
            came = self._written - self._changed_at
            is_full = is_full or self._next - self._first >= 1 + came + came // 2
        return None if is_full or self._next == self._count else self._next

    def entry(self, number: int) -> _Entry | None:
        """Return the entry of a microbatch that was fed before; None if it has not been read yet."""
        return self._entries.get(number)

    def fed(self, number: int, entry: _Entry) -> None:
        """Note that microbatch ``number`` is under way.

        Raises:
            ValueError: it is not the next one, or was fed with another entry.
        """
        if number != self.next_number() or self._entries.get(number, entry) != entry:
            raise ValueError(f"microbatch {number} is not the one to feed")
        self._entries[number] = entry
        self._next += 1

    def input_ended(self) -> None:
        """Note that no microbatch follows those that were fed."""
        if self._next <= max(self._entries, default=-1) or self._count not in (None, self._next):
            raise ValueError("the input ends before microbatches that came from it")
        self._count = self._next

    def judge(self, epoch: int, number: int) -> Arrival:
        """Return what to do with a result.

        Raises:
            ValueError: it was never fed, or to another epoch, or one that comes before it is missing.
        """
        if epoch not in (self._epoch, self._before) or number < self._written:
            return Arrival.DROP
        if (epoch == self._epoch) != (number >= self._first):
            raise ValueError(f"the result of microbatch {number} from an epoch that was not fed it")
        if self._written < self._first <= number < self._next:
            return Arrival.HOLD
        if number != self._written or number >= self._next:
            raise ValueError(f"the result of microbatch {number} instead of {self._written}")
        return Arrival.WRITE

    def wrote(self, number: int) -> _Entry:
        """Note that the rows of microbatch ``number`` are in the output; return its entry."""
        if number != self._written:
            raise ValueError(f"microbatch {number} was written instead of {self._written}")
        self._written += 1
        return self._entries.pop(number)
