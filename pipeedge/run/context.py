"""Objects that one rank has for a whole run, whatever its part in the plan, and for one epoch of it.

RankContext ─┬─ Program     the program it runs in: console, warnings, threads
             └─ Transports  one for each plan in which it has a part
EpochContext ── one plan of the run, with a crew, a transport and counters of its own
Prepared     ── what a rank has opened before it hears of the others
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from pipeedge.base.crew import Crew, Threads
from pipeedge.base.errors import DeadlineError
from pipeedge.control.liveness import Limits
from pipeedge.control.messages import Prepare
from pipeedge.models import Model
from pipeedge.models.decoder import DecoderModel
from pipeedge.observe.metrics import StageWork
from pipeedge.observe.monitoring import Exporter
from pipeedge.observe.records import HostsAsRun, ReplanRecord
from pipeedge.plan.planning import Plan
from pipeedge.request.config import RunRequest
from pipeedge.run.activity import Activity
from pipeedge.run.priority import DataThread, thread_that_gives_way
from pipeedge.transport.base import Endpoint, Transport
from pipeedge.transport.place import Place

if TYPE_CHECKING:  # only the data rank needs them
    from rich.console import Console

    from pipeedge.data import DataEnds
    from pipeedge.observe.live import Display
    from pipeedge.observe.pipeline_state import PipelineState
    from pipeedge.run.progress import DataProgress

__all__ = [
    "PATIENCE_S",
    "DisplayFeed",
    "EpochContext",
    "Transports",
    "OpenEnds",
    "Prepared",
    "Program",
    "RankContext",
    "WaitingShown",
    "aborted_on_failure",
]

_Value = TypeVar("_Value")

OpenEnds: TypeAlias = "Callable[[RunRequest, Model | DecoderModel], DataEnds]"

PATIENCE_S = 2.0
"""Seconds after which a person at a terminal is told what takes so long."""


class WaitingShown:
    """Tells the user for which ranks this one waits: that it does, and when they have come.

    Args:
        warn: Takes a line for the user.
        every_change: Whether to tell of each rank that comes meanwhile, as to a person at a terminal.
    """

    def __init__(self, warn: Callable[[str], None], *, every_change: bool) -> None:
        self._warn = warn
        self._every_change = every_change
        self._waits = False

    def __call__(self, line: str, over: bool) -> None:
        """Show a line, if it is to be shown; ``over`` if it says that the wait is over."""
        is_shown = self._waits if over else self._every_change or not self._waits
        self._waits = not over
        if is_shown:
            self._warn(line)


class DisplayFeed:
    """Passes how the stages spend their time to the display, while there is one."""

    def __init__(self) -> None:
        self._display: Display | PipelineState | None = None

    def __call__(self, work: Mapping[int, StageWork]) -> None:
        """Show the ``work`` of the stages, by rank; called by the member's thread."""
        display = self._display
        if display is not None:
            display.heard(work)

    @contextmanager
    def to(self, display: Display | PipelineState) -> Iterator[None]:
        """Feed ``display`` while the body runs."""
        self._display = display
        try:
            yield
        finally:
            self._display = None


class Transports:
    """The transports of a rank: one for each plan in which it has a part at the same time.

    Args:
        endpoint: Endpoint of this rank, which makes them.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._made: list[Transport] = []

    def listen(self, address: str) -> Place | None:
        """Listen for other ranks at an address of this machine; return where, if they need to know."""
        return self._endpoint.listen(address)

    def stop_listening(self) -> None:
        """Listen no longer; links that are open stay so."""
        self._endpoint.close()

    def new(self) -> Transport:
        """Return a transport that is not open yet."""
        transport = self._endpoint.transport()
        self._made.append(transport)
        return transport

    def abort(self) -> None:
        """Abort all transports that are open."""
        for transport in tuple(self._made):
            transport.abort()


@dataclass(frozen=True)
class Program:
    """Services of the program that a rank runs in."""

    open_console: Callable[[], Console]
    """Opens the console where the data rank prints its table."""
    warn: Callable[[str], None]
    """Takes a line for the user that ends nothing; called from any thread."""
    open_ends: OpenEnds | None = None
    """Opens input and results on the data rank; None if they are the files of the request."""
    begins: Callable[[], None] = lambda: None
    """Called on rank 0 once there is a plan."""
    threads: Threads = field(default_factory=Threads)
    """Starts the threads that do the work."""


@dataclass
class Watched:
    """What rank 0 has found by watching the run."""

    replans: list[ReplanRecord] = field(default_factory=list)
    """Better plans."""
    as_run: HostsAsRun | None = None
    """What hosts were like; None as long as nothing is known."""


@dataclass(frozen=True)
class RankContext:
    """One rank of one run, from the beginning to the end, whatever its part in the plan."""

    request: RunRequest
    model: Model | DecoderModel
    program: Program
    transports: Transports
    crew: Crew = field(default_factory=Crew)
    """Threads that do not belong to an epoch."""
    activity: Activity = field(default_factory=Activity)
    display_feed: DisplayFeed = field(default_factory=DisplayFeed)
    watched: Watched = field(default_factory=Watched)
    """What rank 0 has found by watching the run."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.request.world.rank

    @property
    def encoder(self) -> Model:
        """The model, where only an encoder can be. Raises TypeError for a decoder."""
        if not isinstance(self.model, Model):
            raise TypeError(f"{self.model.name} is not an encoder")
        return self.model

    def warn(self, line: str) -> None:
        """Tell the user a line that ends nothing; called from any thread."""
        self.program.warn(line)

    def for_epoch(self, order: Prepare, plan: Plan, *, is_change: bool) -> EpochContext:
        """Return this rank in an epoch, with a crew, links and counters of its own."""
        crew, transport = Crew(self.program.threads), self.transports.new()
        return EpochContext(self, order, plan, is_change, crew, transport, self.activity.part())

    def say_waiting(self, line: str) -> None:
        """Tell a person at a terminal why nothing happens here."""
        if sys.stderr.isatty():
            self.warn(line)

    @contextmanager
    def patience(self, what: str) -> Iterator[None]:
        """Say ``what`` this rank does, at a terminal, if it takes more than a moment."""
        timer = threading.Timer(PATIENCE_S, self.say_waiting, (what,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def wait_in_thread(
        self, crew: Crew, name: str, work: Callable[[], _Value], too_long: str | None = None
    ) -> _Value:
        """Return what ``work``, which may block, does in a separate thread, unless the run fails first.

        A dead disk blocks the thread that reads from it for ever, and when a peer dies, torch may go on
        waiting. But this rank must end.

        Args:
            crew: Crew of the thread.
            name: Name of the thread.
            work: Reads, or waits for peers.
            too_long: Message for when it takes longer than a dead link may, or None if it may take as long as
                the peers live.

        Raises:
            DeadlineError: It took too long.
            BaseException: What ``work`` raises, or the reason why the run has failed meanwhile.
        """
        done: list[_Value] = []
        try:
            crew.start(name, lambda: done.append(work()))
        except RuntimeError:  # Python ends, and starts no thread any more
            return work()
        limit_s = Limits.within(self.request.world.timeout_s).stall_s if too_long is not None else None
        if not crew.wait(limit_s):
            raise DeadlineError(f"{too_long} ({limit_s:.1f} s)")
        return done[0]


@dataclass(frozen=True)
class EpochContext:
    """One rank in one epoch: the plan, and what only this epoch uses."""

    rank: RankContext
    order: Prepare
    """Message of the hub that has begun it."""
    plan: Plan
    is_change: bool
    """Whether it is prepared beside an epoch that runs."""
    crew: Crew
    """Threads of the epoch."""
    transport: Transport
    activity: Activity

    @property
    def number(self) -> int:
        """Number of the epoch."""
        return self.order.epoch

    def gives_way(self, thread: DataThread) -> bool:
        """Return whether this thread of this rank lets the others go first."""
        plan = self.plan
        if not isinstance(self.rank.model, DecoderModel) or self.rank.rank != plan.data_rank:
            return False
        return thread_that_gives_way(plan.schedule, plan.data_rank) == thread

    def wait_for_links(self, interface: str, connect: Callable[[], _Value]) -> _Value:
        """Return what ``connect`` does, which waits for other ranks.

        Raises:
            PeerError: The links do not open.
        """
        me = self.rank.rank
        peers = ", ".join(str(rank) for rank in self.plan.participants if rank != me)
        with self.activity.busy("connecting to its peers"):
            return self.rank.wait_in_thread(
                self.crew,
                "connect",
                connect,
                f"the links of rank {me} to {peers} over {interface} do not open: is there a firewall "
                "between them, or another interface to choose with -s?",
            )


@dataclass(frozen=True)
class Prepared:
    """Everything that a rank opens and states before it hears of the others."""

    device: torch.device
    interface: str
    """Network interface of the links."""
    exporter: Exporter | None
    """Server of the metrics, or None."""
    data: DataEnds | None
    """Input and results of the run, on the data rank."""
    facts: dict[str, Any]
    """Options of this rank, for comparison with the others."""
    progress: DataProgress | None = None
    """Progress through the input, on the data rank."""
    place: Place | None = None
    """Place at which this rank listens for others, if they need to find it."""


@contextmanager
def aborted_on_failure(transports: Transports) -> Iterator[None]:
    """Abort the links if the body fails.

    The body must have reported the failure: peers may take lost links for the loss of this rank.
    """
    try:
        yield
    except BaseException:
        transports.abort()
        raise
