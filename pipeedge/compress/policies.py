"""Policies that adapt bits to the bandwidth: measurements of a window -> bits of the next window. Pure.

    state, Window ──Policy.decide──> state, Decision(8 bits for 6 microbatches, then 6 bits for 4; why)

A window is a number of microbatches on one link. A policy is stateless and reads no clock: its state is
passed in and returned, and all measurements are in the window.

    heuristic   the widest codes with which the link reaches a target rate at the bandwidth just measured
    heuristic2  the same, one width at a time, and wider only if that leaves a margin
    controller  integral control of the rate towards the target; the base rate comes from a Kalman filter,
                and a window is split between two widths so that their mean is what the control asks for
    auto        no target: the widest codes with which the link takes less time than the slowest stage

The first three are QuantPipe's (Wang et al., ICASSP 2023). The controller is that of C. Imes et al.,
"POET: a portable approach to minimizing energy under soft real-time constraints", RTAS 2015, with bits
instead of clock rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from pipeedge.base.fields import Count, Line, Number
from pipeedge.base.wording import count, figure

__all__ = [
    "Auto",
    "Controller",
    "Decided",
    "Decision",
    "Heuristic",
    "Heuristic2",
    "Policy",
    "Sizes",
    "State",
    "Window",
    "make_policy",
]


@dataclass(frozen=True)
class Sizes:
    """Size of a microbatch of a link at each width, narrow codes first and 0 (uncompressed) last."""

    bytes_at: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.bytes_at or min(self.bytes_at.values()) <= 0:
            raise ValueError("every width needs a positive number of bytes")

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths in bits, from narrow to wide."""
        return tuple(sorted(self.bytes_at, key=lambda bits: (bits == 0, bits)))

    def seconds(self, bits: int, bytes_per_s: float) -> float:
        """Return the seconds that a microbatch occupies the link."""
        return self.bytes_at[bits] / bytes_per_s

    def widest_within(self, seconds: float, bytes_per_s: float) -> int:
        """Return the widest codes with which a microbatch takes at most ``seconds``, else the narrowest."""
        fitting = [bits for bits in self.widths if self.seconds(bits, bytes_per_s) <= seconds]
        return fitting[-1] if fitting else self.widths[0]

    def scaled(self, factor: float) -> Sizes:
        """Return the sizes of microbatches that are ``factor`` times as large."""
        return Sizes({bits: factor * size for bits, size in self.bytes_at.items()})

    def speedup(self, bits: int) -> float:
        """Return the rate of microbatches at ``bits``, relative to that at the widest codes."""
        return self.bytes_at[self.widths[-1]] / self.bytes_at[bits]


@dataclass(frozen=True)
class Window:
    """Measurements of one link during a window."""

    number: int
    """Number of the window, from 0."""
    microbatches: int
    items: float
    """Mean number of items in a microbatch."""
    bytes_per_s: float | None
    """Throughput of the link while a packet occupied it, without waiting for the next stage, in bytes/s;
    None if no packet has arrived.
    """
    slowest_compute_s: float
    """Seconds a microbatch of the slowest stage, including decoding and encoding; 0 if not known."""
    next_microbatches: int
    """Number of microbatches in the window that the decision is for."""


@dataclass(frozen=True)
class Decision:
    """Bits of the microbatches of the next window."""

    first_bits: int
    """Bits of the first microbatches; 0 for uncompressed."""
    first_count: int
    """Number of microbatches with ``first_bits``."""
    then_bits: int
    """Bits of the other microbatches."""
    reason: str
    """Reason, as a line for the log."""

    def bits(self, index: int) -> int:
        """Return the bits of microbatch ``index`` of the window, from 0."""
        return self.first_bits if index < self.first_count else self.then_bits

    @classmethod
    def all(cls, bits: int, reason: str) -> Decision:
        """Return a decision with the same bits for every microbatch."""
        return cls(bits, 0, bits, reason)


@dataclass(frozen=True)
class State:
    """State that a policy keeps from one window to the next."""

    decision: Decision
    speedup: float = 1.0
    """Control variable of the controller."""
    base_rate: float | None = None
    """Kalman filter's estimate of the microbatches a second at the widest codes."""
    variance: float = 1.0
    """Variance of that estimate, relative to its square."""


@dataclass(frozen=True)
class Decided:
    """A past decision, for the report."""

    microbatch: Count
    """First microbatch that it applies to."""
    time_s: Number
    """Time of the decision in seconds."""
    bits: Count
    """Bits of that microbatch; 0 for uncompressed."""
    bytes_per_s: Number | None
    """Measured throughput of the link in bytes a second, or None if not known."""
    reason: Line


class Policy(Protocol):
    """A rule that decides bits."""

    def start(self) -> State:
        """Return the state before the first measurement."""

    def decide(self, state: State, window: Window) -> State:
        """Return the state after ``window``; its ``decision`` is for the next window."""


def make_policy(name: str, sizes: Sizes, target_items_per_s: float) -> Policy:
    """Return the policy called ``name``.

    Args:
        name: One of ``pipeedge.request.config.ADAPTIVE``, which also says which of them need a target.
        sizes: Sizes of the link's microbatches.
        target_items_per_s: Target rate; ignored by ``auto``.

    Raises:
        ValueError: The name is unknown, or the target is not positive.
    """
    if name == "auto":
        return Auto(sizes)
    if not 0 < target_items_per_s < float("inf"):
        raise ValueError(f"the target of {figure(target_items_per_s, 6)} items a second must be positive")
    if name == "heuristic":
        return Heuristic(sizes, target_items_per_s)
    if name == "heuristic2":
        return Heuristic2(sizes, target_items_per_s)
    if name == "controller":
        return Controller(sizes, target_items_per_s)
    raise ValueError(f"there is no policy {name}")


def _start(sizes: Sizes) -> State:
    return State(Decision.all(sizes.widths[-1], "nothing is measured yet"))


def _name(bits: int) -> str:
    return count(bits, "bit") if bits else "uncompressed values"


def _mbps(bytes_per_s: float) -> str:
    return f"{figure(8 * bytes_per_s / 2**20)} Mbit/s"


@dataclass(frozen=True)
class Heuristic:
    """The widest codes with which the link reaches the target."""

    sizes: Sizes
    target_items_per_s: float

    def start(self) -> State:
        """Start with the widest codes."""
        return _start(self.sizes)

    def decide(self, state: State, window: Window) -> State:
        """Decide from the bandwidth of ``window`` alone."""
        if window.bytes_per_s is None:
            return state
        bits = self.sizes.widest_within(window.items / self.target_items_per_s, window.bytes_per_s)
        rate = window.items / self.sizes.seconds(bits, window.bytes_per_s)
        reason = f"{_name(bits)} carry {figure(rate)} items/s at {_mbps(window.bytes_per_s)}"
        return replace(
            state, decision=Decision.all(bits, f"{reason}, {figure(self.target_items_per_s, 6)} wanted")
        )


@dataclass(frozen=True)
class Heuristic2:
    """One width narrower while the target is missed, one wider if that exceeds the target by a margin."""

    sizes: Sizes
    target_items_per_s: float
    margin: float = 0.1

    def start(self) -> State:
        """Start with the widest codes."""
        return _start(self.sizes)

    def decide(self, state: State, window: Window) -> State:
        """Move at most one step from the bits of ``window``."""
        if window.bytes_per_s is None:
            return state
        widths = self.sizes.widths
        place = widths.index(state.decision.then_bits)

        def rate(which: int) -> float:
            return window.items / self.sizes.seconds(widths[which], window.bytes_per_s or 1.0)

        target = self.target_items_per_s
        now = f"{_name(widths[place])} carry {figure(rate(place))} items/s, {figure(target, 6)} wanted"
        if rate(place) < target and place > 0:
            return replace(state, decision=Decision.all(widths[place - 1], f"{now}: narrower"))
        if place + 1 < len(widths) and rate(place + 1) >= (1 + self.margin) * target:
            return replace(state, decision=Decision.all(widths[place + 1], f"{now}: wider"))
        return replace(state, decision=Decision.all(widths[place], now))


@dataclass(frozen=True)
class Controller:
    """Integral control with a Kalman filter (POET, section IV); the window is split between two widths."""

    sizes: Sizes
    target_items_per_s: float
    process_noise: float = 0.02
    """Variance by which the base rate may change between windows, relative to its square."""
    measurement_noise: float = 0.02
    """Variance of a window's measured rate, relative to its square."""

    def start(self) -> State:
        """Start with the widest codes."""
        return _start(self.sizes)

    def decide(self, state: State, window: Window) -> State:
        """Take one step of filter and control."""
        if window.bytes_per_s is None:
            return state
        applied = self._mean_speedup(state.decision, window.microbatches)
        widest = self.sizes.widths[-1]
        # Measured rate in microbatches a second: the throughput over the mean bytes of the window.
        rate = applied * window.bytes_per_s / self.sizes.bytes_at[widest]
        base, variance = self._filter(state, applied, rate)
        target = self.target_items_per_s / window.items
        limit = self.sizes.speedup(self.sizes.widths[0])
        # u(t) = u(t - 1) + e(t) / base, limited to what the widths can achieve, to avoid windup.
        speedup = min(max(applied + (target - applied * base) / base, 1.0), limit)
        reason = (
            f"the link carries {figure(base * window.items)} items/s with {_name(widest)}, "
            f"{figure(self.target_items_per_s, 6)} wanted: {figure(speedup, 3)} times as many"
        )
        return State(self._split(speedup, window.next_microbatches, reason), speedup, base, variance)

    def _filter(self, state: State, applied: float, rate: float) -> tuple[float, float]:
        """Update the scalar Kalman filter of the base rate, observed as ``rate = applied * base``."""
        if state.base_rate is None:
            return rate / applied, self.measurement_noise
        observed = rate / applied
        variance = state.variance + self.process_noise
        gain = variance / (variance + self.measurement_noise)
        return state.base_rate + gain * (observed - state.base_rate), (1 - gain) * variance

    def _mean_speedup(self, decision: Decision, microbatches: int) -> float:
        first = min(decision.first_count, microbatches)
        seconds = first / self.sizes.speedup(decision.first_bits)
        seconds += (microbatches - first) / self.sizes.speedup(decision.then_bits)
        return microbatches / seconds

    def _split(self, speedup: float, microbatches: int, reason: str) -> Decision:
        """Solve ``n / slow + (N - n) / fast = N / speedup`` for the two neighbouring widths."""
        widths = self.sizes.widths
        slow = max((bits for bits in widths if self.sizes.speedup(bits) <= speedup), key=self.sizes.speedup)
        fast = min((bits for bits in widths if self.sizes.speedup(bits) >= speedup), key=self.sizes.speedup)
        if slow == fast:
            return Decision.all(slow, reason)
        slow_s, fast_s = 1 / self.sizes.speedup(slow), 1 / self.sizes.speedup(fast)
        # Rounded down: slightly fewer bits are better than missing the rate.
        count = int(microbatches * (1 / speedup - fast_s) / (slow_s - fast_s) + 1e-9)
        return Decision(slow, count, fast, reason)


@dataclass(frozen=True)
class Auto:
    """The widest codes that keep the link just below the slowest stage's time.

    More bits would cost nothing then, and fewer would gain nothing. Codes become narrower at once, but wider
    only with a margin, so that noise does not make the bits oscillate.
    """

    sizes: Sizes
    below: float = 0.95
    """Fraction of the slowest stage's time that a microbatch may take on the link."""
    wider_below: float = 0.85
    """Largest such fraction for codes that are wider than the present ones."""

    def start(self) -> State:
        """Start with the widest codes."""
        return _start(self.sizes)

    def decide(self, state: State, window: Window) -> State:
        """Decide from the bandwidth and computing time of ``window``."""
        if window.bytes_per_s is None or window.slowest_compute_s <= 0:
            return state
        widths, pace, compute_s = self.sizes.widths, window.bytes_per_s, window.slowest_compute_s
        now = state.decision.then_bits
        allowed = self.sizes.widest_within(self.below * compute_s, pace)
        comfortable = self.sizes.widest_within(self.wider_below * compute_s, pace)
        bits = min(allowed, max(now, comfortable, key=widths.index), key=widths.index)
        reason = (
            f"{_name(bits)} take {figure(1e3 * self.sizes.seconds(bits, pace))} ms at {_mbps(pace)}, "
            f"the slowest stage {figure(1e3 * compute_s)} ms"
        )
        return replace(state, decision=Decision.all(bits, reason))
