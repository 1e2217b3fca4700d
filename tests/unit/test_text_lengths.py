"""Histograms of the lengths of sentences."""

from __future__ import annotations

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.text_lengths import (
    RecentLengths,
    are_alike,
    check_lengths,
    lengths_text,
    longest_of,
    mean_of,
)


@settings(max_examples=cases(100))
@given(counts=st.dictionaries(st.integers(1, 10_000), st.integers(1, 1000), min_size=2, max_size=300))
def test_many_lengths_become_few_with_the_same_number_and_average(counts: dict[int, int]) -> None:
    text = lengths_text(counts)
    assert text is not None
    check_lengths(text)
    assert longest_of(text) == max(counts)
    told = {int(tokens): int(number) for tokens, number in (entry.split(":") for entry in text.split(","))}
    assert len(told) == text.count(",") + 1 <= 65
    assert (sum(told.values()), max(told)) == (sum(counts.values()), max(counts))
    all_tokens = sum(tokens * number for tokens, number in counts.items())
    assert (
        abs(sum(tokens * number for tokens, number in told.items()) - all_tokens) <= sum(counts.values()) / 2
    )
    if max(counts) - min(counts) < 64:
        assert told == counts


@pytest.mark.parametrize("counts", [{}, {7: 3}, {0: 2, 7: 3}])
def test_one_length_needs_no_histogram(counts: dict[int, int]) -> None:
    assert lengths_text(counts) is None


@settings(max_examples=cases(100))
@given(
    batches=st.lists(
        st.tuples(st.floats(0, 200), st.lists(st.integers(1, 60), min_size=1, max_size=40)), max_size=20
    )
)
def test_recent_lengths_are_those_of_the_last_minutes(batches: list[tuple[float, list[int]]]) -> None:
    recent, now_s = RecentLengths(), 0.0
    came: list[tuple[float, int]] = []
    for pause_s, lengths in batches:
        now_s += pause_s
        recent.add(lengths, now_s)
        came += [(now_s, tokens) for tokens in lengths]
    told = recent.histogram(now_s)
    kept = [tokens for at_s, tokens in came if now_s // 60 - at_s // 60 < 5]
    if told is None:
        assert len(kept) < 50
    else:
        check_lengths(told)
        assert (longest_of(told), mean_of(told)) == (max(kept), pytest.approx(sum(kept) / len(kept)))
        assert are_alike(told, told)


def test_lengths_are_told_apart_by_their_average() -> None:
    assert are_alike("10:1,30:1", "20:5,24:1")
    assert not are_alike("10:1,30:1", "30:1")


@pytest.mark.parametrize("text", ["", "5", "5:0", "0:5", "5:1,", "5:1;6:1", "5:1 ", "-5:1", "5:1,x:2"])
def test_what_is_no_histogram_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="histogram"):
        check_lengths(text)
