"""Diagnose silent, stuck and slow ranks. Pure: statuses and ages in, a finding out.

no heartbeat for a while                           -> Silent: suspended, or disconnected
heartbeats, no rank busy, no counter grows         -> Stuck: a link on which more was sent than received,
                                                      and whose receiver waits; Stalled if there is none
heartbeats, one rank busy for a long time          -> Slow: a notice, not a failure
heartbeats, the data rank waits for more input     -> nothing: the pipeline is empty, and idle
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct, field

from pipeedge.base.fields import Amount, Count, Name, Text
from pipeedge.base.text_lengths import check_lengths
from pipeedge.observe.metrics import StageWork, TextWork

__all__ = [
    "Finding",
    "Limits",
    "Loading",
    "RankStatus",
    "Silent",
    "Slow",
    "Stalled",
    "Stuck",
    "beat_interval_s",
    "diagnose",
]


class Loading(Struct, frozen=True, array_like=True):
    """How far a rank is with loading what it needs before it can compute."""

    what: Name
    """Description for the user, such as ``loading layers 7-10``."""
    loaded: Count = 0
    """Number of bytes loaded so far."""
    total: Count | None = 0
    """Number of bytes to load in all; 0 for a few; None if that is unknown, so that there is no deadline."""

    def follows(self, earlier: Loading) -> bool:
        """Return whether this is a later moment of the same load, or the same moment."""
        return (self.what, self.total) == (earlier.what, earlier.total) and self.loaded >= earlier.loaded


class RankStatus(Struct, frozen=True):
    """Status of a rank, as sent with each heartbeat."""

    busy: tuple[Name, Amount] | None = None
    """Description of what it is busy with (not waiting for a peer), and for how many seconds."""
    sent: Mapping[Count, Count] = field(default_factory=dict)
    """Number of microbatches handed to the network for each peer, plus one for the end mark."""
    received: Mapping[Count, Count] = field(default_factory=dict)
    """Number of microbatches received from each peer, plus one for the end mark."""
    awaiting: frozenset[Count] = frozenset()
    """Peers from which it awaits a microbatch, with nothing else to do."""
    stage_s: Amount | None = None
    """Seconds that its stage works on a microbatch; None before the first, or without a stage."""
    work: StageWork | None = None
    """Work of its stage; None without one."""
    finished: Count = 0
    """Number of finished operations, for programs that may work for a long time without sending."""
    idle: bool = False
    """Whether the whole pipeline has nothing to do, because it feeds it and has had no input lately."""
    loading: Loading | None = None
    """Progress of what it loads; None while it loads nothing."""
    lengths: Text | None = None
    """Histogram of the lengths of the sentences that have come lately, on the data rank of a run whose input
    has no end; None if it is unknown."""
    text: TextWork | None = None
    """Steps that continue texts, on the data rank of a decoder; else None."""

    def __post_init__(self) -> None:
        check_lengths(self.lengths)

    @property
    def progress(self) -> int:
        """Counter that grows with every microbatch that moves and every piece of work that finishes."""
        return sum(self.sent.values()) + sum(self.received.values()) + self.finished


def beat_interval_s(timeout_s: float) -> float:
    """Return the seconds between heartbeats needed to detect failures within ``timeout_s``."""
    return min(1.0, timeout_s / 10)


@dataclass(frozen=True)
class Limits:
    """Limits in seconds after which the hub acts."""

    silence_s: float
    """Longest time without a heartbeat before a rank counts as lost."""
    stall_s: float
    """Longest time without progress and without a busy rank before a link counts as dead."""

    @classmethod
    def within(cls, timeout_s: float) -> Limits:
        """Return limits with which every rank reports a failure within ``timeout_s``.

        They leave only the time that it takes to tell all ranks. After an outage, TCP may stay silent for as
        long again, because it doubles the pause before each retransmission: after an outage of 30 s, a
        connection first carries data again after about 51 s.
        """
        beat_s = beat_interval_s(timeout_s)
        return cls(silence_s=timeout_s - 3 * beat_s, stall_s=timeout_s - 2 * beat_s)


@dataclass(frozen=True)
class Silent:
    """A rank that no longer sends heartbeats."""

    rank: int
    seconds: float


@dataclass(frozen=True)
class Stuck:
    """A link that carries nothing although both its ends are alive."""

    source: int
    destination: int
    microbatch: int
    seconds: float


@dataclass(frozen=True)
class Stalled:
    """A run in which no rank is busy and nothing moves, although no link is at fault."""

    seconds: float


@dataclass(frozen=True)
class Slow:
    """A rank that has been busy with one operation for a long time."""

    rank: int
    what: str
    seconds: float


Finding: TypeAlias = Silent | Stuck | Stalled | Slow


def diagnose(
    statuses: Mapping[int, RankStatus],
    silence_s: Mapping[int, float],
    stalled_s: float,
    limits: Limits,
) -> Finding | None:
    """Return what is wrong with the run, or None if nothing is.

    Args:
        statuses: Last status of each rank that runs or has finished.
        silence_s: Seconds since the last heartbeat of each rank that has not finished.
        stalled_s: Seconds since a counter of any rank grew.
        limits: Limits after which something is wrong.
    """
    silent = [rank for rank in silence_s if silence_s[rank] > limits.silence_s]
    if silent:
        rank = max(silent, key=lambda rank: (silence_s[rank], -rank))
        return Silent(rank, silence_s[rank])
    if stalled_s <= limits.stall_s or any(status.idle for status in statuses.values()):
        return None
    busy = [(status.busy[1], rank) for rank, status in statuses.items() if status.busy]
    if busy:
        seconds, rank = max(busy)
        status = statuses[rank]
        if status.busy and seconds > limits.stall_s:
            return Slow(rank, status.busy[0], seconds)
        return None
    # Before a dead link, every link has more sent than received, because its receiver is blocked. Only the
    # receiver of the dead link itself waits for what was sent.
    for destination in sorted(statuses):
        for source in sorted(statuses[destination].awaiting & statuses.keys()):
            arrived = statuses[destination].received.get(source, 0)
            if statuses[source].sent.get(destination, 0) > arrived:
                return Stuck(source, destination, arrived, stalled_s)
    return Stalled(stalled_s)
