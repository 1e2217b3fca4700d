"""Test how few numbers are fitted to measured steps."""

from __future__ import annotations

import numpy as np
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.profile.step_fit import StepPoint, attended, fit_rows, fit_steps, step_seconds

ROWS = (1, 2, 4, 8, 16)
POINTS = [
    *(StepPoint(rows, 1, position) for rows in ROWS for position in (0, 255, 1023)),
    *(StepPoint(1, rows, position) for rows in (16, 64, 256) for position in (0, 768)),
]
costs = st.floats(1e-6, 1e-3)


def plain_seconds(point: StepPoint, numbers: tuple[float, ...], window: int) -> float:
    """Return the time of a step, one row at a time."""
    fixed, start, row, many_start, many_row, position, chunk_position = numbers
    rows = point.sequences * point.rows
    total = max(fixed, min(start + rows * row, many_start + rows * many_row))
    for _ in range(point.sequences):
        for place in range(point.position, point.position + point.rows):
            reached = min(place + 1, window) if window else place + 1
            total += reached * (chunk_position if point.rows > 1 else position)
    return total


@settings(max_examples=cases(40))
@given(
    fixed=costs,
    few=st.sampled_from([1.5, 3.0, 6.0, 12.0]),
    start=st.floats(0, 0.5),
    bend=st.one_of(st.none(), st.tuples(st.sampled_from([12.0, 30.0]), st.floats(0.2, 1.0))),
    attention=st.tuples(st.floats(1e-9, 1e-6), st.floats(1e-9, 1e-6)),
    window=st.sampled_from([0, 0, 40, 500]),
)
def test_numbers_that_made_the_times_are_found(
    fixed: float,
    few: float,
    start: float,
    bend: tuple[float, float] | None,
    attention: tuple[float, float],
    window: int,
) -> None:
    row = fixed * (1 - start) / few  # the line reaches the constant at this number of rows
    line = (fixed * start, row)
    very_many = line
    if bend is not None and bend[0] > few:
        at, slope = bend
        very_many = (line[0] + row * at * (1 - slope), slope * row)
    numbers = (fixed, *line, *very_many, *attention)
    seconds = np.array([plain_seconds(point, numbers, window) for point in POINTS])
    found = fit_steps(POINTS, seconds, window)
    assert np.all(found >= 0)
    assert step_seconds(POINTS, found, window) == pytest.approx(seconds, rel=1e-6)


@settings(max_examples=cases(20))
@given(noise=st.lists(st.floats(-0.05, 0.05), min_size=5, max_size=5))
def test_the_fit_is_as_good_as_the_measurement(noise: list[float]) -> None:
    exact = np.array([max(0.01, 0.002 + rows * 0.002) for rows in ROWS])
    fixed, start, row = fit_rows(ROWS, exact * (1 + np.array(noise)))
    fitted = np.maximum(fixed, start + np.array(ROWS) * row)
    assert fitted == pytest.approx(exact, rel=0.12)
    assert min(fixed, start, row) >= 0


@pytest.mark.parametrize(
    ("position", "rows", "window"), [(0, 1, 0), (31, 5, 0), (0, 100, 40), (39, 3, 40), (7, 1, 3)]
)
def test_rows_attend_to_themselves_and_all_before_them(position: int, rows: int, window: int) -> None:
    counted = sum(
        sum(1 for other in range(place + 1) if not window or place - other < window)
        for place in range(position, position + rows)
    )
    assert attended(position, rows, window) == counted
