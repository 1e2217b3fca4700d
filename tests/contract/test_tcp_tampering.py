"""Test TCP links whose data is recorded or changed on its way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from tampering import ADDR, Proxy, Tamper
from transport_cycles import LIMIT_S, in_thread, open_all

from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.tcp import TcpTransport
from pipeedge.transport.tcp_hello import GroupRoster, Place
from pipeedge.transport.tcp_rendezvous import TcpRendezvousServer

PATTERN = bytes(range(7, 247)) * 5
"""Values that appear in no handshake by chance."""
LINK = Link(3, 5, (TensorSpec((100_000,), torch.uint8),))
FRAMES = 0
"""Number of the first connection of a link, which carries frames."""
HANDSHAKE_RECORDS = 8
"""More records than a handshake takes; frames follow, in records of 16 KiB."""


@pytest.fixture(scope="module")
def membership() -> Membership:
    return Membership.from_text(make_key(), "a key for tests")


def exchange(
    membership: Membership | None, tampers: dict[int, Tamper]
) -> tuple[list[bytes], bytes, Exception | None]:
    """Send frames through a proxy. Return those that arrived, what passed, and why it ended early."""
    transports = TcpTransport(3, membership), TcpTransport(5, membership)
    server = TcpRendezvousServer(ADDR, membership)
    open_all(transports, server, (3, 5))
    server.close()
    group = transports[0]._group
    assert group is not None
    assert group._roster is not None
    proxy = Proxy(group._roster.places[5].port, tampers, secured=membership is not None)
    group._roster = GroupRoster(group._roster.token, {5: Place(ADDR, proxy.port)})

    def feed() -> None:
        sender = transports[0].sender(LINK)
        for number in range(6):
            values = (PATTERN * 100)[number : number + 100_000]
            sender.post(Packet(number, 1, (torch.frombuffer(bytearray(values), dtype=torch.uint8),)))
        sender.finish()

    arrived: list[bytes] = []
    fed = in_thread(feed)
    receiver = transports[1].receiver(LINK)
    error: Exception | None = None
    try:
        while (packet := in_thread(receiver.receive).result(LIMIT_S)) is not None:
            assert isinstance(packet, Packet)
            arrived.append(bytes(packet.payload[0].numpy()))
    except PeerFailedError as failure:
        error = failure
    for transport in transports:
        transport.abort()
    fed.exception(LIMIT_S)
    for transport in transports:
        transport.close()
    proxy.close()
    return arrived, proxy.recorded, error


SENT = [(PATTERN * 100)[number : number + 100_000] for number in range(6)]


def test_a_capture_of_clear_links_holds_the_values(membership: Membership) -> None:
    arrived, recorded, error = exchange(None, {})
    assert (arrived, error) == (SENT, None)
    assert PATTERN in recorded


def test_a_capture_of_secured_links_holds_none_of_them(membership: Membership) -> None:
    arrived, recorded, error = exchange(membership, {})
    assert (arrived, error) == (SENT, None)
    assert len(recorded) > sum(map(len, SENT))
    assert PATTERN[:16] not in recorded
    assert b"PEDG" not in recorded
    assert b"PELK" not in recorded


def flip(number: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Flip a bit in the middle of a piece."""
    for index, piece in enumerate(pieces):
        middle = len(piece) // 2
        yield piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :] if index == number else piece


def drop(number: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Leave out a piece."""
    yield from (piece for index, piece in enumerate(pieces) if index != number)


def repeat(number: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pass a piece on twice."""
    for index, piece in enumerate(pieces):
        yield piece * 2 if index == number else piece


def swap(number: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Exchange a piece and the next."""
    for index, piece in enumerate(pieces):
        yield next(pieces, b"") + piece if index == number else piece


def cut(number: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """End the connection before a piece."""
    for index, piece in enumerate(pieces):
        if index == number:
            return
        yield piece


@pytest.mark.parametrize("damage", [flip, drop, repeat, swap, cut])
@pytest.mark.parametrize("at", [0, 10, 23])
def test_a_damaged_record_ends_a_secured_link_and_changes_no_value(
    damage: Callable[[int, Iterator[bytes]], Iterator[bytes]], at: int, membership: Membership
) -> None:
    tamper = functools.partial(damage, HANDSHAKE_RECORDS + at)
    arrived, _, error = exchange(membership, {FRAMES: tamper})
    assert arrived == SENT[: len(arrived)]
    assert len(arrived) < len(SENT)
    assert isinstance(error, PeerFailedError)
    assert error.peer == 3


def test_a_clear_link_that_is_cut_names_the_other_end() -> None:
    arrived, _, error = exchange(None, {FRAMES: functools.partial(cut, 3)})
    assert arrived == SENT[: len(arrived)]
    assert isinstance(error, PeerFailedError)
    assert error.peer == 3
