"""The sending end of a link over TCP.

    [stage] ──post──> frame ──as much as the kernel takes──┐
                        └──> queue ──> [sending] the rest ─┴──> wire
            <── credits, receipts: read by whoever waits for one <── wire of replies

The stage's own thread puts a frame on the wire. Only what the kernel does not take at once is left to another
thread, so that the stage computes meanwhile; handing over each frame would cost more than moving it. A credit
says that the receiving stage has taken a frame. ``LINK_WINDOW`` frames may be without one, so a slow stage
slows down its predecessors, whatever fits into the buffers of two kernels.
"""

from __future__ import annotations

import math
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

from pipeedge.base.backpressure import FRAMES_IN_FLIGHT, LINK_WINDOW
from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerFailedError, PipeEdgeError
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet, Receipt, Reserved
from pipeedge.transport.frame import FrameError, frame_capacity
from pipeedge.transport.leases import FilledFrame, SendingFrames
from pipeedge.transport.wires import Connections, TcpWire

__all__ = ["CREDIT", "RECEIPT", "REPLY", "TcpSender", "TcpShipment", "lost"]

REPLY = struct.Struct("<B7xd")
CREDIT, RECEIPT = 1, 2
"""Kinds of reply: the stage has taken a frame; a frame has arrived, with the seconds that it took."""
_REPLIES_BYTES = 1024


def lost(peer: int, doing: str, error: Exception, connections: Connections) -> Exception:
    """Return what to raise when the connection to ``peer`` failed with ``error`` while ``doing``.

    A damaged connection is not traced to the peer's end, because the peer may have noticed it first.
    """
    if connections.are_cut:
        return Closed()
    if isinstance(error, PipeEdgeError):
        return error
    if isinstance(error, ssl.SSLError) and "MAC" in (error.reason or ""):
        return FrameError(
            f"from rank {peer}: the data was changed on its way, or is not from a member", peer=peer
        )
    why = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
    return PeerFailedError(f"the connection to rank {peer} was lost while {doing}: {why}", peer=peer)


class TcpShipment:
    """One frame in flight.

    Args:
        frame: Bytes of the frame.
        sent: Called once the kernel has all of them.
        receipt: Waits for the receipt, or None on a link without receipts.
        changed: Notified when the frame has been sent, or cannot be.
    """

    def __init__(
        self,
        frame: memoryview,
        sent: Callable[[], None],
        receipt: Callable[[], Receipt] | None,
        changed: threading.Condition,
    ) -> None:
        self._sent = sent
        self._receipt = receipt
        self._changed = changed
        self._error: Exception | None = None
        self.rest = frame
        """Bytes that are still to be sent."""
        self.bytes = len(frame)

    def advance(self, count: int) -> bool:
        """Record that ``count`` more bytes were sent; return whether these were the last."""
        rest = self.rest[count:]
        if not rest:
            self._sent()
        self.rest = rest
        return not rest

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in all threads that wait, unless the frame is sent."""
        self._error = error

    def wait(self) -> None:
        """Wait until the frame's memory is free again, because the kernel has all of it."""
        if not self.rest:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self.rest or self._error is not None)
            if self.rest and self._error is not None:
                raise self._error

    def receipt(self) -> Receipt:
        """Wait for the receipt of the packet. Call this once, and only on a link with receipts."""
        if self._receipt is None:
            raise ValueError("the link has no receipts")
        return self._receipt()


class _Outbox:
    """Frames that the kernel has not taken yet, sent in order by a thread that starts with the first."""

    def __init__(self, wire: TcpWire, explain: Callable[[Exception], Exception]) -> None:
        self._wire = wire
        self._explain = explain
        self.changed = threading.Condition()
        """Notified when a frame of the queue has been sent, or cannot be."""
        self._using = threading.Lock()
        """Held by the thread that uses the wire."""
        self._queue: deque[TcpShipment] = deque()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def wait_for_room(self) -> None:
        """Wait until fewer than ``FRAMES_IN_FLIGHT`` frames are queued."""
        if len(self._queue) < FRAMES_IN_FLIGHT and self._error is None:
            return
        with self.changed:
            self.changed.wait_for(lambda: len(self._queue) < FRAMES_IN_FLIGHT or self._error is not None)
            if self._error is not None:
                raise self._error

    def push(self, shipment: TcpShipment) -> None:
        """Send what the kernel takes of a frame, unless others wait; leave the rest to the thread."""
        if not self._queue and self._send_at_once(shipment):
            return
        with self.changed:
            if self._error is not None:
                raise self._error
            self._queue.append(shipment)
            self.changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_rest, name="sending", daemon=True)
                self._thread.start()

    def close(self, error: Exception) -> None:
        """Raise ``error`` in all waiting threads, and close the wire, which must be cut or idle."""
        self._fail(error)
        if self._thread is not None:
            self._thread.join()
        with self._using:
            self._wire.close()

    def _send_at_once(self, shipment: TcpShipment) -> bool:
        if self._error is not None:
            raise self._error
        try:
            with self._using:
                return shipment.advance(self._wire.send_at_once(shipment.rest))
        except OSError as error:
            failure = self._explain(error)
            self._fail(failure)
            raise failure from error

    def _send_rest(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._queue or self._error is not None)
                if self._error is not None:
                    return
                shipment = self._queue[0]
            try:
                with self._using:
                    while not shipment.advance(self._wire.send_at_once(shipment.rest)):
                        self._wire.wait_writable()
            except OSError as error:
                self._fail(self._explain(error))
                return
            with self.changed:
                self._queue.popleft()
                self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self.changed:
            if self._error is None:
                self._error = error
            for shipment in self._queue:
                shipment.fail(self._error)
            self.changed.notify_all()


class _Replies:
    """Credits and receipts. Whoever waits for one reads them for all, one thread at a time."""

    def __init__(self, wire: TcpWire, peer: int, explain: Callable[[Exception], Exception]) -> None:
        self._wire = wire
        self._peer = peer
        self._explain = explain
        self._changed = threading.Condition()
        self._reading = False
        self._partial = b""
        self._credits = 0
        self._receipts: deque[float] = deque()
        self._error: Exception | None = None

    def wait_for_credits(self, count: int, sent: int) -> None:
        """Wait until the receiving stage has taken ``count`` frames of ``sent``."""
        if self._credits < count:
            self._wait(lambda: self._credits >= count)
        if self._credits > sent:
            raise FrameError(
                f"from rank {self._peer}: credits for {self._credits} frames of {sent}", peer=self._peer
            )

    def next_receipt(self) -> Receipt:
        """Wait for the next receipt, and return it."""
        self._wait(lambda: bool(self._receipts))
        return Receipt(self._receipts.popleft())

    def close(self, error: Exception) -> None:
        """Raise ``error`` in all waiting threads, and close the wire, which must be cut or idle."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._reading)
        self._wire.close()

    def _wait(self, ready: Callable[[], bool]) -> None:
        while self._read(ready):
            pass

    def _read(self, ready: Callable[[], bool]) -> bool:
        """Read some replies, or wait until another thread has; return False when ``ready``."""
        reads = False
        try:
            with self._changed:
                self._changed.wait_for(lambda: ready() or self._error is not None or not self._reading)
                if ready():
                    return False
                if self._error is not None:
                    raise self._error
                reads = self._reading = True
            data, error = self._receive()
            with self._changed:
                self._reading = reads = False
                try:
                    self._take(data)
                except FrameError as failure:
                    error = failure
                self._error = self._error or error
                self._changed.notify_all()
        except BaseException:
            if reads:  # Ctrl-C, in the main thread: whoever closes the link waits for the one that reads
                with self._changed:
                    self._reading = False
                    self._changed.notify_all()
            raise
        return True

    def _receive(self) -> tuple[bytes, Exception | None]:
        """Return some bytes, or the reason why none come any more."""
        try:
            return self._wire.receive_some(_REPLIES_BYTES), None
        except OSError as failure:
            return b"", self._explain(failure)

    def _take(self, data: bytes) -> None:
        data = self._partial + data
        whole = len(data) - len(data) % REPLY.size
        self._partial = data[whole:]
        for kind, seconds in REPLY.iter_unpack(data[:whole]):
            if kind == CREDIT:
                self._credits += 1
            elif kind == RECEIPT and 0 <= seconds < math.inf:
                self._receipts.append(seconds)
            else:
                raise FrameError(
                    f"from rank {self._peer}: a reply of kind {kind} with {seconds} s", peer=self._peer
                )


class TcpSender:
    """Sender that writes packets into frames, or sends the frames that hold them already.

    Args:
        link: The link.
        frames: TcpWire to the receiving end.
        replies: TcpWire from the receiving end.
        connections: Connections of the group.
    """

    def __init__(self, link: Link, frames: TcpWire, replies: TcpWire, connections: Connections) -> None:
        self._link = link

        def explain(error: Exception) -> Exception:
            return lost(link.destination, "sending", error, connections)

        self._outbox = _Outbox(frames, explain)
        self._replies = _Replies(replies, link.destination, explain)
        self._frames = SendingFrames(frame_capacity(link.specs))
        self._sent = 0
        self._next = 0  # number of the packet that follows
        self.finished = False
        """Whether everything was sent, and the connections are closed."""

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Reserve the next frame; blocks while two are in flight, or the receiving stage is behind."""
        self._make_room()
        return self._frames.reserve(specs)

    def post(self, packet: Packet) -> TcpShipment:
        """Send ``packet``; blocks while two are in flight, or the receiving stage is behind."""
        self._make_room()
        self._next = packet.number + 1
        return self._post(self._frames.fill(packet), receipts=self._link.receipts)

    def finish(self) -> None:
        """Send the end mark, and wait until the receiving stage has taken everything."""
        self._make_room()
        self._post(self._frames.end(self._next), receipts=False)
        self._replies.wait_for_credits(self._sent, self._sent)
        self.close()
        self.finished = True

    def close(self) -> None:
        """Close the connections, which must be cut or idle; wake all waiting threads for good."""
        self._outbox.close(Closed())
        self._replies.close(Closed())

    def _make_room(self) -> None:
        self._outbox.wait_for_room()
        self._replies.wait_for_credits(self._sent - LINK_WINDOW + 1, self._sent)

    def _post(self, frame: FilledFrame, *, receipts: bool) -> TcpShipment:
        receipt = self._replies.next_receipt if receipts else None
        view = frame.buffer.view[: frame.length]
        shipment = TcpShipment(view, frame.release, receipt, self._outbox.changed)
        self._sent += 1
        self._outbox.push(shipment)
        return shipment
