"""Test that work in the background leaves most of the time to others."""

from __future__ import annotations

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from pipeedge.base.pacing import SlowedWork

STEPS = st.lists(st.floats(0.001, 2.0), min_size=1, max_size=20)
"""Seconds of processor time of each step."""


def paced(fraction: float, steps: list[tuple[float, float]]) -> float:
    """Return the seconds that steps, given by their time and their processor time, take with their pauses."""
    clock, cpu_clock = Clock(5.0), Clock(3.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    pacing = SlowedWork(fraction, sleep, clock, cpu_clock)
    for seconds, cpu_seconds in steps:
        clock.now += seconds
        cpu_clock.now += cpu_seconds
        pacing.pause()
    return clock.now - 5.0


@given(STEPS, st.floats(0.1, 1.0), st.floats(0.1, 1.0))
def test_a_paced_thread_uses_its_fraction_of_any_quota(
    steps: list[float], fraction: float, quota: float
) -> None:
    took_s = paced(fraction, [(seconds / quota, seconds) for seconds in steps])
    assert sum(steps) == pytest.approx(fraction * quota * took_s)


@given(STEPS, st.floats(0.1, 1.0))
def test_waiting_for_a_disk_is_not_slowed_like_work(steps: list[float], fraction: float) -> None:
    waited_s = 1000.0
    took_s = paced(fraction, [(seconds + waited_s, seconds) for seconds in steps])
    worked_s = sum(steps)
    assert took_s <= worked_s + waited_s * len(steps) + 10 * worked_s * (1 / fraction - 1) + 1e-6
