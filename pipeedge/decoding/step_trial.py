"""Measure at the start of a run how long steps take, before there is anything to answer. Pure.

    a row of 1, 8, 32 sequences                   ──> seconds by rows
    a chunk of a prompt, near and far             ──> additional cost of each row's attention
    a row of 8 sequences far from the beginning   ──> ... and of reading what a sequence attends to

Each step is alone and is measured twice, and the shorter time counts, as something may have disturbed the
other. Steps of a row of each sequence, which decide in how many groups texts grow, are measured more often
where they are short. The steps travel through all stages, as any others do, and all rows that would decide a
token are scored. What they write to the cache is nobody's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pipeedge.decoding.pages import pages_of
from pipeedge.decoding.step_limits import CacheSize, StepLimits
from pipeedge.decoding.step_times import StepTimes
from pipeedge.decoding.steps import DecodingStep, StepPart

__all__ = ["MeasuredSteps", "StepTrial", "TrialStep", "trial_steps"]

_ROWS = (1, 8, 32)
"""Rows of the steps at the beginning of sequences."""
_TIMES = 2
"""How often each step is measured."""
_MORE_TIMES = 3
"""How often short steps of a row of each sequence are measured again."""
_SHORT_S = 0.3
"""Seconds that all of these may take together."""
_CHUNK_ROWS = (8, 32)
"""Rows of the chunk that is measured near and far: the most that there may be."""
_FAR_SEQUENCES = 8
_FAR = 2048
"""Position of rows far from the beginning, if the context is as long."""
_LONGEST_S = 2.0
"""Seconds that a step of the measurement may be expected to take; longer ones are left out."""
_LEAST_SLOPE = 0.02
"""Least growth of a step's time with each row, of its time for one row: no measurement may say none."""


@dataclass(frozen=True)
class TrialStep:
    """A step of the measurement."""

    sequences: int = 1
    """Number of sequences."""
    rows: int = 1
    """Rows of each; if there are several sequences, 1."""
    position: int = 0
    """Position of the first row of each."""

    @property
    def end(self) -> int:
        """Number of positions up to the last row."""
        return self.position + self.rows

    @property
    def all_rows(self) -> int:
        """Number of rows."""
        return self.sequences * self.rows


def trial_steps(limits: StepLimits) -> list[TrialStep]:
    """Return the steps to measure, in order.

    Args:
        limits: Bounds of steps.
    """
    rows, context = min(limits.rows, limits.context), limits.context
    found = [
        TrialStep(sequences=count) if count <= limits.sequences else TrialStep(rows=count)
        for count in _ROWS
        if count <= rows
    ]
    for count in [count for count in _CHUNK_ROWS if count <= min(limits.rows, context // 2)][-1:]:
        far = min(_FAR, context - count)
        found += [TrialStep(rows=count), TrialStep(rows=count, position=far)]
        sequences = min(_FAR_SEQUENCES, limits.sequences)
        found += [TrialStep(sequences), TrialStep(sequences, position=far)]
    return [step for step in dict.fromkeys(found) for _ in range(_TIMES)]


@dataclass(frozen=True)
class MeasuredSteps:
    """Seconds that steps have taken so far, from when each began until it was through all stages."""

    seconds: Mapping[TrialStep, float] = field(default_factory=dict)
    """Shortest time of each step, in seconds."""

    def with_step(self, step: TrialStep, seconds: float) -> MeasuredSteps:
        """Return the measurements with one more step."""
        shortest = min(seconds, self.seconds.get(step, math.inf))
        return replace(self, seconds={**self.seconds, step: shortest})

    @property
    def short(self) -> list[TrialStep]:
        """Steps to measure again; empty if together they take too long for that."""
        found = [one for one in self.seconds if one.rows == 1]
        return found if sum(self.seconds[one] for one in found) <= _SHORT_S else []

    def wants(self, step: TrialStep) -> bool:
        """Return whether a step is worth its time, judged by the least that a row has taken so far."""
        of_row = min((seconds / one.all_rows for one, seconds in self.seconds.items()), default=0.0)
        return step.all_rows == 1 or step.all_rows * of_row <= _LONGEST_S

    @property
    def times(self) -> StepTimes | None:
        """Seconds by rows, or None if too little was measured."""
        near = [step for step in self.seconds if not step.position]
        # Rows of several sequences come last and replace a chunk of as many.
        found = {step.all_rows: self.seconds[step] for step in sorted(near, key=lambda step: step.sequences)}
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
        return self._cost_of_positions(lambda step: step.rows > 1)

    @property
    def reading(self) -> float | None:
        """Additional cost of a sequence for each position in front of its rows, in rows; None as above."""
        both = self._cost_of_positions(lambda step: step.rows == 1)
        if both is None or self.attention is None:
            return None
        return max(0.0, both - self.attention)

    def _cost_of_positions(self, counts: Callable[[TrialStep], bool]) -> float | None:
        """Return how much the cost of a row grows with each position, by a kind of steps near and far."""
        times = self.times
        far = next((step for step in self.seconds if step.position and counts(step)), None)
        near_s = None if far is None else self.seconds.get(replace(far, position=0))
        if times is None or far is None or near_s is None:
            return None
        rows = far.all_rows
        more = times.cost_within(times.of(rows) + max(0.0, self.seconds[far] - near_s)) - rows
        return max(0.0, more) / (rows * far.position)


class StepTrial:
    """Makes the steps of the measurement, one after the other.

    Args:
        limits: Bounds of steps.
        cache: Pages of every block.
    """

    def __init__(self, limits: StepLimits, cache: CacheSize) -> None:
        self._limits = limits
        self._cache = cache
        self._coming = trial_steps(limits)
        self._flight: tuple[TrialStep, float] | None = None
        """The step in flight and when it began, if there is one."""
        self._measured = MeasuredSteps()
        self._more_times = _MORE_TIMES
        self.steps = 0
        """Number of steps so far."""

    @property
    def in_flight(self) -> bool:
        """Whether a step is in flight."""
        return self._flight is not None

    @property
    def is_over(self) -> bool:
        """Whether everything is measured."""
        # Only what has finished says whether a step is worth its time; the first one is slower than others.
        while self._coming and self._flight is None and not self._measured.wants(self._coming[0]):
            del self._coming[0]
        if not self._coming and self._flight is None and self._more_times:
            self._more_times -= 1
            self._coming = self._measured.short
        return not self._coming and self._flight is None

    def next(self, now: float) -> DecodingStep | None:
        """Return the next step, which begins now, or None if one has to finish before, or all is over."""
        if self.is_over or self._flight is not None:
            return None
        one = self._coming.pop(0)
        number, self.steps = self.steps, self.steps + 1
        self._flight = one, now
        return DecodingStep(number, tuple(self._part(one, index) for index in range(one.sequences)))

    def _part(self, one: TrialStep, index: int) -> StepPart:
        """Return the rows of a sequence, in pages of its own as far as there are as many."""
        needed, cache = pages_of(one.end, self._cache.page), self._cache

        def places(pages: int) -> tuple[int, ...]:
            return tuple((index * needed + place) % pages for place in range(needed)) if pages else ()

        return StepPart(
            sequence=-1,
            position=one.position,
            tokens=(0,) * one.rows,
            pages=places(cache.pages),
            window_pages=places(cache.window_pages),
            scored=True,
        )

    def finished(self, now: float) -> None:
        """Note that the step has been through all stages, and the rows that decide a token are scored."""
        if self._flight is None:
            raise RuntimeError("no step is in flight")
        (one, began), self._flight = self._flight, None
        self._measured = self._measured.with_step(one, now - began)

    @property
    def limits(self) -> StepLimits:
        """The bounds of steps with what was measured."""
        found = self._measured
        times, attention, reading = found.times or self._limits.times, found.attention, found.reading
        return replace(
            self._limits,
            times=times,
            attention=self._limits.attention if attention is None else attention,
            reading=self._limits.reading if reading is None else reading,
        )
