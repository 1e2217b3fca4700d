"""Estimate the bandwidth and latency of a link from repeated measurements, and whether they agree. Pure.

    round    a small frame          round trip ~ latency of a message, twice
             a part of a frame      a quarter of the bytes
             a whole frame          bandwidth = (whole - part bytes) / (whole - part seconds)

The difference of two frames cancels fixed costs of each: those of the messages themselves, and the burst
that a rate limit lets through at full speed. A round that other work disturbed gives a bandwidth that is too
low or too high, so the estimate is the median of all rounds, and the quartiles show how reliable it is.

The doctor measures the links of a run this way, through their transport, and ``profiler.py --measure-link``
the network between two machines, over a TCP connection of its own. The caller times the frames.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeedge.base.fields import Amount, Count
from pipeedge.plan.specs import NeighborLink

__all__ = [
    "LEAST_ROUNDS",
    "SMALL",
    "Estimate",
    "Round",
    "Trip",
    "estimate_link",
    "large_enough",
    "measure_rounds",
]

LEAST_ROUNDS = 3
"""Minimum number of rounds that shows whether they agree."""
SMALL = 1 << 10
"""Size of a small frame in bytes."""
STEADY = 1.5
"""Maximum ratio of the upper to the lower quartile of steady bandwidths."""


@dataclass(frozen=True)
class Trip:
    """The round trip of a frame and its answer."""

    bytes: int
    """Size of the frame on the wire in bytes, header included."""
    seconds: float
    """Duration of the round trip in seconds."""


@dataclass(frozen=True)
class Round:
    """One measurement."""

    small: Trip
    part: Trip
    whole: Trip

    @property
    def bw_bytes_per_s(self) -> float:
        """Bandwidth in bytes per second, from the two larger frames."""
        seconds = self.whole.seconds - self.part.seconds
        if seconds <= 0:  # something delayed the smaller frame; the larger one gives a lower bound
            return self.whole.bytes / self.whole.seconds
        return (self.whole.bytes - self.part.bytes) / seconds


@dataclass(frozen=True)
class Estimate:
    """Estimate of a link after some rounds."""

    link: NeighborLink
    """Median bandwidth and latency."""
    low_bytes_per_s: Amount
    """Lower quartile of the bandwidths, in bytes per second."""
    high_bytes_per_s: Amount
    """Upper quartile of the bandwidths, in bytes per second."""
    rounds: Count
    """Number of rounds measured."""

    @property
    def steady(self) -> bool:
        """Whether the rounds agree well enough to plan with their median."""
        return self.rounds >= LEAST_ROUNDS and self.high_bytes_per_s <= STEADY * self.low_bytes_per_s


def large_enough(trip: Callable[[int], Trip], least: int, most: int, seconds: float) -> int:
    """Return the size of a frame that takes long enough to be measured well.

    Args:
        trip: Sends a frame of that many bytes and times it.
        least: Size to begin with; it is doubled.
        most: Largest size.
        seconds: Duration that is long enough.
    """
    size = least
    while trip(size).seconds < seconds and size < most:
        size = min(most, size * 2)
    return size


def measure_rounds(
    trip: Callable[[int], Trip], size: int, most: int, is_over: Callable[[], bool]
) -> Iterator[Round]:
    """Yield rounds with whole frames of ``size`` bytes.

    Args:
        trip: Sends a frame of that many bytes and times it.
        size: Size of a whole frame.
        most: Largest number of rounds.
        is_over: Whether the time is up; asked before each round but the first.
    """
    for done in range(most):
        if done and is_over():
            return
        yield Round(trip(SMALL), trip(size // 4), trip(size))


def estimate_link(rounds: Sequence[Round]) -> Estimate:
    """Return the median of ``rounds``, and their spread."""
    if not rounds:
        raise ValueError("estimating a link takes at least one round")
    rates = sorted(measured.bw_bytes_per_s for measured in rounds)
    outer = len(rates) // 4
    return Estimate(
        NeighborLink(
            bw_bytes_per_s=statistics.median(rates),
            latency_s=statistics.median(measured.small.seconds for measured in rounds) / 2,
        ),
        low_bytes_per_s=rates[outer],
        high_bytes_per_s=rates[-1 - outer],
        rounds=len(rates),
    )
