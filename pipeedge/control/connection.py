"""A control connection: a socket that never blocks, an end in clear or sealed, and messages of both ways."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from pipeedge.control.messages import TO_HUB, Decoder, Malformed, Message, Verdict, frame
from pipeedge.control.wire import WireEnd
from pipeedge.transport.door import Caller

__all__ = ["Connection", "RankCaller"]

_READ_BYTES = 1 << 16


class Connection:
    """A connection that one thread reads and writes. Other threads may ``queue``.

    Args:
        sock: Connected socket; becomes non-blocking.
        end: This end of the connection.
        decoder: Decoder of the messages from the peer.
    """

    def __init__(self, sock: socket.socket, end: WireEnd, decoder: Decoder) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.end = end
        self._decoder = decoder
        self._waiting: deque[bytes] = deque()
        self._begun = memoryview(b"")  # bytes for the network, of a message that has been begun

    def queue(self, data: bytes) -> None:
        """Queue the bytes of a message."""
        self._waiting.append(data)

    def withdraw(self) -> None:
        """Withdraw all messages of which nothing has been sent yet."""
        self._waiting.clear()

    @property
    def has_outgoing(self) -> bool:
        """Whether anything is still to be sent."""
        return bool(self._waiting) or bool(self._begun)

    def send(self) -> None:
        """Send as much as the socket takes at once.

        Raises:
            OSError: The connection is broken.
        """
        with contextlib.suppress(BlockingIOError):
            while self.has_outgoing:
                if not self._begun:
                    self.end.put(self._waiting.popleft())
                    self._begun = memoryview(self.end.outgoing())
                self._begun = self._begun[self.socket.send(self._begun) :]

    def receive(self) -> list[Message | Malformed] | None:
        """Return the messages that have arrived; None if the peer has closed the connection.

        If the peer turns out to be no member, ``end.failure`` says so afterwards.

        Raises:
            OSError: The connection is broken.
            PeerFailedError: The peer sends something else than messages.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        text = self.end.receive(data)
        self._begun = memoryview(bytes(self._begun) + self.end.outgoing())  # what TLS answers by itself
        return self._decoder.feed(text)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


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
