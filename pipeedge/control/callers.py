"""Connections that the hub has accepted."""

from __future__ import annotations

import socket

from pipeedge.control.connection import Connection
from pipeedge.control.messages import TO_HUB, Decoder, Message, Verdict, frame
from pipeedge.control.wire import WireEnd
from pipeedge.transport.door import Caller

__all__ = ["RankCaller"]


class RankCaller(Connection, Caller):
    """A connection that the hub has accepted, of a rank if its peer says and proves so.

    Args:
        number: Number of the connection.
        sock: Socket of the connection.
        peer: Address of the other end, for messages.
        end: This end.
        max_message_bytes: Length of the longest message that is accepted.
        close_at: Time at which it is closed if the peer has not proved to be a member.
    """

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        peer: str,
        end: WireEnd,
        *,
        max_message_bytes: int,
        close_at: float,
    ) -> None:
        Caller.__init__(self, number, sock, peer, close_at)
        Connection.__init__(self, sock, end, Decoder(TO_HUB, max_message_bytes))

    @property
    def is_stranger(self) -> bool:
        """Whether the peer has not proved to be a member, or has proved to be none."""
        return not self.end.established or bool(self.end.failure)

    def queue_message(self, message: Message) -> None:
        """Queue a message. A verdict replaces all messages of which nothing has been sent yet."""
        if isinstance(message, Verdict):
            self.withdraw()
        self.queue(frame(message))
