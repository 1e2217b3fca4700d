"""Frames that packets occupy, and how a frame is sent without copying."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeedge.base.backpressure import FRAMES_IN_FLIGHT
from pipeedge.base.payload import Payload, TensorSpec
from pipeedge.transport.base import Packet, Reserved
from pipeedge.transport.frame import Frame, FrameBuffer, Kind

__all__ = ["Draft", "FilledFrame", "Lease", "SendingFrames"]


@dataclass(slots=True, eq=False)
class Lease:
    """A received frame that a packet occupies until it is released."""

    buffer: FrameBuffer
    frame: Frame
    free: deque[FrameBuffer]

    def release(self) -> None:
        """Make the memory available to receives again. Deques are thread-safe."""
        self.free.append(self.buffer)

    def holds(self, packet: Packet) -> bool:
        """Return whether ``packet`` consists of exactly the tensors of the frame."""
        mine, its = packet.payload, self.frame.payload
        return (
            packet.number == self.frame.number
            and packet.items == self.frame.items
            and (mine is its or (len(mine) == len(its) and all(map(operator.is_, mine, its))))
        )


@dataclass(slots=True, eq=False)
class Draft:
    """A frame whose payload is still being computed."""

    buffer: FrameBuffer
    payload: Payload
    free: deque[FrameBuffer]

    def release(self) -> None:
        """Give the frame back: it will not be sent."""
        self.free.append(self.buffer)


class FilledFrame(NamedTuple):
    """A frame to send."""

    buffer: FrameBuffer
    length: int
    release: Callable[[], None]
    """Makes the memory available again, once the frame is sent."""


class SendingFrames:
    """The frames of a sending end.

    Args:
        capacity: Bytes of the largest frame.
    """

    def __init__(self, capacity: int) -> None:
        self._free = deque(FrameBuffer(capacity) for _ in range(FRAMES_IN_FLIGHT))

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Reserve a free frame for a payload; there must be one."""
        buffer = self._free.pop()
        payload = buffer.place(specs)
        return Reserved(payload, Draft(buffer, payload, self._free))

    def fill(self, packet: Packet) -> FilledFrame:
        """Return the frame that holds a packet: its own, or a free one that it is copied into."""
        lease = packet.lease
        if isinstance(lease, Lease) and lease.holds(packet):
            return FilledFrame(lease.buffer, lease.frame.length, lease.release)
        if isinstance(lease, Draft) and lease.free is self._free:
            return self._written(lease.buffer, Kind.MICROBATCH, packet)
        filled = self._written(self._free.pop(), Kind.MICROBATCH, packet)
        lease.release()
        return filled

    def end(self, number: int) -> FilledFrame:
        """Return an end mark with the number of the packet that would follow."""
        return self._written(self._free.pop(), Kind.END, Packet(number, 0, ()))

    def _written(self, buffer: FrameBuffer, kind: Kind, packet: Packet) -> FilledFrame:
        message = buffer.write(kind=kind, number=packet.number, items=packet.items, payload=packet.payload)
        return FilledFrame(buffer, message.numel(), lambda: self._free.append(buffer))
