"""Test that a better plan keeps the hosts in their order where that costs next to nothing."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from effort import cases
from live_cluster import best_placing, problem_of

from pipeedge.base.schedule import LayerRange
from pipeedge.plan.conditions import (
    Conditions,
    PlacedStage,
    link_seconds,
    period_s,
    stage_seconds,
    with_conditions,
)
from pipeedge.plan.host_order import handover_s, in_present_order
from pipeedge.plan.live_choice import Placing
from pipeedge.plan.problem import Problem
from pipeedge.plan.switch_memory import fits_beside, host_loads, to_load_bytes


def placing(*stages: tuple[str, int, int]) -> Placing:
    """Return stages by host, first and last layer."""
    return tuple(PlacedStage(host, LayerRange(first - 1, last)) for host, first, last in stages)


PRESENT = placing(("h0", 1, 12), ("h1", 13, 24), ("h2", 25, 36), ("h3", 37, 48))


def test_a_slow_host_keeps_its_place() -> None:
    problem = with_conditions(problem_of(4, 48), Conditions({"h2": 2.0}))
    found = placing(("h0", 1, 14), ("h2", 15, 21), ("h3", 22, 35), ("h1", 36, 48))
    kept = in_present_order(problem, PRESENT, found)
    assert [stage.host for stage in kept] == ["h0", "h1", "h2", "h3"]
    assert period_s(problem, kept) == period_s(problem, found)
    assert to_load_bytes(problem, PRESENT, kept) < to_load_bytes(problem, PRESENT, found) / 3


def test_a_host_that_joins_does_not_delay_the_next_result() -> None:
    problem = problem_of(4, 48)
    present = placing(("h0", 1, 16), ("h1", 17, 32), ("h3", 33, 48))
    found = placing(("h0", 1, 12), ("h1", 13, 24), ("h3", 25, 36), ("h2", 37, 48))
    kept = in_present_order(problem, present, found)
    assert [stage.host for stage in kept] == ["h0", "h2", "h1", "h3"]
    assert period_s(problem, kept) == period_s(problem, found)
    period = period_s(problem, present)
    assert handover_s(problem, present, found) == pytest.approx(1.5 * period, rel=0.02)
    assert handover_s(problem, present, kept) == pytest.approx(period, rel=0.02)


def next_result_s(problem: Problem, present: Placing, wanted: Placing, microbatches: int) -> float:
    """Return the seconds between the last result of a schedule and the first of the next, played through."""
    free: dict[str, float] = {}
    results = []
    for stages in (*[present] * microbatches, wanted):
        at = 0.0
        for stage, after in zip(stages, (*stages[1:], None), strict=True):
            at = free[stage.host] = max(at, free.get(stage.host, 0.0)) + stage_seconds(problem, stage)
            at += 0.0 if after is None else link_seconds(problem, stage, after.host)
        results.append(at)
    return results[-1] - results[-2]


@pytest.mark.parametrize("seed", range(cases(400, 20)))
def test_the_handover_is_the_longest_wait_for_the_next_result(seed: int) -> None:
    random = Random(seed)
    hosts = random.randint(2, 4)
    slow = {f"h{number}": random.uniform(0.5, 3.0) for number in range(hosts)}
    problem = with_conditions(problem_of(hosts, 12), Conditions(slow))

    def some_placing() -> Placing:
        names = random.sample(list(problem.hosts), random.randint(1, hosts))
        ends = [*sorted(random.sample(range(1, 12), len(names) - 1)), 12]
        bounds = pairwise([0, *ends])
        return placing(*((name, first + 1, last) for name, (first, last) in zip(names, bounds, strict=True)))

    present, wanted = some_placing(), some_placing()
    longest = handover_s(problem, present, wanted)
    assert next_result_s(problem, present, wanted, 1) == pytest.approx(longest)
    for microbatches in (2, 3, 8):
        assert next_result_s(problem, present, wanted, microbatches) <= longest + 1e-9


def test_bits_that_were_chosen_for_links_stay_with_them() -> None:
    problem = problem_of(2, 48)
    found = (PlacedStage("h1", LayerRange(0, 24), 8), PlacedStage("h0", LayerRange(24, 48)))
    present = placing(("h0", 1, 24), ("h1", 25, 48))
    assert in_present_order(problem, present, found) == found


@pytest.mark.parametrize("seed", range(cases(400, 20)))
def test_the_schedule_stays_whole_as_fast_and_cheaper_to_load(seed: int) -> None:
    random = Random(seed)
    hosts = random.randint(2, 4)
    profiled = problem_of(hosts, 12, memory=random.choice([1e9, 40e6]))
    slow = {f"h{number}": random.choice([1.0, random.uniform(0.5, 3.0)]) for number in range(hosts)}
    problem = with_conditions(profiled, Conditions(slow))
    names = list(profiled.hosts)
    random.shuffle(names)
    present = best_placing(profiled, Conditions(), names[: random.randint(1, hosts)])
    random.shuffle(names)
    found = best_placing(profiled, Conditions(slow), names)
    kept = in_present_order(problem, present, found)
    assert {stage.host for stage in kept} == {stage.host for stage in found}
    assert (kept[0].layers.start, kept[-1].layers.stop) == (0, 12)
    assert all(one.layers.stop == after.layers.start for one, after in pairwise(kept))
    assert period_s(problem, kept) <= 1.02 * period_s(problem, found) * (1 + 1e-9)
    if kept != found:
        assert fits_beside(problem, present, kept)
        before, after = (list(host_loads(problem, present, stages)) for stages in (found, kept))
        is_sooner = handover_s(problem, present, kept) < handover_s(problem, present, found)
        assert is_sooner or (max(after), sum(after)) < (max(before), sum(before))
