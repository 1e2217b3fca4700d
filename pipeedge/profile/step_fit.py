"""Fit a few numbers to the measured times of a decoder's steps. Pure.

    seconds │                             . ─ ˙   many_start + rows * many_row
            │                     . ─ ˙
            │                  ∕     start + rows * row
            │               ∕
      fixed │───────────∕     + position * positions in front of all rows together
            └──────────────────────────── rows

Few rows take as long as reading the weights, more as long as computing with them. Codes of weights are
widened once for very many rows, each of which then takes less. Which of the measured rows are few, and which
are very many, is tried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["STEP_NUMBERS", "StepPoint", "attended", "fit_rows", "fit_steps", "step_seconds"]

STEP_NUMBERS = ("fixed", "start", "row", "many_start", "many_row", "position", "chunk_position")
"""What the numbers of a layer are called."""

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


def fit_steps(points: Sequence[StepPoint], seconds: Numbers, window: int | None = 0) -> Numbers:
    """Return the ``STEP_NUMBERS`` of a layer, none of them negative.

    The squares of the relative deviations are least. The last two are seconds for each position that rows of
    different sequences attend to, and rows of one.

    Args:
        points: The measured steps, at least one of few rows and one of many.
        seconds: Time of each.
        window: Positions that a row attends to at most, 0 for all, or None if the layer does not attend.
    """
    attention = np.zeros((len(points), 2)) if window is None else _attention(points, window)
    return _fit(_rows(points), attention, seconds, bends=True)


def fit_rows(rows: Sequence[int], seconds: Numbers) -> Numbers:
    """Return ``fixed``, ``start`` and ``row`` of work without attention, as ``fit_steps`` does."""
    return _fit(np.array(rows, np.float64), np.zeros((len(rows), 0)), seconds, bends=False)[:3]


def step_seconds(points: Sequence[StepPoint], numbers: Numbers, window: int = 0) -> Numbers:
    """Return what the numbers of ``fit_steps`` say of each step."""
    return _seconds(numbers, _rows(points), _attention(points, window))


def _rows(points: Sequence[StepPoint]) -> Numbers:
    return np.array([point.all_rows for point in points], np.float64)


def _attention(points: Sequence[StepPoint], window: int) -> Numbers:
    """Return the positions that rows attend to: those of different sequences, and of one."""
    return np.array(
        [[one.positions(window) * kind for kind in (not one.is_chunk, one.is_chunk)] for one in points]
    )


def _fit(rows: Numbers, more: Numbers, seconds: Numbers, *, bends: bool) -> Numbers:
    """Return the numbers of the branches, and the factors of ``more`` columns.

    Args:
        rows: Rows of each step.
        more: Further columns.
        seconds: Time of each step.
        bends: Whether very many rows have a line of their own; else it is that of many.
    """
    different = sorted(set(rows))
    best, least = np.zeros(5 + more.shape[1]), np.inf
    for number, few in enumerate(different[:-1]):
        # A line of its own goes through two numbers of rows at least.
        for most in [different[-1], *(different[number + 1 : -2] if bends else ())]:
            flat, very = rows <= few, rows > most
            line = ~flat & ~very
            parts = [flat, line, rows * line, very, rows * very]
            columns = np.concatenate([np.stack(parts, axis=1), more], axis=1)
            found = _least_squares(columns / seconds[:, None], np.ones(len(rows)))
            if not very.any():
                found[3:5] = found[1:3]
            squares = float(np.sum((_seconds(found, rows, more) / seconds - 1) ** 2))
            if squares < least:
                best, least = found, squares
    return best


def _seconds(numbers: Numbers, rows: Numbers, more: Numbers) -> Numbers:
    fixed, start, row, many_start, many_row = numbers[:5]
    line = np.minimum(start + rows * row, many_start + rows * many_row)
    return np.asarray(np.maximum(fixed, line) + more @ numbers[5:])


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
