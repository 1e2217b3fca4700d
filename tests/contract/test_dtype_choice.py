"""Number types that the scheduler chooses from profiles in several types."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from shipped_model import DIGITS

from pipeedge.base.errors import InfeasibleError, RequestError
from pipeedge.base.schedule import LayerRange
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime

# --- automatic scheduling -------------------------------------------------------------------------------


def cluster(
    directory: Path,
    kinds: dict[str, dict[str, tuple[float, float | None]]],
    mem_mb: float,
    more: dict[str, object] | None = None,
) -> str:
    """Scheduler's files for two hosts, one of each kind; for each number type the time of a layer and the
    agreement. The options that name them."""
    profiles = {
        kind: [
            {"dtype": f"torch.{dtype}", "batch_size": 8, "time_s": [seconds] * 16}
            | ({} if known is None else {"agreement": known})
            | (more or {})
            for dtype, (seconds, known) in each.items()
        ]
        for kind, each in kinds.items()
    }
    specs = [DIGITS.payload_specs(cut, 1) for cut in range(17)]
    sizes = [sum(spec.elements for spec in each) for each in specs]
    weights = [DIGITS.weight_bytes(LayerRange(at, at + 1)) / 2**20 for at in range(16)]
    documents = {
        "m.yml": {
            "vit-digits": {
                "layers": 16,
                "mem_MB": weights,
                "parameters_in": sizes[0],
                "parameters_out": sizes[1:],
            }
        },
        "t.yml": {
            kind: {"bw_Mbps": 1000, "mem_MB": mem_mb, "model_profiles": {"vit-digits": each}}
            for kind, each in profiles.items()
        },
        "d.yml": {kind: [str(rank)] for rank, kind in enumerate(kinds)},
    }
    for name, document in documents.items():
        (directory / name).write_text(yaml.safe_dump(document))
    return f"-sm {directory}/m.yml -sdt {directory}/t.yml -sd {directory}/d.yml"


def scheduled(files: str, options: str) -> tuple[list[str], tuple[str, ...]]:
    request = parse_runtime(
        ["0", "2", "-m", "vit-digits", *files.split(), *options.split()], Environment()
    ).request
    planned = plan_schedule(request, DIGITS)
    return [stage.dtype for stage in planned.schedule.stages], planned.notes


@pytest.mark.parametrize(
    ("written", "passed_on"), [("onednn", "onednn"), ("torch", "torch"), ("other", None), (["list"], None)]
)
def test_the_kernels_of_a_profile_are_passed_on(
    written: object, passed_on: str | None, tmp_path: Path
) -> None:
    files = cluster(tmp_path, {"a": {"float32": (0.04, None)}}, 1024, {"kernels": written})
    request = parse_runtime(["0", "1", "-m", "vit-digits", *files.split()], Environment()).request
    prediction = plan_schedule(request, DIGITS).prediction
    assert prediction is not None
    assert [stage.kernels for stage in prediction.stages] == [passed_on]


BOTH = {"float32": (0.04, None), "bfloat16": (0.02, 0.999), "int8": (0.01, 0.98)}


def test_auto_takes_the_fastest_type_that_agrees_enough(tmp_path: Path) -> None:
    files = cluster(tmp_path, {"a": BOTH, "b": BOTH}, 1024)
    for options, dtype in (
        ("--dtype auto", "int8"),
        ("--dtype auto --min-agreement 0.99", "bfloat16"),
        ("--dtype auto --min-agreement 1", "float32"),
        ("--dtype bfloat16", "bfloat16"),
        ("", "float32"),
    ):
        dtypes, notes = scheduled(files, options)
        assert set(dtypes) == {dtype}
        assert any(f"--dtype auto takes {dtype}, " in note for note in notes) == ("auto" in options)


def test_a_least_agreement_of_0_allows_types_without_one(tmp_path: Path) -> None:
    files = cluster(tmp_path, {"a": {"float32": (0.04, None), "int8": (0.01, None)}}, 1024)
    for least, dtype in (("0", "int8"), ("0.01", "float32")):
        assert set(scheduled(files, f"--dtype auto --min-agreement {least}")[0]) == {dtype}


def test_auto_lets_each_kind_of_device_compute_in_its_own_type(tmp_path: Path) -> None:
    old = {"float32": (0.04, None), "bfloat16": (0.2, 0.999)}
    dtypes, notes = scheduled(cluster(tmp_path, {"old": old, "new": BOTH}, 1024), "--dtype auto")
    assert set(dtypes) == {"float32", "int8"}
    assert "auto takes int8 on 1, float32 on 0, " in notes[0]


def test_weights_in_another_type_fit_where_float32_does_not(tmp_path: Path) -> None:
    files = cluster(tmp_path, {"a": BOTH, "b": BOTH}, 0.4)
    with pytest.raises(InfeasibleError):
        scheduled(files, "")
    assert set(scheduled(files, "--dtype auto")[0]) <= {"bfloat16", "int8"}


def test_a_device_with_low_agreement_is_not_used(tmp_path: Path) -> None:
    files = cluster(tmp_path, {"good": BOTH, "bad": {"int8": (0.001, 0.5)}}, 1024)
    request = parse_runtime(
        ["0", "2", "-m", "vit-digits", *files.split(), *["--dtype", "auto", "--min-agreement", "0.975"]],
        Environment(),
    ).request
    planned = plan_schedule(request, DIGITS)
    assert [(stage.rank, stage.dtype) for stage in planned.schedule.stages] == [(0, "int8")]


@pytest.mark.parametrize("options", ["--dtype auto", "--dtype int8"])
def test_messages_name_the_user_s_files_for_any_number_type(options: str, tmp_path: Path) -> None:
    files = cluster(tmp_path, {"old": {"float32": (0.04, None)}, "new": BOTH}, 1024)
    _, notes = scheduled(files, options)
    assert all(str(tmp_path) in note for note in notes if ".yml" in note)
    models = tmp_path / "m.yml"
    models.write_text(models.read_text().replace("vit-digits", "vit-other"))
    with pytest.raises(RequestError, match=f"{models}: no model vit-digits; the file has: vit-other"):
        scheduled(files, options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--dtype auto --min-agreement 0.99",
            "none has an agreement of 0.99; lower --min-agreement",
        ),
        ("--dtype bfloat16", "a has no profile for vit-digits, batch size 8, dtype bfloat16"),
        ("--dtype auto -u 4", "a has no profile for vit-digits, batch size 4"),
        ("--dtype int8,float32", "give one number type for all, or auto"),
    ],
)
def test_dtype_without_profile_is_refused(options: str, said: str, tmp_path: Path) -> None:
    only = {"int8": (0.01, 0.98)}
    with pytest.raises((RequestError, InfeasibleError), match=said):
        scheduled(cluster(tmp_path, {"a": only, "b": only}, 1024), options)
