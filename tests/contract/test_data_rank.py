"""Test the feeder and the collector over links in memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from clock import Clock
from fake_items import NumberedItems

from pipeedge.base.crew import Crew
from pipeedge.data import InputSource, ReadAhead, open_input
from pipeedge.data.results import ResultWriter
from pipeedge.models import find_model
from pipeedge.observe.lanes import COLLECT, FEED, Lane
from pipeedge.observe.timeline import LaneId, LaneKind, ThreadState
from pipeedge.request.files import InputRequest
from pipeedge.run.data_rank import Collection, Collector, Feed, Feeder
from pipeedge.run.worker import Activity, Incoming, Outgoing, SendingEnd
from pipeedge.transport.base import Packet
from pipeedge.transport.loopback import LocalLink


def test_nan_outputs_are_counted(tmp_path: Path) -> None:
    """Two microbatches of three items come back; one item of the first is NaN, one of the second infinite."""
    model = find_model("vit-digits")
    source = open_input(InputRequest(max_items=6), model)
    inwards, outwards, activity = LocalLink(), LocalLink(), Activity()
    feeder = Feeder(Feed(source, 3), Outgoing(SendingEnd(inwards), activity), activity)
    crew = Crew()
    with ResultWriter(tmp_path / "o.npz", model, 6) as writer:
        collection = Collection(writer, counts_accuracy=True)
        collector = Collector(feeder, Incoming(outwards, None, activity), collection)
        crew.start("feed", feeder.run)
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
    assert collector.not_finite == 2
    assert writer.items == 6
    assert len(collector.latencies) == 2


@pytest.mark.parametrize("ubatch", [1, 4, 12])
@pytest.mark.parametrize("ahead", [False, True])
def test_reading_counts_however_large_the_microbatches_are(tmp_path: Path, ubatch: int, ahead: bool) -> None:
    """Twelve items take 24 s to read and nothing to compute."""
    clock = Clock(100.0)

    def take_two_seconds(_index: int) -> None:
        clock.now += 2

    source = InputSource(NumberedItems(12, take_two_seconds))
    inwards, outwards, activity, crew = LocalLink(), LocalLink(), Activity(), Crew()
    outgoing = Outgoing(SendingEnd(inwards), activity)
    reading = ReadAhead(source, ubatch, threads=1, clock=clock) if ahead else None
    readings = None if reading is None else reading.readings()
    feed_lane = Lane(LaneId(LaneKind.FEED), FEED, clock)
    feeder = Feeder(Feed(source, ubatch, readings=readings), outgoing, activity, feed_lane)
    with ResultWriter(None, find_model("vit-digits"), None) as writer:
        collection = Collection(writer, counts_accuracy=False)
        collect_lane = Lane(LaneId(LaneKind.COLLECT), COLLECT, clock)
        collector = Collector(feeder, Incoming(outwards, None, activity), collection, collect_lane)
        collector.lane.begin()
        crew.start("feed", feeder.run)
        crew.start("collect", collector.run)
        while feeder.started_at is None:
            pass
        if reading is not None:
            reading.start(crew)
        while (packet := inwards.receive()) is not None:
            outwards.post(Packet(packet.number, packet.items, (torch.zeros(packet.items, 10),)))
        outwards.finish()
        assert crew.wait(30)
    assert collector.elapsed_s == pytest.approx(24)
    if reading is None:
        assert feeder.waited_for_input_s() == pytest.approx(24)
    else:
        (lane,) = reading.lanes
        assert lane.tally(ThreadState.READ).total == pytest.approx(24)
        assert [row.number for row in lane.rows] == [number // ubatch for number in range(12)]
