"""Which ranks keep what they send on, and what of it is left when the plan changes."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.models.decoder import find_decoder
from pipeedge.models.layers.decoder import PAGE
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.after_loss import Held
from pipeedge.plan.cache_owners import CacheOwner, CacheOwners, KeptOutput
from pipeedge.plan.cache_size import rank_bytes
from pipeedge.plan.kept_outputs import choose_outputs

PUZZLES = find_decoder("llama-puzzles")
BOUNDS = StepBounds(context=256, rows=40, sequences=4, pages=32, window_pages=0)


def schedule(*stages: tuple[int, int, int]) -> Schedule:
    """Return the schedule of stages of rank, first and last layer."""
    return Schedule(tuple(StagePlan(LayerRange(first - 1, last), rank) for rank, first, last in stages))


THREE = schedule((0, 1, 4), (1, 5, 12), (2, 13, 16))


class Plans:
    """The plans of a run, one after the other."""

    def __init__(self) -> None:
        self.held = Held()
        self.number = 0

    def next(self, stages: Schedule, *lost: int) -> CacheOwners:
        """Return the stages of the next plan, which ranks load."""
        for rank in lost:
            self.held.forget(rank)
        self.number += 1
        since, outputs = self.held.since(stages, self.number), self.held.outputs(stages, self.number)
        self.held.loads(stages, self.number, outputs=outputs)
        owners = [
            CacheOwner(one.rank, one.layers, one.dtype, since[one.layers.start : one.layers.stop])
            for one in stages.stages
        ]
        return CacheOwners(self.number, owners, outputs=outputs)


def test_a_rank_keeps_the_outputs_of_its_stage_and_the_latest_before() -> None:
    plans = Plans()
    assert plans.next(THREE).outputs == (KeptOutput(0, 4, 1), KeptOutput(1, 12, 1))
    second = plans.next(schedule((0, 1, 8), (2, 9, 16)), 1)
    assert second.outputs == (KeptOutput(0, 8, 2), KeptOutput(0, 4, 1))
    assert second.cuts == {8}
    third = plans.next(schedule((0, 1, 10), (2, 11, 16)))
    assert third.outputs == (KeptOutput(0, 10, 3), KeptOutput(0, 8, 2))
    assert plans.next(schedule((0, 1, 16)), 2).outputs == (KeptOutput(0, 10, 3),)


def test_outputs_are_lost_with_the_layer_before_the_cut() -> None:
    plans = Plans()
    plans.next(THREE)
    assert plans.next(schedule((0, 1, 3), (1, 4, 16)), 2).outputs == (
        KeptOutput(0, 3, 2),
        KeptOutput(1, 12, 1),
    )
    other = schedule((0, 1, 3), (1, 4, 16))
    narrow = Schedule((other.stages[0], replace(other.stages[1], dtype="int8")))
    assert plans.next(narrow).outputs == (KeptOutput(0, 3, 2),)


def test_a_new_process_has_kept_nothing() -> None:
    plans = Plans()
    before = plans.next(THREE)
    after = plans.next(THREE, 0)
    assert after.outputs == (KeptOutput(0, 4, 2), KeptOutput(1, 12, 1))
    assert after.lost_since(before).outputs == {12}


def test_what_another_plan_did_not_keep_is_not_there() -> None:
    plans = Plans()
    first = plans.next(THREE)
    second = plans.next(THREE)
    third = plans.next(THREE)
    assert third.lost_since(first).outputs == third.lost_since(second).outputs == {4, 12}
    assert third.lost_since(replace(second, outputs=second.outputs[1:])).outputs == {12}


def test_lost_pages_are_computed_from_the_first_lost_layer_on() -> None:
    plans = Plans()
    before = plans.next(THREE)
    lost = plans.next(schedule((0, 1, 8), (2, 9, 16)), 1).lost_since(before)
    assert lost.of(0, 0) == LayerRange(4, 12)
    assert lost.outputs == {4}


def test_ranks_without_the_memory_keep_none() -> None:
    outputs = (KeptOutput(0, 4, 2), KeptOutput(1, 12, 2), KeptOutput(1, 8, 1))
    row = 4 * PUZZLES.config.hidden
    assert PUZZLES.output_bytes(4, torch.float32) == row * PAGE
    sizes = [BOUNDS.pages * PAGE * row * count for count in (1, 2)]
    needs = [rank_bytes(PUZZLES, THREE, BOUNDS, rank, 2) for rank in range(2)]
    memory: dict[int, int | None] = {0: needs[0] + sizes[0], 1: needs[1] + sizes[1], 2: None}
    chosen = choose_outputs(PUZZLES, THREE, BOUNDS, outputs, memory, 2)
    assert (chosen.outputs, chosen.notes) == (outputs, ())
    assert chosen.memory == {0: needs[0], 1: needs[1], 2: None}
    memory[1] = needs[1] + sizes[1] - 1
    chosen = choose_outputs(PUZZLES, THREE, BOUNDS, outputs, memory, 2)
    assert chosen.outputs == outputs[:1]
    (note,) = chosen.notes
    assert note.startswith("--keep-outputs: rank 1 would need ")
