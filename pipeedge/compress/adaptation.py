"""Choice of the bits a value on a link while the pipeline runs.

    computing thread   bits(6) bits(7) bits(8) │ bits(9) ...        before each microbatch is encoded
    watching thread       arrived(4) arrived(5) │ arrived(6) ...    when the next stage has received it
                                                │
                       a window ends: ──Window──> policy ──Decision──> bits of the next window

The first window is short because nothing has been measured before it; so are the next ones until a
measurement exists. A window ends early if packets suddenly take several times as long as its decision
assumed: with codes that are far too wide, the rest of the window would take long. Decisions and their reasons
are kept for the report and logged when the bits change.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeedge.base.wording import count
from pipeedge.compress.policies import Decided, Decision, Policy, Sizes, Window

__all__ = ["AdaptiveBits", "FixedBits", "LinkContext"]

_FIRST = 3
"""Number of microbatches in the first window."""
_ABRUPT = 2
"""A window ends early after this many packets in a row that took this many times as long as assumed."""
_KEPT = 1000
"""Number of decisions kept for the report, the latest ones."""


class FixedBits:
    """A fixed number of bits for every microbatch."""

    def __init__(self, bits: int) -> None:
        self.latest = bits
        """Bits of the microbatch that was asked for last."""

    def __call__(self, microbatch: int, items: int) -> int:
        """Return the bits of ``microbatch``."""
        del microbatch, items
        return self.latest


@dataclass(frozen=True)
class LinkContext:
    """Facts beyond its own link that the choice of bits needs."""

    slowest_s: Callable[[], float]
    """Returns the seconds that the slowest stage spends on a microbatch, or 0 if not known."""
    clock: Callable[[], float]
    """Returns the time in seconds."""
    notify: Callable[[str], None]
    """Called with a line when the bits change, on the computing thread."""


class AdaptiveBits:
    """Bits chosen by a policy.

    Args:
        policy: Makes the policy for given microbatch sizes. Its state is kept here.
        sizes: Largest size of the link's microbatches at each width.
        window: Microbatches from one decision to the next.
        first_bits: Bits used before anything is measured.
        context: Clock, speed of the stages, and messages.
    """

    def __init__(
        self,
        policy: Callable[[Sizes], Policy],
        sizes: Sizes,
        *,
        window: int,
        first_bits: int,
        context: LinkContext,
    ) -> None:
        if first_bits not in sizes.bytes_at:
            raise ValueError(f"{first_bits} bits is not one of the widths {sizes.widths}")
        self._policy = policy
        self._sizes = sizes
        self._window = window
        self._context = context
        start = policy(sizes).start()
        self._state = replace(start, decision=Decision.all(first_bits, "nothing is measured yet"))
        self.latest = first_bits
        """Bits of the microbatch that was asked for last."""
        self._number = 0
        self._length = min(window, _FIRST)
        self._done = 0
        self._items = 0
        self._counted_on: float | None = None
        self._decided: deque[Decided] = deque(maxlen=_KEPT)
        # State shared with the watching thread:
        self._lock = threading.Lock()
        self._under_way: dict[int, int] = {}
        self._arrivals: list[_Arrival] = []

    def __call__(self, microbatch: int, items: int) -> int:
        """Return the bits of ``microbatch``, which must be the next one."""
        if self._done >= self._length or (self._done and self._is_abrupt()):
            self._decide(microbatch)
        self.latest = bits = self._state.decision.bits(self._done)
        self._done += 1
        self._items += items
        with self._lock:
            self._under_way[microbatch] = bits
        return bits

    def arrived(self, microbatch: int, size: int, seconds: float) -> None:
        """Record that ``microbatch``, of ``size`` bytes, occupied the link for ``seconds``."""
        with self._lock:
            bits = self._under_way.pop(microbatch)
            if seconds > 0:
                self._arrivals.append(_Arrival(size, size / self._sizes.bytes_at[bits], seconds))

    @property
    def decided(self) -> Sequence[Decided]:
        """Return the latest decisions, in order. Call after the link has ended."""
        return tuple(self._decided)

    def _is_abrupt(self) -> bool:
        counted_on = self._counted_on
        if counted_on is None:
            return False
        with self._lock:
            last = self._arrivals[-_ABRUPT:]
        return len(last) == _ABRUPT and all(_ABRUPT * one.bytes_per_s < counted_on for one in last)

    def _decide(self, microbatch: int) -> None:
        with self._lock:
            # Only the younger half is used, because it predicts better. Times are summed, because a thread
            # that wakes late makes one packet look slow and the next one fast.
            recent = self._arrivals[-max(_ABRUPT, len(self._arrivals) // 2) :]
            if self._done < self._length:  # these packets are why the window ends early
                recent = recent[-_ABRUPT:]
            self._arrivals.clear()
        pace = fill = None
        if recent:
            pace = sum(one.bytes for one in recent) / sum(one.seconds for one in recent)
            fill = statistics.fmean(one.fill for one in recent)
        slowest_s = self._context.slowest_s()
        window = Window(
            number=self._number,
            microbatches=self._done,
            items=self._items / self._done,
            bytes_per_s=pace,
            slowest_compute_s=slowest_s,
            next_microbatches=self._window,
        )
        before = self._state.decision
        self._state = self._policy(self._sizes.scaled(fill or 1.0)).decide(self._state, window)
        self._counted_on = pace if pace is not None else self._counted_on
        self._number += 1
        is_known = pace is not None and slowest_s > 0
        self._length, self._done, self._items = self._window if is_known else 1, 0, 0
        decision = self._state.decision
        if _widths(decision) != _widths(before):
            self._context.notify(
                f"{_widths(decision)} from microbatch {microbatch} on, {_widths(before)} before: "
                f"{decision.reason}"
            )
        self._decided.append(
            Decided(microbatch, self._context.clock(), decision.bits(0), pace, decision.reason)
        )


@dataclass(frozen=True)
class _Arrival:
    bytes: int
    fill: float
    """Bytes of the packet as a fraction of the largest microbatch at these bits."""
    seconds: float
    """Seconds that the packet occupied the link."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the link in bytes a second."""
        return self.bytes / self.seconds


def _widths(decision: Decision) -> str:
    if decision.first_count and decision.first_bits != decision.then_bits:
        return f"{_name(decision.first_bits)} and {_name(decision.then_bits)} in turns"
    return _name(decision.then_bits)


def _name(bits: int) -> str:
    return count(bits, "bit") if bits else "uncompressed values"
