"""Test the plan that follows a running or a failed one, and costs under conditions, with the scheduler."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from effort import cases
from live_cluster import best_placing, problem_of
from oracles.joint_brute_force import ELEMENT_BYTES, Case, Stage, objective_of, random_case
from oracles.joint_brute_force import costs_of as joint_costs
from oracles.plan_costs import (
    costs_of,
    fits_beside,
    handover_s,
    held_bytes,
    host_loads,
    kind_of,
    link_seconds,
    period_s,
    stage_seconds,
)
from sched_program import run
from waiting import LIMIT_S

from pipeedge.base.errors import InfeasibleError
from pipeedge.base.schedule import LayerRange
from pipeedge.plan.after_loss import Survivor
from pipeedge.plan.conditions import Conditions
from pipeedge.plan.live_search import LiveSearch
from pipeedge.plan.placing import PlacedStage, Placing
from pipeedge.plan.problem import HostKind, HostLink, LayerSizes, Problem, SolverOptions
from pipeedge.plan.sched_pipeline import run_program

AS_PROFILED = Conditions()


def search_of(problem: Problem, **more: Any) -> LiveSearch:
    body = problem.to_body()

    def call(arguments: Sequence[str], text: str = "", *, timeout_s: float = LIMIT_S) -> str:
        given = json.dumps({**body, "conditions": json.loads(text)})
        return run_program([one for one in arguments if one != "--conditions=-"], given, timeout_s=timeout_s)

    names = list(problem.hosts)
    return LiveSearch(["--problem=-"], body, SolverOptions(), names, **{"call": call, **more})


def takeover(problem: Problem, present: Placing, conditions: Conditions = AS_PROFILED) -> Placing:
    return search_of(problem)(conditions, frozenset(problem.hosts), present) or present


def placing(*stages: tuple[str, int, int]) -> Placing:
    """Return stages by host, first and last layer."""
    return tuple(PlacedStage(host, LayerRange(first - 1, last)) for host, first, last in stages)


def slowed(problem: Problem, slowness: dict[str, float]) -> Problem:
    """Return the problem with a kind of its own for each host, that is as slow as it is."""
    kinds = {
        host: replace(
            kind_of(problem, host),
            name=f"kind of {host}",
            time_s=tuple(slowness.get(host, 1.0) * one for one in kind_of(problem, host).time_s),
        )
        for host in problem.hosts
    }
    hosts = {host: kind.name for host, kind in kinds.items()}
    return replace(problem, kinds=tuple(kinds.values()), hosts=hosts)


def random_problem(
    random: Random, layers: int = 5, shared_with: tuple[int, ...] = (0, 0, 1, 0, 2)
) -> Problem:
    """Return a small problem with everything that costs time."""

    def times(most: float) -> tuple[float, ...]:
        return tuple(random.uniform(0.1, most) for _ in range(layers))

    kinds = tuple(
        HostKind(
            name,
            random.uniform(40.0, 70.0),
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


def placings(problem: Problem) -> Iterator[Placing]:
    layers = len(problem.layers.elements_out)
    for count in (1, 2, 3):
        for hosts in itertools.permutations(problem.hosts, count):
            for cuts in itertools.combinations(range(1, layers), count - 1):
                bounds = (0, *cuts, layers)
                ranges = [LayerRange(*pair) for pair in itertools.pairwise(bounds)]
                yield tuple(map(PlacedStage, hosts, ranges))


# -- costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_costs_of_plans_are_those_of_the_oracle_at_each_moment(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random)
    plans = random.sample(list(placings(problem)), 5)
    moments = [
        Conditions({"a": random.uniform(0.5, 3), "b": 1.3}, {("b", "a"): 2.0, ("c", "b"): 0.5}, 1.1),
        Conditions({"c": 2.0}),
    ]
    found = search_of(problem).costs(plans, plans[0], moments)
    for plan, known, wanted in zip(plans, found, costs_of(problem)(plans, plans[0], moments), strict=True):
        assert [one.bottleneck_s for one in known.moments] == pytest.approx(
            [one.bottleneck_s for one in wanted.moments]
        )
        assert known.bottleneck_s == pytest.approx(period_s(problem, plan))
        assert [stage.layers_s for stage in known.schedule] == pytest.approx(
            [stage.layers_s for stage in wanted.schedule]
        )
        assert [stage.data_s for stage in known.schedule] == pytest.approx(
            [stage.data_s for stage in wanted.schedule]
        )
        assert [stage.load_bytes for stage in known.schedule] == pytest.approx(
            list(host_loads(problem, plans[0], plan))
        )


def test_weights_that_a_host_has_are_neither_held_twice_nor_loaded() -> None:
    kind = HostKind("board", 8.0, 1.0, time_s=(1.0,) * 4, activation_bytes=(1.0,) * 4, dtype="float32")
    sizes = LayerSizes((2.0, 3.0, 1.0, 1.0), 0.0, (0.0,) * 4, 1.0)
    problem = Problem(sizes, (kind,), {"a": "board", "b": "board"})
    present, wanted = placing(("a", 1, 2), ("b", 3, 4)), placing(("a", 1, 3), ("b", 4, 4))

    def costs(memory: float, wanted: Placing = wanted) -> Any:
        narrow = replace(problem, kinds=(replace(kind, mem_bytes=memory),))
        (found,) = search_of(narrow).costs([wanted], present, [])
        return found

    # a: 2 + 3 + 1 of weights and twice 1 of activations
    assert costs(8.0).fits
    assert not costs(7.9).fits
    assert [stage.load_bytes for stage in costs(8.0).schedule] == [1.0, 0.0]
    assert [stage.load_bytes for stage in costs(8.0, present).schedule] == [0.0, 0.0]
    other = tuple(replace(stage, dtype="float32") for stage in wanted)
    before = tuple(replace(stage, dtype="int8") for stage in present)
    (found,) = search_of(problem).costs([other], before, [])
    # Layers in another number type are other layers.
    assert [stage.load_bytes for stage in found.schedule] == [6.0, 1.0]
    assert not found.fits


# -- plans beside a running one --------------------------------------------------------------------------


@pytest.mark.parametrize("shared_with", [(), (0, 0, 1, 0, 2)])
@pytest.mark.parametrize("seed", range(cases(40, 4)))
def test_best_plan_that_fits_beside_the_running_one_is_found(seed: int, shared_with: tuple[int, ...]) -> None:
    problem = random_problem(Random(seed), shared_with=shared_with)

    def fits(stages: Placing) -> bool:
        return all(
            held_bytes(problem, stage.host, stage.layers) <= kind_of(problem, stage.host).mem_bytes
            for stage in stages
        )

    possible = [stages for stages in placings(problem) if fits(stages)]
    if not possible:
        return
    present = max(possible, key=lambda stages: (len(stages), period_s(problem, stages)))
    best = min(period_s(problem, stages) for stages in possible if fits_beside(problem, present, stages))
    found = takeover(problem, present)
    assert fits(found)
    assert fits_beside(problem, present, found)
    # The hosts may keep their order for 2 % of the throughput.
    assert period_s(problem, found) <= 1.02 * best * (1 + 1e-9)


def test_there_are_no_other_stages_where_nothing_fits() -> None:
    def refuse(*_: object, **__: object) -> str:
        raise InfeasibleError("no host has the memory")

    present = placing(("h0", 1, 12), ("h1", 13, 24))
    problem = problem_of(3)
    assert search_of(problem, call=refuse)(AS_PROFILED, frozenset({"h0", "h2"}), present) is None
    assert search_of(problem)(AS_PROFILED, frozenset({"h0", "h1"}), present) is None  # no better


def test_other_hosts_replace_one_that_is_missing() -> None:
    present = placing(("h0", 1, 12), ("h1", 13, 24))
    found = search_of(problem_of(3))(AS_PROFILED, frozenset({"h0", "h2"}), present)
    assert found == placing(("h0", 1, 12), ("h2", 13, 24))


@pytest.mark.parametrize("seed", range(cases(60, 8)))
def test_plan_without_missing_hosts_is_the_best_of_the_others(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random)
    here = frozenset(random.sample(list(problem.hosts), random.randint(1, 2)))
    problem = replace(problem, data_host=random.choice([None, *problem.hosts]))
    conditions = Conditions(
        {host: random.uniform(0.5, 2) for host in problem.hosts}, {("c", "b"): 3.0, ("a", "c"): 2.0}
    )

    def fits(stage: PlacedStage) -> bool:
        return held_bytes(problem, stage.host, stage.layers) <= kind_of(problem, stage.host).mem_bytes

    possible = [
        stages
        for stages in placings(problem)
        if {stage.host for stage in stages} <= here and all(map(fits, stages))
    ]
    survivors = [Survivor(number, 1e9, host) for number, host in enumerate(problem.hosts) if host in here]
    found = search_of(problem).after_loss(conditions, survivors, None)
    best = min((period_s(problem, stages, conditions) for stages in possible), default=None)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        names = list(problem.hosts)
        stages = tuple(PlacedStage(names[one.rank], one.layers) for one in found.schedule.stages)
        assert {stage.host for stage in stages} <= here
        assert period_s(problem, stages, conditions) == pytest.approx(best)


# -- the order of hosts --------------------------------------------------------------------------------


def test_a_slow_host_keeps_its_place() -> None:
    problem = problem_of(4, 48)
    present = placing(("h0", 1, 12), ("h1", 13, 24), ("h2", 25, 36), ("h3", 37, 48))
    slow = {"h2": 2.0}
    kept = takeover(problem, present, Conditions(slow))
    assert [stage.host for stage in kept] == ["h0", "h1", "h2", "h3"]
    best = best_placing(problem, Conditions(slow), list(problem.hosts))
    assert period_s(slowed(problem, slow), kept) <= 1.02 * period_s(slowed(problem, slow), best)
    assert sum(host_loads(problem, present, kept)) < 12 * 4e6


def test_a_host_that_joins_does_not_delay_the_next_result() -> None:
    problem = problem_of(4, 48)
    present = placing(("h0", 1, 16), ("h1", 17, 32), ("h3", 33, 48))
    kept = takeover(problem, present)
    assert [stage.host for stage in kept] == ["h0", "h2", "h1", "h3"]
    period = period_s(problem, present)
    at_the_end = placing(("h0", 1, 12), ("h1", 13, 24), ("h3", 25, 36), ("h2", 37, 48))
    assert handover_s(problem, present, at_the_end) == pytest.approx(1.5 * period, rel=0.02)
    assert handover_s(problem, present, kept) == pytest.approx(period, rel=0.02)


def next_result_s(problem: Problem, present: Placing, wanted: Placing, microbatches: int) -> float:
    """Return the seconds between the last result of a schedule and the first of the next, played through."""
    free: dict[str, float] = {}
    results = []
    for stages in (*[present] * microbatches, wanted):
        at = 0.0
        for stage, after in zip(stages, (*stages[1:], None), strict=True):
            at = free[stage.host] = max(at, free.get(stage.host, 0.0)) + stage_seconds(problem, stage)
            at += 0.0 if after is None else link_seconds(problem, stage, after.host)
        results.append(at)
    return results[-1] - results[-2]


@pytest.mark.parametrize("seed", range(cases(200, 12)))
def test_plan_stays_whole_as_fast_and_takes_over_no_later(seed: int) -> None:
    random = Random(seed)
    hosts = random.randint(2, 4)
    profiled = problem_of(hosts, 12, memory=random.choice([1e9, 40e6]))
    slow = {f"h{number}": random.choice([1.0, random.uniform(0.5, 3.0)]) for number in range(hosts)}
    problem = slowed(profiled, slow)
    names = list(profiled.hosts)
    random.shuffle(names)
    present = best_placing(profiled, AS_PROFILED, names[: random.randint(1, hosts)])
    kept = takeover(profiled, present, Conditions(slow))
    assert (kept[0].layers.start, kept[-1].layers.stop) == (0, 12)
    assert all(one.layers.stop == after.layers.start for one, after in itertools.pairwise(kept))
    assert fits_beside(problem, present, kept)
    best = best_placing(profiled, Conditions(slow), names)
    if fits_beside(problem, present, best):
        assert period_s(problem, kept) <= 1.02 * period_s(problem, best) * (1 + 1e-9)
    handover = handover_s(problem, present, kept)
    assert next_result_s(problem, present, kept, 1) == pytest.approx(handover)
    for microbatches in (2, 8):
        assert next_result_s(problem, present, kept, microbatches) <= handover + 1e-9


# -- after a loss -----------------------------------------------------------------------------------------


def test_equal_hosts_are_exchanged_so_that_the_fewest_bytes_are_loaded() -> None:
    """More hosts than any table of sets could hold."""
    hosts = 14
    search = search_of(problem_of(hosts, 28))
    held = [LayerRange(2 * number, 2 * number + 2) for number in range(hosts)]
    Random(1).shuffle(held)
    survivors = [Survivor(rank, 1e9, f"h{rank}", layers) for rank, layers in enumerate(held)]
    found = search.after_loss(AS_PROFILED, survivors, None)
    assert found is not None
    assert {stage.rank: stage.layers for stage in found.schedule.stages} == dict(enumerate(held))
    lost = search.after_loss(AS_PROFILED, survivors[1:], None)
    assert lost is not None
    loads = host_loads(
        problem_of(hosts, 28),
        [PlacedStage(f"h{one.rank}", one.holds) for one in survivors[1:] if one.holds is not None],
        [PlacedStage(f"h{stage.rank}", stage.layers) for stage in lost.schedule.stages],
    )
    assert sum(loads) < 0.5 * 28 * 4e6


@pytest.mark.parametrize("seed", range(cases(100, 10)))
def test_exchange_is_the_cheapest_of_all_and_leaves_the_data_host(seed: int) -> None:
    random = Random(seed)
    problem = problem_of(5, 5)
    sizes = tuple(float(random.randint(1, 9)) * 1e6 for _ in range(5))
    problem = replace(problem, layers=replace(problem.layers, weight_bytes=sizes), data_host="h2")
    holds = [LayerRange(*sorted(random.sample(range(6), 2))) for _ in range(5)]
    survivors = [Survivor(rank, 1e9, f"h{rank}", layers) for rank, layers in enumerate(holds)]
    found = search_of(problem).after_loss(AS_PROFILED, survivors, None)
    assert found is not None
    before = [PlacedStage(f"h{rank}", layers) for rank, layers in enumerate(holds)]

    def loads(ranks: tuple[int, ...]) -> float:
        stages = zip(found.schedule.stages, ranks, strict=True)
        return sum(host_loads(problem, before, [PlacedStage(f"h{rank}", one.layers) for one, rank in stages]))

    ranks = found.schedule.ranks
    orders = (order for order in itertools.permutations(range(5)) if order.index(2) == ranks.index(2))
    assert loads(ranks) == min(map(loads, orders))


def test_layers_of_another_number_type_count_as_missing() -> None:
    search = search_of(problem_of(2, 8))
    holds = [LayerRange(4, 8), LayerRange(0, 4)]
    same = [Survivor(rank, 1e9, f"h{rank}", layers) for rank, layers in enumerate(holds)]
    other = [replace(one, dtype="int8") for one in same]
    for survivors, ranks in ((same, (1, 0)), (other, (0, 1))):
        found = search.after_loss(AS_PROFILED, survivors, None)
        assert found is not None
        assert found.schedule.ranks == ranks


# -- joint plans ---------------------------------------------------------------------------------------------


def joint_plans(case: Case) -> Iterator[list[Stage]]:
    """Yield every plan of a case with one microbatch size."""
    dtypes = [dtype for _, dtype in case.profiles]
    for count in range(1, len(case.hosts) + 1):
        for hosts in itertools.permutations(case.hosts, count):
            for cuts in itertools.combinations(range(1, case.layers), count - 1):
                bounds = list(itertools.pairwise((0, *cuts, case.layers)))
                for chosen in itertools.product(dtypes, repeat=count):
                    for bits in itertools.product(case.widths, repeat=count - 1):
                        stages = [
                            Stage(host, first, last, dtype, width)
                            for host, (first, last), dtype, width in zip(
                                hosts, bounds, chosen, (*bits, 0), strict=True
                            )
                        ]
                        if all(stage.bits < 8 * ELEMENT_BYTES[stage.dtype] for stage in stages[:-1]):
                            yield stages


def held(case: Case, size: int, stage: Stage, dtype_before: str) -> float:
    """Return the bytes of a stage that receives values of a number type."""
    profile = case.profiles[size, stage.dtype][case.hosts[stage.host]]
    layers = slice(stage.first, stage.last)
    arriving = case.elements[stage.first] * size * ELEMENT_BYTES[dtype_before]
    leaving = case.elements[stage.last] * size
    leaving *= 4 if stage.last == case.layers else ELEMENT_BYTES[stage.dtype]
    buffers = case.buffers[0] * arriving + case.buffers[1] * leaving
    return sum(profile.weights[layers]) + max(profile.activations[layers]) + buffers


def joins(case: Case, size: int, running: list[Stage], stages: list[Stage]) -> bool:
    """Return whether every host can hold its stages of both plans."""
    before = {stage.host: stage for stage in running}
    for stage, stage_before in zip(stages, (stages[0], *stages), strict=False):
        old = before.get(stage.host)
        if old is None or (old.first, old.last, old.dtype) == (stage.first, stage.last, stage.dtype):
            continue
        kind = case.hosts[stage.host]
        both = range(max(old.first, stage.first), min(old.last, stage.last))
        weights = case.profiles[size, stage.dtype][kind].weights
        shared = sum(weights[layer] for layer in both) if old.dtype == stage.dtype else 0.0
        needed = held(case, size, stage, stage_before.dtype) + held(case, size, old, old.dtype) - shared
        if needed > case.memory[kind] * (1 + 1e-9):
            return False
    return True


def small_case(seed: int, objective: str) -> Case | None:
    """Return a case of one microbatch size with few enough plans to try all."""
    case = random_case(np.random.default_rng(seed))
    size = case.profiles and max(size for size, _ in case.profiles)
    profiles = {key: kinds for key, kinds in case.profiles.items() if key[0] == size}
    everywhere = all(set(case.hosts.values()) <= set(kinds) for kinds in profiles.values())
    if not everywhere or len(case.hosts) > 3 or case.layers > 4 or len(profiles) > 2 or len(case.widths) > 2:
        return None
    memory = [1.2 * one if one < 1e6 else 250.0 for one in case.memory]
    return replace(
        case, profiles=profiles, memory=memory, objective=objective, least_rate=0.0, max_latency=np.inf
    )


@pytest.mark.parametrize("objective", ["throughput", "latency", "energy"])
def test_joint_plan_that_takes_over_keeps_agreement_and_memory(objective: str) -> None:
    tried = 0
    # In case 92 the running plan fits only because narrow values arrive; in 812 another one does not fit.
    for seed in (*range(cases(3000, 150)), 92, 812):
        case = small_case(seed, objective)
        if case is None:
            continue
        ((size, _), *_) = case.profiles
        known = ((stages, joint_costs(case, size, stages)) for stages in joint_plans(case))
        allowed = [
            (stages, costs)
            for stages, costs in known
            if costs.loss <= case.max_loss and np.isfinite(costs.loss + costs.latency)
        ]
        if not allowed:
            continue
        tried += 1
        running, _ = max(allowed, key=lambda plan: (len(plan[0]), plan[1].period))
        best = min(
            objective_of(case, size, costs) for stages, costs in allowed if joins(case, size, running, stages)
        )
        before = [
            {
                "host": one.host,
                "layers": [one.first + 1, one.last],
                "dtype": one.dtype,
                "quant_bits": one.bits,
            }
            for one in running
        ]
        body = {**case.to_json(), "conditions": {"running": before}}
        asked = ("--plan=auto", "--problem=-", "--format=json", f"--objective={objective}")
        answer = json.loads(run(*asked, text=json.dumps(body)).out)
        found = [
            Stage(row["host"], row["layers"][0] - 1, row["layers"][1], row["dtype"], row["quant_bits"])
            for row in answer["schedule"]
        ]
        costs = joint_costs(case, size, found)
        assert costs.loss <= case.max_loss, seed
        assert all(
            row["mem_bytes"] + row["beside_bytes"] <= row["mem_available_bytes"] * (1 + 1e-9)
            for row in answer["schedule"]
        ), seed
        assert objective_of(case, size, costs) <= 1.02 * best * (1 + 1e-9), seed
    assert tried >= 5
