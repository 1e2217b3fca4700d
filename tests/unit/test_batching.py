"""Test how microbatches are formed from what waits, against counts kept by the test itself."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeedge.serve.batching import Batcher, BatchLimits


class WaitingItem(NamedTuple):
    number: int
    tokens: int
    deadline_s: float | None


class BatcherMachine(RuleBasedStateMachine):
    """A batcher beside a plain list of what waits, with the number of times that each item was passed."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = BatchLimits(max_items=4, max_tokens=60, max_waiting=12, max_passes=2, overhead_tokens=5)
        self.batcher = Batcher(self.limits)
        self.waiting: list[WaitingItem] = []
        self.passed: dict[int, int] = {}
        self.offered = 0
        self.now = 0.0

    @rule(tokens=st.lists(st.integers(1, 80), min_size=1, max_size=6), left=st.none() | st.integers(0, 9))
    def offer(self, tokens: list[int], left: int | None) -> None:
        deadline = None if left is None else self.now + left
        items = [WaitingItem(self.offered + place, each, deadline) for place, each in enumerate(tokens)]
        fits = len(self.waiting) + len(items) <= self.limits.max_waiting
        assert self.batcher.offer(self.offered, tokens, deadline) == fits
        if fits:
            self.waiting += items
            self.offered += len(items)

    @rule(which=st.integers(0, 200))
    def cancel(self, which: int) -> None:
        self.batcher.cancel([which])
        self.waiting = [item for item in self.waiting if item.number != which]

    @rule(seconds=st.integers(0, 5))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        over = [item for item in self.waiting if item.deadline_s is not None and item.deadline_s <= self.now]
        assert self.batcher.expire(self.now) == tuple(item.number for item in over)
        self.waiting = [item for item in self.waiting if item not in over]

    @precondition(lambda self: self.waiting)
    @rule()
    def form(self) -> None:
        most = max(self.limits.max_passes, math.ceil(len(self.waiting) / self.limits.max_items))
        numbers = self.batcher.form()
        chosen = [item for item in self.waiting if item.number in numbers]
        assert tuple(item.number for item in chosen) == numbers  # all were waiting, in order of arrival
        assert chosen[0] is self.waiting[0]
        assert len(chosen) <= self.limits.max_items
        padded = len(chosen) * max(item.tokens for item in chosen)
        assert len(chosen) == 1 or padded <= self.limits.max_tokens
        apart = sum(item.tokens for item in chosen) + (len(chosen) - 1) * self.limits.overhead_tokens
        assert padded <= apart
        for item in self.waiting[: self.waiting.index(chosen[-1])]:
            if item not in chosen:
                self.passed[item.number] = self.passed.get(item.number, 0) + 1
                assert self.passed[item.number] <= most
        self.waiting = [item for item in self.waiting if item not in chosen]

    @invariant()
    def counts(self) -> None:
        assert len(self.batcher) == len(self.waiting)
        assert self.batcher.room == self.limits.max_waiting - len(self.waiting)


TestBatcher = BatcherMachine.TestCase
TestBatcher.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def limits(**changed: int) -> BatchLimits:
    return BatchLimits(**{"max_items": 8, "max_tokens": 4096, "max_waiting": 10_000, **changed})


def padded_tokens(lengths: list[int], batches: list[tuple[int, ...]]) -> int:
    return sum(len(batch) * max(lengths[number] for number in batch) for batch in batches)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 20))
def test_items_of_one_length_leave_in_order_and_in_full_microbatches(
    size: int, items: int, tokens: int
) -> None:
    batcher = Batcher(limits(max_items=size, max_waiting=100))
    assert batcher.offer(0, [tokens] * items)
    found = list(iter(batcher.form, ()))
    assert [number for batch in found for number in batch] == list(range(items))
    assert all(len(batch) == size for batch in found[:-1])


def test_sentences_of_like_length_save_most_of_the_padding() -> None:
    """The lengths are those of short sentences, a few of them long; 250 wait at a time."""
    drawn = random.Random(1)
    lengths = [min(60, 5 + int(drawn.expovariate(1 / 7))) for _ in range(1000)]
    in_order = [tuple(range(start, start + 8)) for start in range(0, 1000, 8)]
    batcher, formed = Batcher(limits()), []
    for start in range(0, 1000, 250):
        assert batcher.offer(start, lengths[start : start + 250])
        formed += list(iter(batcher.form, ()))
    assert sorted(number for batch in formed for number in batch) == list(range(1000))
    assert padded_tokens(lengths, formed) <= 0.7 * padded_tokens(lengths, in_order)


def test_a_long_item_travels_even_if_it_exceeds_the_tokens_of_a_microbatch() -> None:
    batcher = Batcher(limits(max_tokens=10))
    assert batcher.offer(0, [500, 3, 3])
    assert list(iter(batcher.form, ())) == [(0,), (1, 2)]


@pytest.mark.parametrize("wrong", [2, 3, 4])
def test_numbers_go_up(wrong: int) -> None:
    batcher = Batcher(limits())
    assert batcher.offer(3, [1, 1])
    with pytest.raises(ValueError, match="go up"):
        batcher.offer(wrong, [1, 1])
    assert batcher.form() == (3, 4)
    assert batcher.offer(5, [1])


@pytest.mark.parametrize("wrong", [{"max_items": 0}, {"max_waiting": 0}, {"max_passes": -1}])
def test_limits_without_room_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        limits(**wrong)
