"""Frames that packets occupy, and how a frame is sent without copying."""

from __future__ import annotations

import operator
from collections import deque
from dataclasses import dataclass

from pipeedge.base.payload import Payload
from pipeedge.transport.base import Packet
from pipeedge.transport.frame import Frame, FrameBuffer

__all__ = ["Draft", "Lease"]


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
        """Do nothing: the frame will not be sent."""
        self.free.append(self.buffer)
