"""What a link carries, from repeated measurements of it, and whether they agree. Pure.

    round    a small frame          whole way ~ latency of a message
             a part of a frame      quarter of the bytes
             a whole frame          bandwidth = (whole - part bytes) / (whole - part seconds)

The difference of two frames leaves out what each of them takes once: the messages themselves, and the burst
that a rate limit lets through at full speed. A round that other work disturbed gives a bandwidth that is too
low or too high, so the median of all rounds counts, and the quartiles say how far to trust it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pipeedge.plan.specs import Link

__all__ = ["LEAST_ROUNDS", "Estimate", "Round", "Trip", "estimate_link"]

LEAST_ROUNDS = 3
"""Fewer do not show whether they agree."""
STEADY = 1.5
"""The upper quartile of the bandwidths is at most this many times the lower one."""


@dataclass(frozen=True)
class Trip:
    """A frame, and the answer to it."""

    bytes: int
    """Size of the frame on the wire, header included."""
    seconds: float


@dataclass(frozen=True)
class Round:
    """One measurement."""

    small: Trip
    part: Trip
    whole: Trip

    @property
    def bw_bytes_per_s(self) -> float:
        """Bandwidth that the two larger frames show."""
        seconds = self.whole.seconds - self.part.seconds
        if seconds <= 0:  # something held up the smaller one; the larger one bounds the bandwidth
            return self.whole.bytes / self.whole.seconds
        return (self.whole.bytes - self.part.bytes) / seconds


@dataclass(frozen=True)
class Estimate:
    """What is known of a link after some rounds."""

    link: Link
    low_bytes_per_s: float
    """Lower quartile of the bandwidths."""
    high_bytes_per_s: float
    """Upper quartile."""
    rounds: int

    @property
    def steady(self) -> bool:
        """Whether the rounds agree well enough to plan with their median."""
        return self.rounds >= LEAST_ROUNDS and self.high_bytes_per_s <= STEADY * self.low_bytes_per_s


def estimate_link(rounds: Sequence[Round]) -> Estimate:
    """Return the median of ``rounds``, and their spread."""
    if not rounds:
        raise ValueError("a link is estimated from at least one round")
    rates = sorted(measured.bw_bytes_per_s for measured in rounds)
    outer = len(rates) // 4
    return Estimate(
        Link(
            bw_bytes_per_s=statistics.median(rates),
            latency_s=statistics.median(measured.small.seconds for measured in rounds) / 2,
        ),
        low_bytes_per_s=rates[outer],
        high_bytes_per_s=rates[-1 - outer],
        rounds=len(rates),
    )
