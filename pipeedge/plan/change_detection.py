"""Windows over the work of a run's stages, and numbers that have moved for good. Pure: time is passed in.

    heartbeats ──WindowMaker──> WorkWindow ──> seconds an item ──ChangeDetector──> what has moved

A window is several seconds and several microbatches of every stage. Its figures are quotients of sums, not
medians of microbatches: where a processor has a quota, some microbatches are computed in one piece and
others wait for the next period, and a median sees only one of the two kinds. What is robust to a disturbance
is ``ChangeDetector``, which wants several windows in a row on the same side.

The windows of a decoder have only steps that continue texts. How long others take depends on the prompts.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeedge.observe.metrics import StageWork, TextWork
from pipeedge.plan.conditions import StageFigures, StepMix

__all__ = ["MANY_WINDOWS", "WINDOWS", "ChangeDetector", "WorkWindow", "WindowMaker", "items_per_s"]

_Key = TypeVar("_Key")

WINDOWS = 3
"""Number of windows in a row after which a number has moved."""
MANY_WINDOWS = 4 * WINDOWS
"""Number of windows in whose mean a number has moved that comes and goes."""
_MOVED = 1.25
"""Ratio to what was expected, or its inverse, from which on a window counts."""
_NEAR = 1.1
"""Ratio to what was expected up to which a number is what was expected."""
_WINDOW_S = 5.0
_MICROBATCHES = 6
"""Shortest window: seconds, and microbatches of every stage."""


@dataclass(frozen=True)
class WorkWindow:
    """The work of all stages during a few seconds."""

    epoch: int
    """Number of the plan that ran."""
    end_s: float
    seconds: float
    """Seconds in which the last stage finished ``items``, by its own clock."""
    items: float
    stages: tuple[StageFigures, ...]
    earlier: tuple[tuple[int, float], ...] = ()
    """Items that each stage before the last finished, and in how many seconds, by its own clock."""
    steps: StepMix | None = None
    """Steps of a decoder; None for an encoder."""


def items_per_s(windows: Sequence[WorkWindow]) -> float:
    """Return the items per second of a plan in all windows together, which must be of the same plan.

    It is that of the slowest stage: while what waits between the stages becomes less, as it does after a
    change, the last one has more to do for a while than will come.

    Windows in a row follow each other from the end of one microbatch to that of another, without a gap. So
    their sum is exact, however few microbatches each has.
    """
    finished = (((window.items, window.seconds), *window.earlier) for window in windows)
    return min(map(_rate, zip(*finished, strict=True)))


def _rate(finished: Sequence[tuple[int, float]]) -> float:
    """Return the items per second of a stage that finished some items in some seconds, several times."""
    return sum(items for items, _ in finished) / sum(seconds for _, seconds in finished)


class WindowMaker:
    """Makes windows of the counters that the stages send with their heartbeats.

    Args:
        microbatch_size: Number of items in a microbatch.
        seconds: Shortest duration of a window.
    """

    def __init__(self, microbatch_size: int, seconds: float = _WINDOW_S) -> None:
        self._least_items = _MICROBATCHES * microbatch_size
        self._microbatch_size = microbatch_size
        self._seconds = seconds
        self._epoch: int | None = None
        self._since_s = 0.0
        self._before: tuple[StageWork, ...] | None = None
        self._text_before: TextWork | None = None

    def add(
        self, now_s: float, epoch: int, work: Sequence[StageWork | None], text: TextWork | None = None
    ) -> WorkWindow | None:
        """Return the window that the counters of this moment complete, or None if there is none yet.

        The first microbatch of every stage is left out, as it finds cold caches and fills the pipeline.

        Args:
            now_s: Time, by any clock that does not go back.
            epoch: Number of the plan that runs.
            work: Counters of each stage, None where they are not known.
            text: Counters of the data rank of a decoder, whose items are rows; None for an encoder.
        """
        known = tuple(one for one in work if one is not None)
        if len(known) < len(work) or not known:
            self._before = None
            return None
        before = self._before
        if epoch != self._epoch or before is None or len(before) != len(known) or _shrinks(before, known):
            warm = all(one.items > self._microbatch_size for one in known)
            self._epoch, self._since_s, self._before = epoch, now_s, known if warm else None
            self._text_before = text
            return None
        # A heartbeat is up to a second old, and a microbatch may have ended long before it.
        finished = [
            (now.items - then.items, now.finished_s - then.finished_s)
            for then, now in zip(before, known, strict=True)
        ]
        least_items, least_s = min(items for items, _ in finished), min(seconds for _, seconds in finished)
        if now_s - self._since_s < self._seconds or least_items < self._least_items or least_s <= 0:
            return None
        *earlier, (items, seconds) = finished
        figures = tuple(_figures(then, now) for then, now in zip(before, known, strict=True))
        window: WorkWindow | None = WorkWindow(epoch, now_s, seconds, items, figures, tuple(earlier))
        if text is not None:
            window = _text_window(epoch, now_s, figures, self._text_before or TextWork(), text)
        if window is not None:
            self._since_s, self._before, self._text_before = now_s, known, text
        return window


def _text_window(
    epoch: int, now_s: float, figures: tuple[StageFigures, ...], before: TextWork, now: TextWork
) -> WorkWindow | None:
    """Return the window of a decoder between two counters of its data rank; None if it is too short.

    The data rank sees how fast texts grow. A stage does not know whether it waits for a text to come.
    """
    steps, rows, seconds = now.steps - before.steps, now.rows - before.rows, now.seconds - before.seconds
    if steps < _MICROBATCHES or seconds <= 0:
        return None
    mix = StepMix(
        rows / steps,
        (now.positions - before.positions) / rows,
        max(rows / steps, (now.text_s - before.text_s) / seconds),
    )
    return WorkWindow(epoch, now_s, seconds, rows, figures, steps=mix)


def _shrinks(before: Sequence[StageWork], now: Sequence[StageWork]) -> bool:
    """Return whether a counter has begun anew."""
    return any(
        new.items < old.items or new.compute_s < old.compute_s for old, new in zip(before, now, strict=True)
    )


def _figures(before: StageWork, now: StageWork) -> StageFigures:
    """Return the measurements between two counters.

    A rank with a quota that waits for others has time left, and then does not pause. Its profile, and the
    plans that follow from it, are of one that always has work, so that its processor time counts.
    """
    items, crossed = now.items - before.items, now.link_items - before.link_items
    least_s = now.stretch * (now.cpu_s - before.cpu_s) / items
    elapsed_s = (now.compute_s - before.compute_s) / items
    return StageFigures(
        max(elapsed_s, least_s) if now.stretch > 1 else elapsed_s,
        (now.link_s - before.link_s) / crossed if crossed > 0 else None,
        least_s,
    )


class ChangeDetector(Generic[_Key]):
    """Numbers, each compared with what is expected of it, window after window.

    A number has moved if it was too high, or too low, in several windows in a row, or in the mean of many,
    of which the most extreme are left out. What a disturbance does to one window, or noise to all of them,
    moves nothing.
    """

    def __init__(self) -> None:
        self._expected: dict[_Key, float] = {}
        self._latest: dict[_Key, deque[float]] = {}
        self._duration: dict[_Key, int] = {}

    def expect(self, expected: Mapping[_Key, float]) -> None:
        """Compare with other numbers from now on; 1 is expected of those that are missing."""
        self._expected = dict(expected)
        self._latest.clear()
        self._duration.clear()

    def add(self, values: Mapping[_Key, float]) -> None:
        """Note the numbers of one more window. Numbers that are missing have not been measured."""
        self._latest = {key: self._latest.get(key, deque(maxlen=MANY_WINDOWS)) for key in values}
        for key, value in values.items():
            self._latest[key].append(value)
        self._duration = {
            key: max(least, self._duration.get(key, 0) + 1) for key in values if (least := self._off(key))
        }

    def _off(self, key: _Key) -> int:
        """Return how many windows show that a number has moved; 0 if it has not."""
        expected, latest = self._expected.get(key, 1.0), list(self._latest[key])
        last = latest[-WINDOWS:]
        if len(last) == WINDOWS and (min(last) > expected * _MOVED or max(last) * _MOVED < expected):
            return WINDOWS
        middle = _middle(latest)
        if len(latest) == MANY_WINDOWS and not expected / _MOVED < middle < expected * _MOVED:
            return MANY_WINDOWS
        return 0

    @property
    def duration(self) -> int:
        """Number of windows for which something has moved already; 0 if nothing has."""
        return max(self._duration.values(), default=0)

    def moved(self) -> dict[_Key, float]:
        """Return the numbers that have moved, as multiples of what was expected."""
        now = self.measured()
        return {key: now[key] / self._expected.get(key, 1.0) for key in self._duration}

    def measured(self) -> dict[_Key, float]:
        """Return each number as far as it is known; one that has just moved is that of the latest windows."""
        found = dict(self._expected)
        for key, values in self._latest.items():
            latest = list(values)
            moves = self._off(key) == WINDOWS
            found[key] = statistics.median(latest[-WINDOWS:]) if moves else _middle(latest)
        return found

    def settled(self) -> dict[_Key, float]:
        """Return each number to plan for.

        Those that are near to what was expected are what was expected, so that equal hosts stay equal.
        """
        found = self.measured()
        for key, value in found.items():
            expected = self._expected.get(key, 1.0)
            if expected / _NEAR < value < expected * _NEAR:
                found[key] = expected
        return found


def _middle(values: Sequence[float]) -> float:
    """Return the mean without the most extreme sixth at each end."""
    left_out = len(values) // 6
    return statistics.fmean(sorted(values)[left_out : len(values) - left_out])
