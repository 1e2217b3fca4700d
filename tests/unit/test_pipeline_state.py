"""Test what the page and the metrics are told of a pipeline that answers."""

from __future__ import annotations

import prometheus_client.parser
import pytest
from clock import Clock

from pipeedge.base.fields import LongLine
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.observe.metrics import StageWork
from pipeedge.observe.pipeline_state import EpochState, PipelineState
from pipeedge.serve.figures import ServiceFigures
from pipeedge.serve.in_flight import QueueState

TWO = Schedule((StagePlan(LayerRange(0, 4), 0), StagePlan(LayerRange(4, 16), 2)))
NOTHING = QueueState(0, 0, 0, 0, 0, 0, 0, 0, 0)


def test_stages_are_judged_by_their_recent_time() -> None:
    watch = PipelineState()
    assert watch.stages() == []
    assert watch.bottleneck() is None
    watch.planned(TWO)
    for at in range(4):
        busy = {0: StageWork(100 + 0.25 * at, 0.5 * at, 0.25 * at), 2: StageWork(0.75 * at, 0.25 * at)}
        watch.heard(busy)
    assert [(state.busy, state.wait_link) for state in watch.stages()] == [(0.25, 0.25), (0.75, 0.0)]
    assert watch.bottleneck() == 1
    for at in range(20):
        watch.heard({0: StageWork(101, 2 + at), 2: StageWork(3, 1 + at)})
    assert [state.busy for state in watch.stages()] == [0.0, 0.0]
    assert watch.bottleneck() is None  # nothing is asked, so no stage limits anything


def test_epochs_are_counted_and_told() -> None:
    clock = Clock(1000.0)
    watch = PipelineState(clock)
    watch.prepares(1, "", ())
    watch.planned(TWO)
    assert watch.epoch == EpochState(number=1)
    clock.now = 1060
    watch.prepares(2, LongLine("rank 2 is gone"), (2,))
    assert watch.epoch == EpochState(number=2, recovering=True, lost_ranks=1)
    watch.prepares(3, "rank 4 is gone", (4, 5))
    watch.goes_on(1.25, 1)
    watch.prepares(4, "rank 6 is gone", (6,))
    watch.goes_on(0.5, 3)
    assert watch.epoch == EpochState(4, recovering=False, lost_ranks=4, recoveries=2, lost_s=1.75, repeated=4)
    events = watch.events()
    assert [event.line for event in events] == [
        "goes on after 0.5 s without a result; 3 microbatches computed again",
        "rank 6 is gone",
        "goes on after 1.2 s without a result; 1 microbatch computed again",
        "rank 4 is gone",
        "rank 2 is gone",
        "runs with layers 1-4 on rank 0, layers 5-16 on rank 2",
    ]
    assert {type(event.line) for event in events} == {str}  # which JSON takes
    assert [event.at for event in events] == [1060.0] * 5 + [1000.0]


def test_a_change_of_the_plan_is_no_recovery() -> None:
    watch = PipelineState()
    watch.prepares(1, "", ())
    watch.changed(2, "host b is twice as slow")
    assert watch.epoch == EpochState(number=2)
    assert watch.events()[0].line == "host b is twice as slow"


def test_events_are_bounded() -> None:
    watch = PipelineState()
    for epoch in range(2, 100):
        watch.prepares(epoch, f"cause {epoch}", ())
    assert len(watch.events()) == 20
    assert watch.events()[0].line == "cause 99"


def test_epochs_are_figures() -> None:
    text = ServiceFigures().text(NOTHING, {}, EpochState(3, True, 2, 1, 0.125, 7))
    samples = {
        one.name: one.value
        for family in prometheus_client.parser.text_string_to_metric_families(text)
        for one in family.samples
    }
    assert samples["pipeedge_epoch"] == 3
    assert samples["pipeedge_recovering"] == 1
    assert samples["pipeedge_lost_ranks_total"] == 2
    assert samples["pipeedge_recoveries_total"] == 1
    assert samples["pipeedge_lost_seconds_total"] == pytest.approx(0.125)
    assert samples["pipeedge_repeated_microbatches_total"] == 7
