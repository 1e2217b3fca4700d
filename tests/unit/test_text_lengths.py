"""Histograms of the lengths of sentences."""

from __future__ import annotations

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.text_lengths import check_lengths, lengths_text, longest_of


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


@pytest.mark.parametrize("text", ["", "5", "5:0", "0:5", "5:1,", "5:1;6:1", "5:1 ", "-5:1", "5:1,x:2"])
def test_what_is_no_histogram_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="histogram"):
        check_lengths(text)
