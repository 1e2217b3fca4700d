"""What the hub does about a message of a rank. Pure.

    a message ──> by the step of the session ──> its own handler ──> messages to send
                     GATHERING   status, facts, failures
                     later       of an epoch: by ``EPOCH``; of the end: records, results
                     a rank that has finished, or has no part: its status alone

A message without a handler breaks the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from msgspec import Struct

from pipeedge.control.epochs import Epochs, Event, Step
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.losses import Losses
from pipeedge.control.messages import (
    Beat,
    Clock,
    ClockAnswer,
    Complete,
    Declined,
    Done,
    Facts,
    Failed,
    LinkLost,
    Malformed,
    Message,
    Passed,
    Ready,
    Record,
    Stopped,
)
from pipeedge.control.rank_watch import RankWatch
from pipeedge.control.roster import Outgoing, Roster
from pipeedge.control.telemetry import forward_record, summary

__all__ = ["RankMessages"]

_LOSS_GRACE_S = 1.0
"""Seconds for a rank that was lost to report the reason itself."""


class RankMessages:
    """Reactions to the messages of ranks that were admitted.

    Args:
        roster: Ranks of the session.
        epochs: Epochs of the session.
        losses: Losses of the session.
        watch: Watch that begins anew when an epoch begins to run.
        opened_at: Time at which the hub was opened, from which its clock counts.
    """

    def __init__(
        self, roster: Roster, epochs: Epochs, losses: Losses, watch: RankWatch, opened_at: float
    ) -> None:
        self.roster = roster
        self.epochs = epochs
        self.losses = losses
        self._watch = watch
        self._opened_at = opened_at
        self._suspect: tuple[float, Failure] | None = None

    def received(self, rank: int, message: Message | Malformed, now: float) -> Outgoing:
        """Handle a message.

        Raises:
            ValueError: The rank breaks the protocol.
        """
        handlers = self.PLANNED
        if self.epochs.step is Step.GATHERING:
            handlers = self.GATHERING
        elif self.roster.seats[rank].finished or not (self.epochs.goes_on or self.roster.takes_part(rank)):
            handlers = self.SPENT
        return self._handle(handlers, rank, message, now)

    def suspect(self, now: float) -> Failure | None:
        """Return, once, the loss of a rank that another has reported and that had its moment to say why."""
        if self._suspect is None or now < self._suspect[0]:
            return None
        (_, failure), self._suspect = self._suspect, None
        return failure

    def _handle(self, handlers: Handlers, rank: int, message: Message | Malformed, now: float) -> Outgoing:
        handler = handlers.get(type(message))
        if handler is None:
            raise ValueError(message.kind)
        return handler(self, rank, message, now)

    # -- of any time ------------------------------------------------------------------------------

    def ignore(self, rank: int, message: Message, now: float) -> Outgoing:
        """Do nothing."""
        return []

    def take_beat(self, rank: int, beat: Beat, now: float) -> Outgoing:
        """Note the status of a rank."""
        self.roster.seats[rank].status = beat.status
        return []

    def take_clock(self, rank: int, clock: Clock, now: float) -> Outgoing:
        """Tell a rank the time."""
        answer = ClockAnswer(clock.sent, now - self._opened_at)
        return [(self.roster.seats[rank].connection, answer)]

    def take_facts(self, rank: int, facts: Facts, now: float) -> Outgoing:
        """Note the facts of a rank, and where it listens."""
        seat = self.roster.seats[rank]
        if seat.facts is not None:
            raise ValueError(facts.kind)
        seat.facts, seat.place = facts.facts, facts.place
        return []

    def take_failed(self, rank: int, failed: Failed, now: float) -> Outgoing:
        """Lose a rank that reports its own failure."""
        failure = Failure(FailureKind.FAILED, failed.line, rank, self.roster.name(rank))
        if self.epochs.recovers:
            return self.losses.failed(rank, failed, failure, now)
        return self.losses.lose(failure, now)

    def take_link_lost(self, rank: int, lost: LinkLost, now: float) -> Outgoing:
        """Lose a link; where the session does not go on, first leave its other end a moment to say why."""
        if self.epochs.goes_on:
            return self.take_of_epoch(rank, lost, now)
        if lost.peer >= self.roster.world_size:
            raise ValueError("a rank outside the world")
        if self._suspect is None and self.epochs.verdict is None:
            failure = Failure(FailureKind.GONE, lost.line, lost.peer, self.roster.name(lost.peer))
            self._suspect = (now + _LOSS_GRACE_S, failure)
        return []

    def take_of_epoch(self, rank: int, message: Message, now: float) -> Outgoing:
        """Handle a message about an epoch, by the step of the session."""
        ran = self.roster.runs
        outgoing = self._handle(self.EPOCH[self.epochs.step], rank, message, now)
        if self.roster.runs and not ran:
            self._watch.moved(now)
        return outgoing

    def take_record(self, rank: int, record: Record, now: float) -> Outgoing:
        """Forward a part of a record."""
        return forward_record(self.roster, rank, record.text)

    def take_done(self, rank: int, done: Done, now: float) -> Outgoing:
        """Note that a rank has finished."""
        goes_on, step = self.epochs.goes_on, self.epochs.step
        if step is not Step.COMPLETE and (goes_on or step is not Step.RUNNING):
            raise ValueError(done.kind)
        self.roster.seats[rank].stats = done.stats
        return summary(self.roster)

    # -- of an epoch --------------------------------------------------------------------------------

    def take_ready(self, rank: int, ready: Ready, now: float) -> Outgoing:
        """Note that a participant is prepared."""
        self.epochs.attempts.strike_off((ready.epoch, rank))
        return self.epochs.settle(now)

    def take_declined(self, rank: int, declined: Declined, now: float) -> Outgoing:
        """Drop what a participant cannot prepare beside the epoch that runs."""
        self.epochs.attempts.check_has((declined.epoch, rank))
        return self.epochs.happen(Event.NEXT_FAULT, declined.line, now)

    def take_passed(self, rank: int, passed: Passed, now: float) -> Outgoing:
        """Note that all has passed a participant."""
        self.epochs.attempts.check_has((passed.epoch, rank))
        self.epochs.attempts.note_passed((passed.epoch, rank))
        if passed.first is not None:
            self.epochs.first_of_next = passed.first
        return self.epochs.settle(now)

    def take_stopped(self, rank: int, stopped: Stopped, now: float) -> Outgoing:
        """Note that a participant has stopped, and what is written."""
        self.epochs.attempts.strike_off((stopped.epoch, rank))
        if rank == self.roster.data_rank and stopped.written is not None:
            self.losses.faults.note_written(stopped.written, self.epochs.epoch)
        self.epochs.causes.copied[rank] = stopped.copied
        return self.epochs.settle(now)

    def take_broken_link(self, rank: int, lost: LinkLost, now: float) -> Outgoing:
        """Lose a link of an epoch."""
        epochs = self.epochs
        epochs.attempts.check_has((lost.epoch, rank), (lost.epoch, lost.peer))
        if rank == lost.peer:
            raise ValueError("a link that the epoch does not have")
        if lost.epoch != epochs.epoch and epochs.step is not Step.SWITCHING:
            return epochs.happen(Event.NEXT_FAULT, lost.line, now)
        cause = f"{self.roster.name(rank)}: {lost.line}"
        return self.losses.link_lost(rank, lost.peer, Failure(FailureKind.STUCK, lost.line), now, cause)

    def take_complete(self, rank: int, complete: Complete, now: float) -> Outgoing:
        """Note that the results are complete."""
        if rank != self.roster.data_rank:
            raise ValueError("complete, but not from the data rank")
        return self.epochs.happen(Event.COMPLETE, "the results are complete", now)

    # -- tables -------------------------------------------------------------------------------------

    # A handler takes the type of message under which a table lists it.
    Handler: TypeAlias = Callable[["RankMessages", int, Any, float], Outgoing]
    Handlers: TypeAlias = Mapping[type[Struct], Handler]

    ALWAYS: ClassVar[Handlers] = {Beat: take_beat, Clock: take_clock}
    GATHERING: ClassVar[Handlers] = {
        **ALWAYS,
        Facts: take_facts,
        Failed: take_failed,
        LinkLost: take_link_lost,
    }
    """Messages that a rank may send before the plan, with their handlers."""
    PLANNED: ClassVar[Handlers] = {
        **GATHERING,
        **dict.fromkeys((Ready, Declined, Passed, Stopped, Complete), take_of_epoch),
        Record: take_record,
        Done: take_done,
    }
    """Messages that it may send after the plan; ``EPOCH`` has those about an epoch."""
    SPENT: ClassVar[Handlers] = {**dict.fromkeys((*PLANNED,), ignore), **ALWAYS}
    """Messages of a rank that has no part in the plan, or has finished."""

    _LATE: ClassVar[Handlers] = dict.fromkeys((Ready, Declined, Passed, Stopped, LinkLost, Complete), ignore)
    _RUNNING: ClassVar[Handlers] = {
        LinkLost: take_broken_link,
        Passed: take_passed,
        Complete: take_complete,
    }
    EPOCH: ClassVar[Mapping[Step, Handlers]] = {
        Step.GATHERING: {},
        Step.PLANNING: {},
        Step.PREPARING: {Ready: take_ready, LinkLost: take_broken_link},
        Step.RUNNING: _RUNNING,
        Step.CHANGING: {**_RUNNING, Ready: take_ready, Declined: take_declined},
        # What a member sent before it heard of the abort crosses it.
        Step.DROPPING: {**_RUNNING, Ready: ignore, Declined: ignore, Stopped: take_stopped},
        Step.SWITCHING: _RUNNING,
        Step.STOPPING: {**_LATE, Stopped: take_stopped, Complete: take_complete},
        Step.COMPLETE: _LATE,
        Step.ENDED: _LATE,
    }
    """Messages about an epoch that a member may send in each step, with their handlers."""
