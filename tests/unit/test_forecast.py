"""Test how long measuring is expected to take."""

from __future__ import annotations

import pytest

from pipeedge.profile.forecast import OnePass, duration_text, profile_seconds
from pipeedge.profile.measuring import Pacing


def test_expected_time_grows_with_microbatch_and_repetitions() -> None:
    one = OnePass(load_s=2, pass_s=3, batch_size=2)
    assert profile_seconds(one, 4, (None,), Pacing(9)) == 2 + 10 * 6
    # Passes of 6 s are repeated five times.
    assert profile_seconds(one, 4, (None,), Pacing()) == 2 + 6 * 6


def test_shorter_sentences_take_less_time() -> None:
    one = OnePass(load_s=0, pass_s=8, batch_size=1)
    assert profile_seconds(one, 1, (64, 16), Pacing(1)) == 2 * 8 + 2 * 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3, "less than a minute"),
        (50, "about 1 minute"),
        (200, "about 3 minutes"),
        (3 * 3600, "about 3 hours"),
    ],
)
def test_duration_is_rounded(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
