"""Test TCP links whose data is recorded or changed on its way."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator

import pytest
import torch
from tampering import ADDR, Proxy, Tamper
from transport_cycles import LIMIT_S, in_thread, listen_all, open_all

from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet, Receiver
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.place import Place
from pipeedge.transport.tcp import TcpEndpoint, TcpTransport

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


SENT = [(PATTERN * 100)[number : number + 100_000] for number in range(6)]


@contextlib.contextmanager
def group_of(
    membership: Membership | None, *ranks: int, redirect: Callable[[dict[int, int]], dict[int, int]]
) -> Iterator[dict[int, TcpTransport]]:
    """Open transports of ``ranks``; abort and close them at the end.

    Args:
        membership: Key of the ranks, or None.
        ranks: The ranks.
        redirect: Returns the ports that rank 3 dials instead, of the ports at which the ranks listen.
    """
    endpoints = {rank: TcpEndpoint(rank, membership) for rank in ranks}
    transports = {rank: endpoint.transport() for rank, endpoint in endpoints.items()}
    places = listen_all(endpoints)
    ports = {rank: place.port for rank, place in places.items()}
    moved = {rank: Place(ADDR, port) for rank, port in redirect(ports).items()}
    for rank, transport in transports.items():
        open_all([transport], {**places, **moved} if rank == 3 else places, ranks)
    yield transports
    for transport in transports.values():
        transport.abort()
    for one in (*transports.values(), *endpoints.values()):
        one.close()


def feed(transport: TcpTransport, values: list[bytes]) -> None:
    """Send ``values`` over a new link."""
    sender = transport.sender(LINK)
    for number, value in enumerate(values):
        sender.post(Packet(number, 1, (torch.frombuffer(bytearray(value), dtype=torch.uint8),)))
    sender.finish()


def take(receiver: Receiver) -> tuple[list[bytes], PeerFailedError | None]:
    """Receive until the end; return the values that arrived, and why they ended early."""
    arrived: list[bytes] = []
    try:
        while (packet := in_thread(receiver.receive).result(LIMIT_S)) is not None:
            assert isinstance(packet, Packet)
            arrived.append(bytes(packet.payload[0].numpy()))
    except PeerFailedError as error:
        return arrived, error
    return arrived, None


def exchange(
    membership: Membership | None, tampers: dict[int, Tamper]
) -> tuple[list[bytes], bytes, PeerFailedError | None]:
    """Send frames through a proxy. Return those that arrived, what passed, and why it ended early."""
    proxies: list[Proxy] = []

    def through_proxy(ports: dict[int, int]) -> dict[int, int]:
        proxies.append(Proxy(ports[5], tampers, secured=membership is not None))
        return {5: proxies[0].port}

    with group_of(membership, 3, 5, redirect=through_proxy) as transports:
        fed = in_thread(lambda: feed(transports[3], SENT))
        arrived, error = take(transports[5].receiver(LINK))
        transports[3].abort()
        fed.exception(LIMIT_S)
    (proxy,) = proxies
    proxy.close()
    return arrived, proxy.recorded, error


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


# --- links that are swapped --------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True], ids=["clear", "TLS"])
def test_links_that_lead_to_each_others_ranks_are_refused(keyed: bool, membership: Membership) -> None:
    key = membership if keyed else None
    with group_of(key, 3, 5, 6, redirect=lambda ports: {5: ports[6], 6: ports[5]}) as transports:
        for rank in (5, 6):
            link = Link(3, rank, LINK.specs)
            with pytest.raises(
                PeerFailedError, match=f"rank {rank} refused the link from rank 3: it is another rank"
            ):
                transports[3].sender(link)


class Swap:
    """Exchanges what two connections carry, after their first pieces."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._crossing: tuple[queue.Queue[bytes], ...] = (queue.Queue(), queue.Queue())

    def __call__(self, side: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Pass on the pieces of one connection, and later those of the other."""
        for index, piece in enumerate(pieces):
            if index < self._after:
                yield piece
                continue
            self._crossing[1 - side].put(piece)
            try:
                yield self._crossing[side].get(timeout=LIMIT_S)
            except queue.Empty:
                return


def test_links_that_are_swapped_under_way_deliver_nothing_of_each_other(membership: Membership) -> None:
    """Both carry frames of the same numbers and sizes, which only their keys tell apart."""
    swap = Swap(HANDSHAKE_RECORDS + 10)
    first, second = SENT, [bytes(reversed(value)) for value in SENT]
    proxies: list[Proxy] = []

    def through_proxy(ports: dict[int, int]) -> dict[int, int]:
        tampers = {0: functools.partial(swap, 0), 2: functools.partial(swap, 1)}  # 1 and 3 carry replies
        proxies.append(Proxy(ports[5], tampers, secured=True))
        return {5: proxies[0].port}

    with group_of(membership, 3, 5, redirect=through_proxy) as transports:
        fed, receivers = [], []
        for values in (first, second):
            receivers.append(transports[5].receiver(LINK))
            fed.append(in_thread(lambda values=values: feed(transports[3], values)))
            receivers[-1].receive()  # the connections of this link are the next two of the proxy
        taken = [in_thread(lambda receiver=receiver: take(receiver)) for receiver in receivers]
        for values, each in zip((first, second), taken, strict=True):
            arrived, error = each.result(2 * LIMIT_S)
            assert arrived == values[1 : 1 + len(arrived)]
            assert len(arrived) < len(values) - 1
            assert isinstance(error, PeerFailedError)
            assert error.peer == 3
        transports[3].abort()
        for each in fed:
            each.exception(LIMIT_S)
    proxies[0].close()
