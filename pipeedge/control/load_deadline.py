"""Decide how long a rank may take to load what it needs. Pure.

bytes come in                                    -> nothing to do
it has taken a while                             -> SlowLoad: a notice, repeated now and then
no byte for as long as a link may carry nothing,
or less than a megabyte a second from the start  -> HungLoad: nobody waits for that rank any longer

A dead disk, or a network drive without its server, blocks the thread that reads for ever, while the
heartbeats of its process go on. So each heartbeat says how much has been loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pipeedge.control.liveness import Loading

__all__ = ["HungLoad", "LoadDeadlines", "LoadFinding", "SlowLoad"]

_SLOWEST_BYTES_PER_S = 1e6
"""Rate below which loading is given up. SD cards and drives on a slow wireless network are faster."""
_NOTICES = 2
"""Number of notices within the time after which a load without progress is given up."""


@dataclass(frozen=True)
class SlowLoad:
    """A rank that has been loading for a while, and gets on."""

    rank: int
    loading: Loading
    seconds: float


@dataclass(frozen=True)
class HungLoad:
    """A rank that loads nothing any longer, or so slowly that it is not worth waiting for."""

    rank: int
    loading: Loading
    seconds: float
    still_s: float | None
    """Seconds since the last byte; None if bytes come in, but too slowly."""


LoadFinding: TypeAlias = SlowLoad | HungLoad


@dataclass(frozen=True)
class _Seen:
    """What is known of one load."""

    loading: Loading
    since: float
    """Time at which it was first seen."""
    moved_at: float
    """Time at which the last byte was seen."""
    noticed_at: float
    """Time of the last notice, or of the beginning."""


class LoadDeadlines:
    """The loads of all ranks, and the time that each has left.

    Args:
        patience_s: Longest time in seconds without a byte.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: dict[tuple[int, int], _Seen] = {}

    def look(self, loads: Mapping[tuple[int, int], Loading], now: float) -> list[LoadFinding]:
        """Return what is to be done about the loads of this moment.

        Args:
            loads: Last reported progress by rank and connection, of all ranks that load.
            now: Present time in seconds.
        """
        self._seen = {key: self._follow(self._seen.get(key), loading, now) for key, loading in loads.items()}
        return [found for key in sorted(loads) if (found := self._judge(key, now)) is not None]

    def _follow(self, seen: _Seen | None, loading: Loading, now: float) -> _Seen:
        """Return what is known of a load, of which ``loading`` was reported last."""
        if seen is None or not loading.follows(seen.loading):
            return _Seen(loading, now, now, now)
        moved_at = now if loading.loaded > seen.loading.loaded else seen.moved_at
        return _Seen(loading, seen.since, moved_at, seen.noticed_at)

    def _judge(self, key: tuple[int, int], now: float) -> LoadFinding | None:
        seen, (rank, _) = self._seen[key], key
        loading, seconds, still_s = seen.loading, now - seen.since, now - seen.moved_at
        if loading.total is not None:
            if still_s > self._patience_s:
                return HungLoad(rank, loading, seconds, still_s)
            if seconds > self._patience_s + loading.total / _SLOWEST_BYTES_PER_S:
                return HungLoad(rank, loading, seconds, None)
        if now - seen.noticed_at <= self._patience_s / _NOTICES:
            return None
        self._seen[key] = _Seen(loading, seen.since, seen.moved_at, now)
        return SlowLoad(rank, loading, seconds)
