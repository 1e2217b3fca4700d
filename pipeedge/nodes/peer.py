"""Ask another node."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from pipeedge.base.errors import DeadlineError, PeerFailedError
from pipeedge.control.messages import Message
from pipeedge.nodes.messages import (
    About,
    Blob,
    Get,
    GetRanges,
    Granted,
    Here,
    Hold,
    Measure,
    News,
    Profile,
    Profiled,
)
from pipeedge.nodes.talk import CHUNK, HELLO, Talk
from pipeedge.plan.link_speed import Trip, estimate_link, large_enough, measure_rounds
from pipeedge.plan.specs import NeighborLink
from pipeedge.transport.dialling import NotAMemberError, dial
from pipeedge.transport.membership import Membership
from pipeedge.transport.sealed import SealedSocket
from pipeedge.transport.wires import Connections

__all__ = ["CONNECT_S", "Acquaintances", "Peer", "call"]

KindT = TypeVar("KindT", bound=Message)

CONNECT_S = 3.0
"""Seconds within which a node must accept a connection and prove that it is a member."""
_ENOUGH_S = 0.1
_LEAST_BYTES, _MOST_BYTES = 256 << 10, 64 << 20
_ROUNDS = 3
_PART_S = 60.0
"""Seconds within which the next part of a file must come."""
_LONGEST_MEASURE_S = 4.0


@lru_cache(maxsize=4)
def _client_context(membership: Membership) -> ssl.SSLContext:
    """Return the settings of TLS; making them takes as long as a handshake."""
    return membership.client_context()


def call(
    address: tuple[str, int], membership: Membership, *, name: str = "", within_s: float = CONNECT_S
) -> Talk:
    """Connect to the node at an address, which must be of this cluster.

    Args:
        address: Host and port.
        membership: Membership of this end.
        name: Name of the node for messages; its address if empty.
        within_s: Seconds within which it must answer.

    Raises:
        PeerFailedError: Nobody answers there, or it is no node of this cluster.
    """
    shown = name or f"{address[0]}:{address[1]}"
    deadline = time.monotonic() + within_s
    try:
        context = _client_context(membership)
        stream = dial(address, Connections(), context=context, deadline=deadline, connect_s=within_s)
        if not isinstance(stream, SealedSocket):
            raise PeerFailedError(f"{shown} does not encrypt")
        stream.sendall(HELLO)
        return Talk(stream, shown, asks=True)
    except NotAMemberError as error:
        raise NotAMemberError(f"{shown} {error}") from error
    except OSError as error:
        raise PeerFailedError(f"{shown} is not there ({error.strerror or error})") from error


@dataclass(frozen=True)
class Peer:
    """Another node."""

    name: str
    address: tuple[str, int]
    here: Here
    """What it said of itself."""

    def call(self, membership: Membership, within_s: float = CONNECT_S) -> Talk:
        """Connect to it. Raises as ``call`` does."""
        return call(self.address, membership, name=self.name, within_s=within_s)


def ask_about(
    address: tuple[str, int], membership: Membership, removals: int = 0, within_s: float = CONNECT_S
) -> tuple[Peer, str]:
    """Ask the node at an address what it is; return it, and the address of this machine on the way there.

    Args:
        address: Host and port.
        membership: Membership of this end.
        removals: Number of the newest list of removed nodes here.
        within_s: Seconds within which it must answer.

    Raises:
        PeerFailedError: Nobody answers there, or it is no node of this cluster.
    """
    with call(address, membership, within_s=within_s) as talk:
        return _about(talk, address, removals, within_s), talk.own_address


def _about(talk: Talk, address: tuple[str, int], removals: int, within_s: float) -> Peer:
    """Ask what a node is. Raises PeerFailedError."""
    here: Here = talk.ask(About(removals), Here, within_s)
    certified, serial = talk.peer_certificate()
    if serial and serial.lstrip("0") != here.serial.lstrip("0"):
        raise PeerFailedError(f"{talk.name} says that it is another node than its key says")
    return Peer(certified if certified == here.name else here.name, address, here)


class Acquaintances:
    """Asks nodes again and again what they are, over connections that stay: a handshake costs milliseconds.

    Any thread may ask.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], tuple[Membership, Talk]] = {}

    def ask(
        self, address: tuple[str, int], membership: Membership, removals: int, within_s: float
    ) -> tuple[Peer, str]:
        """Return what ``ask_about`` does, with its arguments and errors."""
        with self._lock:
            known, talk = self._idle.pop(address, (None, None))
        if talk is not None:
            if known == membership:
                try:
                    return self._asked(talk, address, membership, removals, within_s)
                except DeadlineError:
                    raise
                except PeerFailedError:
                    pass  # it was started again, or another node has its address now
            else:
                talk.close()
        talk = call(address, membership, within_s=within_s)
        return self._asked(talk, address, membership, removals, within_s)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for _, talk in idle.values():
            talk.close()

    def _asked(
        self,
        talk: Talk,
        address: tuple[str, int],
        membership: Membership,
        removals: int,
        within_s: float,
    ) -> tuple[Peer, str]:
        try:
            peer, own_end = _about(talk, address, removals, within_s), talk.own_address
        except BaseException:
            talk.close()
            raise
        with self._lock:
            if address not in self._idle:
                self._idle[address] = membership, talk
                return peer, own_end
        talk.close()
        return peer, own_end


def measure_link(
    peer: Peer, membership: Membership, clock: Callable[[], float] = time.perf_counter
) -> NeighborLink:
    """Measure the link to a node.

    Raises:
        PeerFailedError: The node is lost.
    """
    with peer.call(membership) as talk:
        zeros = memoryview(bytes(CHUNK))

        def trip(size: int) -> Trip:
            began = clock()
            talk.send(Measure(size))
            talk.send_bytes(zeros[: min(CHUNK, size - place)] for place in range(0, size, CHUNK))
            talk.expect(Granted)
            return Trip(size, clock() - began)

        began = clock()
        size = large_enough(trip, _LEAST_BYTES, _MOST_BYTES, _ENOUGH_S)
        rounds = measure_rounds(trip, size, _ROUNDS, lambda: clock() - began > _LONGEST_MEASURE_S)
        return estimate_link(tuple(rounds)).link


def have_hold(peer: Peer, membership: Membership, request: Hold, tell: Callable[[News], None]) -> None:
    """Let a node fetch the files of a model from here.

    Raises:
        PeerFailedError: The node is lost, or could not fetch them.
    """
    with peer.call(membership) as talk:
        talk.send(request)
        _until(talk, Granted, tell)


def have_profile(
    peer: Peer, membership: Membership, request: Profile, tell: Callable[[News], None]
) -> Profiled:
    """Let a node measure the layers of a model, and return what it has measured.

    Raises:
        PeerFailedError: The node is lost, or could not measure.
    """
    with peer.call(membership) as talk:
        talk.send(request)
        return _until(talk, Profiled, tell)


def get_file(talk: Talk, sha256: str) -> Iterator[memoryview]:
    """Yield the contents of a file that the other end has offered.

    Raises:
        PeerFailedError: The other end is lost, or has no such file.
    """
    blob: Blob = talk.ask(Get(sha256, 0), Blob)
    yield from talk.receive_bytes(blob.size)


def get_ranges(talk: Talk, sha256: str, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Yield parts of a file that the other end has.

    Raises:
        PeerFailedError: The other end is lost, or does not have them.
    """
    talk.send(GetRanges(sha256, list(ranges)))
    for start, stop in ranges:
        blob: Blob = talk.expect(Blob, _PART_S)
        if blob.size != stop - start:
            raise PeerFailedError(f"{talk.name} has another file under that digest")
        yield b"".join(map(bytes, talk.receive_bytes(blob.size)))


def _until(talk: Talk, kind: type[KindT], tell: Callable[[News], None]) -> KindT:
    """Return the first message of a kind, and pass on the progress before it."""
    while True:
        message: Message = talk.receive()
        if isinstance(message, kind):
            return message
        if not isinstance(message, News):
            raise PeerFailedError(f"{talk.name} answered with {message.kind} out of turn")
        tell(message)


def follow(talk: Talk, request: Message, kind: type[KindT], tell: Callable[[News], None]) -> KindT:
    """Send a long request, pass on its progress, and return its answer, of a ``kind``.

    Raises:
        PeerFailedError: The node is lost, or has refused the request.
    """
    talk.send(request)
    return _until(talk, kind, tell)
