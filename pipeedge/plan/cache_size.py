"""Choose the size of a decoder's cache, and with it the longest sequence. Pure.

    memory of each rank ── weights ──> half of the rest, or --cache-mb ──> pages that fit on every rank
    sequences x context ──────────────────────────────────────────────> pages that are wanted

Sequences are mostly shorter than the longest, so more of them run than the cache has room for at that length.

Every stage keeps an array of pages for each of its blocks, and one pool of page numbers serves all of them.
So the rank with the least room for its blocks decides for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeedge.base.errors import InfeasibleError, ScheduleError
from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.base.wording import count, figure
from pipeedge.decoding.pages import pages_of, window_pages_of
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.layers.decoder import PAGE
from pipeedge.models.step_rows import StepBounds
from pipeedge.request.generation import CacheRequest

__all__ = [
    "CacheBytes",
    "bounds_after_loss",
    "choose_bounds",
    "describe_cache",
    "least_cache_bytes",
    "rank_bytes",
    "stage_cache_bytes",
]

_CHUNK = 256
"""Most tokens of prompts in a step, beside a row of each sequence that decodes."""
_OF_FREE = 0.5
"""Part of the free memory of a rank, besides its weights, that the cache may take by default."""
_MOST_SEQUENCES = 256
"""Most sequences that run at a time, which bounds the largest step, and so the buffers of all links."""
_MB = 1 << 20


@dataclass(frozen=True)
class CacheBytes:
    """Memory of one rank for the cache."""

    rank: int
    full: int
    """Bytes of a page of all its blocks that attend to everything."""
    windowed: int
    """Bytes of a page of all its blocks with a window."""
    room: float | None
    """Bytes that the cache may take, or None if that is unknown."""


def stage_cache_bytes(model: DecoderModel, schedule: Schedule, bounds: StepBounds) -> list[int]:
    """Return the bytes of the whole cache of each stage."""
    found = []
    for stage in schedule.stages:
        full, windowed = model.page_bytes(stage.layers, find_dtype(stage.dtype))
        found.append(bounds.pages * full + bounds.window_pages * windowed)
    return found


def rank_bytes(model: DecoderModel, schedule: Schedule, bounds: StepBounds, rank: int, data_rank: int) -> int:
    """Return the bytes of the weights and of the whole cache of a rank."""
    size = model.end_bytes(find_dtype(schedule.stages[0].dtype)) if rank == data_rank else 0
    for stage, cache in zip(schedule.stages, stage_cache_bytes(model, schedule, bounds), strict=True):
        if stage.rank == rank:
            size += model.weight_bytes(stage.layers, find_dtype(stage.dtype)) + cache
    return size


def describe_cache(model: DecoderModel, schedule: Schedule, bounds: StepBounds) -> str:
    """Return the line that tells the user of the context and the cache of a run."""
    found = zip(schedule.ranks, stage_cache_bytes(model, schedule, bounds), strict=True)
    sizes = ", ".join(f"{_size(size)} on rank {rank}" for rank, size in found)
    return (
        f"a context of {count(bounds.context, 'token')}, up to {count(bounds.sequences, 'sequence')} at a "
        f"time; a cache of up to {sizes}"
    )


def choose_bounds(
    model: DecoderModel,
    schedule: Schedule,
    wanted: CacheRequest,
    *,
    sequences: int,
    answers: int | None,
    data_rank: int,
    memory: Mapping[int, int | None],
) -> StepBounds:
    """Return the bounds of the steps of a run.

    Args:
        model: The decoder.
        schedule: Its stages.
        wanted: What rank 0 was asked for.
        sequences: Number of sequences of the longest context that the cache should have room for.
        answers: Number of answers of the run, or None if there is no end.
        data_rank: Rank that holds both ends.
        memory: Bytes that each rank can allocate, or None where that is unknown.

    Raises:
        ScheduleError: The model has no such context.
        InfeasibleError: The cache does not fit the memory of a rank.
    """
    longest = model.max_tokens
    if wanted.context is not None and wanted.context > longest:
        raise ScheduleError(f"--context {wanted.context}: {model.name} has {count(longest, 'position')}")
    context = wanted.context or longest
    window_pages = sequences * min(window_pages_of(model.window, PAGE), pages_of(context, PAGE))
    if not model.window:
        window_pages = 0
    ranks = [_room(model, schedule, rank, wanted, data_rank, memory) for rank in schedule.ranks]
    pages = sequences * pages_of(context, PAGE) if model.attends_to_all else 0
    least = pages_of(wanted.context or 1, PAGE) if model.attends_to_all else 0
    for one in ranks:
        if one.room is None:
            continue
        rest = one.room - window_pages * one.windowed
        fitting = int(rest // one.full) if one.full else pages
        if rest < 0 or fitting < least:
            needed = least * one.full + window_pages * one.windowed
            raise InfeasibleError(
                f"the cache of rank {one.rank} needs {_size(needed)} for "
                f"{_named(wanted, sequences)}, and {_size(one.room)} are there for it: give "
                f"{'a larger --cache-mb' if wanted.cache_mb else 'its layers to more ranks'}, a shorter "
                "--context or a smaller -u"
            )
        pages = min(pages, fitting)
    if model.attends_to_all:
        context = min(context, pages * PAGE)
    at_once = max(sequences, min(_MOST_SEQUENCES, pages or window_pages))
    if answers is not None:
        at_once = max(1, min(at_once, answers))
    return StepBounds(context, at_once + min(_CHUNK, at_once * context), at_once, pages, window_pages)


def bounds_after_loss(
    model: DecoderModel,
    schedule: Schedule,
    wanted: CacheRequest,
    before: StepBounds,
    *,
    data_rank: int,
    memory: Mapping[int, int | None],
) -> StepBounds:
    """Return the bounds of the steps of a run whose stages have changed.

    The context was promised to sequences that are under way, so it stays. If there are fewer pages, fewer
    sequences run at a time. Those of one sequence may take all of the memory that is free; with --replicate,
    for which that was planned, all pages may.

    Args:
        model: The decoder.
        schedule: Its stages from now on.
        wanted: What rank 0 was asked for.
        before: Bounds of the plan before.
        data_rank: Rank that holds both ends.
        memory: Bytes that each rank can allocate besides weights and cache, or None where that is unknown.

    Raises:
        InfeasibleError: A rank has no memory for the pages of one sequence.
    """
    pages, least = before.pages, min(before.pages, pages_of(before.context, PAGE))
    for rank in schedule.ranks:
        one = _room(model, schedule, rank, wanted, data_rank, memory)
        if one.room is None or not one.full + one.windowed:
            continue
        most = one.room if wanted.cache_mb is not None else one.room / _OF_FREE
        needed = least * one.full + before.window_pages * one.windowed
        if most < needed:
            raise InfeasibleError(
                f"the cache of rank {rank} needs {_size(needed)} for {count(before.context, 'token')}, and "
                f"{_size(most)} are there for it"
            )
        rest = (most if wanted.replicate else one.room) - before.window_pages * one.windowed
        pages = min(pages, max(least, int(rest // one.full))) if one.full else pages
    return replace(before, pages=pages)


def least_cache_bytes(model: DecoderModel, layers: LayerRange, dtype: str, bounds: StepBounds) -> int:
    """Return the bytes of the cache of ``layers`` without which no sequence of the whole context can run."""
    full, windowed = model.page_bytes(layers, find_dtype(dtype))
    return min(bounds.pages, pages_of(bounds.context, PAGE)) * full + bounds.window_pages * windowed


def _size(size: float) -> str:
    return f"{figure(size / _MB, 3)} MB"


def _named(wanted: CacheRequest, sequences: int) -> str:
    if wanted.context is not None:
        return f"--context {wanted.context}"
    return count(sequences, "sequence")


def _room(
    model: DecoderModel,
    schedule: Schedule,
    rank: int,
    wanted: CacheRequest,
    data_rank: int,
    memory: Mapping[int, int | None],
) -> CacheBytes:
    """Return the memory of the cache of one rank; a rank may be the only one of its host or not."""
    full = windowed = weights = 0
    for stage in schedule.stages:
        if stage.rank == rank:
            dtype = find_dtype(stage.dtype)
            of_full, of_windowed = model.page_bytes(stage.layers, dtype)
            full, windowed = full + of_full, windowed + of_windowed
            weights += model.weight_bytes(stage.layers, dtype)
    if rank == data_rank:
        weights += model.end_bytes(find_dtype(schedule.stages[0].dtype))
    if wanted.cache_mb is not None:
        return CacheBytes(rank, full, windowed, wanted.cache_mb * _MB)
    free = memory.get(rank)
    room = None if free is None else max(0.0, _OF_FREE * (free - weights))
    return CacheBytes(rank, full, windowed, room)
