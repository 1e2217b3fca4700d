"""Test the scheduler against two independent oracles, and its bounds when stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from effort import cases
from oracles import schedule_brute_force, schedule_dynamic
from oracles.schedule_brute_force import Best
from oracles.schedule_cases import Case, random_case
from sched_program import run

MIB = 2.0**20


@dataclass(frozen=True)
class Found:
    """The answer of the program to one problem."""

    status: str
    stages: list[tuple[int, int, int]]
    """Host, first layer and last layer, half-open from 0."""
    link_bits: list[int]
    bottleneck_s: float = np.inf
    latency_s: float = np.inf
    objective_s: float = np.inf
    lower_bound_s: float = np.inf
    gap: float = 0.0
    fewest_stages: int = 0
    """No schedule with the best throughput has fewer; 0 for the latency."""


def solve(case: Case, *options: str) -> Found:
    """Return the best schedule of a case."""
    asked = ("--problem=-", "--format=json", f"--link-bits={case.link_bits}", *options)
    done = run(*asked, text=json.dumps(case.to_json()))
    answer = json.loads(done.out)
    if done.code == 3:
        return Found(answer["status"], [], [])
    assert done.code == 0, done
    rows = answer["schedule"]
    stages = [(int(row["host"]), row["layers"][0] - 1, row["layers"][1]) for row in rows]
    numbers = ("bottleneck_s", "latency_s", "objective_s", "lower_bound_s", "gap")
    bits = [row["quant_bits"] for row in rows[:-1]]
    return Found(
        answer["status"], stages, bits, *(answer[name] for name in numbers), answer.get("fewest_stages", 0)
    )


def case_name(case: Case) -> str:
    return (
        f"{len(case.hosts)} hosts, {case.layers} layers, data host {case.data_host}, {case.links and 'links'}"
    )


def assert_costs(case: Case, result: Found) -> None:
    """Check that the stages cover the layers, use hosts once, fit, and have the stated cost."""
    stages = result.stages
    assert [first for _, first, _ in stages] == [0, *(last for _, _, last in stages[:-1])]
    assert stages[-1][2] == case.layers
    assert all(first < last for _, first, last in stages)
    hosts = [host for host, _, _ in stages]
    assert len(set(hosts)) == len(hosts)

    nbytes = case.cut_bytes()
    crossing = case.link_bytes()

    def link(a: int, b: int, cut: int) -> float:
        if a == b:
            return 0.0
        default = (min(case.type_bw[case.hosts[a]], case.type_bw[case.hosts[b]]), 0.0)
        bandwidth, latency = case.links.get((a, b), case.links.get((b, a), default))
        return latency if crossing[cut] == 0 else crossing[cut] / bandwidth + latency

    costs = []
    for host, first, last in stages:
        kind = case.hosts[host]
        costs.append(case.time[kind, first:last].sum() + case.handling(host, first, last))
        need = case.mem[first:last].sum() + case.held(kind, first, last)
        need += case.buffers_in * nbytes[first] + case.buffers_out * nbytes[last]
        assert need <= case.type_mem[kind] * (1 + 1e-8)
    costs += [link(a, b, last) for (a, _, last), (b, _, _) in pairwise(stages)]
    if case.data_host is not None:
        costs += [link(case.data_host, hosts[0], 0), link(hosts[-1], case.data_host, case.layers)]
    feeding, collecting, input_send, output_receive = case.data_seconds()
    feeding += input_send if hosts[0] != case.data_host else 0
    collecting += output_receive if hosts[-1] != case.data_host else 0
    on_data_host = [cost for cost, (host, _, _) in zip(costs, stages, strict=False) if host == case.data_host]
    worst = max([*costs, feeding, collecting, *(cost + feeding + collecting for cost in on_data_host)])
    assert result.bottleneck_s == pytest.approx(worst, rel=1e-9)
    assert result.latency_s == pytest.approx(sum(costs), rel=1e-9)


def away(case: Case, result: Found) -> int:
    """Return 0 if the data host has a stage, else 1."""
    return int(case.data_host not in [host for host, _, _ in result.stages])


def compare(count: int, draw: Callable[[], Case], oracle: Callable[[Case], Best | None]) -> None:
    """Check that every problem has the verdict, optimum and ties of the oracle, for both objectives."""
    feasible = 0
    for number in range(count):
        case = draw()
        best = oracle(case)
        results = [solve(case, f"--objective={name}") for name in ("throughput", "latency")]
        where = f"problem {number}: {case_name(case)}"
        for result in results:
            assert result.status == ("infeasible" if best is None else "optimal"), where
        if best is None:
            continue
        feasible += 1
        throughput, latency = results
        found = (
            throughput.bottleneck_s,
            len(throughput.stages),
            away(case, throughput),
            throughput.latency_s,
        )
        assert found == pytest.approx(best.throughput, rel=1e-8), where
        assert (throughput.fewest_stages, latency.fewest_stages) == (len(throughput.stages), 0), where
        found = (latency.latency_s, latency.bottleneck_s, len(latency.stages), away(case, latency))
        assert found == pytest.approx(best.latency, rel=1e-8), where
        for result in results:
            assert result.lower_bound_s == result.objective_s
            assert result.gap == 0
            assert_costs(case, result)
    assert feasible > count / 2  # the generator does its part


@pytest.mark.parametrize("seed", range(4))
def test_small_problems_equal_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    compare(cases(260), lambda: random_case(rng), schedule_brute_force.best_schedules)


@pytest.mark.parametrize("seed", range(2))
def test_middle_sized_problems_equal_a_dynamic_programme(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)

    def draw() -> Case:
        return random_case(rng, types=(2, 4), hosts_per_type=(1, 3), layers=(9, 18), named_hosts=6)

    compare(cases(100), draw, schedule_dynamic.best_schedules)


def close_case(rng: np.random.Generator) -> Case:
    """Return a problem in which fewer stages with the data host often take up to 0.1 % longer than more.

    One layer is the bottleneck, which leaves time for long stages elsewhere, and the data host has memory
    for several layers.
    """
    layers, kinds = int(rng.integers(3, 6)), int(rng.integers(2, 4))
    hosts = rng.integers(1, kinds, rng.integers(4, 6))
    data_host = int(rng.integers(len(hosts)))
    hosts[data_host] = 0
    time = np.ones((kinds, layers))
    time[0] += rng.integers(0, 8, layers) / 4096
    time[:, rng.integers(layers)] += layers
    return Case(
        mem=np.ones(layers),
        elements=rng.choice([0.0, 0.0, 0.0, 1.0], layers + 1),
        type_mem=np.array([rng.integers(2, layers), *rng.integers(1, 3, kinds - 1)], float),
        type_bw=np.full(kinds, 4096.0),
        time=time,
        hosts=tuple(int(kind) for kind in hosts),
        batch=1.0,
        element_bytes=1.0,
        buffers_in=0.0,
        buffers_out=0.0,
        data_host=data_host,
    )


@pytest.mark.parametrize("seed", range(2))
def test_close_problems_equal_brute_force(seed: int) -> None:
    rng = np.random.default_rng(300 + seed)
    compare(cases(500), lambda: close_case(rng), schedule_brute_force.best_schedules)


@pytest.mark.parametrize(
    ("case", "latency"),
    [
        pytest.param(
            Case(
                mem=np.ones(5),
                elements=np.zeros(6),
                type_mem=np.array([100.0, 1.0]),
                type_bw=np.full(2, 1e6),
                time=np.array([[99, 0.107, 0.107, 0.107, 0.107], [10, 0.1, 0.1, 0.1, 0.1]]),
                hosts=(0, 1, 1, 1, 1, 1),
                data_host=0,
            ),
            10.4,
            id="four layers on the data host take 0.028 s longer than on four others",
        ),
        pytest.param(
            Case(
                mem=np.ones(5),
                elements=np.array([0.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
                type_mem=np.array([100.0]),
                type_bw=np.array([1000.0]),
                time=np.array([[1.0, 3.0, 1.0, 1.0, 2.0]]),
                hosts=(0, 0, 0, 0),
                batch=1.0,
                element_bytes=1.0,
                data_host=2,
                feed=np.array([2.0]),
            ),
            8.0,
            id="two stages send 0.001 s longer than three",
        ),
    ],
)
def test_a_stage_on_the_data_host_costs_no_latency(case: Case, latency: float) -> None:
    compare(1, lambda: case, schedule_brute_force.best_schedules)
    result = solve(case, "--objective=latency")
    assert result.lower_bound_s == result.latency_s == pytest.approx(latency, rel=1e-9)


@pytest.mark.parametrize("data_host", range(3))
def test_the_data_host_has_a_stage_even_if_nothing_takes_time(data_host: int) -> None:
    case = Case(
        mem=np.ones(4),
        elements=np.zeros(5),
        type_mem=np.array([2.0]),
        type_bw=np.ones(1),
        time=np.zeros((1, 4)),
        hosts=(0, 0, 0),
        data_host=data_host,
    )
    for objective in ("throughput", "latency"):
        result = solve(case, f"--objective={objective}")
        assert len(result.stages) == 2
        assert away(case, result) == 0


WIDTHS = (0, 16, 8, 7, 6, 5, 4, 3, 2)


@pytest.mark.parametrize("seed", range(2))
def test_automatic_bits_cost_nothing_and_lose_the_least(seed: int) -> None:
    """The bottleneck of the narrowest links, with the widest common width that has it, and every link as
    wide as it may be: found by trying every schedule at every width."""
    rng = np.random.default_rng(200 + seed)
    common = set()
    count = cases(250)
    for number in range(count):
        case = random_case(rng, layers=(2, 6))
        widths = [bits for bits in WIDTHS if bits < 8 * case.element_bytes]
        best = {bits: schedule_brute_force.best_schedules(replace(case, link_bits=bits)) for bits in widths}
        result = solve(case, "--link-bits=auto")
        if best[2] is None:
            assert result.status == "infeasible"
            continue
        least = best[2].throughput[0]
        fitting = [b for b in widths if (found := best[b]) and found.throughput[0] <= least * (1 + 1e-9)]
        assert result.status == "optimal", number
        assert result.bottleneck_s == pytest.approx(least, rel=1e-8)
        assert result.lower_bound_s == result.objective_s == result.bottleneck_s
        common.add(fitting[0])
        for (a, _, cut), (b, _, _), bits in zip(
            result.stages, result.stages[1:], result.link_bits, strict=False
        ):
            assert widths.index(bits) <= widths.index(fitting[0])
            seconds = [link_seconds(replace(case, link_bits=width), a, b, cut) for width in widths]
            assert seconds[widths.index(bits)] <= least * (1 + 1e-8)
            if bits != widths[0]:
                assert seconds[widths.index(bits) - 1] > least * (1 - 1e-8)
    assert len(common) > 3 or count < 250  # the generator does its part


def link_seconds(case: Case, a: int, b: int, cut: int) -> float:
    """Return the seconds of one message, from the definition."""
    default = (min(case.type_bw[case.hosts[a]], case.type_bw[case.hosts[b]]), 0.0)
    bandwidth, latency = case.links.get((a, b), case.links.get((b, a), default))
    nbytes = case.link_bytes()[cut]
    return latency if nbytes == 0 else nbytes / bandwidth + latency if bandwidth > 0 else np.inf


def test_the_oracles_agree() -> None:
    rng = np.random.default_rng(7)
    for _ in range(cases(200)):
        case = random_case(rng)
        brute, dynamic = schedule_brute_force.best_schedules(case), schedule_dynamic.best_schedules(case)
        assert (brute is None) == (dynamic is None)
        if brute and dynamic:
            assert brute.throughput == pytest.approx(dynamic.throughput, rel=1e-9)
            assert brute.latency == pytest.approx(dynamic.latency, rel=1e-9)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_a_stopped_solver_still_bounds_the_optimum(objective: str) -> None:
    """The lower bound is <= the optimum <= the objective, however short the time limit."""
    rng = np.random.default_rng(11)
    stopped = 0
    for _ in range(20):
        case = random_case(rng, types=(4, 6), hosts_per_type=(2, 6), layers=(30, 60))
        done = solve(case, f"--objective={objective}", "--time-limit=20")
        for limit in (1e-9, 1e-4, 3e-4, 1e-3):
            result = solve(case, f"--objective={objective}", f"--time-limit={limit}")
            stopped += result.status in ("bounded", "unknown")
            if done.status == "infeasible":
                assert result.status in ("infeasible", "unknown")
                continue
            assert result.status != "infeasible"
            if result.status == "unknown":
                continue
            # Bounded by each other even where the long run was itself stopped.
            assert result.lower_bound_s <= done.objective_s * (1 + 1e-8)
            assert done.lower_bound_s <= result.objective_s * (1 + 1e-8)
            assert_costs(case, result)
            assert result.lower_bound_s <= result.objective_s
            assert 0 <= result.gap <= 1
    assert stopped > 10


def large_case(rng: np.random.Generator, hosts: int, layers: int) -> Case:
    """Return a case with different hosts, and layers without a pattern."""
    time_s = rng.uniform(0.05, 0.5, layers) / np.exp(rng.uniform(-1.9, 0.7, (hosts, 1)))
    return Case(
        mem=rng.uniform(5, 60, layers) * MIB,
        elements=np.exp(rng.uniform(np.log(2e4), np.log(1e6), layers + 1)),
        type_mem=rng.uniform(300, 4000, hosts) * MIB,
        type_bw=rng.choice([100.0, 300.0, 1000.0], hosts) * MIB / 8,
        time=time_s * rng.uniform(0.93, 1.07, time_s.shape),
        hosts=tuple(range(hosts)),
        batch=8.0,
    )


def test_equal_problems_get_equal_answers() -> None:
    case = large_case(np.random.default_rng(4), hosts=40, layers=48)
    first, second = (solve(case, "--time-limit=60") for _ in range(2))
    assert first == second


def test_hosts_of_a_type_are_taken_in_order() -> None:
    layers = 6
    case = Case(
        mem=np.zeros(layers),
        elements=np.ones(layers + 1),
        type_mem=np.full(2, 1e6),
        type_bw=np.full(2, 1e9),
        time=np.array([[9.0] * layers, [1.0] * layers]),
        hosts=(1, 0, 1, 0, 1),
    )
    assert solve(case).stages == [(0, 0, 2), (2, 2, 4), (4, 4, 6)]


def test_no_host_has_the_memory() -> None:
    case = random_case(np.random.default_rng(0))
    assert (
        solve(replace(case, type_mem=np.zeros_like(case.type_mem), mem=case.mem + 1)).status == "infeasible"
    )
