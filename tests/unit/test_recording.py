"""Test lanes: records are exact even if merged, and an assembled run has no gaps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from clock import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeedge.base.fields import decode, encode
from pipeedge.base.schedule import Schedule
from pipeedge.observe.assembly import assemble, series
from pipeedge.observe.lanes import FEED, STAGE, Lane, LinkLane, WorkLane
from pipeedge.observe.records import EpochRecord, LaneRecord, LinkRecord, Recording, Transfer
from pipeedge.observe.timeline import LaneId, LaneKind, ThreadState, Timeline
from pipeedge.observe.trace import trace_events

Cycle = Sequence[int]
"""Microseconds of each activity of a stage for a microbatch."""
cycles = st.lists(st.lists(st.integers(0, 5000), min_size=5, max_size=5), max_size=70)


def played(todo: Sequence[Cycle], *, capacity: int, began_us: int = 1000) -> tuple[Lane, Clock]:
    """Return the lane of a stage with these times."""
    clock = Clock()
    clock.now = began_us * 1e-6
    lane = Lane(LaneId.stage(0), STAGE, clock, capacity)
    lane.begin()
    for number, cycle in enumerate(todo):
        for phase, spent in zip(STAGE, cycle, strict=True):
            if phase is not ThreadState.WAIT_INPUT:
                lane.enter(phase)
            clock.now += spent * 1e-6
        lane.finish(number, 8, 100 + number, 8)
    return lane, clock


@settings(max_examples=60)
@given(cycles, st.sampled_from([2, 4, 16, 400]))
def test_nothing_is_lost_by_merging(todo: Sequence[Cycle], capacity: int) -> None:
    lane, _ = played(todo, capacity=capacity)
    rows = lane.rows
    assert len(rows) <= capacity
    assert sum(row.microbatches for row in rows) == lane.microbatches == len(todo)
    assert sum(row.items for row in rows) == 8 * len(todo)
    assert sum(row.bytes for row in rows) == sum(100 + number for number in range(len(todo)))
    for place, phase in enumerate(STAGE):
        expected = sum(cycle[place] for cycle in todo) * 1e-6
        assert lane.tally(phase).total == pytest.approx(expected, abs=1e-9)
        fill = lane.fill_s if phase is ThreadState.WAIT_INPUT else 0.0
        assert sum(row.seconds[place] for row in rows) + fill == pytest.approx(expected, abs=1e-9)
    for before, after in pairwise(rows):
        assert before.end_s == pytest.approx(after.start_s, abs=1e-9)
        assert before.number + before.microbatches == after.number


def recording(lane: LaneRecord, rank: int = 0) -> Recording:
    return Recording(rank, "host", (lane,))


@settings(max_examples=60)
@given(cycles, st.sampled_from([2, 16, 400]), st.integers(0, 20_000), st.integers(0, 20_000))
def test_a_run_has_no_gap_from_the_first_microbatch_to_the_end(
    todo: Sequence[Cycle], capacity: int, late_us: int, longer_us: int
) -> None:
    """The stage starts to wait before or after the run begins, and ends before it does."""
    lane, clock = played(todo, capacity=capacity, began_us=late_us)
    began = 0.01
    length = max(clock.now - began, 0.0) + longer_us * 1e-6 + 1e-3
    told = Recording.from_text(0, recording(lane.record(lambda ours: ours)).to_text())
    timeline = assemble([told], began, length)
    spans = timeline.spans
    assert spans[0].start_s == 0
    assert spans[-1].end_s == length
    assert all(one.end_s == other.start_s for one, other in pairwise(spans))
    assert sum(timeline.seconds(0, "stage 0").values()) == pytest.approx(length)
    if todo and began <= late_us * 1e-6:
        computed = sum(cycle[2] for cycle in todo) * 1e-6
        assert timeline.seconds(0, "stage 0").get(ThreadState.COMPUTE, 0.0) == pytest.approx(
            computed, abs=1e-3
        )


def test_fill_drain_and_waits_have_their_names() -> None:
    todo = [[3000, 0, 1000, 0, 500], [200, 0, 1000, 0, 0]]
    lane, _ = played(todo, capacity=16, began_us=0)
    timeline = assemble([recording(lane.record(lambda ours: ours))], 0.0, 0.01)
    found = [(span.doing, round(span.start_s, 6), span.microbatch) for span in timeline.spans]
    assert found == [
        (ThreadState.FILL, 0.0, None),
        (ThreadState.COMPUTE, 0.003, 0),
        (ThreadState.WAIT_LINK, 0.004, 0),
        (ThreadState.WAIT_INPUT, 0.0045, 1),
        (ThreadState.COMPUTE, 0.0047, 1),
        (ThreadState.DRAIN, 0.0057, None),
    ]
    assert Timeline.from_body(json.loads(json.dumps(timeline.to_body()))).length_s == 0.01


SCHEDULE = Schedule.from_partition([1, 2, 3, 4])


def test_each_epoch_has_lanes_and_bubbles_of_its_own() -> None:
    """The run fails after 6 ms; the plan is there after 1 ms, and its layers after 2 more."""
    link = LinkRecord(LaneId.link(0), 1, (Transfer(0, 8, 0.004, 0.0045),))
    lane, _ = played([[3000, 0, 1000, 0, 500]], capacity=16, began_us=0)
    told = recording(lane.record(lambda ours: ours))
    later, _ = played([[1000, 0, 2000, 0, 0]], capacity=16, began_us=9000)
    last = replace(recording(later.record(lambda ours: ours)), epoch=2)
    epochs = [EpochRecord(1, SCHEDULE, 0.0), EpochRecord(2, SCHEDULE, 0.009, "lost", (1,), 0.001, 0.002)]
    timeline = assemble([last], 0.0, 0.02, [replace(told, links=(link,), epoch=1)], epochs)
    assert [(span.lane, span.doing, round(span.start_s, 6)) for span in timeline.spans] == [
        ("stage 0", ThreadState.RECOVER, 0.006),
        ("stage 0", ThreadState.FILL, 0.009),
        ("stage 0", ThreadState.COMPUTE, 0.01),
        ("stage 0", ThreadState.DRAIN, 0.012),
        ("epoch 1, stage 0", ThreadState.FILL, 0.0),
        ("epoch 1, stage 0", ThreadState.COMPUTE, 0.003),
        ("epoch 1, stage 0", ThreadState.WAIT_LINK, 0.004),
        ("epoch 1, stage 0", ThreadState.DRAIN, 0.0045),
        ("epoch 1, stage 0 link", ThreadState.SEND, 0.004),
    ]
    accounted = sum(sum(timeline.seconds(0, lane).values()) for lane in ("stage 0", "epoch 1, stage 0"))
    assert accounted == pytest.approx(timeline.length_s)
    events = trace_events(timeline, SCHEDULE, 0, epochs[:1])["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"stage 0", "epoch 1, stage 0", "epoch 1, stage 0 link", "epoch 1, from stage 0"}


def test_a_change_of_the_plan_takes_over_on_each_lane_where_the_epoch_before_ends() -> None:
    before, clock = played([[0, 0, 1000, 0, 0], [0, 0, 1000, 0, 0]], capacity=16, began_us=0)
    after, _ = played([[500, 0, 2000, 0, 0]], capacity=16, began_us=round(clock.now * 1e6))
    told = [
        replace(recording(one.record(lambda ours: ours)), epoch=n) for n, one in ((1, before), (2, after))
    ]
    # The change counts from the first result, which comes later.
    epochs = [EpochRecord(1, SCHEDULE, 0.0), EpochRecord(2, SCHEDULE, 0.006, "slow", filling_s=0.001)]
    timeline = assemble(told[1:], 0.0, 0.0045, told[:1], epochs)
    assert [(span.lane, span.doing, round(span.start_s, 6)) for span in timeline.spans] == [
        ("stage 0", ThreadState.FILL, 0.002),
        ("stage 0", ThreadState.COMPUTE, 0.0025),
        ("epoch 1, stage 0", ThreadState.COMPUTE, 0.0),
        ("epoch 1, stage 0", ThreadState.COMPUTE, 0.001),
    ]


def test_a_feeder_starts_with_work_not_filling() -> None:
    clock = Clock()
    lane = Lane(LaneId(LaneKind.FEED), FEED, clock)
    lane.begin()
    clock.now = 0.75
    lane.enter(ThreadState.WAIT_INPUT)
    clock.now = 1.0
    lane.enter(ThreadState.WAIT_LINK)
    clock.now = 3.0
    lane.finish(0, 8)
    assert lane.fill_s == 0
    timeline = assemble([recording(lane.record(lambda ours: ours))], 0.5, 4.0)
    assert timeline.seconds(0, "feed") == {
        ThreadState.READ: 0.25,
        ThreadState.WAIT_INPUT: 0.25,
        ThreadState.WAIT_LINK: 2.0,
        ThreadState.DRAIN: 1.5,
    }


def test_totals_include_the_current_phase() -> None:
    clock = Clock()
    lane = Lane(LaneId.stage(0), STAGE, clock)
    assert set(lane.totals().values()) == {0.0}
    clock.now = 5.0
    lane.begin()
    clock.now = 6.0
    lane.enter(ThreadState.COMPUTE)
    clock.now = 8.5
    assert lane.totals()[ThreadState.WAIT_INPUT] == 1.0
    assert lane.totals()[ThreadState.COMPUTE] == 2.5
    assert lane.tally(ThreadState.COMPUTE).total == 0


def test_what_is_finished_ends_with_the_latest_finished_microbatch() -> None:
    clock = Clock()
    lane = Lane(LaneId.stage(0), STAGE, clock)
    assert lane.finished() == (0, dict.fromkeys(STAGE, 0.0))
    lane.begin()
    clock.now += 0.5
    for items in (3, 2):
        lane.enter(ThreadState.COMPUTE)
        clock.now += 1.5
        lane.enter(ThreadState.WAIT_LINK)
        lane.finish(0, items)
    lane.enter(ThreadState.COMPUTE)
    clock.now += 9.0
    items, seconds = lane.finished()
    assert items == 5
    assert seconds[ThreadState.COMPUTE] == 3.0
    assert sum(seconds.values()) == 3.5


def test_a_link_keeps_a_bounded_number_of_transfers() -> None:
    link = LinkLane(LaneId.link(0), 1, capacity=8)
    for number in range(1000):
        link.add(number, 10, number, number + 0.5)
    kept = link.record(lambda ours: ours + 7).transfers
    assert 4 <= len(kept) < 8
    assert kept[0].number == 0
    assert {later.number - one.number for one, later in pairwise(kept)} == {256}
    assert kept[1].start_s == kept[1].number + 7


def test_series_gives_the_speed_of_each_stage() -> None:
    lane, _ = played([[0, 0, 1000, 0, 0]] * 10, capacity=16, began_us=0)
    link = LinkLane(LaneId.link(0), 1)
    link.add(3, 1000, 0.0031, 0.0033)
    told = Recording(2, "host", (lane.record(float),), (link.record(float),))
    (found,) = series([told], 0.0, window=4)
    assert (found["stage"], found["rank"]) == (0, 2)
    assert found["t_s"] == [0.004, 0.008, 0.01]
    assert found["items_per_s"] == pytest.approx([8000] * 3)
    assert found["bytes_per_s"][0] == pytest.approx((100 + 101 + 102 + 103) / 0.004, rel=1e-4)
    assert found["link_bytes_per_s"] == [pytest.approx(5e6), None, None]
    assert found["bits"] == [8, 8, 8]


def test_a_series_is_bounded() -> None:
    lane, _ = played([[0, 0, 10, 0, 0]] * 300, capacity=400)
    (found,) = series([recording(lane.record(float))], 0.0, points=7)
    assert len(found["t_s"]) <= 7


def feed_recording(phase: str, row: str) -> str:
    """Return the text of a recording with one row."""
    lane = f'{{"lane":{{"kind":"feed"}},"phases":["{phase}"],"fill_s":0,"rows":[{row}]}}'
    return f'{{"rank":0,"host":"h","lanes":[{lane}]}}'


def link_recording(transfer: str) -> str:
    """Return the text of a recording with one transfer."""
    link = f'{{"lane":{{"kind":"link"}},"destination":null,"transfers":[{transfer}]}}'
    return f'{{"rank":0,"host":"h","links":[{link}]}}'


def test_a_recording_leaves_out_what_it_does_not_have() -> None:
    found = Recording.from_text(0, feed_recording("read", "[0,1,1,0,8,5,[1]]"))
    assert found.lanes[0].rows[0].seconds == (1.0,)
    found = Recording.from_text(0, link_recording("[0,0,1,2]"))
    assert found.links[0].transfers == (Transfer(0, 0, 1.0, 2.0),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"rank":0,"host":1}',
        '{"rank":1,"host":"h"}',
        *(
            feed_recording(phase, row)
            for phase, row in (
                ("sleep", "[0,1,1,0,8,5,[1]]"),
                ("read", "[0,1,1,0,8,5,[]]"),
                ("read", "[0,1,1,0,8,5,[0,0]]"),
                ("read", "[0,1,1,0,8,5,[-1]]"),
                ("read", "[0,1,1,0,8,5,[1e300]]"),
                ("read", "[0,0,1,0,8,5,[1]]"),
                ("read", "[0,1,1,0,8,true,[1]]"),
                ("read", "[0,1,1,0,8,5]"),
                ("read", "[]"),
            )
        ),
        *map(link_recording, ("[0,0,true,0]", "[0,0,2,1]", "[0.5,0,0,0]", "[0,0,0]", "{}")),
        "[" * 100_000,
    ],
    ids=lambda text: text[-40:],
)
def test_a_malformed_recording_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, RecursionError)):
        Recording.from_text(0, text)


def test_a_lane_of_an_odd_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        Lane(LaneId.stage(0), STAGE, Clock(), 3)


def test_lane_is_known_by_its_kind_and_stages() -> None:
    labels = {
        LaneId.stage(3): "stage 3",
        LaneId.stage(0, 1, 2): "stages 0-2",
        LaneId.stage(0, 2): "stages 0, 2",
        LaneId.link(3): "stage 3 link",
        LaneId.link(): "feed link",
        LaneId(LaneKind.READ, thread=1): "read 1",
        LaneId(LaneKind.FEED): "feed",
        LaneId(LaneKind.COLLECT): "collect",
    }
    assert {lane.label for lane in labels} == set(labels.values())
    for lane, label in labels.items():
        assert lane.label == label
        assert decode(encode(lane), LaneId) == lane


@pytest.mark.parametrize(
    ("kind", "stages", "thread"),
    [
        (LaneKind.STAGE, (), None),
        (LaneKind.LINK, (0, 1), None),
        (LaneKind.FEED, (0,), None),
        (LaneKind.READ, (), None),
        (LaneKind.COLLECT, (), 1),
    ],
)
def test_lane_without_its_numbers_is_refused(
    kind: LaneKind, stages: tuple[int, ...], thread: int | None
) -> None:
    with pytest.raises(ValueError, match=kind.value):
        LaneId(kind, stages, thread)


def test_operations_in_any_order_are_kept_with_the_waits_between_them() -> None:
    clock = Clock()
    lane = WorkLane(clock, capacity=3)
    lane.begin()
    clock.now = 1.0
    for what, number in ((ThreadState.FORWARD, 0), (ThreadState.BACKWARD, 0)):
        with lane.doing(what, 2, number):
            clock.now += 2.0
        clock.now += 0.5
    told = lane.record(LaneId.stage(2), lambda ours: ours + 10)
    assert not told.is_complete
    assert [one.doing for one in told.works] == [
        ThreadState.FORWARD,
        ThreadState.WAIT_INPUT,
        ThreadState.BACKWARD,
    ]
    assert told.seconds == ((2, ThreadState.BACKWARD, 2.0), (2, ThreadState.FORWARD, 2.0))
    assert (told.begun_s, told.until_s, told.work_s) == (10.0, 15.5, 4.0)
    kept = Recording.from_text(0, Recording(0, "host", works=(told,)).to_text())
    timeline = assemble([kept], 11.0, 5.0)
    assert [(span.lane, span.doing, span.start_s, span.end_s) for span in timeline.spans] == [
        ("stage 2", ThreadState.FORWARD, 0.0, 2.0),
        ("stage 2", ThreadState.WAIT_INPUT, 2.0, 2.5),
        ("stage 2", ThreadState.BACKWARD, 2.5, 4.5),
        ("stage 2", ThreadState.DRAIN, 4.5, 5.0),
    ]
