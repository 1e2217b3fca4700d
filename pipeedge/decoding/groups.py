"""How the sequences that generate are dealt to groups, each of which has one step at a time.

stage 0   a   b   c   a   b   c         a, b, c: rows of three groups of sequences
stage 1       a   b   c   a   b   c
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Deal"]

_LITTLE = 0.1
"""Part of a sequence by which a group may exceed its share, and which is not worth one more: equal sequences
cost slightly less or more than each other, by how far they have come.
"""


@dataclass(frozen=True)
class Deal:
    """How the sequences that generate are dealt to groups."""

    share: float
    """Cost of an equal share of those that cost no more than that."""
    heaviest: float
    """Cost from which a sequence is a group of its own."""
    rest: float
    """Cost of the others that are not in flight."""
    groups: int
    """Number of groups for those, the next one included."""

    @classmethod
    def among(cls, groups: int, costs: Sequence[float], flights: Sequence[float], places: int) -> Deal:
        """Deal sequences that generate, so that steps take alike.

        One that costs more than an equal share of the others is a group of its own.

        Args:
            groups: Number of groups.
            costs: Cost of the next row of each sequence, ascending.
            flights: Cost of such rows in each step in flight; 0 for one of chunks.
            places: Most steps in flight. Chunks of prompts first take the places that groups leave.
        """
        flying = sorted(flights)
        del flying[: min(places - groups, flying.count(0.0))]
        shared, alone = list(costs), list[float]()
        left = sum(shared)
        while groups > 1 and shared and shared[-1] > left / groups:
            alone.append(shared.pop())
            left -= alone[-1]
            groups -= 1
        share, heaviest = left / groups, alone[-1] if alone else math.inf
        # Of ten sequences in four groups, two have two: a third one in each would let others wait.
        least = len(shared) // groups * (left / len(shared)) if shared else 0.0
        light = [cost for cost in flying if cost < heaviest]
        return cls(
            share=share,
            heaviest=heaviest,
            rest=left - sum(max(cost, least) for cost in light),
            groups=groups - len(light),
        )

    def joins(self, taken: float, cost: float) -> bool:
        """Return whether a sequence of ``cost`` joins a group whose others cost ``taken``."""
        if max(taken, cost) >= self.heaviest:
            return False
        little = _LITTLE * cost
        fits = taken + cost <= self.share + little
        left = self.rest - taken > (self.groups - 1) * self.share + little
        return fits or (left and taken < self.share)
