"""Rules of failover at the hub: which epoch of the run is active, and with which members. Pure.

                  ┌──────────────── a plan for the members of now
                  v                                        ┌─> COMPLETE   all results are written
    PLANNING ──────> PREPARING e ──all are prepared──> RUNNING e
       ^  │                │                               │
       │  │                └──────a member or a link is lost──────┐
       │  └─> ENDED  no plan fits                                 v
       └───────────────all that are left have stopped──────── STOPPING
                                                                  └─> ENDED  a rank is lost that is essential

    RUNNING e ──a better plan──> CHANGING ──all are prepared──> SWITCHING ──all has passed──> RUNNING e + 1
        ^                        e runs,                        e drains,
        │                        e + 1 is prepared              e + 1 runs
        └──all have dropped it── DROPPING <─┘ a fault of e + 1 alone

An *epoch* is one attempt to run one plan; each attempt has a number of its own. After a failure, e + 1 is not
prepared before all members that are left have stopped e. A loss while an epoch is prepared is treated like
one while it runs: there are no special cases for a second failure.

A *change* is for a better plan, with nothing lost: e + 1 is prepared beside e, and gets what the data rank
reads from the moment at which all are prepared. What e was fed before takes its way through e. A loss stops
both, unless e + 1 alone is not ready yet and has it: then e runs on as if nothing had happened.

The *membership* (``pipeedge.control.members``) is a complete snapshot: the ranks that take part or may do so,
each with its incarnation. What a former member sends is ignored. A rank that comes back is a spare until the
next plan. A plan is dropped if one of its participants has left meanwhile.

A link that breaks while both its ends live may be a passing fault, so the members try again. If the same
link breaks again before anything else was written, or breaks two epochs in a row, one of its ends is
dismissed. So every epoch either writes something, or brings a decision closer.

``Epochs`` uses neither sockets nor clocks: events go in, messages to send come out with the incarnation that
gets them. Heartbeats, silence and diagnosis stay in ``pipeedge.control.rules``; the other end of the
messages is ``pipeedge.control.epoch_member``. What the rules remember of epochs and links is in
``pipeedge.control.attempts``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

from msgspec import Raw

from pipeedge.base.errors import EXIT_REQUEST
from pipeedge.control.announcement import Announcement
from pipeedge.control.attempts import Attempts, Faults, Part
from pipeedge.control.epoch_messages import (
    Abort,
    Declined,
    EpochReady,
    LinkLost,
    Passed,
    Prepare,
    Retire,
    Run,
    Stopped,
)
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.members import Members, MemberTable
from pipeedge.control.messages import Complete, Message, Verdict

__all__ = ["EpochStep", "Epochs"]

_Outgoing: TypeAlias = list[tuple[int, Message]]


class EpochStep(enum.Enum):
    """Step of a run that can go on after a failure."""

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
    """The run has failed."""


class Epochs:
    """The hub's rules about members and epochs.

    Args:
        members: incarnation of each rank that is here when the run is planned first.
        data_rank: rank that reads the input and writes the results.
    """

    def __init__(self, members: Mapping[int, int], data_rank: int) -> None:
        self._members = MemberTable(members)
        self._essential = frozenset({0, data_rank})
        self._data_rank = data_rank
        self._step = EpochStep.PLANNING
        self._attempts = Attempts(self._members)
        self._faults = Faults()
        self.verdict: Failure | None = None

    # -- queries ----------------------------------------------------------------------------------

    @property
    def step(self) -> EpochStep:
        """Present step of the run."""
        return self._step

    @property
    def epoch(self) -> int:
        """Number of the latest epoch that ran or was to run, from 1; 0 before the first plan.

        One beside it counts once it has taken its place.
        """
        return self._attempts.current.number

    @property
    def participants(self) -> frozenset[int]:
        """Ranks with a part in that epoch, or in one beside it that runs; some may have been lost."""
        current, beside = self._attempts.current, self._attempts.beside
        if self._step is EpochStep.SWITCHING and beside is not None:
            return current.participants | beside.participants
        return current.participants

    @property
    def awaited(self) -> frozenset[int]:
        """Participants that have not prepared, or not stopped, what they are asked to."""
        return frozenset(rank for _, rank in self._attempts.awaited)

    @property
    def can_change(self) -> bool:
        """Whether another plan may be prepared beside the one that runs."""
        return self._step is EpochStep.RUNNING

    @property
    def membership(self) -> Members:
        """Present members."""
        return self._members.snapshot()

    @property
    def wanted_plan(self) -> Members | None:
        """Members that need a plan, or None. Hand the plan to ``planned``, then ask again."""
        return self.membership if self._step is EpochStep.PLANNING else None

    # -- members ----------------------------------------------------------------------------------

    def joined(self, rank: int, incarnation: int) -> _Outgoing:
        """Admit a process as a spare.

        If another process has its rank and may only seem to live, it waits until that one is heard or lost.
        """
        if self.verdict is not None:
            return [(incarnation, Verdict(self.verdict))]
        if self._step is EpochStep.COMPLETE:
            return [(incarnation, Complete())]
        if rank in self._members:
            replaced = self._members.claim(rank, incarnation)
            return [] if replaced is None else self._refuse(rank, replaced)
        self._members.admit(rank, incarnation)
        return []

    def heard(self, incarnation: int) -> _Outgoing:
        """Note that a process lives, whatever it said; refuse another one that wants to have its rank."""
        rank = self._members.rank_of(incarnation)
        claimant = None if rank is None else self._members.claims.pop(rank, None)
        return [] if rank is None or claimant is None else self._refuse(rank, claimant)

    def lost(self, incarnation: int, failure: Failure) -> _Outgoing:
        """Go on without a process that is gone, has failed or is silent, if that is possible."""
        rank = self._members.rank_of(incarnation)
        if rank is None or self._step is EpochStep.ENDED:
            self._members.withdraw(incarnation)
            return []
        self._members.remove(rank)
        self._attempts.forget(rank)
        outgoing: _Outgoing = []
        if self._step is not EpochStep.COMPLETE:
            is_essential = rank in self._essential
            outgoing = self._end(failure) if is_essential else self._go_on_without(rank, failure.line)
        self._members.seat_claimant(rank)
        return outgoing

    # -- plans ------------------------------------------------------------------------------------

    def planned(self, membership: Members, decision: Announcement[Raw] | Failure) -> _Outgoing:
        """Prepare a new epoch with a plan for ``membership``, or end the run if no plan fits.

        A decision that the membership has overtaken is dropped, and ``wanted_plan`` asks for another.
        """
        if self._step is not EpochStep.PLANNING:
            return []
        if isinstance(decision, Failure):
            return self._end(decision) if membership.incarnations == self._members.incarnations else []
        if not self._members.has_all(decision.participants, membership):
            return []
        self._step = EpochStep.PREPARING
        attempt = self._attempts.prepare(decision.participants)
        return self._to(attempt.participants, Prepare(attempt.number, decision.plan))

    def changed(self, membership: Members, decision: Announcement[Raw]) -> _Outgoing:
        """Prepare another epoch beside the one that runs, with a better plan for ``membership``.

        The plan is dropped if the membership has overtaken it, or if something else happens at present.
        """
        if not self.can_change or not self._members.has_all(decision.participants, membership):
            return []
        self._step = EpochStep.CHANGING
        attempt = self._attempts.prepare_beside(decision.participants)
        return self._to(attempt.participants, Prepare(attempt.number, decision.plan))

    # -- messages ---------------------------------------------------------------------------------

    def received(self, incarnation: int, message: Message) -> _Outgoing:
        """Handle a message. What a former member sends is ignored.

        Raises:
            ValueError: the member breaks the protocol.
        """
        rank = self._members.rank_of(incarnation)
        if rank is None:
            return []
        handler = self._STEPS[self._step].get(type(message))
        if handler is None:
            raise ValueError(message.kind)
        return self.heard(incarnation) + handler(self, rank, message)

    def _ignore(self, rank: int, message: Message) -> _Outgoing:
        return []

    def _take_prepared(self, rank: int, prepared: EpochReady) -> _Outgoing:
        self._attempts.strike_off((prepared.epoch, rank))
        if self._attempts.awaited:
            return []
        current, beside = self._attempts.current, self._attempts.beside
        if self._step is EpochStep.CHANGING and beside is not None:
            self._step = EpochStep.SWITCHING
            return self._to(beside.participants, Run(beside.number)) + self._retire_if_passed()
        self._step = EpochStep.RUNNING
        return self._to(current.participants, Run(current.number))

    def _take_declined(self, rank: int, declined: Declined) -> _Outgoing:
        self._attempts.check_has((declined.epoch, rank))
        return self._drop(declined.line)

    def _take_passed(self, rank: int, passed: Passed) -> _Outgoing:
        self._attempts.check_has((passed.epoch, rank))
        self._attempts.note_passed((passed.epoch, rank))
        return self._retire_if_passed()

    def _take_dropped(self, rank: int, stopped: Stopped) -> _Outgoing:
        self._attempts.strike_off((stopped.epoch, rank))
        return self._run_if_dropped()

    def _take_stopped(self, rank: int, stopped: Stopped) -> _Outgoing:
        self._attempts.strike_off((stopped.epoch, rank))
        if rank == self._data_rank and stopped.written is not None:
            self._faults.note_written(stopped.written, self.epoch)
        return self._plan_if_stopped()

    def _take_link_lost(self, rank: int, lost: LinkLost) -> _Outgoing:
        self._attempts.check_has((lost.epoch, rank), (lost.epoch, lost.peer))
        if rank == lost.peer:
            raise ValueError("a link that the epoch does not have")
        if lost.epoch == self.epoch or self._step is EpochStep.SWITCHING:
            return self.link_lost(rank, lost.peer, lost.line)
        return self._drop(lost.line)

    def _take_complete(self, rank: int, complete: Complete) -> _Outgoing:
        if rank != self._data_rank:
            raise ValueError("complete, but not from the data rank")
        self._step = EpochStep.COMPLETE
        return self._to_everybody(complete)

    # A handler takes the type of message under which _STEPS lists it.
    _Handler: TypeAlias = Callable[["Epochs", int, Any], _Outgoing]
    _SPENT: ClassVar[Mapping[type[Message], _Handler]] = dict.fromkeys(
        (EpochReady, Declined, Passed, Stopped, LinkLost, Complete), _ignore
    )
    _RUNNING: ClassVar[Mapping[type[Message], _Handler]] = {
        LinkLost: _take_link_lost,
        Passed: _take_passed,
        Complete: _take_complete,
    }
    _STEPS: ClassVar[Mapping[EpochStep, Mapping[type[Message], _Handler]]] = {
        EpochStep.PLANNING: {},
        EpochStep.PREPARING: {EpochReady: _take_prepared, LinkLost: _take_link_lost},
        EpochStep.RUNNING: _RUNNING,
        EpochStep.CHANGING: {**_RUNNING, EpochReady: _take_prepared, Declined: _take_declined},
        # What a member sent before it heard of the abort crosses it.
        EpochStep.DROPPING: {**_RUNNING, EpochReady: _ignore, Declined: _ignore, Stopped: _take_dropped},
        EpochStep.SWITCHING: _RUNNING,
        EpochStep.STOPPING: {**_SPENT, Stopped: _take_stopped, Complete: _take_complete},
        EpochStep.COMPLETE: _SPENT,
        EpochStep.ENDED: _SPENT,
    }
    """Messages that a member may send in each step, with their handlers; others break the protocol."""

    # -- faults that are no loss of a rank --------------------------------------------------------

    def link_lost(self, rank: int, peer: int, line: str) -> _Outgoing:
        """Try again without the broken link of the active epoch, or without one of its ends.

        Args:
            rank: participant that noticed it.
            peer: participant at the other end.
            line: reason for the user.
        """
        link = frozenset({self._members[rank], self._members[peer]})
        if self._faults.is_first(link, self.epoch):
            return self._stop(line)
        culprit = peer if peer not in self._essential else rank
        failure = Failure(FailureKind.STUCK, line, culprit)
        if culprit in self._essential:
            return self._end(failure)
        incarnation = self._members[culprit]
        return [(incarnation, Verdict(failure)), *self.lost(incarnation, failure)]

    def ended(self, failure: Failure) -> _Outgoing:
        """End the run for a reason that no other plan would remove."""
        return [] if self._step in (EpochStep.COMPLETE, EpochStep.ENDED) else self._end(failure)

    def stalled(self, failure: Failure) -> _Outgoing:
        """Try again if nothing moves in the active epoch although no rank and no link is at fault."""
        is_first = self._faults.is_first(frozenset(), self.epoch)
        return self._stop(failure.line) if is_first else self._end(failure)

    def awaits(self, rank: int) -> bool:
        """Return whether an epoch cannot begin before ``rank`` has loaded its part, and nothing runs."""
        return self._step is EpochStep.PREPARING and rank in self.awaited

    def postponed(self, rank: int, line: str) -> _Outgoing:
        """Drop a change if ``rank`` does not get on with loading its part of it."""
        return self._drop(line) if self._step is EpochStep.CHANGING and rank in self.awaited else []

    # -- the rules --------------------------------------------------------------------------------

    def _refuse(self, rank: int, incarnation: int) -> _Outgoing:
        line = f"rank {rank} has already joined: start each rank once"
        return [(incarnation, Verdict(Failure(FailureKind.REFUSED, line, exit_code=EXIT_REQUEST)))]

    def _go_on_without(self, rank: int, line: str) -> _Outgoing:
        """Stop what a rank that is no member any longer had a part in."""
        step = self._step
        current, beside = self._attempts.current, self._attempts.beside
        runs = rank in current.participants
        is_next = beside is not None and rank in beside.participants
        if step is EpochStep.STOPPING:
            return self._plan_if_stopped()
        if step is not EpochStep.PLANNING and (runs or (step is EpochStep.SWITCHING and is_next)):
            return self._stop(line)
        if step is EpochStep.CHANGING and is_next:
            return self._drop(line)
        return self._run_if_dropped() if step is EpochStep.DROPPING else []

    def _stop(self, line: str) -> _Outgoing:
        """Stop all that is active."""
        parts = self._attempts.stop(is_dropping=self._step is EpochStep.DROPPING)
        self._step = EpochStep.STOPPING
        return self._aborts(parts, line)

    def _plan_if_stopped(self) -> _Outgoing:
        if not self._attempts.awaited:
            self._step = EpochStep.PLANNING
        return []

    # -- a change ---------------------------------------------------------------------------------

    def _drop(self, line: str) -> _Outgoing:
        """Go on with the epoch that runs, without the one that is prepared beside it."""
        beside = self._attempts.beside
        if beside is None or self._step is EpochStep.DROPPING:
            return []
        self._step = EpochStep.DROPPING
        return self._aborts(self._attempts.drop(beside), line) + self._run_if_dropped()

    def _run_if_dropped(self) -> _Outgoing:
        if not self._attempts.awaited:
            self._step, self._attempts.beside = EpochStep.RUNNING, None
        return []

    def _retire_if_passed(self) -> _Outgoing:
        """Let the next epoch take the place of the one before, if all of that has passed."""
        replaced = self._attempts.replace_if_passed() if self._step is EpochStep.SWITCHING else None
        if replaced is None:
            return []
        self._step = EpochStep.RUNNING
        return self._to(replaced.participants, Retire(replaced.number))

    # -- the end ----------------------------------------------------------------------------------

    def _end(self, failure: Failure) -> _Outgoing:
        self._step = EpochStep.ENDED
        self.verdict = failure
        return self._to_everybody(Verdict(failure))

    def _aborts(self, parts: Iterable[Part], line: str) -> _Outgoing:
        return [(self._members[rank], Abort(epoch, line)) for epoch, rank in parts]

    def _to_everybody(self, message: Message) -> _Outgoing:
        return [(incarnation, message) for incarnation in self._members.everybody()]

    def _to(self, ranks: Iterable[int], message: Message) -> _Outgoing:
        return [(self._members[rank], message) for rank in sorted(ranks)]
