"""Bugs to plant into the rules of failover, to show that the simulated world finds them.

Each is a set of rules in which one method does the wrong thing. They know the private parts of the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from failover_shells import Rules
from msgspec import Raw
from msgspec.structs import replace

from pipeedge.control.announcement import Announcement
from pipeedge.control.attempts import Attempts, Faults
from pipeedge.control.epoch_member import Admission, EpochMember, MemberStep
from pipeedge.control.epoch_messages import Abort, EpochReady, Passed, Prepare, Stopped
from pipeedge.control.epochs import Epochs, EpochStep
from pipeedge.control.failures import Failure
from pipeedge.control.ledger import Arrival, Ledger
from pipeedge.control.liveness import Loading
from pipeedge.control.load_deadline import LoadDeadlines, LoadFinding
from pipeedge.control.members import Members, MemberTable
from pipeedge.control.messages import Complete, Message, Verdict

Outgoing = list[tuple[int, Message]]


class ForgetsToAbort(Epochs):
    def _stop(self, line: str) -> Outgoing:
        self._step = EpochStep.PLANNING
        return []


class AbortsOnlyOne(Epochs):
    def _stop(self, line: str) -> Outgoing:
        outgoing = super()._stop(line)
        self._attempts.awaited = set(sorted(self._attempts.awaited)[:1])
        return outgoing[:1]


class DoesNotWaitForStops(Epochs):
    def _stop(self, line: str) -> Outgoing:
        outgoing = super()._stop(line)
        self._step = EpochStep.PLANNING
        return outgoing


class StartsBeforeAllArePrepared(Epochs):
    def _take_prepared(self, rank: int, prepared: Any) -> Outgoing:
        if self._step is EpochStep.PREPARING:
            self._attempts.awaited = {(self.epoch, rank)}
        return super()._take_prepared(rank, prepared)

    _STEPS = MappingProxyType(
        {
            **Epochs._STEPS,
            EpochStep.PREPARING: {**Epochs._STEPS[EpochStep.PREPARING], EpochReady: _take_prepared},
            EpochStep.RUNNING: {**Epochs._STEPS[EpochStep.RUNNING], EpochReady: Epochs._ignore},
        }
    )


class RemembersMembers(MemberTable):
    def __init__(self, incarnations: Mapping[int, int]) -> None:
        super().__init__(incarnations)
        self._ever = {incarnation: rank for rank, incarnation in incarnations.items()}

    def admit(self, rank: int, incarnation: int) -> None:
        self._ever[incarnation] = rank
        super().admit(rank, incarnation)

    def rank_of(self, incarnation: int) -> int | None:
        rank = self._ever.get(incarnation)
        return rank if rank in self.incarnations else None


class HearsFormerMembers(Epochs):
    def __init__(self, members: Mapping[int, int], data_rank: int) -> None:
        super().__init__(members, data_rank)
        self._members = RemembersMembers(members)
        self._attempts = Attempts(self._members)


class ForgetsLossWhilePreparing(Epochs):
    def lost(self, incarnation: int, failure: Failure) -> Outgoing:
        rank = self._members.rank_of(incarnation)
        if self._step is EpochStep.PREPARING and rank is not None and rank not in self._essential:
            self._members.remove(rank)
            return []
        return super().lost(incarnation, failure)


class ForgetsLossWhileStopping(Epochs):
    def lost(self, incarnation: int, failure: Failure) -> Outgoing:
        awaited = set(self._attempts.awaited)
        outgoing = super().lost(incarnation, failure)
        if self._step is EpochStep.PLANNING and awaited and not self._attempts.awaited:
            self._step, self._attempts.awaited = EpochStep.STOPPING, awaited
        return outgoing


class UsesOvertakenPlan(Epochs):
    def planned(self, membership: Members, decision: Announcement[Raw] | Failure) -> Outgoing:
        outgoing = super().planned(membership, decision)
        if self._step is not EpochStep.PLANNING or isinstance(decision, Failure):
            return outgoing
        attempt, self._step = self._attempts.prepare(decision.participants), EpochStep.PREPARING
        self._attempts.awaited = {(attempt.number, rank) for rank in decision.participants}
        here = [self._members[rank] for rank in decision.participants if rank in self._members]
        return [(incarnation, Prepare(attempt.number, decision.plan)) for incarnation in here]


class EndsThoughOneHasJoined(Epochs):
    def planned(self, membership: Members, decision: Announcement[Raw] | Failure) -> Outgoing:
        if isinstance(decision, Failure) and self._step is EpochStep.PLANNING:
            return self._end(decision)
        return super().planned(membership, decision)


class ForgetsWhoJoins(Epochs):
    def joined(self, rank: int, incarnation: int) -> Outgoing:
        return []


class ReplacesRankThatLives(Epochs):
    def joined(self, rank: int, incarnation: int) -> Outgoing:
        self._members.incarnations.pop(rank, None)
        return super().joined(rank, incarnation)


class ForgetsClaims(Epochs):
    def lost(self, incarnation: int, failure: Failure) -> Outgoing:
        self._members.claims.clear()
        return super().lost(incarnation, failure)


class StopsForSpare(Epochs):
    def lost(self, incarnation: int, failure: Failure) -> Outgoing:
        rank = self._members.rank_of(incarnation)
        outgoing = super().lost(incarnation, failure)
        if rank is not None and self._step is EpochStep.RUNNING:
            return outgoing + self._stop(failure.line)
        return outgoing


class GoesOnWithoutDataRank(Epochs):
    def __init__(self, members: Mapping[int, int], data_rank: int) -> None:
        super().__init__(members, data_rank)
        self._essential = frozenset({0})


class IgnoresCompleteWhileStopping(Epochs):
    def _take_complete(self, rank: int, complete: Complete) -> Outgoing:
        if self._step is EpochStep.STOPPING:
            return []
        return super()._take_complete(rank, complete)

    _STEPS = MappingProxyType(
        {
            **Epochs._STEPS,
            EpochStep.STOPPING: {**Epochs._STEPS[EpochStep.STOPPING], Complete: _take_complete},
        }
    )


class LosesAfterTheEnd(Epochs):
    def lost(self, incarnation: int, failure: Failure) -> Outgoing:
        if self._step is EpochStep.COMPLETE:
            return self._end(failure)
        return super().lost(incarnation, failure)


class ReusesEpochThatNeverRan(Epochs):
    def planned(self, membership: Members, decision: Announcement[Raw] | Failure) -> Outgoing:
        self._attempts._latest -= self._has_failed_before_run
        return super().planned(membership, decision)

    _has_failed_before_run = False

    def _stop(self, line: str) -> Outgoing:
        self._has_failed_before_run = self._step is EpochStep.PREPARING
        return super()._stop(line)


class ForgetsFaults(Faults):
    def is_first(self, link: frozenset[int], epoch: int) -> bool:
        return True


class TriesBrokenLinkForEver(Epochs):
    def __init__(self, members: Mapping[int, int], data_rank: int) -> None:
        super().__init__(members, data_rank)
        self._faults = ForgetsFaults()


class TellsVerdictToParticipantsOnly(Epochs):
    def _end(self, failure: Failure) -> Outgoing:
        super()._end(failure)
        return [
            (incarnation, Verdict(failure))
            for rank, incarnation in self._members.incarnations.items()
            if rank in self._attempts.current.participants
        ]


class SwitchesBeforeAllArePrepared(Epochs):
    def _take_prepared(self, rank: int, prepared: Any) -> Outgoing:
        if self._step is EpochStep.CHANGING:
            self._attempts.awaited = {(self._attempts._latest, rank)}
        return super()._take_prepared(rank, prepared)

    _STEPS = MappingProxyType(
        {
            **Epochs._STEPS,
            EpochStep.CHANGING: {**Epochs._STEPS[EpochStep.CHANGING], EpochReady: _take_prepared},
            EpochStep.SWITCHING: {**Epochs._STEPS[EpochStep.SWITCHING], EpochReady: Epochs._ignore},
        }
    )


class RetiresWhenOneHasPassed(Epochs):
    def _take_passed(self, rank: int, passed: Any) -> Outgoing:
        if self._step is EpochStep.SWITCHING:
            current = self._attempts.current
            self._attempts._passed = {(current.number, other) for other in current.participants}
        return super()._take_passed(rank, passed)

    _STEPS = MappingProxyType(
        {
            **Epochs._STEPS,
            EpochStep.SWITCHING: {**Epochs._STEPS[EpochStep.SWITCHING], Passed: _take_passed},
        }
    )


class ForgetsToDrop(Epochs):
    def _drop(self, line: str) -> Outgoing:
        self._step, self._attempts.beside, self._attempts.awaited = EpochStep.RUNNING, None, set()
        return []


class DoesNotWaitForDrops(Epochs):
    def _drop(self, line: str) -> Outgoing:
        outgoing = super()._drop(line)
        self._step, self._attempts.beside, self._attempts.awaited = EpochStep.RUNNING, None, set()
        return outgoing


class StopsOnlyWhatRan(Epochs):
    def _stop(self, line: str) -> Outgoing:
        self._attempts.beside = None
        return super()._stop(line)


class StopsWhatRunsForWhatIsPrepared(Epochs):
    def _drop(self, line: str) -> Outgoing:
        return self._stop(line)


class RunsOnWithoutAParticipantOfTheNext(Epochs):
    def _go_on_without(self, rank: int, line: str) -> Outgoing:
        if self._step is EpochStep.SWITCHING and rank not in self._attempts.current.participants:
            return []
        return super()._go_on_without(rank, line)


class ReusesNumberOfDroppedEpoch(Epochs):
    def _run_if_dropped(self) -> Outgoing:
        outgoing = super()._run_if_dropped()
        if self._step is EpochStep.RUNNING:
            self._attempts._latest = self.epoch
        return outgoing


class AwaitsNoLoad(Epochs):
    def awaits(self, rank: int) -> bool:
        return False


class TakesFramesOfAnyEpoch(EpochMember):
    def judge(self, epoch: int) -> Admission:
        working = (MemberStep.PREPARING, MemberStep.PREPARED, MemberStep.RUNNING)
        is_working = any(step in working for step in self._parts.values())
        return Admission.TAKE if is_working else super().judge(epoch)


class DoesNotReportStopBeforeRun(EpochMember):
    def heard(self, message: Any) -> None:
        step = self.step(message.epoch) if isinstance(message, Abort) else None
        super().heard(message)
        if isinstance(message, Abort) and step is not MemberStep.RUNNING:
            self._enter(message.epoch, MemberStep.SPARE)


class ReportsStopAtOnce(EpochMember):
    """Seems to have stopped while it still takes frames."""

    def stopped(self, epoch: int, written: int | None = None) -> Stopped | None:
        stopped = super().stopped(epoch, written)
        if stopped is not None:
            self._enter(epoch, MemberStep.STOPPING)
        return stopped


class TakesPassedForRunning(EpochMember):
    """Reports the loss of links to ranks that have left an epoch, and does not retire."""

    def passed(self, epoch: int, first: int | None = None) -> Passed | None:
        passed = super().passed(epoch, first)
        if passed is not None:
            self._enter(epoch, MemberStep.RUNNING)
        return passed


class RefusesEarlyLinks(EpochMember):
    def judge(self, epoch: int) -> Admission:
        admission = super().judge(epoch)
        return Admission.REFUSE if admission is Admission.KEEP else admission


class ReportsNoLink(EpochMember):
    """Does not report a link that does not open, so nobody ends the wait for it."""

    def link_lost(self, epoch: int, peer: int, line: str) -> None:
        return None


class SkipsOneInNewEpoch(Ledger[int]):
    def restart(self, epoch: int, window: int) -> None:
        super().restart(epoch, window)
        self._next += bool(self._entries)


class DoesNotFeedAgain(Ledger[int]):
    def restart(self, epoch: int, window: int) -> None:
        fed = self._next
        super().restart(epoch, window)
        self._next = fed


class FeedsFromTheBeginning(Ledger[int]):
    def restart(self, epoch: int, window: int) -> None:
        super().restart(epoch, window)
        self._next = 0


class ForgetsWhatWasRead(Ledger[int]):
    def restart(self, epoch: int, window: int) -> None:
        super().restart(epoch, window)
        self._entries.clear()


class WritesOldResults(Ledger[int]):
    def judge(self, epoch: int, number: int) -> Arrival:
        return Arrival.WRITE


class FeedsAgainWhenChanged(Ledger[int]):
    """Feeds the new epoch what the one before will write."""

    def change(self, epoch: int, window: int) -> int:
        first = super().change(epoch, window)
        self._next = self._first = self._written
        return first


class SkipsOneWhenChanged(Ledger[int]):
    def change(self, epoch: int, window: int) -> int:
        self._next += 1
        return super().change(epoch, window)


class DropsWhatTheFormerEpochHas(Ledger[int]):
    def judge(self, epoch: int, number: int) -> Arrival:
        return Arrival.DROP if epoch < self._epoch else super().judge(epoch, number)


class DropsWhatTheNewEpochHas(Ledger[int]):
    def judge(self, epoch: int, number: int) -> Arrival:
        arrival = super().judge(epoch, number)
        return Arrival.DROP if arrival is Arrival.HOLD else arrival


class WritesTheNewBeforeTheFormer(Ledger[int]):
    def judge(self, epoch: int, number: int) -> Arrival:
        arrival = super().judge(epoch, number)
        return Arrival.WRITE if arrival is Arrival.HOLD else arrival


class RemembersTheChangeAfterAFailure(Ledger[int]):
    def restart(self, epoch: int, window: int) -> None:
        first, before = self._first, self._before
        super().restart(epoch, window)
        if before:
            self._first = first


class HasNoWindow(Ledger[int]):
    def next_number(self) -> int | None:
        return None if self._next == self._count else self._next


class IsCompleteWhenAllIsFed(Ledger[int]):
    @property
    def complete(self) -> bool:
        return self._count is not None and self._next >= self._count


class LoadsForEver(LoadDeadlines):
    def look(self, loads: Mapping[tuple[int, int], Loading], now: float) -> list[LoadFinding]:
        return []


class DoesNotCountBytes(LoadDeadlines):
    """Gives up what takes long, whether anything is loaded or not."""

    def look(self, loads: Mapping[tuple[int, int], Loading], now: float) -> list[LoadFinding]:
        return super().look({key: replace(load, loaded=0) for key, load in loads.items()}, now)


_RARE: Mapping[type[Epochs | EpochMember], int] = {
    GoesOnWithoutDataRank: 670,
    IgnoresCompleteWhileStopping: 3700,
    RefusesEarlyLinks: 930,
}
"""Seeds from which to look for bugs that need several disturbances at the right moment."""

BUGS: tuple[Rules, ...] = (
    *(
        Rules(epochs=epochs, from_seed=_RARE.get(epochs, 0))
        for epochs in (
            ForgetsToAbort,
            AbortsOnlyOne,
            DoesNotWaitForStops,
            StartsBeforeAllArePrepared,
            HearsFormerMembers,
            ForgetsLossWhilePreparing,
            ForgetsLossWhileStopping,
            UsesOvertakenPlan,
            EndsThoughOneHasJoined,
            ForgetsWhoJoins,
            ReplacesRankThatLives,
            ForgetsClaims,
            StopsForSpare,
            GoesOnWithoutDataRank,
            IgnoresCompleteWhileStopping,
            LosesAfterTheEnd,
            ReusesEpochThatNeverRan,
            TriesBrokenLinkForEver,
            TellsVerdictToParticipantsOnly,
            SwitchesBeforeAllArePrepared,
            RetiresWhenOneHasPassed,
            ForgetsToDrop,
            DoesNotWaitForDrops,
            StopsOnlyWhatRan,
            StopsWhatRunsForWhatIsPrepared,
            RunsOnWithoutAParticipantOfTheNext,
            ReusesNumberOfDroppedEpoch,
            AwaitsNoLoad,
        )
    ),
    *(
        Rules(member=member, from_seed=_RARE.get(member, 0))
        for member in (
            TakesFramesOfAnyEpoch,
            DoesNotReportStopBeforeRun,
            ReportsStopAtOnce,
            RefusesEarlyLinks,
            ReportsNoLink,
            TakesPassedForRunning,
        )
    ),
    *(
        Rules(ledger=ledger)
        for ledger in (
            SkipsOneInNewEpoch,
            DoesNotFeedAgain,
            FeedsFromTheBeginning,
            ForgetsWhatWasRead,
            WritesOldResults,
            FeedsAgainWhenChanged,
            SkipsOneWhenChanged,
            DropsWhatTheFormerEpochHas,
            DropsWhatTheNewEpochHas,
            WritesTheNewBeforeTheFormer,
            RemembersTheChangeAfterAFailure,
            HasNoWindow,
            IsCompleteWhenAllIsFed,
        )
    ),
    *(Rules(loads=loads) for loads in (LoadsForEver, DoesNotCountBytes)),
)
