"""Who is silent, who is stuck, who is only slow. Pure: statuses and ages in, a finding out.

no beat for a while                          -> Silent: stopped, or its network is cut
beats, nobody busy, no count moves anywhere  -> Stuck: the link that was sent more than arrived
beats, somebody busy for long                -> Slow: a notice, not a failure
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["Finding", "Limits", "RankStatus", "Silent", "Slow", "Stuck", "diagnose"]


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself with each beat."""

    busy: tuple[str, float] | None = None
    """What it is doing on its own (not waiting for a peer), and for how many seconds."""
    sent: Mapping[int, int] = field(default_factory=dict)
    """Per peer, microbatches handed to the network."""
    received: Mapping[int, int] = field(default_factory=dict)
    """Per peer, microbatches that have come."""

    def to_body(self) -> dict[str, Any]:
        """As a message body."""
        return {
            "busy": list(self.busy) if self.busy else None,
            "sent": {str(peer): count for peer, count in self.sent.items()},
            "received": {str(peer): count for peer, count in self.received.items()},
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> RankStatus:
        """From a message body; what is malformed raises ValueError, TypeError or KeyError."""
        busy = body["busy"]
        return cls(
            busy=(str(busy[0]), float(busy[1])) if busy else None,
            sent={int(peer): int(count) for peer, count in body["sent"].items()},
            received={int(peer): int(count) for peer, count in body["received"].items()},
        )

    @property
    def progress(self) -> int:
        """A number that grows with every microbatch that moves."""
        return sum(self.sent.values()) + sum(self.received.values())


@dataclass(frozen=True)
class Limits:
    """When to say something. Seconds."""

    silence_s: float
    """Without a beat for this long a rank is taken for gone."""
    stall_s: float
    """With nobody busy and no progress for this long, a link is taken for dead."""

    @classmethod
    def within(cls, timeout_s: float) -> Limits:
        """Limits under which every failure is reported, everywhere, before ``timeout_s`` is over."""
        return cls(silence_s=0.7 * timeout_s, stall_s=0.8 * timeout_s)


@dataclass(frozen=True)
class Silent:
    """A rank that no longer beats."""

    rank: int
    seconds: float


@dataclass(frozen=True)
class Stuck:
    """A link that carries nothing although both its ends live."""

    source: int
    destination: int
    microbatch: int
    seconds: float


@dataclass(frozen=True)
class Slow:
    """A rank that has been busy with one thing for long."""

    rank: int
    what: str
    seconds: float


Finding: TypeAlias = Silent | Stuck | Slow


def diagnose(
    statuses: Mapping[int, RankStatus],
    silence_s: Mapping[int, float],
    stalled_s: float,
    limits: Limits,
) -> Finding | None:
    """What is wrong, if anything.

    Args:
        statuses: the last status of each rank that runs.
        silence_s: seconds since each rank's last beat.
        stalled_s: seconds since any count of any rank moved.
        limits: when to speak.
    """
    silent = [rank for rank in silence_s if silence_s[rank] > limits.silence_s]
    if silent:
        rank = max(silent, key=lambda rank: (silence_s[rank], -rank))
        return Silent(rank, silence_s[rank])
    if stalled_s <= limits.stall_s:
        return None
    busy = [(status.busy[1], rank) for rank, status in statuses.items() if status.busy]
    if busy:
        seconds, rank = max(busy)
        status = statuses[rank]
        if status.busy and seconds > limits.stall_s:
            return Slow(rank, status.busy[0], seconds)
        return None
    for source in sorted(statuses):
        for destination in sorted(statuses[source].sent):
            sent = statuses[source].sent[destination]
            peer = statuses.get(destination)
            arrived = peer.received.get(source, 0) if peer else 0
            if sent > arrived:
                return Stuck(source, destination, arrived, stalled_s)
    return None
