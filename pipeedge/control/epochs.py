"""Rules of a session at the hub: which epoch is active, and what a loss changes. Pure.

                  ┌──────────────── a plan for the members of now
                  v                                        ┌─> COMPLETE   all results are written
    PLANNING ──────> PREPARING e ──all are prepared──> RUNNING e
    GATHERING         │                                    │
       │  │           └──────a member or a link is lost────┤
       │  └─> ENDED  no plan fits                          v
       └──────────all that are left have stopped─────── STOPPING
                                                           └─> ENDED  a rank is lost that is essential

    RUNNING e ──a better plan──> CHANGING ──all are prepared──> SWITCHING ──all has passed──> RUNNING e + 1
        ^                        e runs,                        e drains,
        │                        e + 1 is prepared              e + 1 runs
        └──all have dropped it── DROPPING <─┘ a fault of e + 1 alone

Every session is a sequence of *epochs*, each one attempt to run one plan, with a number of its own. What
happens next is in one table, ``Epochs.TABLE``:

    step                 event       sent, and to whom                          next step
    GATHERING, PLANNING  PLAN        prepare e, to its participants             PREPARING
    GATHERING            OVERTAKEN                                              PLANNING
    PREPARING            PREPARED    run e, to its participants                 RUNNING
    PREPARING, RUNNING   FAULT       abort e, to all of it that are left        STOPPING
    RUNNING              CHANGE      prepare e + 1, to its participants         CHANGING
    CHANGING             PREPARED    run e + 1, to its participants             SWITCHING
    CHANGING             NEXT_FAULT  abort e + 1, to all of it that are left    DROPPING
    CHANGING, SWITCHING  FAULT       abort both, to all that are left           STOPPING
    SWITCHING            NEXT_FAULT  abort both, to all that are left           STOPPING
    SWITCHING            PASSED      retire e, to all of it that are left       RUNNING
    DROPPING             STOPPED                                                RUNNING
    DROPPING             FAULT       abort e, to all of it that are left        STOPPING
    STOPPING             STOPPED                                                PLANNING
    any that is active   COMPLETE    complete, to everybody                     COMPLETE
    any but ENDED        END         verdict, to everybody                      ENDED

An event without a row changes nothing. The *policy* decides which event a loss is. In a session that goes
on, the loss of rank 0 or of the data rank is an END, and that of another participant a FAULT. In any other
session, every participant is essential: the first loss is the last event. After a failure, e + 1 is not
prepared before all members that are left have stopped e. A loss while an epoch is prepared is treated like
one while it runs: there are no special cases for a second failure.

A *change* is for a better plan, with nothing lost: e + 1 is prepared beside e, and gets what the data rank
reads from the moment at which all are prepared. What e was fed before takes its way through e.

What a former member sends is ignored. A rank that comes back is a spare until the next plan. A plan is
dropped if one of its participants has left meanwhile. A member that does not stop its part of a failed epoch
in time is lost. A link that breaks while both its ends live may be a passing fault, so the members try again.
If the same link breaks again before anything else was written, or breaks two epochs in a row, one of its ends
is dismissed; so every epoch either writes something, or brings a decision closer. A standstill that comes
again without a result ends the session, and so does a microbatch whose values lead to an exception a second
time, as it would cost rank after rank.

``Epochs`` uses neither sockets nor clocks: events go in, messages to send come out. Heartbeats, silence and
diagnosis are in ``pipeedge.control.rules``; the other end of the messages is
``pipeedge.control.epoch_member``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, TypeAlias

from msgspec import Raw

from pipeedge.base.wording import figure
from pipeedge.control.announcement import Announcement
from pipeedge.control.attempts import Attempts, EpochAttempt, Faults, Part
from pipeedge.control.changing import Dropped, RunSnapshot, Switched
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.messages import (
    Abort,
    Complete,
    Declined,
    Failed,
    LinkLost,
    Message,
    Notice,
    Passed,
    Prepare,
    Ready,
    Retire,
    Run,
    Stopped,
    Verdict,
)
from pipeedge.control.roster import Members, Outgoing, Roster

__all__ = ["Epochs", "Event", "Step", "Wanted"]


class Step(enum.Enum):
    """Step of a session."""

    GATHERING = "gathering"
    """Ranks come and state their facts, until there is a first plan."""
    PLANNING = "planning"
    """The hub waits for a plan; no epoch is active."""
    PREPARING = "preparing"
    """The participants load their parts and open their links."""
    RUNNING = "running"
    CHANGING = "changing"
    """An epoch runs, and another one is prepared beside it."""
    DROPPING = "dropping"
    """An epoch runs, and the participants stop to prepare another one."""
    SWITCHING = "switching"
    """An epoch drains, and another one is fed."""
    STOPPING = "stopping"
    """The participants that are left stop all that is active."""
    COMPLETE = "complete"
    """The data rank has written all results; nothing that happens to a rank matters any longer."""
    ENDED = "ended"
    """The session has failed."""


class Event(enum.Enum):
    """Event that may lead to another step."""

    PLAN = "plan"
    """There is a plan for the members of now."""
    OVERTAKEN = "overtaken"
    """There is a plan, of which a participant has left meanwhile."""
    CHANGE = "change"
    """There is a better plan for them."""
    PREPARED = "prepared"
    """All that were asked to prepare have done so."""
    STOPPED = "stopped"
    """All that were asked to stop have done so."""
    PASSED = "passed"
    """All that the epoch was fed has passed all of its participants."""
    FAULT = "fault"
    """The epoch has lost a participant or a link, or nothing moves."""
    NEXT_FAULT = "next fault"
    """The next epoch has lost a participant or a link, or cannot be prepared."""
    COMPLETE = "complete"
    """The data rank has written all results."""
    END = "end"
    """The session cannot go on."""


_RUNS = (Step.RUNNING, Step.CHANGING, Step.DROPPING, Step.SWITCHING, Step.COMPLETE)
"""Steps in which an epoch runs, or has ended well."""
_WRITES = (*_RUNS[:-1], Step.STOPPING)
"""Steps in which the data rank may write the last result."""
_GOES = tuple(step for step in Step if step is not Step.ENDED)
_STOPS = (Step.STOPPING, Step.DROPPING)
"""Steps in which members are asked to stop."""


@dataclass(frozen=True)
class Wanted:
    """The members for which rank 0 has to make a plan."""

    members: Members
    facts: Mapping[int, Raw]
    """Facts of the members that may take part, by rank."""
    cause: str
    """Reason why the last epoch ended, for the user."""
    lost: tuple[int, ...]
    """Ranks that were lost since the last plan, those without a part in it too."""


@dataclass(frozen=True)
class _Change:
    """A change of the plan that goes on."""

    announcement: Announcement[Raw]
    asked_at: float


class Epochs:
    """The epochs of a session. Messages to send are returned as (connection, message).

    Args:
        roster: Ranks of the session.
        patience_s: Longest time in seconds for a member to stop its part of a failed epoch.
    """

    def __init__(self, roster: Roster, patience_s: float) -> None:
        self.step = Step.GATHERING
        self.verdict: Failure | None = None
        """Reason why the session has ended, or None if it has not."""
        self.goes_on = False
        """Policy: whether the session goes on after a loss."""
        self.plan = Raw(b"")
        """The latest plan, for those that join."""
        self.outcome: Switched | Dropped | None = None
        """Outcome of the latest change; None before its end."""
        self._roster = roster
        self._patience_s = patience_s
        self._attempts = Attempts(roster)
        self._faults = Faults()
        self._losses: list[str] = []  # what the latest epoch ended by
        self._broken: list[str] = []
        self._lost: list[int] = []
        self._raised: dict[int, str] = {}  # name of the rank on which a microbatch led to an exception
        self._stopping_since: float | None = None
        self._change: _Change | None = None
        self._first_of_next = 0
        self._unfit: tuple[Members, frozenset[int]] | None = None  # those for whom there is no plan
        self._now = 0.0

    # -- queries ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the latest epoch that ran or was to run, from 1; 0 before the first plan.

        The next one counts once it has taken its place.
        """
        return self._attempts.current.number

    @property
    def participants(self) -> frozenset[int]:
        """Ranks with a part in that epoch, or in the next one if that runs; some may have been lost."""
        both = [self._attempts.current]
        if self.step is Step.SWITCHING and self._attempts.next is not None:
            both.append(self._attempts.next)
        return frozenset(rank for attempt in both for rank in attempt.participants)

    @property
    def can_change(self) -> bool:
        """Whether another plan may be prepared beside the one that runs."""
        return self.goes_on and self.step is Step.RUNNING

    @property
    def recovers(self) -> bool:
        """Whether a loss may lead to another epoch, so that any rank may be needed."""
        return self.goes_on and self.step not in (Step.COMPLETE, Step.ENDED)

    def has_passed(self, rank: int) -> bool:
        """Return whether an epoch that nothing follows needs a rank no longer, as all has passed there."""
        return not self.goes_on and self.step is Step.RUNNING and self._attempts.has_passed(rank)

    def wanted(self) -> Wanted | None:
        """Return the members that need a plan, or None."""
        if self.step is not Step.PLANNING or self._unfit == self._may_take_part():
            return None
        cause = "; ".join(self._losses or self._broken)
        return Wanted(self._roster.members, self._roster.agreed_facts(), cause, tuple(self._lost))

    def snapshot(self) -> RunSnapshot:
        """Return what is known of the run at this moment."""
        roster = self._roster
        statuses = {rank: roster.seats[rank].status for rank in roster.present()}
        is_running = self.step is Step.RUNNING
        return RunSnapshot(self.epoch, is_running, roster.members, roster.agreed_facts(), statuses)

    # -- decisions of rank 0 ----------------------------------------------------------------------

    def planned(self, members: Members, announcement: Announcement[Raw], now: float) -> Outgoing:
        """Prepare an epoch with a plan for ``members``; it is dropped if a participant has left meanwhile."""
        if (self.step, Event.PLAN) not in self.TABLE:
            return []
        if not self._has_all(announcement, members):
            return self._happen(Event.OVERTAKEN, announcement, now)
        self.plan, self._losses, self._broken, self._lost = announcement.plan, [], [], []
        self._unfit = None
        self._roster.participants = announcement.participants
        self._roster.names = announcement.names
        return self._happen(Event.PLAN, announcement, now)

    def unplanned(self, members: Members, failure: Failure, now: float) -> Outgoing:
        """End the run because no plan fits ``members``, unless they have changed.

        If there are some whose facts are still to be compared, the run waits for them.
        """
        if self.step is not Step.PLANNING or members != self._roster.members:
            return []
        here, agreed = self._may_take_part()
        if len(here) == len(agreed):
            return self.end(failure, now)
        self._unfit = here, agreed
        return []

    def _may_take_part(self) -> tuple[Members, frozenset[int]]:
        """Return the members, and the ranks of those that may have a part in a plan."""
        return self._roster.members, frozenset(self._roster.agreed_facts())

    def changed(self, since: RunSnapshot, announcement: Announcement[Raw], now: float) -> Outgoing:
        """Prepare a better plan beside the one that runs, unless the run has changed; see ``outcome``."""
        if since.epoch != self.epoch or not self.can_change:
            self.outcome = Dropped("the run has another plan meanwhile")
        elif not self._has_all(announcement, since.members):
            self.outcome = Dropped("a rank has left or come again meanwhile")
        else:
            self.outcome, self._change = None, _Change(announcement, now)
            return self._happen(Event.CHANGE, announcement, now)
        return []

    def _has_all(self, announcement: Announcement[Raw], members: Members) -> bool:
        """Return whether the participants of a plan are the members still that it was made for."""
        here = self._roster.members
        return all(rank in here and here[rank] == members.get(rank) for rank in announcement.participants)

    # -- losses and faults ------------------------------------------------------------------------

    def lost(self, rank: int, failure: Failure, now: float) -> Outgoing:
        """Go on without a rank that is gone, has failed or is silent, if that is possible."""
        if self._is_essential(rank):
            return self.end(failure, now)
        if rank not in self._roster.seats:
            return []
        parts = [*self._attempts.parts(self._attempts.current), *self._attempts.parts(self._attempts.next)]
        epochs = [epoch for epoch, of in parts if of == rank and self.step is not Step.PLANNING]
        outgoing: Outgoing = [(self._roster.seats[rank].connection, Verdict(failure))]
        had_part = bool(epochs) and rank in self.participants
        self._roster.remove(rank, now)
        self._attempts.forget(rank)
        self._lost.append(rank)
        if had_part or self.step is Step.PLANNING:
            self._losses.append(failure.line)
        elif failure.kind is not FailureKind.REFUSED:
            outgoing += self._roster.to_all(Notice(f"{failure.line}; it had no part in the pipeline"))
        if epochs:
            event = Event.FAULT if self.epoch in epochs else Event.NEXT_FAULT
            return outgoing + self._happen(event, failure.line, now)
        return outgoing + self._settle(now)

    def hung(self, rank: int, failure: Failure, now: float) -> Outgoing:
        """Go on without a rank whose loading does not get on, if others wait for it or it is none of them.

        A better plan is dropped instead: what its rank has loaded for the present one serves still.
        """
        if rank not in self._roster.seats:
            return []
        if self.awaits(rank) or not self._roster.seats[rank].agrees:
            return self.lost(rank, failure, now)
        is_next = self.step is Step.CHANGING and self._awaits(rank)
        return self._happen(Event.NEXT_FAULT, failure.line, now) if is_next else []

    def awaits(self, rank: int) -> bool:
        """Return whether an epoch cannot begin before ``rank`` has loaded its part, and nothing runs."""
        return self.step is Step.PREPARING and self._awaits(rank)

    def _awaits(self, rank: int) -> bool:
        return any(rank == awaited for _, awaited in self._attempts.awaited)

    def _is_essential(self, rank: int) -> bool:
        return not self.goes_on or rank in (0, self._roster.data_rank)

    def failed(self, rank: int, failed: Failed, failure: Failure, now: float) -> Outgoing:
        """Go on without a rank that reports its own failure, unless the same would befall the next one."""
        number = failed.microbatch
        if number is not None and number in self._raised:
            before, name = self._raised[number], self._roster.name(rank)
            both = f"{before} and {name}" if before != name else f"{name}, twice"
            line = f"microbatch {number} cannot be computed, as it failed on {both}: {failed.line}"
            return self.end(Failure(FailureKind.FAILED, line), now)
        if number is not None and self.goes_on:
            self._raised[number] = self._roster.name(rank)
        return self.lost(rank, failure, now)

    def link_lost(self, rank: int, peer: int, failure: Failure, now: float, cause: str = "") -> Outgoing:
        """Try again without the broken link of the active epoch, or without one of its ends.

        Args:
            rank: Participant that noticed it.
            peer: Participant at the other end.
            failure: Reason for the user.
            now: Present time.
            cause: Reason for another plan, if it is not the line of ``failure``.
        """
        if not self.goes_on:
            return self.end(failure, now)
        self._broken.append(cause or failure.line)
        seats = self._roster.seats
        link = frozenset({seats[rank].connection, seats[peer].connection})
        if self._faults.is_first(link, self.epoch):
            return self._happen(Event.FAULT, failure.line, now)
        culprit = rank if self._is_essential(peer) else peer
        return self.lost(culprit, Failure(FailureKind.STUCK, failure.line, culprit), now)

    def stalled(self, failure: Failure, now: float) -> Outgoing:
        """Try again if nothing moves in the active epoch although no rank and no link is at fault."""
        if not self.goes_on or not self._faults.is_first(frozenset(), self.epoch):
            return self.end(failure, now)
        self._broken.append(failure.line)
        return self._happen(Event.FAULT, failure.line, now)

    def end(self, failure: Failure, now: float) -> Outgoing:
        """End the session for a reason that no other plan would remove."""
        return self._happen(Event.END, failure, now)

    def tick(self, now: float) -> Outgoing:
        """Do without the members that do not stop their part of an epoch in time."""
        outgoing: Outgoing = []
        if self._stopping_since is None or now - self._stopping_since <= self._patience_s:
            return outgoing
        cause = f"has not stopped within {figure(self._patience_s)} s what it computes for a failed plan"
        for rank in sorted({rank for _, rank in self._attempts.awaited}):
            if self.step in _STOPS:
                outgoing += self.lost(
                    rank, Failure(FailureKind.STUCK, cause, rank, self._roster.name(rank)), now
                )
        return outgoing

    # -- messages ---------------------------------------------------------------------------------

    def received(self, rank: int, message: Message, now: float) -> Outgoing:
        """Handle a message about an epoch.

        Raises:
            ValueError: The member breaks the protocol.
        """
        handler = self._MESSAGES[self.step].get(type(message))
        if handler is None:
            raise ValueError(message.kind)
        return handler(self, rank, message, now)

    def _ignore(self, rank: int, message: Message, now: float) -> Outgoing:
        return []

    def _take_ready(self, rank: int, ready: Ready, now: float) -> Outgoing:
        self._attempts.strike_off((ready.epoch, rank))
        return self._settle(now)

    def _take_declined(self, rank: int, declined: Declined, now: float) -> Outgoing:
        self._attempts.check_has((declined.epoch, rank))
        return self._happen(Event.NEXT_FAULT, declined.line, now)

    def _take_passed(self, rank: int, passed: Passed, now: float) -> Outgoing:
        self._attempts.check_has((passed.epoch, rank))
        self._attempts.note_passed((passed.epoch, rank))
        if passed.first is not None:
            self._first_of_next = passed.first
        return self._settle(now)

    def _take_stopped(self, rank: int, stopped: Stopped, now: float) -> Outgoing:
        self._attempts.strike_off((stopped.epoch, rank))
        if rank == self._roster.data_rank and stopped.written is not None:
            self._faults.note_written(stopped.written, self.epoch)
        return self._settle(now)

    def _take_link_lost(self, rank: int, lost: LinkLost, now: float) -> Outgoing:
        self._attempts.check_has((lost.epoch, rank), (lost.epoch, lost.peer))
        if rank == lost.peer:
            raise ValueError("a link that the epoch does not have")
        if lost.epoch == self.epoch or self.step is Step.SWITCHING:
            cause = f"{self._roster.name(rank)}: {lost.line}"
            return self.link_lost(rank, lost.peer, Failure(FailureKind.STUCK, lost.line), now, cause)
        return self._happen(Event.NEXT_FAULT, lost.line, now)

    def _take_complete(self, rank: int, complete: Complete, now: float) -> Outgoing:
        if rank != self._roster.data_rank:
            raise ValueError("complete, but not from the data rank")
        return self._happen(Event.COMPLETE, "the results are complete", now)

    # A handler takes the type of message under which _MESSAGES lists it.
    _Handler: TypeAlias = Callable[["Epochs", int, Any, float], Outgoing]
    _SPENT: ClassVar[Mapping[type[Message], _Handler]] = dict.fromkeys(
        (Ready, Declined, Passed, Stopped, LinkLost, Complete), _ignore
    )
    _RUNNING: ClassVar[Mapping[type[Message], _Handler]] = {
        LinkLost: _take_link_lost,
        Passed: _take_passed,
        Complete: _take_complete,
    }
    _MESSAGES: ClassVar[Mapping[Step, Mapping[type[Message], _Handler]]] = {
        Step.GATHERING: {},
        Step.PLANNING: {},
        Step.PREPARING: {Ready: _take_ready, LinkLost: _take_link_lost},
        Step.RUNNING: _RUNNING,
        Step.CHANGING: {**_RUNNING, Ready: _take_ready, Declined: _take_declined},
        # What a member sent before it heard of the abort crosses it.
        Step.DROPPING: {**_RUNNING, Ready: _ignore, Declined: _ignore, Stopped: _take_stopped},
        Step.SWITCHING: _RUNNING,
        Step.STOPPING: {**_SPENT, Stopped: _take_stopped, Complete: _take_complete},
        Step.COMPLETE: _SPENT,
        Step.ENDED: _SPENT,
    }
    """Messages that a member may send in each step, with their handlers; others break the protocol."""

    # -- effects: what is sent on the way to the next step ----------------------------------------

    def _prepare(self, announcement: Announcement[Raw]) -> Outgoing:
        return self._ask_to_prepare(self._attempts.begin(announcement.participants), announcement)

    def _plan_without_the_lost(self, announcement: Announcement[Raw]) -> Outgoing:
        left_out = self._roster.left_out
        self._lost = [rank for rank in announcement.participants if rank in left_out]
        self._losses = [left_out[rank].line for rank in self._lost]
        self.plan = announcement.plan
        self._roster.participants, self._roster.names = announcement.participants, announcement.names
        return []

    def _run(self, _: object) -> Outgoing:
        return self._to(self._attempts.parts(self._attempts.current), Run(self.epoch))

    def _prepare_next(self, announcement: Announcement[Raw]) -> Outgoing:
        return self._ask_to_prepare(self._attempts.begin_next(announcement.participants), announcement)

    def _run_next(self, _: object) -> Outgoing:
        change, attempt = self._change, self._attempts.next
        if change is None or attempt is None:
            raise RuntimeError("a change of the plan without a next epoch")
        # Those that retire keep their figures for the summary.
        roster, before = self._roster, self._roster.participants or ()
        self.plan = change.announcement.plan
        roster.participants = tuple(sorted({*before, *attempt.participants}))
        roster.names = {**roster.names, **change.announcement.names}
        return self._to(self._attempts.parts(attempt), Run(attempt.number))

    def _retire(self, _: object) -> Outgoing:
        replaced = self._attempts.replace()
        if self._change is not None:
            seconds = self._now - self._change.asked_at
            self.outcome, self._change = Switched(self.epoch, self._first_of_next, seconds), None
        return self._to(self._attempts.parts(replaced), Retire(replaced.number))

    def _abort_all(self, line: str) -> Outgoing:
        self._drop_change(line)
        parts = self._attempts.stop(self._attempts.current, self._attempts.next)
        self._attempts.next = None
        return self._aborts(parts, line)

    def _abort_current(self, line: str) -> Outgoing:
        self._attempts.next = None  # its parts know already
        return self._aborts(self._attempts.stop(self._attempts.current), line)

    def _abort_next(self, line: str) -> Outgoing:
        self._drop_change(line)
        return self._aborts(self._attempts.stop(self._attempts.next), line)

    def _forget_next(self, _: object) -> Outgoing:
        self._attempts.next = None
        return []

    def _nothing(self, _: object) -> Outgoing:
        return []

    def _tell_complete(self, line: str) -> Outgoing:
        self._drop_change(line)
        return self._roster.to_all(Complete()) + self._roster.to_claimants(Complete())

    def _tell_verdict(self, failure: Failure) -> Outgoing:
        self._drop_change(failure.line)
        self.verdict = failure
        return self._roster.to_all(Verdict(failure)) + self._roster.to_claimants(Verdict(failure))

    # -- the table --------------------------------------------------------------------------------

    # An effect takes what belongs to the event: a plan, a line for the user, or a failure.
    _Effect: TypeAlias = Callable[["Epochs", Any], Outgoing]
    TABLE: ClassVar[Mapping[tuple[Step, Event], tuple[_Effect, Step]]] = {
        (Step.GATHERING, Event.PLAN): (_prepare, Step.PREPARING),
        (Step.GATHERING, Event.OVERTAKEN): (_plan_without_the_lost, Step.PLANNING),
        (Step.PLANNING, Event.PLAN): (_prepare, Step.PREPARING),
        (Step.PREPARING, Event.PREPARED): (_run, Step.RUNNING),
        (Step.PREPARING, Event.FAULT): (_abort_all, Step.STOPPING),
        (Step.RUNNING, Event.FAULT): (_abort_all, Step.STOPPING),
        (Step.RUNNING, Event.CHANGE): (_prepare_next, Step.CHANGING),
        (Step.CHANGING, Event.PREPARED): (_run_next, Step.SWITCHING),
        (Step.CHANGING, Event.NEXT_FAULT): (_abort_next, Step.DROPPING),
        (Step.CHANGING, Event.FAULT): (_abort_all, Step.STOPPING),
        (Step.SWITCHING, Event.FAULT): (_abort_all, Step.STOPPING),
        (Step.SWITCHING, Event.NEXT_FAULT): (_abort_all, Step.STOPPING),
        (Step.SWITCHING, Event.PASSED): (_retire, Step.RUNNING),
        (Step.DROPPING, Event.STOPPED): (_forget_next, Step.RUNNING),
        (Step.DROPPING, Event.FAULT): (_abort_current, Step.STOPPING),
        (Step.STOPPING, Event.STOPPED): (_nothing, Step.PLANNING),
        **dict.fromkeys(product(_WRITES, [Event.COMPLETE]), (_tell_complete, Step.COMPLETE)),
        **dict.fromkeys(product(_GOES, [Event.END]), (_tell_verdict, Step.ENDED)),
    }
    """What is sent at an event, and the step that follows; an event without a row changes nothing."""

    def _happen(self, event: Event, what: object, now: float) -> Outgoing:
        """Follow the table at an event, and at those that follow from it."""
        row = self.TABLE.get((self.step, event))
        if row is None:
            return self._settle(now)
        self._now = now
        effect, after = row
        outgoing = effect(self, what)
        self.step = after
        self._roster.runs = after in _RUNS
        if after not in _STOPS:
            self._stopping_since = None
        elif self._stopping_since is None:
            self._stopping_since = now
        return outgoing + self._settle(now)

    def _settle(self, now: float) -> Outgoing:
        """Let the event happen that the step has waited for, if nobody is awaited any longer."""
        is_due, event = not self._attempts.awaited, None
        if self.step is Step.SWITCHING:
            is_due, event = self._attempts.all_passed, Event.PASSED
        elif self.step in (Step.PREPARING, Step.CHANGING):
            event = Event.PREPARED
        elif self.step in _STOPS:
            event = Event.STOPPED
        return [] if event is None or not is_due else self._happen(event, "", now)

    # -- details ----------------------------------------------------------------------------------

    def _drop_change(self, why: str) -> None:
        if self._change is not None:
            self.outcome, self._change = Dropped(why), None

    def _ask_to_prepare(self, attempt: EpochAttempt, announcement: Announcement[Raw]) -> Outgoing:
        places = self._roster.places()
        prepare = Prepare(attempt.number, announcement.plan, announcement.token, places)
        return self._to(self._attempts.parts(attempt), prepare)

    def _aborts(self, parts: Iterable[Part], line: str) -> Outgoing:
        return [message for part in parts for message in self._to([part], Abort(part[0], line))]

    def _to(self, parts: Iterable[Part], message: Message) -> Outgoing:
        return [(self._roster.seats[rank].connection, message) for _, rank in parts]
