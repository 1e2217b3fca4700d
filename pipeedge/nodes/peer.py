"""Ask another node."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from pipeedge.base.errors import PeerFailedError
from pipeedge.control.messages import Message
from pipeedge.nodes.messages import (
    About,
    Blob,
    Get,
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

__all__ = ["CONNECT_S", "Peer", "call"]

KindT = TypeVar("KindT", bound=Message)

CONNECT_S = 3.0
"""Seconds within which a node must accept a connection and prove that it is a member."""
_ENOUGH_S = 0.1
_LEAST_BYTES, _MOST_BYTES = 256 << 10, 64 << 20
_ROUNDS = 3
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
        here = talk.ask(About(removals), Here, within_s)
        certified, serial = talk.peer_certificate()
        if serial and serial.lstrip("0") != here.serial.lstrip("0"):
            raise PeerFailedError(f"{talk.name} says that it is another node than its key says")
        name = certified if certified == here.name else here.name
        return Peer(name, address, here), talk.own_address


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


def names_of(peers: Sequence[Peer]) -> str:
    """Return the names of nodes for a sentence."""
    return ", ".join(peer.name for peer in peers)
