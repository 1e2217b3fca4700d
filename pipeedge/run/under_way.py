"""Progress of a run on the data rank, from its beginning to its end, however many plans it takes.

[feed] ──fed──> UnderWay ──entry──> [collect] ──wrote──> UnderWay       at most ``window`` under way
                                        └──came──> Collected

While the plan changes, two feeders and two collectors share it: the feeder of the plan before hands over what
it has read but not fed, and the collector of the new one waits until all that comes before is written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from pipeedge.base.crew import Closed
from pipeedge.base.errors import PipeEdgeError
from pipeedge.control.ledger import Arrival, Ledger
from pipeedge.data import Group, Microbatch
from pipeedge.data.results import Accuracy
from pipeedge.observe.records import EpochRecord

__all__ = ["Collected", "DataProgress", "UnderWay"]

_KEPT_LATENCIES = 100_000
"""Number of microbatches whose latencies are kept, the last ones of a longer run."""
_ANY = 1 << 40
"""Window that never is full."""


class UnderWay:
    """The ledger of a run, which the feeder and the collector share."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ledger: Ledger[int] = Ledger(_ANY)
        self._fed: dict[int, tuple[Microbatch, float]] = {}
        self._successor: tuple[int, int] | None = None
        self._handed: tuple[int, Group | None] | None = None
        self._input_ended = False
        self._closed = False
        self.position: int | None = None
        """Position in the input of what follows the last item that is written; None before the first."""
        self.began_at: float | None = None
        """Time at which reading began."""

    @property
    def written(self) -> int:
        """Lowest number of a microbatch that is not written."""
        with self._changed:
            return self._ledger.written

    @property
    def fed(self) -> int:
        """Number of microbatches that this epoch has fed and that are not written."""
        with self._changed:
            return self._ledger.under_way

    @property
    def oldest_fed_at(self) -> float | None:
        """Time at which the oldest microbatch was fed that is not written, or None if there is none."""
        with self._changed:
            return min((at for _, at in self._fed.values()), default=None)

    @property
    def complete(self) -> bool:
        """Whether the input has ended and all of it is written."""
        with self._changed:
            return self._ledger.complete

    def restart(self, epoch: int, window: int) -> None:
        """Prepare for ``epoch``: feed again what is not written.

        Args:
            epoch: number of the epoch.
            window: largest number of microbatches under way.
        """
        with self._changed:
            self._ledger.restart(epoch, window)
            self._successor = self._handed = None
            self._input_ended = False
            self._closed = False

    def change(self, epoch: int, window: int) -> None:
        """Have the present feeder hand over to that of ``epoch``, which waits in ``take_over``.

        Args:
            epoch: number of the epoch.
            window: largest number of its microbatches under way.
        """
        with self._changed:
            self._successor, self._handed = (epoch, window), None
            if self._input_ended:
                self._hand_over(None)
            self._changed.notify_all()

    def hand_over(self, group: Group) -> None:
        """Let the next feeder feed ``group``, which is read already, and all that follows."""
        with self._changed:
            self._hand_over(group)

    def take_over(self) -> tuple[int, Group | None]:
        """Wait for the feeder before to hand over; return what is to be fed first, with its number.

        Raises:
            Closed: the epoch was stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._handed is not None)
            if self._handed is None:
                raise Closed
            return self._handed

    @property
    def first_of_next(self) -> int | None:
        """Lowest number that the latest feeder which took over has fed; None if none has."""
        with self._changed:
            return None if self._handed is None else self._handed[0]

    def _hand_over(self, group: Group | None) -> None:
        if self._successor is not None:
            self._handed = self._ledger.change(*self._successor), group
            self._successor = None
            self._changed.notify_all()

    def begin(self, now: float) -> None:
        """Note that reading begins, unless it did in an earlier epoch."""
        if self.began_at is None:
            self.began_at = now

    def wait_for_room(self) -> bool:
        """Wait until another microbatch may be fed; return whether the same feeder is to feed it.

        Raises:
            Closed: the epoch was stopped.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._successor is not None or self._ledger.next_number() is not None
            )
            if self._closed:
                raise Closed
            return self._successor is None

    def feed(self, number: int, batch: Microbatch, now: float) -> None:
        """Note that a microbatch is fed; its values need not be kept."""
        with self._changed:
            self._ledger.fed(number, number)
            self._fed[number] = (batch, now)

    def input_ended(self) -> None:
        """Note that no microbatch follows those that were fed."""
        with self._changed:
            try:
                self._ledger.input_ended()
            except ValueError as error:
                raise PipeEdgeError(f"the input has changed since it was read first: {error}") from error
            self._input_ended = True
            self._hand_over(None)

    def take(self, number: int, epoch: int = 0) -> tuple[Microbatch, float] | None:
        """Return what is known of a microbatch whose result has come, and when it was fed.

        It waits until all that the epoch before was fed is written. Returns None if its result is, already.

        Raises:
            Closed: the epoch was stopped.
        """
        with self._changed:
            try:
                while (arrival := self._ledger.judge(epoch, number)) is Arrival.HOLD:
                    if self._closed:
                        raise Closed
                    self._changed.wait()
            except ValueError as error:
                raise PipeEdgeError(f"received {error}") from error
            return None if arrival is Arrival.DROP else self._fed[number]

    def wrote(self, number: int) -> None:
        """Note that the rows of a microbatch are in the output."""
        with self._changed:
            self._ledger.wrote(number)
            batch, _ = self._fed.pop(number)
            self.position = batch.numbers[-1] + 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads, as the epoch is stopped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass
class Collected:
    """Statistics that the collectors of a run share."""

    accuracy: Accuracy = field(default_factory=Accuracy)
    not_finite: int = 0
    """Number of items whose outputs contain NaN or infinity."""
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_LATENCIES))
    """Seconds of each microbatch from leaving the data rank to its return; of a long run, the last ones."""
    kept: list[tuple[Sequence[int], torch.Tensor]] = field(default_factory=list)
    """Places in the input, and outputs, of the microbatches with the first ``keep_items`` items."""
    epochs: list[EpochRecord] = field(default_factory=list)
    """Epochs of a run that goes on after failures, in order."""
    elapsed_s: float = 0.0
    """Seconds from the beginning of reading to the last result."""
    on_first: Callable[[float], None] | None = None
    """Called once with the time of the next result, while ``last_at`` is that of the one before."""
    last_at: float | None = None
    """Time of the latest result, or None before the first."""
    _first_at: float | None = None
    _items: int = 0
    _items_after_first: int = 0
    _next: tuple[int, Callable[[float], None]] | None = None

    def restart(self, on_first: Callable[[float], None]) -> None:
        """Prepare for another epoch, whose record follows, and have its first result reported."""
        self.epochs = self.finished_epochs()
        self.on_first, self._first_at, self._items, self._items_after_first = on_first, None, 0, 0
        self._next = None

    def change(self, epoch: int, on_first: Callable[[float], None]) -> None:
        """Prepare for an epoch beside the present one, and have its first result reported."""
        self._next = (epoch, on_first)

    def came(self, now: float, began_at: float | None, sent_at: float, items: int, *, epoch: int = 0) -> None:
        """Note that a result has come."""
        if self._next is not None and self._next[0] == epoch:
            self.restart(self._next[1])
        self.latencies.append(now - sent_at)
        if began_at is not None:
            self.elapsed_s = now - began_at
        self.went_on(now)
        self.last_at = now
        self._items += items
        if self._first_at is None:
            self._first_at = now
        else:
            self._items_after_first += items

    def went_on(self, now: float) -> None:
        """Report the first result of an epoch, or that none is waited for."""
        on_first, self.on_first = self.on_first, None
        if on_first is not None:
            on_first(now)

    def finished_epochs(self) -> list[EpochRecord]:
        """Return the records of all epochs, the last one with what has been measured of it."""
        if not self.epochs:
            return []
        *before, last = self.epochs
        return [*before, replace(last, items=self._items, steady_items_per_s=self.steady_items_per_s)]

    @property
    def steady_items_per_s(self) -> float | None:
        """Items per second from the first result of the last epoch to its last, or None for a single one."""
        if self._first_at is None or self.last_at is None or self.last_at <= self._first_at:
            return None
        return self._items_after_first / (self.last_at - self._first_at)


@dataclass(frozen=True)
class DataProgress:
    """Progress of a run on the data rank, from beginning to end."""

    under_way: UnderWay = field(default_factory=UnderWay)
    """Microbatches that are fed and not written."""
    collected: Collected = field(default_factory=Collected)
    """Statistics of the results."""
