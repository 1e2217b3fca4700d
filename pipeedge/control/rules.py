"""Rules of the hub: its reaction to messages, to the passage of time, and to lost ranks. Pure.

    phases of a rank   absent ─hello─> present ─facts─> known ─ready─> running ─done─> finished
    to the hub         at any time: beat, clock; before it finishes: failed, lost
                       in a run that goes on after failures: those of pipeedge.control.epoch_messages
                       while it runs: record, any number of them; complete, from the data rank
    from the hub       brief, plan, start, complete, summary; before the plan: waiting
                       at any time: pace, clockanswer, notice, verdict
                       to the data rank alone: rankrecord, work

``HubState`` uses neither sockets nor clocks: connections, messages and times go in, messages to send come
out. The table ``HubState._STEPS`` contains the messages that are allowed in each phase.

A rank that the session can do without (``attendance.Terms``) and that does not come, or is lost before the
plan, is left out. From the plan on every participant is needed; in a run that goes on after failures, the
loss of one while the plan is made leads to another plan. Once the data rank has all results, and has
written them, nothing that happens to a rank ends the run: all hear a notice of it, and the summary goes
without what that rank would have told. A run that goes on after failures is prepared, started and
stopped by epochs instead, as ``pipeedge.control.failover`` decides, and a rank may come back at any time.

What follows from a failure is decided by ``pipeedge.control.judge``. The report of a failing rank takes
precedence over what its peers observe. When a rank reports that it *lost* another, the hub gives the other a
moment to report the reason, before it declares the loss the cause.

A connection is untrusted until its hello, and its messages are always checked against the limits of their
types (``pipeedge.control.messages``). A rank that breaks the protocol ends the run, but cannot harm the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from msgspec import Raw, Struct

from pipeedge.base.errors import EXIT_FAULT, RAISE_FILE_LIMIT
from pipeedge.control.announcement import Announcement
from pipeedge.control.attendance import Attendance, Terms
from pipeedge.control.changing import Dropped, RunSnapshot, Switched
from pipeedge.control.epoch_messages import Declined, EpochReady, LinkLost, Passed, Stopped
from pipeedge.control.failover import Failover, Newcomer, Wanted
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.judge import Judge
from pipeedge.control.members import Members
from pipeedge.control.messages import (
    Beat,
    Clock,
    Complete,
    Done,
    Facts,
    Failed,
    Hello,
    Lost,
    Malformed,
    Message,
    Notice,
    Planned,
    Ready,
    Record,
    Start,
    Verdict,
)
from pipeedge.control.roster import Phase, Roster
from pipeedge.control.telemetry import (
    clock_answer,
    forward_record,
    one_plan_snapshot,
    pace,
    stage_work,
    summary,
)
from pipeedge.control.watch import RankWatch

__all__ = ["HubState"]

_HELLO = "hello"


class HubState:
    """The hub's rules. Connections are numbers; what to send comes back as (connection, message)."""

    def __init__(self, *, world_size: int, timeout_s: float, now: float, terms: Terms | None = None) -> None:
        self._opened_at = now
        self._roster = Roster(world_size)
        self._attendance = Attendance(self._roster, terms or Terms(timeout_s), now)
        self._watch = RankWatch(self._roster, timeout_s, now)
        self._judge = Judge(self._roster, self._attendance, self._watch)
        self._beat_at = now
        self._late = 0  # number of ranks that came after the verdict and received it

    # -- events ----------------------------------------------------------------------------------

    def received(
        self, connection: int, message: Message | Malformed, now: float
    ) -> list[tuple[int, Message]]:
        """Handle a message from a connection."""
        rank, failover = self._roster.rank_of.get(connection), self._judge.failover
        if rank is None and failover is not None and failover.claims(connection):
            failover.keep(connection, message)
            return []
        if rank is None:
            if message.kind != _HELLO or self._attendance.has_sent_away(connection):
                return []
            return self._hello(connection, message, now)
        self._roster.seats[rank].heard_at = now
        outgoing = [] if failover is None else failover.heard(connection)
        try:
            return outgoing + self._from_rank(rank, message, now)
        except ValueError:
            cause = f"sent a malformed {message.kind!r}; do all run the same version?"
            return outgoing + self._judge.take_finding(FailureKind.MALFORMED, rank, cause, now)

    def _from_rank(self, rank: int, message: Message | Malformed, now: float) -> list[tuple[int, Message]]:
        steps = self._STEPS[self._roster.phase(rank)] if self._judge.failover is None else self._EPOCH_STEPS
        step = steps.get(type(message))
        if step is None:
            raise ValueError(message.kind)
        return step(self, rank, message, now)

    def _ignore(self, rank: int, message: Message, now: float) -> list[tuple[int, Message]]:
        return []

    def _take_beat(self, rank: int, beat: Beat, now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].status = beat.status
        return []

    def _take_clock(self, rank: int, clock: Clock, now: float) -> list[tuple[int, Message]]:
        return clock_answer(self._roster.seats[rank], clock.sent, now - self._opened_at)

    def _take_facts(self, rank: int, facts: Facts, now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].facts = facts.facts
        return []

    def _take_failed(self, rank: int, failed: Failed, now: float) -> list[tuple[int, Message]]:
        return self._judge.take_report(rank, failed, now)

    def _take_lost(self, rank: int, lost: Lost, now: float) -> list[tuple[int, Message]]:
        if lost.rank >= self._roster.world_size:
            raise ValueError("a rank outside the world")
        self._judge.suspect(lost.rank, lost.line, now)
        return []

    def _take_ready(self, rank: int, ready: Ready, now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].ready = True
        if not self._roster.started():
            return []
        self._watch.moved(now)
        return self._roster.to_all(Start())

    def _take_record(self, rank: int, record: Record, now: float) -> list[tuple[int, Message]]:
        return forward_record(self._roster, rank, record.text)

    def _take_complete(self, rank: int, complete: Complete, now: float) -> list[tuple[int, Message]]:
        if rank != self._roster.data_rank:
            raise ValueError("complete, but not from the data rank")
        self._judge.complete = True
        return self._roster.to_all(complete)

    def _take_done(self, rank: int, done: Done, now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].stats = done.stats
        return summary(self._roster)

    def _take_epoch(self, rank: int, message: Message, now: float) -> list[tuple[int, Message]]:
        failover = self._judge.failover
        if failover is None:
            raise ValueError(message.kind)
        outgoing = failover.received(rank, message, now)
        self._judge.complete = failover.complete
        return self._judge.obey(outgoing, now)

    def _take_result(self, rank: int, message: Record | Done, now: float) -> list[tuple[int, Message]]:
        if isinstance(message, Record):  # of an epoch that has ended, or of the last one
            return self._take_record(rank, message, now)
        if not self._judge.complete:
            raise ValueError(message.kind)
        return self._take_done(rank, message, now)

    # A step takes the type of message under which _STEPS lists it.
    _Step: TypeAlias = Callable[["HubState", int, Any, float], list[tuple[int, Message]]]
    _Steps: TypeAlias = Mapping[type[Struct], _Step]
    _ALWAYS: ClassVar[_Steps] = {Beat: _take_beat, Clock: _take_clock}
    _FAILING: ClassVar[_Steps] = {**_ALWAYS, Failed: _take_failed, Lost: _take_lost}
    _SPENT: ClassVar[_Steps] = {**_ALWAYS, Failed: _ignore, Lost: _ignore}
    _STEPS: ClassVar[Mapping[Phase, _Steps]] = {
        Phase.MET: {**_FAILING, Facts: _take_facts},
        Phase.KNOWN: _FAILING,
        Phase.PLANNED: {**_FAILING, Ready: _take_ready},
        Phase.READY: _FAILING,
        Phase.RUNNING: {
            **_FAILING,
            Record: _take_record,
            Complete: _take_complete,
            Done: _take_done,
        },
        Phase.FINISHED: _SPENT,
        Phase.BYSTANDER: _SPENT,
        Phase.LEFT: {
            **_SPENT,
            **dict.fromkeys((Facts, Ready, Record, Complete, Done), _ignore),
        },
    }
    """Messages that a rank may send in each phase, with their handlers; others break the protocol."""
    _EPOCH_STEPS: ClassVar[_Steps] = {
        **_ALWAYS,
        Failed: _take_failed,
        Lost: _ignore,
        Facts: _take_facts,
        **dict.fromkeys((EpochReady, Declined, Passed, Stopped, LinkLost, Complete), _take_epoch),
        **dict.fromkeys((Record, Done), _take_result),
    }
    """Messages that a rank may send in a run that goes on after failures; ``Epochs`` checks its own."""

    def closed(
        self, connection: int, now: float, why: str = "", *, left: str = ""
    ) -> list[tuple[int, Message]]:
        """Handle a closed connection.

        ``why`` is the reason, if it is known; ``left`` is the peer's address, if the peer closed it.
        """
        sent_away = self._attendance.forget(connection)
        rank = self._roster.rank_of.pop(connection, None)
        if rank is None and self._judge.failover is not None:
            self._judge.failover.withdrawn(connection)
        if rank is None and left and not sent_away and not why:
            return self._tell_stranger(f"{left} connected and left before it introduced itself", now)
        if rank is None or not self._judge.is_watched(rank):
            return []
        why = why or "it was killed or lost its network"
        return self._judge.take_finding(FailureKind.GONE, rank, why, now)

    def refused(self, peer: str, why: str, now: float) -> list[tuple[int, Message]]:
        """Handle a process at the address ``peer`` that is no member, for the reason ``why``."""
        return self._tell_stranger(f"{peer} {why}", now, has_other_key="key" in why)

    def shut_out(self, now: float) -> list[tuple[int, Message]]:
        """Handle a process that could not be let in, because the hub's process may open no more files."""
        what = f"an unknown address was not let in, as rank 0 has too many open files: {RAISE_FILE_LIMIT}"
        return self._tell_stranger(what, now)

    def _tell_stranger(
        self, what: str, now: float, *, has_other_key: bool = False
    ) -> list[tuple[int, Message]]:
        if self.verdict is not None:
            return []
        return self._attendance.stranger(what, now, has_other_key=has_other_key)

    def failed(self, fault: str, now: float) -> list[tuple[int, Message]]:
        """End the session because of an internal error in the hub."""
        cause = f"internal error in its hub: {fault}"
        failure = Failure(FailureKind.FAILED, cause, 0, self._roster.name(0), EXIT_FAULT)
        return self._judge.decide(failure, now)

    def tick(self, now: float) -> list[tuple[int, Message]]:
        """Handle the passage of time."""
        outgoing = []
        if now - self._beat_at >= self._watch.beat_s:
            self._beat_at = now
            outgoing += self._roster.to_all(pace(self._roster)) + stage_work(self._roster)
        if self.verdict is not None:
            return outgoing
        loss = self._judge.overdue(now)
        if loss is not None:
            return outgoing + self._judge.decide(loss, now)
        absence = self._attendance.absence(now)
        if absence is not None:
            return outgoing + self._judge.end(absence, now)
        outgoing += self._attendance.close(now)
        if self._judge.failover is not None:
            outgoing += self._judge.obey(self._judge.failover.tick(now), now)
        return outgoing + self._attendance.tell_absent(now) + self._judge.look(now)

    # -- decisions -------------------------------------------------------------------------------

    def plan(self, announcement: Announcement[Raw], now: float) -> list[tuple[int, Message]]:
        """Announce the plan, once all ranks that take part in the session are here and agree.

        From now on only its participants are monitored, and their records go to its data rank. A run that
        goes on after failures has one, and monitors all ranks, as any of them may be needed.
        """
        left_out = self._roster.left_out  # while the plan was made, as far as they have a part in it
        lost = {rank: left_out[rank] for rank in announcement.participants if rank in left_out}
        if lost and not announcement.goes_on:
            return self._judge.end(next(iter(lost.values())), now)
        self._roster.data_rank = announcement.data_rank
        self._roster.participants = announcement.participants
        self._roster.names = announcement.names
        self._watch.moved(now)
        outgoing = self._roster.to_all(Planned(announcement.plan))
        if announcement.goes_on and announcement.data_rank is not None:
            failover = Failover(self._roster, announcement.data_rank, self._watch.limits.stall_s)
            outgoing += failover.begin(announcement, lost, now)
            self._judge.failover = failover
        return outgoing

    def plan_again(
        self, members: Members, announcement: Announcement[Raw], now: float
    ) -> list[tuple[int, Message]]:
        """Prepare an epoch with a plan for ``members``, unless these have changed meanwhile."""
        failover = self._judge.planning
        if failover is None:
            return []
        return self._with_notice(failover.planned(members, announcement, now), announcement.line)

    def change(
        self, since: RunSnapshot, announcement: Announcement[Raw], now: float
    ) -> list[tuple[int, Message]]:
        """Prepare a better plan beside the one that runs, unless the run is no longer as ``since`` says."""
        failover = self._judge.planning
        if failover is None:
            return []
        return self._with_notice(failover.change(since, announcement, now), announcement.line)

    def _with_notice(self, outgoing: list[tuple[int, Message]], line: str) -> list[tuple[int, Message]]:
        """Return what a plan sends, if anything, with a notice of it for all ranks."""
        return outgoing + (self._roster.to_all(Notice(line)) if outgoing and line else [])

    def give_up(self, members: Members, failure: Failure, now: float) -> list[tuple[int, Message]]:
        """End the run because no plan fits ``members``, unless these have changed meanwhile."""
        failover = self._judge.planning
        return [] if failover is None else self._judge.obey(failover.unplanned(members, failure), now)

    def judge_newcomer(self, connection: int, refusal: str | None, now: float) -> list[tuple[int, Message]]:
        """Take a process for a spare, or send it away with the line ``refusal``."""
        failover = self._judge.planning
        if failover is None:
            return []
        if refusal is None:
            return failover.agrees(connection)
        return failover.disagrees(connection, refusal, now)

    def refuse(self, line: str, exit_code: int, now: float) -> list[tuple[int, Message]]:
        """End the session because the ranks disagree or ask for something impossible."""
        return self._judge.decide(Failure(FailureKind.REFUSED, line, exit_code=exit_code), now)

    # -- queries ----------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """Roster of the session."""
        return self._roster

    @property
    def verdict(self) -> Failure | None:
        """Reason why the session has ended, or None if it has not."""
        return self._judge.verdict

    def task(self) -> Newcomer | Wanted | None:
        """Return what rank 0 has to decide next, in a run that goes on after failures."""
        failover = self._judge.planning
        if failover is None or self._judge.complete:
            return None
        return failover.newcomer() or failover.wanted()

    def change_outcome(self) -> Switched | Dropped | None:
        """Return the outcome of the latest change of the plan, or None before its end."""
        failover = self._judge.planning
        return Dropped("the run is over") if failover is None else failover.outcome

    def snapshot(self) -> RunSnapshot | None:
        """Return what is known of the run; None before its plan and after its end."""
        if self._roster.participants is None or self.verdict is not None or self._judge.complete:
            return None
        failover = self._judge.failover
        return one_plan_snapshot(self._roster) if failover is None else failover.snapshot()

    def expected_to_leave(self) -> tuple[int, ...]:
        """Return the connected ranks that will leave by themselves, without the one that failed."""
        culprit = self.verdict.rank if self.verdict is not None else None
        here = self._roster.rank_of.values()
        return tuple(rank for rank in here if rank != culprit and not self._roster.seats[rank].left)

    def awaits_others(self) -> bool:
        """Return whether the run failed before all ranks joined, so that some may still be starting."""
        if self.verdict is None or not self._judge.admitted_others:
            return False
        return self._roster.participants is None and len(self._roster.absent()) > self._late

    def _hello(self, connection: int, message: Message | Malformed, now: float) -> list[tuple[int, Message]]:
        if self.verdict is not None:
            self._late += 1
            return [(connection, Verdict(self.verdict))]
        hello = message if isinstance(message, Hello) else None
        failover, size = self._judge.failover, self._roster.world_size
        is_here = hello is not None and hello.world == size and hello.rank in self._roster.seats
        if failover is not None and hello is not None and is_here:
            return failover.claim(connection, hello)
        outgoing, failure = self._attendance.admit(connection, hello, now)
        rank = self._roster.rank_of.get(connection)
        if failover is not None and rank is not None:
            outgoing += failover.welcome(rank, connection)
        return outgoing if failure is None else outgoing + self._judge.end(failure, now)
