"""Exchange messages with the hub: any thread may send, one waits and receives, and both outlast a drop.

The hub keeps only a few connections without a rank. If many processes connect at once, one of them can
displace this rank before the hub has read its hello. Until the hub has answered, all messages are kept, and
sent again over a new connection.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable

from pipeedge.base.errors import PipeEdgeError
from pipeedge.control.connection import Connection
from pipeedge.control.hub_address import HubAddress
from pipeedge.control.messages import Malformed, Message, frame

__all__ = ["Uplink"]

_PARTING_S = 2.0
"""Longest time in seconds for which a rank that leaves waits until the hub has its last messages."""
_RETRY_S = 0.2
_MORE_DIALS = 10


class Uplink:
    """A rank's connection to the hub. One thread uses it; others may ``send`` and ``wake``.

    Args:
        connection: Connection to the hub; closed with this object.
        hub_at: Where to connect again if the hub closes the connection before it has read it, or None.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, connection: Connection, hub_at: HubAddress | None, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._hub_at = hub_at
        self._clock = clock
        self._sending = threading.Lock()
        self._dials = _MORE_DIALS
        self._unconfirmed: list[bytes] = []  # messages to repeat if the hub drops this connection unread
        self.hub_confirmed = False
        """Whether the listener has proved to be a hub."""
        self._waker, self._wakened = socket.socketpair()
        for sock in (self._waker, self._wakened):
            sock.setblocking(False)
        self._selector = selectors.DefaultSelector()

    def open(self) -> None:
        """Prepare to wait."""
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._selector.register(self._connection.socket, selectors.EVENT_READ)

    def close(self) -> None:
        """Close the connection, once no thread waits."""
        self._connection.close()
        self._selector.close()
        for sock in (self._waker, self._wakened):
            sock.close()

    def send(self, message: Message) -> None:
        """Have the thread that waits send a message; only that thread uses the connection."""
        data = frame(message)
        with self._sending:
            if not self.hub_confirmed:
                self._unconfirmed.append(data)
            self._connection.queue(data)
        self.wake()

    def wake(self) -> None:
        """Let ``wait_until`` return."""
        with contextlib.suppress(BlockingIOError):  # it has not even read the previous calls
            self._waker.send(b"\0")

    def wait_until(self, deadline: float) -> bool:
        """Send what is to be sent, and wait; return whether anything has arrived from the hub."""
        connection = self._connection
        with contextlib.suppress(OSError):  # the socket may still hold the reason, and is read first
            connection.send()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_outgoing else 0)
        self._selector.modify(connection.socket, wanted)
        events = self._selector.select(max(0.0, deadline - self._clock()))
        with contextlib.suppress(BlockingIOError):
            self._wakened.recv(4096)
        return any(key.fileobj is connection.socket and mask & selectors.EVENT_READ for key, mask in events)

    def receive(self) -> list[Message | Malformed] | None:
        """Return the messages that have arrived; None if the hub is gone.

        Raises:
            PeerFailedError: The listener sends something else than messages.
        """
        try:
            messages = self._connection.receive()
        except OSError:
            messages = None
        if messages is None:
            return [] if self._connect_again() else None
        self.hub_confirmed = self.hub_confirmed or bool(messages)
        return messages

    @property
    def failure(self) -> str:
        """Reason why the listener is not the hub of this run; empty if it may be."""
        return self._connection.end.failure

    def part(self) -> None:
        """Send what is still to be sent, as long as the hub takes it, and wait until the hub has read it.

        A connection that is closed with unread bytes is reset, and the hub would lose the last messages.
        """
        sock, until = self._connection.socket, self._clock() + _PARTING_S
        with contextlib.suppress(OSError):
            sock.settimeout(_PARTING_S)
            self._connection.send()
            sock.shutdown(socket.SHUT_WR)
            while (left := until - self._clock()) > 0:
                sock.settimeout(left)
                if not sock.recv(1 << 16):
                    return

    def _connect_again(self) -> bool:
        """Connect again and repeat all messages if the hub has not answered this rank yet."""
        if self.hub_confirmed or self._hub_at is None or not self._dials:
            return False
        self._dials -= 1
        time.sleep(_RETRY_S)  # many processes connect at this moment
        try:
            connection = self._hub_at.dial(_RETRY_S)
        except PipeEdgeError:
            return False
        self._selector.unregister(self._connection.socket)
        self._connection.close()
        self._selector.register(connection.socket, selectors.EVENT_READ)
        with self._sending:
            for data in self._unconfirmed:
                connection.queue(data)
            self._connection = connection
        return True
