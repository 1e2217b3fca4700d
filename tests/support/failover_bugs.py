"""Bugs to plant into the rules of failover, to show that the simulated world finds them.

Each is a part of the product in which one method or one row of a table does the wrong thing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from failover_shells import Rules
from msgspec import Raw
from msgspec.structs import replace

from pipeedge.control.admission import Attendance, Newcomer
from pipeedge.control.attempts import Attempts, EpochAttempt, Faults, Part
from pipeedge.control.epoch_member import EpochMember, MemberStep, Report
from pipeedge.control.epochs import Epochs, Event, Step, Wanted
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import Limits, Loading, Silent
from pipeedge.control.load_deadline import LoadDeadlines, LoadFinding
from pipeedge.control.messages import (
    Abort,
    Complete,
    Failed,
    Hello,
    LinkLost,
    Passed,
    Ready,
    Retire,
    Run,
    Stopped,
)
from pipeedge.control.rank_watch import RankWatch
from pipeedge.control.roster import Members, Outgoing, Roster
from pipeedge.control.rules import HubState
from pipeedge.run.ledger import Arrival, Ledger

_ACTIVE = (Step.PREPARING, Step.RUNNING, Step.CHANGING, Step.DROPPING, Step.SWITCHING)


def _effect(name: str) -> Callable[[Any, Any], Outgoing]:
    """Return an effect that is looked up when it is needed, so that a subclass may replace it."""
    return lambda epochs, what: getattr(epochs, name)(what)


_TABLE: Mapping[Any, Any] = {
    key: (_effect(effect.__name__), step) for key, (effect, step) in Epochs.TABLE.items()
}


def _rows(effect: str, after: Step, event: Event, *steps: Step) -> Mapping[Any, Any]:
    """Return the table with other rows for an event."""
    return {**_TABLE, **{(step, event): (_effect(effect), after) for step in steps}}


class Planted(Epochs):
    """Epochs whose effects can be replaced."""

    TABLE = _TABLE


# --- the table of the hub ---------------------------------------------------------------------------


class ForgetsToAbort(Planted):
    TABLE = _rows("_nothing", Step.PLANNING, Event.FAULT, *_ACTIVE)


class DoesNotWaitForStops(Planted):
    TABLE = _rows("_abort_all", Step.PLANNING, Event.FAULT, *_ACTIVE)


class AbortsOnlyOne(Planted):
    def _abort_all(self, line: str) -> Outgoing:
        outgoing = super()._abort_all(line)
        self._attempts.awaited = set(sorted(self._attempts.awaited)[:1])
        return outgoing[:1]


class StopsOnlyWhatRan(Planted):
    def _abort_all(self, line: str) -> Outgoing:
        self._attempts.next = None
        self._attempts.awaited.clear()
        return super()._abort_all(line)


class StopsWhatRunsForWhatIsPrepared(Planted):
    TABLE = _rows("_abort_all", Step.STOPPING, Event.NEXT_FAULT, Step.CHANGING)


class RunsOnWithoutAParticipantOfTheNext(Planted):
    TABLE = _rows("_nothing", Step.SWITCHING, Event.NEXT_FAULT, Step.SWITCHING)


class ForgetsToDrop(Planted):
    TABLE = _rows("_abort_next", Step.RUNNING, Event.NEXT_FAULT, Step.CHANGING)

    def _abort_next(self, line: str) -> Outgoing:
        super()._abort_next(line)
        self._attempts.next, self._attempts.awaited = None, set()
        return []


class DoesNotWaitForDrops(Planted):
    TABLE = _rows("_abort_next", Step.RUNNING, Event.NEXT_FAULT, Step.CHANGING)

    def _abort_next(self, line: str) -> Outgoing:
        outgoing = super()._abort_next(line)
        self._attempts.next, self._attempts.awaited = None, set()
        return outgoing


class ReusesNumberOfDroppedEpoch(Planted):
    def _forget_next(self, _: object) -> Outgoing:
        self._attempts._latest = self.epoch
        return super()._forget_next(_)


class ReusesEpochThatNeverRan(Planted):
    def _abort_all(self, line: str) -> Outgoing:
        self._attempts._latest -= self.step is Step.PREPARING
        return super()._abort_all(line)


class TellsVerdictToParticipantsOnly(Planted):
    def _tell_verdict(self, failure: Failure) -> Outgoing:
        rank_of, participants = self._roster.rank_of, self._roster.participants or ()
        return [one for one in super()._tell_verdict(failure) if rank_of.get(one[0]) in participants]


class PlansWhileOthersStop(Planted):
    TABLE = _rows("_prepare", Step.PREPARING, Event.PLAN, Step.STOPPING)

    def wanted(self) -> Wanted | None:
        step = self.step
        self.step = Step.PLANNING if step is Step.STOPPING else step
        try:
            return super().wanted()
        finally:
            self.step = step


class SaysNothingOfADroppedChange(Planted):
    def _drop_change(self, why: str) -> None:
        pass


# --- messages, losses and plans at the hub ----------------------------------------------------------


class StartsBeforeAllArePrepared(Epochs):
    def _take_any_ready(self, rank: int, ready: Ready, now: float) -> Outgoing:
        self._attempts.awaited = {(ready.epoch, rank)}
        return self._take_ready(rank, ready, now)

    _MESSAGES: ClassVar[Mapping[Any, Any]] = {
        **Epochs._MESSAGES,
        Step.PREPARING: {**Epochs._MESSAGES[Step.PREPARING], Ready: _take_any_ready},
        Step.RUNNING: {**Epochs._MESSAGES[Step.RUNNING], Ready: Epochs._ignore},
    }


class SwitchesBeforeAllArePrepared(Epochs):
    def _take_any_ready(self, rank: int, ready: Ready, now: float) -> Outgoing:
        self._attempts.awaited = {(ready.epoch, rank)}
        return self._take_ready(rank, ready, now)

    _MESSAGES: ClassVar[Mapping[Any, Any]] = {
        **Epochs._MESSAGES,
        Step.CHANGING: {**Epochs._MESSAGES[Step.CHANGING], Ready: _take_any_ready},
        Step.SWITCHING: {**Epochs._MESSAGES[Step.SWITCHING], Ready: Epochs._ignore},
        Step.RUNNING: {**Epochs._MESSAGES[Step.RUNNING], Ready: Epochs._ignore},
    }


class IgnoresCompleteWhileStopping(Epochs):
    _MESSAGES: ClassVar[Mapping[Any, Any]] = {
        **Epochs._MESSAGES,
        Step.STOPPING: {**Epochs._MESSAGES[Step.STOPPING], Complete: Epochs._ignore},
    }


class ForgetsLossWhilePreparing(Epochs):
    def lost(self, rank: int, failure: Failure, now: float) -> Outgoing:
        if self.step is Step.PREPARING and not self._is_essential(rank):
            self._roster.remove(rank, now)
            return []
        return super().lost(rank, failure, now)


class StopsForSpare(Epochs):
    def lost(self, rank: int, failure: Failure, now: float) -> Outgoing:
        outgoing = super().lost(rank, failure, now)
        return outgoing + (self._happen(Event.FAULT, failure.line, now) if self.step is Step.RUNNING else [])


class GoesOnWithoutDataRank(Epochs):
    def _is_essential(self, rank: int) -> bool:
        return not self.goes_on or rank == 0


class GoesOnAfterTheLastLoss(Epochs):
    """Does not know the policy under which the first loss is the last event."""

    def _is_essential(self, rank: int) -> bool:
        return rank in (0, self._roster.data_rank)


class UsesOvertakenPlan(Epochs):
    def _has_all(self, announcement: Any, members: Members) -> bool:
        return True


class EndsThoughOneHasJoined(Epochs):
    def unplanned(self, members: Members, failure: Failure, now: float) -> Outgoing:
        return self.end(failure, now) if self.step is Step.PLANNING else []


class DismissesTheEndThatMustStay(Epochs):
    def link_lost(self, rank: int, peer: int, failure: Failure, now: float, cause: str = "") -> Outgoing:
        swaps = self._is_essential(rank) != self._is_essential(peer)
        ends = (peer, rank) if swaps and not self._is_essential(peer) else (rank, peer)
        self._is_essential = lambda rank: rank == ends[0] or type(self)._is_essential(self, rank)  # type: ignore[method-assign]
        try:
            return super().link_lost(*ends, failure, now, cause)
        finally:
            del self._is_essential


class HasNoPatience(Epochs):
    """Waits for ever for a member that does not stop."""

    def tick(self, now: float) -> Outgoing:
        return []


class LetsOneMicrobatchCostRankAfterRank(Epochs):
    def failed(self, rank: int, failed: Failed, failure: Failure, now: float) -> Outgoing:
        return self.lost(rank, failure, now)


class RetiresWhenOneHasPassed(Attempts):
    @property
    def all_passed(self) -> bool:
        return bool(self._passed)


class WaitsForTheLost(Attempts):
    """Forgets the loss of a rank while others stop."""

    def forget(self, rank: int) -> None:
        pass


class TakesANewcomerForAParticipant(Attempts):
    def parts(self, attempt: EpochAttempt | None) -> list[Part]:
        if attempt is None:
            return []
        return [(attempt.number, rank) for rank in sorted(attempt.participants) if rank in self._roster.seats]


class TriesBrokenLinkForEver(Faults):
    def is_first(self, link: frozenset[int], epoch: int) -> bool:
        return True


# --- who is here, and who lives ---------------------------------------------------------------------


class HearsFormerMembers(Roster):
    def remove(self, rank: int, now: float) -> None:
        connection = self.seats[rank].connection
        super().remove(rank, now)
        self.rank_of[connection] = rank


class ForgetsClaims(Roster):
    def remove(self, rank: int, now: float) -> None:
        self.claims.pop(rank, None)
        super().remove(rank, now)


class TrustsFactsThatWereNotCompared(Roster):
    def agreed_facts(self) -> dict[int, Raw]:
        return {rank: seat.facts for rank, seat in sorted(self.seats.items()) if seat.facts is not None}


class ForgetsWhoJoins(Attendance):
    def newcomer(self) -> Newcomer | None:
        return None


class ReplacesRankThatLives(Attendance):
    def claim(self, connection: int, hello: Hello) -> Outgoing:
        outgoing = super().claim(connection, hello)
        self._roster.remove(hello.rank, self._roster.seats[hello.rank].heard_at)
        return outgoing


class HearsNoSilence(RankWatch):
    def look(self, *args: Any) -> Any:
        found = super().look(*args)
        return None if isinstance(found, Silent) else found


class TakesAPauseForSilence(RankWatch):
    def look(self, *args: Any) -> Any:
        self.limits = Limits(silence_s=0.9, stall_s=self.limits.stall_s)
        return super().look(*args)


class DoesNotSeeThatItMoves(RankWatch):
    def look(self, *args: Any) -> Any:
        self._progress, moved_at = -1, self._moved_at
        found = super().look(*args)
        self._moved_at = moved_at
        return found


class IgnoresClosedConnections(HubState):
    def closed(self, connection: int, now: float, why: str = "", *, left: str = "") -> Outgoing:
        rank = self.roster.rank_of.get(connection)
        if rank is not None and self.epochs.recovers and rank in self.epochs.participants:
            return []
        return super().closed(connection, now, why, left=left)


class LosesAfterTheEnd(HubState):
    def _go_on_without(self, line: str, rank: int | None) -> Outgoing:
        return self._end(Failure(FailureKind.GONE, line), 0.0)


class WaitsForThoseWhoLeft(HubState):
    def _go_on_without(self, line: str, rank: int | None) -> Outgoing:
        return []


class DiagnosesOnlyThoseWhoWork(HubState):
    """Does not see that a rank falls silent while plans are made and prepared."""

    def _look(self, now: float) -> Outgoing:
        return super()._look(now) if self.roster.runs or self.epochs.step is Step.GATHERING else []


class AwaitsNoLoad(Epochs):
    def awaits(self, rank: int) -> bool:
        return False


class LoadsForEver(LoadDeadlines):
    def look(self, loads: Mapping[tuple[int, int], Loading], now: float) -> list[LoadFinding]:
        return []


class DoesNotCountBytes(LoadDeadlines):
    """Gives up what takes long, whether anything is loaded or not."""

    def look(self, loads: Mapping[tuple[int, int], Loading], now: float) -> list[LoadFinding]:
        return super().look({key: replace(load, loaded=0) for key, load in loads.items()}, now)


class EndsIfTheFirstPlanIsOvertaken(Planted):
    TABLE = _rows("_nothing", Step.GATHERING, Event.OVERTAKEN, Step.GATHERING)


# --- a rank -----------------------------------------------------------------------------------------


class RunsBeforeItIsTold(EpochMember):
    TABLE: ClassVar[Mapping[Any, Any]] = {
        **EpochMember.TABLE,
        (MemberStep.PREPARING, Ready): MemberStep.RUNNING,
        (MemberStep.RUNNING, Run): MemberStep.RUNNING,
    }


class DoesNotReportStopBeforeRun(EpochMember):
    TABLE: ClassVar[Mapping[Any, Any]] = {
        **EpochMember.TABLE,
        (MemberStep.PREPARING, Abort): MemberStep.SPARE,
        (MemberStep.PREPARED, Abort): MemberStep.SPARE,
    }


class ReportsStopAtOnce(EpochMember):
    """Seems to have stopped while it still computes."""

    TABLE: ClassVar[Mapping[Any, Any]] = {
        **EpochMember.TABLE,
        (MemberStep.STOPPING, Stopped): MemberStep.STOPPING,
    }


class DoesNotRetire(EpochMember):
    TABLE: ClassVar[Mapping[Any, Any]] = {**EpochMember.TABLE, (MemberStep.PASSED, Retire): MemberStep.PASSED}


class TakesPassedForRunning(EpochMember):
    """Reports the loss of links to ranks that have left an epoch, and does not retire."""

    TABLE: ClassVar[Mapping[Any, Any]] = {
        **EpochMember.TABLE,
        (MemberStep.RUNNING, Passed): MemberStep.RUNNING,
    }


class ReportsNoLink(EpochMember):
    """Does not report a link that does not open, so nobody ends the wait for it."""

    def says(self, report: Report) -> bool:
        return not isinstance(report, LinkLost) and super().says(report)


# --- the ledger -------------------------------------------------------------------------------------


class SkipsOneInNewEpoch(Ledger):
    def restart(self, epoch: int, window: int) -> None:
        again = bool(self._entries)
        super().restart(epoch, window)
        self._next += again


class DoesNotFeedAgain(Ledger):
    def restart(self, epoch: int, window: int) -> None:
        fed = self._next
        super().restart(epoch, window)
        self._next = fed


class FeedsFromTheBeginning(Ledger):
    def restart(self, epoch: int, window: int) -> None:
        super().restart(epoch, window)
        self._next = 0


class ForgetsWhatWasRead(Ledger):
    def restart(self, epoch: int, window: int) -> None:
        super().restart(epoch, window)
        self.position = None


class WritesOldResults(Ledger):
    def judge(self, epoch: int, number: int) -> Arrival:
        return Arrival.WRITE


class FeedsAgainWhenChanged(Ledger):
    """Feeds the new epoch what the one before will write."""

    def _hand_over(self) -> None:
        self._next = self._written if self._successor is not None else self._next
        super()._hand_over()


class SkipsOneWhenChanged(Ledger):
    def _hand_over(self) -> None:
        self._next += self._successor is not None
        super()._hand_over()


class DropsWhatTheFormerEpochHas(Ledger):
    def judge(self, epoch: int, number: int) -> Arrival:
        return Arrival.DROP if epoch < self._epoch else super().judge(epoch, number)


class DropsWhatTheNewEpochHas(Ledger):
    def judge(self, epoch: int, number: int) -> Arrival:
        arrival = super().judge(epoch, number)
        return Arrival.DROP if arrival is Arrival.HOLD else arrival


class WritesTheNewBeforeTheFormer(Ledger):
    def judge(self, epoch: int, number: int) -> Arrival:
        arrival = super().judge(epoch, number)
        return Arrival.WRITE if arrival is Arrival.HOLD else arrival


class RemembersTheChangeAfterAFailure(Ledger):
    def restart(self, epoch: int, window: int) -> None:
        first, before = self._first, self._before
        super().restart(epoch, window)
        if before:
            self._first = first


class LosesRequestsThatAreUnderWay(Ledger):
    """Feeds again what the source can read again, and nothing else."""

    def restart(self, epoch: int, window: int) -> None:
        kept = list(self._to_feed)
        super().restart(epoch, window)
        self._to_feed = deque(kept)


class LosesTheRequestThatHadNoRoom(Ledger):
    """Keeps a group only once it is fed, though the epoch may end while the link is full."""

    def restart(self, epoch: int, window: int) -> None:
        held = len(self._to_feed)
        super().restart(epoch, window)
        for _ in range(held):
            self._to_feed.pop()


class FeedsRequestsAgainInAnotherOrder(Ledger):
    def restart(self, epoch: int, window: int) -> None:
        super().restart(epoch, window)
        self._to_feed.reverse()


class HasNoWindow(Ledger):
    def next_number(self) -> int | None:
        return None if self._next == self._count else self._next


class IsCompleteWhenAllIsFed(Ledger):
    @property
    def complete(self) -> bool:
        return self._count is not None and self._next >= self._count


_RARE: Mapping[type, int] = {
    StopsWhatRunsForWhatIsPrepared: 78,
    RunsOnWithoutAParticipantOfTheNext: 1960,
    IgnoresCompleteWhileStopping: 245,
    GoesOnWithoutDataRank: 415,
    EndsThoughOneHasJoined: 200,
    DismissesTheEndThatMustStay: 2675,
    EndsIfTheFirstPlanIsOvertaken: 130,
    ForgetsClaims: 190,
    TrustsFactsThatWereNotCompared: 80,
    HearsNoSilence: 120,
    DoesNotSeeThatItMoves: 1840,
    ReportsNoLink: 285,
    RunsBeforeItIsTold: 105,
}
"""Seeds from which to look for bugs that need several disturbances at the right moment."""

_PLANTED: Mapping[str, type] = {
    "epochs": Epochs,
    "attempts": Attempts,
    "faults": Faults,
    "roster": Roster,
    "attendance": Attendance,
    "watch": RankWatch,
    "loads": LoadDeadlines,
    "hub": HubState,
    "member": EpochMember,
    "ledger": Ledger,
}


def _all_bugs() -> tuple[Rules, ...]:
    """Return the rules with each of the bugs above."""
    found = []
    for part, whole in _PLANTED.items():
        bugs = [each for each in globals().values() if isinstance(each, type) and issubclass(each, whole)]
        found += [
            Rules(**{part: bug}, from_seed=_RARE.get(bug, 0)) for bug in bugs if bug not in (whole, Planted)
        ]
    return tuple(found)


BUGS = _all_bugs()
