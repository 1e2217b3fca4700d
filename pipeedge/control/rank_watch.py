"""Watch the ranks of a session for one that is silent, stuck or slow, and put that into words. Pure.

``liveness.diagnose`` decides from statuses and ages. ``RankWatch`` keeps the ages: since when nothing has
moved, and when the user last heard of a slow rank. ``load_deadline`` does both for ranks that load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

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

__all__ = [
    "Isolated",
    "RankWatch",
    "hears_nobody",
    "is_hung",
    "is_loading_slowly",
    "is_silent",
    "is_slow",
    "is_stalled",
    "is_stuck",
]

_BYTES_PER_MB = 1_000_000


@dataclass(frozen=True)
class Isolated:
    """Rank 0 hears none of the others, so that it is more likely to be at fault than they."""

    silent: Silent
    others: int
    """Number of ranks that it does not hear."""


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


def hears_nobody(roster: Roster, finding: Silent, others: int) -> Failure:
    """Return the failure of rank 0, which hears none of the ``others``."""
    cause = (
        f"has not heard from any of the {others} other ranks for {finding.seconds:.1f} s: its own network is "
        "disconnected, or that of all others"
    )
    return Failure(FailureKind.SILENT, cause, 0, roster.name(0))


def is_silent(roster: Roster, finding: Silent) -> Failure:
    """Return the failure of a rank that sends no heartbeats."""
    cause = (
        f"has been silent for {finding.seconds:.1f} s: its process is suspended or its network is "
        "disconnected"
    )
    return Failure(FailureKind.SILENT, cause, finding.rank, roster.name(finding.rank))


def is_stuck(roster: Roster, finding: Stuck) -> Failure:
    """Return the failure of a link that carries nothing, for which the receiving rank stands."""
    cause = (
        f"has waited {finding.seconds:.1f} s for microbatch {finding.microbatch} from "
        f"{roster.name(finding.source)}: the link between them is dead, or so slow that it needs a longer "
        "--timeout"
    )
    return Failure(FailureKind.STUCK, cause, finding.destination, roster.name(finding.destination))


def is_stalled(roster: Roster, finding: Stalled, watched: Iterable[int]) -> Failure:
    """Return the failure of a run in which nothing moves, and of which the ``watched`` ranks have a part."""
    who = ", ".join(roster.name(rank) for rank in watched)
    return Failure(
        FailureKind.STALLED, f"nothing has moved for {finding.seconds:.1f} s: {who} did not finish"
    )


def is_slow(roster: Roster, finding: Slow) -> str:
    """Return the notice about a rank that is busy with one thing for long."""
    name = roster.name(finding.rank)
    return f"{name} has been {finding.what} for {finding.seconds:.0f} s; still alive"


def is_loading_slowly(roster: Roster, finding: SlowLoad) -> str:
    """Return the notice about a rank that takes long to load."""
    name, loading = roster.name(finding.rank), finding.loading
    return f"{name} has been {loading.what} for {finding.seconds:.0f} s{_progress(loading)}; still alive"


def is_hung(roster: Roster, finding: HungLoad) -> Failure:
    """Return the failure of a rank whose loading is not worth waiting for."""
    loading = finding.loading
    cause = f"has been {loading.what} for {finding.seconds:.0f} s{_progress(loading)}, "
    if finding.still_s is None:
        cause += "which is too slow to wait for: copy its weights to a faster disk"
    else:
        cause += f"the last {finding.still_s:.0f} s without a byte: check its disk, or use a longer --timeout"
    return Failure(FailureKind.HUNG, cause, finding.rank, roster.name(finding.rank))


def _progress(loading: Loading) -> str:
    """Return `` (40 of 330 MB)``, or nothing if there is little to load, or an unknown amount."""
    if not loading.total:
        return ""
    done, total = (size / _BYTES_PER_MB for size in (min(loading.loaded, loading.total), loading.total))
    digits = 3 if total < 1 else 1 if total < 10 else 0
    return f" ({figure(round(done, digits))} of {figure(round(total, digits))} MB)"
