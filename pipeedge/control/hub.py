"""The hub: one place that knows of every rank, decides what went wrong first, and tells all.

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

``HubState`` holds the rules and touches neither socket nor clock: connections, messages and the time
come in, messages to send come out. ``Hub`` is the thread around it.

Once the data rank has all results, and has written them, nothing that happens to a rank ends the run: all
hear a notice of it, and the summary goes without what that rank would have told.

A rank's own word on why it failed beats what others saw of it: when a rank reports that it *lost*
another, the hub gives that other a moment to say why before it takes the loss for the cause.

Whatever connects is taken for hostile until it has said hello, and even then what it says is checked:
numbers for their type and range, text for length and control characters. A rank that breaks the
protocol ends the run, it never harms the hub.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeedge.base.errors import (
    EXIT_FAULT,
    EXIT_PEER,
    EXIT_REQUEST,
    PeerFailedError,
    PipeEdgeError,
    one_line,
)
from pipeedge.base.fields import MALFORMED, number, plain, text, whole_number
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
from pipeedge.control.messages import Decoder, Message, encode

__all__ = ["Hub", "HubState"]

_LOSS_GRACE_S = 1.0
_PARTING_S = 2.0
"""At the end, how long the hub waits at most for the ranks to hear of it and leave."""
_MAX_HOST = 255
_MAX_KIND = 40
_MAX_NAMED = 10
"""Ranks that a line names one by one."""
_MAX_MESSAGE_BYTES = 64 << 10
"""What a rank says of itself is short."""
_MAX_RECORD_CHARS = 8 << 20
"""What a rank may tell of its run in all."""
_PATIENCE_S = 2.0
"""Ranks that come later than that are waited for with a word."""
_TELL_AGAIN_S = 10.0
"""Between two notices of processes that left without a hello."""
_NAMED = 8
_MAX_STRANGERS = 16
"""Connections without a rank. A further one takes the place of the oldest, which has had its time."""


@dataclass
class _Rank:
    """What the hub knows of one rank that has said hello."""

    connection: int
    host: str
    heard_at: float
    facts: Mapping[str, Any] | None = None
    status: RankStatus = field(default_factory=RankStatus)
    ready: bool = False
    stats: Mapping[str, Any] | None = None
    recorded: int = 0
    """Characters of its records."""
    left: bool = False
    """Whether it ended after the results were complete, without having finished."""

    @property
    def finished(self) -> bool:
        return self.stats is not None or self.left


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
        self._ranks: dict[int, _Rank] = {}
        self._rank_of: dict[int, int] = {}
        self._participants: tuple[int, ...] | None = None
        self._names: Mapping[int, str] = {}
        self._data_rank: int | None = None
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
        """A message came."""
        rank = self._rank_of.get(connection)
        if rank is None:
            if message.kind != "hello" or connection in self._refused:
                return []
            return self._hello(connection, message.body, now)
        known = self._ranks[rank]
        known.heard_at = now
        try:
            return self._from_rank(rank, known, message, now)
        except MALFORMED:
            kind = message.kind[:_MAX_KIND]
            cause = f"sent a malformed {kind!r}; do all run the same version?"
            return self._judge(self._failure(FailureKind.MALFORMED, rank, cause), now)

    def _from_rank(self, rank: int, known: _Rank, message: Message, now: float) -> list[tuple[int, Message]]:
        body = message.body
        if message.kind == "beat":
            known.status = RankStatus.from_body(body)
            return []
        if message.kind == "clock":
            there = now - self._opened_at
            return [(known.connection, Message("clock", {"sent": number(body["sent"]), "there": there}))]
        if known.left:
            return []
        if message.kind == "facts" and known.facts is None:
            known.facts = plain(body["facts"])
            return []
        if message.kind in ("failed", "lost") and (known.finished or not self._takes_part(rank)):
            return []  # it has done its part, or never had one
        if message.kind == "failed":
            return self._judge(self._failure(FailureKind.FAILED, rank, text(body["line"])), now)
        if message.kind == "lost":
            lost = whole_number(body["rank"], below=self._world_size)
            if self._suspect is None and self.verdict is None:
                loss = self._failure(FailureKind.GONE, lost, text(body["line"]))
                self._suspect = (now + _LOSS_GRACE_S, loss)
            return []
        if message.kind == "record" and rank in self._running() and self._started() and not known.finished:
            return self._pass_on(rank, known, body["text"])
        if message.kind == "ready" and rank in self._running() and not known.ready:
            known.ready = True
            if not self._started():
                return []
            self._progress_at = now
            return self._to_all(Message("start"))
        if message.kind == "complete" and rank == self._data_rank and self._started() and not known.finished:
            self._complete = True
            return self._to_all(Message("complete"))
        if message.kind == "done" and rank in self._running() and self._started() and not known.finished:
            known.stats = plain(body["stats"])
            return self._summarize()
        raise ValueError(message.kind)

    def closed(
        self, connection: int, now: float, why: str = "", *, left: str = ""
    ) -> list[tuple[int, Message]]:
        """A connection closed; ``why``, if it is known. ``left`` is the peer's address, if it closed it."""
        refused = connection in self._refused
        self._refused.discard(connection)
        rank = self._rank_of.pop(connection, None)
        if rank is None and left and not refused and not why:
            return self._left_early(left, now)
        if rank is None or self._ranks[rank].finished or not self._takes_part(rank):
            return []
        why = why or "it was killed or lost its network"
        return self._judge(self._failure(FailureKind.GONE, rank, why), now)

    def failed(self, fault: str, now: float) -> list[tuple[int, Message]]:
        """The hub itself cannot go on, for a fault of ours."""
        cause = f"internal error in its hub: {fault}"
        return self._judge(Failure(FailureKind.FAILED, cause, 0, self.name(0), EXIT_FAULT), now)

    def tick(self, now: float) -> list[tuple[int, Message]]:
        """Time has passed."""
        outgoing = []
        if now - self._beat_at >= self._beat_s:
            self._beat_at = now
            outgoing += self._to_all(Message("beat", {"slowest_s": self._slowest_s()})) + self._tell_work()
        if self.verdict is not None:
            return outgoing
        if self._suspect is not None and now >= self._suspect[0]:
            return outgoing + self._judge(self._suspect[1], now)
        if self._participants is None and now - self._opened_at > self._appear_s:
            absent = self.absent()
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
        """All are here and agree: announce the plan. From here on only ``participants`` are watched, and
        what they record goes to ``data_rank``."""
        self._data_rank = data_rank
        self._participants = participants
        self._names = names
        self._progress_at = now
        return self._to_all(Message("plan", plan))

    def refuse(self, line: str, exit_code: int, now: float) -> list[tuple[int, Message]]:
        """The ranks do not agree, or what they ask for cannot be."""
        return self._judge(Failure(FailureKind.REFUSED, line, exit_code=exit_code), now)

    # -- what one may ask -------------------------------------------------------------------------

    def absent(self) -> list[int]:
        """Ranks that have not said hello."""
        return [rank for rank in range(self._world_size) if rank not in self._ranks]

    def facts(self) -> dict[int, Mapping[str, Any]] | None:
        """What each rank said of itself, once all have."""
        facts = {rank: known.facts for rank, known in sorted(self._ranks.items()) if known.facts is not None}
        return facts if len(facts) == self._world_size else None

    def name(self, rank: int) -> str:
        """``rank 2 (stage 1, layers 13-24, on host pi3)``, as far as it is known."""
        known = self._ranks.get(rank)
        parts = [self._names[rank]] if rank in self._names else []
        if known is not None:
            parts.append(f"on {known.host}")
        return f"rank {rank}" + (f" ({', '.join(parts)})" if parts else "")

    def connections(self) -> tuple[int, ...]:
        """Connections that belong to a rank."""
        return tuple(self._rank_of)

    def expected_to_leave(self) -> tuple[int, ...]:
        """Ranks that are still there and will leave by themselves: not the one that stopped answering."""
        culprit = self.verdict.rank if self.verdict is not None else None
        here = self._rank_of.values()
        return tuple(rank for rank in here if rank != culprit and not self._ranks[rank].left)

    def awaits_others(self) -> bool:
        """Whether the run has failed before all ranks came, and some may still be on their way."""
        if self.verdict is None or not self._hears_of_late_ranks:
            return False
        return self._participants is None and len(self._ranks) + self._late < self._world_size

    def _slowest_s(self) -> float:
        """What the slowest stage spends on a microbatch, as far as they have told."""
        return max((self._ranks[rank].status.stage_s or 0.0 for rank in self._ranks), default=0.0)

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
        if rank in self._ranks:
            other = self._ranks[rank].host
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
        self._ranks[rank] = _Rank(connection, host, now)
        self._rank_of[connection] = rank
        return []

    def _refuse(self, connection: int, line: str) -> list[tuple[int, Message]]:
        self._refused.add(connection)
        return [(connection, Failure(FailureKind.REFUSED, line, exit_code=EXIT_REQUEST).message())]

    def _tell_work(self) -> list[tuple[int, Message]]:
        """The data rank shows how the stages spend their time."""
        data = self._ranks.get(self._data_rank) if self._data_rank is not None else None
        if data is None or not self._started():
            return []
        statuses = {rank: self._ranks[rank].status for rank in self._running()}
        work = {str(rank): status.work.to_body() for rank, status in statuses.items() if status.work}
        return [(data.connection, Message("work", {"work": work}))]

    def _pass_on(self, rank: int, known: _Rank, part: object) -> list[tuple[int, Message]]:
        """A part of what ``rank`` recorded goes to the data rank."""
        if not isinstance(part, str):
            raise TypeError(f"{type(part).__name__} where text was due")
        known.recorded += len(part)
        if known.recorded > _MAX_RECORD_CHARS:
            raise ValueError("a record without end")
        data = self._ranks.get(self._data_rank) if self._data_rank is not None else None
        if data is None:
            return []
        return [(data.connection, Message("record", {"rank": rank, "text": part}))]

    def _watch(self, now: float) -> list[tuple[int, Message]]:
        watched = [rank for rank in self._ranks if self._takes_part(rank) and not self._ranks[rank].finished]
        # Those that have finished are not watched, but what they received explains who waits for what.
        statuses = {rank: self._ranks[rank].status for rank in self._ranks if self._takes_part(rank)}
        progress = sum(status.progress for status in statuses.values())
        if progress != self._progress or not self._started():
            self._progress, self._progress_at = progress, now
        silence = {rank: now - self._ranks[rank].heard_at for rank in watched}
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
                f"{self.name(finding.source)}: the link between them is dead, or needs a longer --timeout"
            )
            return self._judge(self._failure(FailureKind.STUCK, finding.destination, cause), now)
        if isinstance(finding, Stalled) and watched:
            who = ", ".join(self.name(rank) for rank in watched)
            cause = f"nothing has moved for {finding.seconds:.1f} s: {who} did not end"
            return self._judge(Failure(FailureKind.STALLED, cause), now)
        if isinstance(finding, Slow) and now - self._noticed_at > self._limits.stall_s:
            self._noticed_at = now
            line = (
                f"{self.name(finding.rank)} has been {finding.what} for {finding.seconds:.0f} s; still alive"
            )
            return self._to_all(Message("notice", {"line": line}))
        return []

    def _hears_nobody(self, silence_s: Mapping[int, float]) -> bool:
        """Return whether several ranks fell silent together and none is left, through no fault of one."""
        others = [seconds for rank, seconds in silence_s.items() if rank != 0]
        return len(others) > 1 and min(others) > self._limits.silence_s - 2 * self._beat_s

    def _failure(self, kind: FailureKind, rank: int, cause: str) -> Failure:
        return Failure(kind, cause, rank, self.name(rank))

    def _judge(self, failure: Failure, now: float) -> list[tuple[int, Message]]:
        if self.verdict is not None:  # the first cause wins
            return []
        if self._complete and failure.exit_code == EXIT_PEER:
            return self._go_on_without(failure.line, failure.rank)
        self.verdict = failure
        self._hears_of_late_ranks = now - self._opened_at <= self._appear_s
        return self._to_all(failure.message())

    def _go_on_without(self, line: str, rank: int | None) -> list[tuple[int, Message]]:
        """The results are complete: wait no longer for ``rank``, or for all that have not finished."""
        waited_for = self._running() if rank is None else (rank,)
        leaving = [each for each in waited_for if not self._ranks[each].finished]
        for each in leaving:
            self._ranks[each].left = True
        if not leaving:
            return []
        notice = Message("notice", {"line": f"{line}; the results are complete"})
        return self._to_all(notice) + self._summarize()

    def _summarize(self) -> list[tuple[int, Message]]:
        """Tell all what each rank has done, once nobody is waited for any longer."""
        running = {rank: self._ranks[rank] for rank in self._running()}
        if not all(known.finished for known in running.values()):
            return []
        stats = {str(rank): known.stats for rank, known in running.items() if known.stats is not None}
        return self._to_all(Message("summary", {"stats": stats}))

    def _tell_absent(self, now: float) -> list[tuple[int, Message]]:
        """Tell those who wait which ranks have not come yet, once after a while and whenever that changes."""
        absent = tuple(self.absent())
        if self._participants is not None or not absent or now - self._opened_at < _PATIENCE_S:
            return []
        if absent == self._told_absent:
            return []
        self._told_absent = absent
        which = ", ".join(map(str, absent[:_NAMED]))
        if len(absent) > _NAMED:
            which += f" and {figure(len(absent) - _NAMED)} more"
        line = f"waiting for {plural(len(absent), 'rank')} {which} of {figure(self._world_size)} to start"
        return self._to_all(Message("waiting", {"line": line}))

    def _left_early(self, peer: str, now: float) -> list[tuple[int, Message]]:
        """Tell rank 0, now and then, of who left without a hello: it may have been a rank that died."""
        absent = self.absent()
        if self._participants is not None or self.verdict is not None or not absent:
            return []
        self._left_at = peer
        if 0 not in self._ranks or now < self._left_told_at + _TELL_AGAIN_S:
            return []
        self._left_told_at = now
        line = f"{_left_early(peer)}; ranks still missing: {_listed(absent)}"
        return [(self._ranks[0].connection, Message("notice", {"line": line}))]

    def _never_appeared(self, absent: list[int]) -> str:
        which = f"{plural(len(absent), 'rank')} {_listed(absent)}"
        left = f" ({_left_early(self._left_at)})" if self._left_at else ""
        return (
            f"{which} of {self._world_size} never appeared within {figure(self._appear_s)} s{left}: "
            "start each rank, with the same --addr and --port"
        )

    def _started(self) -> bool:
        return self._participants is not None and all(self._ranks[rank].ready for rank in self._participants)

    def _running(self) -> tuple[int, ...]:
        return self._participants if self._participants is not None else ()

    def _takes_part(self, rank: int) -> bool:
        return self._participants is None or rank in self._participants

    def _to_all(self, message: Message) -> list[tuple[int, Message]]:
        return [(connection, message) for connection in self._rank_of]


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MAX_NAMED:,} more" if len(ranks) > _MAX_NAMED else ""
    return f"{', '.join(map(str, ranks[:_MAX_NAMED]))}{more}"


def _left_early(peer: str) -> str:
    return f"a process at {peer} connected and left before it introduced itself"


class _Connection:
    """A member's socket as the hub's thread sees it."""

    def __init__(self, number: int, sock: socket.socket, peer: str) -> None:
        self.number = number
        self.socket = sock
        self.peer = peer
        self.decoder = Decoder(_MAX_MESSAGE_BYTES)
        self.outgoing = bytearray()


class Hub:
    """Serves ``HubState`` on a listening socket, in one thread. A context manager.

    Args:
        listener: bound and listening; the hub closes it.
        world_size: ranks of the world.
        timeout_s: within how many seconds an absent or silent rank is to be reported.
        appear_s: another limit for an absent one.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        world_size: int,
        timeout_s: float,
        appear_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._state = HubState(world_size=world_size, timeout_s=timeout_s, now=clock(), appear_s=appear_s)
        self._interval_s = beat_interval_s(timeout_s) / 2
        self._parting_s = min(_PARTING_S, timeout_s / 5)
        self._max_connections = world_size + _MAX_STRANGERS
        self._connections: dict[int, _Connection] = {}
        self._opened = 0
        # The state is shared by the serving thread and by the caller's plan() and refuse().
        self._changed = threading.Condition()
        self._closing = False
        self._ended = False
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)

    def __enter__(self) -> Hub:
        self._listener.setblocking(False)
        self._wakened.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wakened, selectors.EVENT_READ, None)
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Wait a moment until all ranks have heard of the end and left, then stop serving."""
        with self._changed:
            if exc[0] is None or not issubclass(exc[0], KeyboardInterrupt):
                # Ranks that are still starting would otherwise wait their whole timeout for this one.
                self._changed.wait_for(
                    lambda: self._ended or not self._state.awaits_others(), timeout=self._parting_s
                )
            self._changed.wait_for(
                lambda: self._ended or not self._state.expected_to_leave(), timeout=self._parting_s
            )
            self._closing = True
        self._wake()
        self._thread.join()

    def gather(self) -> dict[int, Mapping[str, Any]] | None:
        """Wait until every rank has told its facts; those of each. None if a verdict came first."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or self._state.facts() is not None or self._state.verdict is not None
            )
            if self._ended and self._state.verdict is None:
                raise PipeEdgeError("the hub has ended")
            return None if self._state.verdict is not None else self._state.facts()

    def plan(
        self,
        plan: Mapping[str, Any],
        *,
        participants: tuple[int, ...],
        names: Mapping[int, str],
        data_rank: int | None = None,
    ) -> None:
        """Announce what is to be run, by whom; ``names`` say what each rank is, for messages, and what they
        record goes to ``data_rank``."""
        with self._changed:
            self._queue(self._state.plan(plan, participants, names, self._clock(), data_rank))
        self._wake()

    def refuse(self, line: str, exit_code: int) -> None:
        """End the run before it starts."""
        with self._changed:
            self._queue(self._state.refuse(line, exit_code, self._clock()))
        self._wake()

    # -- the serving thread -----------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            if not self._ended:
                self._waker.send(b"\0")

    def _serve(self) -> None:
        try:
            while True:
                events = self._selector.select(self._interval_s)
                with self._changed:
                    if self._closing:
                        return
                    for key, mask in events:
                        if key.fileobj is self._listener:
                            self._accept()
                        elif key.fileobj is self._wakened:
                            self._wakened.recv(4096)
                        else:
                            self._exchange(key.data, mask)
                    self._queue(self._state.tick(self._clock()))
                    self._flush()
                    self._changed.notify_all()
        except Exception as error:  # nobody may wait for ever because this thread has ended
            self._give_up(error)
        finally:
            for connection in self._connections.values():
                connection.socket.close()
            self._selector.close()
            self._listener.close()
            with self._changed:
                self._ended = True
                self._waker.close()
                self._wakened.close()
                self._changed.notify_all()

    def _give_up(self, error: Exception) -> None:
        """Tell all ranks that the hub has failed, as far as they take it at once."""
        with self._changed:
            self._queue(self._state.failed(one_line(error), self._clock()))
        until = self._clock() + self._parting_s
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.socket.settimeout(max(0.01, until - self._clock()))
                connection.socket.sendall(connection.outgoing)
                connection.socket.shutdown(socket.SHUT_WR)
        # Closing a connection with unread bytes would reset it, and what was sent with it.
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.socket.settimeout(max(0.01, until - self._clock()))
                while self._clock() < until and connection.socket.recv(1 << 16):
                    pass

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return  # it was gone before we got to it
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            return
        if len(self._connections) >= self._max_connections:
            ranked = set(self._state.connections())
            self._drop(next(self._connections[key] for key in self._connections if key not in ranked))
        connection = _Connection(self._opened, sock, str(address[0]))
        self._opened += 1
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _exchange(self, connection: _Connection, mask: int) -> None:
        if connection.number not in self._connections or not mask & selectors.EVENT_READ:
            return
        why = ""
        try:
            data = connection.socket.recv(1 << 16)
            messages = connection.decoder.feed(data) if data else []
        except BlockingIOError:
            return
        except OSError:
            data, messages = b"", []
        except PeerFailedError as error:
            data, messages, why = b"", [], one_line(error)
        for message in messages:
            now = self._clock()
            self._queue(self._state.received(connection.number, message, now))
        if not data:
            self._drop(connection, why, left=connection.peer)

    def _queue(self, outgoing: list[tuple[int, Message]]) -> None:
        for connection, message in outgoing:
            if connection in self._connections:
                self._connections[connection].outgoing += encode(message)

    def _flush(self) -> None:
        for connection in list(self._connections.values()):
            if not connection.outgoing:
                continue
            try:
                sent = connection.socket.send(connection.outgoing)
                del connection.outgoing[:sent]
            except BlockingIOError:
                pass
            except OSError:
                self._drop(connection)
                continue
            # Called only when there is something left to wait for, or no longer.
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
            self._selector.modify(connection.socket, wanted, connection)

    def _drop(self, connection: _Connection, why: str = "", *, left: str = "") -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._connections[connection.number]
        self._queue(self._state.closed(connection.number, self._clock(), why, left=left))
