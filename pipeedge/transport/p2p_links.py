"""The ends of a link over gloo's point-to-point messages.

    sending rank                                      receiving rank
    packet ──copy──> [frame] ──isend──┐   ┌──> [frame] posted ──┐
                     [frame] ──isend──┴───┴──> [frame] posted ──┴──> packet (views, no copy)

A packet is sent without copying if all of its tensors still lie in the frame in which they were received, or
if it was computed in memory that the sender had reserved for it.

Measured properties of gloo explain this design. A send waits for the matching receive, so receives are posted
ahead. A message longer than the posted buffer aborts the process, so the capacity of a link is agreed before
anything is sent; a shorter message is allowed, so a frame carries its own length.

Two receives are posted per link, besides the frame that the stage holds, which bounds the microbatches that
wait in front of it. There are two because one connection carries both directions between a pair of ranks: the
notice that there is room for a frame queues behind traffic in the other direction, which delays it by half a
second behind a frame on a slow link, and the wire must not idle until then. A received buffer belongs to its
packet until the packet is released, and is then posted again: page faults on newly allocated memory cost more
than copying a frame.

The end of a send says little about the network: gloo completes it as soon as the kernel has the bytes, of
which it buffers megabytes, or as late as the receiving stage makes room (measured on a link of 50 Mbit/s: 0.6
ms to 160 ms for frames that need 100). On a link with receipts the receiving end therefore has a thread that
waits for arrivals, and returns a few bytes for each under a separate tag.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeedge.base.backpressure import FRAMES_IN_FLIGHT
from pipeedge.base.channel import Channel
from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet, Receipt, Reserved
from pipeedge.transport.frame import Frame, FrameBuffer, FrameError, Kind, frame_capacity
from pipeedge.transport.leases import FilledFrame, Lease, SendingFrames

__all__ = ["P2PReceiver", "P2PSender", "P2PShipment", "ReceiptingReceiver", "brief"]

_FRAMES, _RECEIPTS = 0, 1
"""Tags of gloo's messages."""


class P2PShipment:
    """One frame in flight."""

    def __init__(
        self,
        work: Any,
        link: Link,
        length: int,
        arrived: Callable[[], None],
        receipt: _AwaitedReceipt | None = None,
    ) -> None:
        self._work = work
        self._link = link
        self._arrived = arrived
        self._receipt = receipt
        self._lock = threading.Lock()
        self.bytes = length

    def wait(self) -> None:
        """Wait until the frame's memory is free again, which is when the other end has received it."""
        with self._lock:  # a measuring thread and one that needs the memory may both wait
            if self._work is None:
                return
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _lost_sending(self._link, error) from error
            self._work = None
            self._arrived()  # before the lock is released: other waiters need the memory

    def receipt(self) -> Receipt:
        """Wait for the receipt of the packet. Call this once, and only on a link with receipts."""
        if self._receipt is None:
            raise ValueError(f"the link to rank {self._link.destination} has no receipts")
        try:
            self._receipt.work.wait()
        except RuntimeError as error:
            raise _lost_sending(self._link, error) from error
        (apart_s,) = self._receipt.memory.tolist()
        if not apart_s >= 0:
            raise FrameError(
                f"from rank {self._link.destination}: a packet took {apart_s} s", peer=self._link.destination
            )
        return Receipt(apart_s)


@dataclass(frozen=True)
class _AwaitedReceipt:
    work: Any
    memory: torch.Tensor


class P2PSender:
    """Sender that copies packets into frames and keeps up to two of them in flight."""

    def __init__(self, group: Any, peer: int, link: Link) -> None:
        self._group = group
        self._peer = peer
        self._link = link
        self._frames = SendingFrames(frame_capacity(link.specs))
        self._under_way: deque[P2PShipment] = deque()
        self._sent = 0

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Reserve the next frame; blocks while two are in flight."""
        self._make_room()
        return self._frames.reserve(specs)

    def post(self, packet: Packet) -> P2PShipment:
        """Send ``packet``; blocks while two are in flight."""
        self._make_room()
        return self._post(self._frames.fill(packet), receipts=self._link.receipts)

    def finish(self) -> None:
        """Send an end mark for each posted receive, and wait until everything has arrived."""
        for _ in range(FRAMES_IN_FLIGHT):
            self._make_room()
            self._post(self._frames.end(self._sent), receipts=False)
        while self._under_way:
            self._under_way.popleft().wait()

    def _make_room(self) -> None:
        if len(self._under_way) == FRAMES_IN_FLIGHT:
            self._under_way.popleft().wait()

    def _post(self, frame: FilledFrame, *, receipts: bool) -> P2PShipment:
        receipt, message = None, frame.buffer.message(frame.length)
        try:
            if receipts:
                memory = torch.empty(1, dtype=torch.float64)
                receipt = _AwaitedReceipt(self._group.recv([memory], self._peer, _RECEIPTS), memory)
            work = self._group.send([message], self._peer, _FRAMES)
        except RuntimeError as error:
            raise _lost_sending(self._link, error) from error
        shipment = P2PShipment(work, self._link, frame.length, frame.release, receipt)
        self._under_way.append(shipment)
        self._sent += 1
        return shipment


def _lost_sending(link: Link, error: RuntimeError) -> PeerFailedError:
    return PeerFailedError(
        f"the connection to rank {link.destination} was lost while sending: {brief(error)}",
        peer=link.destination,
    )


def _lost_receiving(link: Link, error: RuntimeError) -> PeerFailedError:
    return PeerFailedError(
        f"the connection to rank {link.source} was lost while receiving: {brief(error)}", peer=link.source
    )


def brief(error: Exception) -> str:
    """Return gloo's message in short, without source locations and good wishes (GLHF!)."""
    text = re.sub(r"\[[^]]*\.(cc|cpp|h):\d+\]\s*", "", str(error)).partition("\n")[0]
    return re.sub(r"[\s,.;]*GLHF!?\s*", "", text).strip()


class _Inbound:
    """Posts the receives of one link, and reads what arrives, in order."""

    def __init__(self, group: Any, peer: int, link: Link) -> None:
        self._group = group
        self._peer = peer
        self._link = link
        self._capacity = frame_capacity(link.specs)
        self._free: deque[FrameBuffer] = deque()
        self._received = 0

    def post(self) -> _Posted:
        """Post a receive for one more frame."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = FrameBuffer(self._capacity)
        try:
            return _Posted(buffer, self._group.recv([buffer.memory], self._peer, _FRAMES))
        except RuntimeError as error:
            raise _lost_receiving(self._link, error) from error

    def wait(self, posted: _Posted) -> Frame:
        """Wait for the frame of ``posted``, the oldest receive not waited for."""
        try:
            posted.work.wait()
        except RuntimeError as error:
            raise _lost_receiving(self._link, error) from error
        try:
            frame = posted.buffer.read()
            if frame.number != self._received:
                raise FrameError(f"received microbatch {frame.number}, expected {self._received}")
        except FrameError as error:
            raise FrameError(f"from rank {self._link.source}: {error}", peer=self._link.source) from error
        self._received += 1
        return frame

    def packet(self, posted: _Posted, frame: Frame) -> Packet:
        """Return the microbatch in ``frame``, whose memory is reused once it is released."""
        return Packet(frame.number, frame.items, frame.payload, Lease(posted.buffer, frame, self._free))

    def send_receipt(self, receipt: torch.Tensor) -> Any:
        """Start to send ``receipt`` to the sending end; return the work to wait for."""
        try:
            return self._group.send([receipt], self._peer, _RECEIPTS)
        except RuntimeError as error:
            raise _lost_receiving(self._link, error) from error

    def wait_receipt_sent(self, work: Any) -> None:
        """Wait until the sending end has received a receipt."""
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost_receiving(self._link, error) from error


@dataclass(slots=True, eq=False)
class _Posted:
    buffer: FrameBuffer
    work: Any
    at: float = 0.0


class P2PReceiver:
    """Receiver that keeps two receives posted and turns arrivals into packets, in order."""

    def __init__(self, group: Any, peer: int, link: Link) -> None:
        self._inbound = _Inbound(group, peer, link)
        self._posted = deque(self._inbound.post() for _ in range(FRAMES_IN_FLIGHT))

    def receive(self) -> Packet | None:
        """Return the next packet, or None after the other end has finished."""
        posted = self._posted.popleft()
        frame = self._inbound.wait(posted)
        if frame.kind is Kind.END:
            while self._posted:  # each posted receive gets its own end mark
                self._inbound.wait(self._posted.popleft())
            return None
        self._posted.append(self._inbound.post())
        return self._inbound.packet(posted, frame)

    def run(self) -> None:
        """Do nothing: this link sends no receipts."""

    def close(self) -> None:
        """Do nothing: no thread waits for another here, and one that waits for gloo cannot be woken."""


class ReceiptingReceiver:
    """Receiver that sends receipts: a separate thread waits for arrivals.

    [ run ] posted ──wait, read──> arrived ──> [ receive ]
       ^  └──receipt──> sender                     │
       └──────────────────── posted again ─────────┘
    """

    def __init__(
        self, group: Any, peer: int, link: Link, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._inbound = _Inbound(group, peer, link)
        self._clock = clock
        self._posted: Channel[_Posted] = Channel(FRAMES_IN_FLIGHT + 1)
        self._arrived: Channel[tuple[_Posted, Frame]] = Channel(FRAMES_IN_FLIGHT + 1)
        self._receipts: deque[tuple[Any, torch.Tensor]] = deque()
        for _ in range(FRAMES_IN_FLIGHT):
            self._post()

    def receive(self) -> Packet | None:
        """Return the next packet, or None after the other end has finished."""
        arrived = self._arrived.get()
        if arrived is None:
            return None
        self._post()
        return self._inbound.packet(*arrived)

    def run(self) -> None:
        """Wait for packets and send the receipt of each, until the last."""
        before = -math.inf
        ends = 0
        while ends < FRAMES_IN_FLIGHT and (posted := self._posted.get()) is not None:
            frame = self._inbound.wait(posted)
            now = self._clock()
            if frame.kind is Kind.END:
                ends += 1
                if ends == 1:
                    self._arrived.finish()
                continue
            self._send_receipt(now - max(before, posted.at))
            before = now
            self._arrived.put((posted, frame))
        while self._receipts:
            self._inbound.wait_receipt_sent(self._receipts.popleft()[0])

    def close(self) -> None:
        """Wake all waiting threads for good."""
        self._posted.close()
        self._arrived.close()

    def _post(self) -> None:
        posted = self._inbound.post()
        self._posted.put(_Posted(posted.buffer, posted.work, self._clock()))

    def _send_receipt(self, apart_s: float) -> None:
        if len(self._receipts) == FRAMES_IN_FLIGHT:
            self._inbound.wait_receipt_sent(self._receipts.popleft()[0])
        receipt = torch.tensor([apart_s], dtype=torch.float64)
        self._receipts.append((self._inbound.send_receipt(receipt), receipt))
