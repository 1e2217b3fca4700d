"""Test joint plans of sched-pipeline: against brute force, and what the files and options make of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from effort import cases
from oracles.joint_brute_force import Case, Stage, costs_of, find_best, random_case
from sched_program import Cluster, Run, run, written

INT8 = {"batch_size": 8, "dtype": "int8", "time_s": [0.5, 1, 0.5, 1], "agreement": 0.995}
SMALL = {"batch_size": 4, "dtype": "float32", "time_s": [0.6, 1.1, 0.6, 1.1]}
PLAIN = {"batch_size": 8, "dtype": "torch.float32", "time_s": [1, 2, 1, 2]}
AGREEMENT = {16: [1, 1, 1], 8: [1, 1, 1], 4: [0.99, 0.98, 1]}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = written(tmp_path)
    types = {"fast": {"bw_Mbps": 80, "mem_MB": 100, "model_profiles": {"m": [PLAIN, SMALL, INT8]}}}
    made.write("device_types.yml", types)
    made.write("devices.yml", {"fast": ["f0", "f1"]})
    write_model(made, agreement_at_bits=AGREEMENT)
    return made


def write_model(cluster: Cluster, **more: object) -> None:
    model = {"layers": 4, "mem_MB": [1, 2, 1, 2], "parameters_in": 1000, "parameters_out": [1000, 2000]}
    cluster.write("models.yml", {"m": {**model, **more}})


def planned(cluster: Cluster, *options: str) -> dict[str, object]:
    done = cluster.run("--plan=auto", "--format=json", *options)
    assert done.code == 0, done.err
    answer: dict[str, object] = json.loads(done.out)
    return answer


# --- the optimum ----------------------------------------------------------------------------------


def solved(case: Case) -> Run:
    objective = "latency" if case.latency else "throughput"
    asked = ("--plan=auto", "--problem=-", "--format=json", f"--objective={objective}")
    return run(*asked, text=json.dumps(case.to_json()))


def check_plan(case: Case, answer: dict[str, object]) -> None:
    """Check that the plan keeps the limits and costs what the answer says."""
    rows = answer["schedule"]
    stages = [Stage(r["host"], r["layers"][0] - 1, r["layers"][1], r["dtype"], r["quant_bits"]) for r in rows]
    assert stages[-1].last == case.layers
    assert len({stage.host for stage in stages}) == len(stages)
    size = int(answer["batch_size"])
    costs = costs_of(case, size, stages)
    assert costs.loss <= case.max_loss
    assert costs.latency <= case.max_latency * (1 + 1e-8)
    assert answer["latency_s"] == pytest.approx(costs.latency, rel=1e-8)
    assert answer["bottleneck_s"] == pytest.approx(costs.period, rel=1e-8)
    objective = costs.latency if case.latency else costs.period / size
    assert answer["objective_s"] == pytest.approx(objective, rel=1e-8)


def test_joint_plan_is_the_best_of_all() -> None:
    infeasible = 0
    for seed in range(cases(10_000, part=25)):
        case = random_case(np.random.default_rng(seed))
        best = find_best(case)
        done = solved(case)
        if best.count == 0:
            assert done.code == 3, (seed, done)
            assert json.loads(done.out) == {"status": "infeasible"}
            infeasible += 1
            continue
        assert done.code == 0, (seed, done.err)
        answer = json.loads(done.out)
        assert answer["status"] == "optimal", seed
        assert answer["objective_s"] == pytest.approx(best.objective, rel=1e-8), seed
        check_plan(case, answer)
    assert infeasible > 0


def test_links_count_between_hosts_that_share_no_number_type() -> None:
    case = random_case(np.random.default_rng(2173))
    assert json.loads(solved(case).out)["objective_s"] == pytest.approx(find_best(case).objective, rel=1e-8)
    problem = case.to_json()
    assert problem["links"]
    del problem["links"]
    asked = ("--plan=auto", "--problem=-", "--format=json", "--objective=latency")
    alone = json.loads(run(*asked, text=json.dumps(problem)).out)
    assert alone["objective_s"] > 1.2 * find_best(case).objective


def test_stopped_search_states_a_gap_that_holds() -> None:
    rng = np.random.default_rng(5)
    layers, hosts = 24, 12
    kinds = [
        {
            "name": f"t{number}",
            "mem_bytes": 1e6,
            "bw_bytes_per_s": float(rng.uniform(5, 50)),
            "time_s": [float(value) for value in rng.uniform(0.1, 1, size=layers) * rng.uniform(0.3, 3)],
        }
        for number in range(hosts)
    ]
    setting = {
        "dtype": "float32",
        "batch_size": 2,
        "element_bytes": 4,
        "elements_in": 1,
        "elements_out": [float(value) for value in rng.integers(1, 9, size=layers)],
        "weight_bytes": [1.0] * layers,
        "buffers_in": 2,
        "buffers_out": 2,
        "types": kinds,
        "hosts": [{"name": f"h{number}", "type": f"t{number}"} for number in range(hosts)],
    }
    widths = [{"bits": 0}, {"bits": 8, "loss": [0.01 * float(value) for value in rng.random(layers - 1)]}]
    text = json.dumps({"settings": [setting], "widths": widths, "max_loss": 0.02})
    bounds = []
    for limit in ("1e-9", "10"):
        done = run("--plan=auto", "--problem=-", "--format=json", f"--time-limit={limit}", text=text)
        if done.code == 3:  # stopped before there was any plan
            assert json.loads(done.out) == {"status": "unknown"}
            continue
        answer = json.loads(done.out)
        assert answer["lower_bound_s"] <= answer["objective_s"]
        bounds.append((answer["lower_bound_s"], answer["objective_s"]))
    assert max(low for low, _ in bounds) <= min(found for _, found in bounds)


# --- files and options ----------------------------------------------------------------------------


def test_plan_takes_what_keeps_the_agreement(cluster: Cluster) -> None:
    fast = planned(cluster)
    assert [stage["dtype"] for stage in fast["schedule"]] == ["int8", "int8"]
    assert fast["loss"] == pytest.approx(0.005)
    exact = planned(cluster, "--min-agreement=1")
    assert [stage["dtype"] for stage in exact["schedule"]] == ["float32", "float32"]
    assert exact["loss"] == 0
    # Half of the loss of int8 for half of the layers.
    half = planned(cluster, "--min-agreement=0.9975", "--hosts=f0,f1")
    assert {stage["dtype"] for stage in half["schedule"]} <= {"int8", "float32"}
    assert half["loss"] <= 0.0025
    assert exact["throughput_items_per_s"] <= half["throughput_items_per_s"] <= fast["throughput_items_per_s"]


def test_links_keep_all_bits_that_cost_nothing(cluster: Cluster) -> None:
    assert [stage["quant_bits"] for stage in planned(cluster)["schedule"]] == [0, 0]


def test_thin_links_are_compressed_as_far_as_agreement_allows(cluster: Cluster) -> None:
    cluster.write("n.yml", {"f0": {"f1": {"bw_Mbps": 0.025}}})
    thin = ("--dev-neighbors-file=n.yml", "--dtypes=float32", "--batch-sizes=8")
    wide, narrow = (
        planned(cluster, *thin, "--min-agreement=1"),
        planned(cluster, *thin, "--min-agreement=0.98"),
    )
    assert [stage["quant_bits"] for stage in wide["schedule"]] == [8, 0]
    assert [stage["quant_bits"] for stage in narrow["schedule"]] == [4, 0]
    assert narrow["throughput_items_per_s"] > wide["throughput_items_per_s"]


def test_small_microbatches_have_the_lowest_latency(cluster: Cluster) -> None:
    assert planned(cluster, "--dtypes=float32")["batch_size"] == 8
    assert planned(cluster, "--dtypes=float32", "--objective=latency")["batch_size"] == 4
    limited = planned(cluster, "--dtypes=float32", "--max-latency=3.5")
    assert limited["batch_size"] == 4
    assert limited["latency_s"] <= 3.5


def test_schedule_states_types_bits_and_microbatch_size(cluster: Cluster) -> None:
    cluster.write("n.yml", {"f0": {"f1": {"bw_Mbps": 0.1}}})
    done = cluster.run("--plan=auto", "--dev-neighbors-file=n.yml", "--batch-sizes=8")
    assert done.code == 0
    assert done.out == (
        "# microbatches of 8: runtime.py -u 8\n"
        "- f0: [1, 2]\n  quant_bits: 8\n  dtype: int8\n"
        "- f1: [3, 4]\n  dtype: int8\n"
    )


def test_missing_profiles_are_named_and_planned_without(cluster: Cluster) -> None:
    slow = {"bw_Mbps": 80, "mem_MB": 100, "model_profiles": {"m": [PLAIN]}}
    profiles = [PLAIN, {**SMALL, "dtype": "int8"}]
    fast = {"bw_Mbps": 80, "mem_MB": 100, "model_profiles": {"m": profiles}}
    cluster.write("device_types.yml", {"fast": fast, "slow": slow})
    cluster.write("devices.yml", {"fast": ["f0"], "slow": ["s0"]})
    write_model(cluster)
    assert planned(cluster)["warnings"] == [
        "device_types.yml: fast: the profile of microbatches of 4 in int8 has no agreement, so it is not "
        "used; measure it with profiler.py --agreement N, or allow it with --min-agreement 0",
        "models.yml: m: agreement_at_bits lacks 16, 8, 6, 4, so links do not have these bits; measure them "
        "with profiler.py --sensitivity N, or allow them with --min-agreement 0",
        "device_types.yml: slow has no profile of m for microbatches of 4 in int8; planned without",
    ]
    assert len(planned(cluster, "--min-agreement=0")["warnings"]) == 1


def test_explanation_states_the_next_best_of_each_choice(cluster: Cluster) -> None:
    done = cluster.run("--plan=auto", "--explain")
    chosen = [line for line in done.err.splitlines() if line.startswith("chosen ")]
    beginnings = ["microbatches of 8; next best: 4: ", "number type int8; next best: without it: "]
    beginnings += ["stage 0 in int8; next best: float32, ", "stage 1 in int8; next best: float32, "]
    beginnings += ["link after stage 0: uncompressed; next best: "]
    beginnings += ["host f0; next best: without it: ", "host f1; next best: without it: "]
    assert len(chosen) == len(beginnings)
    for line, beginning in zip(chosen, beginnings, strict=True):
        assert line.removeprefix("chosen ").strip().startswith(beginning), line
    assert "proven optimal" in done.err


def test_problem_as_json_has_the_plan_of_the_files(cluster: Cluster) -> None:
    problem = cluster.run("--plan=auto", "--format=problem", "--data-host=f0")
    here = json.loads(run("--plan=auto", "--problem=-", "--format=json", text=problem.out).out)
    there = planned(cluster, "--data-host=f0")
    for answer in (here, there):
        del answer["elapsed_s"]
    assert here == there
    again = run("--plan=auto", "--problem=-", "--format=problem", text=problem.out)
    assert again.out == problem.out


def test_impossible_limits_are_named(cluster: Cluster) -> None:
    hurried = cluster.run("--plan=auto", "--max-latency=0.5")
    assert hurried.code == 3
    assert "none has a latency of at most 0.500 s; one of 3.0" in hurried.error
    int8 = ("--plan=auto", "--dtypes=int8", "--min-agreement=0.999")
    assert "none has an agreement of 0.999" in cluster.run(*int8).error
    none = cluster.run("--plan=auto", "--batch-sizes=3")
    assert none.code == 2
    assert "fast has no profile for m, batch size 3" in none.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size=8"], "--batch-size and --plan auto: the plan chooses it"),
        (["--link-bits=8"], "--link-bits and --plan auto: the plan chooses it"),
        (["--add-host", "fast=1"], "--add-host: not with --plan auto"),
        (["--min-agreement=1.1"], "--min-agreement: '1.1' is not a number from 0 to 1"),
        (["--widths=9"], "--widths: '9' is neither 0, 2 to 8, 16"),
    ],
)
def test_wrong_options_are_refused(cluster: Cluster, options: list[str], message: str) -> None:
    done = cluster.run("--plan=auto", *options)
    assert done.code == 2
    assert message in done.error


def test_options_of_joint_plans_need_them(cluster: Cluster) -> None:
    assert "--dtypes needs --plan auto" in cluster.run("--dtypes=int8").error


@pytest.mark.parametrize(
    ("agreement", "message"),
    [
        ({9: [1, 1, 1]}, "has 9 bits; links have 2 to 8 or 16 bits"),
        ({8: [1, 1]}, "has 2 values for 3 cuts between two layers"),
        ({8: [1, 2, 1]}, "is a part of the items, at most 1"),
    ],
)
def test_wrong_sensitivity_is_refused(cluster: Cluster, agreement: object, message: str) -> None:
    write_model(cluster, agreement_at_bits=agreement)
    done = cluster.run("--plan=auto")
    assert done.code == 2
    assert done.error.startswith("models.yml:")
    assert message in done.error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": []}, "lists no microbatch size and number type"),
        ({"widths": []}, "there is no width for links"),
        ({"widths": [{"bits": 8, "loss": [0]}]}, "has 1 values for"),
        ({"max_loss": math.pi}, None),
    ],
)
def test_wrong_problems_are_refused(cluster: Cluster, change: dict[str, object], message: str | None) -> None:
    problem = json.loads(cluster.run("--plan=auto", "--format=problem").out)
    done = run("--plan=auto", "--problem=-", text=json.dumps({**problem, **change}))
    assert done.code == (0 if message is None else 2)
    assert message is None or message in done.error
