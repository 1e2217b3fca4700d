"""What each thread of each rank was at, from when to when. Pure: times are passed in.

    rank 1, compute   |--wait input--|decode|----compute----|encode|--wait link--|...
                      0                                                          run length

Times are seconds on one clock for all ranks, 0 when the data rank begins to read. On the lane of a stage the
spans leave no gap from 0 to the end of the run: what is no work is a wait, and a wait has a cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Doing", "Span", "Timeline"]


class Doing(str, Enum):
    """What a thread is at. Work first, then waits by their cause."""

    DECODE = "decode"
    COMPUTE = "compute"
    ENCODE = "encode"
    SEND = "send"
    """A microbatch occupies the outgoing link; beside the lane of the stage, on one of its own."""
    RECEIVE = "receive"
    """The same, where it arrives."""
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    """The three of training."""
    READ = "read"
    WRITE = "write"
    """The data rank: an input is read, a result written."""
    FILL = "fill"
    """No microbatch has come yet."""
    DRAIN = "drain"
    """The last one has gone; others still work."""
    WAIT_INPUT = "wait input"
    WAIT_LINK = "wait link"
    """The outgoing link, or whatever takes the results of this thread, is full."""

    @property
    def is_wait(self) -> bool:
        """Whether nothing is done meanwhile."""
        return self in (Doing.FILL, Doing.DRAIN, Doing.WAIT_INPUT, Doing.WAIT_LINK)


@dataclass(frozen=True)
class Span:
    """One thread at one thing."""

    rank: int
    lane: str
    """Thread: ``stage 0``, ``stage 0 link``, ``feed``, ``collect``, ..."""
    doing: Doing
    start_s: float
    end_s: float
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise ValueError(f"a span ends at {self.end_s} before it starts at {self.start_s}")

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """All spans of a run, measured or simulated."""

    length_s: float
    spans: tuple[Span, ...]

    @property
    def lanes(self) -> tuple[tuple[int, str], ...]:
        """Rank and lane, in the order of their first appearance."""
        return tuple(dict.fromkeys((span.rank, span.lane) for span in self.spans))

    def seconds(self, rank: int, lane: str) -> Mapping[Doing, float]:
        """Of one lane: how long it was at what."""
        totals: dict[Doing, float] = {}
        for span in self.spans:
            if (span.rank, span.lane) == (rank, lane):
                totals[span.doing] = totals.get(span.doing, 0.0) + span.seconds
        return totals

    def to_body(self) -> dict[str, Any]:
        """As JSON has it: one list of columns per lane, times in whole microseconds."""
        lanes: dict[tuple[int, str], list[Span]] = {lane: [] for lane in self.lanes}
        for span in self.spans:
            lanes[span.rank, span.lane].append(span)
        return {
            "length_s": self.length_s,
            "lanes": [_columns(rank, lane, spans) for (rank, lane), spans in lanes.items()],
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Timeline:
        """From what ``to_body`` made.

        Raises:
            ValueError, KeyError, TypeError: it was made by something else.
        """
        spans: list[Span] = []
        for lane in body["lanes"]:
            spans += _spans(lane)
        return cls(float(body["length_s"]), tuple(spans))


_US = 1e-6


def _columns(rank: int, lane: str, spans: Sequence[Span]) -> dict[str, Any]:
    return {
        "rank": rank,
        "lane": lane,
        "doing": [span.doing.value for span in spans],
        "start_us": [round(span.start_s / _US) for span in spans],
        "end_us": [round(span.end_s / _US) for span in spans],
        "microbatch": [span.microbatch for span in spans],
    }


def _spans(lane: Mapping[str, Any]) -> Iterable[Span]:
    columns = zip(lane["doing"], lane["start_us"], lane["end_us"], lane["microbatch"], strict=True)
    for doing, start, end, microbatch in columns:
        yield Span(int(lane["rank"]), str(lane["lane"]), Doing(doing), start * _US, end * _US, microbatch)
