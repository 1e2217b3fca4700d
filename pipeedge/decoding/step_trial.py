"""Measure at the start of a run how long steps take, before there is anything to answer. Pure.

    one row, eight rows, 32 rows: each alone     ──> seconds by rows
    eight rows, 32 rows far from the beginning   ──> additional cost of attention
    one row, several steps one behind the other  ──> part of a step's time that the slowest place takes

Each step alone is measured twice, and the shorter time counts, as something may have disturbed the other.
The steps travel through all stages, as any others do. What they write to the cache is nobody's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from pipeedge.decoding.pages import pages_of
from pipeedge.decoding.step_times import StepTimes
from pipeedge.decoding.steps import CacheSize, DecodingStep, StepLimits, StepPart

__all__ = ["MeasuredSteps", "StepTrial", "TrialStep", "trial_steps"]

_LONE_ROWS = (1, 8, 32)
"""Rows of the steps that are measured alone."""
_TIMES = 2
"""How often each of them is measured."""
_FAR_ROWS = (8, 32)
_FAR = 2048
"""Position of rows far from the beginning, if the context is as long."""
_BURST_LAPS = 4
"""Steps one behind the other, for each step that may be in flight."""
_LONGEST_S = 2.0
"""Seconds that a step of the measurement may be expected to take; longer ones are left out."""
_LEAST_SLOPE = 0.02
"""Least growth of a step's time with each row, of its time for one row: no measurement may say none."""


@dataclass(frozen=True)
class TrialStep:
    """A step of the measurement, all of whose rows are one sequence's."""

    rows: int
    position: int = 0
    """Position of the first row."""
    alone: bool = True
    """Whether no other step is in flight."""

    @property
    def end(self) -> int:
        """Number of positions up to the last row."""
        return self.position + self.rows


def trial_steps(rows: int, context: int, groups: int) -> list[TrialStep]:
    """Return the steps to measure, in order.

    Args:
        rows: Most rows of a step.
        context: Longest sequence in tokens.
        groups: Most steps in flight.
    """
    lone = [TrialStep(count) for count in _LONE_ROWS if count <= min(rows, context)]
    lone += [
        TrialStep(count, min(_FAR, context - count))
        for count in _FAR_ROWS
        if count <= min(rows, context // 2)
    ]
    burst = [TrialStep(1, alone=False)] * (_BURST_LAPS * groups if groups > 1 else 0)
    return [step for step in lone for _ in range(_TIMES)] + burst


@dataclass(frozen=True)
class MeasuredSteps:
    """Seconds that steps have taken so far, from when each began until it was through all stages."""

    lone: Mapping[TrialStep, float] = field(default_factory=dict)
    """Shortest time of the steps that were alone, in seconds."""
    ends: tuple[float, ...] = ()
    """Moments at which the others ended."""

    def with_step(self, step: TrialStep, began: float, ended: float) -> MeasuredSteps:
        """Return the measurements with one more step."""
        if step.alone:
            seconds = min(ended - began, self.lone.get(step, math.inf))
            return replace(self, lone={**self.lone, step: seconds})
        return replace(self, ends=(*self.ends, ended))

    def wants(self, step: TrialStep) -> bool:
        """Return whether a step is worth its time, judged by the least that a row has taken so far."""
        of_row = min((seconds / one.rows for one, seconds in self.lone.items()), default=0.0)
        return step.rows == 1 or step.rows * of_row <= _LONGEST_S

    @property
    def times(self) -> StepTimes | None:
        """Seconds by rows, or None if too little was measured."""
        found = {step.rows: seconds for step, seconds in self.lone.items() if not step.position}
        if len(found) < 2:
            return None
        points, latest = [], 0.0
        for rows, seconds in sorted(found.items()):
            latest = max(latest, seconds)
            points.append((float(rows), latest))
        (low, early), (high, late) = points[-2:]
        points[-1] = (high, max(late, early + (high - low) * _LEAST_SLOPE * points[0][1]))
        return StepTimes(tuple(points))

    @property
    def attention(self) -> float | None:
        """Additional cost of a row for each position in front of it, in rows; None if it was not measured."""
        times = self.times
        far = [step for step in self.lone if step.position]
        if times is None or not far:
            return None
        # Reading the weights hides what few rows cost.
        step = max(far, key=lambda step: step.rows)
        more = times.cost_within(self.lone[step]) - step.rows
        return max(0.0, more) / (step.rows * (step.position + (step.rows - 1) / 2))

    @property
    def bottleneck(self) -> float | None:
        """Part of a lone step's time between steps one behind the other, at most 1; None if not measured."""
        alone = self.lone.get(TrialStep(1))
        lap = len(self.ends) // _BURST_LAPS
        if alone is None or not lap:
            return None
        # The first lap fills the stages. Steps may return in bunches, so moments are averaged over a lap; the
        # least time from one of these to the next counts, as something may have disturbed the others.
        laps = [fmean(self.ends[first : first + lap]) for first in range(lap, len(self.ends) - lap + 1)]
        apart = min(late - early for early, late in zip(laps, laps[lap:], strict=False)) / lap
        return min(1.0, max(apart / alone, 1.0 / len(self.ends)))


class StepTrial:
    """Makes the steps of the measurement, one after the other.

    Args:
        limits: Bounds of steps.
        cache: Pages of every block.
    """

    def __init__(self, limits: StepLimits, cache: CacheSize) -> None:
        self._limits = limits
        self._cache = cache
        self._coming = trial_steps(limits.rows, limits.context, limits.groups)
        self._flights: dict[int, tuple[TrialStep, float]] = {}
        """Steps in flight and when they began, by number."""
        self._measured = MeasuredSteps()
        self.steps = 0
        """Number of steps so far."""

    @property
    def in_flight(self) -> int:
        """Number of steps in flight."""
        return len(self._flights)

    @property
    def is_over(self) -> bool:
        """Whether everything is measured."""
        # Only what has finished says whether a step is worth its time; the first one is slower than others.
        while self._coming and not self._flights and not self._measured.wants(self._coming[0]):
            del self._coming[0]
        return not self._coming and not self._flights

    def next(self, now: float) -> DecodingStep | None:
        """Return the next step, which begins now, or None if one has to finish before, or all is over."""
        if self.is_over or not self._coming:
            return None
        one = self._coming[0]
        others = [step for step, _ in self._flights.values()]
        if any(step.alone for step in others) or len(others) >= (1 if one.alone else self._limits.groups):
            return None
        del self._coming[0]
        number, self.steps = self.steps, self.steps + 1
        self._flights[number] = one, now
        # All positions are in one page, of which nothing is expected.
        places = (0,) * pages_of(one.end, self._cache.page)
        part = StepPart(
            sequence=-1,
            position=one.position,
            tokens=(0,) * one.rows,
            pages=places if self._cache.pages else (),
            window_pages=places if self._cache.window_pages else (),
            scored=False,
        )
        return DecodingStep(number, (part,))

    def finished(self, number: int, now: float) -> None:
        """Note that a step has been through all stages, and its last row is scored."""
        one, began = self._flights.pop(number)
        self._measured = self._measured.with_step(one, began, now)

    @property
    def limits(self) -> StepLimits:
        """The bounds of steps with what was measured."""
        found = self._measured
        times, attention = found.times or self._limits.times, found.attention
        return replace(
            self._limits,
            times=times,
            attention=self._limits.attention if attention is None else attention,
            bottleneck=self._limits.bottleneck if found.bottleneck is None else found.bottleneck,
        )
