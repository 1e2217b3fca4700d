"""The ends of a link over RPC, which order and bound what RPC does not. They know no RPC themselves.

    packet ──copy──> [frame 0] ──deliver──┐   ┌──> inbox [ · · · · ], by number ──> packet (views)
                     [frame 1] ──deliver──┴───┘         │
                       ^ free again <── reply: there is room ┘

A frame carries its number, and the inbox hands frames out in that order. A reply is a credit: a sender
keeps at most ``FRAMES_IN_FLIGHT`` frames without a reply, and the inbox withholds replies while more than
``LINK_WINDOW - FRAMES_IN_FLIGHT`` frames wait in it. So at most ``LINK_WINDOW`` frames ever wait, and the
memory for frames in flight is limited on both ranks. Replies are futures that the stage's own thread
completes, so no RPC worker thread ever blocks.

On a link with receipts a reply is more than a credit: it also reports how long the frame took.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeedge.base.backpressure import FRAMES_IN_FLIGHT, LINK_WINDOW
from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet, Receipt, Reserved, unbound
from pipeedge.transport.frame import Frame, FrameError, Kind, frame_capacity, read_frame, write_frame

__all__ = ["RpcReceiver", "RpcSender", "RpcShipment", "answered"]

_ENDED = "the run has ended"

# torch declares futures at run time only, so type checkers do not see their type.
_Future: Any = torch.futures.Future


class RpcShipment:
    """One frame in flight, until its reply; a non-empty text is a refusal with its reason."""

    def __init__(self, link: Link, number: int, length: int) -> None:
        self._link = link
        self._number = number
        self._settled = threading.Event()
        self._error: Exception | None = None
        self._reply: object = None
        self.bytes = length

    def start(self, deliver: Callable[[torch.Tensor], Any], buffer: torch.Tensor) -> None:
        """Deliver the frame, without waiting for the reply."""
        try:
            future = deliver(buffer)
        except RuntimeError as error:
            self._settle(self._lost(error))
        else:
            future.add_done_callback(self._receive_reply)

    def wait(self) -> None:
        """Wait for the reply. Any number of threads may call this.

        Raises:
            PeerFailedError: The frame was refused, or the other rank is gone.
            Closed: The run has ended.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error

    def receipt(self) -> Receipt:
        """Wait for the receipt of the packet. Only for a link with receipts."""
        self.wait()
        reply = self._reply
        if not isinstance(reply, tuple) or len(reply) != 2 or not all(_is_duration(part) for part in reply):
            raise FrameError(
                f"from rank {self._link.destination}: the reply is not a receipt", peer=self._link.destination
            )
        return Receipt(*reply)

    def close(self) -> None:
        """Wake all waiting threads, unless the reply has arrived."""
        if not self._settled.is_set():
            self._settle(Closed())

    def _receive_reply(self, future: Any) -> None:
        try:
            reply = future.value()
        except RuntimeError as error:
            self._settle(self._lost(error))
        else:
            self._reply = reply
            self._settle(self._refused(reply) if reply and isinstance(reply, str) else None)

    def _settle(self, error: Exception | None) -> None:
        self._error = error
        self._settled.set()

    def _lost(self, error: RuntimeError) -> PeerFailedError:
        peer = self._link.destination
        return PeerFailedError(f"the connection to rank {peer} was lost while sending: {error}", peer=peer)

    def _refused(self, reason: str) -> PeerFailedError:
        peer = self._link.destination
        return PeerFailedError(f"rank {peer} refused microbatch {self._number}: {reason}", peer=peer)


def _is_duration(value: object) -> bool:
    return isinstance(value, float) and value >= 0


class RpcSender:
    """Sender that copies packets into frames and keeps up to ``FRAMES_IN_FLIGHT`` of them in flight.

    Args:
        link: The link.
        deliver: Takes a frame to ``RpcReceiver.deliver`` at the other end; returns the future of the reply.
    """

    def __init__(self, link: Link, deliver: Callable[[torch.Tensor], Any]) -> None:
        self._link = link
        self._deliver = deliver
        capacity = frame_capacity(link.specs)
        self._frames = deque(torch.empty(capacity, dtype=torch.uint8) for _ in range(FRAMES_IN_FLIGHT))
        self._lock = threading.Lock()
        self._under_way: deque[RpcShipment] = deque()
        self._sent = 0
        self._closed = False

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Reserve separate memory, which is copied into a frame: RPC serialises what it sends anyway."""
        return unbound(specs)

    def post(self, packet: Packet) -> RpcShipment:
        """Send ``packet``; blocks while ``FRAMES_IN_FLIGHT`` frames are without a reply."""
        return self._post(Kind.MICROBATCH, packet)

    def finish(self) -> None:
        """Send the end mark, and wait until everything has arrived."""
        self._post(Kind.END, Packet(self._sent, 0, ()))
        for shipment in list(self._under_way):
            shipment.wait()

    def close(self) -> None:
        """Wake all waiting threads for good."""
        with self._lock:
            self._closed = True
            shipments = list(self._under_way)
        for shipment in shipments:
            shipment.close()

    def _post(self, kind: Kind, packet: Packet) -> RpcShipment:
        if len(self._under_way) == FRAMES_IN_FLIGHT:
            self._under_way[0].wait()  # its reply frees the frame to fill next
        buffer = self._frames[0]
        self._frames.rotate(-1)
        length = write_frame(
            buffer, kind=kind, number=packet.number, items=packet.items, payload=packet.payload
        )
        packet.lease.release()
        shipment = RpcShipment(self._link, packet.number, length)
        with self._lock:
            if self._closed:
                raise Closed
            if len(self._under_way) == FRAMES_IN_FLIGHT:
                self._under_way.popleft()
            self._under_way.append(shipment)
        shipment.start(self._deliver, _trimmed(buffer, length))
        self._sent += 1
        return shipment


class RpcReceiver:
    """Receiver that orders the frames of one link and grants credits when there is room for more."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.perf_counter) -> None:
        self._link = link
        self._clock = clock
        self._before = -math.inf
        self._capacity = frame_capacity(link.specs)
        self._changed = threading.Condition()
        self._waiting: dict[int, Frame] = {}
        self._withheld: deque[_Withheld] = deque()
        self._due = 0
        self._error: FrameError | None = None
        self._closed = False

    def receive(self) -> Packet | None:
        """Return the next packet by number, or None after the other end has finished."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._due in self._waiting or self._error is not None or self._closed
            )
            if self._error is not None:
                raise self._error
            if self._closed:
                raise Closed
            frame = self._waiting.pop(self._due)
            self._due += 1
            withheld = self._withheld.popleft() if self._withheld else None
        if withheld is not None:
            withheld.reply.set_result(self._grant(withheld.apart_s, withheld.since))
        if frame.kind is Kind.END:
            return None
        return Packet(frame.number, frame.items, frame.payload)

    def deliver(self, buffer: torch.Tensor) -> Any:
        """Accept a frame, in any order; return the future of the reply, which says that there is room."""
        try:
            frame = self._read(buffer)
            with self._changed:
                now = self._clock()
                apart_s, self._before = now - self._before, now
                if self._closed:
                    return answered(_ENDED)
                if not self._due <= frame.number < self._due + LINK_WINDOW or frame.number in self._waiting:
                    raise FrameError(f"received microbatch {frame.number}, expected {self._due}")
                self._waiting[frame.number] = frame
                self._changed.notify_all()
                if len(self._waiting) > LINK_WINDOW - FRAMES_IN_FLIGHT:
                    self._withheld.append(_Withheld(_Future(), apart_s, now))
                    return self._withheld[-1].reply
            return answered(self._grant(apart_s, now))
        except FrameError as error:
            with self._changed:
                self._error = FrameError(f"from rank {self._link.source}: {error}", peer=self._link.source)
                self._changed.notify_all()
            return answered(str(error))

    def run(self) -> None:
        """Do nothing: receipts are replies, which need no thread."""

    def close(self) -> None:
        """Wake all waiting threads for good, and answer the frames whose replies were withheld."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            withheld, self._withheld = self._withheld, deque()
            self._changed.notify_all()
        for each in withheld:
            each.reply.set_result(_ENDED)

    def _grant(self, apart_s: float, arrived_at: float) -> str | tuple[float, float]:
        return (apart_s, self._clock() - arrived_at) if self._link.receipts else ""

    def _read(self, buffer: object) -> Frame:
        if not isinstance(buffer, torch.Tensor) or buffer.dtype != torch.uint8 or buffer.dim() != 1:
            raise FrameError("received data is not a frame")
        if buffer.numel() > self._capacity:
            raise FrameError(f"received {buffer.numel()} bytes, but the agreed capacity is {self._capacity}")
        return read_frame(buffer)


@dataclass(frozen=True)
class _Withheld:
    reply: Any
    apart_s: float
    since: float


def _trimmed(buffer: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first ``length`` bytes in memory that ends there.

    torch sends all memory behind a tensor, unless that is more than twice as much.
    """
    return torch.from_numpy(buffer.numpy()[:length])


def answered(reply: str | tuple[float, float]) -> Any:
    """Return a future that has its reply already."""
    future = _Future()
    future.set_result(reply)
    return future
