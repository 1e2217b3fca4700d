"""Test the choice of tokens against the processors of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeedge.base.errors import RequestError
from pipeedge.decoding.sampler import Sampler, block_sums, draw, draw_from_all, kept_tokens, random_number
from pipeedge.decoding.sampling import Sampling


def drawn_scores(seed: int, size: int, spread: float = 3.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.sampled_from([3, 40, 512, 700, 5000])


@settings(max_examples=cases(2000), deadline=None)
@given(
    SEEDS,
    SIZES,
    st.floats(0.1, 5),
    st.sampled_from([0, 1, 2, 5, 50, 1000]),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.one_of(st.just(0.0), st.floats(0.001, 1)),
)
def test_kept_tokens_are_those_of_transformers(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores = drawn_scores(seed, size)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = (
        warpers(torch.zeros(1, 1, dtype=torch.int64), torch.tensor(scores)[None])[0]
        .double()
        .softmax(0)
        .numpy()
    )
    options = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept, weights = kept_tokens(scores, options)
    found = np.zeros(size)
    found[kept] = weights / weights.sum(dtype=np.float64)
    # A token that stands just at a limit may fall on either side of it, and float32 has no smaller weights.
    differs = (found > 1e-30) != (expected > 1e-30)
    assert differs.sum() <= 1
    if not differs.any():
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-9)


@settings(max_examples=cases(500), deadline=None)
@given(
    SEEDS,
    st.floats(0.2, 3),
    st.dictionaries(st.integers(0, 39), st.floats(-100, 100), max_size=5),
    st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=3), max_size=4),
    st.lists(st.integers(0, 39), min_size=1, max_size=12),
)
def test_greedy_tokens_with_penalties_are_those_of_transformers(
    seed: int, penalty: float, bias: dict[int, float], words: list[list[int]], prompt: list[int]
) -> None:
    processors = LogitsProcessorList()
    if bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]))
    processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    if words:
        processors.append(NoBadWordsLogitsProcessor(words))
    options = Sampling(
        temperature=0, repetition_penalty=penalty, logit_bias=bias, bad_words=tuple(map(tuple, words))
    )
    sampler = Sampler(options, prompt)
    tokens = list(prompt)
    for step in range(8):
        scores = drawn_scores(seed + step, 40)
        expected = processors(torch.tensor([tokens]), torch.tensor(scores)[None])[0]
        before = scores.copy()
        found = sampler.choose(scores).token
        assert found == int(expected.argmax())
        assert (scores == before).all()
        tokens.append(found)


def test_presence_and_frequency_count_the_answer_alone() -> None:
    sampler = Sampler(Sampling(temperature=0, presence_penalty=0.5, frequency_penalty=1.0), [1, 1, 2])
    scores = np.array([0.0, 3.2, 2.0, 0.9], np.float32)
    # Token 1 stands at 3.2, then 1.7 and, once it came again, 0.7; token 2 at 2.0, then 0.5.
    assert [sampler.choose(scores).token for _ in range(5)] == [1, 2, 1, 3, 1]


def test_a_token_depends_on_seed_sequence_choice_and_index_alone() -> None:
    numbers = {
        random_number(seed, sequence, choice, index)
        for seed in (-3, 0, 1)
        for sequence in range(5)
        for choice in range(3)
        for index in range(50)
    }
    assert len(numbers) == 3 * 5 * 3 * 50
    assert all(0 <= number < 1 for number in numbers)
    options = Sampling(temperature=1.0)
    rows = [drawn_scores(index, 500) for index in range(20)]
    alone = Sampler(options, [1], seed=7, sequence=2)
    other = Sampler(options, [1], seed=7, sequence=3)
    first = [alone.choose(row).token for row in rows]
    again = Sampler(options, [1], seed=7, sequence=2)
    mixed = [(again.choose(row).token, other.choose(row).token) for row in rows]
    assert [one for one, _ in mixed] == first
    assert [two for _, two in mixed] != first
    own = Sampler(dataclasses.replace(options, seed=7), [1], seed=99, sequence=2)
    assert [own.choose(row).token for row in rows] == first


@settings(max_examples=cases(500), deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=2000), st.floats(0, 1, exclude_max=True))
def test_a_draw_falls_on_a_weight_at_its_place_in_the_sum(weights: list[float], number: float) -> None:
    array = np.array([*weights, 1.0], np.float32)
    place = draw(block_sums(array), array.__getitem__, number)
    assert array[place] > 0
    sums = np.cumsum(array, dtype=np.float64)
    target = number * sums[-1]
    assert sums[place] - array[place] <= target + 1e-4
    assert target <= sums[place] + 1e-4


@settings(max_examples=cases(300), deadline=None)
@given(SEEDS, st.sampled_from([3, 700, 40_000]), st.floats(0.3, 3), st.floats(0, 1, exclude_max=True))
def test_a_draw_from_all_tokens_is_that_of_kept_ones(
    seed: int, size: int, temperature: float, number: float
) -> None:
    scores = drawn_scores(seed, size)
    kept, weights = kept_tokens(scores, Sampling(temperature=temperature))
    ends = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    token = draw_from_all(scores, temperature, number)
    assert kept[token] == token
    assert ends[token] - weights[token] / weights.sum(dtype=np.float64) <= number + 1e-5
    assert number <= ends[token] + 1e-5


def test_draws_follow_the_probabilities() -> None:
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler(Sampling(), [0], seed=5)
    counts = np.bincount([sampler.choose(scores).token for _ in range(20_000)], minlength=4) / 20_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.015)


def test_log_probabilities_are_the_models_own() -> None:
    scores = drawn_scores(3, 900)
    expected = torch.tensor(scores).double().log_softmax(0)
    sampler = Sampler(Sampling(temperature=0.3, top_k=2, logit_bias={5: -100}, logprobs=7), [0])
    drawn = sampler.choose(scores)
    assert drawn.logprob == pytest.approx(float(expected[drawn.token]), abs=1e-5)
    values, tokens = expected.topk(7)
    assert [token for token, _ in drawn.top] == tokens.tolist()
    assert [value for _, value in drawn.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert Sampler(Sampling(), [0]).choose(scores).logprob is None


@pytest.mark.parametrize("temperature", [1e-45, 1e-5, 100.0])
def test_extreme_temperatures_give_a_token(temperature: float) -> None:
    scores = drawn_scores(2, 2000)
    scores[7:90] = -np.inf
    sampler = Sampler(Sampling(temperature=temperature, seed=1), [0])
    tokens = {sampler.choose(scores).token for _ in range(50)}
    assert not tokens & set(range(7, 90))
    if temperature < 1:
        assert tokens == {int(scores.argmax())}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_refused(value: float) -> None:
    scores = drawn_scores(1, 50)
    scores[20] = value
    for temperature in (0, 1):
        with pytest.raises(RequestError, match="NaN or infinity"):
            Sampler(Sampling(temperature=temperature), [1]).choose(scores)


def test_no_token_left_is_refused_and_ends_wait_for_the_least_number_of_tokens() -> None:
    words = tuple((token,) for token in range(3))
    with pytest.raises(RequestError, match="no token is left"):
        Sampler(Sampling(bad_words=words), [1]).choose(drawn_scores(1, 3))
    sampler = Sampler(Sampling(temperature=0, min_tokens=2), [1], end_tokens=[0])
    scores = np.array([5.0, 2.0, 1.0], np.float32)
    assert [sampler.choose(scores).token for _ in range(4)] == [1, 1, 0, 0]
    allowed = np.array([False, False, True])
    assert sampler.choose(scores, allowed).token == 2
