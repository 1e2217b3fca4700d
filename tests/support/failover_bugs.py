"""Bugs to plant into the rules of failover, to show that the simulated world finds them.

A bug is a table in which one row does the wrong thing, or a class in which one method does. It is planted
where the product takes its parts from: ``HubParts``, and the arguments of ``Turns`` and of the world.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from failover_shells import LAYERS, Rules
from msgspec import Raw
from msgspec.structs import replace

from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.control.admission import Attendance, Newcomer, Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.attempts import Attempts, EpochAttempt, Faults, Part
from pipeedge.control.epoch_member import EpochMember, MemberStep, Report
from pipeedge.control.epochs import (
    TABLE,
    Effect,
    Epochs,
    Event,
    Step,
    Table,
    abort_all,
    abort_next,
    forget_next,
    prepare,
    send_nothing,
    tell_complete,
    tell_verdict,
)
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import Limits, Loading, Silent
from pipeedge.control.load_deadline import LoadDeadlines, LoadFinding
from pipeedge.control.losses import Losses
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
from pipeedge.control.plans import Plans, Wanted
from pipeedge.control.rank_messages import RankMessages
from pipeedge.control.rank_watch import RankWatch
from pipeedge.control.roster import Members, Outgoing, Roster
from pipeedge.control.rules import HubParts, HubState
from pipeedge.control.supervision import Supervision
from pipeedge.data import Microbatch
from pipeedge.data.step_queue import Listener, StepGroup, StepQueue
from pipeedge.decoding.generation import Piece
from pipeedge.decoding.pages import LostLayers, LostPart
from pipeedge.decoding.prompt import Prompt
from pipeedge.decoding.step_limits import CacheSize, StepLimits
from pipeedge.decoding.steps import StepScheduler
from pipeedge.plan.after_loss import Held
from pipeedge.run.ledger import Arrival, Ledger

_ACTIVE = (Step.PREPARING, Step.RUNNING, Step.CHANGING, Step.DROPPING, Step.SWITCHING)


# --- the table of the hub ---------------------------------------------------------------------------


def _rows(effect: Effect, after: Step, event: Event, *steps: Step) -> Table:
    """Return the table with other rows for an event."""
    return {**TABLE, **{(step, event): (effect, after) for step in steps}}


def _instead(wrong: Mapping[Effect, Effect]) -> Table:
    """Return the table with other effects in all rows that have one of these."""
    return {key: (wrong.get(effect, effect), after) for key, (effect, after) in TABLE.items()}


def _aborts_only_one(epochs: Epochs, line: str) -> Outgoing:
    outgoing = abort_all(epochs, line)
    epochs.attempts.awaited = set(sorted(epochs.attempts.awaited)[:1])
    return outgoing[:1]


def _stops_only_what_ran(epochs: Epochs, line: str) -> Outgoing:
    epochs.attempts.next = None
    epochs.attempts.awaited.clear()
    return abort_all(epochs, line)


def _does_not_wait_for_drops(epochs: Epochs, line: str) -> Outgoing:
    outgoing = abort_next(epochs, line)
    epochs.attempts.next, epochs.attempts.awaited = None, set()
    return outgoing


def _forgets_to_drop(epochs: Epochs, line: str) -> Outgoing:
    _does_not_wait_for_drops(epochs, line)
    return []


def _reuses_number_of_dropped_epoch(epochs: Epochs, what: object) -> Outgoing:
    epochs.attempts.latest = epochs.epoch
    return forget_next(epochs, what)


def _reuses_epoch_that_never_ran(epochs: Epochs, line: str) -> Outgoing:
    epochs.attempts.latest -= epochs.step is Step.PREPARING
    return abort_all(epochs, line)


def _tells_verdict_to_participants_only(epochs: Epochs, failure: Failure) -> Outgoing:
    rank_of, participants = epochs.roster.rank_of, epochs.roster.participants or ()
    return [one for one in tell_verdict(epochs, failure) if rank_of.get(one[0]) in participants]


def _says_nothing_of_a_dropped_change(effect: Effect) -> Effect:
    def wrong(epochs: Epochs, what: object) -> Outgoing:
        change, outcome = epochs.change, epochs.outcome
        outgoing = effect(epochs, what)
        epochs.change, epochs.outcome = change, outcome
        return outgoing

    return wrong


_DROPPING = (abort_all, abort_next, tell_complete, tell_verdict)
_TABLES: Mapping[str, Table] = {
    "ForgetsToAbort": _rows(send_nothing, Step.PLANNING, Event.FAULT, *_ACTIVE),
    "DoesNotWaitForStops": _rows(abort_all, Step.PLANNING, Event.FAULT, *_ACTIVE),
    "AbortsOnlyOne": _instead({abort_all: _aborts_only_one}),
    "StopsOnlyWhatRan": _instead({abort_all: _stops_only_what_ran}),
    "StopsWhatRunsForWhatIsPrepared": _rows(abort_all, Step.STOPPING, Event.NEXT_FAULT, Step.CHANGING),
    "RunsOnWithoutAParticipantOfTheNext": _rows(
        send_nothing, Step.SWITCHING, Event.NEXT_FAULT, Step.SWITCHING
    ),
    "ForgetsToDrop": _rows(_forgets_to_drop, Step.RUNNING, Event.NEXT_FAULT, Step.CHANGING),
    "DoesNotWaitForDrops": _rows(_does_not_wait_for_drops, Step.RUNNING, Event.NEXT_FAULT, Step.CHANGING),
    "ReusesNumberOfDroppedEpoch": _instead({forget_next: _reuses_number_of_dropped_epoch}),
    "ReusesEpochThatNeverRan": _instead({abort_all: _reuses_epoch_that_never_ran}),
    "TellsVerdictToParticipantsOnly": _instead({tell_verdict: _tells_verdict_to_participants_only}),
    "SaysNothingOfADroppedChange": _instead(
        {effect: _says_nothing_of_a_dropped_change(effect) for effect in _DROPPING}
    ),
    "EndsIfTheFirstPlanIsOvertaken": _rows(send_nothing, Step.GATHERING, Event.OVERTAKEN, Step.GATHERING),
}


class PlansWhileOthersStop(Plans):
    """Needs a row of the table, too."""

    TABLE: ClassVar[Table] = _rows(prepare, Step.PREPARING, Event.PLAN, Step.STOPPING)

    def wanted(self) -> Wanted | None:
        if self.epochs.step is not Step.STOPPING:
            return super().wanted()
        causes = self.epochs.causes
        return Wanted(self.roster.members, self.roster.agreed_facts(), causes.line, tuple(causes.ranks))


# --- messages, losses and plans at the hub ----------------------------------------------------------


def _handlers(changes: Mapping[Step, Mapping[Any, Any]]) -> Mapping[Step, Any]:
    """Return the handlers of messages about an epoch, with others in some steps."""
    return {step: {**handlers, **changes.get(step, {})} for step, handlers in RankMessages.EPOCH.items()}


def _take_any_ready(messages: RankMessages, rank: int, ready: Ready, now: float) -> Outgoing:
    messages.epochs.attempts.awaited = {(ready.epoch, rank)}
    return messages.take_ready(rank, ready, now)


_IGNORED = {Ready: RankMessages.ignore}


class StartsBeforeAllArePrepared(RankMessages):
    EPOCH = _handlers({Step.PREPARING: {Ready: _take_any_ready}, Step.RUNNING: _IGNORED})


class SwitchesBeforeAllArePrepared(RankMessages):
    EPOCH = _handlers(
        {Step.CHANGING: {Ready: _take_any_ready}, Step.SWITCHING: _IGNORED, Step.RUNNING: _IGNORED}
    )


class IgnoresCompleteWhileStopping(RankMessages):
    EPOCH = _handlers({Step.STOPPING: {Complete: RankMessages.ignore}})


class ForgetsLossWhilePreparing(Losses):
    def lost(self, rank: int, failure: Failure, now: float) -> Outgoing:
        if self.epochs.step is Step.PREPARING and not self.is_essential(rank):
            self.roster.remove(rank, now)
            return []
        return super().lost(rank, failure, now)


class StopsForSpare(Losses):
    def lost(self, rank: int, failure: Failure, now: float) -> Outgoing:
        outgoing = super().lost(rank, failure, now)
        runs = self.epochs.step is Step.RUNNING
        return outgoing + (self.epochs.happen(Event.FAULT, failure.line, now) if runs else [])


class GoesOnWithoutDataRank(Losses):
    def is_essential(self, rank: int) -> bool:
        return not self.epochs.goes_on or rank == 0


class GoesOnAfterTheLastLoss(Losses):
    """Does not know the policy under which the first loss is the last event."""

    def is_essential(self, rank: int) -> bool:
        return rank in (0, self.roster.data_rank)


class DismissesTheEndThatMustStay(Losses):
    swapped: int | None = None

    def is_essential(self, rank: int) -> bool:
        return rank == self.swapped or super().is_essential(rank)

    def link_lost(self, rank: int, peer: int, failure: Failure, now: float, cause: str = "") -> Outgoing:
        swaps = self.is_essential(rank) != self.is_essential(peer)
        ends = (peer, rank) if swaps and not self.is_essential(peer) else (rank, peer)
        self.swapped = ends[0]
        try:
            return super().link_lost(*ends, failure, now, cause)
        finally:
            self.swapped = None


class HasNoPatience(Losses):
    """Waits for ever for a member that does not stop."""

    def overdue(self, now: float) -> Outgoing:
        return []


class LetsOneMicrobatchCostRankAfterRank(Losses):
    def failed(self, rank: int, failed: Failed, failure: Failure, now: float) -> Outgoing:
        return self.lost(rank, failure, now)


class LosesAfterTheEnd(Losses):
    def go_on_without(self, line: str, rank: int | None) -> Outgoing:
        return self.end(Failure(FailureKind.GONE, line), 0.0)


class WaitsForThoseWhoLeft(Losses):
    def go_on_without(self, line: str, rank: int | None) -> Outgoing:
        return []


class UsesOvertakenPlan(Plans):
    def has_all(self, announcement: Announcement[Raw], members: Members) -> bool:
        return True


class EndsThoughOneHasJoined(Plans):
    def none_fits(self, members: Members, failure: Failure, now: float) -> Outgoing:
        is_wanted = self.epochs.step is Step.PLANNING
        return self.epochs.happen(Event.END, failure, now) if is_wanted else []


class RetiresWhenOneHasPassed(Attempts):
    def note_passed(self, part: Part) -> None:
        for each in self.parts(self.current):
            super().note_passed(each)


class WaitsForTheLost(Attempts):
    """Forgets the loss of a rank while others stop."""

    def forget(self, rank: int) -> None:
        pass


class TakesANewcomerForAParticipant(Attempts):
    def __init__(self, roster: Roster) -> None:
        super().__init__(roster)
        self.here = roster

    def parts(self, attempt: EpochAttempt | None) -> list[Part]:
        ranks: Iterable[int] = () if attempt is None else sorted(attempt.participants)
        return [(attempt.number, rank) for rank in ranks if attempt and rank in self.here.seats]


class AwaitsNoLoad(Attempts):
    def awaits(self, rank: int) -> bool:
        return False


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
    def __init__(self, roster: Roster, terms: Terms, now: float) -> None:
        super().__init__(roster, terms, now)
        self.here = roster

    def claim(self, connection: int, hello: Hello) -> Outgoing:
        outgoing = super().claim(connection, hello)
        self.here.remove(hello.rank, self.here.seats[hello.rank].heard_at)
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
    looks = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        self.looks = True
        yield
        self.looks = False

    def look(self, *args: Any) -> Any:
        with self.looking():
            return super().look(*args)

    def moved(self, now: float) -> None:
        if not self.looks:
            super().moved(now)


class IgnoresClosedConnections(HubState):
    def closed(self, connection: int, now: float, why: str = "", *, left: str = "") -> Outgoing:
        rank = self.roster.rank_of.get(connection)
        if rank is not None and self.epochs.recovers and rank in self.epochs.participants:
            return []
        return super().closed(connection, now, why, left=left)


class DiagnosesOnlyThoseWhoWork(Supervision):
    """Does not see that a rank falls silent while plans are made and prepared."""

    def look(self, now: float) -> Outgoing:
        return super().look(now) if self.roster.runs or self.epochs.step is Step.GATHERING else []


class LoadsForEver(LoadDeadlines):
    def look(self, loads: Mapping[tuple[int, int], Loading], now: float) -> list[LoadFinding]:
        return []


class DoesNotCountBytes(LoadDeadlines):
    """Gives up what takes long, whether anything is loaded or not."""

    def look(self, loads: Mapping[tuple[int, int], Loading], now: float) -> list[LoadFinding]:
        return super().look({key: replace(load, loaded=0) for key, load in loads.items()}, now)


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


# --- text -------------------------------------------------------------------------------------------


class ForgetsWhatIsAsked(StepQueue):
    def begin(self, *plan: Any) -> None:
        self._scheduler = None
        super().begin(*plan)


class GoesOnWithThePagesOfLostStages(StepQueue):
    def begin(self, *plan: Any) -> None:
        before, self._scheduler = self._scheduler, None
        super().begin(*plan)
        self._scheduler = before or self._scheduler


class TellsTheLastTokenAgain(StepQueue):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pieces: dict[int, Piece] = {}

    def submit(self, prompt: Prompt, listener: Listener, *, choice: int = 0) -> int:
        grew = listener.grew

        def noted(sequence: int, piece: Piece) -> None:
            self.pieces[sequence] = piece
            grew(sequence, piece)

        listener.grew = noted  # type: ignore[method-assign]
        return super().submit(prompt, listener, choice=choice)

    def begin(self, *plan: Any) -> None:
        super().begin(*plan)
        for number, one in self._sequences.items():
            if number in self.pieces:
                one.listener.grew(number, self.pieces[number])


class EndsWithTheEpoch(StepQueue):
    def wake(self) -> None:
        self.close()


class EndsWhileSomeWait(StepQueue):
    def wait_for_step(self, is_closed: Callable[[], bool]) -> StepGroup | None:
        if self._drains and self._scheduler is not None and not self._scheduler.running:
            return None
        return super().wait_for_step(is_closed)


class _KeptStep(StepGroup):
    is_kept, is_made_anew = True, False

    def collate(self, payload: Payload) -> Microbatch:
        return dataclasses.replace(super().collate(payload), origin=self)


class FeedsLostStepsAgain(StepQueue):
    def wait_for_step(self, is_closed: Callable[[], bool]) -> StepGroup | None:
        group = super().wait_for_step(is_closed)
        return None if group is None else _KeptStep((), group.step, group.ends)


class GivesUpWithoutThePages(StepQueue):
    def cancel(self, sequence: int) -> None:
        self._sequences.pop(sequence, None)


class TakesOverBeforeTheFormerEnds(StepQueue):
    def take_over(self, is_closed: Callable[[], bool]) -> None:
        if self._scheduler is not None and self._following is not None:
            self._restart(self._scheduler, *self._following)


class TakesOverThePages(StepQueue):
    """Goes on in the pages of the plan before, which other stages have."""

    def take_over(self, is_closed: Callable[[], bool]) -> None:
        pass


class KeepsPages(StepScheduler):
    """Takes the tokens before a loss for computed."""

    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        self.limits, self.cache = limits, cache
        self._flights.clear()
        for one in self._running.values():
            one.awaits = False


class SharesPagesOfLostStages(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        for one in self._running.values():
            one.lists.give_back()
        pool = copy.deepcopy(self._pool)
        super().restart(limits, cache, lost)
        self._pool = pool
        for one in self._waiting.values():
            one.lists = self._new_lists()


class ForgetsTheLastToken(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        super().restart(limits, cache, lost)
        for one in self._waiting.values():
            if len(one.tokens) > 1:
                one.tokens.pop()


class ForgetsThoseWhoWait(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        self._waiting.clear()
        super().restart(limits, cache, lost)


class KeepsStepsInFlight(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        flights = self._flights
        super().restart(limits, cache, lost)
        self._flights = flights


class GoesOnInEmptyPages(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        positions = {number: one.position for number, one in self._running.items()}
        super().restart(limits, cache, lost)
        for number, position in positions.items():
            one = self._waiting[number]
            one.lists.reserve(position)
            one.position = position


class WaitsForALostToken(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        awaiting = [one for one in self._running.values() if one.awaits]
        super().restart(limits, cache, lost)
        for one in awaiting:
            one.awaits = True


class KeepsTheFormerBounds(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        super().restart(self.limits, self.cache, lost)


class TakesLostPagesForKept(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        super().restart(limits, cache, LostLayers(LAYERS))


class KeepsPagesOfStepsInFlight(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        self._flights.clear()
        super().restart(limits, cache, lost)


class TakesAllPagesForCopied(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        if lost is not None:
            lost = dataclasses.replace(lost, parts=[one for one in lost.parts if not one.copied])
        super().restart(limits, cache, lost)


class LeavesOutTheLastCopiedLayer(StepScheduler):
    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        if lost is not None:
            parts = [
                LostPart(LayerRange(one.layers.start, max(one.layers.stop - bool(one.copied), 1)), one.copied)
                for one in lost.parts
            ]
            lost = dataclasses.replace(lost, parts=parts)
        super().restart(limits, cache, lost)


class LeavesOutTheLastLostStage(StepScheduler):
    def _repeating_layers(self, one: Any, rows: int) -> LayerRange | None:
        found = super()._repeating_layers(one, rows)
        return found and LayerRange(found.start, max(found.stop - 1, found.start + 1))


class TakesAllOutputsForKept(StepScheduler):
    """Computes from outputs that nobody has, or that were of other texts."""

    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        if lost is not None:
            lost = dataclasses.replace(lost, outputs=frozenset(range(LAYERS)))
        super().restart(limits, cache, lost)


class BeginsBehindTheKeptOutputs(StepScheduler):
    """Leaves out the first of the layers that compute again."""

    def _repeating_layers(self, one: Any, rows: int) -> LayerRange | None:
        found = super()._repeating_layers(one, rows)
        return found and LayerRange(min(found.start + 1, found.stop - 1), found.stop)


class TakesOutputsOfOldPagesForKept(StepScheduler):
    """Takes what ranks keep from now on for kept of pages that were full before."""

    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        super().restart(limits, cache, lost)
        if self._pool is not None:
            for page in self._pool._outputs:
                self._pool._outputs[page] |= cache.outputs


class TakesStalePagesForKnown(StepScheduler):
    def _share(self, one: Any) -> None:
        super()._share(one)
        one.position = max(one.position, one.held)


class TakesANewProcessForTheFormer(Held):
    def forget(self, rank: int) -> None:
        pass


class TakesLoadedLayersForOldOnes(Held):
    def since(self, schedule: Schedule, number: int) -> tuple[int, ...]:
        return (1,) * schedule.stages[-1].layers.stop


class ComparesWithAPlanThatHasNotRun(StepQueue):
    def change(self, *plan: Any) -> None:
        super().change(*plan)
        self._owners = plan[-1]


_RARE: Mapping[str, int] = {
    "StopsWhatRunsForWhatIsPrepared": 130,
    "RunsOnWithoutAParticipantOfTheNext": 1960,
    "IgnoresCompleteWhileStopping": 245,
    "GoesOnWithoutDataRank": 490,
    "EndsThoughOneHasJoined": 200,
    "DismissesTheEndThatMustStay": 3625,
    "EndsIfTheFirstPlanIsOvertaken": 5505,
    "ForgetsClaims": 1515,
    "TrustsFactsThatWereNotCompared": 80,
    "HearsNoSilence": 120,
    "DoesNotSeeThatItMoves": 2070,
    "ReportsNoLink": 285,
    "RunsBeforeItIsTold": 105,
    "TakesANewProcessForTheFormer": 23,
    "TakesLoadedLayersForOldOnes": 23,
    "TriesBrokenLinkForEver": 545,
    "DoesNotCountBytes": 260,
    "DropsWhatTheNewEpochHas": 265,
    "TakesOverThePages": 38,
    "ComparesWithAPlanThatHasNotRun": 64,
    "KeepsTheFormerBounds": 38,
    "TakesAllPagesForCopied": 25,
    "TakesOutputsOfOldPagesForKept": 574,
    "LeavesOutTheLastCopiedLayer": 25,
    "GivesUpWithoutThePages": 12,
}
"""Seeds from which to look for bugs that need several disturbances at the right moment."""

_SEAMS: Mapping[type, Callable[[type], dict[str, Any]]] = {
    Plans: lambda bug: {"parts": HubParts(table=getattr(bug, "TABLE", None), plans=bug)},
    RankMessages: lambda bug: {"parts": HubParts(messages=bug)},
    Losses: lambda bug: {"parts": HubParts(losses=bug)},
    Attempts: lambda bug: {"parts": HubParts(attempts=bug)},
    Faults: lambda bug: {"parts": HubParts(faults=bug)},
    Roster: lambda bug: {"parts": HubParts(roster=bug)},
    Attendance: lambda bug: {"parts": HubParts(attendance=bug)},
    RankWatch: lambda bug: {"parts": HubParts(watch=bug)},
    LoadDeadlines: lambda bug: {"parts": HubParts(loads=bug)},
    Supervision: lambda bug: {"parts": HubParts(supervision=bug)},
    HubState: lambda bug: {"hub": bug},
    EpochMember: lambda bug: {"member": bug},
    Ledger: lambda bug: {"ledger": bug},
    StepQueue: lambda bug: {"queue": bug, "text": True},
    StepScheduler: lambda bug: {"scheduler": bug, "text": True},
    Held: lambda bug: {"held": bug, "text": True},
}
"""Where a bug in a class of the product is planted."""


def _all_bugs() -> tuple[Rules, ...]:
    """Return the rules with each of the bugs above."""
    found = [
        Rules(name, parts=HubParts(table=table), from_seed=_RARE.get(name, 0))
        for name, table in _TABLES.items()
    ]
    for whole, seam in _SEAMS.items():
        bugs = [each for each in globals().values() if isinstance(each, type) and issubclass(each, whole)]
        found += [
            Rules(bug.__name__, **seam(bug), from_seed=_RARE.get(bug.__name__, 0))
            for bug in bugs
            if bug is not whole
        ]
    return tuple(found)


BUGS = _all_bugs()
