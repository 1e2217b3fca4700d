"""Fit a few numbers to the measured times of a decoder's steps. Pure.

    seconds │                          ∕
            │                       ∕     start + rows * row
            │                    ∕
      fixed │──────────────── ∕           + position * positions in front of all rows together
            └──────────────────────── rows

Few rows take as long as reading the weights, many as long as computing with them. Which of the measured rows
are few is tried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["StepPoint", "attended", "fit_rows", "fit_steps", "step_seconds"]

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepPoint:
    """Rows of a measured step."""

    sequences: int
    """Number of sequences, with a row each; 1 for a chunk of a prompt."""
    rows: int
    """Number of rows of each sequence."""
    position: int
    """Position of the first row of each."""

    @property
    def is_chunk(self) -> bool:
        """Whether its rows are those of one sequence, which attend together."""
        return self.rows > 1

    @property
    def all_rows(self) -> int:
        """Number of rows."""
        return self.sequences * self.rows

    def positions(self, window: int) -> float:
        """Return how many positions all rows attend to, at most ``window`` each if that is not 0."""
        return self.sequences * attended(self.position, self.rows, window)


def attended(position: int, rows: int, window: int) -> float:
    """Return the number of positions that consecutive rows of a sequence attend to."""
    if not window:
        return rows * (position + (rows + 1) / 2)
    return float(sum(min(position + row + 1, window) for row in range(rows)))


def fit_steps(points: Sequence[StepPoint], seconds: Numbers, window: int = 0) -> Numbers:
    """Return ``fixed``, ``start``, ``row``, ``position`` and ``chunk_position``, none of them negative.

    The squares of the relative deviations are least. The last two are seconds for each position that rows of
    different sequences attend to, and rows of one.

    Args:
        points: The measured steps, at least one of few rows and one of many.
        seconds: Time of each.
        window: Positions that a row attends to at most, or 0.
    """
    rows = np.array([point.all_rows for point in points], np.float64)
    return _fit(rows, _attention(points, window), seconds)


def fit_rows(rows: Sequence[int], seconds: Numbers) -> Numbers:
    """Return ``fixed``, ``start`` and ``row`` of work without attention, as ``fit_steps`` does."""
    return _fit(np.array(rows, np.float64), np.zeros((len(rows), 0)), seconds)


def step_seconds(points: Sequence[StepPoint], numbers: Numbers, window: int = 0) -> Numbers:
    """Return what the numbers of ``fit_steps`` say of each step."""
    rows = np.array([point.all_rows for point in points], np.float64)
    return _seconds(numbers, rows, _attention(points, window))


def _attention(points: Sequence[StepPoint], window: int) -> Numbers:
    """Return the positions that rows attend to: those of different sequences, and of one."""
    return np.array(
        [[one.positions(window) * kind for kind in (not one.is_chunk, one.is_chunk)] for one in points]
    )


def _fit(rows: Numbers, more: Numbers, seconds: Numbers) -> Numbers:
    """Return the numbers of the two branches, and the factors of ``more`` columns."""
    best, least = np.zeros(3 + more.shape[1]), np.inf
    for few in sorted(set(rows))[:-1]:
        flat = rows <= few
        columns = np.concatenate([np.stack([flat, ~flat, rows * ~flat], axis=1), more], axis=1)
        found = _least_squares(columns / seconds[:, None], np.ones(len(rows)))
        squares = float(np.sum((_seconds(found, rows, more) / seconds - 1) ** 2))
        if squares < least:
            best, least = found, squares
    return best


def _seconds(numbers: Numbers, rows: Numbers, more: Numbers) -> Numbers:
    fixed, start, row = numbers[:3]
    return np.asarray(np.maximum(fixed, start + rows * row) + more @ numbers[3:])


def _least_squares(columns: Numbers, wanted: Numbers) -> Numbers:
    """Return the factors of columns with the least squares, of which negative ones become 0."""
    used = list(range(columns.shape[1]))
    while used:
        found = np.linalg.lstsq(columns[:, used], wanted, rcond=None)[0]
        if found.min() >= 0:
            break
        del used[int(found.argmin())]
    factors = np.zeros(columns.shape[1])
    if used:
        factors[used] = found
    return factors
