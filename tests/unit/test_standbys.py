"""Who stands by for whom, and whether there is memory for it."""

from __future__ import annotations

import pytest

from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.models.decoder import find_decoder
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.after_loss import Held, Survivor, smallest_change
from pipeedge.plan.cache_owners import CacheOwner, CacheOwners, CopiedPages, Standby
from pipeedge.plan.standbys import choose_standbys, standbys_for

MODEL = find_decoder("llama-puzzles")
BOUNDS = StepBounds(context=256, rows=64, sequences=4, pages=32, window_pages=0)


def schedule(*stages: tuple[int, int, int], dtype: str = "float32") -> Schedule:
    """Return stages, each of a rank, from its first to its last layer."""
    return Schedule(
        tuple(StagePlan(LayerRange(first - 1, last), rank, dtype=dtype) for rank, first, last in stages)
    )


def standby(rank: int, first: int, last: int) -> Standby:
    return Standby(rank, LayerRange(first - 1, last), "float32")


THREE = schedule((0, 1, 4), (1, 5, 12), (2, 13, 16))


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        pytest.param(schedule((0, 1, 4), (3, 5, 12), (2, 13, 16)), [standby(3, 5, 12)], id="spare"),
        pytest.param(schedule((0, 1, 12), (2, 13, 16)), [standby(0, 5, 12)], id="neighbour"),
        pytest.param(schedule((0, 1, 8), (2, 9, 16)), [standby(0, 5, 8), standby(2, 9, 12)], id="both"),
        pytest.param(schedule((0, 1, 10), (2, 11, 16)), [standby(0, 5, 10), standby(2, 11, 12)], id="parts"),
        pytest.param(
            schedule((2, 1, 4), (0, 5, 16)),
            [standby(2, 1, 4), standby(0, 5, 12), standby(0, 13, 16)],
            id="all",
        ),
    ],
)
def test_standbys_are_those_who_take_the_layers(after: Schedule, wanted: list[Standby]) -> None:
    assert standbys_for(THREE, after) == wanted


def test_there_are_reasons_why_nobody_stands_by() -> None:
    assert standbys_for(THREE, None) == "nothing fits without it"
    after = schedule((0, 1, 12), (2, 13, 16), dtype="bfloat16")
    assert standbys_for(THREE, after) == "layers 5-12 would go on in another number type"


def test_standbys_of_several_losses_are_together_as_far_as_memory_allows() -> None:
    after = {1: schedule((0, 1, 8), (2, 9, 16)), 2: schedule((0, 1, 4), (1, 5, 16))}
    free = choose_standbys(MODEL, THREE, BOUNDS, after, {0: None, 1: None, 2: None}, 0)
    assert free.notes == ()
    assert free.ranks == (standby(0, 5, 8), standby(2, 9, 12), standby(1, 13, 16))
    short = choose_standbys(MODEL, THREE, BOUNDS, after, {0: None, 1: None, 2: 1 << 16}, 0)
    assert short.ranks == (standby(1, 13, 16),)
    (note,) = short.notes
    assert note.startswith("--replicate: nobody has copies of the caches of rank 1: rank 2 would need ")


def test_ranges_of_one_stage_are_joined() -> None:
    after = {1: schedule((0, 1, 8), (2, 9, 16)), 2: schedule((0, 1, 12), (1, 13, 16))}
    chosen = choose_standbys(MODEL, THREE, BOUNDS, after, {}, 0)
    assert chosen.ranks == (standby(0, 5, 12), standby(2, 9, 12), standby(1, 13, 16))


class TestHeld:
    def test_a_standby_takes_the_layers_with_its_copies(self) -> None:
        held = Held()
        held.loads(THREE, 1, [standby(3, 5, 12)])
        assert held.survivor(3, 1e9, None) == Survivor(3, 1e9, None, LayerRange(4, 12))
        copies = CopiedPages(LayerRange(4, 12), "float32", 1, (5, 0, 9))
        held.copied(3, [copies])
        held.forget(1)
        left = [held.survivor(rank, 1e9, None) for rank in (0, 2, 3, 4)]
        after = smallest_change(THREE, left, [1.0] * 16)
        assert after == schedule((0, 1, 4), (3, 5, 12), (2, 13, 16))
        assert held.copies(after) == (copies,)
        before = CacheOwners(
            1, [CacheOwner(one.rank, one.layers, "float32", [1] * len(one.layers)) for one in THREE.stages]
        )
        since = held.since(after, 2)
        owners = CacheOwners(
            2,
            [
                CacheOwner(one.rank, one.layers, one.dtype, since[one.layers.start : one.layers.stop])
                for one in after.stages
            ],
            held.copies(after),
        )
        lost = owners.lost_since(before)
        # Pages 0 and 2 were copied, as far as they were full before steps 5 and 9.
        moved = LayerRange(4, 12)
        assert [lost.of(page, filled) for page, filled in ((0, 4), (0, 5), (1, 0), (2, 8), (3, 0))] == [
            None,
            moved,
            moved,
            None,
            moved,
        ]
        # Steps of another plan have filled the pages since.
        later = CacheOwners(2, before.stages)
        assert CacheOwners(3, owners.stages, owners.copies).lost_since(later).of(0, 4) == moved

    def test_who_stands_by_for_several_holds_the_layers_that_are_lost(self) -> None:
        """Otherwise a plan that moves all layers seems to load less than the one that copies are for."""
        standbys = [standby(3, 5, 12), standby(3, 13, 15)]
        for lost, layers in ((1, LayerRange(4, 12)), (2, LayerRange(12, 15))):
            for told in (standbys, standbys[::-1]):
                held = Held()
                held.loads(THREE, 1, told)
                held.forget(lost)
                assert held.survivor(3, 1e9, None) == Survivor(3, 1e9, None, layers)

    def test_copies_are_forgotten_with_the_process_and_with_the_plan(self) -> None:
        copies = CopiedPages(LayerRange(4, 12), "float32", 1, (5,))
        taken, without = schedule((0, 1, 4), (3, 5, 12), (2, 13, 16)), schedule((0, 1, 12), (2, 13, 16))
        for lost in (True, False):
            held = Held()
            held.loads(THREE, 1, [standby(3, 5, 12)])
            held.copied(3, [copies])
            held.forget(3) if lost else held.loads(without, 2)
            assert held.copies(taken) == ()

    def test_copies_serve_plans_that_follow_one_that_has_not_run(self) -> None:
        held, copies = Held(), CopiedPages(LayerRange(4, 12), "float32", 1, (5,))
        held.loads(THREE, 1, [standby(3, 5, 12)])
        held.copied(3, [copies])
        held.loads(schedule((0, 1, 4), (3, 5, 12), (2, 13, 16)), 2)
        assert held.copies(schedule((0, 1, 4), (3, 5, 16))) == (copies,)

    def test_copies_in_another_number_type_are_none(self) -> None:
        held = Held()
        held.loads(THREE, 1, [standby(3, 5, 12)])
        held.copied(3, [CopiedPages(LayerRange(4, 12), "float32", 1, (5,))])
        assert held.copies(schedule((0, 1, 4), (3, 5, 12), (2, 13, 16), dtype="int8")) == ()
