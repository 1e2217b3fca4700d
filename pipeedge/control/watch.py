"""Watch the ranks of a session for one that is silent, stuck or slow. Pure.

``liveness.diagnose`` decides from statuses and ages. ``RankWatch`` keeps the ages: since when nothing has
moved, and when the user last heard of a slow rank. ``load_deadline`` does both for ranks that load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeedge.control.liveness import Finding, Limits, Silent, Slow, beat_interval_s, diagnose
from pipeedge.control.load_deadline import LoadDeadlines, LoadFinding
from pipeedge.control.roster import Roster

__all__ = ["Isolated", "RankWatch"]


@dataclass(frozen=True)
class Isolated:
    """Rank 0 hears none of the others, so that it is more likely to be at fault than they."""

    silent: Silent
    others: int
    """Number of ranks that it does not hear."""


class RankWatch:
    """Looks after the ranks of a roster.

    Args:
        roster: the ranks.
        timeout_s: seconds within which every rank reports a failure.
        now: present time.
    """

    def __init__(self, roster: Roster, timeout_s: float, now: float) -> None:
        self.limits = Limits.within(timeout_s)
        """Limits in seconds after which something is wrong."""
        self.beat_s = beat_interval_s(timeout_s)
        """Seconds between heartbeats."""
        self._loads = LoadDeadlines(self.limits.stall_s)
        self._roster = roster
        self._progress = -1
        self._moved_at = now
        self._noticed_at = now

    def moved(self, now: float) -> None:
        """Note that the session goes on, whatever the counters of the ranks say."""
        self._moved_at = now

    def look(self, watched: Collection[int], now: float) -> Finding | Isolated | None:
        """Return what is wrong with the ``watched`` ranks, or None; a slow rank is found once in a while."""
        roster = self._roster
        # Ranks that have finished are not monitored, but their counters are needed to find a dead link.
        statuses = {rank: seat.status for rank, seat in roster.seats.items() if roster.takes_part(rank)}
        progress = sum(status.progress for status in statuses.values())
        if progress != self._progress or not roster.started():
            self._progress, self._moved_at = progress, now
        silence_s = {rank: now - roster.seats[rank].heard_at for rank in watched}
        finding = diagnose(statuses, silence_s, now - self._moved_at, self.limits)
        if isinstance(finding, Silent) and self._hears_nobody(silence_s):
            return Isolated(finding, len(silence_s) - (0 in silence_s))
        if isinstance(finding, Slow):
            if now - self._noticed_at <= self.limits.stall_s:
                return None
            self._noticed_at = now
        return finding

    def look_at_loads(self, watched: Collection[int], now: float) -> list[LoadFinding]:
        """Return which of the ``watched`` ranks take long to load what they need, or load no longer."""
        seats = self._roster.seats
        loads = {
            (rank, seats[rank].connection): loading
            for rank in watched
            if (loading := seats[rank].status.loading) is not None
        }
        return self._loads.look(loads, now)

    def _hears_nobody(self, silence_s: Mapping[int, float]) -> bool:
        """Return whether all other ranks, at least two, fell silent together, so that none is at fault."""
        others = [seconds for rank, seconds in silence_s.items() if rank != 0]
        return len(others) > 1 and min(others) > self.limits.silence_s - 2 * self.beat_s
