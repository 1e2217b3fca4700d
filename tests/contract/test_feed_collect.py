"""Test the feeder and the collector over links in memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from clock import Clock
from fake_items import NumberedItems
from hypothesis import given
from hypothesis import strategies as st
from waiting import LIMIT_S, until

from pipeedge.base.channel import Channel
from pipeedge.base.crew import Crew
from pipeedge.data import Group, InputSource, InputStream, open_input
from pipeedge.data.results import ResultWriter
from pipeedge.models import find_model
from pipeedge.observe.lanes import COLLECT, FEED, Lane
from pipeedge.observe.timeline import LaneId, LaneKind, ThreadState
from pipeedge.request.files import InputRequest
from pipeedge.run.activity import Activity
from pipeedge.run.feed_collect import Collection, Collector, Feed, Feeder
from pipeedge.run.ledger import Ledger
from pipeedge.run.worker import Incoming, Outgoing, SendingEnd, StageLoop, StageSteps
from pipeedge.transport.base import Packet
from pipeedge.transport.loopback import LocalLink


def test_nan_outputs_are_counted(tmp_path: Path) -> None:
    """Two microbatches of three items come back; one item of the first is NaN, one of the second infinite."""
    model = find_model("vit-digits")
    source = open_input(InputRequest(max_items=6), model)
    inwards, outwards, activity = LocalLink(), LocalLink(), Activity()
    feeder = Feeder(Feed(source.stream(), 3), activity)
    crew = Crew()
    with ResultWriter(tmp_path / "o.npz", model, 6) as writer:
        collection = Collection(writer, counts_accuracy=True)
        collector = Collector(feeder, Incoming(outwards, None, activity), collection)
        crew.start("feed", lambda: feeder.run(Outgoing(SendingEnd(inwards), activity)))
        crew.start("collect", collector.run)
        for value in (math.nan, -math.inf):
            packet = inwards.receive()
            assert packet is not None
            outputs = torch.zeros(3, 10)
            outputs[1, 4] = value
            outwards.post(Packet(packet.number, packet.items, (outputs,)))
        assert inwards.receive() is None
        outwards.finish()
        crew.wait()
    assert collector.collected.not_finite == 2
    assert writer.items == 6
    assert len(collector.collected.latencies) == 2


@pytest.mark.parametrize("ubatch", [1, 4, 12])
@pytest.mark.parametrize("ahead", [False, True])
def test_reading_counts_however_large_the_microbatches_are(tmp_path: Path, ubatch: int, ahead: bool) -> None:
    """Twelve items take 24 s to read and nothing to compute."""
    clock = Clock(100.0)

    def take_two_seconds(_index: int) -> None:
        clock.now += 2

    source = InputSource(NumberedItems(12, take_two_seconds))
    inwards, outwards, activity, crew = LocalLink(), LocalLink(), Activity(), Crew()
    stream = InputStream(source, threads=int(ahead), clock=clock)
    feed_lane = Lane(LaneId(LaneKind.FEED), FEED, clock)
    feeder = Feeder(Feed(stream, ubatch), activity, feed_lane)
    with ResultWriter(None, find_model("vit-digits"), None) as writer:
        collection = Collection(writer, counts_accuracy=False)
        collect_lane = Lane(LaneId(LaneKind.COLLECT), COLLECT, clock)
        collector = Collector(feeder, Incoming(outwards, None, activity), collection, collect_lane)
        collector.lane.begin()
        crew.start("feed", lambda: feeder.run(Outgoing(SendingEnd(inwards), activity)))
        crew.start("collect", collector.run)
        while feeder.started_at is None:
            pass
        stream.start(crew)
        while (packet := inwards.receive()) is not None:
            outwards.post(Packet(packet.number, packet.items, (torch.zeros(packet.items, 10),)))
        outwards.finish()
        assert crew.wait(30)
    assert collector.collected.elapsed_s == pytest.approx(24)
    if not ahead:
        assert feeder.waited_for_input_s() == pytest.approx(24)
    else:
        (lane,) = stream.lanes
        assert lane.tally(ThreadState.READ).total == pytest.approx(24)
        assert [row.number for row in lane.rows] == [number // ubatch for number in range(12)]


def test_a_stage_on_the_data_rank_takes_a_microbatch_when_it_can_compute_one() -> None:
    source, activity, out = InputSource(NumberedItems(12, lambda index: None)), Activity(), LocalLink()
    stream, crew = source.stream(), Crew()
    feeder = Feeder(Feed(stream, 3), activity)
    fed: list[tuple[int, int]] = []

    def compute(packet: Packet) -> Packet:
        fed.append((packet.number, feeder.ledger.under_way))
        return packet

    loop = StageLoop(
        StageSteps(compute), Incoming(feeder, None, activity), Outgoing(SendingEnd(out), activity), activity
    )
    crew.on_stop(out.close)
    crew.start("compute", loop.run)
    stream.start(crew)
    packets = list(iter(out.receive, None))
    assert crew.wait(LIMIT_S)
    assert [(packet.number, packet.items) for packet in packets] == [(number, 3) for number in range(4)]
    assert fed == [(number, number + 1) for number in range(4)]  # the one it computes is the latest
    assert [row.number for row in feeder.lane.rows] == [0, 1, 2, 3]


class QueuedStream:
    """Microbatches that somebody puts into a queue, now or later."""

    lanes = ()
    fetching = ThreadState.IDLE

    def __init__(self) -> None:
        self.queue: Channel[Group] = Channel(9)
        self.asked: list[int] = []

    def start(self, crew: Crew) -> None:
        crew.on_stop(self.queue.close)

    def next(self, microbatch_size: int) -> Group | None:
        self.asked.append(microbatch_size)
        return self.queue.get()


def test_a_feeder_that_takes_over_asks_for_microbatches_of_its_plan() -> None:
    ledger, stream, activity = Ledger(), QueuedStream(), Activity()
    ledger.begin(0.0)
    ledger.change(1, 9)
    assert Feeder(Feed(stream, 2, ledger=ledger), activity).receive() is None
    stream.queue.finish()
    assert Feeder(Feed(stream, 4, ledger=ledger, takes_over=True), activity).receive() is None
    assert stream.asked == [4]


def test_a_rank_is_idle_only_while_nothing_is_under_way_and_more_may_come() -> None:
    items, stream = NumberedItems(3, lambda index: None), QueuedStream()
    inwards, outwards, activity, crew = LocalLink(), LocalLink(), Activity(), Crew()
    feeder = Feeder(Feed(stream, 3), activity)
    activity.feeder(lambda: feeder.is_idle, lambda: None, lambda: None)
    assert not activity.status().idle  # it has not begun
    with ResultWriter(None, find_model("vit-digits"), None) as sink:
        collector = Collector(
            feeder, Incoming(outwards, None, activity), Collection(sink, counts_accuracy=False)
        )
        stream.start(crew)
        crew.start("feed", lambda: feeder.run(Outgoing(SendingEnd(inwards), activity)))
        crew.start("collect", collector.run)
        for size in (1, 2):
            until(lambda: activity.status().idle, "the idle time")
            before = activity.status().progress
            stream.queue.put(Group([(number, items.read(number)) for number in range(size)]))
            packet = inwards.receive()
            assert packet is not None
            assert packet.items == size  # as many as there are, not as many as fit
            status = activity.status()
            assert not status.idle
            assert status.progress > before  # so that the idle time does not count as a stall
            outwards.post(Packet(packet.number, packet.items, (torch.zeros(packet.items, 10),)))
        until(lambda: activity.status().idle, "the idle time")
        stream.queue.finish()
        assert inwards.receive() is None
        outwards.finish()
        assert crew.wait(30)
    assert sink.items == 3
    assert collector.lane.microbatches == len(collector.collected.latencies) == 2


@pytest.mark.parametrize("in_memory", [False, True])
@given(st.integers(1, 30), st.integers(1, 7), st.data())
def test_a_source_is_read_again_from_any_item(
    in_memory: bool, total: int, ubatch: int, data: st.DataObject
) -> None:
    items = NumberedItems(total, lambda index: None)
    items.in_memory = in_memory
    source = InputSource(items)
    assert source.total == total
    for _ in range(2):
        position = data.draw(st.integers(0, total - 1))
        crew, stream = Crew(), source.stream(position=position)
        stream.start(crew)
        groups = list(iter(lambda stream=stream: stream.next(ubatch), None))  # type: ignore[misc]
        assert [number for group in groups for number, _ in group.numbered] == list(range(position, total))
        assert all(len(group.numbered) == ubatch for group in groups[:-1])
        assert crew.wait(30)
