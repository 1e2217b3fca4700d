"""The gate in front of all routes: who may ask, how large requests are, and how long they may take to come.

    connection ──limits of server.py──> headers ──key?──> body, whole, within bytes and seconds ──> routes

A body is read before anything looks at it, so routes never wait for a slow client. All bodies together are
bounded too. Every request is counted, and every failure becomes a reply.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeedge.base.errors import RequestError
from pipeedge.base.wording import printable
from pipeedge.serve.description import OPEN_PATHS
from pipeedge.serve.figures import ServiceFigures
from pipeedge.serve.replies import HttpError, error_reply, status_of_error

__all__ = ["Gate", "GateLimits", "read_keys"]

_MAX_HEADERS = 100
_MAX_HEADER_BYTES = 16 << 10
_BODIES = 8
"""Largest total size of the bodies in memory, as a multiple of the largest body."""
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


class Gate:
    """The outermost part of the application.

    Args:
        app: The routes.
        limits: Limits of requests.
        figures: Counts of requests.
        route_of: Returns the route of a path, for the counts: paths themselves may be anything.
    """

    def __init__(
        self, app: ASGIApp, limits: GateLimits, figures: ServiceFigures, route_of: Callable[[str], str]
    ) -> None:
        self._app = app
        self._limits = limits
        self._figures = figures
        self._route_of = route_of
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), 0
        body = b""
        head: list[Message] = []

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                head.append(message)  # sent with the body, to wait once instead of twice
                return
            # A client that does not read must not keep the task.
            with anyio.fail_after(self._limits.body_s):
                while head:
                    await send(head.pop())
                await send(message)

        try:
            _check_headers(scope)
            self._check_key(scope)
            body = await self._read(scope, receive)
            began = time.perf_counter()
            await self._app(scope, _with_body(body, receive), sent)
        except Exception as error:
            if status:
                raise  # the reply has begun: the connection can only be closed
            await error_reply(scope["path"], status_of_error(error))(scope, receive, sent)
        finally:
            self._held -= len(body)
            self._figures.answered(self._route_of(scope["path"]), status, time.perf_counter() - began)

    def _check_key(self, scope: Scope) -> None:
        is_open = scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
        if is_open or not self._limits.keys:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        right = [hmac.compare_digest(key.strip(), each) for each in self._limits.keys]
        if scheme.lower() != b"bearer" or not any(right):
            raise HttpError(401, "the key is missing or wrong: send Authorization: Bearer KEY", close=True)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body.

        Raises:
            HttpError: It is too large, comes too slowly, or not at all, as the client has left.
        """
        limit = self._limits.max_body_bytes
        told = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        parts: list[bytes] = []
        size, began = 0, anyio.current_time()
        try:
            with anyio.fail_after(self._limits.body_s) as until:
                while True:
                    enough_until = began + _SLOW_START_S + size / _LEAST_BYTES_PER_S
                    until.deadline = min(began + self._limits.body_s, enough_until)
                    if size > limit or (told.isdigit() and int(told) > limit):
                        raise await self._too_large(receive)
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HttpError(408, "the client has left", close=True)
                    part = message.get("body", b"")
                    self._held += len(part)
                    size += len(part)
                    parts.append(part)
                    if self._held > _BODIES * limit:
                        line = "too many large requests at a time"
                        raise HttpError(429, line, retry_after_s=1, close=True)
                    if not message.get("more_body", False) and size <= limit:
                        return b"".join(parts)
        except TimeoutError:
            self._held -= size
            line = f"the request did not come within {self._limits.body_s:g} s"
            if until.deadline < began + self._limits.body_s:
                line = f"the request came more slowly than {_LEAST_BYTES_PER_S:,} bytes a second"
            raise HttpError(408, line, close=True) from None
        except BaseException:
            self._held -= size
            raise

    async def _too_large(self, receive: Receive) -> HttpError:
        """Return the refusal of a body, once some more of it has come: few clients read while they send."""
        limit = self._limits.max_body_bytes
        size, more = 0, True
        while more and size < _BODIES * limit:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        return HttpError(413, f"the request is larger than {limit:,} bytes (--max-body)", close=True)


def _check_headers(scope: Scope) -> None:
    """Refuse more headers than a client needs.

    Raises:
        HttpError: There are too many, or they are too long.
    """
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    if len(scope["headers"]) > _MAX_HEADERS or size + len(scope["raw_path"]) > _MAX_HEADER_BYTES:
        line = f"the headers are more than {_MAX_HEADERS}, or longer than {_MAX_HEADER_BYTES:,} bytes"
        raise HttpError(431, line, close=True)


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
