"""The receiving end of a link over TCP.

    wire ──> frame ──read by the stage's own thread, if it waits for one──> [stage]
              └──> read ahead by [reading], if the stage is busy ──> arrived [ · · · · ]

A frame is read into memory of the agreed capacity, whatever its header says. While the stage waits, it reads
the next frame itself, since waking it costs more than a short frame does. When it has been busy for a moment,
another thread reads ahead, as many frames as the sender has credit for, so that the network moves while the
stage computes and a connection never stands still for longer. Both give the wire over between frames only.
Results are not read ahead (``Link.is_read_ahead``).

On a link with receipts one thread (``run``) reads all frames, because arrivals must be timed at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pipeedge.base.backpressure import LINK_WINDOW
from pipeedge.base.crew import Closed
from pipeedge.transport.base import Link, Packet
from pipeedge.transport.frame import HEADER_BYTES, Frame, FrameBuffer, FrameError, Kind, frame_capacity
from pipeedge.transport.leases import Lease
from pipeedge.transport.tcp_sending import CREDIT, RECEIPT, REPLY, lost
from pipeedge.transport.wires import Connections, TcpWire

__all__ = ["TcpReceiver"]

BUSY_S = 0.002
"""Seconds without the stage after which another thread reads ahead. Until then, the kernel keeps the data."""

_CREDIT = REPLY.pack(CREDIT, 0.0)


@dataclass(frozen=True)
class _Arrived:
    buffer: FrameBuffer
    frame: Frame


class TcpReceiver:
    """Receiver of one link.

    One thread at a time reads the wire, and gives it over between two frames only:

                    asks for a packet, and none has arrived
                ┌──────────────────────────────────────────> the stage reads ──its frame──┐
        nobody ─┤                                                                         ├─> nobody
                └──────────────────────────────────────────> [reading] reads ──arrived────┘
                    the stage is busy for BUSY_S, and fewer than LINK_WINDOW have arrived

        the last frame, a failure, ``close``: nobody reads again

    ``_reading`` says whether somebody reads. ``_stage_waits`` keeps [reading] away while the stage wants to
    read itself. [reading] sleeps without a limit (``_resting``) while the stage waits, somebody reads or the
    window is full, and else until the stage has been busy long enough.

    Args:
        link: The link.
        accept: Waits until the sending end has connected; returns the wires of frames and of replies.
        connections: Connections of the group.
        clock: Clock in seconds.
    """

    def __init__(
        self,
        link: Link,
        accept: Callable[[], tuple[TcpWire, TcpWire]],
        connections: Connections,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._link = link
        self._accept = accept
        self._connections = connections
        self._clock = clock
        self._capacity = frame_capacity(link.specs)
        self._wires: tuple[TcpWire, TcpWire] | None = None
        self._free: deque[FrameBuffer] = deque()
        self._due: int | None = None if link.starts_anywhere else 0  # number of the next frame
        self.finished = False
        """Whether everything was received, and the connections are closed."""
        # Threads take turns in reading frames; what follows is shared.
        self._changed = threading.Condition()
        self._replying = threading.Lock()
        self._arrived: deque[_Arrived] = deque()
        self._reading = False
        self._stage_waits = False
        self._stage_left_at = clock()
        self._resting = False  # whether the thread sleeps until it is woken, and not for a moment
        self._ended = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if link.is_read_ahead and not link.receipts:
            self._thread = threading.Thread(target=self._read_ahead, name="reading", daemon=True)
            self._thread.start()

    def receive(self) -> Packet | None:
        """Return the next packet, or None after the other end has finished."""
        arrived = self._next()
        frame = arrived.frame
        try:
            self._reply(_CREDIT)
        except OSError as error:
            raise lost(self._link.source, "receiving", error, self._connections) from error
        if frame.kind is Kind.END:
            self._shut()
            self.finished = True
            return None
        return Packet(frame.number, frame.items, frame.payload, Lease(arrived.buffer, frame, self._free))

    def run(self) -> None:
        """Read frames and send a receipt for each, until the last. Only for links with receipts."""
        while self._link.receipts and not self._ended:
            with self._changed:
                self._reading = True
            room_at = self._clock()
            arrived = self._read()
            if arrived is not None and arrived.frame.kind is Kind.MICROBATCH:
                self._send_receipt(self._clock() - room_at)
            with self._changed:
                self._reading = False
                if arrived is not None and len(self._arrived) >= LINK_WINDOW:
                    self._error = FrameError(
                        f"from rank {self._link.source}: it sent a frame without credit for it",
                        peer=self._link.source,
                    )
                elif arrived is not None:
                    self._arrived.append(arrived)
                self._changed.notify_all()
                if self._error is not None:
                    raise self._error

    def close(self) -> None:
        """Wake all waiting threads, except one that reads; ``Connections.cut`` wakes that."""
        with self._changed:
            if self._error is None:
                self._error = Closed()
            self._changed.notify_all()

    def end(self) -> None:
        """Close the connections, which must be cut or idle; wait for the thread."""
        self.close()
        self._shut()
        if self._thread is not None:
            self._thread.join()

    def _next(self) -> _Arrived:
        reads = False
        try:
            with self._changed:
                self._stage_waits = True
                self._changed.wait_for(lambda: self._arrived or self._error is not None or self._may_read())
                if self._arrived:
                    self._leave()
                    return self._arrived.popleft()
                if self._error is not None:
                    raise self._error
                reads = self._reading = True
            arrived = self._read()
            with self._changed:
                self._stop_reading()
                reads = False
                self._leave()
                if arrived is None:
                    raise self._error or Closed
                return arrived
        except BaseException:
            if reads:  # Ctrl-C, in the main thread
                with self._changed:
                    self._stop_reading()
            raise

    def _stop_reading(self) -> None:
        self._reading = False
        if self._error is not None:
            self._changed.notify_all()  # whoever closes the link waits for the one that reads

    def _may_read(self) -> bool:
        return not self._reading and not self._link.receipts and not self._ended

    def _leave(self) -> None:
        self._stage_waits = False
        self._stage_left_at = self._clock()
        if self._resting:
            self._changed.notify_all()

    def _read_ahead(self) -> None:
        """Read frames while the stage is busy."""
        while self._take_turn():
            arrived = self._read()
            with self._changed:
                self._reading = False
                if arrived is not None:
                    self._arrived.append(arrived)
                self._changed.notify_all()

    def _take_turn(self) -> bool:
        """Wait until the stage is busy and there is room; return False when nothing more is to be read."""
        with self._changed:
            while self._error is None and not self._ended:
                if self._stage_waits or self._reading or len(self._arrived) >= LINK_WINDOW:
                    self._resting = True
                    self._changed.wait()
                    self._resting = False
                    continue
                wait_s = self._stage_left_at + BUSY_S - self._clock()
                if wait_s <= 0:
                    self._reading = True
                    return True
                self._changed.wait(wait_s)
            return False

    def _read(self) -> _Arrived | None:
        """Read one frame, by the thread whose turn it is. Return None if that fails, and keep the reason."""
        try:
            if self._wires is None:
                self._wires = self._accept()
            return self._read_frame(self._wires[0])
        except FrameError as error:
            failure: Exception = FrameError(f"from rank {self._link.source}: {error}", peer=self._link.source)
        except OSError as error:
            failure = lost(self._link.source, "receiving", error, self._connections)
        except Closed as error:
            failure = error
        with self._changed:
            self._error = self._error or failure
        return None

    def _read_frame(self, wire: TcpWire) -> _Arrived:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = FrameBuffer(self._capacity)
        wire.receive(buffer.view[:HEADER_BYTES])
        header = buffer.header()
        wire.receive(buffer.view[HEADER_BYTES : header.length])
        frame = buffer.read(header)
        if frame.number != (frame.number if self._due is None else self._due):
            raise FrameError(f"received microbatch {frame.number}, expected {self._due}")
        self._due = frame.number + 1
        self._ended = frame.kind is Kind.END
        return _Arrived(buffer, frame)

    def _send_receipt(self, seconds: float) -> None:
        try:
            self._reply(REPLY.pack(RECEIPT, seconds))
        except OSError as error:
            with self._changed:
                self._error = self._error or lost(self._link.source, "receiving", error, self._connections)

    def _reply(self, message: bytes) -> None:
        if self._wires is None:
            raise Closed
        with self._replying:
            self._wires[1].send(message)

    def _shut(self) -> None:
        """Close the wires when nobody uses them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reading)
            wires, self._wires = self._wires, None
        with self._replying:
            for wire in wires or ():
                wire.close()
