"""Judge failures: what follows from one for the session, and which ranks are at fault. Pure.

    a rank reports its failure ──────────┐                  ┌─> verdict to all: the session ends
    a connection closes                  ├─> the first one ─┼─> before the plan: the rank is left out
    silence, a dead link, no progress,   │                  ├─> failover: another epoch, without the rank
    a load that does not get on          │                  └─> results complete: a notice to all
    a rank lost another, ── a moment ────┘
    which does not report why

``Judge`` takes part in every session. In a run that goes on after failures it asks ``Failover`` for what
follows, until the results are complete: from then on nothing that happens to a rank matters.
"""

from __future__ import annotations

from pipeedge.base.errors import EXIT_PEER
from pipeedge.control.attendance import Attendance
from pipeedge.control.failover import Failover
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import Silent, Slow, Stalled, Stuck
from pipeedge.control.load_deadline import HungLoad, LoadFinding
from pipeedge.control.messages import Failed, Message, Notice, Verdict
from pipeedge.control.roster import Roster
from pipeedge.control.telemetry import summary
from pipeedge.control.verdicts import (
    hears_nobody,
    is_hung,
    is_loading_slowly,
    is_silent,
    is_slow,
    is_stalled,
    is_stuck,
)
from pipeedge.control.watch import Isolated, RankWatch

__all__ = ["Judge"]

_Outgoing = list[tuple[int, Message]]
_LOSS_GRACE_S = 1.0
"""Seconds for a rank that was lost to report the reason itself."""


class Judge:
    """Decides what follows from failures. Messages to send are returned as (connection, message).

    Args:
        roster: the ranks of the session.
        attendance: decides which ranks the session can do without before the plan.
        watch: finds the ranks that are silent, stuck or slow.
    """

    def __init__(self, roster: Roster, attendance: Attendance, watch: RankWatch) -> None:
        self.verdict: Failure | None = None
        """Reason why the session has ended, or None if it has not."""
        self.failover: Failover | None = None
        """Rules of a run that goes on after failures, from its plan on; None in any other session."""
        self.complete = False
        """Whether the data rank has written all results."""
        self.admitted_others = True
        """Whether ranks could still appear when the verdict was made."""
        self._roster = roster
        self._attendance = attendance
        self._watch = watch
        self._suspect: tuple[float, Failure] | None = None

    # -- which rules apply ------------------------------------------------------------------------

    @property
    def recovery(self) -> Failover | None:
        """Rules by which a loss leads to another epoch; None if it does not, or does not any longer."""
        return None if self.complete else self.failover

    @property
    def planning(self) -> Failover | None:
        """Rules that take further plans; None in a run with one plan, and after the verdict."""
        return self.failover if self.verdict is None else None

    def is_watched(self, rank: int) -> bool:
        """Return whether the loss of ``rank``, which has a seat, matters."""
        if self.recovery is not None:
            return True  # any rank may be needed
        return self._roster.takes_part(rank) and not self._roster.seats[rank].finished

    # -- failures ---------------------------------------------------------------------------------

    def take_report(self, rank: int, failed: Failed, now: float) -> _Outgoing:
        """Judge a failure that a rank reports of itself."""
        failure = self._failure(FailureKind.FAILED, rank, failed.line)
        if self.recovery is not None:
            return self.obey(self.recovery.failed(rank, failed, failure, now), now)
        return self.decide(failure, now)

    def suspect(self, rank: int, line: str, now: float) -> None:
        """Give ``rank``, which another one has lost, a moment to report why, before its loss is judged."""
        if self._suspect is None and self.verdict is None:
            self._suspect = (now + _LOSS_GRACE_S, self._failure(FailureKind.GONE, rank, line))

    def take_finding(self, kind: FailureKind, rank: int, cause: str, now: float) -> _Outgoing:
        """Judge a failure of ``rank`` that the hub has noticed."""
        return self.decide(self._failure(kind, rank, cause), now)

    def decide(self, failure: Failure, now: float) -> _Outgoing:
        """Do what follows from a failure, unless another one came first."""
        if self.verdict is not None:
            return []
        rank = failure.rank
        if failure.exit_code == EXIT_PEER:
            if self.complete:
                return self.go_on_without(failure.line, rank)
            if rank is not None and self.failover is not None:
                return self.obey(self.failover.lost(rank, failure, now), now)
            if rank is not None and self._attendance.can_do_without(rank, failure.kind):
                return self._attendance.leave_out(rank, failure)
        return self.end(failure, now)

    def end(self, failure: Failure, now: float) -> _Outgoing:
        """End the session."""
        self.verdict = failure
        self.admitted_others = self._attendance.admits_at(now)
        return self._roster.to_all(Verdict(failure))

    def obey(self, outgoing: _Outgoing, now: float) -> _Outgoing:
        """Return what the rules of failover send; end the session if they do."""
        if self.planning is None or self.planning.verdict is None:
            return outgoing
        others = [one for one in outgoing if one[0] not in self._roster.rank_of]
        return others + self.end(self.planning.verdict, now)

    def go_on_without(self, line: str, rank: int | None) -> _Outgoing:
        """Stop waiting for ``rank``, or for all unfinished ranks if it is None: the results are complete."""
        waited_for = self._roster.running() if rank is None else (rank,)
        leaving = [each for each in waited_for if not self._roster.seats[each].finished]
        for each in leaving:
            self._roster.seats[each].left = True
        if not leaving:
            return []
        return self._roster.to_all(Notice(f"{line}; the results are complete")) + summary(self._roster)

    # -- the passage of time ----------------------------------------------------------------------

    def overdue(self, now: float) -> Failure | None:
        """Return the loss of a rank that has not reported the reason in time, once, or None."""
        if self._suspect is None or now < self._suspect[0]:
            return None
        (_, failure), self._suspect = self._suspect, None
        return failure

    def look(self, now: float) -> _Outgoing:
        """Act on what is wrong with the ranks, if anything is."""
        outgoing: _Outgoing = []
        for finding in self._watch.look_at_loads(self._watched(), now):
            outgoing += self._look_at_load(finding, now)
        return outgoing if self.verdict is not None else outgoing + self._diagnose(self._watched(), now)

    def _watched(self) -> list[int]:
        return [rank for rank in self._roster.seats if self.is_watched(rank)]

    def _look_at_load(self, finding: LoadFinding, now: float) -> _Outgoing:
        """Do without a rank whose load hangs; tell the user of one that takes long, if the others wait."""
        if not isinstance(finding, HungLoad):
            line = is_loading_slowly(self._roster, finding)
            return [] if self._roster.started() else self._roster.to_all(Notice(line))
        failure = is_hung(self._roster, finding)
        if self.recovery is None:  # the last heartbeat may be older than the report that all is loaded
            return [] if self._roster.seats[finding.rank].ready else self.decide(failure, now)
        return self.obey(self.recovery.hung(finding.rank, failure, now), now)

    def _diagnose(self, watched: list[int], now: float) -> _Outgoing:
        match self._watch.look(watched, now):
            case Isolated(silent, others) if self.failover is None:
                return self.decide(hears_nobody(self._roster, silent, others), now)
            case Isolated(silent) | (Silent() as silent):
                return self.decide(is_silent(self._roster, silent), now)
            case Stuck() as stuck:
                return self._stuck(stuck, now)
            case Stalled() as stalled if watched:
                return self._stalled(is_stalled(self._roster, stalled, watched), now)
            case Slow() as slow:
                return self._roster.to_all(Notice(is_slow(self._roster, slow)))
        return []

    def _stuck(self, finding: Stuck, now: float) -> _Outgoing:
        failure = is_stuck(self._roster, finding)
        if self.recovery is None:
            return self.decide(failure, now)
        ends = (finding.destination, finding.source)
        return self.obey(self.recovery.link_lost(*ends, failure.line, now), now)

    def _stalled(self, failure: Failure, now: float) -> _Outgoing:
        if self.recovery is None:
            return self.decide(failure, now)
        return self.obey(self.recovery.stalled(failure, now), now)

    def _failure(self, kind: FailureKind, rank: int, cause: str) -> Failure:
        return Failure(kind, cause, rank, self._roster.name(rank))
