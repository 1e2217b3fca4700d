"""Which layers of a decoder still have their cache when a plan follows another one. Pure.

    plan 3    rank 0: layers 1-8, since 1     rank 1: layers 9-16, since 3     rank 2: layers 17-24, since 1
    plan 5    rank 0: layers 1-8, since 1     rank 2: layers 9-16, since 5, and layers 17-24, since 1
              still there                             lost up to layer 16              still there

A layer has its cache as long as one process has held it in every plan. Rank 0 numbers the plans and
says since which one that is so. The data rank compares with the last plan for which it has made steps: plans
between the two have run nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeedge.base.schedule import LayerRange

__all__ = ["CacheOwner", "CacheOwners"]


@dataclass(frozen=True)
class CacheOwner:
    """A stage that keeps keys and values."""

    rank: int
    layers: LayerRange
    dtype: str
    since: Sequence[int]
    """For each layer, number of the plan since which one process has had it."""

    @property
    def numbers(self) -> range:
        """The layers."""
        return range(self.layers.start, self.layers.stop)


@dataclass(frozen=True)
class CacheOwners:
    """The stages of a plan."""

    number: int
    """Number of the plan."""
    stages: Sequence[CacheOwner]

    def lost_since(self, before: CacheOwners | None) -> int | None:
        """Return how many layers, from the first, have to compute again what they had in a plan before.

        That is up to the last one that has lost its cache, as its input comes from all others.

        Args:
            before: The last plan for which steps were made, or None if there is none.

        Returns:
            The number of layers, 0 if all stages have their cache, or None for all layers.
        """
        if before is None:
            return None
        had = {layer: (one.rank, one.dtype) for one in before.stages for layer in one.numbers}
        lost = 0
        for one in self.stages:
            for layer, since in zip(one.numbers, one.since, strict=True):
                if since > before.number or had.get(layer) != (one.rank, one.dtype):
                    lost = layer + 1
        return None if lost == self.stages[-1].layers.stop else lost
