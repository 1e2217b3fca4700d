"""The gate in front of all routes: who may ask, how large requests are, and how long they may take to come.

    connection ──limits of server.py──> headers ──host, key──> whole body, within bytes and seconds ──> routes

A body is read before anything looks at it, so routes never wait for a slow client. All bodies together are
bounded too. Every request is counted, and every failure becomes a reply.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeedge.base.errors import RequestError
from pipeedge.base.wording import excerpt, printable
from pipeedge.serve.description import OPEN_PATHS
from pipeedge.serve.figures import ServiceFigures
from pipeedge.serve.replies import HttpError, error_reply, status_of_error

__all__ = ["Gate", "GateLimits", "read_keys"]

_MAX_HEADERS = 100
_MAX_HEADER_BYTES = 16 << 10
_BODIES = 8
"""Largest total size of the bodies in memory, as a multiple of the largest body."""
_BEGINNING_BYTES = 64 << 10
"""Size of the beginning of a body, which does not count as part of that: all connections have this much."""
_MOST_DIGITS = 18
_SLOW_START_S = 5.0
"""Seconds at the beginning of a body during which it may come at any rate."""
_LEAST_BYTES_PER_S = 4096
"""Smallest rate of a body after that, in bytes per second."""


def read_keys(path: Path | None) -> tuple[bytes, ...]:
    """Return the keys in a file, one a line; none without a file.

    Raises:
        RequestError: It cannot be read, or has none.
    """
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    except OSError as error:
        raise RequestError(f"--api-key {printable(path)}: cannot be read ({error.strerror})") from error
    if not keys:
        raise RequestError(f"--api-key {printable(path)}: the file has no key; write one a line")
    return keys


@dataclass(frozen=True)
class GateLimits:
    """Limits of a request."""

    max_body_bytes: int
    body_s: float
    """Seconds within which the whole body must have come."""
    keys: tuple[bytes, ...] = ()
    """Keys, one of which a request must have; anybody may ask if there are none."""
    local_names_only: bool = False
    """Whether a request must name this machine as its host.

    A page of another site can have its own name point to this machine, and read what is answered to it.
    """


class _Coming:
    """A body that is being received.

    Args:
        cancel: Ends the wait for its next part.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.cancel = cancel
        self.parts: list[bytes] = []
        self.size = 0
        self.gives_way = False
        """Whether others have its room now."""


class _Bodies:
    """The bodies in memory, and which of them gives way when there are too many.

    The beginning of each body has room of its own: small requests are never refused because of large ones. Of
    large ones that are still coming, the oldest gives way, so a client that does not end its request cannot
    keep others out.

    Args:
        most: Largest total size, without these beginnings.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._large = 0
        """Total size of the bodies, without their beginnings."""
        self._coming: dict[_Coming, None] = {}

    def begin(self, cancel: Callable[[], object]) -> _Coming:
        """Begin to receive a body."""
        coming = _Coming(cancel)
        self._coming[coming] = None
        return coming

    def add(self, coming: _Coming, part: bytes) -> None:
        """Keep a part of a body, and let the oldest large one go if they are too many."""
        before = _beyond_beginning(coming.size)
        coming.parts.append(part)
        coming.size += len(part)
        self._large += _beyond_beginning(coming.size) - before
        while self._large > self._most:
            oldest = next(one for one in self._coming if _beyond_beginning(one.size))
            oldest.gives_way = True
            oldest.cancel()
            self.drop(oldest)

    def drop(self, coming: _Coming) -> None:
        """Forget a body that was not taken."""
        if coming in self._coming:
            del self._coming[coming]
            self._large -= _beyond_beginning(coming.size)
            coming.parts.clear()

    def take(self, coming: _Coming) -> bytes:
        """Return a body that is complete; it counts until it is released."""
        del self._coming[coming]
        return b"".join(coming.parts)

    def release(self, body: bytes) -> None:
        """Forget a body that was taken."""
        self._large -= _beyond_beginning(len(body))


def _beyond_beginning(size: int) -> int:
    """Return how much of a body does not count as its beginning."""
    return max(0, size - _BEGINNING_BYTES)


class _Parts:
    """The messages of a request, until the last one.

    Args:
        receive: Receives the next message.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.more = True
        """Whether part of the body is still to come."""

    async def next(self) -> bytes:
        """Return the next part of the body.

        Raises:
            HttpError: The client has left.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.more = False
            raise HttpError(408, "the client has left", close=True)
        self.more = message.get("more_body", False)
        return bytes(message.get("body", b""))


class Gate:
    """The outermost part of the application.

    Args:
        app: The routes.
        limits: Limits of requests.
        figures: Counts of requests.
        route_of: Returns the route of a path, for the counts: paths themselves may be anything.
        is_ending: Returns whether no further requests are taken: then connections end with their reply.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: GateLimits,
        figures: ServiceFigures,
        route_of: Callable[[str], str],
        is_ending: Callable[[], bool],
    ) -> None:
        self._app = app
        self._limits = limits
        self._figures = figures
        self._route_of = route_of
        self._is_ending = is_ending
        self._bodies = _Bodies(_BODIES * limits.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), 0
        body = b""
        head: list[Message] = []
        parts = _Parts(receive)

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._is_ending():
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
                head.append(message)  # sent with the body, to wait once instead of twice
                return
            # A client that does not read must not keep the task.
            with anyio.fail_after(self._limits.body_s):
                while head:
                    await send(head.pop())
                await send(message)

        try:
            try:
                _check_headers(scope)
                self._check_host(scope)
                self._check_key(scope)
                body = await self._read(scope, parts)
            except HttpError:
                await self._discard(scope, parts)
                raise
            began = time.perf_counter()
            await self._app(scope, _with_body(body, receive), sent)
        except asyncio.CancelledError:
            if status:
                raise
            # The server has ended, and has waited long enough for this request.
            error = HttpError(503, "the server has ended", retry_after_s=1, close=True)
            await error_reply(scope["path"], error)(scope, receive, sent)
        except Exception as error:
            if status:
                raise  # the reply has begun: the connection can only be closed
            await error_reply(scope["path"], status_of_error(error))(scope, receive, sent)
        finally:
            self._bodies.release(body)
            self._figures.answered(self._route_of(scope["path"]), status, time.perf_counter() - began)

    def _check_host(self, scope: Scope) -> None:
        if not self._limits.local_names_only:
            return
        names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        other = next((name for name in names if not _is_local_name(name)), None)
        if other is not None:
            line = (
                f"the host {excerpt(other)} is not this machine: ask 127.0.0.1 or localhost, or serve at an "
                "address (--serve ADDR:PORT), which answers to any name"
            )
            raise HttpError(403, line, close=True)

    def _check_key(self, scope: Scope) -> None:
        is_open = scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
        if is_open or not self._limits.keys:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        right = [hmac.compare_digest(key.strip(), each) for each in self._limits.keys]
        if scheme.lower() != b"bearer" or not any(right):
            raise HttpError(401, "the key is missing or wrong: send Authorization: Bearer KEY", close=True)

    async def _read(self, scope: Scope, parts: _Parts) -> bytes:
        """Return the whole body.

        Raises:
            HttpError: It is too large, comes too slowly, gives way to others, or does not come at all, as the
                client has left.
        """
        limit, longest_s = self._limits.max_body_bytes, self._limits.body_s
        told = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        too_large = HttpError(413, f"the request is larger than {limit:,} bytes (--max-body)", close=True)
        if not told.isdigit() or len(told) > _MOST_DIGITS or int(told) > limit:
            raise too_large
        began = anyio.current_time()
        coming: _Coming | None = None
        try:
            with anyio.fail_after(longest_s) as until:
                coming = self._bodies.begin(until.cancel)
                while parts.more and not coming.gives_way:
                    until.deadline = _due(began, coming.size, longest_s)
                    self._bodies.add(coming, await parts.next())
                    if coming.size > limit:
                        raise too_large
            if coming.gives_way:
                raise HttpError(429, "too many large requests at a time", retry_after_s=1, close=True)
            return self._bodies.take(coming)
        except TimeoutError:
            line = f"the request did not come within {longest_s:g} s"
            if until.deadline < began + longest_s:
                line = f"the request came more slowly than {_LEAST_BYTES_PER_S:,} bytes a second"
            parts.more = False  # nobody waits for the rest
            raise HttpError(408, line, close=True) from None
        finally:
            if coming is not None:
                self._bodies.drop(coming)

    async def _discard(self, scope: Scope, parts: _Parts) -> None:
        """Receive the rest of a refused request, without keeping it.

        Few clients read before they have sent all, and what nobody has received resets the connection, with
        the reply that was to say why.
        """
        if any(name == b"expect" for name, _ in scope["headers"]):
            return  # this one waits for the reply
        began, size = anyio.current_time(), 0
        most = _BODIES * self._limits.max_body_bytes
        with anyio.move_on_after(self._limits.body_s) as until, suppress(HttpError):
            while parts.more and size < most:
                until.deadline = _due(began, size, self._limits.body_s)
                size += len(await parts.next())


def _due(began: float, size: int, longest_s: float) -> float:
    """Return the time by which more of a body must have come, in seconds.

    Args:
        began: Time of its beginning.
        size: Number of bytes that have come.
        longest_s: Seconds that all of it may take.
    """
    return min(began + longest_s, began + _SLOW_START_S + size / _LEAST_BYTES_PER_S)


def _is_local_name(host: str) -> bool:
    """Return whether a Host header names this machine in a way that no name server decides."""
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    name = name.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _check_headers(scope: Scope) -> None:
    """Refuse more headers than a client needs, and bodies that are compressed.

    Raises:
        HttpError: There are too many, they are too long, or the body has an encoding.
    """
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    if len(scope["headers"]) > _MAX_HEADERS or size + len(scope["raw_path"]) > _MAX_HEADER_BYTES:
        line = f"the headers are more than {_MAX_HEADERS}, or longer than {_MAX_HEADER_BYTES:,} bytes"
        raise HttpError(431, line, close=True)
    encodings = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-encoding"]
    other = next((each for each in encodings if each.strip().lower() not in ("", "identity")), None)
    if other is not None:
        raise HttpError(415, f"content-encoding {excerpt(other)}: send the body as it is", close=True)


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives ``body``, and then what follows: that the client has left."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
