"""What a worker was at: spans and sums, written by its computing thread. Pure: the clock is passed in.

    worker   |-fill-|F0|F1|--wait input--|B0|F2|B1|...|update|-fill-|F0|...

Work is noted when it ends; what lies between two works is a wait: ``fill`` before the first microbatch of a
batch, else ``wait input``. The last spans are kept, the sums are of all.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipeedge.base import fields
from pipeedge.observe.timeline import Doing, Span, Timeline

__all__ = ["BatchResult", "WorkerLane", "WorkerRecord", "lane_name", "to_timeline"]

_KEPT_SPANS = 20_000
_KEPT_BATCHES = 20_000
_US = 1e-6


@dataclass(frozen=True)
class BatchResult:
    """What the last stage knows of a batch."""

    step: int
    loss: float
    """Mean over the batch."""
    end_s: float
    """When its last microbatch was through."""


@dataclass(frozen=True)
class _Work:
    doing: Doing
    start_s: float
    end_s: float
    microbatch: int | None


class WorkerLane:
    """One worker's thread.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._works: deque[_Work] = deque(maxlen=_KEPT_SPANS)
        self._batches: deque[BatchResult] = deque(maxlen=_KEPT_BATCHES)
        self._seconds: dict[tuple[int, Doing], float] = {}
        self._begun_s = 0.0
        self._until_s = 0.0
        self._wait = Doing.FILL

    def begin(self) -> None:
        """The run begins; waiting counts from now on."""
        self._begun_s = self._until_s = self._clock()

    def batch(self) -> None:
        """A batch begins: until its first microbatch comes, the pipeline fills."""
        self._wait = Doing.FILL

    @contextmanager
    def doing(self, what: Doing, stage: int, microbatch: int | None = None) -> Iterator[None]:
        """The thread is at ``what``, for ``stage``."""
        start = self._clock()
        yield
        end = self._clock()
        if start > self._until_s:
            self._works.append(_Work(self._wait, self._until_s, start, None))
        self._works.append(_Work(what, start, end, microbatch))
        self._seconds[stage, what] = self._seconds.get((stage, what), 0.0) + end - start
        self._until_s = end
        self._wait = Doing.WAIT_INPUT

    def result(self, step: int, loss: float) -> BatchResult:
        """The last stage is through with a batch."""
        result = BatchResult(step, loss, self._clock())
        self._batches.append(result)
        return result

    def record(self, clock: Callable[[float], float]) -> WorkerRecord:
        """All of it, on the clock of the hub."""
        return WorkerRecord(
            begun_s=clock(self._begun_s),
            until_s=clock(self._until_s),
            works=[(w.doing.value, clock(w.start_s), clock(w.end_s), w.microbatch) for w in self._works],
            batches=[(b.step, b.loss, clock(b.end_s)) for b in self._batches],
            seconds=[(stage, doing.value, s) for (stage, doing), s in sorted(self._seconds.items())],
        )


@dataclass(frozen=True)
class WorkerRecord:
    """A worker's run. Times are of the hub's clock."""

    begun_s: float
    until_s: float
    works: Sequence[tuple[str, float, float, int | None]] = ()
    """What, from, to, which microbatch."""
    batches: Sequence[tuple[int, float, float]] = ()
    """Step, loss, end; of the worker with the last stage."""
    seconds: Sequence[tuple[int, str, float]] = ()
    """Stage, what, how long in all."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """``peak_rss_mb``, ``correct``, ..."""

    def to_text(self) -> str:
        """As JSON, times in whole microseconds; losses that are no numbers as null."""
        works = [(doing, _us(start), _us(end), number) for doing, start, end, number in self.works]
        batches = [
            (step, loss if abs(loss) < float("inf") else None, end) for step, loss, end in self.batches
        ]
        body = {"begun_s": self.begun_s, "until_s": self.until_s, "works": works, "batches": batches}
        return json.dumps({**body, "seconds": list(self.seconds), "extra": dict(self.extra)}, allow_nan=False)

    @classmethod
    def from_text(cls, text: str) -> WorkerRecord:
        """Parse what ``to_text`` made. Raises one of ``fields.MALFORMED`` if it is malformed."""
        body = fields.parse(text)
        works = [
            (
                Doing(doing).value,
                fields.number(start) * _US,
                fields.number(end) * _US,
                None if number is None else fields.whole_number(number),
            )
            for doing, start, end, number in body["works"]
        ]
        batches = [
            (fields.whole_number(step), math.nan if loss is None else fields.number(loss), fields.number(end))
            for step, loss, end in body["batches"]
        ]
        seconds = [
            (fields.whole_number(stage), Doing(doing).value, fields.nonnegative(spent))
            for stage, doing, spent in body["seconds"]
        ]
        return cls(
            fields.number(body["begun_s"]),
            fields.number(body["until_s"]),
            works,
            batches,
            seconds,
            fields.plain(body["extra"]),
        )

    @property
    def work_s(self) -> float:
        """That it was not waiting."""
        return sum(seconds for _, _, seconds in self.seconds)


def lane_name(stages: Sequence[int]) -> str:
    """``stage 3``, ``stages 0-3`` or ``stages 0, 2``."""
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if len(stages) == stages[-1] - stages[0] + 1:
        return f"stages {stages[0]}-{stages[-1]}"
    return f"stages {', '.join(map(str, stages))}"


def to_timeline(records: Mapping[int, WorkerRecord], lanes: Mapping[int, str]) -> Timeline:
    """What the workers were at, from the first to the last of what was kept by all of them.

    Args:
        records: by rank.
        lanes: the name of each rank's lane.
    """
    kept = [record.works[0][1] for record in records.values() if record.works]
    begin = max(kept, default=0.0) if any(_overflown(r) for r in records.values()) else min(kept, default=0.0)
    end = max((record.until_s for record in records.values()), default=begin)
    spans = []
    for rank, record in sorted(records.items()):
        for doing, start, stop, number in record.works:
            if start >= begin:
                spans.append(_span(rank, lanes[rank], doing, start - begin, stop - begin, number))
        if record.until_s < end and record.works:
            spans.append(
                _span(rank, lanes[rank], Doing.DRAIN.value, record.until_s - begin, end - begin, None)
            )
    return Timeline(end - begin, tuple(spans))


def _overflown(record: WorkerRecord) -> bool:
    return len(record.works) == _KEPT_SPANS


def _span(rank: int, lane: str, doing: str, start: float, end: float, number: int | None) -> Span:
    return Span(rank, lane, Doing(doing), max(0.0, start), max(start, end, 0.0), number)


def _us(seconds: float) -> int:
    return round(seconds / _US)
