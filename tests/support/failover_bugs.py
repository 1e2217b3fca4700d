"""Bugs to plant into the rules of failover, to show that the simulated world finds them.

Each is a set of rules in which one method does the wrong thing. They know the private parts of the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from failover_processes import Rules

from pipeedge.control.epoch_member import Admission, EpochMember, MemberStep
from pipeedge.control.epoch_messages import Abort, EpochReady, Prepare, Stopped
from pipeedge.control.epochs import EpochPlan, Epochs, EpochStep, Members
from pipeedge.control.failures import Failure
from pipeedge.control.ledger import Arrival, Ledger
from pipeedge.control.messages import Complete, Message, Verdict

Outgoing = list[tuple[int, Message]]


class ForgetsToAbort(Epochs):
    def _stop(self, line: str, without: int | None = None) -> Outgoing:
        self._step = EpochStep.PLANNING
        return []


class AbortsOnlyOne(Epochs):
    def _stop(self, line: str, without: int | None = None) -> Outgoing:
        outgoing = super()._stop(line, without)
        self._awaited = set(sorted(self._awaited)[:1])
        return outgoing[:1]


class DoesNotWaitForStops(Epochs):
    def _stop(self, line: str, without: int | None = None) -> Outgoing:
        outgoing = super()._stop(line, without)
        self._step = EpochStep.PLANNING
        return outgoing


class StartsBeforeAllArePrepared(Epochs):
    def _take_prepared(self, rank: int, prepared: Any) -> Outgoing:
        self._awaited = {rank}
        return super()._take_prepared(rank, prepared)

    _STEPS = MappingProxyType(
        {
            **Epochs._STEPS,
            EpochStep.PREPARING: {**Epochs._STEPS[EpochStep.PREPARING], EpochReady: _take_prepared},
            EpochStep.RUNNING: {**Epochs._STEPS[EpochStep.RUNNING], EpochReady: Epochs._ignore},
        }
    )


class HearsFormerMembers(Epochs):
    def __init__(self, members: Mapping[int, int], data_rank: int) -> None:
        super().__init__(members, data_rank)
        self._ever = {incarnation: rank for rank, incarnation in members.items()}

    def _admit(self, rank: int, incarnation: int) -> None:
        self._ever[incarnation] = rank
        super()._admit(rank, incarnation)

    def _rank_of(self, incarnation: int) -> int | None:
        rank = self._ever.get(incarnation)
        return rank if rank in self._members else None


class ForgetsLossWhilePreparing(Epochs):
    def lost(self, incarnation: int, failure: Failure) -> Outgoing:
        rank = self._rank_of(incarnation)
        if self._step is EpochStep.PREPARING and rank is not None and rank not in self._essential:
            del self._members[rank]
            return []
        return super().lost(incarnation, failure)


class ForgetsLossWhileStopping(Epochs):
    def lost(self, incarnation: int, failure: Failure) -> Outgoing:
        awaited = set(self._awaited)
        outgoing = super().lost(incarnation, failure)
        if self._step is EpochStep.PLANNING and awaited and not self._awaited:
            self._step, self._awaited = EpochStep.STOPPING, awaited
        return outgoing


class UsesOvertakenPlan(Epochs):
    def planned(self, membership: Members, decision: EpochPlan | Failure) -> Outgoing:
        outgoing = super().planned(membership, decision)
        if self._step is not EpochStep.PLANNING or isinstance(decision, Failure):
            return outgoing
        self._epoch, self._step = self._epoch + 1, EpochStep.PREPARING
        self._participants, self._awaited = decision.participants, set(decision.participants)
        here = [self._members[rank] for rank in decision.participants if rank in self._members]
        return [(incarnation, Prepare(self._epoch, decision.plan)) for incarnation in here]


class EndsThoughOneHasJoined(Epochs):
    def planned(self, membership: Members, decision: EpochPlan | Failure) -> Outgoing:
        if isinstance(decision, Failure) and self._step is EpochStep.PLANNING:
            return self._end(decision)
        return super().planned(membership, decision)


class ForgetsWhoJoins(Epochs):
    def joined(self, rank: int, incarnation: int) -> Outgoing:
        return []


class ReplacesRankThatLives(Epochs):
    def joined(self, rank: int, incarnation: int) -> Outgoing:
        self._members.pop(rank, None)
        return super().joined(rank, incarnation)


class ForgetsClaims(Epochs):
    def lost(self, incarnation: int, failure: Failure) -> Outgoing:
        self._claims.clear()
        return super().lost(incarnation, failure)


class StopsForSpare(Epochs):
    def lost(self, incarnation: int, failure: Failure) -> Outgoing:
        rank = self._rank_of(incarnation)
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
    def planned(self, membership: Members, decision: EpochPlan | Failure) -> Outgoing:
        self._epoch -= self._has_failed_before_run
        return super().planned(membership, decision)

    _has_failed_before_run = False

    def _stop(self, line: str, without: int | None = None) -> Outgoing:
        self._has_failed_before_run = self._step is EpochStep.PREPARING
        return super()._stop(line, without)


class TriesBrokenLinkForEver(Epochs):
    def _is_first_fault(self, link: frozenset[int]) -> bool:
        return True


class TellsVerdictToParticipantsOnly(Epochs):
    def _end(self, failure: Failure) -> Outgoing:
        super()._end(failure)
        return [
            (incarnation, Verdict(failure))
            for rank, incarnation in self._members.items()
            if rank in self._participants
        ]


class TakesFramesOfAnyEpoch(EpochMember):
    def judge(self, epoch: int) -> Admission:
        working = (MemberStep.PREPARING, MemberStep.PREPARED, MemberStep.RUNNING)
        return Admission.TAKE if self._step in working else super().judge(epoch)


class DoesNotReportStopBeforeRun(EpochMember):
    def heard(self, message: Any) -> None:
        step = self._step
        super().heard(message)
        if isinstance(message, Abort) and step is not MemberStep.RUNNING:
            self._step = MemberStep.SPARE


class ReportsStopAtOnce(EpochMember):
    """Seems to have stopped while it still takes frames."""

    def stopped(self, written: int | None = None) -> Stopped | None:
        stopped = super().stopped(written)
        if stopped is not None:
            self._step = MemberStep.STOPPING
        return stopped


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


class HasNoWindow(Ledger[int]):
    def next_number(self) -> int | None:
        return None if self._next == self._count else self._next


class IsCompleteWhenAllIsFed(Ledger[int]):
    @property
    def complete(self) -> bool:
        return self._count is not None and self._next >= self._count


BUGS: tuple[Rules, ...] = (
    *(
        Rules(epochs=epochs)
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
        )
    ),
    *(
        Rules(member=member)
        for member in (
            TakesFramesOfAnyEpoch,
            DoesNotReportStopBeforeRun,
            ReportsStopAtOnce,
            RefusesEarlyLinks,
            ReportsNoLink,
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
            HasNoWindow,
            IsCompleteWhenAllIsFed,
        )
    ),
)
