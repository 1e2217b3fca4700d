"""Records of a run, as plain data that travels between ranks. Pure.

A record is made of a lane when its thread has ended; times are converted to the clock of the hub, and rounded
to microseconds. A lane is known by its ``LaneId``: what kind of thread it was and which stages it served.

    LaneRecord   a thread that repeats the same phases for every microbatch: rows
    LinkRecord   a link: transfers
    WorkRecord   a thread that takes its operations in any order: works
    EpochRecord  a plan of a run that went on after failures
    ReplanRecord a better plan that was found meanwhile
"""

from __future__ import annotations

import operator

from msgspec import Struct

from pipeedge.base import fields
from pipeedge.base.fields import Amount, Count, LongLine, Name, Number, Positive
from pipeedge.base.schedule import Schedule
from pipeedge.compress.policies import Decided
from pipeedge.observe.metrics import NOT_MEASURED, EnergyUse
from pipeedge.observe.timeline import LaneId, ThreadState

__all__ = [
    "EpochRecord",
    "HostsAsRun",
    "LaneRecord",
    "LinkRecord",
    "Recording",
    "ReplanRecord",
    "Row",
    "Transfer",
    "Work",
    "WorkRecord",
]


class Row(Struct, frozen=True, array_like=True):
    """One microbatch on a lane, or several consecutive ones."""

    number: Count
    """Number of the first microbatch."""
    microbatches: Positive
    items: Count
    bytes: Count
    """Bytes that the microbatches put on the outgoing link."""
    bits: Number
    """Bits per value, summed over the microbatches."""
    start_s: Number
    seconds: tuple[Amount, ...]
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
            tuple(map(operator.add, self.seconds, other.seconds)),
        )


class Transfer(Struct, frozen=True, array_like=True):
    """One microbatch on a link."""

    number: Count
    bytes: Count
    start_s: Number
    end_s: Number


class Work(Struct, frozen=True, array_like=True):
    """One operation of a thread, or a wait before it."""

    doing: ThreadState
    start_s: Number
    end_s: Number
    microbatch: Count | None = None


class EpochRecord(Struct, frozen=True):
    """One epoch of a run: a plan, from its start to a failure or to the end of the run.

    The seconds that a failure costs are those until the first new result::

        failure known ──waiting_s──> plan known ──preparing_s──> all start ──filling_s──> new result
    """

    number: Positive
    schedule: Schedule
    started_s: Number
    """Time at which all its ranks started, in seconds from the beginning of the run."""
    cause: LongLine = ""
    """Reason why the epoch before it ended; empty for the first epoch."""
    lost: tuple[Count, ...] = ()
    """Ranks that were lost since the epoch before it began."""
    waiting_s: Amount = 0.0
    """Seconds from hearing of the failure until the new plan arrived. All zero for the first epoch."""
    preparing_s: Amount = 0.0
    """Seconds from the arrival of the plan until all its ranks had loaded their layers and started."""
    filling_s: Amount = 0.0
    """Seconds from the start until the first result that is new."""
    repeated: Count = 0
    """Number of microbatches that had been fed before the failure and were computed again."""
    items: Count = 0
    """Number of items whose results came in this epoch."""
    predicted_items_per_s: Amount | None = None
    """Throughput that was predicted of its plan once the pipeline is full, or None without a prediction."""
    steady_items_per_s: Amount | None = None
    """Throughput from its first result to its last, or None for a single microbatch."""

    @property
    def failed_s(self) -> float:
        """Time at which the failure before it was known, in seconds from the beginning of the run."""
        return max(0.0, self.started_s - self.waiting_s - self.preparing_s)

    @property
    def recovered(self) -> bool:
        """Whether all ranks stopped for it, instead of changing to it while they went on."""
        return self.waiting_s + self.preparing_s > 0

    @property
    def lost_s(self) -> float:
        """Seconds without a new result."""
        return self.waiting_s + self.preparing_s + self.filling_s


class ReplanRecord(Struct, frozen=True):
    """A better plan that was found while the run went on."""

    at_s: Number
    """Time at which it was found."""
    why: LongLine
    """Change that led to the decision."""
    schedule: Schedule
    gain: Number
    """Predicted gain in throughput, as a fraction."""
    outcome: Name = "reported"
    """``reported``, ``switched``, or why it was dropped."""
    microbatch: Count | None = None
    """Number of the first microbatch with the plan, or None if the run did not change to it."""
    seconds: Amount | None = None
    """Seconds from asking for the change until the plan took over, or None."""
    measured_gain: Number | None = None
    """Gain in throughput that was measured, or None if it was not."""


class HostsAsRun(Struct, frozen=True):
    """What hosts were like while the last plan of a run was watched."""

    slowness: dict[Name, Amount]
    """Time that the layers of each host took, as a multiple of what its profile says, by host."""
    items_per_s: Amount | None
    """Items a second, or tokens of the planned texts, that the plan has on such hosts; None if unknown."""


class LaneRecord(Struct, frozen=True):
    """A thread that has ended, with the same phases for every microbatch."""

    lane: LaneId
    phases: tuple[ThreadState, ...]
    """Phases of a microbatch, in order."""
    fill_s: Number
    """Seconds spent waiting before the first microbatch."""
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if any(len(row.seconds) != len(self.phases) for row in self.rows):
            raise ValueError("a row does not fit its lane")


class LinkRecord(Struct, frozen=True):
    """A link that carries nothing any more."""

    lane: LaneId
    destination: Count | None
    """Rank at the other end."""
    transfers: tuple[Transfer, ...]

    def __post_init__(self) -> None:
        if any(one.end_s < one.start_s for one in self.transfers):
            raise ValueError("a transfer ends before it starts")


class WorkRecord(Struct, frozen=True):
    """A thread that has ended and took its operations in any order."""

    lane: LaneId
    begun_s: Number
    until_s: Number
    """End of the last operation."""
    works: tuple[Work, ...] = ()
    """The last operations and the waits between them."""
    seconds: tuple[tuple[Count, ThreadState, Amount], ...] = ()
    """Stage, operation and its seconds, summed over the whole run."""
    is_complete: bool = True
    """Whether ``works`` holds everything; if not, earlier operations were dropped."""

    @property
    def work_s(self) -> float:
        """Seconds spent working, not waiting."""
        return sum(seconds for _, _, seconds in self.seconds)


class Recording(Struct, frozen=True):
    """Everything that one rank recorded of a run, or of one of its epochs. Times are the hub's."""

    rank: Count
    host: Name
    lanes: tuple[LaneRecord, ...] = ()
    links: tuple[LinkRecord, ...] = ()
    works: tuple[WorkRecord, ...] = ()
    decided: tuple[Decided, ...] = ()
    """Decisions on the bits of the outgoing link, if they follow the bandwidth."""
    energy: EnergyUse = NOT_MEASURED
    """Energy that the machine used meanwhile."""
    replans: tuple[ReplanRecord, ...] = ()
    """Better plans that rank 0 found."""
    as_run: HostsAsRun | None = None
    """What hosts were like, if rank 0 has watched them."""

    epoch: Count = 0
    """Number of the epoch, in a run that goes on after failures."""

    def to_text(self) -> str:
        """Return the recording as a message, without line breaks."""
        return fields.encode(self).decode()

    @classmethod
    def from_text(cls, rank: int, text: str) -> Recording:
        """Parse the message of ``rank``. Raises one of ``fields.MALFORMED`` if it is malformed."""
        found: Recording = _read(text)
        found.check_sender(rank)
        return found

    def check_sender(self, rank: int) -> None:
        """Raise ValueError if this is not the recording of ``rank``."""
        if self.rank != rank:
            raise ValueError(f"the recording of rank {self.rank}")


_read = fields.reader(Recording)
