"""Convert times of this rank's clock to the hub's clock. Pure.

    ours    sent ───────────────────── received          offset = there - (sent + received) / 2
    hub          ╲──── there ────╱                       error at most (received - sent) / 2

The exchange is F. Cristian's ("Probabilistic clock synchronization", Distributed Computing 3, 1989), as
in NTP (RFC 5905): only the exchanges with the shortest round trips count. The clocks of two machines drift
apart by about 10 us per second, so exchanges continue during the run, and the offset is interpolated.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

__all__ = ["ClockMap"]

_PERIOD_S = 4.0
"""Seconds of a period, of which only the best exchange is kept."""
_PERIODS = 256
"""Number of periods to keep; when there are more, each becomes twice as long."""
_GOOD = 1.5
"""Longest round trip to use, as a multiple of the shortest."""


class _Exchange(NamedTuple):
    ours: float
    """Our time in the middle of the round trip."""
    offset: float
    round_trip: float


class ClockMap:
    """A conversion from seconds of our clock to seconds of the hub's."""

    def __init__(self) -> None:
        self._period_s = _PERIOD_S
        # Replaced as a whole, never modified, because one thread writes it and another reads it.
        self._best: dict[int, _Exchange] = {}

    def add(self, sent: float, there: float, received: float) -> None:
        """Record an exchange from ``sent`` to ``received``, in which the hub's clock showed ``there``."""
        middle = (sent + received) / 2
        exchanges = (*self._best.values(), _Exchange(middle, there - middle, received - sent))
        best = self._of_each_period(exchanges)
        if len(best) > _PERIODS:
            self._period_s *= 2
            best = self._of_each_period(exchanges)
        self._best = best

    def __call__(self, ours: float) -> float:
        """Return the hub's time at our time ``ours``, which is returned unchanged before any exchange."""
        good = self._good()
        if len(good) < 2:
            return ours + (good[0].offset if good else 0.0)
        after = min(max(1, bisect_left(good, ours, key=lambda one: one.ours)), len(good) - 1)
        left, right = good[after - 1], good[after]
        length = right.ours - left.ours
        # Extrapolate the drift by one interval at each end, but no further.
        part = min(max(-1.0, (ours - left.ours) / length), 2.0)
        return ours + left.offset + part * (right.offset - left.offset)

    def _of_each_period(self, exchanges: tuple[_Exchange, ...]) -> dict[int, _Exchange]:
        best: dict[int, _Exchange] = {}
        for one in exchanges:
            period = int(one.ours // self._period_s)
            known = best.get(period)
            if known is None or one.round_trip < known.round_trip:
                best[period] = one
        return best

    def _good(self) -> list[_Exchange]:
        best = self._best.values()
        limit = _GOOD * min((one.round_trip for one in best), default=0.0)
        return [one for one in best if one.round_trip <= limit]
