"""Connections of ``-c tcp``: their options, one end of a connection, clear or under TLS, and all of a group.

Each end belongs to one thread at a time, as an ``ssl`` object must; only ``cut`` is for any thread. Data
flows one way on a connection, so nobody ever reads and writes at once.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading

from pipeedge.base.crew import Closed
from pipeedge.transport.sealed import SealedSocket, Stream, socket_of

__all__ = ["Connections", "TcpWire", "tune"]

_PROBES = 3
"""Number of unanswered probes after which an idle connection is lost."""
_LONGEST_INTERVAL_S = 32767
"""Largest interval between probes that Linux takes, in seconds."""


class TcpWire:
    """One end of a connection on which data flows one way."""

    def __init__(self, stream: Stream, connections: Connections) -> None:
        stream.settimeout(None)
        self._stream = stream
        self._socket = socket_of(stream)
        self._connections = connections

    def send(self, data: memoryview | bytes) -> None:
        """Send all of ``data``.

        Raises:
            OSError: The connection is lost.
        """
        self._stream.sendall(data)

    def receive(self, memory: memoryview) -> None:
        """Fill ``memory``.

        Raises:
            OSError: The connection is lost.
        """
        if isinstance(self._stream, SealedSocket):
            complete = self._stream.fill(memory)
        else:
            complete = _fill(self._stream, memory)
        if not complete:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed by the other end")

    def receive_some(self, limit: int) -> bytes:
        """Wait for data, and return up to ``limit`` bytes of it.

        Raises:
            OSError: The connection is lost.
        """
        data = self._stream.recv(limit)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed by the other end")
        return data

    def send_at_once(self, data: memoryview) -> int:
        """Send as much of ``data`` as can be sent without waiting; return its length.

        The next call must go on where this one has stopped.

        Raises:
            OSError: The connection is lost.
        """
        if isinstance(self._stream, SealedSocket):
            return self._stream.send_at_once(data)
        try:
            return self._stream.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def wait_writable(self) -> None:
        """Wait until more can be sent, or the connection is lost."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        poll.poll()

    def close(self) -> None:
        """Close the connection. No thread may use it any more."""
        self._connections.discard(self._socket)
        self._socket.close()


def _fill(sock: socket.socket, memory: memoryview) -> bool:
    while memory:
        count = sock.recv_into(memory, len(memory), socket.MSG_WAITALL)
        if not count:
            return False
        memory = memory[count:]
    return True


class Connections:
    """The sockets of a group, all of which another thread can cut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._cut = threading.Event()

    @property
    def are_cut(self) -> bool:
        """Whether ``cut`` was called."""
        return self._cut.is_set()

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            Closed: The connections were cut.
        """
        if self._cut.wait(seconds):
            raise Closed

    def add(self, sock: socket.socket) -> None:
        """Include ``sock`` in what is cut.

        Raises:
            Closed: The connections were cut already.
        """
        with self._lock:
            if self._cut.is_set():
                raise Closed
            self._sockets.add(sock)

    def discard(self, sock: socket.socket) -> None:
        """Leave ``sock`` out of what is cut. Must precede its close."""
        with self._lock:
            self._sockets.discard(sock)

    def close(self, stream: Stream) -> None:
        """Close ``stream``, which no thread may use any more."""
        self.discard(socket_of(stream))
        stream.close()

    def close_all(self) -> None:
        """Close what is left of links that were never opened completely. No thread may use them any more."""
        with self._lock:
            for sock in self._sockets:
                sock.close()
            self._sockets.clear()

    def cut(self) -> None:
        """Wake all threads that wait on connections, now or later, by an OSError."""
        with self._lock:
            self._cut.set()
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # it was not connected yet, or is lost already
                    sock.shutdown(socket.SHUT_RDWR)


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Set the options of a connection.

    A host that does not acknowledge for ``timeout_s`` is lost, also while nothing is sent. A slow stage is
    not, because the receiving end reads whatever it has granted credit for.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = min(_LONGEST_INTERVAL_S, max(1, int(timeout_s / (_PROBES + 1))))
    # macOS has not all of these options; it keeps its defaults.
    for name, value in (
        ("TCP_KEEPIDLE", interval_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", max(1000, int(timeout_s * 1000))),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
