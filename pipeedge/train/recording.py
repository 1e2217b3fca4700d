"""What a worker recorded of a training: the operations of its thread, and the losses of batches. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeedge.base import fields
from pipeedge.observe.assembly import assemble
from pipeedge.observe.records import Recording, WorkRecord
from pipeedge.observe.timeline import Timeline

__all__ = ["BatchResult", "WorkerRecord", "to_timeline"]


@dataclass(frozen=True)
class BatchResult:
    """What the last stage knows of a batch."""

    step: int
    loss: float
    """Mean over the batch."""
    end_s: float
    """Time at which its last microbatch was done."""


@dataclass(frozen=True)
class WorkerRecord:
    """The run of one worker. Times are the hub's."""

    recording: Recording
    """Operations of the computing thread, as one ``WorkRecord``."""
    batches: Sequence[BatchResult] = ()
    """Results of batches, on the worker with the last stage."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """``peak_rss_mb``, ``correct``, ..."""

    @property
    def work(self) -> WorkRecord:
        """Operations of the computing thread."""
        return self.recording.works[0]

    def to_text(self) -> str:
        """Return the record as a message; a loss that is not finite becomes null."""
        batches = [
            (one.step, one.loss if math.isfinite(one.loss) else None, one.end_s) for one in self.batches
        ]
        body = {"recording": self.recording.to_body(), "batches": batches, "extra": dict(self.extra)}
        return json.dumps(body, allow_nan=False)

    @classmethod
    def from_text(cls, rank: int, text: str) -> WorkerRecord:
        """Parse the message of ``rank``. Raises one of ``fields.MALFORMED`` if it is malformed."""
        body = fields.parse(text)
        batches = []
        for step, said, end in body["batches"]:
            loss = math.nan if said is None else fields.number(said)
            batches.append(BatchResult(fields.whole_number(step), loss, fields.number(end)))
        recording = Recording.from_body(rank, body["recording"])
        if len(recording.works) != 1:
            raise ValueError(f"{len(recording.works)} computing threads of a worker")
        return cls(recording, tuple(batches), fields.plain(body["extra"]))


def to_timeline(records: Mapping[int, WorkerRecord]) -> Timeline:
    """Return what the workers did, from the first to the last moment that all of them kept."""
    works = [record.work for record in records.values()]
    kept = [work.works[0].start_s for work in works if work.works]
    first = min if all(work.is_complete for work in works) else max
    begin = first(kept, default=0.0)
    end = max((work.until_s for work in works), default=begin)
    return assemble([record.recording for record in records.values()], begin, max(0.0, end - begin))
