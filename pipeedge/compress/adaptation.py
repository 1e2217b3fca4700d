"""The bits of a link's microbatches, decided while it runs.

    computing thread   bits(6) bits(7) bits(8) │ bits(9) ...        before each microbatch is encoded
    watching thread       arrived(4) arrived(5) │ arrived(6) ...    when the next stage has it
                                                │
                       a window ends: ──Window──> policy ──Decision──> bits of the next one

The first window is short, because nothing is known before it, and what follows is until something is. A
window ends early where packets suddenly take several times as long as its decision counted on: with much
too wide codes, the rest of it would take long. What was decided, and why, is kept for the report, and told
where the bits change.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeedge.base.wording import count
from pipeedge.compress.policies import Decided, Decision, Policy, Sizes, Window

__all__ = ["AdaptiveBits", "FixedBits"]

_FIRST = 3
"""Microbatches of the first window."""
_ABRUPT = 2
"""So many packets in a row, each so many times slower than was counted on, end a window."""
_KEPT = 1000
"""The last decisions, kept for the report."""


class FixedBits:
    """The same bits for all."""

    def __init__(self, bits: int) -> None:
        self.latest = bits
        """Those of the microbatch that was asked for last."""

    def __call__(self, microbatch: int, items: int) -> int:
        """Of ``microbatch``."""
        del microbatch, items
        return self.latest


class AdaptiveBits:
    """Bits that a policy decides.

    Args:
        policy: makes the policy for microbatches of such sizes; what it remembers is kept here.
        sizes: of the link's microbatches, at most.
        window: microbatches from one decision to the next.
        first_bits: before anything is known.
        slowest_s: what the slowest stage spends on a microbatch; 0 while that is unknown.
        clock: seconds.
        tell: called with a line where the bits change, from the computing thread.
    """

    def __init__(
        self,
        policy: Callable[[Sizes], Policy],
        sizes: Sizes,
        *,
        window: int,
        first_bits: int,
        slowest_s: Callable[[], float],
        clock: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        if first_bits not in sizes.bytes_at:
            raise ValueError(f"{first_bits} bits are none of {sizes.widths}")
        self._policy = policy
        self._sizes = sizes
        self._window = window
        self._slowest_s = slowest_s
        self._clock = clock
        self._tell = tell
        start = policy(sizes).start()
        self._state = replace(start, decision=Decision.all(first_bits, "nothing is measured yet"))
        self.latest = first_bits
        """Those of the microbatch that was asked for last."""
        self._number = 0
        self._length = min(window, _FIRST)
        self._done = 0
        self._items = 0
        self._counted_on: float | None = None
        self._decided: deque[Decided] = deque(maxlen=_KEPT)
        # Shared with the watching thread:
        self._lock = threading.Lock()
        self._under_way: dict[int, int] = {}
        self._arrivals: list[_Arrival] = []

    def __call__(self, microbatch: int, items: int) -> int:
        """The bits of ``microbatch``, which is the next one."""
        if self._done >= self._length or (self._done and self._is_abrupt()):
            self._decide(microbatch)
        self.latest = bits = self._state.decision.bits(self._done)
        self._done += 1
        self._items += items
        with self._lock:
            self._under_way[microbatch] = bits
        return bits

    def arrived(self, microbatch: int, size: int, seconds: float) -> None:
        """``microbatch`` with its ``size`` in bytes has occupied the link for ``seconds``."""
        with self._lock:
            bits = self._under_way.pop(microbatch)
            if seconds > 0:
                self._arrivals.append(_Arrival(size, size / self._sizes.bytes_at[bits], seconds))

    @property
    def decided(self) -> Sequence[Decided]:
        """The decisions, in order, the last of them if there are many; called when the link has ended."""
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
            # The younger half: what was before says less of what comes. Summed, because a thread that is
            # woken late makes one packet look slow and the next one fast.
            recent = self._arrivals[-max(_ABRUPT, len(self._arrivals) // 2) :]
            if self._done < self._length:  # it ends early because of these
                recent = recent[-_ABRUPT:]
            self._arrivals.clear()
        pace = fill = None
        if recent:
            pace = sum(one.bytes for one in recent) / sum(one.seconds for one in recent)
            fill = statistics.fmean(one.fill for one in recent)
        slowest_s = self._slowest_s()
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
            self._tell(
                f"{_widths(decision)} from microbatch {microbatch} on, {_widths(before)} before: "
                f"{decision.reason}"
            )
        self._decided.append(Decided(microbatch, self._clock(), decision.bits(0), pace, decision.reason))


@dataclass(frozen=True)
class _Arrival:
    bytes: int
    fill: float
    """Its bytes, as a part of the largest that a microbatch has with these bits."""
    seconds: float
    """That it occupied the link."""

    @property
    def bytes_per_s(self) -> float:
        """The link's pace."""
        return self.bytes / self.seconds


def _widths(decision: Decision) -> str:
    if decision.first_count and decision.first_bits != decision.then_bits:
        return f"{_name(decision.first_bits)} and {_name(decision.then_bits)} in turns"
    return _name(decision.then_bits)


def _name(bits: int) -> str:
    return count(bits, "bit") if bits else "values as they are"
