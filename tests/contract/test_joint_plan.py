"""Test joint plans of sched-pipeline: against brute force, and what the files and options make of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from effort import cases
from oracles.joint_brute_force import Case, Stage, costs_of, find_best, objective_of, random_case
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
    asked = ("--plan=auto", "--problem=-", "--format=json", *case.options())
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
    assert answer["joules_per_item"] == pytest.approx(costs.joules(case) / size, rel=1e-8)
    assert objective_in(answer) == pytest.approx(objective_of(case, size, costs), rel=1e-8)


def objective_in(answer: dict[str, object]) -> float:
    return answer["objective_j"] if answer["objective"] == "energy" else answer["objective_s"]


def test_joint_plan_is_the_best_of_all() -> None:
    infeasible = 0
    for seed in range(cases(10_000, part=50)):
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
        assert objective_in(answer) == pytest.approx(best.objective, rel=1e-8), seed
        check_plan(case, answer)
    assert infeasible > 0


def test_links_count_between_hosts_that_share_no_number_type() -> None:
    case = replace(random_case(np.random.default_rng(2173)), objective="latency")
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


def with_watts(cluster: Cluster) -> None:
    """Give the cluster a slow board that takes little, beside the fast hosts."""
    fast = {"bw_Mbps": 80, "mem_MB": 100, "busy_W": 50, "idle_W": 30}
    slow = {"bw_Mbps": 80, "mem_MB": 100, "busy_W": 4, "idle_W": 2}
    slowly = {**PLAIN, "time_s": [3, 6, 3, 6]}
    types = {"fast": {**fast, "model_profiles": {"m": [PLAIN, {**INT8, "busy_W": 40}]}}}
    types["slow"] = {**slow, "model_profiles": {"m": [slowly]}}
    cluster.write("device_types.yml", types)
    cluster.write("devices.yml", {"fast": ["f0", "f1"], "slow": ["s0"]})


def test_energy_counts_hosts_that_compute_and_wait(cluster: Cluster) -> None:
    with_watts(cluster)
    alone = planned(cluster, "--objective=energy")
    assert [row["host"] for row in alone["schedule"]] == ["s0"]
    # 18 s at 4 W for 8 items.
    assert alone["joules_per_item"] == alone["objective_j"] == pytest.approx(18 * 4 / 8)
    # At 1 item/s, f0 takes the fewest joules: 3 s in int8, at 40 W by that profile, while s0 waits at 2 W.
    asked = ("--objective=energy", "--min-throughput=1", "--hosts=f0,s0", "--data-host=s0", "--input-bytes=0")
    faster = planned(cluster, *asked)
    assert [(row["host"], row["dtype"]) for row in faster["schedule"]] == [("f0", "int8")]
    assert faster["joules_per_item"] == pytest.approx(3 * (40 + 2) / 8)
    # Two hosts with equal parts do not wait, and take no more than one.
    both = planned(cluster, "--objective=energy", "--min-throughput=4")
    assert [row["joules"] for row in both["schedule"]] == pytest.approx([1.5 * 40, 1.5 * 40])


def test_energy_is_stated_with_any_objective_if_watts_are_known(cluster: Cluster) -> None:
    assert "joules_per_item" not in planned(cluster)
    with_watts(cluster)
    fast = planned(cluster)
    assert fast["objective"] == "throughput"
    assert fast["joules_per_item"] > planned(cluster, "--objective=energy")["joules_per_item"]
    explained = cluster.run("--plan=auto", "--objective=energy", "--min-throughput=4", "--explain").err
    assert "energy       15 J an item: f0 7.5, f1 7.5\n" in explained
    assert "lower bound  15 J an item, gap 0.00 %: proven optimal" in explained
    assert "next best: 8 bits, all else as it is: 15 J an item (+0.00 %), agreement 0.995" in explained


def test_energy_needs_the_watts_of_every_host(cluster: Cluster) -> None:
    done = cluster.run("--plan=auto", "--objective=energy")
    assert done.code == 2
    assert done.error.startswith(
        "--objective energy: the power of f0, f1 is unknown; write busy_W (and idle_W)"
    )
    with_watts(cluster)
    hurried = cluster.run("--plan=auto", "--objective=energy", "--min-throughput=100")
    assert hurried.code == 3
    assert "none has a throughput of 100 items/s; the fastest has " in hurried.error


def test_schedule_states_types_bits_and_microbatch_size(cluster: Cluster) -> None:
    cluster.write("n.yml", {"f0": {"f1": {"bw_Mbps": 0.1}}})
    done = cluster.run("--plan=auto", "--dev-neighbors-file=n.yml", "--batch-sizes=8")
    assert done.code == 0
    assert done.out == (
        "# microbatches of 8: pipeedge run -u 8\n"
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
        "used; measure it with pipeedge profile --agreement N, or allow it with --min-agreement 0",
        "models.yml: m: agreement_at_bits lacks 16, 8, 6, 4, so links do not have these bits; measure them "
        "with pipeedge profile --sensitivity N, or allow them with --min-agreement 0",
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


def test_questions_about_the_cluster_are_answered_jointly(cluster: Cluster) -> None:
    """What other hosts or a loss would do is planned with all that the plan chooses."""
    done = cluster.run("--plan=auto", "--format=json", "--add-host=fast=2", "--remove-host=f1", "--losses")
    answer = json.loads(done.out)
    both = answer["throughput_items_per_s"]
    alone = planned(cluster, "--hosts=f0")["throughput_items_per_s"]
    more, fewer, together = answer["what_if"]
    assert more["throughput_items_per_s"] > both > fewer["throughput_items_per_s"] == pytest.approx(alone)
    assert together["throughput_items_per_s"] >= both
    assert [loss["throughput_items_per_s"] for loss in answer["losses"]] == pytest.approx([alone, alone])
    assert "loss of      f0, f1 (fast): " in done.err
    assert cluster.run("--plan=auto", "--survive-loss").code == 0
    refused = cluster.run("--plan=auto", "--survive-loss", "--hosts=f0")
    assert (refused.code, refused.error) == (
        3,
        "no plan survives the loss of any one host: without f0, no host is left",
    )


def test_reasons_count_every_number_type(cluster: Cluster) -> None:
    """Memory is missing only if it is in the smallest number type, too."""
    int8 = {**INT8, "weights_MB": [0.5, 1, 0.5, 1]}
    types = {"fast": {"bw_Mbps": 80, "mem_MB": 2.5, "model_profiles": {"m": [PLAIN, int8]}}}
    cluster.write("device_types.yml", types)
    cluster.write("devices.yml", {"fast": ["f0"]})
    assert (
        "0.5 MB of memory are missing: the layers need 3.0 MB"
        in cluster.run("--plan=auto", "-i0", "-o0").error
    )
    assert "3.5 MB of memory are missing: the layers need 6.0 MB" in cluster.run("-i0", "-o0").error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size=8"], "--batch-size and --plan auto: the plan chooses it"),
        (["--link-bits=8"], "--link-bits and --plan auto: the plan chooses it"),
        (["--min-agreement=1.1"], "--min-agreement: '1.1' is not a number from 0 to 1"),
        (["--widths=9"], "--widths: '9' is neither 0, 2 to 8, 16"),
        (["--min-throughput=1"], "--min-throughput needs --objective energy"),
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


def test_wrong_watts_are_refused(cluster: Cluster) -> None:
    with_watts(cluster)
    problem = json.loads(cluster.run("--plan=auto", "--format=problem").out)
    one = problem["settings"][0]["types"][0]
    for change, message in (
        ({"busy_w": 1}, "a busy host takes less power than an idle one"),
        ({"idle_w": 1}, "the settings have different idle_w for the host f0"),
    ):
        settings = [*problem["settings"]]
        settings[0] = {**settings[0], "types": [{**one, **change}, *settings[0]["types"][1:]]}
        done = run("--plan=auto", "--problem=-", text=json.dumps({**problem, "settings": settings}))
        assert done.code == 2
        assert message in done.error
