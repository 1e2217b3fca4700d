"""Rules of the hub: its reaction to messages, to the passage of time, and to lost ranks. Pure.

    phases of a rank   absent ─hello─> present ─facts─> known ─ready─> running ─done─> finished
    to the hub         at any time: beat, clock; before it finishes: failed, lost
                       while it runs: record, any number of them; complete, from the data rank
    from the hub       brief, plan, start, complete, summary; before the plan: waiting
                       at any time: pace, clockanswer, notice, verdict
                       to the data rank alone: rankrecord, work

``HubState`` uses neither sockets nor clocks: connections, messages and times go in, messages to send come
out. The table ``HubState._STEPS`` contains the messages that are allowed in each phase.

A rank that the session can do without (``attendance.Terms``) and that does not come, or is lost before the
plan, is left out. From the plan on every participant is needed. Once the data rank has all results, and has
written them, nothing that happens to a rank ends the run: all hear a notice of it, and the summary goes
without what that rank would have told.

The report of a failing rank takes precedence over what its peers observe. When a rank reports that it
*lost* another, the hub gives the other a moment to report the reason, before it declares the loss the cause.

A connection is untrusted until its hello, and its messages are always checked against the limits of their
types (``pipeedge.control.messages``). A rank that breaks the protocol ends the run, but cannot harm the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from msgspec import Raw, Struct

from pipeedge.base.errors import EXIT_FAULT, EXIT_PEER
from pipeedge.control.attendance import Attendance, Terms
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import (
    Limits,
    Silent,
    Slow,
    Stalled,
    Stuck,
    beat_interval_s,
    diagnose,
)
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
    Summary,
    Verdict,
)
from pipeedge.control.roster import Phase, Roster
from pipeedge.control.telemetry import clock_answer, forward_record, pace, stage_work

__all__ = ["HubState"]

_LOSS_GRACE_S = 1.0
_HELLO = "hello"


class HubState:
    """The hub's rules. Connections are numbers; what to send comes back as (connection, message)."""

    def __init__(self, *, world_size: int, timeout_s: float, now: float, terms: Terms | None = None) -> None:
        self._limits = Limits.within(timeout_s)
        self._beat_s = beat_interval_s(timeout_s)
        self._opened_at = now
        self._roster = Roster(world_size)
        self._attendance = Attendance(self._roster, terms or Terms(timeout_s), now)
        self._progress = -1
        self._progress_at = now
        self._noticed_at = now
        self._beat_at = now
        self._suspect: tuple[float, Failure] | None = None
        self._complete = False  # whether the data rank has written all results
        self._late = 0  # number of ranks that came after the verdict and received it
        self.verdict: Failure | None = None
        self._hears_of_late_ranks = True  # whether ranks could still appear when the verdict was made

    # -- events ----------------------------------------------------------------------------------

    def received(
        self, connection: int, message: Message | Malformed, now: float
    ) -> list[tuple[int, Message]]:
        """Handle a message from a connection."""
        rank = self._roster.rank_of.get(connection)
        if rank is None:
            if message.kind != _HELLO or self._attendance.has_sent_away(connection):
                return []
            return self._hello(connection, message, now)
        self._roster.seats[rank].heard_at = now
        try:
            return self._from_rank(rank, message, now)
        except ValueError:
            cause = f"sent a malformed {message.kind!r}; do all run the same version?"
            return self._judge(self._failure(FailureKind.MALFORMED, rank, cause), now)

    def _from_rank(self, rank: int, message: Message | Malformed, now: float) -> list[tuple[int, Message]]:
        step = self._STEPS[self._roster.phase(rank)].get(type(message))
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
        return self._judge(self._failure(FailureKind.FAILED, rank, failed.line), now)

    def _take_lost(self, rank: int, lost: Lost, now: float) -> list[tuple[int, Message]]:
        if lost.rank >= self._roster.world_size:
            raise ValueError("a rank outside the world")
        if self._suspect is None and self.verdict is None:
            loss = self._failure(FailureKind.GONE, lost.rank, lost.line)
            self._suspect = (now + _LOSS_GRACE_S, loss)
        return []

    def _take_ready(self, rank: int, ready: Ready, now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].ready = True
        if not self._roster.started():
            return []
        self._progress_at = now
        return self._roster.to_all(Start())

    def _take_record(self, rank: int, record: Record, now: float) -> list[tuple[int, Message]]:
        return forward_record(self._roster, rank, record.text)

    def _take_complete(self, rank: int, complete: Complete, now: float) -> list[tuple[int, Message]]:
        if rank != self._roster.data_rank:
            raise ValueError("complete, but not from the data rank")
        self._complete = True
        return self._roster.to_all(complete)

    def _take_done(self, rank: int, done: Done, now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].stats = done.stats
        return self._summarize()

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

    def closed(
        self, connection: int, now: float, why: str = "", *, left: str = ""
    ) -> list[tuple[int, Message]]:
        """Handle a closed connection.

        ``why`` is the reason, if it is known; ``left`` is the peer's address, if the peer closed it.
        """
        sent_away = self._attendance.forget(connection)
        rank = self._roster.rank_of.pop(connection, None)
        if rank is None and left and not sent_away and not why:
            return self.refused(left, "connected and left before it introduced itself", now)
        if rank is None or self._roster.seats[rank].finished or not self._roster.takes_part(rank):
            return []
        why = why or "it was killed or lost its network"
        return self._judge(self._failure(FailureKind.GONE, rank, why), now)

    def refused(self, peer: str, why: str, now: float) -> list[tuple[int, Message]]:
        """Handle a process at the address ``peer`` that is no member, for the reason ``why``."""
        return [] if self.verdict is not None else self._attendance.stranger(f"{peer} {why}", now)

    def failed(self, fault: str, now: float) -> list[tuple[int, Message]]:
        """End the session because of an internal error in the hub."""
        cause = f"internal error in its hub: {fault}"
        return self._judge(Failure(FailureKind.FAILED, cause, 0, self._roster.name(0), EXIT_FAULT), now)

    def tick(self, now: float) -> list[tuple[int, Message]]:
        """Handle the passage of time."""
        outgoing = []
        if now - self._beat_at >= self._beat_s:
            self._beat_at = now
            outgoing += self._roster.to_all(pace(self._roster)) + stage_work(self._roster)
        if self.verdict is not None:
            return outgoing
        if self._suspect is not None and now >= self._suspect[0]:
            (_, failure), self._suspect = self._suspect, None
            return outgoing + self._judge(failure, now)
        absence = self._attendance.absence(now)
        if absence is not None:
            return outgoing + self._end(absence, now)
        outgoing += self._attendance.close(now)
        return outgoing + self._attendance.tell_absent(now) + self._watch(now)

    # -- decisions -------------------------------------------------------------------------------

    def plan(
        self,
        plan: Raw,
        participants: tuple[int, ...],
        names: Mapping[int, str],
        now: float,
        data_rank: int | None = None,
    ) -> list[tuple[int, Message]]:
        """Announce the plan, once all ranks that take part in the session are here and agree.

        From now on only ``participants`` are monitored, and their records go to ``data_rank``.
        """
        for rank in participants:
            if rank in self._roster.left_out:  # it was lost while the plan was made
                return self._end(self._roster.left_out[rank], now)
        self._roster.data_rank = data_rank
        self._roster.participants = participants
        self._roster.names = names
        self._progress_at = now
        return self._roster.to_all(Planned(plan))

    def refuse(self, line: str, exit_code: int, now: float) -> list[tuple[int, Message]]:
        """End the session because the ranks disagree or ask for something impossible."""
        return self._judge(Failure(FailureKind.REFUSED, line, exit_code=exit_code), now)

    # -- queries ----------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """Roster of the session."""
        return self._roster

    def expected_to_leave(self) -> tuple[int, ...]:
        """Return the connected ranks that will leave by themselves, without the one that failed."""
        culprit = self.verdict.rank if self.verdict is not None else None
        here = self._roster.rank_of.values()
        return tuple(rank for rank in here if rank != culprit and not self._roster.seats[rank].left)

    def awaits_others(self) -> bool:
        """Return whether the run failed before all ranks joined, so that some may still be starting."""
        if self.verdict is None or not self._hears_of_late_ranks:
            return False
        return self._roster.participants is None and len(self._roster.absent()) > self._late

    # -- the rules --------------------------------------------------------------------------------

    def _hello(self, connection: int, message: Message | Malformed, now: float) -> list[tuple[int, Message]]:
        if self.verdict is not None:
            self._late += 1
            return [(connection, Verdict(self.verdict))]
        hello = message if isinstance(message, Hello) else None
        outgoing, failure = self._attendance.admit(connection, hello, now)
        return outgoing if failure is None else outgoing + self._end(failure, now)

    def _watch(self, now: float) -> list[tuple[int, Message]]:
        watched = [
            rank
            for rank in self._roster.seats
            if self._roster.takes_part(rank) and not self._roster.seats[rank].finished
        ]
        # Ranks that have finished are not monitored, but their counters are needed to find a dead link.
        statuses = {
            rank: self._roster.seats[rank].status
            for rank in self._roster.seats
            if self._roster.takes_part(rank)
        }
        progress = sum(status.progress for status in statuses.values())
        if progress != self._progress or not self._roster.started():
            self._progress, self._progress_at = progress, now
        silence = {rank: now - self._roster.seats[rank].heard_at for rank in watched}
        finding = diagnose(statuses, silence, now - self._progress_at, self._limits)
        if isinstance(finding, Silent) and self._hears_nobody(silence):
            cause = (
                f"has not heard from any of the {len(silence) - (0 in silence)} other ranks for "
                f"{finding.seconds:.1f} s: its own network is disconnected, or that of all others"
            )
            return self._judge(self._failure(FailureKind.SILENT, 0, cause), now)
        if isinstance(finding, Silent):
            cause = (
                f"has been silent for {finding.seconds:.1f} s: its process is suspended or its network is "
                "disconnected"
            )
            return self._judge(self._failure(FailureKind.SILENT, finding.rank, cause), now)
        if isinstance(finding, Stuck):
            cause = (
                f"has waited {finding.seconds:.1f} s for microbatch {finding.microbatch} from "
                f"{self._roster.name(finding.source)}: the link between them is dead, or so slow that it "
                "needs a longer --timeout"
            )
            return self._judge(self._failure(FailureKind.STUCK, finding.destination, cause), now)
        if isinstance(finding, Stalled) and watched:
            who = ", ".join(self._roster.name(rank) for rank in watched)
            cause = f"nothing has moved for {finding.seconds:.1f} s: {who} did not finish"
            return self._judge(Failure(FailureKind.STALLED, cause), now)
        if isinstance(finding, Slow) and now - self._noticed_at > self._limits.stall_s:
            self._noticed_at = now
            name = self._roster.name(finding.rank)
            line = f"{name} has been {finding.what} for {finding.seconds:.0f} s; still alive"
            return self._roster.to_all(Notice(line))
        return []

    def _hears_nobody(self, silence_s: Mapping[int, float]) -> bool:
        """Return whether all other ranks, at least two, fell silent together, so that none is at fault."""
        others = [seconds for rank, seconds in silence_s.items() if rank != 0]
        return len(others) > 1 and min(others) > self._limits.silence_s - 2 * self._beat_s

    def _failure(self, kind: FailureKind, rank: int, cause: str) -> Failure:
        return Failure(kind, cause, rank, self._roster.name(rank))

    def _judge(self, failure: Failure, now: float) -> list[tuple[int, Message]]:
        if self.verdict is not None:  # the first cause wins
            return []
        if failure.exit_code == EXIT_PEER:
            if self._complete:
                return self._go_on_without(failure.line, failure.rank)
            if failure.rank is not None and self._attendance.can_do_without(failure.rank):
                return self._attendance.leave_out(failure.rank, failure)
        return self._end(failure, now)

    def _end(self, failure: Failure, now: float) -> list[tuple[int, Message]]:
        self.verdict = failure
        self._hears_of_late_ranks = self._attendance.admits_at(now)
        return self._roster.to_all(Verdict(failure))

    def _go_on_without(self, line: str, rank: int | None) -> list[tuple[int, Message]]:
        """Stop waiting for ``rank``, or for all unfinished ranks if it is None: the results are complete."""
        waited_for = self._roster.running() if rank is None else (rank,)
        leaving = [each for each in waited_for if not self._roster.seats[each].finished]
        for each in leaving:
            self._roster.seats[each].left = True
        if not leaving:
            return []
        notice = Notice(f"{line}; the results are complete")
        return self._roster.to_all(notice) + self._summarize()

    def _summarize(self) -> list[tuple[int, Message]]:
        """Send the statistics of each rank to all when no rank is awaited any longer."""
        running = {rank: self._roster.seats[rank] for rank in self._roster.running()}
        if not all(known.finished for known in running.values()):
            return []
        stats = {rank: known.stats for rank, known in running.items() if known.stats is not None}
        return self._roster.to_all(Summary(stats))
