"""The data rank's ledger: what was fed, what has come, and what must be fed again, in all plans of a run.

    feeder ──next_group, feed──> Ledger <──take, wrote── collector

            written            next
    ───────────┤──── under way ──┤·············       at most ``window`` are under way
     rows of   │ their entries   │ not read yet, or
     the output│ are kept        │ to be fed again

Microbatches have numbers, and computing one twice is harmless: stages hold nothing between two of them, or,
those of decoders, what each step writes once more before it is read.
A new epoch feeds again from the lowest number that is not written. Exactly once and in order is decided here
alone, where results are written: those of an old epoch, or written already, are dropped.

What is fed again comes from the source, if that can read an item again: ``position`` tells it where to begin.
Else, as with requests, the ledger keeps each group from the moment in which the feeder has it until its
results are written, and a new epoch is fed the kept ones first. Steps of a decoder are neither: those that
were lost are dropped, and their source makes others from the tokens that it has.

A change of plan cuts the line in two, and two feeders and two collectors share the ledger. The feeder of the
plan before hands over what it has read but not fed. What was fed comes by the epoch before; what follows is
fed to the new one, whose collector waits until all of the former is written:

            written      first           next
    ───────────┤── before ─┤── the new ────┤·······    at most ``window`` of the new are under way

Feeding begins with one, and goes on as results of either epoch are written (``fed_to_new_plan``).

An entry is what the rows need besides the outputs: the places of the items in the input, their labels and
sources.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeedge.base.backpressure import UNBOUNDED, fed_to_new_plan
from pipeedge.base.crew import Closed
from pipeedge.base.errors import PipeEdgeError

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.data import Group, Microbatch

__all__ = ["Arrival", "Ledger"]


class Arrival(enum.Enum):
    """Answer to a result that comes back."""

    WRITE = "write"
    """It is the next one: write it, then call ``wrote``."""
    HOLD = "hold"
    """It is early: ask again when all that the epoch before was fed is written."""
    DROP = "drop"
    """It belongs to an old epoch, or is written already."""


class Ledger:
    """Microbatches under way, by number.

    Args:
        changed: Wakes the threads that wait; None for one that belongs to the ledger.
    """

    def __init__(self, changed: threading.Condition | None = None) -> None:
        self._changed = threading.Condition() if changed is None else changed
        self._window = UNBOUNDED
        self._epoch = self._before = 0
        self._written = self._next = 0
        self._first = 0  # lowest number that the epoch is fed
        self._changed_at = 0  # what was written when it took over
        self._entries: dict[int, tuple[Microbatch, float]] = {}  # of what is under way
        self._to_feed: deque[Group] = deque()  # kept groups that this epoch was not fed
        self._items = self._most_items = 0  # fed so far, without what is fed again; the most in any epoch
        self._may_shrink = False  # whether fewer items may follow a failure than were fed before it
        self._count: int | None = None
        self._input_ended = False  # in this epoch
        self._successor: tuple[int, int] | None = None
        self._handed_over: int | None = None
        self._closed = False
        self.position: int | None = None
        """Position in the input of what follows the last item that is written; None before the first."""
        self.began_at: float | None = None
        """Time at which reading began."""

    # -- queries, by any thread -------------------------------------------------------------------

    @property
    def written(self) -> int:
        """Lowest number of a microbatch that is not written."""
        with self._changed:
            return self._written

    @property
    def under_way(self) -> int:
        """Number of microbatches that are fed and not written, by this epoch and by one that it follows."""
        with self._changed:
            return self._next - self._written

    @property
    def oldest_fed_at(self) -> float | None:
        """Time at which the oldest microbatch was fed that is not written, or None if there is none."""
        with self._changed:
            return min((at for _, at in self._entries.values()), default=None)

    @property
    def complete(self) -> bool:
        """Whether the input has ended and all of it is written."""
        with self._changed:
            return self._written == self._count

    @property
    def first_of_next(self) -> int | None:
        """Lowest number that the latest feeder which took over has fed; None if none has."""
        with self._changed:
            return self._handed_over

    # -- epochs -----------------------------------------------------------------------------------

    def restart(self, epoch: int, window: int) -> None:
        """Prepare for ``epoch``: feed again from the lowest number that is not written.

        Args:
            epoch: Number of the epoch, larger than the last.
            window: Largest number of microbatches under way from now on.
        """
        with self._changed:
            self._check_follows(epoch, window)
            self._epoch, self._window = epoch, window
            self._before, self._first = 0, self._written
            self._next = self._changed_at = self._written
            self._successor = self._handed_over = None
            self._input_ended = self._closed = False
            if not self.complete:
                self._count = None  # of microbatches that may have another size now
            for _, (batch, _) in sorted(self._entries.items(), reverse=True):
                self._items -= batch.items
                if batch.origin is not None:
                    self._to_feed.appendleft(batch.origin)
            self._entries.clear()

    def change(self, epoch: int, window: int) -> None:
        """Have the present feeder hand over to that of ``epoch``, which waits in ``take_over``.

        Args:
            epoch: Number of the epoch, larger than the last.
            window: Largest number of its microbatches under way.
        """
        with self._changed:
            self._check_follows(epoch, window)
            self._successor, self._handed_over = (epoch, window), None
            if self._input_ended:
                self._hand_over()
            self._changed.notify_all()

    def _check_follows(self, epoch: int, window: int) -> None:
        if epoch <= self._epoch or window < 1:
            raise ValueError(f"epoch {epoch} with a window of {window} cannot follow epoch {self._epoch}")

    def close(self) -> None:
        """Wake all waiting threads, as the epoch is stopped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- the feeder -------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Note that reading begins, unless it did in an earlier epoch."""
        if self.began_at is None:
            self.began_at = now

    def next_number(self) -> int | None:
        """Return the number to feed next, or None while the window is full and once the input has ended."""
        with self._changed:
            is_full = self._next - max(self._written, self._first) >= self._window
            if self._before:
                is_full |= self._next - self._first >= fed_to_new_plan(self._written - self._changed_at)
            return None if is_full or self._next == self._count else self._next

    def wait_for_room(self) -> int | None:
        """Wait until another microbatch may be fed; return its number, or None if another feeder goes on.

        Raises:
            Closed: The epoch was stopped.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._successor is not None or self.next_number() is not None
            )
            if self._closed:
                raise Closed
            return self.next_number() if self._successor is None else None

    def next_group(self, read: Callable[[], Group | None]) -> Group | None:
        """Return what is to be fed next: what must be fed again, else what ``read`` returns."""
        with self._changed:
            if self._to_feed:
                return self._to_feed[0]
        group = read()
        if group is None:
            return None
        with self._changed:
            self._may_shrink = group.is_made_anew
            if group.is_kept:
                # Not only when it is fed: the epoch may end before the link has room.
                self._to_feed.append(group)
        return group

    def feed(self, number: int, batch: Microbatch, now: float) -> None:
        """Note that the group of ``next_group`` is fed; its values need not be kept.

        Raises:
            ValueError: It is not the next one.
        """
        with self._changed:
            if number != self.next_number():
                raise ValueError(f"microbatch {number} is not the one to feed")
            self._entries[number] = (batch, now)
            self._next += 1
            self._items += batch.items
            self._most_items = max(self._most_items, self._items)
            if batch.origin is not None:
                self._to_feed.popleft()

    def input_ended(self) -> None:
        """Note that no microbatch follows those that were fed."""
        with self._changed:
            if self._items < self._most_items and not self._may_shrink:
                raise PipeEdgeError(
                    "the input has changed since it was read first: the input ends before microbatches that "
                    "came from it"
                )
            self._count, self._input_ended = self._next, True
            self._hand_over()

    def hand_over(self) -> None:
        """Let the next feeder feed all that follows."""
        with self._changed:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._successor is None:
            return
        self._before, (self._epoch, self._window) = self._epoch, self._successor
        self._first, self._changed_at = self._next, self._written
        self._handed_over, self._successor = self._first, None
        self._changed.notify_all()

    def take_over(self) -> None:
        """Wait for the feeder before to hand over.

        Raises:
            Closed: The epoch was stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._handed_over is not None)
            if self._handed_over is None:
                raise Closed

    # -- the collector ----------------------------------------------------------------------------

    def judge(self, epoch: int, number: int) -> Arrival:
        """Return what to do with a result.

        Raises:
            ValueError: It was never fed, or to another epoch, or one that comes before it is missing.
        """
        with self._changed:
            if epoch not in (self._epoch, self._before) or number < self._written:
                return Arrival.DROP
            if (epoch == self._epoch) != (number >= self._first):
                raise ValueError(f"the result of microbatch {number} from an epoch that was not fed it")
            if self._written < self._first <= number < self._next:
                return Arrival.HOLD
            if number != self._written or number >= self._next:
                raise ValueError(f"the result of microbatch {number} instead of {self._written}")
            return Arrival.WRITE

    def take(self, number: int, epoch: int = 0) -> tuple[Microbatch, float] | None:
        """Return what is known of a microbatch whose result has come, and when it was fed.

        It waits until all that the epoch before was fed is written. Returns None if its result is, already.

        Raises:
            Closed: The epoch was stopped.
        """
        with self._changed:
            try:
                while (arrival := self.judge(epoch, number)) is Arrival.HOLD:
                    if self._closed:
                        raise Closed
                    self._changed.wait()
            except ValueError as error:
                raise PipeEdgeError(f"received {error}") from error
            return None if arrival is Arrival.DROP else self._entries[number]

    def wrote(self, number: int) -> None:
        """Note that the rows of a microbatch are in the output."""
        with self._changed:
            if number != self._written:
                raise ValueError(f"microbatch {number} was written instead of {self._written}")
            self._written += 1
            batch, _ = self._entries.pop(number)
            self.position = batch.numbers[-1] + 1
            self._changed.notify_all()
