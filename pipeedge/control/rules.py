"""The rules of the hub: what it makes of each message, of time that passes, and of ranks that go. Pure.

    a rank's life      absent ─hello─> present ─facts─> known ─ready─> running ─done─> finished
    to the hub         hello {rank, world, host}    facts {facts}      beat {status}    ready {}
                       failed {line}                lost {rank, line}  done {stats}
                       clock {sent}                 record {text}, any number of them before done
                       complete {}: from the data rank, before its done
    from the hub       plan {...}   start {}   summary {stats by rank}   beat {slowest_s}   notice {line}
                       complete {}
                       clock {sent, there}
                       record {rank, text}, work {by rank}: to the data rank alone
                       verdict {failure, rank, name, cause, exit_code}

``HubState`` touches neither socket nor clock: connections, messages and the time come in, messages to
send come out. Which message may come in which phase stands in one table, ``HubState._STEPS``.

Once the data rank has all results, and has written them, nothing that happens to a rank ends the run: all
hear a notice of it, and the summary goes without what that rank would have told.

A rank's own word on why it failed beats what others saw of it: when a rank reports that it *lost*
another, the hub gives that other a moment to say why before it takes the loss for the cause.

Whatever connects is taken for hostile until it has said hello, and even then what it says is checked:
numbers for their type and range, text for length and control characters. A rank that breaks the
protocol ends the run, it never harms the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from pipeedge.base.errors import EXIT_FAULT, EXIT_PEER, EXIT_REQUEST
from pipeedge.base.fields import MALFORMED, plain, text, whole_number
from pipeedge.base.wording import count, figure, plural
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import (
    Limits,
    RankStatus,
    Silent,
    Slow,
    Stalled,
    Stuck,
    beat_interval_s,
    diagnose,
)
from pipeedge.control.messages import Message
from pipeedge.control.roster import Phase, Roster, Seat
from pipeedge.control.telemetry import clock_answer, forward_record, pace, stage_work

__all__ = ["HubState"]

_LOSS_GRACE_S = 1.0
_MAX_HOST = 255
_MAX_KIND = 40
_MAX_NAMED = 10
"""Ranks that a line names one by one."""
_PATIENCE_S = 2.0
"""Seconds after which the ranks that have not come yet are named."""
_TELL_AGAIN_S = 10.0
"""Seconds between two notices of processes that left before they introduced themselves."""
_NAMED = 8


class HubState:
    """The hub's rules. Connections are numbers; what to send comes back as (connection, message)."""

    def __init__(
        self, *, world_size: int, timeout_s: float, now: float, appear_s: float | None = None
    ) -> None:
        self._world_size = world_size
        self._appear_s = timeout_s if appear_s is None else appear_s
        self._limits = Limits.within(timeout_s)
        self._beat_s = beat_interval_s(timeout_s)
        self._opened_at = now
        self._roster = Roster(world_size)
        self._progress = -1
        self._progress_at = now
        self._noticed_at = now
        self._told_absent: tuple[int, ...] = ()
        self._left_at = ""  # address of the last one that left without a hello
        self._left_told_at = -_TELL_AGAIN_S
        self._beat_at = now
        self._suspect: tuple[float, Failure] | None = None
        self._refused: set[int] = set()
        self._complete = False  # whether the data rank has written all results
        self._late = 0  # ranks that came after the verdict, and heard it
        self.verdict: Failure | None = None
        self._hears_of_late_ranks = True  # whether the verdict came while ranks could still appear

    # -- what the hub is told ---------------------------------------------------------------------

    def received(self, connection: int, message: Message, now: float) -> list[tuple[int, Message]]:
        """Handle a message from a connection."""
        rank = self._roster.rank_of.get(connection)
        if rank is None:
            if message.kind != "hello" or connection in self._refused:
                return []
            return self._hello(connection, message.body, now)
        self._roster.seats[rank].heard_at = now
        try:
            return self._from_rank(rank, message, now)
        except MALFORMED:
            kind = message.kind[:_MAX_KIND]
            cause = f"sent a malformed {kind!r}; do all run the same version?"
            return self._judge(self._failure(FailureKind.MALFORMED, rank, cause), now)

    def _from_rank(self, rank: int, message: Message, now: float) -> list[tuple[int, Message]]:
        step = self._STEPS[self._roster.phase(rank)].get(message.kind)
        if step is None:
            raise ValueError(message.kind)
        return step(self, rank, message.body, now)

    def _ignore(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        return []

    def _take_beat(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].status = RankStatus.from_body(body)
        return []

    def _take_clock(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        return clock_answer(self._roster.seats[rank], body, now - self._opened_at)

    def _take_facts(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].facts = plain(body["facts"])
        return []

    def _take_failed(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        return self._judge(self._failure(FailureKind.FAILED, rank, text(body["line"])), now)

    def _take_lost(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        lost = whole_number(body["rank"], below=self._world_size)
        if self._suspect is None and self.verdict is None:
            loss = self._failure(FailureKind.GONE, lost, text(body["line"]))
            self._suspect = (now + _LOSS_GRACE_S, loss)
        return []

    def _take_ready(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].ready = True
        if not self._roster.started():
            return []
        self._progress_at = now
        return self._roster.to_all(Message("start"))

    def _take_record(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        return forward_record(self._roster, rank, body)

    def _take_complete(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        if rank != self._roster.data_rank:
            raise ValueError("complete, from another rank than the data rank")
        self._complete = True
        return self._roster.to_all(Message("complete"))

    def _take_done(self, rank: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        self._roster.seats[rank].stats = plain(body["stats"])
        return self._summarize()

    _Step: TypeAlias = Callable[["HubState", int, Mapping[str, Any], float], list[tuple[int, Message]]]
    _ALWAYS: ClassVar[Mapping[str, _Step]] = {"beat": _take_beat, "clock": _take_clock}
    _FAILING: ClassVar[Mapping[str, _Step]] = {**_ALWAYS, "failed": _take_failed, "lost": _take_lost}
    _SPENT: ClassVar[Mapping[str, _Step]] = {**_ALWAYS, "failed": _ignore, "lost": _ignore}
    _STEPS: ClassVar[Mapping[Phase, Mapping[str, _Step]]] = {
        Phase.MET: {**_FAILING, "facts": _take_facts},
        Phase.KNOWN: _FAILING,
        Phase.PLANNED: {**_FAILING, "ready": _take_ready},
        Phase.READY: _FAILING,
        Phase.RUNNING: {
            **_FAILING,
            "record": _take_record,
            "complete": _take_complete,
            "done": _take_done,
        },
        Phase.FINISHED: _SPENT,
        Phase.BYSTANDER: _SPENT,
        Phase.LEFT: {
            **_SPENT,
            **dict.fromkeys(("facts", "ready", "record", "complete", "done"), _ignore),
        },
    }
    """What a rank may send in each phase, and what follows; anything else breaks the protocol."""

    def closed(
        self, connection: int, now: float, why: str = "", *, left: str = ""
    ) -> list[tuple[int, Message]]:
        """Handle a closed connection.

        ``why`` is the reason, if it is known; ``left`` is the peer's address, if the peer closed it.
        """
        refused = connection in self._refused
        self._refused.discard(connection)
        rank = self._roster.rank_of.pop(connection, None)
        if rank is None and left and not refused and not why:
            return self._left_early(left, now)
        if rank is None or self._roster.seats[rank].finished or not self._roster.takes_part(rank):
            return []
        why = why or "it was killed or lost its network"
        return self._judge(self._failure(FailureKind.GONE, rank, why), now)

    def failed(self, fault: str, now: float) -> list[tuple[int, Message]]:
        """End the session because of an internal error in the hub."""
        cause = f"internal error in its hub: {fault}"
        return self._judge(Failure(FailureKind.FAILED, cause, 0, self._roster.name(0), EXIT_FAULT), now)

    def tick(self, now: float) -> list[tuple[int, Message]]:
        """Time has passed."""
        outgoing = []
        if now - self._beat_at >= self._beat_s:
            self._beat_at = now
            outgoing += self._roster.to_all(pace(self._roster)) + stage_work(self._roster)
        if self.verdict is not None:
            return outgoing
        if self._suspect is not None and now >= self._suspect[0]:
            return outgoing + self._judge(self._suspect[1], now)
        if self._roster.participants is None and now - self._opened_at > self._appear_s:
            absent = self._roster.absent()
            if absent:
                failure = Failure(FailureKind.ABSENT, self._never_appeared(absent), absent[0])
                return outgoing + self._judge(failure, now)
        return outgoing + self._tell_absent(now) + self._watch(now)

    # -- what the hub decides ---------------------------------------------------------------------

    def plan(
        self,
        plan: Mapping[str, Any],
        participants: tuple[int, ...],
        names: Mapping[int, str],
        now: float,
        data_rank: int | None = None,
    ) -> list[tuple[int, Message]]:
        """Announce the plan, once all ranks are here and agree.

        From here on only ``participants`` are watched, and their records go to ``data_rank``.
        """
        self._roster.data_rank = data_rank
        self._roster.participants = participants
        self._roster.names = names
        self._progress_at = now
        return self._roster.to_all(Message("plan", plan))

    def refuse(self, line: str, exit_code: int, now: float) -> list[tuple[int, Message]]:
        """End the session because the ranks disagree or ask for something impossible."""
        return self._judge(Failure(FailureKind.REFUSED, line, exit_code=exit_code), now)

    # -- what one may ask -------------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """Roster of the session."""
        return self._roster

    def expected_to_leave(self) -> tuple[int, ...]:
        """Ranks that are still there and will leave by themselves: not the one that stopped answering."""
        culprit = self.verdict.rank if self.verdict is not None else None
        here = self._roster.rank_of.values()
        return tuple(rank for rank in here if rank != culprit and not self._roster.seats[rank].left)

    def awaits_others(self) -> bool:
        """Return whether the run failed before all ranks joined, so that some may still be on their way."""
        if self.verdict is None or not self._hears_of_late_ranks:
            return False
        return self._roster.participants is None and len(self._roster.seats) + self._late < self._world_size

    # -- the rules --------------------------------------------------------------------------------

    def _hello(self, connection: int, body: Mapping[str, Any], now: float) -> list[tuple[int, Message]]:
        if self.verdict is not None:
            self._late += 1
            return [(connection, self.verdict.message())]
        try:
            world = whole_number(body["world"])
            rank = whole_number(body["rank"])
            host = text(body["host"], _MAX_HOST)
        except MALFORMED:
            return self._refuse(connection, "your hello is malformed; do all ranks run the same version?")
        disagrees = ""
        if world != self._world_size:
            theirs = count(world, "rank")
            disagrees = f"rank {rank} on {host} says the world has {theirs}, rank 0 says {self._world_size}: "
        # A seat that is taken, or does not exist, belongs to no member of this run: whoever asks for it
        # started at another run's address, and must not end that run.
        if rank in self._roster.seats:
            other = self._roster.seats[rank].host
            remedy = "choose another --port for another run" if disagrees else "start each rank once"
            return self._refuse(connection, f"{disagrees}rank {rank} is already there, on {other}: {remedy}")
        if rank >= self._world_size:
            outside = f"rank {rank} is outside the world of {self._world_size}"
            return self._refuse(connection, f"{disagrees}{outside}")
        if disagrees:
            # One of the two is wrong, and the run cannot become complete: all may know at once.
            line = f"{disagrees}start all with the same WORLD"
            failure = Failure(FailureKind.REFUSED, line, exit_code=EXIT_REQUEST)
            return [*self._refuse(connection, line), *self._judge(failure, now)]
        self._roster.seats[rank] = Seat(connection, host, now)
        self._roster.rank_of[connection] = rank
        return []

    def _refuse(self, connection: int, line: str) -> list[tuple[int, Message]]:
        self._refused.add(connection)
        return [(connection, Failure(FailureKind.REFUSED, line, exit_code=EXIT_REQUEST).message())]

    def _watch(self, now: float) -> list[tuple[int, Message]]:
        watched = [
            rank
            for rank in self._roster.seats
            if self._roster.takes_part(rank) and not self._roster.seats[rank].finished
        ]
        # Those that have finished are not watched, but what they received explains who waits for what.
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
                f"has heard none of the {len(silence) - (0 in silence)} other ranks for "
                f"{finding.seconds:.1f} s: its own network is cut, or that of all others"
            )
            return self._judge(self._failure(FailureKind.SILENT, 0, cause), now)
        if isinstance(finding, Silent):
            cause = f"has been silent for {finding.seconds:.1f} s: it is stopped, or its network is cut"
            return self._judge(self._failure(FailureKind.SILENT, finding.rank, cause), now)
        if isinstance(finding, Stuck):
            cause = (
                f"has waited {finding.seconds:.1f} s for microbatch {finding.microbatch} from "
                f"{self._roster.name(finding.source)}: the link between them is dead, or needs a "
                "longer --timeout"
            )
            return self._judge(self._failure(FailureKind.STUCK, finding.destination, cause), now)
        if isinstance(finding, Stalled) and watched:
            who = ", ".join(self._roster.name(rank) for rank in watched)
            cause = f"nothing has moved for {finding.seconds:.1f} s: {who} did not end"
            return self._judge(Failure(FailureKind.STALLED, cause), now)
        if isinstance(finding, Slow) and now - self._noticed_at > self._limits.stall_s:
            self._noticed_at = now
            name = self._roster.name(finding.rank)
            line = f"{name} has been {finding.what} for {finding.seconds:.0f} s; still alive"
            return self._roster.to_all(Message("notice", {"line": line}))
        return []

    def _hears_nobody(self, silence_s: Mapping[int, float]) -> bool:
        """Return whether several ranks fell silent together and none is left, through no fault of one."""
        others = [seconds for rank, seconds in silence_s.items() if rank != 0]
        return len(others) > 1 and min(others) > self._limits.silence_s - 2 * self._beat_s

    def _failure(self, kind: FailureKind, rank: int, cause: str) -> Failure:
        return Failure(kind, cause, rank, self._roster.name(rank))

    def _judge(self, failure: Failure, now: float) -> list[tuple[int, Message]]:
        if self.verdict is not None:  # the first cause wins
            return []
        if self._complete and failure.exit_code == EXIT_PEER:
            return self._go_on_without(failure.line, failure.rank)
        self.verdict = failure
        self._hears_of_late_ranks = now - self._opened_at <= self._appear_s
        return self._roster.to_all(failure.message())

    def _go_on_without(self, line: str, rank: int | None) -> list[tuple[int, Message]]:
        """Stop waiting for ``rank``, or for all unfinished ranks if it is None: the results are complete."""
        waited_for = self._roster.running() if rank is None else (rank,)
        leaving = [each for each in waited_for if not self._roster.seats[each].finished]
        for each in leaving:
            self._roster.seats[each].left = True
        if not leaving:
            return []
        notice = Message("notice", {"line": f"{line}; the results are complete"})
        return self._roster.to_all(notice) + self._summarize()

    def _summarize(self) -> list[tuple[int, Message]]:
        """Tell all what each rank has done, once nobody is waited for any longer."""
        running = {rank: self._roster.seats[rank] for rank in self._roster.running()}
        if not all(known.finished for known in running.values()):
            return []
        stats = {str(rank): known.stats for rank, known in running.items() if known.stats is not None}
        return self._roster.to_all(Message("summary", {"stats": stats}))

    def _tell_absent(self, now: float) -> list[tuple[int, Message]]:
        """Tell those who wait which ranks have not come yet, once after a while and whenever that changes."""
        absent = tuple(self._roster.absent())
        if self._roster.participants is not None or not absent or now - self._opened_at < _PATIENCE_S:
            return []
        if absent == self._told_absent:
            return []
        self._told_absent = absent
        which = ", ".join(map(str, absent[:_NAMED]))
        if len(absent) > _NAMED:
            which += f" and {figure(len(absent) - _NAMED)} more"
        line = f"waiting for {plural(len(absent), 'rank')} {which} of {figure(self._world_size)} to start"
        return self._roster.to_all(Message("waiting", {"line": line}))

    def _left_early(self, peer: str, now: float) -> list[tuple[int, Message]]:
        """Tell rank 0, now and then, of who left without a hello: it may have been a rank that died."""
        absent = self._roster.absent()
        if self._roster.participants is not None or self.verdict is not None or not absent:
            return []
        self._left_at = peer
        if 0 not in self._roster.seats or now < self._left_told_at + _TELL_AGAIN_S:
            return []
        self._left_told_at = now
        line = f"{_left_early(peer)}; ranks still missing: {_listed(absent)}"
        return [(self._roster.seats[0].connection, Message("notice", {"line": line}))]

    def _never_appeared(self, absent: list[int]) -> str:
        which = f"{plural(len(absent), 'rank')} {_listed(absent)}"
        left = f" ({_left_early(self._left_at)})" if self._left_at else ""
        return (
            f"{which} of {self._world_size} never appeared within {figure(self._appear_s)} s{left}: "
            "start each rank, with the same --addr and --port"
        )


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MAX_NAMED:,} more" if len(ranks) > _MAX_NAMED else ""
    return f"{', '.join(map(str, ranks[:_MAX_NAMED]))}{more}"


def _left_early(peer: str) -> str:
    return f"a process at {peer} connected and left before it introduced itself"
