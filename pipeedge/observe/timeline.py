"""Activities of each thread of each rank, with their start and end. Pure: times are passed in.

    rank 1, compute   |--wait input--|decode|----compute----|encode|--wait link--|...
                      0                                                          run length

Times are seconds on one clock for all ranks, 0 when the data rank begins to read. On the lane of a stage,
spans leave no gap from 0 to the end of the run: a thread either works or waits, and every wait has a cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipeedge.base.fields import Count

__all__ = [
    "ThreadState",
    "LaneId",
    "LaneKind",
    "Span",
    "Timeline",
    "lane_of_epoch",
    "split_epoch",
    "stages_label",
]


class ThreadState(StrEnum):
    """An activity of a thread: first kinds of work, then waits by their cause."""

    DECODE = "decode"
    COMPUTE = "compute"
    ENCODE = "encode"
    SEND = "send"
    """A microbatch occupies the outgoing link, which has a lane of its own."""
    RECEIVE = "receive"
    """A microbatch occupies the link, as seen by the receiving rank."""
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    """Forward pass, backward pass and update of the weights in training."""
    READ = "read"
    WRITE = "write"
    """Reading an input and writing a result, on the data rank."""
    FILL = "fill"
    """The wait for the first microbatch."""
    DRAIN = "drain"
    """The wait after the last microbatch, while other ranks still work."""
    RECOVER = "recover"
    """The wait for a new plan, and for its layers, after a failure."""
    IDLE = "idle"
    """The wait for a request, while there is nothing to feed."""
    WAIT_INPUT = "wait input"
    WAIT_LINK = "wait link"
    """The wait for room on the outgoing link, or in the queue that takes the results of this thread."""

    @property
    def is_wait(self) -> bool:
        """Whether the thread waits during this activity."""
        return self in _WAITS


_WAITS = frozenset(
    {
        ThreadState.FILL,
        ThreadState.DRAIN,
        ThreadState.RECOVER,
        ThreadState.IDLE,
        ThreadState.WAIT_INPUT,
        ThreadState.WAIT_LINK,
    }
)


class LaneKind(StrEnum):
    """A kind of thread or link."""

    FEED = "feed"
    READ = "read"
    COLLECT = "collect"
    STAGE = "stage"
    LINK = "link"
    """The outgoing link of a stage, or of the feeder."""


@dataclass(frozen=True)
class LaneId:
    """Identity of a lane on its rank. Validated on creation.

    Raises:
        ValueError: A stage without a number, or numbers that the kind does not have.
    """

    kind: LaneKind
    stages: tuple[Count, ...] = ()
    """Stages that the thread computes, or the one that sends on the link; none for a link of the feeder."""
    thread: Count | None = None
    """Number of the thread, for kinds that have several."""

    def __post_init__(self) -> None:
        most = {LaneKind.STAGE: _MAX_STAGES, LaneKind.LINK: 1}.get(self.kind, 0)
        if not int(self.kind is LaneKind.STAGE) <= len(self.stages) <= most:
            raise ValueError(f"a lane of kind {self.kind.value} with {len(self.stages)} stages")
        if (self.thread is not None) != (self.kind is LaneKind.READ):
            raise ValueError(f"a lane of kind {self.kind.value} with thread {self.thread}")

    @classmethod
    def stage(cls, *stages: int) -> LaneId:
        """Return the lane of the thread that computes ``stages``."""
        return cls(LaneKind.STAGE, stages)

    @classmethod
    def link(cls, stage: int | None = None) -> LaneId:
        """Return the outgoing link of ``stage``, or of the feeder."""
        return cls(LaneKind.LINK, () if stage is None else (stage,))

    @property
    def label(self) -> str:
        """Name for people: ``stage 3``, ``stages 0-3``, ``stage 3 link``, ``read 1``, ``feed``."""
        if self.kind is LaneKind.STAGE:
            return stages_label(self.stages)
        if self.kind is LaneKind.LINK:
            return f"{stages_label(self.stages) if self.stages else LaneKind.FEED.value} link"
        return self.kind.value if self.thread is None else f"{self.kind.value} {self.thread}"


def stages_label(stages: Sequence[int]) -> str:
    """Return ``stage 3``, ``stages 0-3`` or ``stages 0, 2``."""
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if len(stages) == stages[-1] - stages[0] + 1:
        return f"stages {stages[0]}-{stages[-1]}"
    return f"stages {', '.join(map(str, stages))}"


_OF_EPOCH = re.compile(r"epoch \d+, ")


def lane_of_epoch(epoch: int, label: str) -> str:
    """Return the label of a lane in an epoch that has ended: ``epoch 1, stage 3``."""
    return f"epoch {epoch}, {label}"


def split_epoch(label: str) -> tuple[str, str]:
    """Split ``epoch 1, stage 3`` into ``epoch 1, `` and ``stage 3``; the first is empty for other labels."""
    found = _OF_EPOCH.match(label)
    return ("", label) if found is None else (found[0], label[found.end() :])


@dataclass(frozen=True)
class Span:
    """One activity of one thread."""

    rank: int
    lane: str
    """Label of the lane, as pages and traces show it: see ``LaneId.label``."""
    doing: ThreadState
    start_s: float
    end_s: float
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise ValueError(f"a span ends at {self.end_s} before it starts at {self.start_s}")

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
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

    def seconds(self, rank: int, lane: str) -> Mapping[ThreadState, float]:
        """Return the seconds that one lane spent on each activity."""
        totals: dict[ThreadState, float] = {}
        for span in self.spans:
            if (span.rank, span.lane) == (rank, lane):
                totals[span.doing] = totals.get(span.doing, 0.0) + span.seconds
        return totals

    def to_body(self) -> dict[str, Any]:
        """Return the timeline for JSON: one list of columns per lane, times in whole microseconds."""
        lanes: dict[tuple[int, str], list[Span]] = {lane: [] for lane in self.lanes}
        for span in self.spans:
            lanes[span.rank, span.lane].append(span)
        return {
            "length_s": self.length_s,
            "lanes": [_columns(rank, lane, spans) for (rank, lane), spans in lanes.items()],
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Timeline:
        """Parse the output of ``to_body``.

        Raises:
            ValueError, KeyError, TypeError: It is malformed.
        """
        spans: list[Span] = []
        for lane in body["lanes"]:
            spans += _spans(lane)
        return cls(float(body["length_s"]), tuple(spans))


_US = 1e-6
_MAX_STAGES = 1024


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
        yield Span(
            int(lane["rank"]), str(lane["lane"]), ThreadState(doing), start * _US, end * _US, microbatch
        )
