"""Frames that packets occupy, and how a frame is sent without copying."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pipeedge.base.payload import Payload
from pipeedge.transport.base import Packet
from pipeedge.transport.frame import Frame, FrameBuffer

__all__ = ["Draft", "Lease"]


@dataclass(frozen=True)
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
        return (
            packet.number == self.frame.number
            and packet.items == self.frame.items
            and len(packet.payload) == len(self.frame.payload)
            and all(mine is its for mine, its in zip(packet.payload, self.frame.payload, strict=True))
        )


@dataclass(frozen=True)
class Draft:
    """A frame whose payload is still being computed."""

    buffer: FrameBuffer
    payload: Payload
    free: deque[FrameBuffer]

    def release(self) -> None:
        """Do nothing: the frame will not be sent."""
        self.free.append(self.buffer)
