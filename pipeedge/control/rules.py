"""Rules of the hub: its reaction to messages, to the passage of time, and to lost ranks. Pure.

    a connection, a message, the time ──> HubState ──> messages to send
                                             │
         who is admitted, awaited, left out  ├─ attendance
         which epoch is active, what follows ├─ epochs      the table
         who is silent, stuck or slow        └─ watch

    a rank reports its failure ──────────┐                  ┌─> before the plan: the rank is left out, or
    a connection closes                  ├─> the first one ─┤     verdict to all
    silence, a dead link, no progress,   │                  ├─> after it: what the table of epochs says
    a load that does not get on          │                  └─> results complete: a notice to all
    a rank lost another, ── a moment ────┘
    which does not report why

``HubState`` uses neither sockets nor clocks: connections, messages and times go in, messages to send come
out. Every session goes the same way: its ranks come and state their facts, rank 0 announces a plan, and the
session is a sequence of epochs from then on (``pipeedge.control.epochs``). A session that does not go on
after a loss has one of them.

A rank that the session can do without (``attendance.Terms``) and that does not come, or is lost before the
plan, is left out; where a session goes on, the loss of one while the plan is made leads to another plan.
Once the data rank has all results, and has written them, nothing that happens to a rank
ends the session: all hear a notice of it, and the summary goes without what that rank would have told.

The report of a failing rank takes precedence over what its peers observe. When a rank of a session that does
not go on reports that it lost another, the hub gives the other a moment to report the reason, before it
declares the loss the cause.

A connection is untrusted until its hello, and its messages are always checked against the limits of their
types (``pipeedge.control.messages``). A rank that breaks the protocol ends the run, but cannot harm the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from msgspec import Raw, Struct

from pipeedge.base.errors import EXIT_FAULT, EXIT_PEER, EXIT_REQUEST, RAISE_FILE_LIMIT
from pipeedge.control.admission import Attendance, Newcomer, Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.changing import Dropped, RunSnapshot, Switched
from pipeedge.control.epochs import Epochs, Step, Wanted
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import Silent, Slow, Stalled, Stuck
from pipeedge.control.load_deadline import HungLoad, LoadFinding
from pipeedge.control.messages import (
    Beat,
    Clock,
    Complete,
    Declined,
    Done,
    Facts,
    Failed,
    Hello,
    LinkLost,
    Malformed,
    Message,
    Notice,
    Passed,
    Planned,
    Ready,
    Record,
    Stopped,
    Verdict,
)
from pipeedge.control.rank_watch import (
    Isolated,
    RankWatch,
    hears_nobody,
    is_hung,
    is_loading_slowly,
    is_silent,
    is_slow,
    is_stalled,
    is_stuck,
)
from pipeedge.control.roster import Members, Outgoing, Roster
from pipeedge.control.telemetry import clock_answer, forward_record, pace, stage_work, summary

__all__ = ["HubState"]

_HELLO = "hello"
_LOSS_GRACE_S = 1.0
"""Seconds for a rank that was lost to report the reason itself."""


class HubState:
    """The hub's rules. Connections are numbers; what to send comes back as (connection, message)."""

    def __init__(self, *, world_size: int, timeout_s: float, now: float, terms: Terms | None = None) -> None:
        self.roster = Roster(world_size)
        """Roster of the session."""
        self._opened_at = now
        self._attendance = Attendance(self.roster, terms or Terms(timeout_s), now)
        self._watch = RankWatch(self.roster, timeout_s, now)
        self.epochs = Epochs(self.roster, self._watch.limits.stall_s)
        """Epochs of the session; to be changed through this object alone."""
        self._suspect: tuple[float, Failure] | None = None
        self._beat_at = now
        self._admitted_others = True  # when the verdict was made
        self._late = 0  # number of ranks that came after the verdict and received it

    # -- messages --------------------------------------------------------------------------------

    def received(self, connection: int, message: Message | Malformed, now: float) -> Outgoing:
        """Handle a message from a connection."""
        rank = self.roster.rank_of.get(connection)
        if rank is None and self._attendance.claims(connection):
            self._attendance.keep(connection, message)
            return []
        if rank is None:
            if message.kind != _HELLO or self._attendance.has_sent_away(connection):
                return []
            return self._hello(connection, message, now)
        self.roster.seats[rank].heard_at = now
        outgoing = self._attendance.heard(rank)
        try:
            return outgoing + self._from_rank(rank, message, now)
        except ValueError:
            cause = f"sent a malformed {message.kind!r}; do all run the same version?"
            return outgoing + self._lose(self._failure(FailureKind.MALFORMED, rank, cause), now)

    def _hello(self, connection: int, message: Message | Malformed, now: float) -> Outgoing:
        if self.verdict is not None:
            self._late += 1
            return [(connection, Verdict(self.verdict))]
        hello, epochs = message if isinstance(message, Hello) else None, self.epochs
        if not epochs.goes_on or hello is None or hello.world != self.roster.world_size:
            outgoing, failure = self._attendance.admit(connection, hello, now)
            return outgoing if failure is None else outgoing + self._end(failure, now)
        is_over = epochs.step is Step.COMPLETE
        welcome: Outgoing = [(connection, Planned(epochs.plan)), (connection, Complete())] if is_over else []
        if hello.rank in self.roster.seats:
            return welcome or self._attendance.claim(connection, hello)
        outgoing, _ = self._attendance.admit(connection, hello, now)
        return outgoing + welcome if connection in self.roster.rank_of else outgoing

    def _from_rank(self, rank: int, message: Message | Malformed, now: float) -> Outgoing:
        roster, seat = self.roster, self.roster.seats[rank]
        if self.epochs.step is Step.GATHERING:
            steps = self._GATHERING
        elif seat.finished or not (self.epochs.goes_on or roster.takes_part(rank)):
            steps = self._SPENT
        else:
            steps = self._PLANNED
        step = steps.get(type(message))
        if step is None:
            raise ValueError(message.kind)
        return step(self, rank, message, now)

    def _ignore(self, rank: int, message: Message, now: float) -> Outgoing:
        return []

    def _take_beat(self, rank: int, beat: Beat, now: float) -> Outgoing:
        self.roster.seats[rank].status = beat.status
        return []

    def _take_clock(self, rank: int, clock: Clock, now: float) -> Outgoing:
        return clock_answer(self.roster.seats[rank], clock.sent, now - self._opened_at)

    def _take_facts(self, rank: int, facts: Facts, now: float) -> Outgoing:
        seat = self.roster.seats[rank]
        if seat.facts is not None:
            raise ValueError(facts.kind)
        seat.facts, seat.place = facts.facts, facts.place
        return []

    def _take_failed(self, rank: int, failed: Failed, now: float) -> Outgoing:
        failure = self._failure(FailureKind.FAILED, rank, failed.line)
        if self.epochs.recovers:
            return self.epochs.failed(rank, failed, failure, now)
        return self._lose(failure, now)

    def _take_link_lost(self, rank: int, lost: LinkLost, now: float) -> Outgoing:
        if self.epochs.goes_on:
            return self.epochs.received(rank, lost, now)
        if lost.peer >= self.roster.world_size:
            raise ValueError("a rank outside the world")
        if self._suspect is None and self.verdict is None:
            failure = self._failure(FailureKind.GONE, lost.peer, lost.line)
            self._suspect = (now + _LOSS_GRACE_S, failure)
        return []

    def _take_epoch(self, rank: int, message: Message, now: float) -> Outgoing:
        outgoing, ran = [], self.roster.runs
        outgoing += self.epochs.received(rank, message, now)
        if self.roster.runs and not ran:
            self._watch.moved(now)
        return outgoing

    def _take_record(self, rank: int, record: Record, now: float) -> Outgoing:
        return forward_record(self.roster, rank, record.text)

    def _take_done(self, rank: int, done: Done, now: float) -> Outgoing:
        goes_on, step = self.epochs.goes_on, self.epochs.step
        if step is not Step.COMPLETE and (goes_on or step is not Step.RUNNING):
            raise ValueError(done.kind)
        self.roster.seats[rank].stats = done.stats
        return summary(self.roster)

    # A step takes the type of message under which the tables list it.
    _Step: TypeAlias = Callable[["HubState", int, Any, float], Outgoing]
    _Steps: TypeAlias = Mapping[type[Struct], _Step]
    _ALWAYS: ClassVar[_Steps] = {Beat: _take_beat, Clock: _take_clock}
    _GATHERING: ClassVar[_Steps] = {
        **_ALWAYS,
        Facts: _take_facts,
        Failed: _take_failed,
        LinkLost: _take_link_lost,
    }
    """Messages that a rank may send before the plan, with their handlers; others break the protocol."""
    _PLANNED: ClassVar[_Steps] = {
        **_GATHERING,
        **dict.fromkeys((Ready, Declined, Passed, Stopped, Complete), _take_epoch),
        Record: _take_record,
        Done: _take_done,
    }
    """Messages that it may send after the plan, of which ``Epochs`` checks its own."""
    _SPENT: ClassVar[_Steps] = {
        **dict.fromkeys((*_PLANNED,), _ignore),
        **_ALWAYS,
    }
    """Messages of a rank that has no part in the plan, or has finished."""

    # -- connections and time --------------------------------------------------------------------

    def closed(self, connection: int, now: float, why: str = "", *, left: str = "") -> Outgoing:
        """Handle a closed connection.

        ``why`` is the reason, if it is known; ``left`` is the peer's address, if the peer closed it.
        """
        sent_away = self._attendance.forget(connection)
        rank = self.roster.rank_of.pop(connection, None)
        if rank is None and left and not sent_away and not why:
            return self._tell_stranger(f"{left} connected and left before it introduced itself", now)
        if rank is None:
            return []
        if self.epochs.has_passed(rank):
            self.roster.seats[rank].left = True
        if not self._is_watched(rank):
            return []
        why = why or "it was killed or lost its network"
        return self._lose(self._failure(FailureKind.GONE, rank, why), now)

    def refused(self, peer: str, why: str, now: float) -> Outgoing:
        """Handle a process at the address ``peer`` that is no member, for the reason ``why``."""
        return self._tell_stranger(f"{peer} {why}", now, has_other_key="key" in why)

    def shut_out(self, now: float) -> Outgoing:
        """Handle a process that could not be let in, because the hub's process may open no more files."""
        what = f"an unknown address was not let in, as rank 0 has too many open files: {RAISE_FILE_LIMIT}"
        return self._tell_stranger(what, now)

    def _tell_stranger(self, what: str, now: float, *, has_other_key: bool = False) -> Outgoing:
        if self.verdict is not None:
            return []
        return self._attendance.stranger(what, now, has_other_key=has_other_key)

    def failed(self, fault: str, now: float) -> Outgoing:
        """End the session because of an internal error in the hub."""
        cause = f"internal error in its hub: {fault}"
        return self._lose(Failure(FailureKind.FAILED, cause, 0, self.roster.name(0), EXIT_FAULT), now)

    def tick(self, now: float) -> Outgoing:
        """Handle the passage of time."""
        outgoing: Outgoing = []
        if now - self._beat_at >= self._watch.beat_s:
            self._beat_at = now
            outgoing += self.roster.to_all(pace(self.roster)) + stage_work(self.roster)
        if self.verdict is not None:
            return outgoing
        if self._suspect is not None and now >= self._suspect[0]:
            (_, failure), self._suspect = self._suspect, None
            return outgoing + self._lose(failure, now)
        absence = self._attendance.absence(now)
        if absence is not None:
            return outgoing + self._end(absence, now)
        outgoing += self._attendance.close(now) + self.epochs.tick(now)
        return outgoing + self._attendance.tell_absent(now) + self._look(now)

    def _look(self, now: float) -> Outgoing:
        """Act on what is wrong with the ranks, if anything is."""
        outgoing: Outgoing = []
        for finding in self._watch.look_at_loads(self._watched(), now):
            outgoing += self._look_at_load(finding, now)
        return outgoing if self.verdict is not None else outgoing + self._diagnose(self._watched(), now)

    def _look_at_load(self, finding: LoadFinding, now: float) -> Outgoing:
        """Do without a rank whose load hangs; tell the user of one that takes long, if the others wait."""
        roster, rank = self.roster, finding.rank
        if not isinstance(finding, HungLoad):
            return [] if roster.runs else roster.to_all(Notice(is_loading_slowly(roster, finding)))
        failure = is_hung(roster, finding)
        if self.epochs.recovers:
            return self.epochs.hung(rank, failure, now)
        # The last heartbeat may be older than the report that all is loaded.
        is_awaited = self.epochs.step is Step.GATHERING or self.epochs.awaits(rank)
        return self._lose(failure, now) if is_awaited else []

    def _diagnose(self, watched: list[int], now: float) -> Outgoing:
        roster = self.roster
        match self._watch.look(watched, now):
            case Isolated(silent, others) if not self.epochs.goes_on:
                return self._lose(hears_nobody(roster, silent, others), now)
            case Isolated(silent) | (Silent() as silent):
                return self._lose(is_silent(roster, silent), now)
            case Stuck(source, destination) as stuck:
                failure = is_stuck(roster, stuck)
                if self.epochs.recovers:
                    return self.epochs.link_lost(destination, source, failure, now)
                return self._lose(failure, now)
            case Stalled() as stalled if watched:
                failure = is_stalled(roster, stalled, watched)
                return self.epochs.stalled(failure, now) if self.epochs.recovers else self._lose(failure, now)
            case Slow() as slow:
                return roster.to_all(Notice(is_slow(roster, slow)))
        return []

    def _watched(self) -> list[int]:
        return [rank for rank in self.roster.seats if self._is_watched(rank)]

    def _is_watched(self, rank: int) -> bool:
        """Return whether the loss of ``rank``, which has a seat, matters."""
        if self.epochs.recovers:
            return True  # any rank may be needed
        is_done = self.roster.seats[rank].finished or self.epochs.has_passed(rank)
        return self.roster.takes_part(rank) and not is_done

    # -- losses ----------------------------------------------------------------------------------

    def _failure(self, kind: FailureKind, rank: int, cause: str) -> Failure:
        return Failure(kind, cause, rank, self.roster.name(rank))

    def _lose(self, failure: Failure, now: float) -> Outgoing:
        """Do what follows from a failure, unless another one has ended the session."""
        if self.verdict is not None:
            return []
        rank, step = failure.rank, self.epochs.step
        if failure.exit_code == EXIT_PEER and step is Step.COMPLETE:
            return self._go_on_without(failure.line, rank)
        if failure.exit_code != EXIT_PEER or rank is None:
            return self._end(failure, now)
        if step is not Step.GATHERING:
            return self.epochs.lost(rank, failure, now)
        if self._attendance.can_do_without(rank, failure.kind):
            return self._attendance.leave_out(rank, failure)
        return self._end(failure, now)

    def _end(self, failure: Failure, now: float) -> Outgoing:
        """End the session."""
        self._admitted_others = self._attendance.admits_at(now)
        return self.epochs.end(failure, now)

    def _go_on_without(self, line: str, rank: int | None) -> Outgoing:
        """Stop waiting for ``rank``, or for all unfinished ranks if it is None: the results are complete."""
        waited_for = self.roster.present() if rank is None else (rank,)
        seats = [self.roster.seats[each] for each in waited_for if each in self.roster.seats]
        leaving = [seat for seat in seats if not seat.finished]
        for seat in leaving:
            seat.left = True
        if not leaving:
            return []
        return self.roster.to_all(Notice(f"{line}; the results are complete")) + summary(self.roster)

    # -- decisions of rank 0 ---------------------------------------------------------------------

    def plan(self, announcement: Announcement[Raw], now: float) -> Outgoing:
        """Announce the plan, once all ranks that take part in the session are here and agree.

        From now on its participants are monitored, and in a session that goes on after a loss all ranks, as
        any of them may be needed. The records of all go to its data rank.
        """
        if self.verdict is not None:
            return []
        for rank in announcement.participants:
            if rank in self.roster.left_out and not announcement.goes_on:  # it was lost while it was made
                return self._end(self.roster.left_out[rank], now)
        self.roster.data_rank = announcement.data_rank
        self.epochs.goes_on = announcement.goes_on
        for seat in self.roster.seats.values():
            seat.agrees = True
        self._watch.moved(now)
        planned = self.roster.to_all(Planned(announcement.plan))
        return planned + self.epochs.planned(self.roster.members, announcement, now)

    def plan_again(self, members: Members, announcement: Announcement[Raw], now: float) -> Outgoing:
        """Prepare an epoch with a plan for ``members``, unless these have changed meanwhile."""
        return self._with_notice(self.epochs.planned(members, announcement, now), announcement.line)

    def change(self, since: RunSnapshot, announcement: Announcement[Raw], now: float) -> Outgoing:
        """Prepare a better plan beside the one that runs, unless the run is no longer as ``since`` says."""
        return self._with_notice(self.epochs.changed(since, announcement, now), announcement.line)

    def _with_notice(self, outgoing: Outgoing, line: str) -> Outgoing:
        """Return what a plan sends, if anything, with a notice of it for all ranks."""
        return outgoing + (self.roster.to_all(Notice(line)) if outgoing and line else [])

    def give_up(self, members: Members, failure: Failure, now: float) -> Outgoing:
        """End the run because no plan fits ``members``, unless these have changed meanwhile."""
        return self.epochs.unplanned(members, failure, now)

    def judge_newcomer(self, connection: int, refusal: str | None, now: float) -> Outgoing:
        """Take a process for a spare, or send it away with the line ``refusal``."""
        rank = self.roster.rank_of.get(connection)
        if rank is None or not self.epochs.recovers:
            return []
        if refusal is None:
            return self._attendance.agrees(connection, self.epochs.plan)
        failure = Failure(FailureKind.REFUSED, refusal, rank, exit_code=EXIT_REQUEST)
        return self.epochs.lost(rank, failure, now)

    def refuse(self, line: str, exit_code: int, now: float) -> Outgoing:
        """End the session because the ranks disagree or ask for something impossible."""
        return self._lose(Failure(FailureKind.REFUSED, line, exit_code=exit_code), now)

    # -- queries ---------------------------------------------------------------------------------

    @property
    def verdict(self) -> Failure | None:
        """Reason why the session has ended, or None if it has not."""
        return self.epochs.verdict

    def task(self) -> Newcomer | Wanted | None:
        """Return what rank 0 has to decide next, in a session that goes on after losses."""
        return (self._attendance.newcomer() or self.epochs.wanted()) if self.epochs.recovers else None

    def change_outcome(self) -> Switched | Dropped | None:
        """Return the outcome of the latest change of the plan, or None before its end."""
        return Dropped("the run is over") if self.verdict is not None else self.epochs.outcome

    def snapshot(self) -> RunSnapshot | None:
        """Return what is known of the run; None before its plan and after its end."""
        is_over = self.epochs.step in (Step.GATHERING, Step.COMPLETE, Step.ENDED)
        return None if is_over else self.epochs.snapshot()

    def expected_to_leave(self) -> tuple[int, ...]:
        """Return the connected ranks that will leave by themselves, without the one that failed."""
        culprit = self.verdict.rank if self.verdict is not None else None
        here = self.roster.rank_of.values()
        return tuple(rank for rank in here if rank != culprit and not self.roster.seats[rank].left)

    def awaits_others(self) -> bool:
        """Return whether the run failed before all ranks joined, so that some may still be starting."""
        if self.verdict is None or not self._admitted_others:
            return False
        return self.roster.participants is None and len(self.roster.absent()) > self._late
