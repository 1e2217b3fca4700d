"""Test hub and members with a key: who is heard, what others are told, and what passes on the wire."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw
from proxies import Change, Proxy
from waiting import LIMIT_S, until
from wire_messages import framed

from pipeedge.base.errors import DeadlineError, PeerFailedError, PipeEdgeError, RequestError
from pipeedge.control.announcement import Announcement
from pipeedge.control.hub import Hub
from pipeedge.control.hub_address import HubAddress
from pipeedge.control.hub_client import Callbacks, HubClient
from pipeedge.control.messages import Planned, Summary
from pipeedge.transport import door
from pipeedge.transport.door import in_turn
from pipeedge.transport.interfaces import listen
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key

KEY = Membership.from_text(make_key(), "--key k.pem")
OTHER_KEY = Membership.from_text(make_key(), "--key other.pem")
PLAN_TEXT = "the-layers-of-the-plan"


@contextlib.contextmanager
def hub(world: int, key: Membership | None, timeout: float = 10.0) -> Iterator[tuple[Hub, tuple[str, int]]]:
    listener = listen("127.0.0.1", 0)  # with the product's backlog: a full one delays a caller by a second
    address = listener.getsockname()
    with Hub(listener, world_size=world, timeout_s=timeout, membership=key) as served:
        yield served, address


def member(address: tuple[str, int], rank: int, key: Membership | None, **options: Any) -> HubClient:
    hub_at = HubAddress.of(*address, key)
    return HubClient(hub_at.dial(10.0), rank=rank, timeout_s=10.0, hub_at=hub_at, **options)


def hold_session(key: Membership | None, *, change: Change = lambda data: data) -> tuple[bytes, list[Any]]:
    """Hold a session of two ranks, of which one is behind a proxy; return the bytes and the summaries."""
    ended: list[Any] = []

    def one(rank: int, address: tuple[str, int]) -> None:
        try:
            with member(address, rank, key) as self:
                self.hello(world_size=2, host="pi")
                self.facts({"rank": rank})
                assert self.wait(Planned).plan == Raw(f'"{PLAN_TEXT}"'.encode())
                order = self.turns.next()
                assert order is not None
                self.turns.ready(order.prepare.epoch)
                self.record("x" * 200_000)
                self.done({"rank": rank})
                ended.append(self.wait(Summary).stats.keys())
        except PipeEdgeError as error:
            ended.append(error)

    with hub(2, key) as (served, address), Proxy(address, change) as proxy:
        threads = [
            threading.Thread(target=one, args=(rank, at)) for rank, at in enumerate((address, proxy.address))
        ]
        for thread in threads:
            thread.start()
        if served.gather() is not None:
            served.apply(
                lambda state, now: state.plan(
                    Announcement(Raw(f'"{PLAN_TEXT}"'.encode()), (0, 1), data_rank=0), now
                )
            )
        for thread in threads:
            thread.join(20)
    return bytes(proxy.passed), ended


@pytest.mark.parametrize("key", [KEY, None], ids=["key", "clear"])
def test_a_capture_shows_the_plan_only_without_a_key(key: Membership | None) -> None:
    passed, ended = hold_session(key)
    assert ended == [{0, 1}, {0, 1}]
    shown = [text.encode() in passed for text in (PLAN_TEXT, "hello", '"rank"', "x" * 100)]
    assert shown == [key is None] * 4


# --- peers that are no members ---------------------------------------------------------------------------

SAME_KEY = ": give every rank the same --key"


@pytest.mark.parametrize(
    ("hubs", "members", "line", "notice"),
    [
        (KEY, OTHER_KEY, f"rank 0 at {{}} has another key{SAME_KEY}", "has another key"),
        (None, KEY, f"rank 0 at {{}} has no key{SAME_KEY}", "has a key, and rank 0 has none"),
        (
            KEY,
            None,
            "rank 0 has a key, and this rank has none: give every rank the same --key",
            "has no key",
        ),
    ],
    ids=["other-key", "only-the-member", "only-the-hub"],
)
def test_unlike_keys_are_named_at_both_ends_and_end_no_run(
    hubs: Membership | None, members: Membership | None, line: str, notice: str
) -> None:
    notices: list[str] = []
    told = threading.Event()

    def notify(text: str) -> None:
        notices.append(text)
        told.set()

    with hub(2, hubs) as (served, address), contextlib.ExitStack() as stack:
        zero = stack.enter_context(member(address, 0, hubs, callbacks=Callbacks(notify=notify)))
        zero.hello(world_size=2, host="pi")
        zero.facts({})
        with pytest.raises(RequestError) as caught:
            join(member(address, 1, members))
        assert str(caught.value) == line.format(f"{address[0]}:{address[1]}")
        assert told.wait(10)
        assert notices == [f"a process at 127.0.0.1 {notice}; ranks still missing: 1"]
        one = stack.enter_context(member(address, 1, hubs))
        one.hello(world_size=2, host="pi")
        one.facts({})
        assert served.gather() is not None


def join(self: HubClient) -> None:
    with self:
        self.hello(world_size=2, host="pi")
        self.wait(Planned)


def answers(reply: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(reply)
        connection.recv(1 << 16)

    return serve


def a_web_server(connection: socket.socket) -> None:
    context = OTHER_KEY.server_context()
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as end:
        end.recv(1)


@pytest.mark.parametrize(
    ("service", "why"),
    [
        (answers(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "does not speak TLS 1.3"),
        (answers(b"SSH-2.0-OpenSSH_9.2\r\n"), "does not speak TLS 1.3"),
        (a_web_server, "is another program"),
    ],
    ids=["http", "ssh", "https"],
)
def test_a_foreign_service_on_the_port_is_recognised(
    service: Callable[[socket.socket], None], why: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as connection:
                service(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(PeerFailedError, match=rf"rank 0 at 127\.0\.0\.1:\d+ {why}: is it PipeEdge\?"):
            HubAddress.of(*listener.getsockname(), KEY).dial(5.0)
        thread.join(10)


def test_a_service_that_hangs_up_is_tried_again_until_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stopping = threading.Event()

        def serve() -> None:
            while not stopping.is_set():
                listener.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(DeadlineError, match="rank 0 never appeared"):
            HubAddress.of(*listener.getsockname(), KEY).dial(0.7)
        stopping.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join(10)


def test_a_damaged_record_ends_the_run_with_the_rank_named() -> None:
    pieces = 0

    def flip(data: bytes) -> bytes:
        nonlocal pieces
        pieces += 1
        # The first piece is the hub's part of the handshake; the damage comes with the first message. Any
        # later one may be the last of the session, which rank 0 then ends without a failure.
        return data if pieces < 2 else data[:-1] + bytes((data[-1] ^ 1,))

    _, ended = hold_session(KEY, change=flip)
    assert len(ended) == 2
    for error in ended:
        assert isinstance(error, PeerFailedError)
        assert "rank 0" in str(error) or "rank 1" in str(error)


# --- strangers -------------------------------------------------------------------------------------------


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        OTHER_KEY.client_context().wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def test_a_thousand_strangers_neither_stop_nor_fill_the_hub() -> None:
    chance, hello = random.Random(3), client_hello()
    openings = [
        b"",
        hello[:40],
        hello,
        chance.randbytes(300),
        b"\x16" + chance.randbytes(300),
        framed(b'{"kind": "hello", "rank": 1, "world": 2, "host": "x"}'),
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    with hub(2, KEY) as (served, address), contextlib.ExitStack() as stack:
        for number in range(1000):
            sock = stack.enter_context(socket.create_connection(address, timeout=5))
            with contextlib.suppress(OSError):
                sock.sendall(openings[number % len(openings)])
                if number % 3 == 0:
                    sock.close()
        with member(address, 0, KEY) as zero, member(address, 1, KEY) as one:
            for rank, self in enumerate((zero, one)):
                self.hello(world_size=2, host="pi")
                self.facts({"rank": rank})
            facts = served.gather()
            assert facts is not None
            assert sorted(facts) == [0, 1]
            assert len(served._door.callers) <= 2 + 256


def test_a_handshake_that_does_not_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PATIENCE_S", 0.2)
    with hub(2, KEY) as (served, address), contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(3)]
        for sock, opening in zip(strangers, (b"", client_hello()[:40], client_hello()), strict=True):
            sock.sendall(opening)
        zero = stack.enter_context(member(address, 0, KEY))
        zero.hello(world_size=2, host="pi")
        for sock in strangers:
            while sock.recv(1 << 16):  # the answer to a handshake that has begun
                pass
        until(lambda: len(served._door.callers) == 1, "the strangers are closed")
        assert zero.error is None


def test_strangers_at_one_address_do_not_displace_a_rank_at_another() -> None:
    with hub(1, None) as (served, address), contextlib.ExitStack() as stack:
        rank = stack.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
        for _ in range(40):
            stack.enter_context(socket.create_connection(address, source_address=("127.0.0.3", 0)))
        until(lambda: served._door.opened == 41, "all have knocked")
        until(lambda: len(served._door.callers) == 1 + 16, "those too many are closed")
        assert rank.getsockname()[0] in {each.peer for each in list(served._door.callers.values())}


def test_strangers_are_served_in_turn_by_address_and_the_newest_of_each_first() -> None:
    def stranger(number: int, peer: str, spared_until: float | None = None) -> Any:
        return SimpleNamespace(number=number, peer=peer, spared_until=spared_until)

    crowd = [stranger(number, "10.0.0.3") for number in range(5)]
    crowd[1].spared_until = 7.0
    lonely = stranger(7, "10.0.0.2")
    order = in_turn([*crowd, lonely])
    assert [(each.number, each.peer[-1]) for each in order] == [
        (1, "3"),  # it was answered already
        (4, "3"),
        (7, "2"),
        (3, "3"),
        (2, "3"),
        (0, "3"),
    ]


def test_a_flood_of_handshakes_at_one_address_leaves_room_for_a_member_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine, the flood takes longer than a caller has time to say who it is.
    monkeypatch.setattr(door, "PATIENCE_S", LIMIT_S)
    hello = client_hello()
    with hub(1, KEY) as (served, address), contextlib.ExitStack() as stack:
        quiet = stack.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
        for number in range(600):
            sock = socket.create_connection(address, source_address=("127.0.0.3", 0))
            stack.enter_context(sock)
            if number % 2:
                with contextlib.suppress(OSError):  # it was replaced already
                    sock.sendall(hello)
        until(lambda: served._door.opened > 600, "all have knocked")
        until(lambda: len(served._door.callers) <= 1 + 256, "those too many are closed")
        assert quiet.getsockname()[0] in {each.peer for each in list(served._door.callers.values())}
