"""Test links over TCP on the loopback: what peers and strangers do to them, and what they may cost."""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from mutations import mutate_bytes, rounds
from transport_cycles import ADDR, SPECS, in_thread, listen_all, open_all, receive_all, send
from waiting import LIMIT_S, until

from pipeedge.base.backpressure import LINK_WINDOW
from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import TensorSpec
from pipeedge.control.hub import Hub
from pipeedge.transport.base import Link, Packet, Rendezvous
from pipeedge.transport.dialling import dial
from pipeedge.transport.frame import HEADER_BYTES, FrameError, Kind, write_frame
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.place import Place
from pipeedge.transport.reception import MAX_CALLERS, Reception
from pipeedge.transport.sealed import Stream, socket_of
from pipeedge.transport.tcp import TcpEndpoint, TcpTransport
from pipeedge.transport.tcp_hello import (
    ANSWER_BYTES,
    LINK_HELLO_BYTES,
    Answer,
    LinkHello,
    Purpose,
    pack_answer,
    read_answer,
)
from pipeedge.transport.wires import Connections, TcpWire

LINK = Link(3, 5, SPECS)
BIG = Link(3, 5, (TensorSpec((4 << 20,), torch.uint8),))
"""A link whose frames do not fit into the kernel's buffers."""
TRANSPORT_THREADS = {"reception", "reading", "sending"}


@pytest.fixture(scope="module")
def key() -> Membership:
    """A key of these tests."""
    return Membership.from_text(make_key(), "a key for tests")


@pytest.fixture(params=["clear", "TLS"])
def pair(request: pytest.FixtureRequest, key: Membership) -> Iterator[tuple[TcpTransport, TcpTransport]]:
    """Two open transports, of ranks 3 and 5."""
    membership = key if request.param == "TLS" else None
    earlier = set(threading.enumerate())  # of other tests
    endpoints = {rank: TcpEndpoint(rank, membership) for rank in (3, 5)}
    transports = endpoints[3].transport(), endpoints[5].transport()
    open_all(transports, listen_all(endpoints), (3, 5))
    yield transports
    for transport in transports:
        transport.close()
    for endpoint in endpoints.values():
        endpoint.close()

    def threads() -> set[str]:
        return TRANSPORT_THREADS & {thread.name for thread in set(threading.enumerate()) - earlier}

    # Nobody waits for the thread of a link that has received its last packet.
    until(lambda: not threads(), "its threads have ended")


Pair = tuple[TcpTransport, TcpTransport]


# --- packets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_read_ahead", [True, False])
def test_frames_larger_than_the_kernels_buffers_arrive_in_order(pair: Pair, is_read_ahead: bool) -> None:
    link = replace(BIG, is_read_ahead=is_read_ahead)
    sender, receiver = pair[0].sender(link), pair[1].receiver(link)
    assert ("reading" in {thread.name for thread in threading.enumerate()}) == is_read_ahead

    def feed() -> None:
        for number in range(12):
            sender.post(Packet(number, 1, (torch.full((4 << 20,), number, dtype=torch.uint8),)))
        sender.finish()

    fed = in_thread(feed)
    for number in range(12):
        packet = receiver.receive()
        assert packet is not None
        assert packet.number == number
        assert torch.equal(packet.payload[0], torch.full((4 << 20,), number, dtype=torch.uint8))
        packet.lease.release()
    assert receiver.receive() is None
    fed.result(LIMIT_S)


@pytest.mark.parametrize("end", ["sending", "receiving"])
def test_an_interrupted_end_can_be_closed(pair: Pair, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in the profiler, whose main thread sends and receives."""

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    link = replace(LINK, is_read_ahead=False)
    sender, receiver = pair[0].sender(link), pair[1].receiver(link)
    send(sender, LINK_WINDOW)
    monkeypatch.setattr(TcpWire, "receive_some" if end == "sending" else "receive", interrupted)
    waits: Callable[[], object] = receiver.receive if end == "receiving" else partial(sender.reserve, SPECS)
    with pytest.raises(KeyboardInterrupt):
        waits()
    for transport in pair:
        in_thread(transport.close).result(LIMIT_S)


def test_an_end_can_be_closed_while_its_last_frame_arrives(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage has all bytes of the frame, and another thread closes before it says so."""
    arrived, go_on = threading.Event(), threading.Event()
    receive = TcpWire.receive

    def slow(wire: TcpWire, into: memoryview) -> None:
        receive(wire, into)
        if len(into) != HEADER_BYTES:
            arrived.set()
            go_on.wait(LIMIT_S)

    link = replace(LINK, is_read_ahead=False)
    sender, receiver = pair[0].sender(link), pair[1].receiver(link)
    monkeypatch.setattr(TcpWire, "receive", slow)
    send(sender, 1)
    received = in_thread(receiver.receive)
    assert arrived.wait(LIMIT_S)
    closed = in_thread(pair[1].close)
    time.sleep(0.1)  # it waits for the stage by now, or nothing is tested
    go_on.set()
    closed.result(LIMIT_S)
    with contextlib.suppress(Closed, PeerFailedError):
        received.result(LIMIT_S)


def test_a_packet_is_forwarded_from_the_memory_that_received_it(pair: Pair) -> None:
    back = Link(5, 3, SPECS)
    to, at = pair[0].sender(LINK), pair[1].receiver(LINK)
    away, home = pair[1].sender(back), pair[0].receiver(back)
    used = set()
    for number in range(20):
        to.post(Packet(number, 2, (torch.full((2, 3), float(number)),)))
        packet = at.receive()
        assert packet is not None
        used.add(packet.payload[0].data_ptr())
        away.post(packet)
        returned = home.receive()
        assert returned is not None
        assert returned.payload[0].tolist() == [[float(number)] * 3] * 2
        returned.lease.release()
    assert len(used) <= LINK_WINDOW + 1  # each is given back when it has been sent


def test_a_reserved_payload_is_sent_from_where_it_was_computed(pair: Pair) -> None:
    sender, receiver = pair[0].sender(LINK), pair[1].receiver(LINK)
    for number in range(5):
        reserved = sender.reserve(SPECS)
        reserved.payload[0].fill_(number)
        sender.post(Packet(number, 2, reserved.payload, reserved.lease))
        packet = receiver.receive()
        assert packet is not None
        assert packet.payload[0].tolist() == [[float(number)] * 3] * 2
        packet.lease.release()


def test_a_sender_is_never_further_ahead_than_its_window(pair: Pair) -> None:
    sender, receiver = pair[0].sender(LINK), pair[1].receiver(LINK)
    posted = threading.Semaphore(0)

    def feed() -> None:
        for number in range(3 * LINK_WINDOW):
            sender.post(Packet(number, 2, (torch.ones(2, 3),)))
            posted.release()

    fed = in_thread(feed)
    for _ in range(LINK_WINDOW):
        assert posted.acquire(timeout=LIMIT_S)
    for number in range(2 * LINK_WINDOW):
        assert not posted.acquire(timeout=0.01)  # the receiver has taken none that is not answered by one
        packet = receiver.receive()
        assert packet is not None
        assert packet.number == number
        assert posted.acquire(timeout=LIMIT_S)
    assert fed.result(LIMIT_S) is None


def test_links_between_the_same_ranks_can_follow_one_another(pair: Pair) -> None:
    for _ in range(5):
        sender, receiver = pair[0].sender(LINK), pair[1].receiver(LINK)
        fed = in_thread(lambda sender=sender: (send(sender, 3), sender.finish()))
        assert receive_all(receiver) == [0.0, 1.0, 2.0]
        fed.result(LIMIT_S)


def test_a_receipt_covers_the_time_on_the_link_and_not_the_wait_for_the_stage(pair: Pair) -> None:
    link = Link(3, 5, SPECS, receipts=True)
    receiver, sender = pair[1].receiver(link), pair[0].sender(link)
    running = in_thread(receiver.run)
    shipments = send(sender, LINK_WINDOW)  # nobody receives, but all arrive
    assert all(shipment.receipt().apart_s >= 0 for shipment in shipments)
    fed = in_thread(sender.finish)
    assert receive_all(receiver) == [float(number) for number in range(LINK_WINDOW)]
    fed.result(LIMIT_S)
    running.result(LIMIT_S)


# --- peers that fail --------------------------------------------------------------------------------


def test_a_peer_that_leaves_is_named_to_whoever_waits_for_it(pair: Pair) -> None:
    sender, receiver = pair[0].sender(LINK), pair[1].receiver(LINK)
    waiting = in_thread(receiver.receive)
    pair[0].abort()
    error = waiting.exception(LIMIT_S)
    assert isinstance(error, PeerFailedError)
    assert str(error).startswith("the connection to rank 3 was lost while receiving: ")
    assert error.peer == 3
    with pytest.raises(Closed):
        send(sender, 1)


def test_a_sender_whose_peer_has_left_names_it(pair: Pair) -> None:
    receiver, sender = pair[1].receiver(LINK), pair[0].sender(LINK)
    waiting = in_thread(lambda: send(sender, 2 * LINK_WINDOW))
    assert receiver.receive() is not None
    pair[1].abort()
    error = waiting.exception(LIMIT_S)
    assert isinstance(error, PeerFailedError)
    assert error.peer == 5


def test_a_rank_that_is_gone_is_named_when_its_link_is_opened(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(
        PeerFailedError, match="rank 5 refused the link from rank 3: it takes no part"
    ) as left:
        pair[0].sender(LINK)
    pair[1]._endpoint.close()
    with pytest.raises(PeerFailedError, match=r"the link to rank 5 at 127\.0\.0\.1 does not open") as gone:
        pair[0].sender(LINK)
    assert left.value.peer == gone.value.peer == 5


def test_ends_that_differ_on_the_size_of_frames_are_told(pair: Pair) -> None:
    pair[0].sender(LINK)
    with pytest.raises(FrameError, match=r"from rank 3: its frames have up to \d+ bytes, not the agreed"):
        pair[1].receiver(BIG).receive()


# --- plans and their links --------------------------------------------------------------------------


@pytest.fixture
def endpoints() -> Iterator[dict[int, TcpEndpoint]]:
    """Two endpoints of one session, which outlast its plans."""
    endpoints = {rank: TcpEndpoint(rank) for rank in (3, 5)}
    yield endpoints
    for endpoint in endpoints.values():
        endpoint.close()


def test_a_link_of_another_run_or_of_an_older_plan_is_refused(endpoints: dict[int, TcpEndpoint]) -> None:
    places = listen_all(endpoints)
    transports = [endpoint.transport() for endpoint in endpoints.values()]
    for transport, epoch, token in zip(transports, (4, 5), (b"4" * 16, b"5" * 16), strict=True):
        transport.open(Rendezvous(ADDR, (3, 5), places, LIMIT_S, epoch, token))
    says = r"rank 5 refused the link from rank 3: it takes no part in this plan, or no longer"
    with pytest.raises(PeerFailedError, match=says) as caught:
        transports[0].sender(LINK)
    assert caught.value.peer == 5
    for transport in transports:
        transport.close()


def test_a_link_waits_for_a_rank_that_has_not_heard_of_the_plan_yet(
    endpoints: dict[int, TcpEndpoint],
) -> None:
    """A stranger who claims to be of a plan to come waits, too, and does not keep the member away."""
    places = listen_all(endpoints)
    sending, receiving = (endpoint.transport() for endpoint in endpoints.values())
    open_all([sending, receiving], places, (3, 5), epoch=1)
    works((sending, receiving))
    later = [endpoint.transport() for endpoint in endpoints.values()]
    stranger = LinkHello(b"not the token...", 2, Purpose.FRAMES, 3, 5, 0, 1).pack()
    with socket.create_connection((ADDR, places[5].port), timeout=LIMIT_S) as sock:
        sock.sendall(stranger)
        open_all(later[:1], places, (3, 5), epoch=2)
        dialed = in_thread(lambda: later[0].sender(LINK))
        reception = endpoints[5]._reception
        assert reception is not None
        until(lambda: len(reception._door.callers) == 2, "both have connected")
        assert not dialed.done()
        open_all(later[1:], places, (3, 5), epoch=2)
        sender, receiver = dialed.result(LIMIT_S), later[1].receiver(LINK)
        fed = in_thread(lambda: (send(sender, 3), sender.finish()))  # type: ignore[arg-type,union-attr]
        assert receive_all(receiver) == [0.0, 1.0, 2.0]
        fed.result(LIMIT_S)
        assert sock.recv(ANSWER_BYTES) == pack_answer(Answer.OTHER_GROUP)  # it is of no plan of this rank
    for transport in (sending, receiving, *later):
        transport.close()


def test_links_of_a_plan_end_and_those_of_the_next_go_on(endpoints: dict[int, TcpEndpoint]) -> None:
    """The links of a plan that drains belong to the same listening socket as those of the next one."""
    places = listen_all(endpoints)
    older, newer = ([endpoint.transport() for endpoint in endpoints.values()] for _ in range(2))
    open_all(older, places, (3, 5), epoch=1)
    sender, receiver = older[0].sender(LINK), older[1].receiver(LINK)
    open_all(newer, places, (3, 5), epoch=2)
    waiting = in_thread(receiver.receive)
    older[0].abort()
    assert isinstance(waiting.exception(LIMIT_S), PeerFailedError)
    works((newer[0], newer[1]))
    with pytest.raises(Closed):
        send(sender, 1)
    for transport in (*older, *newer):
        transport.close()


def test_a_rank_that_listens_nowhere_is_named(endpoints: dict[int, TcpEndpoint]) -> None:
    transport = endpoints[3].transport()
    transport.open(Rendezvous(ADDR, (3, 5), {}, LIMIT_S))
    with pytest.raises(PeerFailedError, match="rank 5 listens for no links of this plan") as caught:
        transport.sender(LINK)
    assert caught.value.peer == 5
    transport.close()


def test_the_wait_for_a_rank_that_does_not_answer_can_be_ended(endpoints: dict[int, TcpEndpoint]) -> None:
    transport = endpoints[3].transport()
    with socket.create_server((ADDR, 0)) as silent:
        places = {5: Place(ADDR, silent.getsockname()[1])}
        transport.open(Rendezvous(ADDR, (3, 5), places, LIMIT_S))
        dialing = in_thread(lambda: transport.sender(LINK))
        silent.accept()[0].close()  # as if strangers had displaced it: it dials again
        silent.accept()
        transport.abort()
        assert isinstance(dialing.exception(LIMIT_S), Closed)
    transport.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 B", pack_answer(Answer.ACCEPTED)[:-1] + b"?"])
def test_a_malformed_answer_names_the_rank_of_the_link(
    answer: bytes, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeedge.transport.tcp_group.pack_answer", lambda _: answer[:ANSWER_BYTES])
    with pytest.raises(
        PeerFailedError, match=r"the link to rank 5 at 127\.0\.0\.1 does not open: "
    ) as caught:
        pair[0].sender(LINK)
    assert caught.value.peer == 5


@pytest.mark.parametrize(
    ("mine", "theirs"), [("key", "other"), ("other", "key"), ("key", None), (None, "key")]
)
def test_ranks_without_the_same_key_do_not_link(
    mine: str | None, theirs: str | None, key: Membership
) -> None:
    keys = {"key": key, "other": Membership.from_text(make_key(), "another key"), None: None}
    endpoints = {3: TcpEndpoint(3, keys[mine]), 5: TcpEndpoint(5, keys[theirs])}
    transports = [endpoint.transport() for endpoint in endpoints.values()]
    places = listen_all(endpoints)
    rendezvous = Rendezvous(ADDR, (3, 5), places, 1.0, 1, b"a token of tests")
    for transport in transports:
        transport.open(rendezvous)
    says = "what listens there has another key" if mine and theirs else "does not open"
    with pytest.raises(PeerFailedError, match=says) as caught:
        transports[0].sender(LINK)
    assert caught.value.peer == 5
    for one in (*transports, *endpoints.values()):
        one.close()


# --- strangers --------------------------------------------------------------------------------------


def listening_port(pair: Pair) -> int:
    """Return the port at which rank 5 listens for links."""
    group = pair[1]._group
    assert group is not None
    return group._rendezvous.places[5].port


def hello_for(**changes: object) -> LinkHello:
    """Return a hello of rank 3 for its first link to rank 5, with ``changes``."""
    fields: dict[str, object] = {
        "token": b"a token of tests",
        "epoch": 1,
        "purpose": Purpose.FRAMES,
        "source": 3,
        "destination": 5,
        "serial": 0,
        "capacity": 1,
    }
    return LinkHello(**(fields | changes))  # type: ignore[arg-type]


def introduced(pair: Pair, hello: LinkHello) -> Stream:
    """Return a connection to the second rank that has said ``hello``, as a member."""
    context = pair[0]._endpoint._client
    deadline = time.monotonic() + LIMIT_S
    where = ADDR, listening_port(pair)
    sock = dial(where, Connections(), context=context, deadline=deadline)
    sock.sendall(hello.pack())
    return sock


STRANGERS: dict[str, bytes] = {
    "web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4,
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(200),
    "zeros": bytes(LINK_HELLO_BYTES),
    "right magic": b"PELK" + bytes(LINK_HELLO_BYTES - 4),
    "a member of no group": LinkHello(bytes(16), 1, Purpose.FRAMES, 3, 5, 0, 1).pack(),
    "an answer": pack_answer(Answer.ACCEPTED).ljust(LINK_HELLO_BYTES, b"\0"),
}


@pytest.mark.parametrize("says", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_dismissed_at_once_and_links_open_all_the_same(says: bytes, pair: Pair) -> None:
    with socket.create_connection((ADDR, listening_port(pair)), timeout=LIMIT_S) as stranger:
        stranger.sendall(says)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 10):
                pass
    works(pair)


def works(pair: Pair) -> None:
    """Carry packets over a new link."""
    sender, receiver = pair[0].sender(LINK), pair[1].receiver(LINK)
    fed = in_thread(lambda: (send(sender, 3), sender.finish()))
    assert receive_all(receiver) == [0.0, 1.0, 2.0]
    fed.result(LIMIT_S)


def test_a_thousand_silent_strangers_do_not_keep_members_apart(pair: Pair) -> None:
    with contextlib.ExitStack() as strangers:
        for _ in range(1000):
            where = ADDR, listening_port(pair)
            strangers.enter_context(socket.create_connection(where, timeout=LIMIT_S))
        reception = pair[1]._endpoint._reception
        assert reception is not None
        until(lambda: len(reception._door.callers) <= MAX_CALLERS, "those too many are closed")
        works(pair)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"destination": 4}, "OTHER_RANK"),
        ({"source": 7}, "OTHER_RANK"),
        ({"serial": 9}, "OTHER_LINK"),
        ({"epoch": 0}, "OTHER_GROUP"),
        ({"token": bytes(16)}, "OTHER_GROUP"),
        ({}, "ACCEPTED"),
    ],
)
def test_a_link_that_does_not_lead_here_is_refused(
    changes: dict[str, object], answer: str, pair: Pair
) -> None:
    with contextlib.closing(introduced(pair, hello_for(**changes))) as sock:
        assert read_answer(sock.recv(ANSWER_BYTES)).name == answer


# --- frames of a peer that is not itself -------------------------------------------------------------


def forged(pair: Pair, data: bytes, serial: int = 0) -> BaseException | None:
    """Return the error of a receiver whose peer connects and sends ``data``, on the link ``serial``."""
    receiver = pair[1].receiver(LINK)
    with contextlib.ExitStack() as stack:
        hellos = [hello_for(purpose=each, capacity=640, serial=serial) for each in Purpose]
        frames, _ = (stack.enter_context(contextlib.closing(introduced(pair, each))) for each in hellos)
        frames.recv(ANSWER_BYTES)
        frames.sendall(data)
        socket_of(frames).shutdown(socket.SHUT_WR)
        return in_thread(lambda: [receiver.receive() for _ in range(9)]).exception(LIMIT_S)


def frame(number: int) -> bytes:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    length = write_frame(buffer, kind=Kind.MICROBATCH, number=number, items=2, payload=(torch.ones(2, 3),))
    return bytes(buffer[:length].numpy())


def longer(claimed: int) -> bytes:
    """Return a frame whose header claims a length, with a checksum that matches."""
    prelude = struct.pack("<4sHBBQQII", b"PEDG", 1, 1, 0, 0, claimed, 2, 0)
    crc = zlib.crc32(b"", zlib.crc32(prelude))
    return (prelude[:-4] + struct.pack("<I", crc)).ljust(HEADER_BYTES, b"\0")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the connection to rank 3 was lost while receiving"),
        (frame(0)[:100], "the connection to rank 3 was lost while receiving"),
        (frame(0)[:-1], "the connection to rank 3 was lost while receiving"),
        (frame(1), "from rank 3: received microbatch 1, expected 0"),
        (frame(0) * 2, "from rank 3: received microbatch 0, expected 1"),
        (b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES), "from rank 3: received data is not a frame"),
        (longer(1 << 62), "from rank 3: the frame claims 4611686018427387904 bytes"),
        (longer(641), "from rank 3: the frame claims 641 bytes, but the agreed capacity is 640"),
    ],
)
def test_a_forged_frame_is_refused_without_memory_for_it(data: bytes, says: str, pair: Pair) -> None:
    error = forged(pair, data)
    assert isinstance(error, PeerFailedError)
    assert str(error).startswith(says)
    assert error.peer == 3


# --- at random --------------------------------------------------------------------------------------

FUZZ_ROUNDS = rounds(40)


def test_damaged_introductions_cost_nothing_but_their_connection(pair: Pair) -> None:
    chance = random.Random(3)
    port = listening_port(pair)
    for _ in range(FUZZ_ROUNDS):
        message = hello_for(purpose=chance.choice(list(Purpose))).pack()
        says = mutate_bytes(message, chance) if chance.random() < 0.8 else chance.randbytes(200)
        if says == message:
            continue
        with socket.create_connection((ADDR, port), timeout=LIMIT_S) as stranger:
            cut = chance.randrange(len(says) + 1)
            with contextlib.suppress(OSError):
                stranger.sendall(says[:cut])
                stranger.sendall(says[cut:])
    works(pair)


def test_damaged_frames_are_refused_or_read(pair: Pair) -> None:
    """Values may change in clear; a header that was damaged is noticed, and so is a length."""
    chance = random.Random(4)
    for serial in range(FUZZ_ROUNDS):
        good = frame(0) + frame(1)
        error = forged(pair, mutate_bytes(good, chance, HEADER_BYTES), serial)
        assert isinstance(error, PeerFailedError)
        assert error.peer == 3


@pytest.mark.parametrize("at", ["links", "hub"])
def test_a_door_without_file_descriptors_pauses(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if len(pauses) < 3:
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    class Watched(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
        def select(self, timeout: float | None = None) -> object:
            if listener.fileno() not in self.get_map() and timeout is not None:
                pauses.append(timeout)
                now[0] += timeout
                timeout = 0
            return super().select(timeout)

    pauses: list[float] = []
    now = [0.0]
    monkeypatch.setattr(selectors, "DefaultSelector", Watched)
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    met = threading.Event()

    def admit(stream: Stream, hello: bytes) -> bool:
        stream.close()
        met.set()
        return True

    door = (
        contextlib.closing(
            Reception(listener, context=None, hello_bytes=4, admit=admit, clock=lambda: now[0])
        )
        if at == "links"
        else Hub(listener, world_size=1, timeout_s=LIMIT_S, clock=lambda: now[0])
    )
    with door as served, socket.create_connection(listener.getsockname()) as caller:
        caller.sendall(b"ping")
        if isinstance(served, Hub):
            until(lambda: served._door.opened == 1, "the hub has accepted")
        else:
            assert met.wait(LIMIT_S)
    assert len(pauses) == 3


def test_a_reception_closes_while_it_is_asked_to_reconsider() -> None:
    """The byte that asks it to close may be read together with the one that asked it to reconsider."""

    def open_and_close() -> None:
        for _ in range(2000):
            listener = socket.create_server(("127.0.0.1", 0))
            reception = Reception(listener, context=None, hello_bytes=4, admit=lambda sock, hello: False)
            reception.reconsider()
            reception.close()

    in_thread(open_and_close).result(LIMIT_S)
