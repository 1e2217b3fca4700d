"""The HTTP server in a thread: connections, their limits, and its end."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import logging
import select
import socket
import struct
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pipeedge.base.errors import RequestError

__all__ = ["HttpServer", "open_listener"]

_MAX_CONNECTIONS = 512
_MAX_HEADER_BYTES = 16 << 10
_MAX_UNREAD_HEADER_BYTES = 4 * _MAX_HEADER_BYTES
"""Number of bytes after which a connection ends whose headers are not complete."""
_HEADERS_S = 10.0
"""Seconds within which the headers of a request must have come."""
_KEEP_ALIVE_S = 30
_UNREAD_S = 30.0
"""Seconds after which a connection ends whose client has read nothing more of a reply."""
_LAST_REPLIES_S = 5.0
"""Seconds at the end for requests and replies that are being sent."""
_LAST_HANDSHAKES_S = 0.1
"""Seconds at the end for connections that are being opened."""
_LAST_WORDS_S = 1.0
"""Seconds at the end for requests on connections that are idle, or new."""
_ANSWERED_S = 0.5
"""Seconds for the replies to requests that have not come within these."""
_TICK_S = 0.02
_SO_ATTACH_FILTER = 26
_NO_SYN = (
    (0x30, 0, 0, 13),
    (0x54, 0, 0, 0x12),
    (0x15, 0, 1, 0x02),
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFFFFFF),
)
"""Filter of Linux for packets of TCP: load byte 13; keep the flags SYN and ACK; drop a SYN alone."""


class _Connection(asyncio.Protocol):
    """A connection that ends if its client is too slow, or if others need its place more.

    It stands in front of a protocol of uvicorn, whose attributes are those without an underscore.
    """

    cycle: Any
    """The latest request and its reply, or None before the first."""
    connections: set[asyncio.Protocol]
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _headers_due: asyncio.TimerHandle | None = None
    _unread_due: asyncio.TimerHandle | None = None
    _is_dropped = False
    _heard_at = 0.0
    """Time when the client sent something last, in seconds."""
    _asked_at = 0.0
    """Time when the headers of the latest request had come, in seconds."""
    _head_bytes = 0
    """Number of bytes that have come of headers that are not complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._heard_at = self.loop.time()
        if len(self.connections) > _MAX_CONNECTIONS:
            self._most_dispensable()._drop()
        if not self._is_dropped:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        self._heard_at = self.loop.time()
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._asked_at = self._heard_at
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_expecting()
        elif not self._is_dropped:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_UNREAD_HEADER_BYTES:
                self._drop()
            elif self._headers_due is None:
                self._expect_headers()  # part of a further request

    def on_response_complete(self) -> None:
        """Go on with the next request, and watch that the client reads the reply."""
        super().on_response_complete()  # type: ignore[misc]
        self._watch_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_expecting()
        self._stop_watching()
        super().connection_lost(exc)

    def _most_dispensable(self) -> _Connection:
        """Return the connection that gives way: the one that has been without a whole request for longest.

        It is this one if all others wait for a reply. Those who only hold connections open, or send a request
        a byte at a time, must not keep others from asking.
        """
        others = (one for one in self.connections if isinstance(one, _Connection) and not one._is_dropped)
        since = {one: at for one in others if (at := one._incomplete_since) is not None}
        return min(since, key=since.__getitem__, default=self)

    @property
    def _incomplete_since(self) -> float | None:
        """Time since when there is no whole request, in seconds; None while there is one to answer."""
        if self.cycle is None or self.cycle.response_complete:
            return self._heard_at
        return self._asked_at if self.cycle.more_body else None

    def close_if_quiet(self, since: float, quiet_s: float) -> None:
        """Close the connection at the end of the server, if its client asks nothing.

        A request may be on its way: to close at once would reset it.

        Args:
            since: Time when the server began to end, in seconds.
            quiet_s: Seconds without a word from the client after which it asks nothing.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            return
        if self.loop.time() >= max(since, self._heard_at) + quiet_s:
            self.transport.close()

    def _drop(self) -> None:
        """Close the connection now; what is not sent yet is lost."""
        self._is_dropped = True
        self.transport.abort()

    def _watch_unread(self) -> None:
        self._stop_watching()
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            self._unread_due = self.loop.call_later(_UNREAD_S, self._check_unread, unsent)

    def _check_unread(self, before: int) -> None:
        """Drop the connection if no part of the ``before`` bytes was read; else, a client would keep them."""
        if self.transport.get_write_buffer_size() >= before:
            self._drop()
        else:
            self._watch_unread()

    def _stop_watching(self) -> None:
        if self._unread_due is not None:
            self._unread_due.cancel()
            self._unread_due = None

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(_HEADERS_S, self.transport.close)

    def _stop_expecting(self) -> None:
        self._head_bytes = 0
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


def connection_class(parser: str | None = None) -> type[asyncio.Protocol]:
    """Return the class of connections.

    Args:
        parser: Package that parses requests: httptools, which takes a fifth of the time, or h11, which is
            always there; None for the better one of those that are installed.
    """
    if parser is None:
        parser = "h11" if importlib.util.find_spec("httptools") is None else "httptools"
    if parser == "h11":
        protocol: Any = import_module("uvicorn.protocols.http.h11_impl").H11Protocol
    else:
        protocol = import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
    return type("Connection", (_Connection, protocol), {})


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens for requests.

    Raises:
        RequestError: The port is taken, or the address is not one of this machine.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol: asyncio sends small parts of a reply at once only on what it knows to be TCP.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_MAX_CONNECTIONS)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise RequestError(
            f"--serve {host}:{port}: cannot listen there ({error.strerror}); choose another port, or an "
            "address of this machine"
        ) from error
    return listener


def _keep_out(listener: socket.socket) -> None:
    """Let nobody begin to open a connection to ``listener`` any more, without closing those that are open.

    Else, connections would come between the last look at its backlog and its end, which resets them. Those
    who knock get no answer, knock again after a second, and find the port closed. Other systems than Linux
    have no such filter.
    """
    if sys.platform != "linux":
        return
    code = b"".join(struct.pack("=HBBI", *each) for each in _NO_SYN)
    kept = ctypes.create_string_buffer(code, len(code))
    with suppress(OSError):
        program = struct.pack("HP", len(_NO_SYN), ctypes.addressof(kept))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _has_knocked(listener: socket.socket) -> bool:
    """Return whether somebody waits to be accepted."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


class _Server(uvicorn.Server):
    """A server whose end loses no request: everybody who has connected gets a reply.

    keep out ──> accept all that have come ──> close the port ──> answer what comes, closing what is quiet
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer those who are connected, and end."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        last = began + _LAST_REPLIES_S
        for listener in sockets or ():
            _keep_out(listener)
        await asyncio.sleep(_LAST_HANDSHAKES_S)
        while any(map(_has_knocked, sockets or ())) and loop.time() < last:
            await asyncio.sleep(0)  # the loop accepts them
        for server in self.servers:
            server.close()
        closed = loop.time()
        while loop.time() < last:
            connections = self.server_state.connections
            for each in tuple(connections):
                if isinstance(each, _Connection):
                    each.close_if_quiet(closed, _LAST_WORDS_S)
            await asyncio.sleep(_TICK_S)  # also for those that were accepted last, who are not known at once
            if not connections and not self.server_state.tasks:
                return
        for task in tuple(self.server_state.tasks):
            task.cancel()  # which replies that the server has ended
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_ANSWERED_S)


class HttpServer:
    """Serves an application on a listening socket.

    Args:
        app: The application.
        listener: Socket that listens; the server closes it.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        settings: dict[str, Any] = {
            "http": connection_class(),
            "ws": "none",
            "lifespan": "off",
            "loop": "asyncio",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "h11_max_incomplete_event_size": _MAX_HEADER_BYTES,
            "timeout_keep_alive": _KEEP_ALIVE_S,
            "backlog": _MAX_CONNECTIONS,
        }
        self._listener = listener
        # Their logs would have a line for every malformed request.
        logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
        self._server = _Server(uvicorn.Config(app, log_level="critical", **settings))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="http", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, send the last replies, and return."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
