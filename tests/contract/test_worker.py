"""Test a rank's threads: their measurements, their end, and their status."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from clock import Clock
from waiting import LIMIT_S, until

from pipeedge.base.crew import Closed, Crew
from pipeedge.base.errors import PeerFailedError, PipeEdgeError, WeightsError
from pipeedge.base.quota import Quota
from pipeedge.control.liveness import RankStatus
from pipeedge.observe.metrics import Latency, Tally
from pipeedge.observe.timeline import ThreadState
from pipeedge.run.activity import Activity
from pipeedge.run.worker import Incoming, Outgoing, SendingEnd, StageLoop, StageSteps
from pipeedge.transport.base import Link, Packet, Receipt, Rendezvous
from pipeedge.transport.loopback import LocalLink, LoopbackTransport


@pytest.fixture(autouse=True)
def no_thread_is_left() -> object:
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before, "all threads have ended")


# --- activity ---------------------------------------------------------------------------------------


def test_activity_reports_the_longest_of_nested_work() -> None:
    clock = Clock()
    activity = Activity(clock)
    assert activity.status() == RankStatus()
    with activity.busy("loading"):
        clock.now = 3.0
        with activity.busy("reading"):
            clock.now = 5.0
            assert activity.status().busy == ("loading", 5.0)
        assert activity.status().busy == ("loading", 5.0)
    assert activity.status().busy is None
    with pytest.raises(ZeroDivisionError), activity.busy("failing"):
        raise ZeroDivisionError
    assert activity.status().busy is None


def test_activity_counts_packets_and_reports_awaited_peers() -> None:
    activity = Activity()
    activity.sent(1)
    activity.sent(1)
    activity.received(0)
    with activity.awaiting(4), activity.awaiting(2):
        assert activity.status() == RankStatus(None, {1: 2}, {0: 1}, frozenset({2, 4}))
    assert activity.status().awaiting == frozenset()
    activity.finished()
    assert activity.status() == RankStatus(None, {1: 2}, {0: 1}, finished=1)


def test_activity_of_two_plans_is_that_of_both_until_one_is_dropped() -> None:
    activity = Activity(Clock())
    before, after = activity.part(), activity.part()
    for part in (before, before, after):
        part.sent(1)
    after.received(2)
    before.computed(3.0)
    with before.awaiting(2), after.awaiting(0), after.busy("loading"):
        status = activity.status()
    assert status == RankStatus(("loading", 0.0), {1: 3}, {2: 1}, frozenset({0, 2}), stage_s=3.0)
    activity.drop(before)
    assert activity.status() == RankStatus(None, {1: 1}, {2: 1})


def test_receiving_counts_the_end_mark_too() -> None:
    activity, link = Activity(), LocalLink()
    given = packet(0)
    link.post(given)
    link.finish()
    incoming = Incoming(link, 3, activity)
    assert incoming.receive() is given
    assert incoming.receive() is None
    assert activity.status().received == {3: 2}
    assert Incoming(link, None, activity).receive() is None
    assert activity.status().received == {3: 2}


# --- the crew ---------------------------------------------------------------------------------------


def test_a_crew_ends_when_all_have_ended() -> None:
    crew, done = Crew(), []
    for number in range(4):
        crew.start(f"thread {number}", lambda number=number: done.append(number))
    assert crew.wait(LIMIT_S)
    assert sorted(done) == [0, 1, 2, 3]


def test_a_crew_reports_a_wait_that_takes_too_long() -> None:
    crew, gate = Crew(), threading.Event()
    crew.start("slow", gate.wait)
    assert not crew.wait(0.1)
    gate.set()
    assert crew.wait(LIMIT_S)


def test_the_first_error_wins_and_all_threads_wake() -> None:
    crew, links = Crew(), [LocalLink() for _ in range(3)]
    for link in links:
        crew.on_stop(link.close)
        crew.start("waiting", link.receive)
    second = threading.Event()

    def fail_later() -> None:
        second.wait(LIMIT_S)
        raise ValueError("second")

    def fail() -> None:
        raise WeightsError("first")

    crew.start("later", fail_later)
    crew.start("failing", fail)
    with pytest.raises(WeightsError, match="first"):
        crew.wait(LIMIT_S)
    second.set()
    for link in links:
        with pytest.raises(Closed):
            link.receive()
    with pytest.raises(WeightsError, match="first"):
        crew.wait(LIMIT_S)


def test_a_stopped_crew_raises_its_reason_once() -> None:
    crew, link, calls = Crew(), LocalLink(), []
    crew.on_stop(link.close)
    crew.on_stop(lambda: calls.append(1))
    crew.start("waiting", link.receive)
    crew.stop(PeerFailedError("rank 1 is gone"))
    crew.stop(PeerFailedError("rank 2 is gone"))
    with pytest.raises(PeerFailedError, match="rank 1"):
        crew.wait(LIMIT_S)
    assert calls == [1]
    crew.on_stop(lambda: calls.append(2))  # too late to be told, so it is called at once
    assert calls == [1, 2]


# --- stages -----------------------------------------------------------------------------------------


def packet(number: int, value: float = 1.0) -> Packet:
    return Packet(number, 2, (torch.full((2, 3), value),))


def pipeline(
    crew: Crew, computes: list[Callable[[Packet], Packet]], peer: int | None = None
) -> tuple[LocalLink, LocalLink, list[StageLoop], list[Activity]]:
    """Connect stages in memory; return the first link, the last link, and the loops."""
    transport = LoopbackTransport()
    transport.open(Rendezvous("", (), {}, 0.0))
    links = [transport.sender(Link(number, number + 1, ())) for number in range(len(computes) + 1)]
    crew.on_stop(transport.close)
    loops, activities = [], []
    for number, compute in enumerate(computes):
        activity = Activity()
        outgoing = Outgoing(SendingEnd(links[number + 1], peer), activity)
        crew.on_stop(outgoing.close)
        loop = StageLoop(StageSteps(compute), Incoming(links[number], peer, activity), outgoing, activity)
        crew.start("compute", loop.run)
        crew.start("watch", outgoing.run)
        loops.append(loop)
        activities.append(activity)
    return links[0], links[-1], loops, activities


def plus_one(given: Packet) -> Packet:
    return Packet(given.number, given.items, (given.payload[0] + 1,))


def test_a_loop_that_has_ended_does_not_keep_what_computed() -> None:
    class Weights:
        def compute(self, given: Packet) -> Packet:
            return given

    weights = Weights()
    left = weakref.ref(weights)
    crew = Crew()
    way_in, way_out, loops, _ = pipeline(crew, [weights.compute])
    del weights
    way_in.post(packet(0))
    way_in.finish()
    assert way_out.receive() is not None
    assert way_out.receive() is None
    crew.wait()
    assert loops[0].work().items == 2
    assert left() is None


def test_a_loop_tells_how_much_its_quota_stretches_its_work() -> None:
    """As it is now: a quota may change while it computes."""
    quotas = [Quota(None), Quota(0.4), Quota(0.2), Quota(3.0)]
    activity, link = Activity(), LocalLink()
    outgoing = Outgoing(SendingEnd(link), activity)
    loop = StageLoop(
        StageSteps(plus_one), Incoming(link, None, activity), outgoing, activity, quota=lambda: quotas.pop(0)
    )
    assert [loop.work().stretch for _ in range(4)] == [1.0, 2.5, 5.0, 1.0]


@pytest.mark.parametrize("peer", [None, 7])
def test_microbatches_pass_all_stages_in_order(peer: int | None) -> None:
    crew = Crew()
    way_in, way_out, loops, activities = pipeline(crew, [plus_one] * 3, peer)

    def feed() -> None:
        for number in range(50):
            way_in.post(packet(number, number))
        way_in.finish()

    crew.start("feed", feed)
    for number in range(50):
        got = way_out.receive()
        assert got is not None
        assert (got.number, got.items) == (number, 2)
        assert got.payload[0].eq(number + 3).all()
    assert way_out.receive() is None
    assert crew.wait(LIMIT_S)
    for loop in loops:
        assert loop.lane.microbatches == loop.lane.tally(ThreadState.COMPUTE).count == 50
        assert 0 < loop.busy_fraction <= 1
    if peer is not None:
        assert activities[0].status().sent == activities[0].status().received == {7: 51}


def test_packets_in_flight_are_bounded_by_the_links() -> None:
    """A slow stage stops its predecessors, even if they have more to do."""
    crew, gate = Crew(), threading.Event()

    def slow(given: Packet) -> Packet:
        gate.wait(LIMIT_S)
        return given

    way_in, way_out, _, _ = pipeline(crew, [plus_one, slow])
    posted = itertools.count()
    last = [0]

    def feed() -> None:
        for number in range(100):
            way_in.post(packet(number))
            last[0] = next(posted)
        way_in.finish()

    crew.start("feed", feed)
    time.sleep(0.3)
    # Two on the way in, one done by the first stage and held, two between the stages, one in the second.
    assert last[0] < 2 + 1 + 2 + 1
    gate.set()
    assert [way_out.receive() is not None for _ in range(101)] == [True] * 100 + [False]
    assert crew.wait(LIMIT_S)


def test_a_stage_that_raises_ends_the_crew_with_its_microbatch_in_the_message() -> None:
    crew = Crew()

    def fail(given: Packet) -> Packet:
        if given.number == 3:
            raise IndexError("index out of range in self")
        return given

    way_in, way_out, _, _ = pipeline(crew, [plus_one, fail, plus_one])

    def feed() -> None:
        for number in range(100):
            way_in.post(packet(number))

    crew.start("feed", feed)
    crew.start("drain", lambda: [way_out.receive() for _ in range(100)])
    with pytest.raises(PipeEdgeError, match="microbatch 3 could not be computed: IndexError: index out of"):
        crew.wait(LIMIT_S)


def test_an_error_of_ours_keeps_its_kind() -> None:
    crew = Crew()

    def fail(given: Packet) -> Packet:
        raise WeightsError("tensor x is missing")

    way_in, _, _, _ = pipeline(crew, [fail])
    way_in.post(packet(0))
    with pytest.raises(WeightsError, match=r"^tensor x is missing$"):
        crew.wait(LIMIT_S)


def test_an_empty_input_ends_at_once() -> None:
    crew = Crew()
    way_in, way_out, loops, _ = pipeline(crew, [plus_one])
    way_in.finish()
    assert way_out.receive() is None
    assert crew.wait(LIMIT_S)
    assert loops[0].busy_fraction == 0
    assert loops[0].lane.tally(ThreadState.COMPUTE).mean == 0


class FakeLink:
    """A link that takes packets at once, and delivers each on request."""

    def __init__(self) -> None:
        self.arrivals: list[threading.Event] = []
        self.finished = False

    def post(self, given: Packet) -> FakeShipment:
        self.arrivals.append(threading.Event())
        return FakeShipment(self.arrivals[-1])

    def finish(self) -> None:
        self.finished = True


class FakeShipment:
    bytes = 1000

    def __init__(self, arrived: threading.Event) -> None:
        self._arrived = arrived

    def wait(self) -> None:
        if not self._arrived.wait(LIMIT_S):
            raise TimeoutError

    def receipt(self) -> Receipt:
        self.wait()
        return Receipt(apart_s=0.5, held_s=1.0)


def test_sending_measures_how_long_a_packet_occupies_the_link() -> None:
    clock = Clock()
    link = FakeLink()
    outgoing = Outgoing(SendingEnd(link, 1), Activity(), clock)
    crew = Crew()
    outgoing.send(packet(0))
    clock.now = 2.0
    link.arrivals[0].set()
    crew.start("watch", outgoing.run)
    until(lambda: outgoing.seconds.count >= 1, "the packet is counted")
    outgoing.finish()
    assert crew.wait(LIMIT_S)
    assert link.finished
    assert (outgoing.seconds.count, outgoing.seconds.mean) == (1, 2.0)
    assert (outgoing.bytes.count, outgoing.bytes.mean) == (1, 1000)
    assert outgoing.best_bytes_per_s == 500
    assert outgoing.send_s_best == 2.0


def test_receipts_tell_how_many_items_crossed_the_link_in_what_time() -> None:
    clock, link = Clock(), FakeLink()
    outgoing = Outgoing(SendingEnd(link, 1, receipts=True), Activity(), clock)
    crew = Crew()
    outgoing.send(packet(0))
    clock.now = 2.0
    link.arrivals[0].set()
    outgoing.finish()
    crew.start("watch", outgoing.run)
    assert crew.wait(LIMIT_S)
    assert (outgoing.crossed.count, outgoing.crossed.total) == (packet(0).items, 0.5)


# --- counting ---------------------------------------------------------------------------------------


def test_the_mean_of_an_empty_tally_is_zero() -> None:
    tally = Tally()
    assert tally.mean == 0
    tally.add(2)
    tally.add(4)
    assert (tally.count, tally.total, tally.mean) == (2, 6, 3)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], None),
        ([3.0], Latency(3, 3, 3)),
        ([2.0, 1.0], Latency(1, 2, 2)),
        ([float(number) for number in range(100, 0, -1)], Latency(50, 95, 100)),
        ([float(number) for number in range(1, 22)], Latency(11, 20, 21)),
    ],
)
def test_percentiles_are_those_of_the_nearest_rank(seconds: list[float], expected: Latency | None) -> None:
    assert Latency.of(seconds) == expected
