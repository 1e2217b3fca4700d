"""Records of a training: the operations of each worker's thread, and the losses of batches. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from pipeedge.base import fields
from pipeedge.base.fields import Amount, Count, Number, Positive
from pipeedge.observe.assembly import assemble
from pipeedge.observe.records import Recording, WorkRecord
from pipeedge.observe.timeline import Timeline

__all__ = ["BatchResult", "WorkerFigures", "WorkerRecord", "to_timeline"]


class BatchResult(Struct, frozen=True, array_like=True):
    """Result of a batch, from the last stage."""

    step: Count
    loss: float | None
    """Mean over the batch, or None if it is not finite."""
    end_s: Number
    """Time at which its last microbatch was done."""


class WorkerFigures(Struct, frozen=True):
    """Figures of one worker for the report."""

    peak_rss_mb: Amount = 0.0
    """Peak memory in MB of 2^20 bytes."""
    rss_before_mb: Amount = 0.0
    """Memory before the first batch, in MB of 2^20 bytes."""
    steps: Count | None = None
    """Number of batches, or None if the worker did not finish them."""
    accuracy: tuple[Count, Positive] | None = None
    """Number of held-out items classified correctly and of all of them, on the worker with the last stage."""


class WorkerRecord(Struct, frozen=True):
    """Record of one worker. Times are those of the hub's clock."""

    recording: Recording
    """Operations of the computing thread, as one ``WorkRecord``."""
    batches: tuple[BatchResult, ...] = ()
    """Results of batches, on the worker with the last stage."""
    figures: WorkerFigures = WorkerFigures()

    @property
    def work(self) -> WorkRecord:
        """Operations of the computing thread."""
        return self.recording.works[0]

    def __post_init__(self) -> None:
        if len(self.recording.works) != 1:
            raise ValueError(f"{len(self.recording.works)} computing threads of a worker")

    def to_text(self) -> str:
        """Return the record as a message."""
        return fields.encode(self).decode()

    @classmethod
    def from_text(cls, rank: int, text: str) -> WorkerRecord:
        """Parse the message of ``rank``. Raises one of ``fields.MALFORMED`` if it is malformed."""
        found: WorkerRecord = fields.decode(text, cls)
        found.recording.check_sender(rank)
        return found


def to_timeline(records: Mapping[int, WorkerRecord]) -> Timeline:
    """Return what the workers did, from the first to the last moment that all of them kept."""
    works = [record.work for record in records.values()]
    kept = [work.works[0].start_s for work in works if work.works]
    first = min if all(work.is_complete for work in works) else max
    begin = first(kept, default=0.0)
    end = max((work.until_s for work in works), default=begin)
    return assemble([record.recording for record in records.values()], begin, max(0.0, end - begin))
