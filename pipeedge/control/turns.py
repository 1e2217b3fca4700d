"""The epochs of a session at one rank, between the member's thread and those that do the work.

    member's thread   heard(prepare) ──────────────> heard(run) ─────> heard(abort) ──> the epoch's ``stop``
    main thread       next() ──> starts a thread for the epoch ──> next() ──> ...
    that thread       loads, connects ──> ready() ──> works ──> say(passed), or say(stopped)

An epoch that takes the place of another, which runs, has its thread beside that of the other. In a session of
one epoch, the main thread does the work itself. The rules are those of ``EpochMember``; this only makes
threads wait for them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from pipeedge.control.epoch_member import EpochMember, MemberStep, Report
from pipeedge.control.messages import (
    Abort,
    Complete,
    Declined,
    LinkLost,
    Message,
    Prepare,
    Ready,
    Retire,
    Run,
)

__all__ = ["EpochOrder", "EpochStoppedError", "Turns"]

_MAX_LINE = 1000
"""Number of characters of the longest line that is reported."""


class EpochStoppedError(Exception):
    """Raised in a thread that works for an epoch when the hub has stopped that epoch, or the run is over."""


@dataclass(frozen=True)
class EpochOrder:
    """An epoch in which this rank has a part."""

    prepare: Prepare
    replaces: int | None
    """Number of the running epoch whose place it is to take; None if nothing runs."""


def _do_nothing() -> None:
    pass


class Turns:
    """The epochs of a session at one rank.

    Args:
        send: Sends a message to the hub; safe to call from any thread.
        clock: Clock in seconds.
        rules: Rules of the epochs of this rank.
        changed: Wakes the threads that wait; None for one that belongs to this object.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        clock: Callable[[], float] = time.perf_counter,
        rules: EpochMember | None = None,
        changed: threading.Condition | None = None,
    ) -> None:
        self._send = send
        self._clock = clock
        self._changed = changed or threading.Condition()
        self._rules = rules or EpochMember()
        self._orders: deque[EpochOrder] = deque()
        self._error: BaseException | None = None
        self._has_all = False
        self._on_stop: dict[int, Callable[[], None]] = {}
        self.stopped_at = 0.0
        """Time at which the hub stopped the latest epoch that failed."""

    @property
    def latest(self) -> int:
        """Number of the latest epoch in which this rank has had a part; 0 before the first."""
        with self._changed:
            return self._rules.latest

    # -- the member's thread ----------------------------------------------------------------------

    def heard(self, message: Prepare | Run | Retire | Abort | Complete) -> None:
        """Follow the hub.

        Raises:
            ValueError: The hub breaks the protocol.
        """
        with self._changed:
            parts = self._rules.epochs
            self._rules.heard(message)
            if isinstance(message, Prepare):
                self._orders.append(EpochOrder(message, parts[-1] if parts else None))
            on_stop = _do_nothing
            if isinstance(message, Abort):
                self.stopped_at = self._clock()
                on_stop = self._on_stop.get(message.epoch, _do_nothing)
            self._changed.notify_all()
        on_stop()

    def fail(self, error: BaseException) -> None:
        """Wake all waiting threads, as the run has failed. The first error counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    # -- the main thread --------------------------------------------------------------------------

    def next(self) -> EpochOrder | None:
        """Wait for an epoch in which this rank has a part; return None once all results are written.

        Raises:
            PipeEdgeError: The run failed.
        """
        with self._changed:
            self._wait_for(lambda: bool(self._orders) or self._has_all or self._rules.ended)
            return None if self._has_all or self._rules.ended else self._orders.popleft()

    # -- the thread of an epoch -------------------------------------------------------------------

    def on_stop(self, epoch: int, stop: Callable[[], None]) -> None:
        """Call ``stop`` when the hub stops ``epoch``, from the member's thread; at once if it has.

        It is forgotten when ``wait_for_end`` returns, with all that belongs to the epoch.
        """
        with self._changed:
            self._on_stop[epoch] = stop
            if self._rules.step(epoch) is not MemberStep.STOPPING:
                return
        stop()

    def ready(self, epoch: int) -> None:
        """Report that the part is loaded and all links are open, and wait until all participants are ready.

        Raises:
            EpochStoppedError: The epoch was stopped.
            PipeEdgeError: The run failed.
        """
        self.say(Ready(epoch))
        with self._changed:
            self._wait_for(lambda: self._rules.step(epoch) is not MemberStep.PREPARED)
            if self._rules.step(epoch) is not MemberStep.RUNNING:
                raise EpochStoppedError

    def say(self, report: Report) -> None:
        """Report something about an epoch, unless the hub has stopped it meanwhile."""
        if isinstance(report, Declined | LinkLost):
            report = structs.replace(report, line=report.line[:_MAX_LINE])
        with self._changed:
            is_said = self._rules.says(report)
        if is_said:
            self._send(report)

    def has_all(self) -> None:
        """Note on the data rank that it has written all results, so that nothing follows."""
        with self._changed:
            self._has_all = True
            self._changed.notify_all()

    def wait_for_end(self, epoch: int) -> MemberStep:
        """Wait until the hub ends ``epoch``.

        Returns:
            ``STOPPING`` if it is to be stopped, ``SPARE`` if another one has taken its place, ``ENDED`` if
            all results are written.

        Raises:
            PipeEdgeError: The run failed.
        """
        over = (MemberStep.STOPPING, MemberStep.SPARE, MemberStep.ENDED)
        with self._changed:
            self._wait_for(lambda: self._has_all or self._rules.step(epoch) in over)
            self._on_stop.pop(epoch, None)
            return MemberStep.ENDED if self._has_all else self._rules.step(epoch)

    def _wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened, with the lock held; raise the reason if the run has failed."""
        self._changed.wait_for(lambda: self._error is not None or happened())
        if self._error is not None:
            raise self._error
