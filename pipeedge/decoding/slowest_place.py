"""Learn from steps in flight for which part of a step's time the slowest place is busy. Pure.

    results    │    │    │    │    │      from one to the next: the slowest place, if it never waits
    a step     ├────────────────────┤     alone, through all places

As long as nothing is known, every step in flight is taken to have a place of its own, so that there are as
many as possible: then one place is always busy, and shows how long it takes. With so few steps that the
results come as soon as these return, no place shows anything, and what is known stays, until it is old.

What holds up a run for a moment seems to be a slow place, which fewer steps in flight would hide for ever. So
most samples have to be high before that counts, and what is known grows old sooner if it was wrong before.
"""

from __future__ import annotations

from collections import deque

__all__ = ["MARGIN", "SlowestPlace"]

MARGIN = 1.1
"""Time in which a step returns that is allowed for, in times of what it takes alone."""
_ENOUGH, _MOST = 6, 24
"""Number of samples with which it is known, and of those that count."""
_CERTAIN = 0.8
"""Part of what is known below which a sample counts that is only an upper bound."""
_QUANTILE = 0.25
"""Part of the samples that are lower than what counts: no place is busy for less time than it takes, but it
may be held up.
"""
_FRESH, _FRESH_LONG = 40, 1280
"""Results without a sample after which what is known is forgotten, at first and at most."""
_ALIKE = 1.25
"""Largest ratio of what was forgotten and what is found anew, with which the latter lasts twice as long."""


class SlowestPlace:
    """The slowest place of a pipeline, as results of steps show it."""

    def __init__(self) -> None:
        self._results: deque[tuple[float, float]] = deque()
        """When the latest results came, and how long these steps take alone, since a step was in flight."""
        self._samples: deque[float] = deque(maxlen=_MOST)
        self._since_sample = 0
        self._fresh = _FRESH
        self._forgotten: float | None = None

    @property
    def share(self) -> float | None:
        """Part of a step's time alone for which the place is busy; None as long as it is not known."""
        if len(self._samples) < _ENOUGH:
            return None
        return sorted(self._samples)[int(_QUANTILE * len(self._samples))]

    def note(self, alone_s: float, in_flight: int, now: float) -> None:
        """Take the result of a step.

        Args:
            alone_s: Seconds that the step takes alone.
            in_flight: Number of steps that are in flight at a time, also if some of them return at once.
            now: Time in seconds.
        """
        self._since_sample += 1
        if self._since_sample > self._fresh and self._samples:
            self._forgotten = self.share
            self._samples.clear()
        if in_flight < 2:
            self.pause()
            return
        self._results.append((now, alone_s))
        # Steps may return in bunches, so as many as are in flight at a time count together.
        while len(self._results) > in_flight + 1:
            self._results.popleft()
        work = sum(seconds for _, seconds in self._results) - self._results[0][1]
        if len(self._results) > in_flight and work > 0:
            self._sample((now - self._results[0][0]) / work, in_flight)

    def _sample(self, share: float, in_flight: int) -> None:
        known = self.share
        if share * in_flight > MARGIN or (known is not None and share < _CERTAIN * known):
            self._samples.append(min(1.0, share))
            self._since_sample = 0
            self._compare()

    def _compare(self) -> None:
        """Choose when to forget what is known, once it is found anew."""
        found, before = self.share, self._forgotten
        if found is None or before is None:
            return
        alike = max(found, before) <= _ALIKE * min(found, before)
        self._fresh = min(2 * self._fresh, _FRESH_LONG) if alike else _FRESH
        self._forgotten = None

    def pause(self) -> None:
        """Note that the time to the next result says nothing."""
        self._results.clear()
