"""The epochs of a run at one rank, between the member's thread and those that do the work.

    member's thread   heard(prepare) ──────────────> heard(run) ─────> heard(abort) ──> the epoch's ``stop``
    main thread       next() ──> starts a thread for the epoch ──> next() ──> ...
    that thread       loads, connects ──> ready() ──> works ──> passed() or stopped()

An epoch that takes the place of another, which runs, has its thread beside that of the other. The rules are
those of ``EpochMember``; this only makes threads wait for them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pipeedge.control.epoch_member import EpochMember, MemberStep
from pipeedge.control.epoch_messages import Abort, Prepare, Retire, Run
from pipeedge.control.messages import Complete, Message

__all__ = ["EpochOrder", "EpochStoppedError", "Turns"]

_MAX_LINE = 1000
"""Number of characters of the longest line that is reported."""


class EpochStoppedError(Exception):
    """Raised in a thread that works for an epoch when the hub has stopped that epoch, or the run is over."""


@dataclass(frozen=True)
class EpochOrder:
    """An epoch in which this rank has a part."""

    prepare: Prepare
    beside: int | None
    """Number of the epoch that runs and whose place it is to take; None if nothing runs."""


def _do_nothing() -> None:
    pass


class Turns:
    """The epochs of a run at one rank.

    Args:
        send: sends a message to the hub; safe to call from any thread.
        clock: clock in seconds.
    """

    def __init__(
        self, send: Callable[[Message], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._send = send
        self._clock = clock
        self._changed = threading.Condition()
        self._rules = EpochMember()
        self._orders: deque[EpochOrder] = deque()
        self._error: BaseException | None = None
        self._has_all = False
        self._on_stop: dict[int, Callable[[], None]] = {}
        self.stopped_at = 0.0
        """Time at which the hub stopped the latest epoch that failed."""

    # -- the member's thread ----------------------------------------------------------------------

    def heard(self, message: Prepare | Run | Retire | Abort | Complete) -> None:
        """Follow the hub.

        Raises:
            ValueError: the hub breaks the protocol.
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
            PipeEdgeError: the run failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._orders or self._has_all or self._rules.ended
            )
            if self._error is not None:
                raise self._error
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
            EpochStoppedError: the epoch was stopped.
            PipeEdgeError: the run failed.
        """
        with self._changed:
            message = self._rules.prepared(epoch)
        if message is not None:
            self._send(message)
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._rules.step(epoch) is not MemberStep.PREPARED
            )
            if self._error is not None:
                raise self._error
            if self._rules.step(epoch) is not MemberStep.RUNNING:
                raise EpochStoppedError

    def declined(self, epoch: int, line: str) -> None:
        """Report that the part cannot be prepared beside the epoch that runs."""
        with self._changed:
            message = self._rules.declined(epoch, line[:_MAX_LINE])
        if message is not None:
            self._send(message)

    def link_lost(self, epoch: int, peer: int, line: str) -> None:
        """Report that a link broke, or does not open."""
        with self._changed:
            message = self._rules.link_lost(epoch, peer, line[:_MAX_LINE])
        if message is not None:
            self._send(message)

    def passed(self, epoch: int, first: int | None = None) -> None:
        """Report that all that came has passed.

        Args:
            epoch: the epoch.
            first: on the data rank, the lowest number of a microbatch that the next epoch is fed.
        """
        with self._changed:
            message = self._rules.passed(epoch, first)
        if message is not None:
            self._send(message)

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
            PipeEdgeError: the run failed.
        """
        over = (MemberStep.STOPPING, MemberStep.SPARE, MemberStep.ENDED)
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._has_all or self._rules.step(epoch) in over
            )
            if self._error is not None:
                raise self._error
            self._on_stop.pop(epoch, None)
            return MemberStep.ENDED if self._has_all else self._rules.step(epoch)

    def stopped(self, epoch: int, written: int | None = None) -> None:
        """Report that all threads and links of a stopped epoch have ended.

        Args:
            epoch: the epoch.
            written: on the data rank, the lowest number of a microbatch that is not written.
        """
        with self._changed:
            message = self._rules.stopped(epoch, written)
        if message is not None:
            self._send(message)
