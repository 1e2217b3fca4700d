"""What the hub does as time passes: heartbeats, absent ranks, ranks that are silent, stuck or slow. Pure.

tick ──> heartbeat, if it is due
──> a rank that another has lost, and that has not said why ──> lost
──> ranks that have not come ──> left out, or the end
──> members that do not stop, loads that hang, silence, dead links, standstill ──> lost, or the end
"""

from __future__ import annotations

from pipeedge.control.admission import Attendance
from pipeedge.control.epochs import Epochs, Step
from pipeedge.control.liveness import Silent, Slow, Stalled, Stuck
from pipeedge.control.load_deadline import HungLoad, LoadFinding
from pipeedge.control.losses import Losses
from pipeedge.control.messages import Notice
from pipeedge.control.rank_messages import RankMessages
from pipeedge.control.rank_watch import Isolated, RankWatch, describe, note
from pipeedge.control.roster import Outgoing, Roster
from pipeedge.control.telemetry import pace, stage_work

__all__ = ["Supervision"]


class Supervision:
    """Reactions to the passage of time.

    Args:
        roster: Ranks of the session.
        epochs: Epochs of the session.
        losses: Losses of the session.
        attendance: Ranks that are admitted, awaited or left out.
        messages: Messages of the ranks, some of which are acted on a moment later.
        watch: Finds ranks that are silent, stuck or slow.
        now: Present time.
    """

    def __init__(
        self,
        roster: Roster,
        epochs: Epochs,
        losses: Losses,
        attendance: Attendance,
        messages: RankMessages,
        watch: RankWatch,
        now: float,
    ) -> None:
        self.roster = roster
        self.epochs = epochs
        self.losses = losses
        self._attendance = attendance
        self._messages = messages
        self._watch = watch
        self._beat_at = now

    def tick(self, now: float) -> Outgoing:
        """Handle the passage of time."""
        outgoing: Outgoing = []
        if now - self._beat_at >= self._watch.beat_s:
            self._beat_at = now
            outgoing += self.roster.to_all(pace(self.roster)) + stage_work(self.roster)
        if self.epochs.verdict is not None:
            return outgoing
        suspected = self._messages.suspect(now)
        if suspected is not None:
            return outgoing + self.losses.lose(suspected, now)
        absence = self._attendance.absence(now)
        if absence is not None:
            return outgoing + self.losses.end(absence, now)
        outgoing += self._attendance.close(now) + self.losses.overdue(now)
        return outgoing + self._attendance.tell_absent(now) + self.look(now)

    def look(self, now: float) -> Outgoing:
        """Act on what is wrong with the ranks, if anything is."""
        outgoing: Outgoing = []
        for finding in self._watch.look_at_loads(self._watched(), now):
            outgoing += self._look_at_load(finding, now)
        return outgoing if self.epochs.verdict is not None else outgoing + self._diagnose(now)

    def _look_at_load(self, finding: LoadFinding, now: float) -> Outgoing:
        """Do without a rank whose load hangs; tell the user of one that takes long, if the others wait."""
        roster, rank = self.roster, finding.rank
        if not isinstance(finding, HungLoad):
            return [] if roster.runs else roster.to_all(Notice(note(roster, finding)))
        failure = describe(roster, finding)
        if self.epochs.recovers:
            return self.losses.hung(rank, failure, now)
        # The last heartbeat may be older than the report that all is loaded.
        is_awaited = self.epochs.step is Step.GATHERING or self.epochs.awaits(rank)
        return self.losses.lose(failure, now) if is_awaited else []

    def _diagnose(self, now: float) -> Outgoing:
        """Act on silence, on a dead link and on a standstill; tell the user of a slow rank."""
        roster, losses, recovers = self.roster, self.losses, self.epochs.recovers
        watched = self._watched()
        match self._watch.look(watched, now):
            case Slow() as slow:
                return roster.to_all(Notice(note(roster, slow)))
            case Isolated(silent) if self.epochs.goes_on:
                return losses.lose(describe(roster, silent), now)
            case Stuck(source, destination) as stuck if recovers:
                return losses.link_lost(destination, source, describe(roster, stuck), now)
            case Stalled() as stalled if recovers and watched:
                return losses.stalled(describe(roster, stalled, watched), now)
            case Isolated() | Silent() | Stuck() as broken:
                return losses.lose(describe(roster, broken), now)
            case Stalled() as stalled if watched:
                return losses.lose(describe(roster, stalled, watched), now)
        return []

    def _watched(self) -> list[int]:
        return [rank for rank in self.roster.seats if self.losses.is_watched(rank)]
