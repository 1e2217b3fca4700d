"""Test the simulated run against a queue of events, arithmetic, and itself."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.pipeline_events import play

from pipeedge.observe.timeline import ThreadState
from pipeedge.simulate.simulation import PipelineModel, SimulatedLink, SimulatedStage, simulate

COSTS = st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3, 1.0, 1.7])
STAGES = st.builds(
    SimulatedStage, compute_s=st.floats(0.0, 2.0), decode_s=COSTS, encode_s=COSTS, send_s=COSTS
)
LINKS = st.one_of(
    st.just(SimulatedLink(in_memory=True)),
    st.builds(SimulatedLink, wire_s=st.floats(0.0, 3.0), latency_s=COSTS),
)


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineModel:
    stages = draw(st.lists(STAGES, min_size=1, max_size=6))
    links = draw(st.lists(LINKS, min_size=len(stages) + 1, max_size=len(stages) + 1))
    return PipelineModel(
        tuple(stages),
        tuple(links),
        draw(st.integers(1, 14)),
        draw(COSTS),
        draw(COSTS),
        draw(st.sampled_from([1.0, 0.5, 0.125])),
    )


@given(pipelines())
def test_times_equal_those_of_an_event_queue(model: PipelineModel) -> None:
    run, played = simulate(model), play(model)
    assert run.fed_at == pytest.approx(played.fed_at, abs=1e-9)
    assert run.result_at == pytest.approx(played.result_at, abs=1e-9)
    spans = run.timeline(range(len(model.stages))).spans
    for stage in range(len(model.stages)):
        assert run.wait_link_s[stage] == pytest.approx(played.waited_for_link[stage], abs=1e-9)
        assert run.fill_s[stage] + run.wait_input_s[stage] == pytest.approx(
            played.waited_for_input[stage], abs=1e-9
        )
        assert run.length_s - run.drain_s[stage] == pytest.approx(played.free_at[stage], abs=1e-9)
        lane = [s for s in spans if s.lane == f"stage {stage}" and s.doing is not ThreadState.WAIT_INPUT]
        starts = [[s.start_s for s in lane if s.microbatch == number] for number in range(model.microbatches)]
        begun = [min(times) for times in starts if times]
        if len(begun) == model.microbatches:
            assert begun == pytest.approx(played.taken[stage], abs=1e-9)


@given(pipelines())
def test_the_times_of_a_stage_add_up_to_the_run(model: PipelineModel) -> None:
    run = simulate(model)
    timeline = run.timeline(range(len(model.stages)))
    for stage in range(len(model.stages)):
        seconds = run.seconds(stage)
        assert math.fsum(seconds.values()) == pytest.approx(run.length_s, abs=1e-9)
        drawn = timeline.seconds(stage, f"stage {stage}")
        for doing, total in seconds.items():
            assert drawn.get(doing, 0.0) == pytest.approx(total, abs=1e-9)
        lane = [span for span in timeline.spans if span.lane == f"stage {stage}"]
        at = 0.0
        for span in lane:
            assert span.start_s == pytest.approx(at, abs=1e-9)
            at = span.end_s
        assert at == pytest.approx(run.length_s, abs=1e-9)


@given(pipelines())
def test_more_of_anything_never_ends_earlier(model: PipelineModel) -> None:
    longer = simulate(dataclasses.replace(model, microbatches=model.microbatches + 1, last_fraction=1.0))
    assert longer.length_s >= simulate(model).length_s - 1e-9


@given(pipelines(), st.integers(1, 4))
def test_the_number_of_kept_lanes_changes_no_figure(model: PipelineModel, lanes: int) -> None:
    everything, few = simulate(model), simulate(model, kept_moments=lanes * model.microbatches)
    assert everything.length_s == few.length_s
    assert (everything.result_at == few.result_at).all()
    assert (everything.wait_link_s == few.wait_link_s).all()
    assert everything.drawn == tuple(range(len(model.stages)))
    assert {0, len(model.stages) - 1} <= set(few.drawn) <= set(everything.drawn)
    assert len(few.drawn) <= max(2, lanes)
    kept = {span for span in everything.timeline(range(6)).spans if span.rank in few.drawn}
    assert kept == set(few.timeline(range(6)).spans)


def test_a_full_pipeline_goes_at_the_pace_of_its_slowest_part() -> None:
    stages = (SimulatedStage(1.0), SimulatedStage(3.0), SimulatedStage(2.0))
    links = (SimulatedLink(in_memory=True), *(SimulatedLink(0.5, 0.1) for _ in range(3)))
    run = simulate(PipelineModel(stages, links, 50))
    # Through the idle pipeline, then one period of 3 s for each further microbatch.
    assert run.length_s == pytest.approx(1 + 0.6 + 3 + 0.6 + 2 + 0.6 + 49 * 3)
    assert np.diff(run.result_at) == pytest.approx(3.0)


def test_a_slow_wire_bounds_it_and_latency_does_not() -> None:
    stages = (SimulatedStage(1.0), SimulatedStage(1.0))
    local = SimulatedLink(in_memory=True)
    wire = simulate(PipelineModel(stages, (local, SimulatedLink(wire_s=4.0), local), 40))
    assert np.diff(wire.result_at)[10:] == pytest.approx(4.0)
    assert wire.wait_link_s[0] > 100
    assert wire.wait_input_s[1] == pytest.approx(39 * 3.0)
    # Two frames are under way while another is computed, so a latency is felt from twice that time on.
    late = simulate(PipelineModel(stages, (local, SimulatedLink(latency_s=2.0), local), 40))
    assert np.diff(late.result_at) == pytest.approx(1.0)
    later = simulate(PipelineModel(stages, (local, SimulatedLink(latency_s=3.0), local), 40))
    assert np.diff(later.result_at)[10:].mean() == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(("network", "ahead"), [(True, 5), (False, 3)])
def test_a_stage_runs_as_far_ahead_as_frames_allow(network: bool, ahead: int) -> None:
    """Over a network two in front of the next stage and two on their way, in memory two; and one in its own
    hands."""
    link = SimulatedLink() if network else SimulatedLink(in_memory=True)
    local = SimulatedLink(in_memory=True)
    model = PipelineModel((SimulatedStage(0.001), SimulatedStage(100.0)), (local, link, local), 12)
    spans = simulate(model).timeline([0, 1]).spans
    done = [span.end_s for span in spans if span.lane == "stage 0" and span.doing is ThreadState.COMPUTE]
    # While the other one computes the first.
    assert sum(at < 50 for at in done) == ahead + 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"stages": ()}, "links are one more"),
        ({"microbatches": 0}, "at least one"),
        ({"last_fraction": 0.0}, "last microbatch"),
        ({"feed_s": -1.0}, "feed_s"),
        ({"collect_s": math.inf}, "collect_s"),
    ],
)
def test_invalid_pipeline_is_refused(change: dict, what: str) -> None:
    model = PipelineModel((SimulatedStage(1.0),), (SimulatedLink(), SimulatedLink()), 2)
    with pytest.raises(ValueError, match=what):
        dataclasses.replace(model, **change)


def test_invalid_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="compute_s is nan"):
        SimulatedStage(math.nan)
    with pytest.raises(ValueError, match="wire_s is -1"):
        SimulatedLink(-1)
    with pytest.raises(ValueError, match="no wire"):
        SimulatedLink(1.0, in_memory=True)
