"""Which layers of a decoder still have their cache when a plan follows another one. Pure.

    plan 3    rank 0: layers 1-8, since 1     rank 1: layers 9-16, since 3     rank 2: layers 17-24, since 1
    plan 5    rank 0: layers 1-8, since 1     rank 2: layers 9-16, since 5, and layers 17-24, since 1
              still there                             lost up to layer 16              still there

A layer has its cache as long as one process has held it in every plan. Rank 0 numbers the plans and
says since which one that is so. The data rank compares with the last plan for which it has made steps: plans
between the two have run nothing.

A *standby* is a rank that holds layers of another one, too, with copies of full pages. When it takes these
layers, and has not had them in the plan before, it uses the copies. Rank 0 says which pages were copied when
the plan ended whose steps have filled them.

What a rank keeps of its outputs is like one more layer behind its last one: the next layers are computed
again from it. If rank 0 gets layers 1-12 in plan 5, it has the outputs of layer 8 since plan 1, and keeps
those of layer 12 from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeedge.base.fields import Count, Name
from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.pages import LostLayers, LostPart

__all__ = ["CacheOwner", "CacheOwners", "CopiedPages", "KeptOutput", "Standby"]


@dataclass(frozen=True)
class Standby:
    """A rank that holds layers of a stage of another one, too, in case that is lost."""

    rank: Count
    layers: LayerRange
    dtype: Name


@dataclass(frozen=True)
class CopiedPages:
    """Copies of pages of some layers that a standby has."""

    layers: LayerRange
    dtype: Name
    """Number type of the weights."""
    plan: Count
    """Number of the plan whose stages were copied."""
    until: tuple[Count, ...]
    """For each page, step before which it has to be full for its copy to be good; 0 without a copy."""


@dataclass(frozen=True)
class KeptOutput:
    """A cut of whose payloads a rank keeps the rows, by page; it has the layer before the cut."""

    rank: Count
    cut: Count
    """Number of layers before it."""
    since: Count
    """Number of the plan since which the rank has them."""


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
    copies: Sequence[CopiedPages] = ()
    """Copies with which ranks have taken layers of others."""
    outputs: Sequence[KeptOutput] = ()
    """Outputs that ranks keep, of this plan and of those before."""

    @property
    def cuts(self) -> frozenset[int]:
        """Cuts whose payloads ranks keep from now on, by the number of layers before."""
        return frozenset(one.cut for one in self.outputs) & {one.layers.stop for one in self.stages}

    def lost_since(self, before: CacheOwners | None) -> LostLayers:
        """Return which layers have lost what they had in a plan before.

        Args:
            before: The last plan for which steps were made, or None if there is none.
        """
        layers = self.stages[-1].layers.stop
        if before is None:
            return LostLayers(layers, [LostPart(LayerRange(0, layers))])
        had = {layer: (one.rank, one.dtype) for one in before.stages for layer in one.numbers}
        copied = {
            layer: one
            for one in self.copies
            if one.plan == before.number
            for layer in range(one.layers.start, one.layers.stop)
        }
        kept = {(one.rank, one.cut) for one in before.outputs}
        lost = dict[CopiedPages | None, LayerRange]()
        for one in self.stages:
            for layer, since in zip(one.numbers, one.since, strict=True):
                if since <= before.number and had.get(layer) == (one.rank, one.dtype):
                    continue
                copies = copied.get(layer) if since == self.number else None  # others are not taken
                lost[copies] = LayerRange(lost.get(copies, LayerRange(layer, layer + 1)).start, layer + 1)
        parts = [LostPart(which, () if copies is None else copies.until) for copies, which in lost.items()]
        there = [one for one in self.outputs if one.since <= before.number and (one.rank, one.cut) in kept]
        return LostLayers(layers, parts, frozenset(one.cut for one in there))
