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


def asked(folder: Path, case: Case, *options: str) -> Run:
    files = []
    for option, name in FILES.items():
        path = folder / f"{name}.yml"
        path.write_text(json.dumps(getattr(case, name)))
        files += [option, str(path)]
    return run("-m", "m", *files, *case.options(), *options)


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
