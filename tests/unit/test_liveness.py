"""Diagnosis of silent, stuck and slow ranks from plain data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_statuses import WAITING, busy

from pipeedge.control.liveness import (
    Limits,
    RankStatus,
    Silent,
    Slow,
    Stalled,
    Stuck,
    beat_interval_s,
    diagnose,
)

LIMITS = Limits(silence_s=7, stall_s=8)


@pytest.mark.parametrize(
    ("statuses", "silence", "stalled", "expected"),
    [
        pytest.param({0: WAITING, 1: WAITING}, {0: 0, 1: 0}, 0, None, id="all is well"),
        pytest.param({0: WAITING, 1: WAITING}, {0: 7, 1: 7}, 8, None, id="not yet"),
        pytest.param({0: WAITING, 1: WAITING}, {0: 1, 1: 7.1}, 0, Silent(1, 7.1), id="silent"),
        pytest.param({0: busy(99), 1: busy(99)}, {0: 7.2, 1: 7.1}, 99, Silent(0, 7.2), id="more silent"),
        pytest.param({0: WAITING, 1: WAITING}, {0: 9, 1: 9}, 0, Silent(0, 9), id="equally silent"),
        pytest.param({0: busy(3), 1: WAITING}, {0: 0, 1: 0}, 9, None, id="at work"),
        pytest.param(
            {0: busy(9), 1: busy(20, "loading")},
            {},
            9,
            Slow(1, "loading", 20),
            id="long at work: the longest",
        ),
        pytest.param(
            {0: RankStatus(sent={1: 4}), 1: RankStatus(received={0: 3}, awaiting=frozenset({0}))},
            {},
            9,
            Stuck(0, 1, 3, 9),
            id="stuck",
        ),
        pytest.param(
            {0: RankStatus(sent={1: 1}), 1: RankStatus(awaiting=frozenset({0}))},
            {},
            9,
            Stuck(0, 1, 0, 9),
            id="nothing came",
        ),
        pytest.param(
            {0: RankStatus(sent={1: 1}), 1: RankStatus(awaiting=frozenset({7}))},
            {},
            9,
            Stalled(9),
            id="waiting for nobody",
        ),
        pytest.param(
            {
                0: RankStatus(sent={1: 9}, received={2: 3}, awaiting=frozenset({2})),
                1: RankStatus(sent={2: 5}, received={0: 7}),
                2: RankStatus(sent={0: 3}, received={1: 3}, awaiting=frozenset({1})),
            },
            {},
            9,
            Stuck(1, 2, 3, 9),
            id="the link that is dead, not the one that is full",
        ),
        pytest.param(
            {
                0: RankStatus(sent={1: 9}, received={2: 1}, awaiting=frozenset({2})),
                1: RankStatus(sent={2: 7}, received={0: 8}),
                2: RankStatus(sent={0: 3}, received={1: 4}),
            },
            {},
            9,
            Stuck(2, 0, 1, 9),
            id="the last link, behind which all others are full",
        ),
        pytest.param(
            {0: RankStatus(sent={1: 4}), 1: RankStatus(received={0: 4}, awaiting=frozenset({0}))},
            {},
            9,
            Stalled(9),
            id="stalled",
        ),
        pytest.param(
            {0: RankStatus(sent={1: 4}, idle=True), 1: RankStatus(received={0: 4}, awaiting=frozenset({0}))},
            {},
            9,
            None,
            id="idle",
        ),
        pytest.param(
            {0: RankStatus(idle=True), 1: WAITING}, {0: 0, 1: 8}, 9, Silent(1, 8), id="idle, silent"
        ),
    ],
)
def test_diagnosis(
    statuses: dict[int, RankStatus], silence: dict[int, float], stalled: float, expected: object
) -> None:
    assert diagnose(statuses, silence, stalled, LIMITS) == expected


@given(st.floats(0.01, 1e6))
def test_every_failure_is_reported_before_the_timeout(timeout: float) -> None:
    limits = Limits.within(timeout)
    # A beat may be just over when its sender falls silent, and the hub looks twice a beat.
    delay = 1.5 * beat_interval_s(timeout)
    assert limits.silence_s + delay < timeout
    assert limits.stall_s + delay < timeout
    assert limits.silence_s > 3 * beat_interval_s(timeout)


@pytest.mark.parametrize(("outage_s", "timeout_s"), [(30.0, 60.0), (12.0, 30.0), (10.0, 20.0), (5.0, 12.0)])
def test_a_run_survives_an_outage_as_long_as_tcp_allows(outage_s: float, timeout_s: float) -> None:
    """TCP retransmits 0.2 s after the first loss, and doubles the pause each time."""
    beat_s = beat_interval_s(timeout_s)
    again_s = next(sent for k in range(20) if (sent := 0.2 * (2**k - 1)) >= outage_s)
    limits = Limits.within(timeout_s)
    assert again_s + 2 * beat_s < limits.silence_s < limits.stall_s


def test_progress_counts_microbatches_and_finished_operations() -> None:
    assert RankStatus(sent={0: 3}, received={7: 1}, awaiting=frozenset({7})).progress == 4
    assert RankStatus(sent={0: 3}, finished=4).progress == 7
