"""The input of a run as it is read, which outlasts a plan that is replaced by a better one."""

from __future__ import annotations

from pipeedge.base.crew import Closed, Crew
from pipeedge.data import Group, GroupStream
from pipeedge.observe.lanes import Lane
from pipeedge.observe.timeline import ThreadState

__all__ = ["RunInput"]


class RunInput:
    """The microbatches of a run from some item on, read by threads of its own.

    They do not belong to the crew of a plan: the next plan goes on with what is read already. When a plan
    fails, they stop with it.

    Args:
        stream: What is read.
    """

    def __init__(self, stream: GroupStream) -> None:
        self._stream = stream
        self._crew = Crew()
        self._started = False

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Record of each thread that reads ahead."""
        return self._stream.lanes

    @property
    def fetching(self) -> ThreadState:
        """Activity of the feeding thread without a microbatch."""
        return self._stream.fetching

    def start(self, crew: Crew) -> None:
        """Start to read, unless that was done for another plan; stop when ``crew`` is stopped."""
        crew.on_stop(self._crew.stop)
        if not self._started:
            self._started = True
            self._stream.start(self._crew)

    def fit(self, stages: int) -> None:
        """Fit a pipeline of ``stages`` from now on, which takes the place of the one before."""
        self._stream.fit(stages)

    def wait_for_room(self) -> None:
        """Wait until another microbatch may be asked for.

        Raises:
            Closed: Reading was stopped.
        """
        try:
            self._stream.wait_for_room()
        except Closed:
            self._crew.wait(0)  # raises what it was stopped for
            raise

    def wait(self) -> None:
        """Wait as long as there is nothing to take but more may come.

        Raises:
            Closed: Reading was stopped.
        """
        try:
            self._stream.wait()
        except Closed:
            self._crew.wait(0)
            raise

    def take(self) -> Group | None:
        """Return the next microbatch, or None after the last.

        Raises:
            InputError: An item cannot be read.
            Closed: Reading was stopped.
        """
        try:
            return self._stream.take()
        except Closed:
            self._crew.wait(0)
            raise
