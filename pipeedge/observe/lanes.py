"""Lanes, in which threads record what they do while they run. Pure: the clock is passed in.

    a thread ──enter, finish──> Lane ───┐
    watching ──────add────────> LinkLane┼─> Recording of a rank ──text──> data rank ──assemble──> Timeline
    a worker ─────doing───────> WorkLane┘   (on the hub's clock)                     └─series───> report

A ``Lane`` repeats the same phases for every microbatch, in the same order and without a gap, so one row
holds when a microbatch began and how long each phase took. No lock is taken, and the clock is read once per
phase. A lane keeps at most ``capacity`` rows: when there are more, neighbours are merged two by two, and each
row then stands for twice as many microbatches. Sums stay exact; only the order within a row is lost.

A ``WorkLane`` takes its operations in any order. It keeps the last ones, and exact sums of all.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from pipeedge.observe.metrics import Tally
from pipeedge.observe.records import LaneRecord, LinkRecord, Row, Transfer, Work, WorkRecord
from pipeedge.observe.timeline import LaneId, ThreadState

__all__ = [
    "AS_THEY_ARE_BITS",
    "COLLECT",
    "DEFAULT_ROWS",
    "FEED",
    "READ_AHEAD",
    "STAGE",
    "Lane",
    "LinkLane",
    "WorkLane",
]

STAGE = (
    ThreadState.WAIT_INPUT,
    ThreadState.DECODE,
    ThreadState.COMPUTE,
    ThreadState.ENCODE,
    ThreadState.WAIT_LINK,
)
FEED = (ThreadState.READ, ThreadState.WAIT_INPUT, ThreadState.IDLE, ThreadState.WAIT_LINK)
READ_AHEAD = (ThreadState.WAIT_LINK, ThreadState.READ)
COLLECT = (ThreadState.WAIT_INPUT, ThreadState.DECODE, ThreadState.WRITE)
"""Phases of a microbatch on each kind of lane, in order."""

DEFAULT_ROWS = 400
"""Number of rows that a lane keeps."""
AS_THEY_ARE_BITS = 32
"""Bits per value on a link that carries float32 without compression."""
_KEPT_WORKS = 20_000
"""Number of operations that a ``WorkLane`` keeps."""


class Lane:
    """A thread with the same phases for every microbatch. It alone writes; any thread may ask for ``totals``.

    Args:
        lane: Identity of the thread.
        phases: Phases of a microbatch, in order.
        clock: Clock in seconds.
        capacity: Number of rows to keep.
        observer: Called by the thread with the row of each microbatch and its note.
    """

    def __init__(
        self,
        lane: LaneId,
        phases: Sequence[ThreadState],
        clock: Callable[[], float],
        capacity: int = DEFAULT_ROWS,
        observer: Callable[[Row, float], None] | None = None,
    ) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"a lane keeps an even number of rows, not {capacity}")
        self.lane = lane
        self.phases = tuple(phases)
        self.fill_s = 0.0
        """Seconds spent waiting before the first microbatch."""
        self.microbatches = 0
        self._clock = clock
        self._capacity = capacity
        self._observer = observer
        self._rows: list[Row] = []
        self._pending: Row | None = None
        self._stride = 1
        self._places = {phase: place for place, phase in enumerate(self.phases)}
        # Phase, its start, and the seconds of each phase before it. Both tuple and list are replaced as a
        # whole, so that other threads see a consistent state.
        self._state = (0, 0.0, [0.0] * len(self.phases))
        self._began_at = 0.0
        self._finished = self._state[2]
        """Seconds of each phase when the last microbatch was finished."""
        self._counted: tuple[int, list[float]] = (0, self._finished)
        """Items of those finished microbatches that count, and their seconds; replaced as a whole."""

    def begin(self) -> None:
        """Begin with the first phase."""
        self._began_at = self._clock()
        self._state = (0, self._began_at, self._state[2])

    def enter(self, phase: ThreadState) -> float:
        """Begin ``phase`` and return the time."""
        now = self._clock()
        place, since, totals = self._state
        totals = totals.copy()
        totals[place] += now - since
        self._state = (self._places[phase], now, totals)
        return now

    def finish(
        self,
        number: int,
        items: int,
        size: int = 0,
        bits: float = AS_THEY_ARE_BITS,
        note: float = 0.0,
        *,
        counts: bool = True,
    ) -> float:
        """Finish a microbatch; return the time.

        Args:
            number: Number of the microbatch.
            items: Number of its items.
            size: Bytes that it put on the link.
            bits: Bits of each value there.
            note: Number for the observer: bytes received or right answers, depending on the lane.
            counts: Whether ``finished`` is to count it.
        """
        now = self.enter(self.phases[0])
        totals = self._state[2]
        seconds = tuple(map(operator.sub, totals, self._finished))
        start = now - sum(seconds)
        if not self.microbatches and self.phases[0].is_wait:
            self.fill_s = seconds[0]
            start += seconds[0]
            seconds = (0.0, *seconds[1:])
        if counts:
            counted, spent = self._counted
            since = zip(spent, totals, self._finished, strict=True)
            self._counted = counted + items, [before + now - then for before, now, then in since]
        self._finished = totals
        self.microbatches += 1
        row = Row(number, 1, items, size, bits, start, seconds)
        if self._observer is not None:
            self._observer(row, note)
        self._keep(row)
        return now

    @property
    def observed(self) -> bool:
        """Whether an observer hears of each microbatch."""
        return self._observer is not None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Finished microbatches, in order."""
        return (*self._rows, *([self._pending] if self._pending is not None else []))

    @property
    def run_s(self) -> float:
        """Seconds from the beginning to the end of the last microbatch."""
        return sum(self._finished)

    def tally(self, phase: ThreadState) -> Tally:
        """Return how often and how long the lane was in ``phase``, up to the last finished microbatch."""
        return Tally(self.microbatches, self._finished[self._places[phase]])

    def finished(self) -> tuple[int, dict[ThreadState, float]]:
        """Return the items of all finished microbatches that count, and the seconds of each of their phases.

        Any thread may ask.
        """
        items, seconds = self._counted
        return items, dict(zip(self.phases, seconds, strict=True))

    def totals(self) -> dict[ThreadState, float]:
        """Return the seconds of each phase until now, including the current one."""
        place, since, totals = self._state
        if not self._began_at:
            return dict.fromkeys(self.phases, 0.0)
        spent = dict(zip(self.phases, totals, strict=True))
        spent[self.phases[place]] += max(0.0, self._clock() - since)
        return spent

    def record(self, hub_clock: Callable[[float], float]) -> LaneRecord:
        """Return the record of this lane, on the hub's clock."""
        rows = tuple(
            replace(
                row,
                bits=round(row.bits, 3),
                start_s=_rounded(hub_clock(row.start_s)),
                seconds=tuple(map(_rounded, row.seconds)),
            )
            for row in self.rows
        )
        return LaneRecord(self.lane, self.phases, _rounded(self.fill_s), rows)

    def _keep(self, row: Row) -> None:
        if self._pending is not None:
            row = self._pending.with_next(row)
        if row.microbatches < self._stride:
            self._pending = row
            return
        self._pending = None
        self._rows.append(row)
        if len(self._rows) == self._capacity:
            self._rows = [a.with_next(b) for a, b in zip(self._rows[::2], self._rows[1::2], strict=True)]
            self._stride *= 2


class LinkLane:
    """Transfers on a link, as far as they were watched. When there are too many, every other one is dropped.

    Args:
        lane: Identity of the link.
        destination: Rank at the other end.
        capacity: Number of transfers to keep.
        observer: Called with bytes, start and end of each transfer.
    """

    def __init__(
        self,
        lane: LaneId,
        destination: int | None,
        capacity: int = DEFAULT_ROWS,
        observer: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self.lane = lane
        self._observer = observer
        self._destination = destination
        self._capacity = capacity
        self._transfers: list[Transfer] = []
        self._stride = 1
        self._seen = 0

    def add(self, number: int, size: int, start_s: float, end_s: float) -> None:
        """Add a transfer: ``size`` bytes occupied the link."""
        if self._observer is not None:
            self._observer(size, start_s, end_s)
        if self._seen % self._stride == 0:
            self._transfers.append(Transfer(number, size, start_s, end_s))
            if len(self._transfers) == self._capacity:
                self._transfers = self._transfers[::2]
                self._stride *= 2
        self._seen += 1

    @property
    def wants_all(self) -> bool:
        """Whether to watch every transfer, even short ones of which a sample would do."""
        return self._observer is not None

    def record(self, hub_clock: Callable[[float], float]) -> LinkRecord:
        """Return the record of this link, on the hub's clock."""
        transfers = tuple(
            replace(one, start_s=_rounded(hub_clock(one.start_s)), end_s=_rounded(hub_clock(one.end_s)))
            for one in self._transfers
        )
        return LinkRecord(self.lane, self._destination, transfers)


class WorkLane:
    """A thread that takes its operations in any order, such as a worker in training.

        |-fill-|F0|F1|--wait input--|B0|F2|B1|...|update|-fill-|F0|...

    An operation is noted when it ends; the time between two operations is a wait: ``fill`` after ``refill``,
    else ``wait input``.

    Args:
        clock: Clock in seconds.
        capacity: Number of operations to keep.
    """

    def __init__(self, clock: Callable[[], float], capacity: int = _KEPT_WORKS) -> None:
        self._clock = clock
        self._works: deque[Work] = deque(maxlen=capacity)
        self._seconds: dict[tuple[int, ThreadState], float] = {}
        self._begun_s = 0.0
        self._until_s = 0.0
        self._wait = ThreadState.FILL
        self._noted = 0

    def begin(self) -> None:
        """Begin the run: waiting counts from now on."""
        self._begun_s = self._until_s = self._clock()

    def refill(self) -> None:
        """Note that the pipeline is empty: it fills until the next operation."""
        self._wait = ThreadState.FILL

    @contextmanager
    def doing(self, what: ThreadState, stage: int, microbatch: int | None = None) -> Iterator[None]:
        """Note the body as operation ``what`` of ``stage``."""
        start = self._clock()
        yield
        end = self._clock()
        if start > self._until_s:
            self._note(Work(self._wait, self._until_s, start))
        self._note(Work(what, start, end, microbatch))
        self._seconds[stage, what] = self._seconds.get((stage, what), 0.0) + end - start
        self._until_s = end
        self._wait = ThreadState.WAIT_INPUT

    def record(self, lane: LaneId, hub_clock: Callable[[float], float]) -> WorkRecord:
        """Return the record of this lane, on the hub's clock.

        Args:
            lane: Identity of the thread.
            hub_clock: Converts times to the hub's clock.
        """
        works = (
            replace(one, start_s=_rounded(hub_clock(one.start_s)), end_s=_rounded(hub_clock(one.end_s)))
            for one in self._works
        )
        return WorkRecord(
            lane,
            begun_s=hub_clock(self._begun_s),
            until_s=hub_clock(self._until_s),
            works=tuple(works),
            seconds=tuple((stage, doing, spent) for (stage, doing), spent in sorted(self._seconds.items())),
            is_complete=self._noted == len(self._works),
        )

    def _note(self, work: Work) -> None:
        self._works.append(work)
        self._noted += 1


def _rounded(seconds: float) -> float:
    """Return ``seconds`` to the microsecond, which also keeps messages short."""
    return round(seconds, 6)
