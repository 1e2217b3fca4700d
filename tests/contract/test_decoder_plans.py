"""Test the plans of decoders: against brute force from the files, and what the program says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import cases
from oracles.decoder_brute_force import Case, Cluster, Stage, random_case
from sched_program import Run, run

FILES = {"-sm": "models", "-sdt": "types", "-sd": "devices", "--dev-neighbors-file": "neighbors"}


def asked(folder: Path, case: Case, *options: str, text: str = "") -> Run:
    files = []
    for option, name in FILES.items():
        path = folder / f"{name}.yml"
        path.write_text(json.dumps(getattr(case, name)))
        files += [option, str(path)]
    return run("-m", "m", *files, *case.options(), *options, text=text)


def plan_of(answer: dict[str, Any]) -> list[Stage]:
    return [
        Stage(row["host"], row["layers"][0] - 1, row["layers"][1], row["dtype"], row["quant_bits"])
        for row in answer["schedule"]
    ]


def check_answer(case: Case, answer: dict[str, Any]) -> float:
    """Check that the plan keeps the limits and costs what the answer says; return its objective."""
    cluster, plan = Cluster(case), plan_of(answer)
    assert cluster.fits(plan)
    figures = cluster.figures(plan)
    assert cluster.keeps(figures, slack=1e-8)
    text = answer["text"]
    assert text["tokens_per_s"] == pytest.approx(figures.tokens_per_s, rel=1e-8)
    assert text["between_tokens_s"] == pytest.approx(case.streams / figures.tokens_per_s, rel=1e-8)
    assert text["token_s"] == pytest.approx(figures.token_s, rel=1e-8)
    assert text["first_token_s"] == pytest.approx(figures.first_s, rel=1e-8)
    before: list[Stage | None] = [None, *plan[:-1]]
    for row, stage, other in zip(answer["schedule"], plan, before, strict=True):
        ends = 0.0
        if stage.host == case.data_host:
            profile = cluster.profile(stage.host, stage.dtype)
            assert profile is not None
            ends = profile["steps"]["ends"]["mem_MB"] * 2**20
        assert row["mem_bytes"] + ends == pytest.approx(cluster.needed_bytes(stage, other), rel=1e-8)
    return cluster.value(figures)


def test_a_plan_is_the_best_of_all(tmp_path: Path) -> None:
    feasible = 0
    for seed in range(cases(10_000, part=125)):
        case = random_case(np.random.default_rng(seed))
        best, count = Cluster(case).best()
        done = asked(tmp_path, case, "--format=json")
        if not count:
            assert done.code == 3, (seed, done)
            continue
        feasible += 1
        assert done.code == 0, (seed, done)
        answer = json.loads(done.out)
        assert answer["status"] == "optimal", seed
        assert check_answer(case, answer) == pytest.approx(best, rel=1e-8), seed
    assert feasible > 10


def test_how_long_groups_wait_is_told(tmp_path: Path) -> None:
    told = set()
    for seed in range(40):
        case = random_case(np.random.default_rng(seed))
        done = asked(tmp_path, case, "--explain")
        if done.code:
            continue
        answer = json.loads(asked(tmp_path, case, "--format=json").out)
        cluster, groups = Cluster(case), round(answer["text"]["groups"])
        waiting, rows = cluster.waiting(groups), case.streams / groups
        step = cluster.passing(plan_of(answer), rows, cluster.positions, chunk=False)
        waits = waiting > 1 and rows / (step.longest * waiting) < case.streams / step.latency
        line = f" of a stream, of which groups wait {100 * (1 - 1 / waiting):.2f} % for slow steps\n"
        assert (line in done.err) == waits, seed
        told.add(waits)
    assert told == {True, False}


def test_steps_that_take_no_time_are_refused(tmp_path: Path) -> None:
    case = random_case(np.random.default_rng(0))
    for kind in case.types.values():
        for profile in kind["model_profiles"]["m"]:
            for name in ("fixed_s", "start_s", "row_s", "many_start_s", "many_row_s", "position_s"):
                if name in profile["steps"]:
                    profile["steps"][name] = [0.0] * case.layers
    done = asked(tmp_path, case)
    assert done.code == 2
    assert done.error.endswith("m: steps: no layer takes any time; measure them again (pipeedge profile)")


def test_pauses_after_losses_add_up(tmp_path: Path) -> None:
    seen = kept = shorter = copied = 0
    for seed in range(cases(2_000, part=60)):
        rng = np.random.default_rng(seed)
        case = random_case(rng)
        for kind in case.types.values():
            for profile in kind["model_profiles"]["m"]:
                profile["steps"]["load_s_per_MB"] = float(rng.uniform(0, 0.1))
        done = asked(tmp_path, case, "--format=json", "--losses")
        if done.code:
            continue
        answer = json.loads(done.out)
        for loss in answer["losses"]:
            if loss["effect"] != "continues":
                assert "pause_s" not in loss
                continue
            after = [
                Stage(one["host"], one["layers"][0] - 1, one["layers"][1], one["dtype"], one["quant_bits"])
                for one in loss["stages"]
            ]
            cluster, plan = Cluster(case), plan_of(answer)
            assert loss["pause_s"] == pytest.approx(cluster.pause(plan, after, keeps=True), rel=1e-8), seed
            assert loss["pause_without_cache_s"] == pytest.approx(
                cluster.pause(plan, after, keeps=False), rel=1e-8
            ), seed
            assert loss["pause_with_outputs_s"] == pytest.approx(
                cluster.pause(plan, after, keeps=True, outputs=True), rel=1e-8
            ), seed
            assert loss["pause_with_copies_s"] == pytest.approx(
                cluster.pause(plan, after, keeps=True, copies=True), rel=1e-8
            ), seed
            seen += 1
            copied += loss["pause_with_copies_s"] < loss["pause_s"]
            shorter += loss["pause_with_outputs_s"] < loss["pause_s"]
            kept += loss["pause_s"] < loss["pause_without_cache_s"]
    assert seen > kept > 0
    assert seen > copied > 0
    assert seen > shorter > 0


def test_a_plan_after_a_loss_reads_what_is_loaded_once(tmp_path: Path) -> None:
    # Other places of the head are compared, too, with the files that were read.
    loaded = json.dumps({"loaded": [{"host": "h0", "layers": [1, 1], "quant_bits": 0, "dtype": "float32"}]})
    cases_of_two = (random_case(np.random.default_rng(seed)) for seed in range(40))
    codes = [
        asked(tmp_path, case, "--format=json", "--conditions=-", text=loaded).code
        for case in cases_of_two
        if len(case.devices) > 1
    ]
    assert set(codes) == {0, 3}
