"""Schedules as data: which rank runs which layers, and how many bits a value its outgoing link carries.

    layers   1 ......... 24 | 25 ........ 48        -pt 1,24,25,48
    stage          0        |       1
    rank           0        |       1               -r 0,1
    bits            8 ------->       0              -q 8,0   (0: not compressed)

Layers are 1-based and inclusive on the command line and in YAML, but 0-based and half-open inside the
code. ``LayerRange`` is the only place that converts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeedge.base.errors import ScheduleError
from pipeedge.base.fields import Count, Name
from pipeedge.base.wording import count, plural

__all__ = [
    "BIT_WIDTHS",
    "DTYPES",
    "KERNELS",
    "LINK_BITS",
    "LINK_BITS_RULE",
    "LayerRange",
    "Schedule",
    "StagePlan",
    "check_bits",
    "check_dtype",
]

BIT_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 16)
"""Bits a value can take on a compressed link."""
LINK_BITS = (0, *BIT_WIDTHS)
"""Bits a value can take on any link; 0 stands for uncompressed values."""
LINK_BITS_RULE = "a link carries 2 to 8 or 16 bits per value, or 0 for no compression"
DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
"""Number types in which a stage can hold its weights and compute (see ``pipeedge.models.dtypes``)."""
KERNELS = ("auto", "native", "onednn", "torch", "emulated")
"""Names of the kernels that can compute the linear layers of a stage (see ``pipeedge.models.kernels``)."""


@dataclass(frozen=True, order=True)
class LayerRange:
    """Layers ``[start, stop)``, counted from 0."""

    start: Count
    stop: Count

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ScheduleError(f"no layers in the range [{self.first}, {self.last}]")

    @classmethod
    def inclusive(cls, first: int, last: int) -> LayerRange:
        """Return the range for the user's 1-based, inclusive ``[first, last]``."""
        if first < 1 or last < first:
            raise ScheduleError(f"[{first}, {last}] is not a range of layers: use 1 <= first <= last")
        return cls(first - 1, last)

    @classmethod
    def around(cls, *ranges: LayerRange | None) -> LayerRange | None:
        """Return the smallest range that has all layers of others; None where there are none."""
        there = [one for one in ranges if one is not None]
        return cls(min(one.start for one in there), max(one.stop for one in there)) if there else None

    @property
    def first(self) -> int:
        """First layer, counted from 1 as users do."""
        return self.start + 1

    @property
    def last(self) -> int:
        """Last layer, inclusive, counted from 1 as users do."""
        return self.stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def shared(self, other: LayerRange) -> range:
        """Return the layers, from 0, that are in both ranges."""
        return range(max(self.start, other.start), min(self.stop, other.stop))

    @property
    def named(self) -> str:
        """Name of the range for use in a sentence: ``layers 1-24``, ``layer 48``."""
        return f"layer {self.last}" if len(self) == 1 else f"layers {self}"


def check_bits(bits: int, where: str) -> None:
    """Check that a link can carry ``bits`` bits a value.

    Raises:
        ScheduleError: ``bits`` is not one of ``LINK_BITS``. The message begins with ``where``.
    """
    if bits not in LINK_BITS:
        raise ScheduleError(f"{where}: {bits} bits: {LINK_BITS_RULE}")


def check_dtype(dtype: str, where: str) -> None:
    """Check that a stage can compute in the number type ``dtype``.

    Raises:
        ScheduleError: ``dtype`` is not one of ``DTYPES``. The message begins with ``where``.
    """
    if dtype not in DTYPES:
        raise ScheduleError(f"{where}: {dtype!r} is not a number type; choose one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class StagePlan:
    """One stage of a schedule."""

    layers: LayerRange
    rank: Count
    host: Name | None = None
    quant_bits: Count = 0
    """Bits a value on the link to the next stage, or 0 to send values uncompressed."""
    dtype: Name = "float32"
    """Number type of weights and computation, one of ``DTYPES``."""

    def __post_init__(self) -> None:
        check_bits(self.quant_bits, self.layers.named)
        check_dtype(self.dtype, self.layers.named)


@dataclass(frozen=True)
class Schedule:
    """Stages in order, valid by construction: layers are contiguous from 0, each rank occurs at most once."""

    stages: tuple[StagePlan, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ScheduleError("a schedule needs at least one stage")
        for before, after in itertools.pairwise(plan.layers for plan in self.stages):
            if after.stop <= before.start:
                raise ScheduleError(f"the ranges are out of order: {after} comes after {before}")
        expected = 0
        for plan in self.stages:
            layers = plan.layers
            if layers.start > expected:
                raise ScheduleError(
                    f"{_layers_are(expected + 1, layers.start)} covered by no stage: "
                    f"stage ranges must follow one another, {layers} begins too late"
                )
            if layers.start < expected:
                raise ScheduleError(
                    f"the range {layers} overlaps what comes before it: layer {expected + 1} should come next"
                )
            expected = layers.stop
        ranks = [plan.rank for plan in self.stages]
        for rank in ranks:
            if ranks.count(rank) > 1:
                raise ScheduleError(f"rank {rank} is given {ranks.count(rank)} stages; a rank runs one")

    @property
    def n_layers(self) -> int:
        """Number of layers covered, which must be all layers of the model."""
        return self.stages[-1].layers.stop

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each stage, in stage order."""
        return tuple(plan.rank for plan in self.stages)

    def stage_of(self, rank: int) -> int | None:
        """Return the stage that ``rank`` runs, or None if it runs none."""
        return self.ranks.index(rank) if rank in self.ranks else None

    def check(self, *, n_layers: int, world_size: int) -> Schedule:
        """Return self, or raise ``ScheduleError`` if it does not fit this model and world."""
        for plan in self.stages:
            if plan.layers.stop > n_layers:
                raise ScheduleError(
                    f"the range {plan.layers} goes beyond the model: its layers are 1 to {n_layers}"
                )
        if self.n_layers < n_layers:
            raise ScheduleError(
                f"{_layers_are(self.n_layers + 1, n_layers)} covered by no stage: "
                f"the model's layers are 1 to {n_layers}"
            )
        if len(self.stages) > world_size:
            raise ScheduleError(
                f"{count(len(self.stages), 'stage')} need as many ranks, the world has {world_size}"
            )
        for rank in self.ranks:
            if not 0 <= rank < world_size:
                raise ScheduleError(f"rank {rank} is outside the world: ranks are 0 to {world_size - 1}")
        return self

    @classmethod
    def from_partition(cls, bounds: Sequence[int]) -> Schedule:
        """Return the schedule for the flat 1-based list of ``-pt``, with stage n on rank n.

        Args:
            bounds: First and last layer of each stage: first, last, first, last, ...

        Raises:
            ScheduleError: The count is odd, or the ranges do not follow one another.
        """
        if not bounds or len(bounds) % 2:
            raise ScheduleError(
                f"a partition is pairs of first and last layer; {count(len(bounds), 'number')} "
                f"{plural(len(bounds), 'was', 'were')} given"
            )
        ranges = [LayerRange.inclusive(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
        return cls(tuple(StagePlan(layers=layers, rank=index) for index, layers in enumerate(ranges)))

    def with_rank_order(self, order: Sequence[int], *, world_size: int) -> Schedule:
        """Return the same stages on these ranks (``-r``).

        Raises:
            ScheduleError: The number of ranks is wrong, a rank occurs twice, or one is outside the world.
        """
        given = f"-r/--rank-order {','.join(map(str, order))}"
        stages = len(self.stages)
        if len(order) != stages:
            raise ScheduleError(
                f"{given}: {count(len(order), 'rank')} for {count(stages, 'stage')}; give one each"
            )
        for rank in order:
            if order.count(rank) > 1:
                raise ScheduleError(
                    f"{given}: rank {rank} is given {order.count(rank)} stages; a rank runs one"
                )
            if not 0 <= rank < world_size:
                raise ScheduleError(
                    f"{given}: rank {rank} is outside the world: ranks are 0 to {world_size - 1}"
                )
        return Schedule(
            tuple(replace(plan, rank=rank) for plan, rank in zip(self.stages, order, strict=True))
        )

    def with_hosts(self, hosts: Sequence[str]) -> Schedule:
        """Return the same stages with the host of each rank."""
        return Schedule(tuple(replace(plan, host=hosts[plan.rank]) for plan in self.stages))

    def with_quant_bits(self, quant_bits: Sequence[int]) -> Schedule:
        """Return the same stages with these bits a value on their outgoing links (``-q``).

        Raises:
            ScheduleError: The number of bit widths is wrong, or one is not supported.
        """
        stages = len(self.stages)
        if len(quant_bits) != stages:
            raise ScheduleError(
                f"{count(len(quant_bits), 'bit width')} (-q) for {count(stages, 'stage')}; give one for "
                "each, 0 for none"
            )
        return Schedule(
            tuple(replace(plan, quant_bits=bits) for plan, bits in zip(self.stages, quant_bits, strict=True))
        )

    def with_dtypes(self, dtypes: Sequence[str]) -> Schedule:
        """Return the same stages with these number types (``--dtype``).

        Args:
            dtypes: One number type for all stages, or one for each.

        Raises:
            ScheduleError: The number of types is wrong, or one is not in ``DTYPES``.
        """
        stages = len(self.stages)
        if len(dtypes) not in (1, stages):
            raise ScheduleError(
                f"{count(len(dtypes), 'number type')} (--dtype) for {count(stages, 'stage')}; give one "
                "for all, or one for each"
            )
        each = dtypes if len(dtypes) == stages else [dtypes[0]] * stages
        return Schedule(
            tuple(replace(plan, dtype=dtype) for plan, dtype in zip(self.stages, each, strict=True))
        )

    def partition(self) -> tuple[int, ...]:
        """Return the flat 1-based list that ``from_partition`` reads."""
        return tuple(bound for plan in self.stages for bound in (plan.layers.first, plan.layers.last))

    def lines(self) -> Iterable[str]:
        """Yield one line per stage, for people."""
        for index, plan in enumerate(self.stages):
            where = f"rank {plan.rank}" + (f" ({plan.host})" if plan.host else "")
            bits = f", {plan.quant_bits} bits out" if plan.quant_bits else ""
            dtype = f", {plan.dtype}" if plan.dtype != "float32" else ""
            yield f"stage {index}: {plan.layers.named} on {where}{dtype}{bits}"


def _layers_are(first: int, last: int) -> str:
    return f"layer {first} is" if first == last else f"layers {first} to {last} are"
