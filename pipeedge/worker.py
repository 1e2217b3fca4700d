"""The threads of one rank, and what they wait for.

    stage            link in ──> [compute] ──> outbox (1) ──> [send] ──> link out
    data rank        source  ──> [feed] ──> link to stage 0
                     link from the last stage ──> [collect] ──> results

Each is one thread. A receiving link holds at most two microbatches that wait, the outbox one, so what
is under way is bounded, and a slow stage slows its predecessors instead of filling their memory.

A thread ends when its input has ended, or because something failed: the first exception of any of
them is kept, and raised where ``Crew.wait`` is called. Nothing polls.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeedge.control.liveness import RankStatus
from pipeedge.errors import PipeEdgeError
from pipeedge.metrics import Tally
from pipeedge.transport.base import Packet, Receiver, Sender, Shipment
from pipeedge.transport.channel import Channel, Closed

__all__ = ["Activity", "Crew", "SendLoop", "StageLoop"]


class Activity:
    """What the threads of a rank are at, for its beats."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy: dict[int, tuple[str, float]] = {}
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """This thread is busy with ``what``: it waits for no peer."""
        thread = threading.get_ident()
        with self._lock:
            self._busy[thread] = (what, self._clock())
        try:
            yield
        finally:
            with self._lock:
                del self._busy[thread]

    def sent(self, peer: int) -> None:
        """One more microbatch was handed to the link to ``peer``."""
        with self._lock:
            self._sent[peer] = self._sent.get(peer, 0) + 1

    def received(self, peer: int) -> None:
        """One more microbatch has come from ``peer``."""
        with self._lock:
            self._received[peer] = self._received.get(peer, 0) + 1

    def status(self) -> RankStatus:
        """All of it, now."""
        with self._lock:
            busy = min(self._busy.values(), key=lambda entry: entry[1], default=None)
            return RankStatus(
                busy=(busy[0], self._clock() - busy[1]) if busy else None,
                sent=dict(self._sent),
                received=dict(self._received),
            )


class Crew:
    """Threads that end together."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._cleanups: list[Callable[[], None]] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread."""
        with self._changed:
            self._running += 1
        # Daemons: one that is blocked inside gloo cannot be woken, and must not keep a process that
        # has failed from ending.
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def on_stop(self, cleanup: Callable[[], None]) -> None:
        """Call ``cleanup`` when the crew is stopped, so that nobody goes on waiting."""
        with self._changed:
            self._cleanups.append(cleanup)

    def stop(self, error: BaseException | None = None) -> None:
        """End early; ``error`` is why, unless there was one before it."""
        with self._changed:
            if self._error is None:
                self._error = error
            if self._stopped:
                return
            self._stopped = True
            cleanups = list(self._cleanups)
            self._changed.notify_all()
        for cleanup in cleanups:
            cleanup()

    def wait(self) -> None:
        """Wait until every thread has ended, or one has failed, or the crew was stopped.

        Raises:
            BaseException: the first failure.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0 or self._stopped)
            if self._error is not None:
                raise self._error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Closed:
            pass  # whoever closed the channel knows why
        except BaseException as error:  # handed on whole, to be raised where the crew is waited for
            self.stop(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


class SendLoop:
    """Empties an outbox into a link, and measures how long each microbatch occupies it.

    The next frame is filled while one is under way. When nothing is waiting to be sent, the frame
    under way is waited for at once, so that its time is its own.
    """

    def __init__(
        self,
        sender: Sender,
        peer: int | None,
        activity: Activity,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.outbox: Channel[Packet] = Channel(1)
        self.seconds = Tally()
        self.bytes = Tally()
        self._sender = sender
        self._peer = peer
        self._activity = activity
        self._clock = clock
        self._free_at = 0.0

    def run(self) -> None:
        """Send until the outbox is finished."""
        under_way: deque[tuple[Shipment, float]] = deque()
        while (packet := self.outbox.get()) is not None:
            started = self._clock()
            under_way.append((self._sender.post(packet), started))
            if self._peer is not None:
                self._activity.sent(self._peer)
            while len(under_way) > 1 or (under_way and self.outbox.empty):
                self._complete(*under_way.popleft())
        while under_way:
            self._complete(*under_way.popleft())
        self._sender.finish()

    def _complete(self, shipment: Shipment, started: float) -> None:
        shipment.wait()
        now = self._clock()
        if self._peer is not None:
            self.seconds.add(now - max(started, self._free_at))
            self.bytes.add(shipment.bytes)
        self._free_at = now


class StageLoop:
    """Receives, computes and hands on, microbatch by microbatch."""

    def __init__(
        self,
        compute: Callable[[Packet], Packet],
        receiver: Receiver,
        peer: int | None,
        outbox: Channel[Packet],
        activity: Activity,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.compute_seconds = Tally()
        self.wait_seconds = Tally()
        self.run_seconds = 0.0
        self._compute = compute
        self._receiver = receiver
        self._peer = peer
        self._outbox = outbox
        self._activity = activity
        self._clock = clock

    def run(self) -> None:
        """Compute until the link ends."""
        began = waiting_since = self._clock()
        while (packet := self._receiver.receive()) is not None:
            if self._peer is not None:
                self._activity.received(self._peer)
            started = self._clock()
            self.wait_seconds.add(started - waiting_since)
            try:
                with self._activity.busy(f"computing microbatch {packet.number}"):
                    result = self._compute(packet)
            except PipeEdgeError:
                raise
            except Exception as error:
                raise PipeEdgeError(
                    f"microbatch {packet.number} could not be computed: {type(error).__name__}: {error}"
                ) from error
            finished = self._clock()
            self.compute_seconds.add(finished - started)
            packet = dataclasses.replace(packet, payload=())  # the input is not needed while we wait
            self._outbox.put(result)
            del result
            waiting_since = self._clock()
            self.run_seconds = waiting_since - began
        self._outbox.finish()

    @property
    def busy_fraction(self) -> float:
        """Part of the time from the start to the last microbatch that was spent computing."""
        return min(1.0, self.compute_seconds.total / self.run_seconds) if self.run_seconds else 0.0
