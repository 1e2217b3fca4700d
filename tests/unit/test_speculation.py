"""Test what earlier text proposes, and how many proposed tokens a step verifies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.decoding.speculation import Acceptance, LoneSteps, PromptLookup, best_proposals
from pipeedge.decoding.step_times import StepTimes


def looked_up(tokens: Sequence[int], most: int) -> tuple[int, ...]:
    """Return what follows the longest, and of these the latest, earlier occurrence of the last tokens."""

    def matching(place: int) -> int:
        lengths = range(1, min(place, 8) + 1)
        return max((n for n in lengths if tokens[place - n : place] == tokens[-n:]), default=0)

    places = [place for place in range(2, len(tokens)) if matching(place) >= 2]
    if not places:
        return ()
    place = max(places, key=lambda place: (matching(place), place))
    extended = list(tokens)
    while len(extended) < place + most:
        extended.append(extended[len(extended) - (len(tokens) - place)])
    return tuple(extended[place : place + most])


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=24), most=st.integers(0, 9))
@settings(max_examples=cases(300), deadline=None)
def test_the_longest_and_latest_occurrence_is_continued(tokens: list[int], most: int) -> None:
    lookup = PromptLookup()
    for length in range(1, len(tokens) + 1):
        found = lookup.propose(tokens[:length], most)
        assert found == looked_up(tokens[:length], most)


def best_by_trying(probability: float, most: int, cost: float, times: StepTimes) -> tuple[float, int]:
    """Return the highest expected tokens a time unit for one sequence, and with how many proposals."""
    return max(
        (sum(probability**n for n in range(proposals + 1)) / times.of(cost + proposals), -proposals)
        for proposals in range(most + 1)
    )


@given(
    probability=st.floats(0, 1),
    most=st.integers(0, 12),
    cost=st.floats(1, 4),
    fixed=st.sampled_from([0.0, 1.0, 8.0, 100.0]),
)
def test_one_sequence_has_the_proposals_with_which_its_tokens_come_fastest(
    probability: float, most: int, cost: float, fixed: float
) -> None:
    times = StepTimes.linear(fixed)
    (found,) = best_proposals([(probability, most)], cost, times)
    rate = sum(probability**n for n in range(found + 1)) / times.of(cost + found)
    assert rate == pytest.approx(best_by_trying(probability, most, cost, times)[0])


def test_proposals_are_for_rows_that_cost_little() -> None:
    likely, unlikely = (0.9, 8), (0.1, 8)
    idle, busy = StepTimes.linear(1000.0), StepTimes.linear(0.0)
    assert best_proposals([likely], 1, idle) == [8]
    assert best_proposals([likely], 1, busy) == [0]
    first, second = best_proposals([likely, unlikely], 2, StepTimes.linear(8.0))
    assert first > second


def test_proposals_stop_where_they_are_refused_and_are_tried_again_later() -> None:
    acceptance, times = Acceptance(), StepTimes.linear(8.0)
    assert best_proposals([(acceptance.probability, 8)], 1, times)[0] > 0
    for _ in range(20):
        acceptance.note(4, 0)
    assert best_proposals([(acceptance.probability, 8)], 1, times) == [0]
    for _ in range(200):
        acceptance.note(0, 0)
    assert best_proposals([(acceptance.probability, 8)], 1, times)[0] > 0
    for _ in range(50):
        acceptance.note(8, 8)
    assert best_proposals([(acceptance.probability, 8)], 1, times) == [8]


def test_times_are_as_lone_steps_took() -> None:
    seen, expected = LoneSteps(), StepTimes.linear(8.0)
    assert seen.correct(expected) is expected
    for seconds in (0.9, 0.2, 0.2, 0.2):
        seen.note(1.0, seconds)
    times = seen.correct(expected)
    assert times.of(1.0) == 0.2
    assert times.of(4.0) == pytest.approx(0.2 * 12 / 9)
    for _ in range(3):
        seen.note(5.0, 0.21)
    assert seen.correct(expected).of(5.0) == 0.21
    for _ in range(300):
        seen.note(1.0, 0.2)
    assert seen.correct(expected).of(4.0) == pytest.approx(0.2 * 12 / 9), "the time of others is too old"
