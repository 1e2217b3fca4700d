"""Present activity of the threads of a rank, for its heartbeats."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

from pipeedge.control.liveness import Loading, RankStatus
from pipeedge.observe.metrics import StageWork, TextWork

__all__ = ["Activity", "Load"]

_Value = TypeVar("_Value")

_RECENT = 9
"""Number of microbatches whose median is the time of one."""


class _Noted(Generic[_Value]):
    """A value that is in a table while the body of a ``with`` statement runs."""

    __slots__ = ("_table", "_value")

    def __init__(self, table: dict[object, _Value], value: _Value) -> None:
        self._table = table
        self._value = value

    def __enter__(self) -> None:
        self._table[self] = self._value

    def __exit__(self, *_: object) -> None:
        del self._table[self]


class Load:
    """Progress of something that a rank loads.

    Args:
        what: Description for the user, such as ``loading layers 7-10``.
        total: Number of bytes in all; 0 for a few; None if that is unknown, so that it may take any time.
    """

    def __init__(self, what: str, total: int | None) -> None:
        self._what = what
        self._total = total
        self._loaded = 0

    def advance(self, size: int) -> None:
        """Add ``size`` loaded bytes; called by one thread."""
        self._loaded += size

    def status(self) -> Loading:
        """Return the progress of this moment."""
        return Loading(self._what, self._loaded, self._total)


class Activity:
    """Current activity of a rank's threads, for its heartbeats.

    What a thread does changes several times a microbatch, so that it is kept in tables that need no lock: an
    entry is added, removed, or copied with all others in one step.

    What a rank does for one plan is a part of it: while the plan changes, there are two.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy: dict[object, tuple[str, float]] = {}
        self._awaiting: dict[object, int] = {}
        self._loads: tuple[Load, ...] = ()
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._finished = 0
        self._computed: deque[float] = deque(maxlen=_RECENT)
        self._work: Callable[[], StageWork] | None = None
        self._is_idle: Callable[[], bool] = lambda: False
        self._lengths: Callable[[], str | None] = lambda: None
        self._text: Callable[[], TextWork | None] = lambda: None
        self._parts: tuple[Activity, ...] = ()

    def part(self) -> Activity:
        """Return an activity that is a part of this one until it is dropped."""
        part = Activity(self._clock)
        with self._lock:
            self._parts = (*self._parts, part)
        return part

    def drop(self, part: Activity) -> None:
        """Forget a part, whose threads must have ended."""
        with self._lock:
            self._parts = tuple(each for each in self._parts if each is not part)

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Mark this thread as busy with ``what``, not waiting for a peer, while the body runs."""
        return _Noted(self._busy, (what, self._clock()))

    def awaiting(self, peer: int) -> AbstractContextManager[None]:
        """Mark this thread as waiting for a microbatch from ``peer`` while the body runs."""
        return _Noted(self._awaiting, peer)

    @contextmanager
    def loading(self, what: str, total: int | None) -> Iterator[Load]:
        """Mark this rank as loading ``what`` while the body runs, and yield where to note the progress.

        Rank 0 does not wait for ever for a load without progress (``pipeedge.control.load_deadline``).
        """
        load = Load(what, total)
        with self._lock:
            self._loads = (*self._loads, load)
        try:
            yield load
        finally:
            with self._lock:
                self._loads = tuple(each for each in self._loads if each is not load)

    def sent(self, peer: int) -> None:
        """Count a microbatch, or the end mark, that is handed to the link to ``peer``."""
        with self._lock:
            self._sent[peer] = self._sent.get(peer, 0) + 1

    def received(self, peer: int) -> None:
        """Count a microbatch, or the end mark, that was received from ``peer``."""
        with self._lock:
            self._received[peer] = self._received.get(peer, 0) + 1

    def finished(self) -> None:
        """Record that a piece of work is done, even if nothing is sent as a result."""
        with self._lock:
            self._finished += 1

    def computed(self, seconds: float) -> None:
        """Record the seconds that the stage spent decoding, computing and encoding one microbatch."""
        with self._lock:
            self._computed.append(seconds)

    def stage(self, work: Callable[[], StageWork]) -> None:
        """Set the function that reports how this rank's stage spends its time."""
        with self._lock:
            self._work = work

    def feeder(
        self,
        is_idle: Callable[[], bool],
        lengths: Callable[[], str | None],
        text: Callable[[], TextWork | None],
    ) -> None:
        """Set the functions that say what is known of the input.

        Args:
            is_idle: Tells whether the pipeline is empty and its input may go on later.
            lengths: Returns the histogram of the lengths of the sentences that have come lately, or None.
            text: Returns what is known of the steps that continue texts; None if there are none.
        """
        self._is_idle = is_idle
        self._lengths = lengths
        self._text = text

    def status(self) -> RankStatus:
        """Return the activity of this moment, with that of all parts."""
        parts = self._parts
        return _together(self._status(), *(part.status() for part in parts)) if parts else self._status()

    def _status(self) -> RankStatus:
        # Asked first: an item that ends the idle time is counted as progress before it is over.
        idle = self._is_idle()
        busy = min(tuple(self._busy.values()), key=lambda entry: entry[1], default=None)
        with self._lock:
            return RankStatus(
                busy=(busy[0], self._clock() - busy[1]) if busy else None,
                sent=dict(self._sent),
                received=dict(self._received),
                awaiting=frozenset(tuple(self._awaiting.values())),
                stage_s=statistics.median(self._computed) if self._computed else None,
                work=self._work() if self._work is not None else None,
                finished=self._finished,
                idle=idle,
                loading=self._loads[0].status() if self._loads else None,
                lengths=self._lengths(),
                text=self._text(),
            )


def _together(*statuses: RankStatus) -> RankStatus:
    """Return one status for several; where there can be but one value, the last that has one counts."""
    sent, received = Counter[int](), Counter[int]()
    for status in statuses:
        sent.update(status.sent)
        received.update(status.received)
    return RankStatus(
        busy=max((one.busy for one in statuses if one.busy), key=lambda busy: busy[1], default=None),
        sent=dict(sent),
        received=dict(received),
        awaiting=frozenset().union(*(one.awaiting for one in statuses)),
        stage_s=next((one.stage_s for one in reversed(statuses) if one.stage_s is not None), None),
        work=next((one.work for one in reversed(statuses) if one.work is not None), None),
        finished=sum(one.finished for one in statuses),
        idle=any(one.idle for one in statuses),
        loading=next((one.loading for one in statuses if one.loading is not None), None),
        lengths=next((one.lengths for one in reversed(statuses) if one.lengths is not None), None),
        text=next((one.text for one in reversed(statuses) if one.text is not None), None),
    )
