"""Test the search for a plan beside another one, and costs under measured conditions, with the scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from pipeedge.base.schedule import LayerRange
from pipeedge.plan import scheduler
from pipeedge.plan.conditions import Conditions, PlacedStage, held_bytes, period_s, with_conditions
from pipeedge.plan.live_choice import Placing
from pipeedge.plan.problem import HostKind, HostLink, LayerSizes, Problem
from pipeedge.plan.switch_memory import best_beside, fits_beside, placed, to_load_bytes


def random_problem(
    random: Random, layers: int = 5, shared_with: tuple[int, ...] = (0, 0, 1, 0, 2)
) -> Problem:
    """Return a small problem with everything that costs time."""

    def times(most: float) -> tuple[float, ...]:
        return tuple(random.uniform(0.1, most) for _ in range(layers))

    kinds = tuple(
        HostKind(
            name,
            random.uniform(30.0, 60.0),
            random.uniform(20.0, 80.0),
            time_s=times(1.0),
            receive_s=times(0.1),
            send_s=times(0.1),
            activation_bytes=times(3.0),
            feed_s=0.05,
            collect_s=0.1,
            input_send_s=0.2,
            output_receive_s=0.15,
            dtype="float32",
        )
        for name in ("fast", "slow")
    )
    return Problem(
        LayerSizes(
            tuple(random.uniform(3.0, 9.0) for _ in range(layers)),
            2.0,
            tuple(random.uniform(1.0, 4.0) for _ in range(layers)),
            1.0,
            shared_with=shared_with,
        ),
        kinds,
        {"a": "fast", "b": "slow", "c": "slow"},
        links=(HostLink("a", "b", random.uniform(5.0, 40.0), 0.01),),
        data_host=random.choice(["a", "b", None]),
        batch_size=2.0,
    )


@pytest.mark.parametrize("seed", range(3))
def test_periods_are_those_of_the_scheduler_under_any_conditions(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random)
    conditions = Conditions({"a": random.uniform(0.5, 3), "b": 1.3}, {("b", "a"): 2.0, ("c", "b"): 0.5}, 1.1)
    found = scheduler.solve(with_conditions(problem, conditions), hosts=["a", "b", "c"])
    stages = placed(found.schedule, ["a", "b", "c"])
    # The scheduler takes a link that is known in one direction for the other one, too.
    assert period_s(problem, stages, conditions) == pytest.approx(found.bottleneck_s)


def placings(problem: Problem) -> Iterator[Placing]:
    layers = len(problem.layers.elements_out)
    for count in (1, 2, 3):
        for hosts in itertools.permutations(problem.hosts, count):
            for cuts in itertools.combinations(range(1, layers), count - 1):
                bounds = (0, *cuts, layers)
                ranges = [LayerRange(*pair) for pair in itertools.pairwise(bounds)]
                yield tuple(map(PlacedStage, hosts, ranges))


def test_weights_that_a_host_has_are_neither_held_twice_nor_loaded() -> None:
    kind = HostKind("board", 10.0, 1.0, time_s=(1.0,) * 4, activation_bytes=(1.0,) * 4)
    sizes = LayerSizes((2.0, 3.0, 1.0, 1.0), 0.0, (0.0,) * 4, 1.0)
    problem = Problem(sizes, (kind,), {"a": "board", "b": "board"})
    present = (PlacedStage("a", LayerRange(0, 2)), PlacedStage("b", LayerRange(2, 4)))
    wanted = (PlacedStage("a", LayerRange(0, 3)), PlacedStage("b", LayerRange(3, 4)))
    # a: 2 + 3 + 1 of weights and twice 1 of activations
    assert fits_beside(replace(problem, kinds=(replace(kind, mem_bytes=8.0),)), present, wanted)
    assert not fits_beside(replace(problem, kinds=(replace(kind, mem_bytes=7.9),)), present, wanted)
    assert to_load_bytes(problem, present, wanted) == 1.0
    assert to_load_bytes(problem, present, present) == 0.0
    assert to_load_bytes(problem, present[:1], present) == 2.0


@pytest.mark.parametrize("shared_with", [(), (0, 0, 1, 0, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_best_schedule_that_fits_beside_the_present_one(
    seed: int, shared_with: tuple[int, ...]
) -> None:
    problem = random_problem(Random(seed), shared_with=shared_with)

    def fits(stages: Placing) -> bool:
        return all(
            held_bytes(problem, stage.host, stage.layers) <= problem.kind_of(stage.host).mem_bytes
            for stage in stages
        )

    possible = [stages for stages in placings(problem) if fits(stages)]
    present = max(possible, key=lambda stages: (len(stages), period_s(problem, stages)))
    best = min(period_s(problem, stages) for stages in possible if fits_beside(problem, present, stages))
    names = list(problem.hosts)
    found = best_beside(
        problem, present, lambda one: placed(scheduler.solve(one, hosts=names).schedule, names)
    )
    assert fits(found)
    assert fits_beside(problem, present, found)
    assert period_s(problem, found) == pytest.approx(best)
