"""Progress of a run on the data rank: the ledger, and statistics of the results that have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from pipeedge.data.results import Accuracy
from pipeedge.observe.records import EpochRecord
from pipeedge.run.ledger import Ledger

__all__ = ["Collected", "DataProgress"]

_KEPT_LATENCIES = 100_000
"""Number of microbatches whose latencies are kept, the last ones of a longer run."""


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

    def add_result(
        self, now: float, began_at: float | None, sent_at: float, items: int, *, epoch: int = 0
    ) -> None:
        """Add a result to the statistics."""
        if self._next is not None and self._next[0] == epoch:
            self.restart(self._next[1])
        self.latencies.append(now - sent_at)
        if began_at is not None:
            self.elapsed_s = now - began_at
        self.report_first(now)
        self.last_at = now
        self._items += items
        if self._first_at is None:
            self._first_at = now
        else:
            self._items_after_first += items

    def report_first(self, now: float) -> None:
        """Report the first result of an epoch, unless that was done; or that none is waited for."""
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

    ledger: Ledger = field(default_factory=Ledger)
    """Microbatches that are fed and not written."""
    collected: Collected = field(default_factory=Collected)
    """Statistics of the results."""
