"""Rules of failover at the hub: which ranks are members, and which epoch of the run is active. Pure.

                  ┌──────────────── a plan for the members of now
                  v                                        ┌─> COMPLETE   all results are written
    PLANNING ──────> PREPARING e ──all are prepared──> RUNNING e
       ^  │                │                               │
       │  │                └──────a member or a link is lost──────┐
       │  └─> ENDED  no plan fits                                 v
       └───────────────all that are left have stopped──────── STOPPING e
                                                                  └─> ENDED  a rank is lost that is essential

An *epoch* is one attempt to run one plan; each attempt has a number of its own, and e + 1 is never prepared
before all members that are left have stopped e, so at most one epoch is active. A loss while an epoch is
prepared is treated like one while it runs: there are no special cases for a second failure.

The *membership* is a complete snapshot: the ranks that take part or may do so, each with its *incarnation*,
the number of its connection. A rank that comes back has a new connection, and messages on an old one are
ignored. It is a spare until the next plan. A plan is dropped if one of its participants has left meanwhile.

A link that breaks while both its ends live may be a passing fault, so the members try again. If the same
link breaks again before anything else was written, or breaks two epochs in a row, one of its ends is
dismissed. So every epoch either writes something, or brings a decision closer.

``Epochs`` uses neither sockets nor clocks: events go in, messages to send come out with the incarnation that
gets them. Heartbeats, silence and diagnosis stay in ``pipeedge.control.rules``; the other end of the
messages is ``pipeedge.control.epoch_member``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from msgspec import Raw

from pipeedge.base.errors import EXIT_REQUEST
from pipeedge.control.epoch_messages import Abort, EpochReady, LinkLost, Prepare, Run, Stopped
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.messages import Complete, Message, Verdict

__all__ = ["EpochPlan", "EpochStep", "Epochs", "Members"]

_Outgoing: TypeAlias = list[tuple[int, Message]]
_NO_LINK: frozenset[int] = frozenset()
"""Stands for a link in the record of faults, where nothing moved although no link was at fault."""


class EpochStep(enum.Enum):
    """Step of a run that can go on after a failure."""

    PLANNING = "planning"
    """The hub waits for a plan; no epoch is active."""
    PREPARING = "preparing"
    """The participants load their parts and open their links."""
    RUNNING = "running"
    STOPPING = "stopping"
    """The participants that are left stop a failed epoch."""
    COMPLETE = "complete"
    """The data rank has written all results; nothing that happens to a rank matters any longer."""
    ENDED = "ended"
    """The run has failed."""


@dataclass(frozen=True)
class Members:
    """The ranks that take part in a run, or may do so."""

    number: int
    """Number of this snapshot, which grows with each change."""
    incarnations: Mapping[int, int]
    """Incarnation of each member, by rank."""


@dataclass(frozen=True)
class EpochPlan:
    """A plan for one membership."""

    plan: Raw
    participants: frozenset[int]
    """Ranks with a part in it, the data rank included; other members are spares."""


class Epochs:
    """The hub's rules about members and epochs.

    Args:
        members: incarnation of each rank that is here when the run is planned first.
        data_rank: rank that reads the input and writes the results.
    """

    def __init__(self, members: Mapping[int, int], data_rank: int) -> None:
        self._members = dict(members)
        self._claims: dict[
            int, int
        ] = {}  # incarnations that wait to learn whether the holder of their rank lives
        self._essential = frozenset({0, data_rank})
        self._data_rank = data_rank
        self._number = 1
        self._epoch = 0
        self._step = EpochStep.PLANNING
        self._participants: frozenset[int] = frozenset()
        self._awaited: set[int] = set()  # participants that have not prepared, or not stopped, the epoch
        self._written = 0
        self._faults: dict[frozenset[int], int] = {}  # latest epoch that each pair of incarnations broke
        self.verdict: Failure | None = None

    # -- queries ----------------------------------------------------------------------------------

    @property
    def step(self) -> EpochStep:
        """Present step of the run."""
        return self._step

    @property
    def epoch(self) -> int:
        """Number of the latest epoch, from 1; 0 before the first plan."""
        return self._epoch

    @property
    def participants(self) -> frozenset[int]:
        """Ranks with a part in the latest epoch; some may have been lost."""
        return self._participants

    @property
    def awaited(self) -> frozenset[int]:
        """Participants that have not prepared, or not stopped, the latest epoch."""
        return frozenset(self._awaited)

    @property
    def membership(self) -> Members:
        """Present members."""
        return Members(self._number, dict(self._members))

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
            replaced = self._claims.pop(rank, None)
            self._claims[rank] = incarnation
            return [] if replaced is None else self._refuse(rank, replaced)
        self._admit(rank, incarnation)
        return []

    def heard(self, incarnation: int) -> _Outgoing:
        """Note that a process lives, whatever it said; refuse another one that wants to have its rank."""
        rank = self._rank_of(incarnation)
        claimant = None if rank is None else self._claims.pop(rank, None)
        return [] if rank is None or claimant is None else self._refuse(rank, claimant)

    def lost(self, incarnation: int, failure: Failure) -> _Outgoing:
        """Go on without a process that is gone, has failed or is silent, if that is possible."""
        rank = self._rank_of(incarnation)
        if rank is None or self._step is EpochStep.ENDED:
            self._claims = {held: waits for held, waits in self._claims.items() if waits != incarnation}
            return []
        del self._members[rank]
        self._number += 1
        if rank in self._claims:
            self._admit(rank, self._claims.pop(rank))
        if self._step is EpochStep.COMPLETE:
            return []
        if rank in self._essential:
            return self._end(failure)
        if self._step is EpochStep.STOPPING:
            self._awaited.discard(rank)
            return self._plan_if_stopped()
        if self._step in (EpochStep.PREPARING, EpochStep.RUNNING) and rank in self._participants:
            return self._stop(failure.line, without=rank)
        return []

    # -- plans ------------------------------------------------------------------------------------

    def planned(self, membership: Members, decision: EpochPlan | Failure) -> _Outgoing:
        """Prepare a new epoch with a plan for ``membership``, or end the run if no plan fits.

        A decision that the membership has overtaken is dropped, and ``wanted_plan`` asks for another.
        """
        if self._step is not EpochStep.PLANNING:
            return []
        if isinstance(decision, Failure):
            return self._end(decision) if membership.incarnations == self._members else []
        chosen = {rank: membership.incarnations[rank] for rank in decision.participants}
        if any(self._members.get(rank) != incarnation for rank, incarnation in chosen.items()):
            return []
        self._epoch += 1
        self._step = EpochStep.PREPARING
        self._participants = decision.participants
        self._awaited = set(decision.participants)
        return self._to_participants(Prepare(self._epoch, decision.plan))

    # -- messages ---------------------------------------------------------------------------------

    def received(self, incarnation: int, message: Message) -> _Outgoing:
        """Handle a message. What a former member sends is ignored.

        Raises:
            ValueError: the member breaks the protocol.
        """
        rank = self._rank_of(incarnation)
        if rank is None:
            return []
        handler = self._STEPS[self._step].get(type(message))
        if handler is None:
            raise ValueError(message.kind)
        return self.heard(incarnation) + handler(self, rank, message)

    def _ignore(self, rank: int, message: Message) -> _Outgoing:
        return []

    def _take_prepared(self, rank: int, prepared: EpochReady) -> _Outgoing:
        self._strike_off(rank, prepared.epoch)
        if self._awaited:
            return []
        self._step = EpochStep.RUNNING
        return self._to_participants(Run(self._epoch))

    def _take_stopped(self, rank: int, stopped: Stopped) -> _Outgoing:
        self._strike_off(rank, stopped.epoch)
        if rank == self._data_rank and stopped.written is not None and stopped.written > self._written:
            self._written = stopped.written
            self._faults = {link: epoch for link, epoch in self._faults.items() if epoch == self._epoch}
        return self._plan_if_stopped()

    def _take_link_lost(self, rank: int, lost: LinkLost) -> _Outgoing:
        if lost.epoch != self._epoch or rank == lost.peer or not {rank, lost.peer} <= self._participants:
            raise ValueError("a link that the epoch does not have")
        return self.link_lost(rank, lost.peer, lost.line)

    def _take_complete(self, rank: int, complete: Complete) -> _Outgoing:
        if rank != self._data_rank:
            raise ValueError("complete, but not from the data rank")
        self._step = EpochStep.COMPLETE
        return self._to_everybody(complete)

    # A handler takes the type of message under which _STEPS lists it.
    _Handler: TypeAlias = Callable[["Epochs", int, Any], _Outgoing]
    _SPENT: ClassVar[Mapping[type[Message], _Handler]] = dict.fromkeys(
        (EpochReady, Stopped, LinkLost, Complete), _ignore
    )
    _STEPS: ClassVar[Mapping[EpochStep, Mapping[type[Message], _Handler]]] = {
        EpochStep.PLANNING: {},
        EpochStep.PREPARING: {EpochReady: _take_prepared, LinkLost: _take_link_lost},
        EpochStep.RUNNING: {LinkLost: _take_link_lost, Complete: _take_complete},
        # What a member sent before it heard of the abort crosses it.
        EpochStep.STOPPING: {
            EpochReady: _ignore,
            LinkLost: _ignore,
            Stopped: _take_stopped,
            Complete: _take_complete,
        },
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
        if self._is_first_fault(link):
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
        return self._stop(failure.line) if self._is_first_fault(_NO_LINK) else self._end(failure)

    def _is_first_fault(self, link: frozenset[int]) -> bool:
        first = link not in self._faults
        self._faults[link] = self._epoch
        return first

    # -- the rules --------------------------------------------------------------------------------

    def _rank_of(self, incarnation: int) -> int | None:
        return next((rank for rank, held in self._members.items() if held == incarnation), None)

    def _admit(self, rank: int, incarnation: int) -> None:
        self._members[rank] = incarnation
        self._number += 1

    def _refuse(self, rank: int, incarnation: int) -> _Outgoing:
        line = f"rank {rank} has already joined: start each rank once"
        return [(incarnation, Verdict(Failure(FailureKind.REFUSED, line, exit_code=EXIT_REQUEST)))]

    def _strike_off(self, rank: int, epoch: int) -> None:
        if epoch != self._epoch or rank not in self._awaited:
            raise ValueError("an answer to a question of another epoch, or a second one")
        self._awaited.discard(rank)

    def _stop(self, line: str, without: int | None = None) -> _Outgoing:
        self._step = EpochStep.STOPPING
        self._awaited = set(self._participants) - {without}
        abort = Abort(self._epoch, line)
        return [(self._members[rank], abort) for rank in sorted(self._awaited)]

    def _plan_if_stopped(self) -> _Outgoing:
        if not self._awaited:
            self._step = EpochStep.PLANNING
        return []

    def _end(self, failure: Failure) -> _Outgoing:
        self._step = EpochStep.ENDED
        self.verdict = failure
        return self._to_everybody(Verdict(failure))

    def _to_everybody(self, message: Message) -> _Outgoing:
        everybody = (*self._members.values(), *self._claims.values())
        return [(incarnation, message) for incarnation in everybody]

    def _to_participants(self, message: Message) -> _Outgoing:
        return [(self._members[rank], message) for rank in sorted(self._participants)]
