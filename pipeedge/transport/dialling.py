"""Connect to another process, in clear or under TLS: control connections and links alike."""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerFailedError
from pipeedge.transport.sealed import SealedSocket, Stream
from pipeedge.transport.wires import Connections

__all__ = ["NotAMemberError", "dial", "refusals"]

_SHORTEST_WAIT_S = 0.01
"""Shortest timeout of a socket in seconds, because 0 would make it non-blocking."""


class NotAMemberError(PeerFailedError):
    """The other end of a connection is no member; the message follows its name in a sentence."""


@contextlib.contextmanager
def refusals(stream: Stream) -> Iterator[None]:
    """Explain errors of TLS on ``stream`` in the body, which speaks to a peer for the first time.

    Raises:
        ConnectionResetError: The peer has closed the connection, as it also does with too many.
        NotAMemberError: The peer has another key or none, or is another program.
    """
    try:
        yield
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise ConnectionResetError(errno.ECONNRESET, "connection closed by the other end") from error
    except ssl.SSLError as error:
        if not isinstance(stream, SealedSocket):
            raise
        raise NotAMemberError(stream.sealing.describe(error)) from error


def dial(
    address: tuple[str, int],
    connections: Connections,
    *,
    context: ssl.SSLContext | None,
    deadline: float,
    connect_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Stream:
    """Connect to ``address`` once, trying each IP address of its name. The stream's socket is blocking.

    Args:
        address: Name or IP address, and port.
        connections: What another thread can cut to end the wait.
        context: Settings of TLS, or None to speak in clear.
        deadline: Time by ``clock`` at which to give up.
        connect_s: Longest time in seconds until a connection is accepted. The handshake may last until
            ``deadline``, as it does where many connect at the same moment.
        clock: Monotonic clock in seconds.

    Raises:
        OSError: Nobody listens there, the connection was closed, or the time is over.
        NotAMemberError: The handshake failed.
        Closed: ``connections`` were cut.
    """
    failure: OSError | None = None
    for family, kind, _, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind)
        try:
            connections.add(sock)
            sock.settimeout(max(_SHORTEST_WAIT_S, min(connect_s, deadline - clock())))
            try:
                _connect(sock, where)
            except OSError as error:
                failure = error
                connections.close(sock)
                continue
            return _secure(sock, context, deadline, clock)
        except BaseException as error:
            connections.close(sock)
            if isinstance(error, OSError) and connections.are_cut:
                raise Closed from error
            raise
    if connections.are_cut:
        raise Closed from failure
    raise failure or OSError(errno.EADDRNOTAVAIL, "name without an address")


def _connect(sock: socket.socket, where: Any) -> None:
    sock.connect(where)
    if sock.getsockname() == sock.getpeername():
        # Nobody listens: TCP chose this port for itself and connected it to itself.
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _secure(
    sock: socket.socket, context: ssl.SSLContext | None, deadline: float, clock: Callable[[], float]
) -> Stream:
    if context is None:
        return sock
    sealed = SealedSocket(sock, context, accepts=False)
    with refusals(sealed):
        while True:
            sock.settimeout(max(_SHORTEST_WAIT_S, deadline - clock()))
            if sealed.shake_hands():
                return sealed
