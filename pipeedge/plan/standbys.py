"""Which ranks hold layers of others, too, with copies of their pages, in case these are lost. Pure.

    stages             rank 0 [1-8]    rank 1 [9-16]    rank 2 [17-24]
    without rank 1     rank 0 [1-16]                    rank 2 [17-24]     rank 0 stands by for layers 9-16
    without rank 2     rank 0 [1-8]    rank 1 [9-24]                       rank 1 stands by for layers 17-24

A standby is who would get the layers after the loss of one rank. It needs memory for their weights and their
pages beside what it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.base.wording import figure
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.cache_owners import Standby
from pipeedge.plan.cache_size import rank_bytes

__all__ = ["Standbys", "choose_standbys", "standby_bytes", "standbys_for"]

_MB = 1 << 20


@dataclass(frozen=True)
class Standbys:
    """Ranks that stand by for others."""

    ranks: tuple[Standby, ...]
    notes: tuple[str, ...] = ()
    """Why nobody stands by for a rank, for each for which that is so."""


def standbys_for(before: Schedule, after: Schedule | None) -> list[Standby] | str:
    """Return who has to hold what, so that a schedule can follow another one with copies alone.

    Args:
        before: The schedule.
        after: The schedule without one of its ranks; None if nothing fits.

    Returns:
        The standbys, each with layers of one stage, or the reason why there cannot be any.
    """
    if after is None:
        return "nothing fits without it"
    found: list[Standby] = []
    for stage in after.stages:
        for owner in before.stages:
            both = owner.layers.shared(stage.layers)
            if stage.rank == owner.rank or not both:
                continue
            layers = LayerRange(both.start, both.stop)
            if stage.dtype != owner.dtype:
                return f"{layers.named} would go on in another number type"
            found.append(Standby(stage.rank, layers, owner.dtype))
    return found


def choose_standbys(
    model: DecoderModel,
    schedule: Schedule,
    bounds: StepBounds,
    after: Mapping[int, Schedule | None],
    memory: Mapping[int, int | None],
    data_rank: int,
) -> Standbys:
    """Return the ranks that stand by for others, as far as their memory allows.

    Args:
        model: The decoder.
        schedule: Its stages.
        bounds: Bounds of steps.
        after: The schedule without each rank that may be lost; None where nothing fits.
        memory: Bytes that each rank can allocate; None where that is unknown.
        data_rank: Rank that holds both ends.
    """
    chosen: list[Standby] = []
    notes: list[str] = []
    for lost, following in after.items():
        wanted = standbys_for(schedule, following)
        if not isinstance(wanted, str):
            together = list(_joined(schedule, [*chosen, *wanted]))
            short = _short(model, schedule, bounds, together, memory, data_rank)
            if short is None:
                chosen = together
                continue
            wanted = short
        notes.append(f"--replicate: nobody has copies of the caches of rank {lost}: {wanted}")
    return Standbys(tuple(chosen), tuple(notes))


def _joined(schedule: Schedule, standbys: Sequence[Standby]) -> Iterator[Standby]:
    """Yield standbys with their layers of each stage in one, in the order of the layers."""
    for owner in schedule.stages:
        here = [one for one in standbys if owner.layers.start <= one.layers.start < owner.layers.stop]
        for rank in sorted({one.rank for one in here}):
            ranges = [one.layers for one in here if one.rank == rank]
            layers = LayerRange(min(one.start for one in ranges), max(one.stop for one in ranges))
            yield Standby(rank, layers, owner.dtype)


def _short(
    model: DecoderModel,
    schedule: Schedule,
    bounds: StepBounds,
    standbys: Sequence[Standby],
    memory: Mapping[int, int | None],
    data_rank: int,
) -> str | None:
    """Return which rank has too little memory, or None if all have enough."""
    for rank in sorted({one.rank for one in standbys}):
        room = memory.get(rank)
        if room is None:
            continue
        needs = rank_bytes(model, schedule, bounds, rank, data_rank)
        more = sum(standby_bytes(model, one, bounds) for one in standbys if one.rank == rank)
        if needs + more > room:
            return (
                f"rank {rank} would need {figure(more / _MB, 3)} MB for them and for the weights, and has "
                f"{figure(max(0.0, room - needs) / _MB, 3)} MB left: give a smaller --cache-mb"
            )
    return None


def standby_bytes(model: DecoderModel, part: Standby, bounds: StepBounds) -> int:
    """Return the bytes of weights and pages of what a rank stands by for."""
    dtype = find_dtype(part.dtype)
    full, _ = model.page_bytes(part.layers, dtype)
    return model.weight_bytes(part.layers, dtype) + bounds.pages * full
