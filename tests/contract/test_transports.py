"""The life of transports: open, abort from another thread, close, and open again, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil
import pytest
from transport_cycles import SPECS, cycle, gloo_rendezvous, in_thread, open_all
from waiting import until

from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerFailedError, PipeEdgeError
from pipeedge.request.config import TransportRequest
from pipeedge.transport.base import Link, Rendezvous, RendezvousService, Transport
from pipeedge.transport.choice import make_rendezvous, make_transport
from pipeedge.transport.lifecycle import Lifecycle, TransportState
from pipeedge.transport.loopback import LoopbackTransport
from pipeedge.transport.p2p import P2PTransport
from pipeedge.transport.rendezvous import RendezvousServer
from pipeedge.transport.rpc import RpcTransport
from pipeedge.transport.tcp import TcpTransport
from pipeedge.transport.tcp_rendezvous import TcpRendezvousServer

CYCLES = 10
LIMIT_S = 30.0
LINK = Link(3, 5, SPECS)


@pytest.fixture(autouse=True)
def links_stay_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def one_in_memory() -> tuple[Transport, Transport]:
    """Return the transport in memory, which serves both ranks."""
    transport = LoopbackTransport()
    return transport, transport


def two_over_gloo() -> tuple[Transport, Transport]:
    """Return two members of a gloo group."""
    return P2PTransport(3), P2PTransport(5)


def two_over_tcp() -> tuple[Transport, Transport]:
    """Return two members of a group over plain sockets."""
    return TcpTransport(3), TcpTransport(5)


def tcp_rendezvous() -> RendezvousService:
    """Return the rendezvous of members over plain sockets."""
    return TcpRendezvousServer("127.0.0.1")


Make = Callable[[], tuple[Transport, Transport]]
Serve = Callable[[], RendezvousService]
NETWORKED = [(two_over_gloo, gloo_rendezvous), (two_over_tcp, tcp_rendezvous)]


@pytest.mark.parametrize(("make", "rendezvous"), [(one_in_memory, gloo_rendezvous), *NETWORKED])
def test_transport_is_opened_and_closed_ten_times(make: Make, rendezvous: Serve) -> None:
    assert cycle(make, LINK, CYCLES, rendezvous) == CYCLES


def test_a_hundred_cycles_over_tcp_leave_nothing_behind() -> None:
    """Neither threads nor sockets; other tests of this process may end some meanwhile."""
    process = psutil.Process()
    cycle(two_over_tcp, LINK, 3, tcp_rendezvous)
    threads, files = set(threading.enumerate()), process.num_fds()
    assert cycle(two_over_tcp, LINK, 100, tcp_rendezvous) == 100
    until(lambda: set(threading.enumerate()) <= threads, "all threads have ended")
    until(lambda: process.num_fds() <= files, "all files are closed")


@pytest.mark.parametrize(("make", "rendezvous"), NETWORKED)
@pytest.mark.parametrize("receipts", [False, True])
def test_links_are_woken_with_and_without_receipts(receipts: bool, make: Make, rendezvous: Serve) -> None:
    assert cycle(make, Link(3, 5, SPECS, receipts), 3, rendezvous) == 3


@pytest.mark.parametrize(("make", "rendezvous"), NETWORKED)
def test_two_groups_are_open_side_by_side(make: Make, rendezvous: Serve) -> None:
    """As when a new plan is prepared while the old one still runs."""
    older, newer = make(), make()
    servers = [rendezvous() for _ in range(2)]
    open_all(older, servers[0], (3, 5))
    open_all(newer, servers[1], (5, 3))
    for sending, receiving in (older, newer):
        receiver, sender = receiving.receiver(LINK), sending.sender(LINK)
        finished = in_thread(sender.finish)
        assert receiver.receive() is None
        finished.result(LIMIT_S)
    for transport in (*older, *newer):
        transport.close()
    for server in servers:
        server.close()


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
    "transport", [LoopbackTransport(), P2PTransport(3), RpcTransport(3, 1), TcpTransport(3)]
)
def test_links_need_an_open_transport(transport: Transport) -> None:
    for end in (transport.sender, transport.receiver):
        with pytest.raises(PipeEdgeError, match="the transport is closed: open it before its links"):
            end(LINK)
    transport.abort()
    transport.close()  # what is not open needs neither, and takes no harm


def test_transport_is_not_opened_twice() -> None:
    transport = LoopbackTransport()
    rendezvous = Rendezvous("", 0, (3, 5), 0.0)
    transport.open(rendezvous)
    with pytest.raises(PipeEdgeError, match="the transport is open: close it before it is opened"):
        transport.open(rendezvous)


@pytest.mark.parametrize(
    ("transport", "rendezvous"), [(P2PTransport(3), gloo_rendezvous), (TcpTransport(3), tcp_rendezvous)]
)
def test_open_without_a_rendezvous_fails_and_can_be_repeated(transport: Transport, rendezvous: Serve) -> None:
    server = rendezvous()
    port = server.serve((3,))
    server.close()
    with pytest.raises(PeerFailedError, match=r"no rendezvous at 127\.0\.0\.1"):
        transport.open(Rendezvous("127.0.0.1", port, (3,), 1.0))
    open_all([transport], server, (3,))
    transport.close()
    server.close()


def test_option_chooses_the_transport() -> None:
    p2p, rpc, tcp = (make_transport(TransportRequest(comm), 0) for comm in ("p2p", "rpc", "tcp"))
    assert (p2p.keeps_rendezvous, p2p.closes_together) == (False, False)
    assert (rpc.keeps_rendezvous, rpc.closes_together) == (True, True)
    assert isinstance(p2p, P2PTransport)
    assert (tcp.keeps_rendezvous, tcp.closes_together) == (False, False)
    assert isinstance(rpc, RpcTransport)
    assert isinstance(tcp, TcpTransport)
    assert isinstance(make_rendezvous(TransportRequest("tcp"), "127.0.0.1"), TcpRendezvousServer)
    assert isinstance(make_rendezvous(TransportRequest("rpc"), "127.0.0.1"), RendezvousServer)


@pytest.mark.parametrize(
    ("addresses", "warned"),
    [(["127.0.0.1"], None), (["127.0.0.1", "::1"], None), (["10.0.0.7", "fe80::1"], "10.0.0.7"), ([], None)],
)
def test_only_rpc_beyond_loopback_gives_a_warning(addresses: list[str], warned: str | None) -> None:
    line = RpcTransport(0, 1).exposure(addresses)
    assert (line is None) == (warned is None)
    assert line is None or f"-c rpc listens at {warned}:" in line
    assert TcpTransport(0).exposure(addresses) is None
    assert P2PTransport(0).exposure(addresses) is None
    assert LoopbackTransport().exposure(addresses) is None
