"""The epochs of a run at one rank, between the member's thread and the one that does the work.

    member's thread   heard(prepare) ──────────────> heard(run) ─────> heard(abort) ──> on_stop()
    working thread    next() ──> loads, connects ──> ready() ──> works ──> stopped() ──> next()

The rules are those of ``EpochMember``; this only makes threads wait for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pipeedge.base.errors import PipeEdgeError
from pipeedge.control.epoch_member import EpochMember, MemberStep
from pipeedge.control.epoch_messages import Abort, Prepare, Run
from pipeedge.control.messages import Complete, Message

__all__ = ["EpochStoppedError", "Turns"]

_MAX_LINE = 1000
"""Number of characters of the longest line that is reported."""


class EpochStoppedError(Exception):
    """Raised in a thread that works for an epoch when the hub has stopped that epoch, or the run is over."""


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
        self._prepare: Prepare | None = None
        self._error: PipeEdgeError | None = None
        self._on_stop: Callable[[], None] = _do_nothing
        self.stopped_at = 0.0
        """Time at which the hub stopped the latest epoch that failed."""

    # -- the member's thread ----------------------------------------------------------------------

    def heard(self, message: Prepare | Run | Abort | Complete) -> None:
        """Follow the hub.

        Raises:
            ValueError: the hub breaks the protocol.
        """
        with self._changed:
            self._rules.heard(message)
            if isinstance(message, Prepare):
                self._prepare = message
            on_stop = _do_nothing
            if isinstance(message, Abort):
                self.stopped_at = self._clock()
                on_stop = self._on_stop
            self._changed.notify_all()
        on_stop()

    def fail(self, error: PipeEdgeError) -> None:
        """Wake all waiting threads, as the run has failed."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # -- the working thread -----------------------------------------------------------------------

    def next(self) -> Prepare | None:
        """Wait for an epoch in which this rank has a part; return None once all results are written.

        Raises:
            PipeEdgeError: the run failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._rules.step is not MemberStep.SPARE)
            if self._error is not None:
                raise self._error
            return None if self._rules.step is MemberStep.ENDED else self._prepare

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` when the hub stops the present epoch, from the member's thread; at once if it has."""
        with self._changed:
            self._on_stop = stop
            if self._rules.step is not MemberStep.STOPPING:
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
            self._changed.wait_for(lambda: self._error or self._rules.step is not MemberStep.PREPARED)
            self._raise_if_over()

    def link_lost(self, epoch: int, peer: int, line: str) -> None:
        """Report that a link broke, or does not open."""
        with self._changed:
            message = self._rules.link_lost(epoch, peer, line[:_MAX_LINE])
        if message is not None:
            self._send(message)

    def wait_for_end(self) -> bool:
        """Wait until the hub ends the present epoch; return whether all results are written.

        Raises:
            PipeEdgeError: the run failed.
        """
        over = (MemberStep.STOPPING, MemberStep.ENDED)
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._rules.step in over)
            if self._error is not None:
                raise self._error
            return self._rules.step is MemberStep.ENDED

    def stopped(self, written: int | None = None) -> None:
        """Report that all threads and links of the stopped epoch have ended.

        Args:
            written: on the data rank, the lowest number of a microbatch that is not written.
        """
        with self._changed:
            message = self._rules.stopped(written)
        if message is not None:
            self._send(message)

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._rules.step is not MemberStep.RUNNING:
            raise EpochStoppedError
