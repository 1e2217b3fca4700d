"""The life of transports: open, abort from another thread, close, and open again, in one process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping

import psutil
import pytest
from transport_cycles import ADDR, SPECS, cycle, gloo_store, in_thread, listen_all, open_all
from waiting import LIMIT_S, until

from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerFailedError, PipeEdgeError
from pipeedge.request.config import TransportRequest
from pipeedge.transport.base import STORE_RANK, Endpoint, Link, Rendezvous, Transport
from pipeedge.transport.choice import make_endpoint
from pipeedge.transport.lifecycle import Lifecycle, TransportState
from pipeedge.transport.loopback import LoopbackTransport
from pipeedge.transport.p2p import P2PTransport
from pipeedge.transport.rpc import RpcTransport
from pipeedge.transport.tcp import TcpEndpoint, TcpTransport

CYCLES = 10
LINK = Link(3, 5, SPECS)


@pytest.fixture(autouse=True)
def links_stay_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


Made = tuple[Mapping[int, Endpoint], Transport, Transport]
Make = Callable[[], Made]


def one_in_memory() -> Made:
    """Return the transport in memory, which serves both ranks."""
    transport = LoopbackTransport()
    return {}, transport, transport


def two_over_gloo() -> Made:
    """Return two members of a gloo group."""
    return gloo_store(), P2PTransport(3), P2PTransport(5)


def two_over_tcp() -> Made:
    """Return two members of a group over plain sockets."""
    endpoints = {rank: TcpEndpoint(rank) for rank in (3, 5)}
    return endpoints, endpoints[3].transport(), endpoints[5].transport()


NETWORKED = [two_over_gloo, two_over_tcp]


@pytest.mark.parametrize("make", [one_in_memory, *NETWORKED])
def test_transport_is_opened_and_closed_ten_times(make: Make) -> None:
    assert cycle(make, LINK, CYCLES) == CYCLES


def test_a_hundred_cycles_over_tcp_leave_nothing_behind() -> None:
    """Neither threads nor sockets; other tests of this process may end some meanwhile."""
    process = psutil.Process()
    cycle(two_over_tcp, LINK, 3)
    threads, files = set(threading.enumerate()), process.num_fds()
    assert cycle(two_over_tcp, LINK, 100) == 100
    until(lambda: set(threading.enumerate()) <= threads, "all threads have ended")
    until(lambda: process.num_fds() <= files, "all files are closed")


@pytest.mark.parametrize("make", NETWORKED)
@pytest.mark.parametrize("receipts", [False, True])
def test_links_are_woken_with_and_without_receipts(receipts: bool, make: Make) -> None:
    assert cycle(make, Link(3, 5, SPECS, receipts), 3) == 3


def test_two_groups_are_open_side_by_side() -> None:
    """As when a new plan is prepared while the old one still runs."""
    endpoints, *older = two_over_tcp()
    newer = [endpoints[rank].transport() for rank in (3, 5)]
    places = listen_all(endpoints)
    open_all(older, places, (3, 5), epoch=1)
    open_all(newer, places, (5, 3), epoch=2)
    for sending, receiving in (older, newer):
        receiver, sender = receiving.receiver(LINK), sending.sender(LINK)
        finished = in_thread(sender.finish)
        assert receiver.receive() is None
        finished.result(LIMIT_S)
    for transport in (*older, *newer):
        transport.close()
    for endpoint in endpoints.values():
        endpoint.close()


# --- states -----------------------------------------------------------------------------------------


def test_lifecycle_goes_through_its_states() -> None:
    lifecycle = Lifecycle()
    assert lifecycle.state is TransportState.CLOSED
    assert not lifecycle.abort()
    with lifecycle.opening():
        assert lifecycle.state is TransportState.OPENING
    lifecycle.check_open()
    assert lifecycle.abort()
    assert not lifecycle.abort()
    with pytest.raises(Closed):
        lifecycle.check_open()
    assert lifecycle.close() is TransportState.ABORTED
    assert lifecycle.close() is TransportState.CLOSED


def test_open_that_fails_leaves_the_transport_closed() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(ValueError, match="no"), lifecycle.opening():
        raise ValueError("no")
    assert lifecycle.state is TransportState.CLOSED


def test_open_that_is_aborted_raises_and_waits_to_be_closed() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(Closed), lifecycle.opening():
        lifecycle.abort()
    assert lifecycle.close() is TransportState.ABORTED


@pytest.mark.parametrize(
    "transport", [LoopbackTransport(), P2PTransport(3), RpcTransport(3, 1), TcpEndpoint(3).transport()]
)
def test_links_need_an_open_transport(transport: Transport) -> None:
    for end in (transport.sender, transport.receiver):
        with pytest.raises(PipeEdgeError, match="the transport is closed: open it before its links"):
            end(LINK)
    transport.abort()
    transport.close()  # what is not open needs neither, and takes no harm


def test_transport_is_not_opened_twice() -> None:
    transport = LoopbackTransport()
    rendezvous = Rendezvous("", (3, 5), {}, 0.0)
    transport.open(rendezvous)
    with pytest.raises(PipeEdgeError, match="the transport is open: close it before it is opened"):
        transport.open(rendezvous)


def test_open_without_a_store_fails_and_can_be_repeated() -> None:
    endpoints, transport, _ = two_over_gloo()
    places = listen_all(endpoints)
    endpoints[STORE_RANK].close()
    with pytest.raises(PeerFailedError, match=r"no rendezvous at 127\.0\.0\.1"):
        transport.open(Rendezvous(ADDR, (3,), places, 1.0))
    with pytest.raises(PeerFailedError, match="rank 0 serves no store for this kind of links"):
        transport.open(Rendezvous(ADDR, (3,), {}, 1.0))
    open_all([transport], listen_all(endpoints), (3,))
    transport.close()
    endpoints[STORE_RANK].close()


@pytest.mark.parametrize(
    ("comm", "kind", "closes_together"),
    [("p2p", P2PTransport, False), ("rpc", RpcTransport, True), ("tcp", TcpTransport, False)],
)
def test_option_chooses_the_transport(comm: str, kind: type, closes_together: bool) -> None:
    transport = make_endpoint(TransportRequest(comm), 0, ADDR).transport()
    assert isinstance(transport, kind)
    assert transport.closes_together == closes_together


@pytest.mark.parametrize("comm", ["p2p", "rpc", "tcp"])
def test_only_who_must_be_found_listens(comm: str) -> None:
    """Over TCP every rank, otherwise rank 0 with the store, which ends when nobody needs it any longer."""
    for rank in (0, 3):
        endpoint = make_endpoint(TransportRequest(comm), rank, ADDR)
        place = endpoint.listen(ADDR)
        assert (place is not None) == (comm == "tcp" or rank == 0)
        endpoint.close()
        if place is not None:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((place.address, place.port))


@pytest.mark.parametrize(
    ("addresses", "warned"),
    [(["127.0.0.1"], None), (["127.0.0.1", "::1"], None), (["10.0.0.7", "fe80::1"], "10.0.0.7"), ([], None)],
)
def test_only_rpc_beyond_loopback_gives_a_warning(addresses: list[str], warned: str | None) -> None:
    line = RpcTransport(0, 1).exposure(addresses)
    assert (line is None) == (warned is None)
    assert line is None or f"-c rpc listens at {warned}:" in line
    assert TcpEndpoint(0).transport().exposure(addresses) is None
    assert P2PTransport(0).exposure(addresses) is None
    assert LoopbackTransport().exposure(addresses) is None
