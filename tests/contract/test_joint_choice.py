"""Test --plan auto of runtime.py: what it takes from the files, and what becomes of it in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from shipped_model import DIGITS

from pipeedge.base.errors import InfeasibleError, RequestError, ScheduleError
from pipeedge.plan.schedule_choice import PlannedSchedule, plan_schedule
from pipeedge.plan.spec_files import load_models
from pipeedge.plan.spec_writing import add_model
from pipeedge.plan.specs import ModelSpec
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime

LAYERS = DIGITS.n_layers
CUTS = LAYERS - 1


def profile(size: int, dtype: str, seconds: float, agreement: float | None = None) -> dict[str, object]:
    known = {} if agreement is None else {"agreement": agreement}
    return {"batch_size": size, "dtype": dtype, "time_s": [seconds] * LAYERS, **known}


def files(folder: Path, bandwidth: float = 1000) -> str:
    profiles = [profile(4, "float32", 0.1), profile(8, "float32", 0.15), profile(8, "int8", 0.1, 0.996)]
    profiles.append(profile(64, "int8", 0.1, 0.996))
    types = {"board": {"mem_MB": 1024, "bw_Mbps": bandwidth, "model_profiles": {"vit-digits": profiles}}}
    model = {
        "layers": LAYERS,
        "mem_MB": [0.1] * LAYERS,
        "parameters_in": 64,
        "parameters_out": [*[10_000] * CUTS, 10],
        "agreement_at_bits": {8: [1] * CUTS, 4: [0.99] * CUTS},
    }
    contents = {"models": {"vit-digits": model}, "types": types, "devices": {"board": ["h0", "h1"]}}
    for name, content in contents.items():
        (folder / f"{name}.yml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return (
        f"-sm {folder}/models.yml -sdt {folder}/types.yml -sd {folder}/devices.yml -H h0,h1 -m vit-digits "
        "--plan auto"
    )


def planned(options: str, ranks: frozenset[int] | None = None) -> PlannedSchedule:
    request = parse_runtime(["0", "2", *options.split()], Environment()).request
    return plan_schedule(request, DIGITS, ranks=ranks)


def test_plan_has_types_bits_and_microbatch_size(tmp_path: Path) -> None:
    found = planned(files(tmp_path, bandwidth=0.8))
    assert found.microbatch_size == 8
    assert {stage.dtype for stage in found.schedule.stages} == {"int8"}
    assert found.schedule.stages[0].quant_bits == 8
    assert found.prediction is not None
    assert found.prediction.microbatch_size == 8
    assert found.notes[0].startswith("--plan auto takes microbatches of 8, ")
    assert found.notes[0].endswith("an agreement of 0.996 expected")


def test_microbatches_are_no_larger_than_requested(tmp_path: Path) -> None:
    options = files(tmp_path)
    assert planned(f"{options} -u 64").microbatch_size == 64
    assert planned(f"{options} -u 7").microbatch_size == 4
    with pytest.raises(ScheduleError, match="for microbatches of at most 3"):
        planned(f"{options} -u 3")


def test_least_agreement_is_kept(tmp_path: Path) -> None:
    found = planned(f"{files(tmp_path)} --min-agreement 1")
    assert {stage.dtype for stage in found.schedule.stages} == {"float32"}


def test_plan_after_a_loss_keeps_the_microbatch_size(tmp_path: Path) -> None:
    options = files(tmp_path)
    assert planned(f"{options} --min-agreement 1 -u 4", frozenset({0})).microbatch_size == 4
    with pytest.raises(InfeasibleError, match="none has an agreement of 1"):
        planned(f"{options} --min-agreement 1 -u 64", frozenset({0}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--dtype int8", "--dtype and --plan auto: the plan chooses the number types"),
        ("-q 8,0", "-q and --plan auto: the plan chooses the bits"),
        ("--link-bits 8", "--link-bits and --plan auto: the plan chooses the bits"),
        ("--survive-loss", "--survive-loss and --plan auto cannot be combined"),
        ("-pt 1,4,5,16", "--plan auto needs automatic scheduling"),
    ],
)
def test_what_the_plan_chooses_is_not_given(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        planned(f"{files(tmp_path)} {more}")


def test_sensitivity_survives_another_model_in_the_file(tmp_path: Path) -> None:
    files(tmp_path)
    path = tmp_path / "models.yml"
    before = load_models(path)["vit-digits"]
    add_model(path, "other", ModelSpec(mem_bytes=(1.0,), elements_in=1, elements_out=(1,)))
    assert load_models(path)["vit-digits"] == before
    assert before.agreement_at_bits[4] == (0.99,) * CUTS
