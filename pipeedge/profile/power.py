"""Measure the power of this machine while it waits, and while it computes.

    |-- waits --|  loads  |-- pass --|-- pass --|  loads  |-- pass --|-- pass --|
       idle_w                    busy_w                          busy_w

Loading, and everything else between the passes, does not count. A machine without a source of energy is not
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeedge.observe.energy import Source

__all__ = ["PowerMeter"]

IDLE_S = 2.0
"""Seconds for which the idle machine is watched."""
STEP_S = 0.1
"""Seconds between two samples of the idle machine."""


class PowerMeter:
    """The mean power of this machine.

    Args:
        source: Source of energy; None measures nothing.
        clock: Returns the time in seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        source: Source | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._source = source
        self._clock = clock
        self._sleep = sleep
        self._joules = self._seconds = 0.0

    @property
    def name(self) -> str | None:
        """Name of the source, or None without one."""
        return None if self._source is None else self._source.name

    def idle_w(self) -> float | None:
        """Wait for a while and return the watts meanwhile, or None without a source."""
        if self._source is None:
            return None
        with self.computing():
            for _ in range(round(IDLE_S / STEP_S)):
                self._sleep(STEP_S)
                self.sample()
        return self.take_watts()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the energy of what is done within."""
        began_s, began_j = self._read()
        yield
        ended_s, ended_j = self._read()
        if began_j is not None and ended_j is not None:
            self._seconds += ended_s - began_s
            self._joules += ended_j - began_j

    def sample(self) -> None:
        """Read the source, which is more exact if that is done often."""
        self._read()

    def _read(self) -> tuple[float, float | None]:
        """Return the present time, and the joules that the source has counted by now."""
        now_s = self._clock()
        if self._source is None:
            return now_s, None
        try:
            return now_s, self._source.joules(now_s)
        except (OSError, ValueError):  # such as a battery that is being charged from now on
            self.close()
            return now_s, None

    def take_watts(self) -> float | None:
        """Return the mean watts of what has been counted since the last call, or None if nothing was."""
        watts = self._joules / self._seconds if self._source is not None and self._seconds > 0 else None
        self._joules = self._seconds = 0.0
        return watts

    def close(self) -> None:
        """Close the source."""
        if self._source is not None:
            self._source.close()
        self._source = None
