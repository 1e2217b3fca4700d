"""Test hub and members: each rule without sockets or clocks, then a few real connections."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from msgspec import Raw
from mutations import mutate_message, rounds
from waiting import LIMIT_S, until
from wire_messages import connected, framed, plain, received

from pipeedge.base import fields
from pipeedge.base.errors import (
    DeadlineError,
    PeerFailedError,
    PipeEdgeError,
    RequestError,
    exit_code,
)
from pipeedge.control.admission import Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.connection import RankCaller
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.forms import Forms, Refusal
from pipeedge.control.hub import Hub
from pipeedge.control.hub_address import HubAddress
from pipeedge.control.hub_client import Callbacks, HubClient
from pipeedge.control.messages import (
    FROM_HUB,
    TO_HUB,
    Decoder,
    Failed,
    Hello,
    Notice,
    Pace,
    Planned,
    RankRecord,
    Ready,
    Summary,
    Verdict,
    WorkByRank,
    frame,
)
from pipeedge.control.session import Session, _report_failures, report_early_failure
from pipeedge.control.uplink import Uplink
from pipeedge.control.wire import ClearEnd
from pipeedge.observe.metrics import StageWork
from pipeedge.request.config import WorldRequest

# --- numbers and texts of any size ------------------------------------------------------------------


def test_a_verdict_overtakes_queued_telemetry() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = ClearEnd(accepts=True)
        connection = RankCaller(0, ours, "10.0.0.9", end, max_message_bytes=1 << 16, close_at=5.0)
        for _ in range(200):
            connection.queue_message(RankRecord(1, "x" * 20_000))
        connection.send()  # as much as the kernel buffers, the last message in part
        connection.queue_message(Verdict(Failure(FailureKind.GONE, "killed", 1, "rank 1")))
        decoder, heard = Decoder(FROM_HUB), []
        while connection.has_outgoing or not heard or heard[-1].kind != "verdict":
            heard += decoder.feed(theirs.recv(1 << 16))
            connection.send()
    assert {message.kind for message in heard[:-1]} == {"rankrecord"}
    assert len(heard) < 200


def test_a_member_survives_any_mutation_of_any_message() -> None:
    chance = random.Random(2)
    said: dict[str, dict[str, Any]] = {
        "plan": {"plan": {"items": 3}},
        "verdict": {"failure": plain(Failure(FailureKind.FAILED, "x", 1, "rank 1"))},
        "notice": {"line": "x"},
        "clockanswer": {"sent": 1.5, "there": 2.5},
        "pace": {"slowest_s": 0.5},
        "work": {"work": {"1": plain(StageWork(1.0, 2.0, 3.0, 8))}},
        "rankrecord": {"rank": 1, "text": "x"},
        "complete": {},
        "summary": {"stats": {"0": {}}},
    }
    ours, theirs = socket.socketpair()
    with theirs, HubClient(connected(ours), rank=1, timeout_s=5.0) as self:
        for _ in range(rounds(400)):
            kind = chance.choice(list(said))
            self._error = None
            with contextlib.suppress(PeerFailedError):  # anything but a message ends the connection
                self._handle(received(FROM_HUB, kind, **mutate_message(said[kind], chance)))
            assert self.hub_clock(1.0) < math.inf
            assert self._error is None or str(self._error).isprintable()
        self._error = None


def test_a_failed_control_thread_ends_ranks_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> Any:
        raise MemoryError("no more")

    with (
        hub(2) as (_, address),
        member(address, 0) as zero,
        member(address, 1, callbacks=Callbacks(breaks)) as one,
    ):
        for self in (zero, one):
            self.hello(world_size=2, host="pi")
        with pytest.raises(
            PipeEdgeError, match=r"internal error .* of rank 1: MemoryError: no more"
        ) as caught:
            one.wait(Planned)
        assert exit_code(caught.value) == 1
        with pytest.raises(PeerFailedError, match=r"rank 1 \(on pi\) failed: internal error"):
            zero.wait(Planned)
    with hub(2) as (served, address), member(address, 0) as zero, member(address, 1) as one:
        for self in (zero, one):
            self.hello(world_size=2, host="pi")
            self.facts({})
        assert served.gather() is not None
        monkeypatch.setattr(served._state, "tick", breaks)
        for self, kind, status in ((zero, PipeEdgeError, 1), (one, PeerFailedError, 4)):
            with pytest.raises(
                kind, match=r"rank 0 .*failed: internal error in its hub: MemoryError: no"
            ) as caught:
                self.wait(Planned)
            assert exit_code(caught.value) == status
        assert served.gather() is None


def test_a_notice_that_cannot_be_shown_ends_nothing() -> None:
    def full(line: str) -> None:
        raise OSError(28, "No space left on device")

    def closed(line: str) -> None:
        raise ValueError("I/O operation on closed file")

    for notify in (full, closed):
        ours, theirs = socket.socketpair()
        with (
            theirs,
            HubClient(connected(ours), rank=1, timeout_s=5.0, callbacks=Callbacks(notify=notify)) as self,
        ):
            theirs.sendall(frame(Notice("still alive")) + frame(Planned(Raw(b"1"))))
            assert self.wait(Planned) == Planned(Raw(b"1"))
            assert self.error is None


def test_a_verdict_that_has_arrived_explains_why_nothing_can_be_sent() -> None:
    address, told = ("127.0.0.1", 0), Verdict(Failure(FailureKind.GONE, "killed", 2, "rank 2"))
    with socket.create_server(address) as listener, member(listener.getsockname(), 1) as self:
        hub_end, _ = listener.accept()
        self.hello(world_size=3, host="pi1")
        hub_end.sendall(frame(Pace()))
        while not self._uplink.hub_confirmed:
            time.sleep(0.01)
        with self._changed:  # the member's thread takes nothing meanwhile
            hub_end.sendall(frame(told))
            hub_end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            hub_end.close()
            for _ in range(3):
                self._uplink.send(Ready(1))
        with pytest.raises(PeerFailedError, match="rank 2 is gone: killed"):
            self.wait(Summary)


def test_a_failing_display_does_not_end_the_run() -> None:
    def breaks(work: object) -> None:
        raise ValueError("no such column")

    notices: list[str] = []
    ours, theirs = socket.socketpair()
    callbacks = Callbacks(notify=notices.append, record_stage_work=breaks)
    with theirs, HubClient(connected(ours), rank=0, timeout_s=5.0, callbacks=callbacks) as self:
        for _ in range(2):
            self._handle(WorkByRank({1: StageWork(1.0, 2.0, 3.0, 8)}))
        assert self.error is None
    assert notices == ["the display of the run has failed: ValueError: no such column"]


# --- real connections -------------------------------------------------------------------------------


def test_a_displaced_rank_connects_again_and_repeats_its_messages() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with member(address, 1) as self:
            self.hello(world_size=2, host="pi")
            for _ in range(2):
                listener.accept()[0].close()  # as a hub does that has too many strangers
            connection, _ = listener.accept()
            with connection:
                self.facts({"items": 3})
                decoder, came = Decoder(TO_HUB), []
                while "facts" not in came:
                    came += [message.kind for message in decoder.feed(connection.recv(1 << 16))]
                assert came[0] == "hello"
                assert came.count("facts") == 1
                connection.sendall(frame(Planned(Raw(b"1"))))
                assert self.wait(Planned) == Planned(Raw(b"1"))
            # Once the hub was heard, the end of the connection is the end.
            with pytest.raises(PeerFailedError, match="rank 0 is gone"):
                self.wait(Summary)


@contextlib.contextmanager
def hub(world: int, timeout: float = 10.0) -> Iterator[tuple[Hub, tuple[str, int]]]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with Hub(listener, world_size=world, timeout_s=timeout) as served:
        yield served, address


def member(address: tuple[str, int], rank: int, timeout: float = 10.0, **options: Any) -> HubClient:
    hub_at = HubAddress(*address)
    return HubClient(hub_at.dial(timeout), rank=rank, timeout_s=timeout, hub_at=hub_at, **options)


def test_a_run_over_sockets() -> None:
    seen: dict[int, Any] = {}

    def one(rank: int, address: tuple[str, int]) -> None:
        with member(address, rank) as self:
            self.hello(world_size=3, host="here")
            self.facts({"rank": rank})
            plan = self.wait(Planned)
            if rank == 1:
                return
            order = self.turns.next()
            assert order is not None
            self.turns.ready(order.prepare.epoch)
            self.done({"rank": rank})
            seen[rank] = (plain(plan.plan), plain(self.wait(Summary).stats))

    before = set(threading.enumerate())
    with hub(3) as (served, address):
        threads = [threading.Thread(target=one, args=(rank, address)) for rank in range(3)]
        for thread in threads:
            thread.start()
        assert plain(served.gather()) == {str(rank): {"rank": rank} for rank in range(3)}
        served.apply(lambda state, now: state.plan(Announcement(Raw(b"5"), (0, 2)), now))
        for thread in threads:
            thread.join(10)
    assert seen == {rank: (5, {"0": {"rank": 0}, "2": {"rank": 2}}) for rank in (0, 2)}
    until(lambda: set(threading.enumerate()) <= before, "all threads have ended")


def test_ranks_that_start_after_rank_0_failed_learn_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    world = WorldRequest(rank=0, size=2, addr="127.0.0.1", port=port, timeout_s=20)
    heard: list[Exception] = []

    def late() -> None:
        with member(("127.0.0.1", port), 1) as self:
            self.hello(world_size=2, host="pi1")
            try:
                self.wait(Planned)
            except PeerFailedError as error:
                heard.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    with pytest.raises(RequestError, match="no such model"), report_early_failure(world):
        raise RequestError("no such model")
    thread.join(10)
    assert [str(error) for error in heard] == ["rank 0 failed: no such model"]


def test_a_member_that_vanishes_is_noticed_at_once() -> None:
    with hub(2) as (served, address), member(address, 0) as stays:
        gone = socket.create_connection(address)
        gone.sendall(frame(Hello(1, 2, "pi1")))
        stays.hello(world_size=2, host="pi0")
        threading.Timer(0.2, gone.close).start()
        with pytest.raises(PeerFailedError, match=r"rank 1 \(on pi1\) is gone"):
            stays.wait(Planned)
        assert served.gather() is None


def test_a_member_notices_that_the_hub_is_gone_or_silent() -> None:
    for closes, speaks in itertools.product((True, False), repeat=2):
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            self = stack.enter_context(member(listener.getsockname(), 1, timeout=1.0))
            server_end = stack.enter_context(listener.accept()[0])
            self.set_hub_name("stage 0")
            aborted = threading.Event()
            self.on_end(aborted.set)
            if speaks:
                server_end.sendall(frame(Pace()))
            if closes:
                server_end.close()
                listener.close()
            kind = PeerFailedError if closes else DeadlineError
            with pytest.raises(kind, match=r"rank 0 \(stage 0\) (is gone|has been silent)") as caught:
                self.wait(Planned)
            assert ("another program" in str(caught.value)) == (not speaks)
            assert aborted.wait(LIMIT_S)


def test_another_program_on_the_port_is_recognised() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, member(listener.getsockname(), 1, timeout=5.0) as self, listener.accept()[0] as server_end:
        server_end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(PeerFailedError, match="another program on this port"):
            self.wait(Planned)


def test_a_hub_that_never_appears_is_named_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DeadlineError, match=rf"rank 0 never appeared at 127.0.0.1:{port} within 0.6 s"):
        HubAddress("127.0.0.1", port).dial(0.6)
    with pytest.raises(RequestError, match="cannot resolve"):
        HubAddress("no-such-host.invalid", port).dial(0.6)


def test_unknown_connections_neither_harm_nor_fill_the_hub() -> None:
    with hub(2) as (served, address), contextlib.ExitStack() as stack:
        chance = random.Random(1)
        for number in range(200):
            sock = stack.enter_context(socket.create_connection(address, timeout=5))
            with contextlib.suppress(OSError):
                if number % 3 == 0:
                    sock.sendall(chance.randbytes(200))
                elif number % 3 == 1:
                    sock.sendall(framed(b'{"kind": "hello", "rank": "x"}'))
                if number % 5 == 0:
                    sock.close()
        with member(address, 0) as zero, member(address, 1) as one:
            for rank, self in enumerate((zero, one)):
                self.hello(world_size=2, host="pi")
                self.facts({"rank": rank})
            assert plain(served.gather()) == {"0": {"rank": 0}, "1": {"rank": 1}}
            assert len(served._door.callers) <= 2 + 16
            served.refuse("enough", 2)
            with pytest.raises(RequestError, match="enough"):
                one.wait(Planned)


def test_the_last_words_of_a_rank_arrive_although_it_has_not_read_everything() -> None:
    """A socket that is closed with unread bytes resets its connection, and what it has sent is lost."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    uplink = Uplink(connected(ours), None, time.monotonic)
    with theirs:
        theirs.sendall(b"x" * 1000)  # which the rank does not read any more
        uplink.open()
        uplink.send(Failed("bad weights"))

        def leave() -> None:
            uplink.part()
            uplink.close()

        leaving = threading.Thread(target=leave)
        leaving.start()
        theirs.recv(1, socket.MSG_PEEK)
        leaving.join(0.2)  # it waits until the hub has read all; if it does not, it is gone by now
        heard = b""
        while part := theirs.recv(1 << 16):
            heard += part
    leaving.join(LIMIT_S)
    assert [message.kind for message in Decoder(TO_HUB).feed(heard)] == ["failed"]


def test_the_report_of_a_failing_rank_takes_precedence() -> None:
    with hub(2) as (_, address), member(address, 0) as zero, member(address, 1) as one:
        for self in (zero, one):
            self.hello(world_size=2, host="pi")
        threading.Timer(0.3, one.failed, ("bad weights",)).start()
        cause = zero.explain(PeerFailedError("connection reset", peer=1))
        assert str(cause) == "rank 1 (on pi) failed: bad weights"


def test_links_that_do_not_open_are_the_reason_if_nothing_came_before() -> None:
    """They close, too, when a rank ends that has heard of the failure of another one."""
    own = PeerFailedError("the links of rank 0 to 1 could not be opened")
    for first in ("", "bad weights"):
        with hub(2) as (_, address), member(address, 0) as zero, member(address, 1) as one:
            for self in (zero, one):
                self.hello(world_size=2, host="pi")
            if first:
                one.failed(first)
                with pytest.raises(PeerFailedError, match=first):
                    one.wait(Planned)
                assert str(zero.explain(own)) == "rank 1 (on pi) failed: bad weights"
            else:
                cause = OSError(errno.EMFILE, "Too many open files")
                with pytest.raises(PeerFailedError) as raised, _report_failures(zero):
                    raise own from cause
                assert raised.value is own
                assert own.__cause__ is cause
                with pytest.raises(PeerFailedError, match=r"^rank 0 \(on pi\) failed: the links"):
                    one.wait(Planned)


# --- sessions ---------------------------------------------------------------------------------------------

READ = fields.reader(Any)
FORMS: Forms[Any, Any, Any] = Forms(READ, READ, READ, max_message_bytes=1 << 20)


def sessions(
    present: int,
    world: int,
    decide: Callable[[Mapping[int, Any]], Any],
    appear_s: float = 20.0,
    forms: Forms[Any, Any, Any] = FORMS,
    **options: Any,
) -> dict[int, Any]:
    """Hold a session that only rank 0 is required for; return the plan, or the error, of each rank.

    Nobody states facts before all are there: a failure could end the session before a slow rank has come.
    """
    all_there = threading.Barrier(present)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ended: dict[int, Any] = {}

    def one(rank: int) -> None:
        at = WorldRequest(rank=rank, size=world, addr="127.0.0.1", port=port, timeout_s=20)
        terms = Terms(appear_s, silence_s=20, required=frozenset({0}))
        try:
            with Session(at, forms, Callbacks(), terms=terms) as session:
                session.open({"factor": 10})
                all_there.wait(20)
                facts = {"rank": rank * READ(session.brief())["factor"], "large": [rank] * 50_000}
                session.state(facts)
                if session.serves_hub:
                    session.decide(decide, **options)
                ended[rank] = session.plan()
                if rank == 0:
                    ended[-1] = {rank: failure.kind for rank, failure in session.left_out.items()}
        except PipeEdgeError as error:
            ended[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(present)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ended


def test_a_session_may_end_with_the_plan_and_go_on_without_absent_ranks() -> None:
    def decide(facts: Mapping[int, Any]) -> Announcement[Any]:
        return Announcement({"ranks": [told["rank"] for told in facts.values()]}, participants=())

    ended = sessions(3, 4, decide, appear_s=2.0)
    assert ended.pop(-1) == {3: FailureKind.ABSENT}
    assert ended == {rank: {"ranks": [0, 10, 20]} for rank in range(3)}


def test_malformed_facts_end_the_session_with_one_line_that_names_their_rank() -> None:
    flat = Forms(fields.reader(fields.Options), READ, READ, max_message_bytes=1 << 20)
    ended = sessions(2, 2, lambda facts: pytest.fail("the facts hold lists"), forms=flat)
    said = r"the facts message of rank [01] is malformed \(.*got `array`.*\); do all run the same version\?$"
    assert sorted(ended) == [0, 1]
    for error in ended.values():
        assert isinstance(error, PeerFailedError)
        assert re.search(said, str(error)), error


def test_stats_are_read_as_their_type_and_name_their_rank() -> None:
    with hub(1) as (served, address), member(address, 0) as self:
        session: Session[Any, Any, float] = Session(
            WorldRequest(rank=0, size=1), Forms(READ, READ, fields.reader(fields.Amount)), Callbacks()
        )
        session._member = self
        self.hello(world_size=1, host="pi")
        session.state({})
        assert served.gather() is not None
        served.apply(lambda state, now: state.plan(Announcement(Raw(b"{}"), (0,)), now))
        session.start(session.prepare())
        with pytest.raises(PeerFailedError, match=r"the result of rank 0 is malformed \(.*>= 0.0"):
            session.finish(-1.0)


def test_facts_are_reviewed_as_they_come_and_may_be_refused_at_once() -> None:
    def review(rank: int, facts: Any) -> Refusal | None:
        return Refusal(f"rank {rank} says {facts['rank']}") if rank == 1 else None

    ended = sessions(2, 3, lambda facts: pytest.fail("rank 2 has not come"), review=review)
    assert {rank: str(error) for rank, error in ended.items()} == dict.fromkeys(range(2), "rank 1 says 10")
    assert {type(error) for error in ended.values()} == {RequestError}
