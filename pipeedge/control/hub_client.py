"""Connect a rank to the hub: introduce it, send heartbeats, and receive the hub's decisions."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar, cast

from msgspec import Raw

from pipeedge.base.errors import (
    DeadlineError,
    PeerError,
    PeerFailedError,
    PipeEdgeError,
    one_line,
)
from pipeedge.base.fields import encode
from pipeedge.control.clocks import ClockMap
from pipeedge.control.connection import Connection
from pipeedge.control.hub_address import HubAddress, explain_refusal
from pipeedge.control.liveness import Limits, RankStatus, beat_interval_s
from pipeedge.control.messages import (
    Abort,
    Beat,
    Clock,
    ClockAnswer,
    Complete,
    Done,
    Facts,
    Failed,
    Hello,
    LinkLost,
    Malformed,
    Message,
    Notice,
    Pace,
    Prepare,
    RankRecord,
    Record,
    Retire,
    Run,
    Verdict,
    Waiting,
    WorkByRank,
)
from pipeedge.control.turns import Turns
from pipeedge.control.uplink import Uplink
from pipeedge.observe.metrics import StageWork
from pipeedge.transport.place import Place

__all__ = ["Callbacks", "HubClient"]

_Message = TypeVar("_Message", bound=Message)

_VERDICT_WAIT_S = 3.0
"""Seconds that a rank that lost links waits for the hub to name the cause."""
_CLOCK_BURST = 8
"""Number of consecutive clock exchanges after the hello; later, there is one with each heartbeat."""
_MAX_LINE = 2000
_RECORD_CHARS = 24 << 10
"""Number of characters in one message. The hub accepts 64 KiB, and escaping makes text longer."""
_KEPT_RECORDS = 9
"""Number of records of each rank that the data rank keeps: of its last epoch, and of eight before."""


@dataclass(frozen=True)
class Callbacks:
    """Functions that a member's thread calls."""

    status: Callable[[], RankStatus] = RankStatus
    """Returns what this rank is doing; called for each heartbeat."""
    notify: Callable[[str], None] = lambda line: None
    """Takes a line for the user about something that does not end the run."""
    show_waiting: Callable[[str, bool], None] = lambda line, over: None
    """Takes a line, before the plan, that names the ranks that are still missing, or says that the wait for
    them is over, and whether it does."""
    record_stage_work: Callable[[Mapping[int, StageWork]], None] = lambda work: None
    """Takes the work of the stages, by rank; called on the data rank."""


class HubClient:
    """A rank's connection to the hub, with a thread that sends and listens. A context manager.

    Args:
        connection: Connection to the hub; the member closes it.
        rank: This rank.
        timeout_s: Seconds within which a silent hub is detected.
        callbacks: Functions that the member's thread calls.
        hub_at: Where to connect again if the hub closes the connection before it has read it.
        clock: Monotonic clock in seconds.
        run_clock: Clock in seconds by which the run is recorded.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        rank: int,
        timeout_s: float,
        callbacks: Callbacks | None = None,
        hub_at: HubAddress | None = None,
        clock: Callable[[], float] = time.monotonic,
        run_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._uplink = Uplink(connection, hub_at, clock)
        self._rank = rank
        self._callbacks = callbacks or Callbacks()
        self._clock = clock
        self._run_clock = run_clock
        self._clock_burst = _CLOCK_BURST
        self.hub_clock = ClockMap()
        """Conversion from ``run_clock`` to the hub's clock."""
        self.turns = Turns(self._uplink.send, run_clock)
        """Epochs of this rank."""
        self._records: dict[int, deque[list[str]]] = {}  # parts of each of the last records, by rank
        self._beat_s = beat_interval_s(timeout_s)
        self._silence_s = Limits.within(timeout_s).silence_s
        self._changed = threading.Condition()
        self._hub_name = "rank 0"
        self._received: dict[type[Message], Message] = {}
        self._error: PipeEdgeError | None = None
        self._leaving = False
        self._slowest_s = 0.0
        self._abort: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._serve, name="member", daemon=True)

    def __enter__(self) -> HubClient:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Send what is still to be sent, and leave."""
        with self._changed:
            self._leaving = True
        self._uplink.wake()
        self._thread.join()
        self._uplink.close()

    # -- messages of this rank --------------------------------------------------------------------

    def hello(self, *, world_size: int, host: str) -> None:
        """Introduce this rank to the hub."""
        self._uplink.send(Hello(self._rank, world_size, host))
        self._request_clock()

    def facts(self, facts: object, place: Place | None = None) -> None:
        """Send the facts of this rank, which the hub compares with those of the other ranks.

        Args:
            facts: The facts.
            place: Place at which this rank listens for others; None if it does not.
        """
        self._uplink.send(Facts(Raw(encode(facts)), place))

    def record(self, text: str) -> None:
        """Send this rank's record of the run to the data rank. Must precede ``done``."""
        for start in range(0, len(text), _RECORD_CHARS):
            self._uplink.send(Record(text[start : start + _RECORD_CHARS]))

    def complete(self) -> None:
        """Report that this rank, the data rank, has written all results. Must precede ``done``."""
        self._uplink.send(Complete())

    def done(self, stats: object) -> None:
        """Report that this rank has finished its part."""
        # No heartbeat follows, and the diagnosis of other ranks may depend on this rank's last counters.
        self._uplink.send(Beat(self._callbacks.status()))
        self._uplink.send(Done(Raw(encode(stats))))

    def failed(self, line: str, microbatch: int | None = None) -> None:
        """Report that this rank failed, for the reason in ``line``.

        Args:
            line: The reason.
            microbatch: Number of the microbatch whose values led to it, if any did.
        """
        self._uplink.send(Failed(line[:_MAX_LINE], microbatch))

    def explain(self, error: PeerError) -> PipeEdgeError:
        """Report that links failed, and return the reason that the hub gives, or ``error``.

        Links fail, too, because a rank ends that has heard of the failure of another one: what the hub has
        found before comes first. It answers with what it is told here only if it knows nothing better.
        """
        if error.peer is None:
            self.failed(one_line(error), error.microbatch)
        else:
            self._uplink.send(LinkLost(self.turns.latest, error.peer, one_line(error)[:_MAX_LINE]))
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, timeout=_VERDICT_WAIT_S)
            found = self._error
        account = found.account if isinstance(found, PeerError) else None
        is_own = account is not None and account.rank == self._rank
        return error if found is None or is_own else found

    def set_hub_name(self, what: str) -> None:
        """Set the description of rank 0 (``stage 0, layers 1-8``) for messages that name it."""
        self._hub_name = f"rank 0 ({what})"

    # -- messages for this rank ------------------------------------------------------------------

    def on_end(self, abort: Callable[[], None]) -> None:
        """Call ``abort``, from the member's thread, as soon as the run has failed on any rank."""
        with self._changed:
            self._abort = abort
            if self._error is None:
                return
        abort()

    def wait(self, kind: type[_Message]) -> _Message:
        """Wait for the message ``kind`` (``Brief``, ``Planned`` or ``Summary``) and return it.

        This needs no timeout: the hub has one for every rank, and this rank has one for the hub.

        Raises:
            PipeEdgeError: The run failed; every rank has the same line.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or kind in self._received)
            if self._error is not None:
                raise self._error
            return cast(_Message, self._received[kind])

    def records(self) -> dict[int, str]:
        """Return the record of each rank. Only on the data rank, after the summary.

        Of records that begin with a line break, only the last ones are kept.
        """
        with self._changed:
            return {rank: "".join(chain(*records)) for rank, records in sorted(self._records.items())}

    @property
    def error(self) -> PipeEdgeError | None:
        """Reason the run failed, or None if it has not."""
        with self._changed:
            return self._error

    @property
    def results_complete(self) -> bool:
        """Whether the data rank has written all results, as far as this rank knows."""
        with self._changed:
            return Complete in self._received

    @property
    def slowest_stage_s(self) -> float:
        """Seconds the slowest stage spends on a microbatch, or 0 while that is unknown."""
        with self._changed:
            return self._slowest_s

    # -- the member's thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._uplink.open()
            self._listen()
        except Exception as error:  # a thread that waits for the hub must not wait forever
            line = f"internal error in the control connection of rank {self._rank}: {one_line(error)}"
            self._fail(PipeEdgeError(line))
            self.failed(line)
            self._uplink.part()

    def _listen(self) -> None:
        received_at = beat_at = self._clock()
        while True:
            ready = self._uplink.wait_until(beat_at + self._beat_s)
            with self._changed:
                if self._leaving:
                    break
            now = self._clock()
            if ready:
                received_at = now
                self._receive()
            with self._changed:
                if self._error is not None:
                    return
            if now - received_at > self._silence_s:
                self._fail(
                    DeadlineError(
                        f"{self._hub_name} has been silent for {now - received_at:.1f} s: "
                        f"its process is suspended or the network is disconnected{self._or_another}"
                    )
                )
                return
            if now - beat_at >= self._beat_s:
                beat_at = now
                self._uplink.send(Beat(self._callbacks.status()))
                self._request_clock()
        self._uplink.part()

    def _receive(self) -> None:
        """Handle what the hub has sent."""
        try:
            messages = self._uplink.receive()
        except PeerFailedError as error:
            self._fail(self._hub_gone(error))
            return
        if messages is None:
            self._fail(self._hub_gone())
            return
        for message in messages:
            self._handle(message)
        if self._uplink.failure:
            self._fail(explain_refusal(self._hub_name, self._uplink.failure))

    def _request_clock(self) -> None:
        self._uplink.send(Clock(self._run_clock()))

    def _add_clock_sample(self, answer: ClockAnswer) -> None:
        received = self._run_clock()
        self.hub_clock.add(answer.sent, answer.there, received)
        self._clock_burst -= 1
        if self._clock_burst > 0:
            self._request_clock()

    def _handle(self, message: Message | Malformed) -> None:
        match message:
            case Malformed(kind=kind):
                self._fail(PeerFailedError(f"{self._hub_name} sent a malformed {kind!r}"))
            case Verdict(failure=failure):
                self._fail(failure.error(self._rank))
            case Notice(line=line):
                self._show_notice(line)
            case Waiting(line=line, over=over):
                with contextlib.suppress(OSError, ValueError):
                    self._callbacks.show_waiting(line, over)
            case ClockAnswer():
                self._add_clock_sample(message)
            case WorkByRank(work=work):
                self._show_work(work)
            case RankRecord(rank=rank, text=part):
                with self._changed:
                    records = self._records.setdefault(rank, deque(maxlen=_KEPT_RECORDS))
                    if part.startswith("\n") or not records:
                        records.append([])
                    records[-1].append(part)
            case Pace(slowest_s=slowest_s):
                with self._changed:
                    self._slowest_s = slowest_s
            case Prepare() | Run() | Retire() | Abort():
                self._follow(message)
            case _:
                with self._changed:
                    self._received[type(message)] = message
                    self._changed.notify_all()
                if isinstance(message, Complete):
                    self._follow(message)

    def _follow(self, message: Prepare | Run | Retire | Abort | Complete) -> None:
        """Take a step of an epoch."""
        try:
            self.turns.heard(message)
        except ValueError as error:
            self._fail(PeerFailedError(f"{self._hub_name} broke the protocol: {one_line(error)}"))

    @property
    def _or_another(self) -> str:
        return "" if self._uplink.hub_confirmed else ", or another program listens on this --port"

    def _show_notice(self, line: str) -> None:
        # A notice that cannot be shown is lost; the run does not need it.
        with contextlib.suppress(OSError, ValueError):
            self._callbacks.notify(line)

    def _show_work(self, work: Mapping[int, StageWork]) -> None:
        try:
            self._callbacks.record_stage_work(work)
        except Exception as error:  # the display must not end the run
            self._callbacks = replace(self._callbacks, record_stage_work=lambda work: None)
            self._show_notice(f"the display of the run has failed: {one_line(error)}")

    def _hub_gone(self, error: BaseException | None = None) -> PeerFailedError:
        why = f" ({error})" if isinstance(error, PeerFailedError) else ""
        return PeerFailedError(
            f"{self._hub_name} is gone: it was killed or lost its network{self._or_another}{why}"
        )

    def _fail(self, error: PipeEdgeError) -> None:
        with self._changed:
            if self._error is not None or self._leaving:
                return
            self._error = error
            abort = self._abort
            self._changed.notify_all()
        self.turns.fail(error)
        abort()
