"""Serve the rules of ``pipeedge.control.rules`` on a listening socket, in a thread."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from msgspec import Raw

from pipeedge.base.errors import PeerFailedError, PipeEdgeError, one_line
from pipeedge.control.admission import Newcomer, Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.changing import Dropped, RunSnapshot, Switched
from pipeedge.control.connection import RankCaller
from pipeedge.control.failures import Failure
from pipeedge.control.liveness import beat_interval_s
from pipeedge.control.plans import Wanted
from pipeedge.control.roster import Outgoing
from pipeedge.control.rules import HubState
from pipeedge.control.wire import ClearEnd, SealedEnd
from pipeedge.transport.door import PATIENCE_S, Door
from pipeedge.transport.membership import Membership

__all__ = ["Decision", "Hub"]

Decision: TypeAlias = Callable[[HubState, float], Outgoing]
"""Tells the rules, at a moment, what rank 0 has decided; returns what is to be sent."""

_PARTING_S = 2.0
"""Longest time in seconds that the hub waits at the end for the ranks to leave."""
_MAX_UNKNOWN = 16
"""Largest number of connections without a rank in a run without a key. A further one replaces another."""
_MAX_STRANGERS = 256
"""Largest number of them in a run with a key, where each is closed soon."""


class Hub:
    """Serves ``HubState`` on a listening socket, in one thread. A context manager.

    Args:
        listener: Listening socket; the hub closes it.
        world_size: Number of ranks.
        timeout_s: Seconds within which a silent rank is reported.
        terms: Terms on which ranks join (all are required, within ``timeout_s``).
        membership: Key of the run, without which nobody is heard; None for a run in clear.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        world_size: int,
        timeout_s: float,
        terms: Terms | None = None,
        membership: Membership | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        terms = terms or Terms(timeout_s)
        self._state = HubState(world_size=world_size, timeout_s=timeout_s, now=clock(), terms=terms)
        self._max_message_bytes = terms.max_message_bytes
        self._interval_s = beat_interval_s(timeout_s) / 2
        self._parting_s = min(_PARTING_S, timeout_s / 5)
        self._context = None if membership is None else membership.server_context()
        # The state is shared by the serving thread and by the caller's plan() and refuse().
        self._changed = threading.Condition()
        self._parting = False
        self._closing = False
        self._ended = False
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._door = Door(
            listener,
            self._selector,
            welcome=self._welcome,
            most=world_size + (_MAX_UNKNOWN if membership is None else _MAX_STRANGERS),
            clock=clock,
        )
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)

    def __enter__(self) -> Hub:
        self._wakened.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Wait briefly until all ranks know that the session has ended and have left, then stop serving."""
        with self._changed:
            self._parting = exc[0] is None
        self._wake()
        with self._changed:
            if exc[0] is None or not issubclass(exc[0], KeyboardInterrupt):
                # Ranks that are still starting would otherwise wait their whole timeout for this one.
                self._changed.wait_for(
                    lambda: self._ended or not self._state.awaits_others(), timeout=self._parting_s
                )
            self._changed.wait_for(
                lambda: self._ended or not self._state.expected_to_leave(), timeout=self._parting_s
            )
            self._closing = True
        self._wake()
        self._thread.join()

    def arrivals(self) -> Iterator[tuple[int, Raw]]:
        """Yield each rank with its facts as they come, until all have or there is a verdict.

        A rank that comes again after it was lost is yielded again.
        """
        yielded: dict[int, Raw] = {}
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._gathered() or self._arrived(yielded))
                arrived = self._arrived(yielded)
                if not arrived:
                    return
            yielded.update(arrived)
            yield from arrived.items()

    def gather(self) -> dict[int, Raw] | None:
        """Wait for the facts of all ranks that are not left out; None if there is a verdict first."""
        with self._changed:
            self._changed.wait_for(self._gathered)
            if self._ended and self._state.verdict is None:
                raise PipeEdgeError("the hub has ended")
            return None if self._state.verdict is not None else self._state.roster.facts()

    def left_out(self) -> dict[int, Failure]:
        """Return the reason for each rank that is left out."""
        with self._changed:
            return dict(sorted(self._state.roster.left_out.items()))

    def _gathered(self) -> bool:
        return self._ended or self._state.verdict is not None or self._state.roster.facts() is not None

    def _arrived(self, known: Mapping[int, Raw]) -> dict[int, Raw]:
        """Return the facts that have arrived, except those in ``known``."""
        if self._state.verdict is not None:
            return {}
        return {
            rank: seat.facts
            for rank, seat in sorted(self._state.roster.seats.items())
            if seat.facts is not None and seat.facts is not known.get(rank)
        }

    def apply(self, decision: Decision) -> None:
        """Tell the rules what rank 0 has decided, and send what follows from it."""
        with self._changed:
            self._queue(decision(self._state, self._clock()))
        self._wake()

    def refuse(self, line: str, exit_code: int) -> None:
        """End the run before it starts."""
        self.apply(lambda state, now: state.refuse(line, exit_code, now))

    def next_task(self) -> Newcomer | Wanted | None:
        """Wait for something to decide in a session that goes on after failures; None when it is over.

        The answer to a ``Newcomer`` is ``HubState.judge_newcomer``, that to a ``Wanted`` is ``plan_again`` or
        ``give_up``. Until it is given, the same is asked again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._closing or self._state.task() is not None)
            return None if self._ended or self._closing else self._state.task()

    def snapshot(self) -> RunSnapshot | None:
        """Return what is known of the run; None before its plan and after its end."""
        with self._changed:
            return None if self._ended or self._closing else self._state.snapshot()

    def change_to(self, since: RunSnapshot, announcement: Announcement[Raw]) -> Switched | Dropped:
        """Announce a better plan, and wait until it runs or is dropped."""
        self.apply(lambda state, now: state.change(since, announcement, now))
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or self._closing or self._state.change_outcome() is not None
            )
            return self._state.change_outcome() or Dropped("the run is over")

    # -- the serving thread -----------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            if not self._ended:
                self._waker.send(b"\0")

    def _serve(self) -> None:
        try:
            while True:
                events = self._selector.select(min(self._interval_s, self._door.patience_s()))
                with self._changed:
                    if self._closing:
                        return
                    self._handle(events)
                    self._queue(self._state.tick(self._clock()))
                    for caller in self._door.overdue():
                        self._drop(caller)
                    self._flush()
                    if self._parting and self._state.verdict is None:
                        self._door.stop_listening()
                    self._changed.notify_all()
        except Exception as error:  # no rank may wait forever because this thread has ended
            self._give_up(error)
        finally:
            self._door.close()
            self._selector.close()
            with self._changed:
                self._ended = True
                self._waker.close()
                self._wakened.close()
                self._changed.notify_all()

    def _handle(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Handle what is ready."""
        if any(key.fileobj is self._wakened for key, _ in events):
            self._wakened.recv(4096)
        served, someone_knocks = self._door.turn(events)
        for caller, mask in served:
            self._exchange(caller, mask)
        if someone_knocks:
            for caller in self._door.accept(set(self._state.roster.connections())):
                self._drop(caller)
            if self._door.lacks_files:
                self._queue(self._state.shut_out(self._clock()))

    def _welcome(self, number: int, sock: socket.socket, peer: str, close_at: float) -> RankCaller:
        end = ClearEnd(accepts=True) if self._context is None else SealedEnd(self._context)
        return RankCaller(
            number, sock, peer, end, max_message_bytes=self._max_message_bytes, close_at=close_at
        )

    def _give_up(self, error: Exception) -> None:
        """Tell all ranks that the hub has failed, if they accept the message at once."""
        with self._changed:
            self._queue(self._state.failed(one_line(error), self._clock()))
        until = self._clock() + self._parting_s
        for connection in self._door.callers.values():
            with contextlib.suppress(OSError):
                connection.socket.settimeout(max(0.01, until - self._clock()))
                connection.send()
                connection.socket.shutdown(socket.SHUT_WR)
        # Closing a connection with unread bytes would reset it, and the verdict would be lost.
        for connection in self._door.callers.values():
            with contextlib.suppress(OSError):
                connection.socket.settimeout(max(0.01, until - self._clock()))
                while self._clock() < until and connection.socket.recv(1 << 16):
                    pass

    def _exchange(self, connection: RankCaller, mask: int) -> None:
        if connection.number not in self._door.callers or not mask & selectors.EVENT_READ:
            return
        was_refused, why = bool(connection.end.failure), ""
        try:
            messages = connection.receive()
        except OSError:
            messages = None
        except PeerFailedError as error:
            messages, why = None, one_line(error)
        if messages is None:
            self._drop(connection, why, left="" if was_refused else connection.peer)
            return
        for message in messages:
            self._queue(self._state.received(connection.number, message, self._clock()))
        if self._context is not None and connection.has_outgoing:
            connection.answered(self._clock())
        if connection.end.failure and not was_refused:
            self._refuse(connection)

    def _refuse(self, connection: RankCaller) -> None:
        """Hear no more of a peer that is no member, but leave it a moment to read why."""
        failure, now = connection.end.failure, self._clock()
        if connection.number in self._state.roster.connections():
            self._drop(connection, f"its connection {failure}")
            return
        connection.close_at = now + PATIENCE_S
        self._queue(self._state.refused(connection.peer, failure, now))

    def _queue(self, outgoing: Outgoing) -> None:
        for connection, message in outgoing:
            if connection in self._door.callers:
                self._door.callers[connection].queue_message(message)

    def _flush(self) -> None:
        for connection in list(self._door.callers.values()):
            if not connection.has_outgoing:
                continue
            try:
                connection.send()
            except OSError:
                self._drop(connection)
                continue
            # Wait for the socket to become writable only while messages are queued.
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_outgoing else 0)
            self._selector.modify(connection.socket, wanted, connection)

    def _drop(self, connection: RankCaller, why: str = "", *, left: str = "") -> None:
        self._door.drop(connection)
        self._queue(self._state.closed(connection.number, self._clock(), why, left=left))
