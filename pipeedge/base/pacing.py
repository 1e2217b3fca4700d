"""Work in the background that leaves the processor to others for most of the time.

    a step │ pause        │ a step │ pause        │ ...

A low priority would not do that. Under a quota of processor time, what a thread uses is missing to the other
threads of the same process, whatever their priorities. And while other processes are served first, all of
these threads would wait for the interpreter's lock, which the thread holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["SlowedWork"]

_MOST_STRETCHED = 10.0
"""Largest ratio of a step's time to its processor time that counts as work; the rest waits for a disk."""


class SlowedWork:
    """Lets a thread work for a fraction of the time, by a pause after each step.

    The time that a quota keeps the thread waiting counts as work: then the pauses are longer, and the thread
    uses the same fraction of the quota.

    Args:
        fraction: Fraction of the time in which the thread works.
        sleep: Waits for some seconds, or for less if the work has become urgent.
        clock: Clock in seconds.
        cpu_clock: Processor time of the thread in seconds.
    """

    def __init__(
        self,
        fraction: float,
        sleep: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._pause_per_work = 1 / fraction - 1
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._sleep = sleep
        self._since = clock(), cpu_clock()

    def pause(self) -> None:
        """Pause for as long as the step since the last pause, or since the beginning, was long."""
        since_s, cpu_since_s = self._since
        worked_s = min(self._clock() - since_s, _MOST_STRETCHED * (self._cpu_clock() - cpu_since_s))
        self._sleep(max(0.0, worked_s) * self._pause_per_work)
        self._since = self._clock(), self._cpu_clock()
