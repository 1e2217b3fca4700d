"""Counting what a stage does. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Latency", "StageStats", "Tally"]


@dataclass
class Tally:
    """How often something happened, and how much of it there was in all."""

    count: int = 0
    total: float = 0.0

    def add(self, amount: float) -> None:
        """It happened once more."""
        self.count += 1
        self.total += amount

    @property
    def mean(self) -> float:
        """The amount each time; 0 if it never happened."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class StageStats:
    """What one stage did in a run."""

    stage: int
    rank: int
    microbatches: int
    compute_s_mean: float
    """Seconds of computing a microbatch."""
    send_s_mean: float
    """Seconds that a microbatch occupied the outgoing link, waiting for the next stage to take it
    included; 0 where the next stage is on this rank."""
    send_s_best: float
    """The same, had every microbatch gone at the pace of the fastest: the link without the waiting."""
    recv_wait_s_mean: float
    """Seconds that the stage waited for a microbatch to come."""
    bytes_out_mean: float
    """Bytes of a microbatch on the outgoing link; 0 where there is none."""
    busy_fraction: float
    """Part of the run that was spent computing."""
    rss_peak_mb: float
    """Peak resident memory of the rank, in MB of 2^20 bytes."""
    parameters: int
    """Weights of the shard, in values."""
    compute_cpu_s_mean: float = 0.0
    """Of the computing, the seconds that the computing thread had a processor."""
    threads: int = 1
    """That compute."""
    encode_s_mean: float = 0.0
    """Seconds of encoding a microbatch for a compressed link; 0 where it is not."""
    decode_s_mean: float = 0.0
    """The same of decoding what came."""

    def to_body(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> StageStats:
        """From plain data."""
        return cls(**body)


@dataclass(frozen=True)
class Latency:
    """Seconds from handing a microbatch to the first stage to having its result."""

    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """Of all microbatches of a run; None of none. Percentiles by nearest rank."""
        if not seconds:
            return None
        ordered = sorted(seconds)

        def percentile(fraction: float) -> float:
            return ordered[max(0, -(-int(fraction * 100) * len(ordered) // 100) - 1)]

        return cls(p50=percentile(0.50), p95=percentile(0.95), max=ordered[-1])
