"""Rules of the hub: its reaction to connections, messages, the passage of time, and rank 0's decisions. Pure.

    a connection, a message, the time ──> HubState ──> messages to send
                                             │
         who is admitted, awaited, left out  ├─ attendance     (``admission``)
         what a message of a rank means      ├─ messages       (``rank_messages``)
         who is silent, stuck or slow        ├─ supervision, with a watch
         which event a loss is               ├─ losses
         for whom a plan is wanted           ├─ plans
         which epoch is active, what follows └─ epochs         the table

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

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Raw

from pipeedge.base.errors import EXIT_FAULT, EXIT_REQUEST, RAISE_FILE_LIMIT
from pipeedge.control.admission import Attendance, Newcomer, Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.attempts import Attempts, Faults
from pipeedge.control.changing import Dropped, RunSnapshot, Switched
from pipeedge.control.epochs import Epochs, Step, Table
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import Limits
from pipeedge.control.load_deadline import LoadDeadlines
from pipeedge.control.losses import Losses
from pipeedge.control.messages import Complete, Hello, Malformed, Message, Notice, Planned, Verdict
from pipeedge.control.plans import Plans, Wanted
from pipeedge.control.rank_messages import RankMessages
from pipeedge.control.rank_watch import RankWatch
from pipeedge.control.roster import Members, Outgoing, Roster
from pipeedge.control.supervision import Supervision

__all__ = ["HubParts", "HubState"]

_HELLO = "hello"


@dataclass(frozen=True)
class HubParts:
    """What the parts of the hub's rules are made by: the seam at which tests plant bugs."""

    table: Table | None = None
    """The table of epochs; None for ``epochs.TABLE``."""
    roster: Callable[[int], Roster] = Roster
    attempts: Callable[[Roster], Attempts] = Attempts
    faults: Callable[[], Faults] = Faults
    attendance: Callable[[Roster, Terms, float], Attendance] = Attendance
    loads: Callable[[float], LoadDeadlines] = LoadDeadlines
    watch: Callable[[Roster, float, float, LoadDeadlines], RankWatch] = RankWatch
    losses: Callable[[Roster, Epochs, Attendance, Faults, float], Losses] = Losses
    plans: Callable[[Roster, Epochs], Plans] = Plans
    messages: Callable[[Roster, Epochs, Losses, RankWatch, float], RankMessages] = RankMessages
    supervision: Callable[
        [Roster, Epochs, Losses, Attendance, RankMessages, RankWatch, float], Supervision
    ] = Supervision


_PARTS = HubParts()


class HubState:
    """The hub's rules. Connections are numbers; what to send comes back as (connection, message)."""

    def __init__(
        self,
        *,
        world_size: int,
        timeout_s: float,
        now: float,
        terms: Terms | None = None,
        parts: HubParts = _PARTS,
    ) -> None:
        self.roster = roster = parts.roster(world_size)
        """Roster of the session."""
        self._attendance = parts.attendance(roster, terms or Terms(timeout_s), now)
        limits = Limits.within(timeout_s)
        self._watch = parts.watch(roster, timeout_s, now, parts.loads(limits.stall_s))
        self.epochs = epochs = Epochs(roster, parts.attempts(roster), parts.table)
        """Epochs of the session; to be changed through this object alone."""
        self.plans = parts.plans(roster, epochs)
        """Plans of the session; to be changed through this object alone."""
        self._losses = parts.losses(roster, epochs, self._attendance, parts.faults(), limits.stall_s)
        self._messages = parts.messages(roster, epochs, self._losses, self._watch, now)
        self._supervision = parts.supervision(
            roster, epochs, self._losses, self._attendance, self._messages, self._watch, now
        )
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
            return outgoing + self._messages.received(rank, message, now)
        except ValueError:
            cause = f"sent a malformed {message.kind!r}; do all run the same version?"
            return outgoing + self._losses.lose(self._failure(FailureKind.MALFORMED, rank, cause), now)

    def _hello(self, connection: int, message: Message | Malformed, now: float) -> Outgoing:
        if self.verdict is not None:
            self._late += 1
            return [(connection, Verdict(self.verdict))]
        hello, epochs = message if isinstance(message, Hello) else None, self.epochs
        if not epochs.goes_on or hello is None or hello.world != self.roster.world_size:
            outgoing, failure = self._attendance.admit(connection, hello, now)
            return outgoing if failure is None else outgoing + self._losses.end(failure, now)
        is_over = epochs.step is Step.COMPLETE
        welcome: Outgoing = [(connection, Planned(epochs.plan)), (connection, Complete())] if is_over else []
        if hello.rank in self.roster.seats:
            return welcome or self._attendance.claim(connection, hello)
        outgoing, _ = self._attendance.admit(connection, hello, now)
        return outgoing + welcome if connection in self.roster.rank_of else outgoing

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
        if not self._losses.is_watched(rank):
            return []
        why = why or "it was killed or lost its network"
        return self._losses.lose(self._failure(FailureKind.GONE, rank, why), now)

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
        failure = Failure(FailureKind.FAILED, cause, 0, self.roster.name(0), EXIT_FAULT)
        return self._losses.lose(failure, now)

    def tick(self, now: float) -> Outgoing:
        """Handle the passage of time."""
        return self._supervision.tick(now)

    def _failure(self, kind: FailureKind, rank: int, cause: str) -> Failure:
        return Failure(kind, cause, rank, self.roster.name(rank))

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
                return self._losses.end(self.roster.left_out[rank], now)
        self.roster.data_rank = announcement.data_rank
        self.epochs.goes_on = announcement.goes_on
        for seat in self.roster.seats.values():
            seat.agrees = True
        self._watch.moved(now)
        planned = self.roster.to_all(Planned(announcement.plan))
        return planned + self.plans.made(self.roster.members, announcement, now)

    def plan_again(self, members: Members, announcement: Announcement[Raw], now: float) -> Outgoing:
        """Prepare an epoch with a plan for ``members``, unless these have changed meanwhile."""
        return self._with_notice(self.plans.made(members, announcement, now), announcement.line)

    def change(self, since: RunSnapshot, announcement: Announcement[Raw], now: float) -> Outgoing:
        """Prepare a better plan beside the one that runs, unless the run is no longer as ``since`` says."""
        return self._with_notice(self.plans.better(since, announcement, now), announcement.line)

    def _with_notice(self, outgoing: Outgoing, line: str) -> Outgoing:
        """Return what a plan sends, if anything, with a notice of it for all ranks."""
        return outgoing + (self.roster.to_all(Notice(line)) if outgoing and line else [])

    def give_up(self, members: Members, failure: Failure, now: float) -> Outgoing:
        """End the run because no plan fits ``members``, unless these have changed meanwhile."""
        return self.plans.none_fits(members, failure, now)

    def judge_newcomer(self, connection: int, refusal: str | None, now: float) -> Outgoing:
        """Take a process for a spare, or send it away with the line ``refusal``."""
        rank = self.roster.rank_of.get(connection)
        if rank is None or not self.epochs.recovers:
            return []
        if refusal is None:
            return self._attendance.agrees(connection, self.epochs.plan)
        failure = Failure(FailureKind.REFUSED, refusal, rank, exit_code=EXIT_REQUEST)
        return self._losses.lost(rank, failure, now)

    def refuse(self, line: str, exit_code: int, now: float) -> Outgoing:
        """End the session because the ranks disagree or ask for something impossible."""
        return self._losses.lose(Failure(FailureKind.REFUSED, line, exit_code=exit_code), now)

    # -- queries ---------------------------------------------------------------------------------

    @property
    def verdict(self) -> Failure | None:
        """Reason why the session has ended, or None if it has not."""
        return self.epochs.verdict

    def task(self) -> Newcomer | Wanted | None:
        """Return what rank 0 has to decide next, in a session that goes on after losses."""
        return (self._attendance.newcomer() or self.plans.wanted()) if self.epochs.recovers else None

    def change_outcome(self) -> Switched | Dropped | None:
        """Return the outcome of the latest change of the plan, or None before its end."""
        return Dropped("the run is over") if self.verdict is not None else self.epochs.outcome

    def snapshot(self) -> RunSnapshot | None:
        """Return what is known of the run; None before its plan and after its end."""
        return self.plans.snapshot()

    def expected_to_leave(self) -> tuple[int, ...]:
        """Return the connected ranks that will leave by themselves, without the one that failed."""
        culprit = self.verdict.rank if self.verdict is not None else None
        here = self.roster.rank_of.values()
        return tuple(rank for rank in here if rank != culprit and not self.roster.seats[rank].left)

    def awaits_others(self) -> bool:
        """Return whether the run failed before all ranks joined, so that some may still be starting."""
        if self.verdict is None or not self._losses.admitted_others:
            return False
        return self.roster.participants is None and len(self.roster.absent()) > self._late
