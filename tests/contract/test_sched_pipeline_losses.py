"""Test what sched-pipeline says about the loss of hosts, against every schedule of the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from effort import cases
from oracles.schedule_brute_force import best_schedules
from oracles.schedule_cases import Case, random_case
from sched_program import TYPES, Cluster, Run, run, with_types, written

from pipeedge.base.errors import InfeasibleError
from pipeedge.plan.costs import HostLoss
from pipeedge.plan.scheduler import SchedulerRequest, plan


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return written(tmp_path)


def without(case: Case, gone: int) -> Case:
    """Return the problem of the hosts that are left."""

    def left(host: int) -> int:
        return host - (host > gone)

    return replace(
        case,
        hosts=tuple(kind for host, kind in enumerate(case.hosts) if host != gone),
        data_host=None if case.data_host is None else left(case.data_host),
        links={(left(a), left(b)): speed for (a, b), speed in case.links.items() if gone not in (a, b)},
    )


def ask(case: Case, *options: str) -> Run:
    return run(
        "--problem=-",
        "--format=json",
        f"--link-bits={case.link_bits}",
        *options,
        text=json.dumps(case.to_json()),
    )


def test_losses_agree_with_all_schedules_of_the_other_hosts() -> None:
    """A loss costs what the best schedule of the others costs, and one can be survived if there is any."""
    rng = np.random.default_rng(20)
    survived = refused = 0
    for _ in range(cases(150)):
        case = random_case(rng, layers=(2, 6))
        now = best_schedules(case)
        done = ask(case, "--losses")
        if now is None:
            assert done.code == 3
            continue
        answer = json.loads(done.out)
        used = {stage["host"] for stage in answer["schedule"]}
        needed = []
        assert [loss["host"] for loss in answer["losses"]] == [str(host) for host in range(len(case.hosts))]
        for host, loss in enumerate(answer["losses"]):
            rest = without(case, host) if len(case.hosts) > 1 and host != case.data_host else None
            best = None if rest is None else best_schedules(rest)
            if host == case.data_host:
                assert (loss["effect"], loss["why"]) == (
                    "ends",
                    "it reads the inputs and collects the outputs",
                )
            elif best is None:
                needed.append(str(host))
                assert loss["effect"] == "ends"
                assert loss["why"]
                assert loss["host"] in used  # no schedule is without it
            elif loss["host"] not in used:
                assert (loss["effect"], best.throughput[0]) == ("none", pytest.approx(now.throughput[0]))
            else:
                assert loss["effect"] == "continues"
                assert loss["bottleneck_s"] == pytest.approx(best.throughput[0])
                if best.throughput[0] > 0 and now.throughput[0] > 0:
                    assert loss["throughput_ratio"] == pytest.approx(now.throughput[0] / best.throughput[0])
        strict = ask(case, "--survive-loss")
        if needed:
            refused += 1
            assert (strict.code, json.loads(strict.out)) == (3, {"status": "infeasible"})
            assert f"no schedule survives the loss of any one host: without {needed[0]}, " in strict.err
        else:
            survived += 1
            assert strict.code == 0
            assert json.loads(strict.out)["schedule"] == answer["schedule"]
    assert min(survived, refused) > 0


def test_each_effect_of_a_loss_has_a_line(cluster: Cluster) -> None:
    done = cluster.run("--losses", "--data-host", "s0")
    assert [next(iter(stage)) for stage in yaml.safe_load(done.out)] == ["f0", "f1"]
    assert done.err.splitlines() == [
        "loss of      f0, f1 (fast): 2 items/s, 75.00 % of now",
        "loss of      s0 (slow): ends the run: it reads the inputs and collects the outputs",
    ]
    both = cluster.run("--losses", "--explain", "--objective=latency")
    assert "time spent" in both.err
    assert "loss of      f1, s0: nothing changes, no stage is there" in both.err
    assert "loss of      f0 (fast): 1.333 items/s, 100.00 % of now, at a latency of 6.000 s" in both.err


def test_a_loss_that_cannot_be_taken_names_what_is_missing(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=4)
    needed = (
        "2.0 MB of memory are missing: the layers need 6.0 MB without buffers, 1 host together have 4.0 MB"
    )
    done = cluster.run("--losses", "-i0", "-o0")
    assert done.code == 0
    assert done.err.splitlines()[0] == f"loss of      f0, f1 (fast): ends the run: {needed}"
    refused = cluster.run("--survive-loss", "-i0", "-o0")
    assert (refused.code, refused.error) == (
        3,
        f"no schedule survives the loss of any one host: without f0, {needed}",
    )
    # The data host is always needed, so only the other one is asked about.
    assert "without f1, 2.0 MB" in cluster.run("--survive-loss", "--data-host=f0", "-i0", "-o0").error


def test_survival_is_asked_for_before_anything_is_printed(cluster: Cluster) -> None:
    assert cluster.run("--survive-loss").out == cluster.run().out
    assert cluster.run("--survive-loss", "--hosts=f0").out == ""
    done = cluster.run("--survive-loss", "--hosts=f0", "--losses")
    assert done.err.splitlines() == [
        "loss of      f0 (fast): ends the run: no host is left",
        "sched-pipeline: error: no schedule survives the loss of any one host: without f0, no host is left",
    ]
    done = run("--losses", "--format=problem")
    assert (done.code, done.error[:33]) == (2, "--losses: with --format problem n")


def test_python_reads_the_losses(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=TYPES["fast"]["mem_MB"])
    files = (cluster.folder / name for name in ("models.yml", "device_types.yml", "devices.yml"))
    request = SchedulerRequest(*files, "m", data_host="f0")
    assert plan(request, hosts=("f0", "f1")).losses == ()
    found = plan(replace(request, losses=True), hosts=("f0", "f1"))
    assert found.losses == (
        HostLoss("f0", "it reads the inputs and collects the outputs", None, "ends"),
        HostLoss("f1", None, pytest.approx(8 / 6), "continues"),
    )
    alone = replace(request, survive_loss=True, data_host=None, hosts=("f0",))
    with pytest.raises(InfeasibleError, match="without f0, no host is left"):
        plan(alone, hosts=("f0",))
