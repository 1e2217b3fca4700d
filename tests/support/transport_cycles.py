"""Cycles of a transport of any kind: open it, carry packets or abort it, close it, and open it again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from waiting import LIMIT_S

from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerError
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import (
    STORE_RANK,
    Endpoint,
    Link,
    Packet,
    Receiver,
    Rendezvous,
    Sender,
    Shipment,
    Transport,
)
from pipeedge.transport.p2p import P2PTransport
from pipeedge.transport.place import Place
from pipeedge.transport.rendezvous import StoreEndpoint

ADDR = "127.0.0.1"
SPECS = (TensorSpec((2, 3), torch.float32),)
MORE_THAN_FIT = 20
"""Packets, of which only some are taken by a link whose other end receives nothing."""


def in_thread(work: Callable[[], object]) -> Future[object]:
    """Run ``work`` in a daemon thread, and return the future of its result."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def listen_all(endpoints: Mapping[int, Endpoint]) -> dict[int, Place]:
    """Let all endpoints listen on this machine; return where, by rank."""
    places = {rank: endpoint.listen(ADDR) for rank, endpoint in endpoints.items()}
    return {rank: place for rank, place in places.items() if place is not None}


def open_all(
    transports: Sequence[Transport],
    places: Mapping[int, Place],
    members: tuple[int, ...],
    *,
    epoch: int = 1,
    token: bytes = b"a token of tests",
) -> None:
    """Open all transports at once; some kinds wait for the others."""
    rendezvous = Rendezvous(ADDR, members, places, LIMIT_S, epoch, token)
    for opened in [in_thread(lambda one=one: one.open(rendezvous)) for one in dict.fromkeys(transports)]:
        opened.result(LIMIT_S)


def send(sender: Sender, count: int) -> list[Shipment]:
    """Send ``count`` packets; whoever drops a shipment before its end also drops its receipt."""
    return [sender.post(Packet(number, 2, (torch.full((2, 3), float(number)),))) for number in range(count)]


def receive_all(receiver: Receiver) -> list[float]:
    """Return the first value of each packet until the end."""
    values = []
    while (packet := receiver.receive()) is not None:
        values.append(float(packet.payload[0][0, 0]))
        packet.lease.release()
    return values


def carry(sending: Transport, receiving: Transport, link: Link) -> None:
    """Carry a few packets to the end of the link."""
    receiver, sender = receiving.receiver(link), sending.sender(link)

    def feed() -> None:
        shipments = send(sender, 5)
        sender.finish()
        if link.receipts:
            assert all(shipment.receipt().apart_s >= 0 for shipment in shipments)

    fed, receipted, got = in_thread(feed), in_thread(receiver.run), in_thread(lambda: receive_all(receiver))
    assert got.result(LIMIT_S) == [0.0, 1.0, 2.0, 3.0, 4.0]
    for each in (fed, receipted):
        each.result(LIMIT_S)


def wake_receiver(sending: Transport, receiving: Transport, link: Link) -> None:
    """Abort while a thread waits for a packet that nobody sends."""
    receiver = receiving.receiver(link)
    _abort_while_waiting(receiver.receive, sending, receiving)


def wake_sender(sending: Transport, receiving: Transport, link: Link) -> None:
    """Abort while a thread waits for room, because nobody receives."""
    receiver, sender = receiving.receiver(link), sending.sender(link)
    _abort_while_waiting(lambda: send(sender, MORE_THAN_FIT), sending, receiving)
    del receiver


def _abort_while_waiting(wait: Callable[[], object], *transports: Transport) -> None:
    waiting = in_thread(wait)
    threading.Event().wait(0.05)  # the thread probably waits by now; what follows holds even if not
    for transport in dict.fromkeys(transports):
        transport.abort()
        transport.abort()  # the second time it does nothing
    assert isinstance(waiting.exception(LIMIT_S), Closed | PeerError)


def store_of(make: Callable[[Callable[[], None]], Transport]) -> dict[int, Endpoint]:
    """Return the endpoint of rank 0, which serves the store for gloo and RPC."""
    return {STORE_RANK: StoreEndpoint(STORE_RANK, ADDR, make)}


def gloo_store() -> dict[int, Endpoint]:
    """Return the endpoint of rank 0, where members of gloo groups meet."""
    return store_of(lambda end_store: P2PTransport(STORE_RANK, end_store))


def cycle(
    make: Callable[[], tuple[Mapping[int, Endpoint], Transport, Transport]], link: Link, times: int
) -> int:
    """Open, use and close the same transports ``times`` times, and return how often that went well.

    Args:
        make: Returns the endpoints that listen, and the transports of the sending and the receiving rank,
            which may be the same.
        link: The link between them.
        times: Number of cycles; they carry packets, are aborted, and are aborted again in turn.
    """
    endpoints, sending, receiving = make()
    uses = (carry, wake_receiver, wake_sender)
    for number in range(times):
        places, members = listen_all(endpoints), tuple(dict.fromkeys((link.source, link.destination)))
        open_all((sending, receiving), places, members, epoch=number + 1)
        uses[number % len(uses)](sending, receiving, link)
        for closed in [in_thread(one.close) for one in dict.fromkeys((sending, receiving))]:
            closed.result(LIMIT_S)
        for endpoint in endpoints.values():
            endpoint.close()
    return times
