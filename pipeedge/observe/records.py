"""What was recorded of a run, as plain data that travels between ranks. Pure.

A record is made of a lane when its thread has ended; times are converted to the clock of the hub. A lane is
known by its ``LaneId``: what kind of thread it was and which stages it served.

    LaneRecord   a thread that repeats the same phases for every microbatch: rows
    LinkRecord   a link: transfers
    WorkRecord   a thread that takes its operations in any order: works
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeedge.base import fields
from pipeedge.compress.policies import Decided
from pipeedge.observe.metrics import NOT_MEASURED, EnergyUse
from pipeedge.observe.timeline import Doing, LaneId

__all__ = ["LaneRecord", "LinkRecord", "Recording", "Row", "Transfer", "Work", "WorkRecord"]

_US = 1e-6
_MAX_NAME = 200


@dataclass(frozen=True)
class Row:
    """One microbatch on a lane, or several consecutive ones."""

    number: int
    """Number of the first microbatch."""
    microbatches: int
    items: int
    bytes: int
    """Bytes that the microbatches put on the outgoing link."""
    bits: float
    """Bits per value, summed over the microbatches."""
    start_s: float
    seconds: tuple[float, ...]
    """Seconds of each phase, in the order of the lane's phases."""

    @property
    def end_s(self) -> float:
        """Time at which the last phase ended."""
        return self.start_s + sum(self.seconds)

    def with_next(self, other: Row) -> Row:
        """Return one row for this one and ``other``, which follows it."""
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
        """Return plain data for JSON, with times in whole microseconds."""
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


@dataclass(frozen=True)
class Transfer:
    """One microbatch on a link."""

    number: int
    bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Work:
    """One operation of a thread, or a wait before it."""

    doing: Doing
    start_s: float
    end_s: float
    microbatch: int | None = None


@dataclass(frozen=True)
class LaneRecord:
    """A thread that has ended, with the same phases for every microbatch."""

    lane: LaneId
    phases: tuple[Doing, ...]
    """Phases of a microbatch, in order."""
    fill_s: float
    """Seconds spent waiting before the first microbatch."""
    rows: tuple[Row, ...]

    def to_body(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "lane": self.lane.to_body(),
            "phases": [phase.value for phase in self.phases],
            "fill_us": _us(self.fill_s),
            "rows": [row.to_list() for row in self.rows],
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> LaneRecord:
        """Parse what ``to_body`` made. Raises one of ``fields.MALFORMED`` if it is malformed."""
        phases = tuple(Doing(phase) for phase in body["phases"])
        rows = tuple(Row.from_list(row, len(phases)) for row in body["rows"])
        return cls(LaneId.from_body(body["lane"]), phases, fields.number(body["fill_us"]) * _US, rows)


@dataclass(frozen=True)
class LinkRecord:
    """A link that carries nothing any more."""

    lane: LaneId
    destination: int | None
    """Rank at the other end."""
    transfers: tuple[Transfer, ...]

    def to_body(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        rows = [[one.number, one.bytes, _us(one.start_s), _us(one.end_s)] for one in self.transfers]
        return {"lane": self.lane.to_body(), "destination": self.destination, "rows": rows}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> LinkRecord:
        """Parse what ``to_body`` made. Raises one of ``fields.MALFORMED`` if it is malformed."""
        transfers = []
        for row in body["rows"]:
            number, size, start, end = map(fields.number, row)
            transfers.append(Transfer(int(number), int(size), start * _US, max(start, end) * _US))
        destination = body["destination"]
        return cls(
            LaneId.from_body(body["lane"]),
            None if destination is None else fields.whole_number(destination),
            tuple(transfers),
        )


@dataclass(frozen=True)
class WorkRecord:
    """A thread that has ended and took its operations in any order."""

    lane: LaneId
    begun_s: float
    until_s: float
    """End of the last operation."""
    works: tuple[Work, ...] = ()
    """The last operations and the waits between them."""
    seconds: tuple[tuple[int, Doing, float], ...] = ()
    """Stage, operation and its seconds, summed over the whole run."""
    is_complete: bool = True
    """Whether ``works`` holds everything; if not, earlier operations were dropped."""

    @property
    def work_s(self) -> float:
        """Seconds spent working, not waiting."""
        return sum(seconds for _, _, seconds in self.seconds)

    def to_body(self) -> dict[str, Any]:
        """Return plain data for JSON, with the times of operations in whole microseconds."""
        return {
            "lane": self.lane.to_body(),
            "begun_s": self.begun_s,
            "until_s": self.until_s,
            "works": [
                [one.doing.value, _us(one.start_s), _us(one.end_s), one.microbatch] for one in self.works
            ],
            "seconds": [[stage, doing.value, spent] for stage, doing, spent in self.seconds],
            "is_complete": self.is_complete,
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> WorkRecord:
        """Parse what ``to_body`` made. Raises one of ``fields.MALFORMED`` if it is malformed."""
        works = tuple(
            Work(
                Doing(doing),
                fields.number(start) * _US,
                fields.number(end) * _US,
                None if number is None else fields.whole_number(number),
            )
            for doing, start, end, number in body["works"]
        )
        seconds = tuple(
            (fields.whole_number(stage), Doing(doing), fields.nonnegative(spent))
            for stage, doing, spent in body["seconds"]
        )
        return cls(
            LaneId.from_body(body["lane"]),
            fields.number(body["begun_s"]),
            fields.number(body["until_s"]),
            works,
            seconds,
            fields.flag(body["is_complete"]),
        )


@dataclass(frozen=True)
class Recording:
    """Everything that one rank recorded of a run. Times are the hub's."""

    rank: int
    host: str
    lanes: tuple[LaneRecord, ...] = ()
    links: tuple[LinkRecord, ...] = ()
    works: tuple[WorkRecord, ...] = ()
    clock_error_s: float | None = None
    """Bound on the difference between this rank's times and the hub's, or None if it was not measured."""
    decided: tuple[Decided, ...] = ()
    """Decisions on the bits of the outgoing link, if they follow the bandwidth."""
    energy: EnergyUse = NOT_MEASURED
    """Energy that the machine used meanwhile."""

    def to_body(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "host": self.host,
            "lanes": [lane.to_body() for lane in self.lanes],
            "links": [link.to_body() for link in self.links],
            "works": [work.to_body() for work in self.works],
            "clock_error_s": self.clock_error_s,
            "decided": [one.to_body() for one in self.decided],
            "energy": self.energy.to_body(),
        }

    @classmethod
    def from_body(cls, rank: int, body: Mapping[str, Any]) -> Recording:
        """Parse what ``to_body`` made for ``rank``. Raises one of ``fields.MALFORMED`` if it is malformed."""
        error = body["clock_error_s"]
        return cls(
            rank=rank,
            host=fields.text(body["host"], _MAX_NAME),
            lanes=tuple(LaneRecord.from_body(lane) for lane in body["lanes"]),
            links=tuple(LinkRecord.from_body(link) for link in body["links"]),
            works=tuple(WorkRecord.from_body(work) for work in body["works"]),
            clock_error_s=None if error is None else fields.number(error),
            decided=tuple(Decided.from_body(one) for one in body["decided"]),
            energy=EnergyUse.from_body(body["energy"]),
        )

    def to_text(self) -> str:
        """Return the recording as a message."""
        return json.dumps(self.to_body(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_text(cls, rank: int, text: str) -> Recording:
        """Parse the message of ``rank``. Raises one of ``fields.MALFORMED`` if it is malformed."""
        return cls.from_body(rank, fields.parse(text))


def _us(seconds: float) -> int:
    return round(seconds / _US)
