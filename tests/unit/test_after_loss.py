"""Schedules for the ranks that are left, compared with all schedules that there are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.plan.after_loss import Survivor, smallest_change

MB = 1 << 20
LAYERS = 5

Pieces = tuple[tuple[int, int, int], ...]
"""Rank, first layer and layer after the last of each stage."""


def schedule_of(pieces: Pieces) -> Schedule:
    return Schedule(tuple(StagePlan(LayerRange(start, stop), rank) for rank, start, stop in pieces))


def pieces_of(schedule: Schedule) -> Pieces:
    return tuple((stage.rank, stage.layers.start, stage.layers.stop) for stage in schedule.stages)


def to_load(pieces: Pieces, holds: dict[int, LayerRange | None], sizes: Sequence[float]) -> float:
    total = 0.0
    for rank, start, stop in pieces:
        held = holds[rank]
        total += sum(
            sizes[layer]
            for layer in range(start, stop)
            if held is None or not held.start <= layer < held.stop
        )
    return total


def all_pieces(ranks: Sequence[int], layers: int) -> Iterator[Pieces]:
    """Yield every way to cut the layers, on every sequence of ranks."""
    for stages in range(1, min(len(ranks), layers) + 1):
        for inner in combinations(range(1, layers), stages - 1):
            bounds = (0, *inner, layers)
            for order in permutations(ranks, stages):
                yield tuple(zip(order, bounds, bounds[1:], strict=False))


@st.composite
def losses(draw: st.DrawFn) -> tuple[Schedule, list[Survivor], list[float]]:
    """Draw a schedule, the ranks that are left of it with some spares, and the bytes of the layers."""
    sizes = [float(draw(st.integers(1, 4)) * MB) for _ in range(LAYERS)]
    stages = draw(st.integers(1, 3))
    inner = sorted(draw(st.sets(st.integers(1, LAYERS - 1), min_size=stages - 1, max_size=stages - 1)))
    bounds = [0, *inner, LAYERS]
    order = draw(st.permutations(range(5)))
    pieces = tuple(zip(order, bounds, bounds[1:], strict=False))
    left = draw(st.sets(st.sampled_from(order), max_size=4))
    survivors = []
    for rank in sorted(left):
        own = next((LayerRange(start, stop) for each, start, stop in pieces if each == rank), None)
        first = draw(st.integers(0, LAYERS - 1))
        other = draw(st.none() | st.builds(LayerRange, st.just(first), st.integers(first + 1, LAYERS)))
        room = draw(st.sampled_from([2.0, 5.0, 9.0, math.inf]))
        survivors.append(Survivor(rank, room * MB, f"host{rank}", own or other))
    return schedule_of(pieces), survivors, sizes


@given(losses())
@settings(max_examples=150, deadline=None)
def test_smallest_change_is_that_of_all_schedules(case: tuple[Schedule, list[Survivor], list[float]]) -> None:
    schedule, survivors, sizes = case
    here = {one.rank: one for one in survivors}
    holds = {rank: one.holds for rank, one in here.items()}
    before = {rank: (start, stop) for rank, start, stop in pieces_of(schedule) if rank in here}

    def fits(pieces: Pieces) -> bool:
        return all(sum(sizes[start:stop]) <= here[rank].room_bytes for rank, start, stop in pieces)

    def cost(pieces: Pieces) -> tuple[int, float, int]:
        now = {rank: (start, stop) for rank, start, stop in pieces}
        changed = sum(now.get(rank) != layers for rank, layers in before.items())
        return changed, to_load(pieces, holds, sizes), len(pieces)

    def keeps_order(pieces: Pieces) -> bool:
        kept = [rank for rank, _, _ in pieces if rank in before]
        return kept == [rank for rank in before if rank in kept]

    possible = [pieces for pieces in all_pieces(sorted(here), LAYERS) if fits(pieces)]
    found = smallest_change(schedule, survivors, sizes)
    if not possible:
        assert isinstance(found, str)
        return
    assert isinstance(found, Schedule)
    assert all(stage.host == f"host{stage.rank}" for stage in found.stages)
    ordered = [pieces for pieces in possible if keeps_order(pieces)]
    if ordered:
        assert cost(pieces_of(found)) == min(map(cost, ordered))
    else:
        assert cost(pieces_of(found))[1:] == min(cost(pieces)[1:] for pieces in possible)


BEFORE = schedule_of(((0, 0, 8), (1, 8, 16), (2, 16, 24)))
EVEN = [float(MB)] * 24


@pytest.mark.parametrize(
    ("left", "after"),
    [
        ({0: 8, 2: 8, 3: 8}, ((0, 0, 8), (3, 8, 16), (2, 16, 24))),
        ({0: 16, 2: 8, 3: 7}, ((0, 0, 16), (2, 16, 24))),
        ({0: 8, 2: 16}, ((0, 0, 8), (2, 8, 24))),
        ({0: 12, 2: 12}, ((0, 0, 12), (2, 12, 24))),
        ({2: 24}, ((2, 0, 24),)),
    ],
)
def test_spare_takes_the_shard_or_neighbours_take_its_layers(left: dict[int, int], after: Pieces) -> None:
    stages = {stage.rank: stage.layers for stage in BEFORE.stages}
    survivors = [Survivor(rank, room * MB, holds=stages.get(rank)) for rank, room in left.items()]
    found = smallest_change(BEFORE, survivors, EVEN)
    assert isinstance(found, Schedule)
    assert pieces_of(found) == after


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ({0: 8, 2: 9}, "the layers need 24 MB, and the ranks that are left have 17 MB, which suffices up to"),
        ({0: 0.5, 2: 0.25}, r"layer 1 needs 1 MB, and no rank that is left has more than 0.5 MB \(rank 0\)"),
        ({}, "no rank is left"),
    ],
)
def test_reason_names_the_memory_that_is_missing(left: dict[int, float], why: str) -> None:
    found = smallest_change(BEFORE, [Survivor(rank, room * MB) for rank, room in left.items()], EVEN)
    assert isinstance(found, str)
    assert found.startswith(why.replace("\\", ""))
