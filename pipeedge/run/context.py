"""Objects that one rank has from the beginning of its run to the end, whatever its part in the plan."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pipeedge.base.crew import Crew, Threads
from pipeedge.base.errors import DeadlineError
from pipeedge.control.liveness import Limits, StageWork
from pipeedge.models import Model
from pipeedge.observe.records import ReplanRecord
from pipeedge.request.config import RunRequest
from pipeedge.run.activity import Activity
from pipeedge.transport.base import Endpoint, Transport
from pipeedge.transport.place import Place

if TYPE_CHECKING:  # only the data rank needs them
    from rich.console import Console

    from pipeedge.data import DataEnds
    from pipeedge.observe.live import Display
    from pipeedge.observe.pipeline_state import PipelineState

__all__ = [
    "PATIENCE_S",
    "DisplayFeed",
    "OpenEnds",
    "RankContext",
    "Transports",
    "WaitingShown",
    "aborted_on_failure",
]

_Value = TypeVar("_Value")

OpenEnds: TypeAlias = "Callable[[RunRequest, Model], DataEnds]"

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
        """Abort all that are open."""
        for transport in tuple(self._made):
            transport.abort()


@dataclass(frozen=True)
class RankContext:
    """One rank of one run: its request, and what its phases and threads share."""

    request: RunRequest
    model: Model
    open_console: Callable[[], Console]
    """Opens the console where the data rank prints its table."""
    warn: Callable[[str], None]
    """Takes a line for the user that ends nothing; called from any thread."""
    transports: Transports
    transport: Transport
    """Transport of the plan that this is for."""
    open_ends: OpenEnds | None = None
    """Opens input and results on the data rank; None if they are the files of the request."""
    begins: Callable[[], None] = lambda: None
    """Called on rank 0 once there is a plan."""
    activity: Activity = field(default_factory=Activity)
    threads: Threads = field(default_factory=Threads)
    """Starts the threads that do the work."""
    crew: Crew = field(default_factory=Crew)
    display_feed: DisplayFeed = field(default_factory=DisplayFeed)
    replans: list[ReplanRecord] = field(default_factory=list)
    """Better plans that rank 0 has found."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.request.world.rank

    def for_epoch(self) -> RankContext:
        """Return the same rank with a crew, links and counters of its own for an epoch."""
        return replace(
            self,
            crew=Crew(self.threads),
            transport=self.transports.new(),
            activity=self.activity.part(),
        )

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

    def wait_for_value(self, name: str, make: Callable[[], _Value]) -> _Value:
        """Return what ``make`` does in a separate thread, unless the run fails first.

        A dead disk blocks the thread that reads from it for ever, and this rank must end.

        Args:
            name: Name of the thread.
            make: Makes the value.

        Raises:
            BaseException: What ``make`` raises, or the reason why the run has failed meanwhile.
        """
        made: list[_Value] = []
        self.wait_in_thread(name, lambda: made.append(make()))
        return made[0]

    def wait_in_thread(self, name: str, wait: Callable[[], None], too_long: str | None = None) -> None:
        """Call ``wait``, which waits for peers, in a separate thread, and return when it has.

        When one of the peers dies, torch may go on waiting, but this rank must end.

        Args:
            name: Name of the thread.
            wait: Waits for peers.
            too_long: Message for when it takes longer than a dead link may, or None if it may take as long as
                the peers live.

        Raises:
            DeadlineError: It took too long.
        """
        try:
            self.crew.start(name, wait)
        except RuntimeError:  # Python ends, and starts no thread any more
            wait()
            return
        limit_s = Limits.within(self.request.world.timeout_s).stall_s if too_long is not None else None
        if not self.crew.wait(limit_s):
            raise DeadlineError(f"{too_long} ({limit_s:.1f} s)")


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
