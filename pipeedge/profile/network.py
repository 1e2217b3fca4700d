"""Measure the bandwidth between this machine and another by plain TCP, or serve such measurements.

    profiler.py --serve-link   <── request: operation, bytes ──  profiler.py --measure-link HOST
                               <── bytes ─────────────────────     DISCARD: so many bytes follow
                               ── done ──────────────────────>
                               ── bytes ─────────────────────>     FILL: send so many bytes
                               <── byte ──> byte                   ECHO: round trips

Amounts grow until one takes half a second, and the result is the median of a few rounds, as for the doctor
(``plan.link_speed``), so that neither the start of a connection nor buffers affect it. The slower direction
counts, because the scheduler has only one number for a host.

A request is at most 1 GiB. Clients are served one at a time, for a minute at most; received bytes are
discarded. Clients are not authenticated: serve only while measuring, on a network that you trust, and stop
with Ctrl-C.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from pipeedge.base.errors import DeadlineError, PeerError, PeerFailedError, RequestError
from pipeedge.base.program import program_name
from pipeedge.base.wording import figure
from pipeedge.plan.link_speed import LEAST_ROUNDS, Trip, estimate_link, large_enough, measure_rounds
from pipeedge.plan.specs import BYTES_PER_SECOND_PER_MBPS
from pipeedge.transport.interfaces import listen, listen_everywhere

__all__ = ["DEFAULT_PORT", "MeasuredNetwork", "measure_link", "parse_place", "serve_link"]

DEFAULT_PORT = 29600
IDLE_S = 10.0
"""Neither end waits longer for the other."""
CLIENT_S = 60.0
"""A client is not served longer."""
ENOUGH_S = 0.5
"""An amount that takes this long is measured well."""

_DIRECTION_S = 10.0
"""No further round begins after this time on one direction."""
_LEAST_BYTES = 256 << 10
_MOST_BYTES = 1 << 30
_CHUNK = 1 << 20
_ROUND_TRIPS = 21
_MAGIC = b"PEBW1"
_REQUEST = struct.Struct("<5sBQ")
_DONE = b"D"


class _Operation(IntEnum):
    DISCARD = 1
    FILL = 2
    ECHO = 3


@dataclass(frozen=True)
class MeasuredNetwork:
    """A link, as this end sees it."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    round_trip_s: float

    @property
    def bw_bytes_per_s(self) -> float:
        """Bandwidth of the slower direction in bytes per second."""
        return min(self.out_bytes_per_s, self.in_bytes_per_s)

    def __str__(self) -> str:
        slower, out, back = (
            rate / BYTES_PER_SECOND_PER_MBPS
            for rate in (self.bw_bytes_per_s, self.out_bytes_per_s, self.in_bytes_per_s)
        )
        return (
            f"bandwidth {figure(slower)} Mbps of 2^20 bits ({figure(out)} out, {figure(back)} in), "
            "round trip "
            f"{figure(1e3 * self.round_trip_s, 3)} ms"
        )


def parse_place(text: str) -> tuple[str, int]:
    """``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        RequestError: It is none of those.
    """
    host, port = text, ""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not port:
        return host, DEFAULT_PORT
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise RequestError(f"{text}: {port} is not a port; use 1 to 65535")
    return host, int(port)


# --- the end that asks ------------------------------------------------------------------------------


def measure_link(host: str, port: int, clock: Callable[[], float] = time.perf_counter) -> MeasuredNetwork:
    """Measure the link to ``host``, where ``serve_link`` answers.

    Raises:
        RequestError: There is no such host.
        PeerFailedError: No measurement server answers there.
        DeadlineError: The server stopped answering.
    """
    place = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=IDLE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_trip_s = statistics.median(
                _timed(connection, _Operation.ECHO, 1, clock) for _ in range(_ROUND_TRIPS)
            )
            return MeasuredNetwork(
                out_bytes_per_s=_rate(connection, _Operation.DISCARD, clock),
                in_bytes_per_s=_rate(connection, _Operation.FILL, clock),
                round_trip_s=round_trip_s,
            )
    except socket.gaierror as error:
        raise RequestError(f"--measure-link {host}: cannot resolve this name ({error.strerror})") from error
    except TimeoutError as error:
        raise DeadlineError(f"--measure-link: {place} did not answer within {figure(IDLE_S)} s") from error
    except OSError as error:
        raise PeerFailedError(
            f"--measure-link: no measurement server at {place} ({error.strerror or error}); start "
            f"'{program_name('profiler.py')} --serve-link' there"
        ) from error


def _rate(connection: socket.socket, operation: _Operation, clock: Callable[[], float]) -> float:
    def trip(size: int) -> Trip:
        return Trip(size, _timed(connection, operation, size, clock))

    began = clock()
    size = large_enough(trip, _LEAST_BYTES, _MOST_BYTES, ENOUGH_S)
    rounds = measure_rounds(trip, size, LEAST_ROUNDS, lambda: clock() - began > _DIRECTION_S)
    return estimate_link(tuple(rounds)).link.bw_bytes_per_s


def _timed(
    connection: socket.socket, operation: _Operation, amount: int, clock: Callable[[], float]
) -> float:
    began = clock()
    connection.sendall(_REQUEST.pack(_MAGIC, operation, amount))
    if operation is _Operation.FILL:
        _discard(connection, amount)
    else:
        if operation is _Operation.DISCARD:
            _fill(connection, amount)
        if connection.recv(1) != _DONE:
            raise ConnectionResetError("another program answers, or the server ended")
    return clock() - began


# --- the end that answers ---------------------------------------------------------------------------


def serve_link(host: str, port: int, tell: Callable[[str], None]) -> NoReturn:
    """Answer ``measure_link``, one client after another, until interrupted.

    Args:
        host: An address of this machine; empty for all of them.
        port: Port to listen on.
        tell: Called with a line for the user.

    Raises:
        RequestError: The address is not this machine's, or the port is in use.
    """
    with _listener(host, port) as listener:
        shown = host or "all addresses"
        tell(f"measuring links at {shown}, port {listener.getsockname()[1]}; Ctrl-C ends it")
        while True:
            connection, address = listener.accept()
            with connection:
                tell(f"{address[0]}: {_serve(connection)}")


def _listener(host: str, port: int) -> socket.socket:
    return listen(host, port) if host else listen_everywhere(port, "--serve-link")


def _serve(connection: socket.socket, clock: Callable[[], float] = time.monotonic) -> str:
    """Serve one client and return its outcome."""
    ends = clock() + CLIENT_S
    served = 0
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(IDLE_S)
        while request := _receive(connection, _REQUEST.size):
            magic, operation, amount = _REQUEST.unpack(request)
            if magic != _MAGIC or operation not in list(_Operation) or amount > _MOST_BYTES:
                return "is not a profiler of this version; refused"
            if clock() > ends:
                return f"was served for {figure(CLIENT_S)} s, the most that a client gets"
            if operation == _Operation.FILL:
                _fill(connection, amount, until=ends, clock=clock)
            else:
                if operation == _Operation.DISCARD:
                    _discard(connection, amount, until=ends, clock=clock)
                connection.sendall(_DONE)
            served += amount
    except (OSError, PeerError) as error:
        return f"disconnected ({error})"
    return f"measured, {figure(round(served / 1e6))} MB moved"


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receive exactly ``size`` bytes, or none if the client has finished."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            if data:
                raise ConnectionResetError("it closed the connection in the middle of a request")
            return b""
        data += part
    return data


def _fill(
    connection: socket.socket,
    amount: int,
    until: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    zeros = memoryview(bytes(min(_CHUNK, amount)))
    while amount:
        _check(until, clock)
        part = zeros[:amount]
        connection.sendall(part)
        amount -= len(part)


def _discard(
    connection: socket.socket,
    amount: int,
    until: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    memory = memoryview(bytearray(min(_CHUNK, amount)))
    while amount:
        _check(until, clock)
        count = connection.recv_into(memory[:amount])
        if not count:
            raise ConnectionResetError("the connection closed before all bytes arrived")
        amount -= count


def _check(until: float, clock: Callable[[], float]) -> None:
    if clock() > until:
        raise DeadlineError(f"not done within {figure(CLIENT_S)} s")
