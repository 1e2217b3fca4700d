"""What the threads of a rank were at: recorded while they run, put together when they have ended. Pure.

    a thread ──enter, finish──> Lane ───┐
    watching ──────add────────> Link ───┼─> Recording of a rank ──text──> data rank ──assemble──> Timeline
                                        │   (on the hub's clock)                     └─window────> series
    energy, host ───────────────────────┘

A lane does the same few things for every microbatch, in the same order and without a gap, so one row
holds when a microbatch began and how long each thing took. No lock is taken and the clock is read once for
each thing. A lane keeps at most ``capacity`` rows: when there are more, neighbours are merged two by two,
and each row from then on stands for twice as many microbatches. Sums stay exact; within a row, only the
order of what was done is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeedge.base import fields
from pipeedge.compress.policies import Decided
from pipeedge.observe.metrics import NOT_MEASURED, EnergyUse, Tally
from pipeedge.observe.timeline import Doing, Span, Timeline

__all__ = [
    "AS_THEY_ARE_BITS",
    "FEED",
    "READ_AHEAD",
    "COLLECT",
    "STAGE",
    "DEFAULT_ROWS",
    "Lane",
    "LaneRecord",
    "LinkLane",
    "LinkRecord",
    "Recording",
    "Row",
    "Transfer",
    "assemble",
    "series",
]

STAGE = (Doing.WAIT_INPUT, Doing.DECODE, Doing.COMPUTE, Doing.ENCODE, Doing.WAIT_LINK)
FEED = (Doing.READ, Doing.WAIT_INPUT, Doing.WAIT_LINK)
READ_AHEAD = (Doing.WAIT_LINK, Doing.READ)
COLLECT = (Doing.WAIT_INPUT, Doing.DECODE, Doing.WRITE)
"""What the lanes do for a microbatch, in order."""

DEFAULT_ROWS = 400
"""Of a lane."""

_POINTS = 200
"""Of a series."""
AS_THEY_ARE_BITS = 32
"""On a link whose values are float32 and not compressed."""


@dataclass(frozen=True)
class Row:
    """A microbatch, or several in a row, on one lane."""

    number: int
    """Of the first of them."""
    microbatches: int
    items: int
    bytes: int
    """That they put on the outgoing link."""
    bits: float
    """Bits a value, summed over the microbatches."""
    start_s: float
    seconds: tuple[float, ...]
    """Of each thing that the lane does, in its order."""

    @property
    def end_s(self) -> float:
        """When the last of it was done."""
        return self.start_s + sum(self.seconds)

    def with_next(self, other: Row) -> Row:
        """Both in one; ``other`` follows."""
        return Row(
            self.number,
            self.microbatches + other.microbatches,
            self.items + other.items,
            self.bytes + other.bytes,
            self.bits + other.bits,
            self.start_s,
            tuple(mine + its for mine, its in zip(self.seconds, other.seconds, strict=True)),
        )

    def to_list(self) -> list[float]:
        """As JSON has it, times in whole microseconds."""
        head = [self.number, self.microbatches, self.items, self.bytes, round(self.bits, 3)]
        return [*head, _us(self.start_s), *map(_us, self.seconds)]

    @classmethod
    def from_list(cls, values: Sequence[float], phases: int) -> Row:
        """Parse what ``to_list`` made. Raises one of ``fields.MALFORMED`` if it is malformed."""
        head, (bits, start), seconds = (
            values[:4],
            values[4:6],
            [fields.nonnegative(one) for one in values[6:]],
        )
        number, microbatches, items, size = (fields.whole_number(one) for one in head)
        if len(seconds) != phases or microbatches < 1:
            raise ValueError("a row does not fit its lane")
        times = tuple(value * _US for value in seconds)
        return cls(number, microbatches, items, size, fields.number(bits), fields.number(start) * _US, times)


class Lane:
    """One thread, microbatch by microbatch. Written by that thread alone; ``totals`` may be asked by any.

    Args:
        name: as in ``Span.lane``.
        phases: what it does for a microbatch, in order.
        clock: seconds.
        capacity: rows that are kept.
        observer: called by the thread with the row of each microbatch, and what was noted of it.
    """

    def __init__(
        self,
        name: str,
        phases: Sequence[Doing],
        clock: Callable[[], float],
        capacity: int = DEFAULT_ROWS,
        observer: Callable[[Row, float], None] | None = None,
    ) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"a lane keeps an even number of rows, not {capacity}")
        self.name = name
        self.phases = tuple(phases)
        self.fill_s = 0.0
        """That the lane waited before its first microbatch."""
        self.microbatches = 0
        self._clock = clock
        self._capacity = capacity
        self._observer = observer
        self._rows: list[Row] = []
        self._pending: Row | None = None
        self._stride = 1
        self._places = {phase: place for place, phase in enumerate(self.phases)}
        # One tuple, replaced whole, so that whoever reads it while it is written sees one or the other:
        # what the lane is at, since when, and the seconds of each thing before that.
        self._state = (0, 0.0, (0.0,) * len(self.phases))
        self._began_at = 0.0
        self._finished = self._state[2]
        """Seconds of each thing when the last microbatch was finished."""

    def begin(self) -> None:
        """The thread begins with what it does first."""
        self._began_at = self._clock()
        self._state = (0, self._began_at, self._state[2])

    def enter(self, phase: Doing) -> float:
        """From now on the lane is at ``phase``; the time."""
        now = self._clock()
        place, since, totals = self._state
        spent = totals[place] + now - since
        self._state = (self._places[phase], now, (*totals[:place], spent, *totals[place + 1 :]))
        return now

    def finish(
        self, number: int, items: int, size: int = 0, bits: float = AS_THEY_ARE_BITS, note: float = 0.0
    ) -> float:
        """A microbatch is done, and ``size`` bytes of ``bits`` bits a value are on the link; the time.

        ``note`` is for the observer: bytes that came, right answers, as the lane has it.
        """
        now = self.enter(self.phases[0])
        totals = self._state[2]
        seconds = tuple(after - before for after, before in zip(totals, self._finished, strict=True))
        start = now - sum(seconds)
        if not self.microbatches and self.phases[0].is_wait:
            self.fill_s = seconds[0]
            start += seconds[0]
            seconds = (0.0, *seconds[1:])
        self._finished = totals
        self.microbatches += 1
        row = Row(number, 1, items, size, bits, start, seconds)
        if self._observer is not None:
            self._observer(row, note)
        self._keep(row)
        return now

    @property
    def observed(self) -> bool:
        """Whether somebody wants to hear of each microbatch."""
        return self._observer is not None

    @property
    def rows(self) -> tuple[Row, ...]:
        """All that is done, in order."""
        return (*self._rows, *([self._pending] if self._pending is not None else []))

    @property
    def run_s(self) -> float:
        """From the beginning to the end of the last microbatch."""
        return sum(self._finished)

    def tally(self, phase: Doing) -> Tally:
        """How often and how long the lane was at ``phase``, up to the last microbatch that is done."""
        return Tally(self.microbatches, self._finished[self._places[phase]])

    def totals(self) -> dict[Doing, float]:
        """Seconds of each thing until now, that which is under way included."""
        place, since, totals = self._state
        if not self._began_at:
            return dict.fromkeys(self.phases, 0.0)
        spent = dict(zip(self.phases, totals, strict=True))
        spent[self.phases[place]] += max(0.0, self._clock() - since)
        return spent

    def record(self, hub_clock: Callable[[float], float]) -> LaneRecord:
        """What is to be told of it, on the hub's clock."""
        rows = tuple(replace(row, start_s=hub_clock(row.start_s)) for row in self.rows)
        return LaneRecord(self.name, self.phases, self.fill_s, rows)

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


@dataclass(frozen=True)
class Transfer:
    """A microbatch on a link."""

    number: int
    bytes: int
    start_s: float
    end_s: float


class LinkLane:
    """Microbatches on a link, as far as they were watched. When there are too many, every other is kept.

    Args:
        name: as in ``Span.lane``.
        destination: the rank at its other end.
        capacity: transfers that are kept.
        observer: called with bytes, start and end of each transfer.
    """

    def __init__(
        self,
        name: str,
        destination: int | None,
        capacity: int = DEFAULT_ROWS,
        observer: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self.name = name
        self._observer = observer
        self._destination = destination
        self._capacity = capacity
        self._transfers: list[Transfer] = []
        self._stride = 1
        self._seen = 0

    def add(self, number: int, size: int, start_s: float, end_s: float) -> None:
        """``size`` bytes occupied the link."""
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
        """Whether every transfer is to be watched, not only a sample where they are short."""
        return self._observer is not None

    def record(self, hub_clock: Callable[[float], float]) -> LinkRecord:
        """What is to be told of it, on the hub's clock."""
        transfers = tuple(
            replace(one, start_s=hub_clock(one.start_s), end_s=hub_clock(one.end_s))
            for one in self._transfers
        )
        return LinkRecord(self.name, self._destination, transfers)


@dataclass(frozen=True)
class LaneRecord:
    """A lane that has ended."""

    name: str
    phases: tuple[Doing, ...]
    fill_s: float
    rows: tuple[Row, ...]

    def to_body(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "name": self.name,
            "phases": [phase.value for phase in self.phases],
            "fill_us": _us(self.fill_s),
            "rows": [row.to_list() for row in self.rows],
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> LaneRecord:
        """Parse what ``to_body`` made. Raises one of ``fields.MALFORMED`` if it is malformed."""
        phases = tuple(Doing(phase) for phase in body["phases"])
        rows = tuple(Row.from_list(row, len(phases)) for row in body["rows"])
        name = fields.text(body["name"], _MAX_NAME)
        if phases == STAGE and not re.fullmatch(r"stage [0-9]{1,9}", name):
            raise ValueError("the lane of a stage without its number")
        return cls(name, phases, fields.number(body["fill_us"]) * _US, rows)


@dataclass(frozen=True)
class LinkRecord:
    """A link over which nothing more goes."""

    name: str
    destination: int | None
    transfers: tuple[Transfer, ...]

    def to_body(self) -> dict[str, Any]:
        """As JSON has it."""
        rows = [[one.number, one.bytes, _us(one.start_s), _us(one.end_s)] for one in self.transfers]
        return {"name": self.name, "destination": self.destination, "rows": rows}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> LinkRecord:
        """Parse what ``to_body`` made. Raises one of ``fields.MALFORMED`` if it is malformed."""
        transfers = []
        for row in body["rows"]:
            number, size, start, end = map(fields.number, row)
            transfers.append(Transfer(int(number), int(size), start * _US, max(start, end) * _US))
        destination = body["destination"]
        return cls(
            fields.text(body["name"], _MAX_NAME),
            None if destination is None else fields.whole_number(destination),
            tuple(transfers),
        )


@dataclass(frozen=True)
class Recording:
    """All that one rank tells of a run that has ended. Times are the hub's."""

    rank: int
    host: str
    lanes: tuple[LaneRecord, ...]
    links: tuple[LinkRecord, ...] = ()
    clock_error_s: float | None = None
    """How far its times can be from the hub's; None where it was not measured."""
    decided: tuple[Decided, ...] = ()
    """What bits the outgoing link of its stage was to carry, where they follow the bandwidth."""
    energy: EnergyUse = NOT_MEASURED
    """What its machine used meanwhile."""

    def to_text(self) -> str:
        """As it travels."""
        body = {
            "host": self.host,
            "lanes": [lane.to_body() for lane in self.lanes],
            "links": [link.to_body() for link in self.links],
            "clock_error_s": self.clock_error_s,
            "decided": [one.to_body() for one in self.decided],
            "energy": self.energy.to_body(),
        }
        return json.dumps(body, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_text(cls, rank: int, text: str) -> Recording:
        """From what ``to_text`` made of ``rank``.

        Raises:
            One of ``fields.MALFORMED``: it was made by something else.
        """
        body = fields.parse(text)
        error = body["clock_error_s"]
        return cls(
            rank=rank,
            host=fields.text(body["host"], _MAX_NAME),
            lanes=tuple(LaneRecord.from_body(lane) for lane in body["lanes"]),
            links=tuple(LinkRecord.from_body(link) for link in body["links"]),
            clock_error_s=None if error is None else fields.number(error),
            decided=tuple(Decided.from_body(one) for one in body["decided"]),
            energy=EnergyUse.from_body(body["energy"]),
        )

    def lane(self, name: str) -> LaneRecord | None:
        """The lane called ``name``."""
        return next((lane for lane in self.lanes if lane.name == name), None)


def assemble(recordings: Sequence[Recording], began_s: float, length_s: float) -> Timeline:
    """The run, from ``began_s`` on the hub's clock, for ``length_s`` seconds.

    Every lane reaches from 0 to the end without a gap: before its first microbatch it waits for the
    pipeline to fill, after its last one for the others to be done.
    """
    spans: list[Span] = []
    for recording in sorted(recordings, key=lambda one: one.rank):
        for lane in recording.lanes:
            spans += _lane_spans(recording.rank, lane, began_s, length_s)
        for link in recording.links:
            spans += _link_spans(recording.rank, link, began_s, length_s)
    return Timeline(length_s, tuple(spans))


def _lane_spans(rank: int, lane: LaneRecord, began_s: float, length_s: float) -> Iterator[Span]:
    at = 0.0

    def until(end_s: float, doing: Doing, microbatch: int | None = None) -> Iterator[Span]:
        # Each span begins where the one before it ended: clocks that drift leave no gap.
        nonlocal at
        end_s = min(end_s, length_s)
        if end_s > at:
            yield Span(rank, lane.name, doing, at, end_s, microbatch)
            at = end_s

    if lane.rows and lane.phases[0].is_wait:
        yield from until(lane.rows[0].start_s - began_s, Doing.FILL)
    for row in lane.rows:
        end = row.start_s - began_s
        for phase, seconds in zip(lane.phases, row.seconds, strict=True):
            end += seconds
            if seconds > 0:
                yield from until(end, phase, row.number)
    yield from until(length_s, Doing.DRAIN)


def _link_spans(rank: int, link: LinkRecord, began_s: float, length_s: float) -> Iterator[Span]:
    for one in link.transfers:
        start, end = max(0.0, one.start_s - began_s), min(length_s, one.end_s - began_s)
        if end > start:
            yield Span(rank, link.name, Doing.SEND, start, end, one.number)


def series(
    recordings: Sequence[Recording], began_s: float, *, window: int = 1, points: int = _POINTS
) -> list[dict[str, Any]]:
    """How fast each stage went over time, and its outgoing link.

    Args:
        recordings: of all ranks.
        began_s: when the run began, on the hub's clock.
        window: microbatches of a point at least.
        points: at most.

    Returns:
        For each stage columns of equal length: ``t_s`` (end of each window), ``items_per_s``,
        ``bytes_per_s`` (put on the link), ``link_bytes_per_s`` (while it was occupied; None where nothing
        was watched) and ``bits`` (mean; 32 for float32 as it is). Where the bits follow the bandwidth, also
        ``decided``: ``microbatch``, ``time_s``, ``bits`` (0: as they are), ``bytes_per_s``, ``reason`` of
        each decision.
    """
    found = []
    for recording in recordings:
        links = {link.name: link for link in recording.links}
        for lane in recording.lanes:
            if lane.phases != STAGE or not lane.rows:
                continue
            link = links.get(f"{lane.name} link")
            columns = _columns(lane.rows, link.transfers if link else (), began_s, window, points)
            decided = [replace(one, time_s=one.time_s - began_s).to_body() for one in recording.decided]
            found.append(
                {
                    "stage": int(lane.name.split()[1]),
                    "rank": recording.rank,
                    **columns,
                    **({"decided": decided} if decided else {}),
                }
            )
    return sorted(found, key=lambda one: int(one["stage"]))


def _columns(
    rows: Sequence[Row], transfers: Sequence[Transfer], began_s: float, window: int, points: int
) -> dict[str, list[float | None]]:
    columns: dict[str, list[float | None]] = {
        name: [] for name in ("t_s", "items_per_s", "bytes_per_s", "link_bytes_per_s", "bits")
    }
    since = rows[0].start_s
    for group in _groups(rows, window, points):
        whole = group[0]
        for row in group[1:]:
            whole = whole.with_next(row)
        until = group[-1].end_s
        length = max(until - since, _US)
        watched = [one for one in transfers if since <= one.end_s < until]
        busy = sum(one.end_s - one.start_s for one in watched)
        columns["t_s"].append(round(until - began_s, 6))
        columns["items_per_s"].append(_figure(whole.items / length))
        columns["bytes_per_s"].append(_figure(whole.bytes / length))
        columns["link_bytes_per_s"].append(
            _figure(sum(one.bytes for one in watched) / busy) if busy else None
        )
        columns["bits"].append(_figure(whole.bits / whole.microbatches))
        since = until
    return columns


def _groups(rows: Sequence[Row], window: int, points: int) -> Iterator[Sequence[Row]]:
    """Rows in groups of at least ``window`` microbatches, and not more than ``points`` groups."""
    size = max(1, -(-window // rows[0].microbatches), -(-len(rows) // points))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


_US = 1e-6
_MAX_NAME = 200


def _us(seconds: float) -> int:
    return round(seconds / _US)


def _figure(value: float) -> float:
    """Six digits are more than any measurement has."""
    return float(f"{value:.6g}")
