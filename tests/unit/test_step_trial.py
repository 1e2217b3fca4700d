"""Test the measurement of steps at the start, against stages whose times are known."""

from __future__ import annotations

from itertools import pairwise

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.decoding.step_limits import CacheSize, PlannedGroups, StepLimits
from pipeedge.decoding.step_times import StepTimes
from pipeedge.decoding.step_trial import MeasuredSteps, StepTrial, TrialStep
from pipeedge.decoding.steps import DecodingStep

CACHE = CacheSize(pages=1000)


def stage_s(step: DecodingStep, reading: float) -> float:
    """Return the seconds of a stage: for reading weights, or 2 ms a row if that is longer."""
    cost = 0.0
    for part in step.parts:
        rows = len(part.tokens)
        cost += rows * (1 + 1e-3 * (part.position + (rows - 1) / 2)) + 2e-3 * part.position
    return max(reading, 0.002 * cost)


def measured(
    places: list[float],
    limits: StepLimits,
    *,
    hop: float = 0.0,
    slow: float = 1.0,
    reading: float = 0.02,
    cold: float = 0.0,
    head: float = 0.0,
) -> StepLimits:
    """Let the measurement run through places, whose times are these parts of a stage's.

    The first step takes ``cold`` seconds more, and the last place ``head`` for each row that decides a token.
    """
    trial, now = StepTrial(limits, CACHE), 0.0
    while not trial.is_over:
        step = trial.next(now)
        assert step is not None
        assert trial.next(now) is None
        check_bounds(step, limits)
        now += cold * (step.number == 0)
        now += sum(slow * share * stage_s(step, reading) + hop for share in places)
        now += head * sum(part.deciding for part in step.parts)
        trial.finished(now)
    assert trial.next(now) is None
    return trial.limits


def check_bounds(step: DecodingStep, limits: StepLimits) -> None:
    """Check that a step is one that stages take, of sequences that have nothing in common."""
    assert step.rows <= limits.rows
    assert len(step.parts) <= limits.sequences
    pages = [page for part in step.parts for page in part.pages]
    assert len(set(pages)) == len(pages)
    assert set(pages) <= set(range(CACHE.pages))
    for part in step.parts:
        end = part.position + len(part.tokens)
        assert end <= limits.context
        assert len(part.pages) == -(-end // CACHE.page)


def test_times_and_attention_are_found() -> None:
    limits = StepLimits(context=4096, groups=6, rows=256)
    found = measured([0.25, 0.5, 0.25], limits, hop=0.001, reading=0.016)
    assert [found.times.of(rows) for rows in (1, 8, 32)] == pytest.approx([0.019, 0.019, 0.067], rel=0.05)
    assert found.attention == pytest.approx(1e-3, rel=0.1)
    assert found.reading == pytest.approx(2e-3, rel=0.1)


def test_rows_of_different_sequences_are_all_scored() -> None:
    """As when texts grow together: half a millisecond for each of eight rows is as much as four rows take."""
    limits = StepLimits(context=4096, rows=256, sequences=8)
    found = measured([1.0], limits, head=0.0005, reading=0.004)
    assert found.times.of(8) == pytest.approx(8 * 0.0025)
    # More rows than sequences are those of a prompt, the last of which decides.
    assert found.times.of(32) == pytest.approx(32 * 0.002 * (1 + 1e-3 * 15.5) + 0.0005)


def test_a_disturbed_step_does_not_count() -> None:
    steps = MeasuredSteps().with_step(TrialStep(), 0.02).with_step(TrialStep(), 0.5)
    assert steps.seconds == {TrialStep(): 0.02}


def test_a_slow_device_measures_no_long_steps() -> None:
    found = measured([1.0], StepLimits(context=4096, rows=256), slow=40, reading=0.004)
    assert [cost for cost, _ in found.times.points] == [1.0, 8.0]


def test_a_slow_first_step_leaves_nothing_out() -> None:
    limits = StepLimits(context=4096, groups=6, rows=256)
    found, cold = (measured([0.5, 0.5], limits, cold=seconds) for seconds in (0.0, 2.0))
    assert (cold.attention, cold.reading) == pytest.approx((found.attention, found.reading))
    assert [cost for cost, _ in cold.times.points] == [1.0, 8.0, 32.0]


def test_bounds_that_leave_no_room_keep_the_estimates() -> None:
    limits = StepLimits(context=2, groups=2, rows=2)
    found = measured([1.0], limits)
    assert found.timed_as(limits) == found


points = st.lists(st.tuples(st.floats(0.5, 40), st.floats(0, 5)), min_size=2, max_size=5).map(
    lambda steps: StepTimes(
        tuple(
            (sum(cost for cost, _ in steps[:end]), 1 + sum(more for _, more in steps[:end]) + end / 10)
            for end in range(1, len(steps) + 1)
        )
    )
)


@given(points, st.floats(0, 200), st.floats(0, 40))
@settings(max_examples=cases(300), deadline=None)
def test_costs_within_a_time_are_the_inverse_of_times(times: StepTimes, cost: float, more: float) -> None:
    assert times.cost_within(times.of(cost)) >= cost - 1e-6
    found = times.cost_within(times.of(0) + more)
    assert times.of(found) <= times.of(0) + more + 1e-9
    assert times.of(found * 1.01 + 0.01) >= times.of(0) + more - 1e-9


@pytest.mark.parametrize("points", [((1.0, 1.0),), ((1.0, 2.0), (2.0, 1.0)), ((1.0, 1.0), (2.0, 1.0))])
def test_times_that_do_not_ascend_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="times of steps"):
        StepTimes(points)


@given(points, st.integers(1, 8), st.floats(0.1, 1.0), st.floats(0.1, 10), st.integers(1, 40))
@settings(max_examples=cases(300), deadline=None)
def test_groups_are_the_most_whose_round_is_about_the_shortest(
    times: StepTimes, groups: int, busy: float, each: float, sequences: int
) -> None:
    limits = StepLimits(context=100, groups=groups, times=times)

    def lap(count: int) -> float:
        took = [
            times.of(each * len(range(first, sequences, count))) for first in range(min(count, sequences))
        ]
        return max(busy * sum(took), 1.1 * max(took))

    found = limits.best_groups(each * sequences, sequences, busy)
    shortest = min(map(lap, range(1, groups + 1)))
    assert lap(found) <= 1.05 * shortest + 1e-9
    assert all(lap(more) > 1.05 * shortest - 1e-9 for more in range(found + 1, groups + 1))


def test_few_sequences_form_as_many_groups_as_places_and_many_do_not_let_them_wait() -> None:
    """Where reading the weights takes longest, each group more is a round in vain."""
    times = StepTimes(((1.0, 0.02), (8.0, 0.021), (32.0, 0.06)))
    limits = StepLimits(context=100, groups=4, times=times)
    assert limits.best_groups(8, 8, 0.49) == 2
    assert limits.best_groups(400, 400, 0.49) > 2
    assert limits.best_groups(8, 8) == 4


def test_planned_groups_stay_unless_others_are_much_better() -> None:
    times = StepTimes(((1.0, 0.02), (8.0, 0.021), (32.0, 0.06)))
    limits = StepLimits(context=100, groups=4, times=times, planned=PlannedGroups(8, 3))
    assert limits.best_groups(8, 8, 0.36) == 3
    assert limits.best_groups(12, 12, 0.36) == 3
    assert limits.best_groups(8, 8, 0.49) == 2  # three would take 1.35 times as long
    # It is not for so many sequences, or so few.
    free = StepLimits(context=100, groups=4, times=times)
    for sequences in (1, 4, 13, 100):
        both = [one.best_groups(sequences, sequences, 0.36) for one in (limits, free)]
        assert both[0] == both[1]


def test_short_steps_of_texts_are_measured_more_often() -> None:
    def times_measured(reading: float) -> dict[int, int]:
        limits, now = StepLimits(context=64, rows=256), 0.0
        trial, found = StepTrial(limits, CACHE), dict[int, int]()
        while not trial.is_over:
            step = trial.next(now)
            assert step is not None
            if {part.position for part in step.parts} == {0}:
                found[step.rows] = found.get(step.rows, 0) + 1
            now += stage_s(step, reading)
            trial.finished(now)
        return found

    assert times_measured(0.02) == {1: 5, 8: 5, 32: 7}  # 32 rows are those of texts and of a chunk
    assert times_measured(0.1) == {1: 2, 8: 2, 32: 4}


def test_rounds_shorten_with_groups() -> None:
    limits = StepLimits(context=100, groups=4, stages=4)
    assert all(one <= other for one, other in pairwise(limits.best_groups(cost, cost) for cost in (1, 8, 64)))
