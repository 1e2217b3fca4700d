"""Test windows of samples against newly computed sums, and the columns of the original."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeedge.observe.metrics import CSV_COLUMNS, MetricSample, Scope, Windows, csv_row

samples = st.builds(
    lambda start, length, work, energy, used, accuracy: MetricSample(
        start, start + length, work, energy, energy + used, accuracy
    ),
    st.floats(0, 1e5),
    st.floats(0, 100),
    st.integers(0, 1000),
    st.floats(0, 1e6),
    st.floats(0, 1e3),
    st.integers(0, 64),
)


@given(st.lists(samples, min_size=1, max_size=40), st.integers(1, 12))
def test_every_scope_is_the_sum_of_its_samples(added: list[MetricSample], size: int) -> None:
    windows = Windows(size)
    for number, sample in enumerate(added):
        measured = windows.add(sample)
        assert measured.tag == number
        for scope, members in (
            (measured.instant, [sample]),
            (measured.window, added[max(0, number + 1 - size) : number + 1]),
            (measured.run, added[: number + 1]),
        ):
            seconds = sum(one.end_s - one.start_s for one in members)
            assert scope.samples == len(members)
            assert scope.time_s == pytest.approx(seconds, abs=1e-6)
            assert scope.work == sum(one.work for one in members)
            assert scope.energy_j == pytest.approx(sum(one.end_j - one.start_j for one in members), abs=1e-6)
            assert scope.accuracy == sum(one.accuracy for one in members)
            if scope.time_s > 1e-3:
                assert scope.rate == pytest.approx(len(members) / seconds, rel=1e-3)
                assert scope.performance == pytest.approx(scope.work / seconds, rel=1e-3)
                assert scope.power_w == pytest.approx(scope.energy_j / seconds, rel=1e-3)
                assert scope.accuracy_rate == pytest.approx(scope.accuracy / seconds, rel=1e-3)


def test_the_rate_without_time_is_zero() -> None:
    assert Scope().rate == 0
    assert Windows(1).add(MetricSample(5, 5, 8)).instant.performance == 0


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Windows(0)


# What the original's library writes for samples of 1 s every 1.5 s, 8 items, 3 uJ, accuracy 0, 1, 2, 3.
ORIGINAL = """\
Heartbeat,Tag,Start Time (ns),End Time (ns),Global Time (ns),Window Time (ns),Instant Time (ns),\
Global Heart Rate (/s),Window Heart Rate (/s),Instant Heart Rate (/s),Work,Global Work,Window Work,\
Instant Work,Global Performance (/s),Window Performance (/s),Instant Performance (/s),Start Energy (uJ),\
End Energy (uJ),Global Energy (uJ),Window Energy (uJ),Instant Energy (uJ),Global Power (W),Window Power (W),\
Instant Power (W),Accuracy,Global Accuracy,Window Accuracy,Instant Accuracy,Global Accuracy Rate (/s),\
Window Accuracy Rate (/s),Instant Accuracy Rate (/s)
3,3,4500000000,5500000000,4000000000,2000000000,1000000000,1.0,1.0,1.0,8,32,16,8,8.0,8.0,8.0,15,18,12,6,3,\
3e-06,3e-06,3e-06,3,6,5,3,1.5,2.5,3.0
"""


def test_columns_and_figures_are_those_of_the_original() -> None:
    header, expected = csv.reader(ORIGINAL.splitlines())
    assert list(CSV_COLUMNS) == header
    windows = Windows(2)
    for number in range(4):
        start = 1.5 * number
        measured = windows.add(MetricSample(start, start + 1, 8, 5e-6 * number, 5e-6 * number + 3e-6, number))
    row = csv_row(measured)
    assert len(row) == len(CSV_COLUMNS)
    assert [float(value) for value in row] == [pytest.approx(float(value), abs=1e-12) for value in expected]
    whole = [name for name, value in zip(header, row, strict=True) if "." not in value]
    assert "Start Time (ns)" in whole
    assert "Global Energy (uJ)" in whole
