"""Test how fast texts grow, from the moments at which their tokens come."""

from __future__ import annotations

import pytest

from pipeedge.observe.token_figures import TokenFigures


def test_the_rate_together_is_that_while_most_texts_grow_and_no_prompt_is_read() -> None:
    figures = TokenFigures()
    assert figures.together is None
    figures.began(0, 5, 0.0)
    figures.drew(0, 1.0)
    figures.drew(0, 2.0)
    figures.began(1, 5, 2.0)
    figures.drew(0, 9.0)  # slow beside a prompt
    figures.drew(1, 10.0)
    for moment in (10.5, 11.0, 11.5, 12.0):
        figures.drew(0, moment)
        figures.drew(1, moment)
    figures.ended(1, 12.0)
    figures.drew(0, 20.0)
    assert figures.together == (2, pytest.approx(8 / 2.0))
    assert figures.completion_tokens == 13


def test_tokens_of_one_step_share_the_time_since_those_before() -> None:
    figures = TokenFigures()
    figures.began(0, 5, 0.0)
    figures.drew(0, 1.0)
    figures.drew(0, 4.0, 3)
    assert list(figures.between_tokens_s) == [1.0, 1.0, 1.0]
    assert figures.decode_tokens_per_s is None  # still written
    figures.ended(0, 4.0)
    assert figures.decode_tokens_per_s == pytest.approx(1.0)
