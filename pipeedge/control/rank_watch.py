"""Watch the ranks of a session for one that is silent, stuck or slow, and put that into words. Pure.

``liveness.diagnose`` decides from statuses and ages. ``RankWatch`` keeps the ages: since when nothing has
moved, and when the user last heard of a slow rank. ``load_deadline`` does both for ranks that load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pipeedge.base.wording import figure
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import (
    Finding,
    Limits,
    Loading,
    Silent,
    Slow,
    Stalled,
    Stuck,
    beat_interval_s,
    diagnose,
)
from pipeedge.control.load_deadline import HungLoad, LoadDeadlines, LoadFinding, SlowLoad
from pipeedge.control.roster import Roster

__all__ = ["Isolated", "RankWatch", "describe", "note"]

_BYTES_PER_MB = 1_000_000


@dataclass(frozen=True)
class Isolated:
    """Rank 0 hears none of the others, so that it is more likely to be at fault than they."""

    silent: Silent
    others: int
    """Number of ranks that it does not hear."""


Broken: TypeAlias = Isolated | Silent | Stuck | Stalled | HungLoad
"""Findings for which somebody is at fault, or nobody."""


class RankWatch:
    """Looks after the ranks of a roster.

    Args:
        roster: The ranks.
        timeout_s: Seconds within which every rank reports a failure.
        now: Present time.
        loads: Deadlines of ranks that load.
    """

    def __init__(
        self, roster: Roster, timeout_s: float, now: float, loads: LoadDeadlines | None = None
    ) -> None:
        self.limits = Limits.within(timeout_s)
        """Limits in seconds after which something is wrong."""
        self.beat_s = beat_interval_s(timeout_s)
        """Seconds between heartbeats."""
        self._loads = LoadDeadlines(self.limits.stall_s) if loads is None else loads
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
        if progress != self._progress or not roster.runs:
            self._progress = progress
            self.moved(now)
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


def describe(roster: Roster, finding: Broken, watched: Iterable[int] = ()) -> Failure:
    """Return a finding as a failure of the rank at fault; for a dead link, that is the receiving one.

    Args:
        roster: The ranks.
        finding: What is wrong.
        watched: Ranks that have a part in a run in which nothing moves.
    """
    match finding:
        case Isolated(Silent(_, seconds), others):
            kind, rank = FailureKind.SILENT, 0
            cause = (
                f"has not heard from any of the {others} other ranks for {seconds:.1f} s: its own network is "
                "disconnected, or that of all others"
            )
        case Silent(rank, seconds):
            kind, cause = (
                FailureKind.SILENT,
                f"has been silent for {seconds:.1f} s: its process is suspended ",
            )
            cause += "or its network is disconnected"
        case Stuck(source, rank, number, seconds):
            kind = FailureKind.STUCK
            cause = (
                f"has waited {seconds:.1f} s for microbatch {number} from {roster.name(source)}: the link "
                "between them is dead, or so slow that it needs a longer --timeout"
            )
        case Stalled(seconds):
            who = ", ".join(map(roster.name, watched))
            return Failure(
                FailureKind.STALLED, f"nothing has moved for {seconds:.1f} s: {who} did not finish"
            )
        case HungLoad(rank, loading, seconds, still_s):
            kind, cause = (
                FailureKind.HUNG,
                f"has been {loading.what} for {seconds:.0f} s{_progress(loading)}, ",
            )
            if still_s is None:
                cause += "which is too slow to wait for: copy its weights to a faster disk"
            else:
                cause += f"the last {still_s:.0f} s without a byte: check its disk, or use a longer --timeout"
    return Failure(kind, cause, rank, roster.name(rank))


def note(roster: Roster, finding: Slow | SlowLoad) -> str:
    """Return the notice about a rank that takes long, but gets on."""
    what = finding.what if isinstance(finding, Slow) else finding.loading.what
    progress = "" if isinstance(finding, Slow) else _progress(finding.loading)
    return f"{roster.name(finding.rank)} has been {what} for {finding.seconds:.0f} s{progress}; still alive"


def _progress(loading: Loading) -> str:
    """Return `` (40 of 330 MB)``, or nothing if there is little to load, or an unknown amount."""
    if not loading.total:
        return ""
    done, total = (size / _BYTES_PER_MB for size in (min(loading.loaded, loading.total), loading.total))
    digits = 3 if total < 1 else 1 if total < 10 else 0
    return f" ({figure(round(done, digits))} of {figure(round(total, digits))} MB)"
