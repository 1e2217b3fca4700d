"""Test what earlier text proposes, and how many proposed tokens a step verifies."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.decoding.speculation import (
    Acceptance,
    DraftedText,
    DraftedTokens,
    DraftFigures,
    LoneSteps,
    PromptLookup,
    ProposalOffer,
    best_offer,
    best_proposals,
)
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


def rate_of(offer: ProposalOffer, proposals: int, cost: float, times: StepTimes) -> float:
    """Return the expected tokens a time unit for one sequence with so many proposals."""
    drafting = proposals * offer.token_s + (offer.once_s if proposals else 0.0)
    expected = sum(offer.probability**n for n in range(proposals + 1))
    return expected / (times.of(cost + proposals) + drafting)


@given(
    probability=st.floats(0, 1),
    most=st.integers(0, 12),
    cost=st.floats(1, 4),
    fixed=st.sampled_from([0.0, 1.0, 8.0, 100.0]),
    token_s=st.sampled_from([0.0, 0.5, 20.0]),
    once_s=st.sampled_from([0.0, 3.0, 50.0]),
)
def test_one_sequence_has_the_proposals_with_which_its_tokens_come_fastest(
    probability: float, most: int, cost: float, fixed: float, token_s: float, once_s: float
) -> None:
    times, offer = StepTimes.linear(fixed), ProposalOffer(probability, most, None, token_s, once_s)
    (found,) = best_proposals([offer], cost, times)
    rates = [rate_of(offer, proposals, cost, times) for proposals in range(most + 1)]
    assert rates[found] == pytest.approx(max(rates))


def test_proposals_are_for_rows_that_cost_little() -> None:
    likely, unlikely = ProposalOffer(0.9, 8), ProposalOffer(0.1, 8)
    idle, busy = StepTimes.linear(1000.0), StepTimes.linear(0.0)
    assert best_proposals([likely], 1, idle) == [8]
    assert best_proposals([likely], 1, busy) == [0]
    first, second = best_proposals([likely, unlikely], 2, StepTimes.linear(8.0))
    assert first > second


def test_proposals_stop_where_they_are_refused_and_are_tried_again_later() -> None:
    acceptance, times = Acceptance(), StepTimes.linear(8.0)
    assert best_proposals([ProposalOffer(acceptance.probability, 8)], 1, times)[0] > 0
    for _ in range(20):
        acceptance.note(4, 0)
    assert best_proposals([ProposalOffer(acceptance.probability, 8)], 1, times) == [0]
    for _ in range(200):
        acceptance.note(0, 0)
    assert best_proposals([ProposalOffer(acceptance.probability, 8)], 1, times)[0] > 0
    for _ in range(50):
        acceptance.note(8, 8)
    assert best_proposals([ProposalOffer(acceptance.probability, 8)], 1, times) == [8]


def test_drafts_are_for_those_that_they_make_faster() -> None:
    times = StepTimes(((1.0, 1.0), (100.0, 1.1)))
    free, dear = ProposalOffer(0.5, 8, (1,) * 8), ProposalOffer(0.9, 8, None, 0.1)
    assert best_offer([free, dear], 1.0, times) is dear
    assert best_offer([free, ProposalOffer(0.9, 8, None, 0.6)], 1.0, times) is free
    assert best_offer([free, ProposalOffer(0.9, 8, None, 0.1, once_s=10.0)], 1.0, times) is free
    assert best_proposals([dear, ProposalOffer(0.9, 8, None, 1.0)], 2.0, times)[1] == 0


def drafting(
    chance: random.Random, right: float, token_s: float, read_s: float, prompt: int, tokens: int
) -> tuple[float, int]:
    """Return the time of a text whose steps take 1 s, and the number of drafted tokens.

    Args:
        chance: Source of randomness.
        right: Probability that a drafted token is right.
        token_s: Time that drafting a token takes.
        read_s: Time that reading one takes.
        prompt: Number of tokens of the prompt.
        tokens: Number of tokens of the answer.
    """
    figures = DraftFigures(context=100_000, places=1)
    figures.note_times(DraftedTokens(-1, 1, (), 0, token_s=token_s, read_s=read_s))
    text, times = DraftedText(figures, 0, prompt, prompt + tokens), StepTimes(((1.0, 1.0), (1e3, 1.001)))
    seconds, drafted, read, length = 0.0, 0, 0, prompt + 1
    while length < prompt + tokens:
        offer = text.offer([0] * length, min(16, prompt + tokens - length - 1))
        (most,) = best_proposals([offer], 1.0, times)
        accepted = 0
        if most:
            assert [one.most for one in text.want([0] * length, most)] == [most]
            whole = length - read <= 64
            took = most * token_s if whole else 0.0
            seconds += took + read_s * min(64, length - read)
            read = min(length, read + 64)
            draft = DraftedTokens(
                0, length, (0,) * most * whole, read, token_s=took / most if whole else None
            )
            figures.note_times(draft)
            text.take(draft)
            most = text.offer([0] * length, most).most
            drafted += most
            while accepted < most and chance.random() < right:
                accepted += 1
        text.note(most, accepted)
        length += 1 + accepted
        seconds += 1.0
    return seconds, drafted


@pytest.mark.parametrize("token_s", [0.003, 0.03, 0.3, 1.5])
@pytest.mark.parametrize(("prompt", "read_s"), [(30, 0.01), (2000, 0.01)])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.95])
def test_drafts_cost_little_where_they_do_not_pay(
    token_s: float, right: float, prompt: int, read_s: float
) -> None:
    tokens = 3000
    seconds, _ = drafting(random.Random(7), right, token_s, read_s, prompt, tokens)
    gain = max(sum(right**n for n in range(most + 1)) / (1 + most * token_s) for most in range(17))
    bound = 1.15 * tokens / gain if gain > 1.2 else 1.02 * tokens
    assert seconds <= bound + 2 * read_s * prompt, f"{seconds / tokens * gain:.2f} of the best time"


def test_short_answers_to_long_prompts_are_not_drafted() -> None:
    assert drafting(random.Random(7), 0.9, 0.03, 0.05, 2000, 20) == (19.0, 0)


def test_places_and_context_of_a_draft_are_bounded() -> None:
    figures = DraftFigures(context=12, places=1)
    first, second = (DraftedText(figures, number, 3, 40) for number in range(2))
    assert first.offer([0] * 4, 5).most == second.offer([0] * 4, 5).most == 5
    assert first.want([0] * 4, 5)
    assert second.offer([0] * 4, 5).most == 0
    assert not second.want([0] * 4, 5)
    first.take(DraftedTokens(0, 4, (7, 8, 9), 4))
    assert first.offer([0] * 4, 2) == ProposalOffer(figures.acceptance.probability, 2, (7, 8))
    assert first.offer([0] * 10, 5) == ProposalOffer(figures.acceptance.probability, 2)
    assert first.offer([0] * 12, 5).most == 0
    assert second.offer([0] * 4, 5).most == 5, "the first one gave its place back"
    first.take(DraftedTokens(0, 4, (7, 8, 9), 4))
    assert first.offer([0] * 4, 2).tokens is None, "what it has lost its place for does not count"


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
