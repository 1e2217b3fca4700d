"""How long steps of a decoder take, by the cost of their rows. Pure.

seconds │              ╱      few rows take as long as one: the weights are read
        │            ╱        many rows take longer, one as long as the next
        │ ─────────╱
        └───────────────── cost of the rows
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

__all__ = ["StepTimes"]


@dataclass(frozen=True)
class StepTimes:
    """Time of a step, by the cost of its rows: straight lines between points, and on behind the last."""

    points: tuple[tuple[float, float], ...]
    """Costs and times, both ascending; at least two."""

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise ValueError("times of steps need two points")
        for (cost, time), (next_cost, next_time) in pairwise(self.points):
            if not (cost < next_cost and 0 <= time <= next_time):
                raise ValueError(f"times of steps do not ascend: {self.points}")
        if self.points[-1][1] <= self.points[-2][1]:
            raise ValueError(f"times of steps end without a slope: {self.points}")

    @classmethod
    def linear(cls, fixed: float) -> StepTimes:
        """Return times of a fixed part and one of each row, in times of a row."""
        return cls(((0.0, fixed), (1.0, fixed + 1.0)))

    def of(self, cost: float) -> float:
        """Return the time of a step whose rows cost so much."""
        if cost <= self.points[0][0]:
            return self.points[0][1]
        lines = list(pairwise(self.points))
        (low, early), (high, late) = next((one for one in lines if cost <= one[1][0]), lines[-1])
        return early + (late - early) * (cost - low) / (high - low)

    def cost_within(self, time: float) -> float:
        """Return the largest cost of rows whose step takes no longer than ``time``; 0 if there is none."""
        if time < self.points[0][1]:
            return 0.0
        found = self.points[0][0]
        for (low, early), (high, late) in pairwise(self.points):
            if time < early:
                return found
            if late > early:
                found = low + (high - low) * (time - early) / (late - early)
                if time < late:
                    return found
            else:
                found = high
        return found
