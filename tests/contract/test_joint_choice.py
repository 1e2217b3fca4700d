"""Test --plan auto of runtime.py: what it takes from the files, and what becomes of it in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from shipped_model import DIGITS

from pipeedge.base.errors import InfeasibleError, RequestError, ScheduleError
from pipeedge.base.schedule import Schedule
from pipeedge.plan.choice import Trial
from pipeedge.plan.schedule_choice import Following, PlannedSchedule, plan_schedule
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


def files(folder: Path, bandwidth: float = 1000, int8_agreement: float | None = 0.996) -> str:
    profiles = [profile(4, "float32", 0.1), profile(8, "float32", 0.15)]
    profiles += [profile(size, "int8", 0.1, int8_agreement) for size in (8, 64)]
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


def planned(
    options: str, ranks: frozenset[int] | None = None, trial: FewBits | None = None
) -> PlannedSchedule:
    request = parse_runtime(["0", "2", *options.split()], Environment()).request
    return plan_schedule(
        request,
        DIGITS,
        following=None if ranks is None else Following(ranks),
        trial=None if trial is None else trial.trial,
    )


class FewBits:
    """A trial in which each number type and each number of bits costs what it says."""

    def __init__(self, **losses: float) -> None:
        self._losses = losses
        self.tried: list[str] = []

        self.trial = Trial(100, self._agreement)

    def _agreement(self, schedule: Schedule, microbatch_size: int) -> float:
        stages = [f"{stage.dtype} {stage.quant_bits}" for stage in schedule.stages]
        self.tried.append(f"{microbatch_size} {', '.join(stages)}")
        used = {stage.dtype for stage in schedule.stages}
        used |= {f"bits{stage.quant_bits}" for stage in schedule.stages}
        return 1 - sum(loss for name, loss in self._losses.items() if name in used)


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


def test_without_a_least_agreement_what_was_not_measured_is_used(tmp_path: Path) -> None:
    options = files(tmp_path, int8_agreement=None)
    measured, any_ = planned(f"{options} -u 8"), planned(f"{options} -u 8 --min-agreement 0")
    assert {stage.dtype for stage in measured.schedule.stages} == {"float32"}
    assert {stage.dtype for stage in any_.schedule.stages} == {"int8"}
    assert "expected" not in any_.notes[0]
    trial = FewBits(int8=0.7)
    tried = planned(f"{options} -u 8 --min-agreement 0", trial=trial)
    assert tried.notes[0] == f"{any_.notes[0]}, 0.3 on 100 held-out items"
    assert len(trial.tried) == 1


def test_plan_that_fails_on_held_out_items_gives_way_to_the_next_best(tmp_path: Path) -> None:
    options = f"{files(tmp_path, bandwidth=0.4)} --min-agreement 0.98"
    trial = FewBits(bits4=0.05)
    found = planned(options, trial=trial)
    assert trial.tried[0] == "8 int8 4, int8 0"
    assert trial.tried[-1] == "8 float32 8, float32 0"
    assert found.schedule.stages[0].quant_bits == 8
    refused, taken = found.notes[0], found.notes[len(trial.tried) - 1]
    assert refused.startswith("--held-out refuses microbatches of 8, ")
    assert refused.endswith("an agreement of 0.986 expected: 0.95 on 100 held-out items, 0.98 wanted")
    assert taken.startswith("--plan auto takes microbatches of 8, ")
    assert taken.endswith("an agreement of 1 expected, 1 on 100 held-out items")


def test_plan_expected_to_lose_nothing_loses_its_fewest_bits(tmp_path: Path) -> None:
    options = f"{files(tmp_path, bandwidth=0.8)} --min-agreement 1"
    trial = FewBits(bits8=0.01)
    found = planned(options, trial=trial)
    assert trial.tried == ["8 float32 8, float32 0", "8 float32 0"]
    assert found.schedule.stages[0].quant_bits == 0


def test_plan_expected_to_lose_nothing_loses_its_number_type(tmp_path: Path) -> None:
    options = f"{files(tmp_path, int8_agreement=1)} --min-agreement 1 -u 8"
    trial = FewBits(int8=0.01)
    found = planned(options, trial=trial)
    assert trial.tried == ["8 int8 0, int8 0", "8 float32 0, float32 0"]
    assert {stage.dtype for stage in found.schedule.stages} == {"float32"}


def test_no_plan_is_taken_that_fails_on_held_out_items(tmp_path: Path) -> None:
    trial = FewBits(float32=0.5, int8=0.5)
    with pytest.raises(InfeasibleError, match="no plan keeps the agreement on held-out items: --held-out re"):
        planned(files(tmp_path), trial=trial)
    assert trial.tried[0] == "8 int8 0, int8 0"
    assert trial.tried[-1] == "8 float32 0, float32 0"


def with_watts(options: str) -> str:
    """Write a meter's watts into the device type; return the options of a plan for energy."""
    path = Path(options.split("-sdt ")[1].split()[0])
    types = yaml.safe_load(path.read_text("utf-8"))
    types["board"] |= {"busy_W": 8, "idle_W": 3}
    path.write_text(yaml.safe_dump(types), encoding="utf-8")
    return f"{options} --objective energy"


def test_plan_for_energy_takes_few_hosts_and_states_its_joules(tmp_path: Path) -> None:
    options = with_watts(files(tmp_path))
    slow = planned(f"{options} -u 8")
    # 16 layers at 0.1 s and 8 W, in microbatches of 8.
    assert slow.schedule.ranks == (0,)
    assert slow.prediction is not None
    assert slow.prediction.joules_per_item == pytest.approx(16 * 0.1 * 8 / 8)
    assert ", 5 items/s, 1.6 J an item, an agreement of 0.996 expected" in slow.notes[0]
    fast = planned(f"{options} -u 8 --min-throughput 8")
    assert fast.schedule.ranks == (0, 1)
    assert fast.prediction is not None
    assert fast.prediction.joules_per_item == pytest.approx(1.6)  # neither of the two waits


def test_plan_for_energy_is_as_fast_as_it_can_after_a_loss(tmp_path: Path) -> None:
    options = f"{with_watts(files(tmp_path))} -u 8 --min-throughput 8"
    assert planned(options, frozenset({0})).schedule.ranks == (0,)
    with pytest.raises(InfeasibleError, match="none has a throughput of 80 items/s"):
        planned(f"{options}0")


def test_plan_after_a_loss_keeps_the_microbatch_size(tmp_path: Path) -> None:
    options = files(tmp_path)
    assert planned(f"{options} --min-agreement 1 -u 4", frozenset({0})).microbatch_size == 4
    with pytest.raises(InfeasibleError, match="none has an agreement of 1"):
        planned(f"{options} --min-agreement 1 -u 64", frozenset({0}))


def test_what_is_given_is_not_chosen(tmp_path: Path) -> None:
    options = files(tmp_path, bandwidth=0.8)
    for more, dtypes, bits in (
        ("", {"int8"}, 8),
        ("--dtype float32", {"float32"}, 8),
        ("--link-bits 0", {"int8"}, 0),
        ("--link-bits auto", {"int8"}, 8),
        ("-q 4,0 --min-agreement 0.98", {"int8"}, 4),
        ("--dtype float32 --link-bits 4 --min-agreement 0.9", {"float32"}, 4),
    ):
        stages = planned(f"{options} {more}").schedule.stages
        if len(stages) > 1:
            assert stages[0].quant_bits == bits, more
        assert dtypes <= {stage.dtype for stage in stages}, more


def test_given_bits_have_to_keep_the_agreement(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match=r"-q: an agreement of 0\.986 is expected, 0\.99 wanted"):
        planned(f"{files(tmp_path)} -u 8 -q 4,0")


def test_prediction_counts_the_bits_that_are_given(tmp_path: Path) -> None:
    options = files(tmp_path).replace("--plan auto", "")
    clear, compressed = (planned(f"{options} -u 8 {more}") for more in ("", "-q 8,0"))
    assert [stage.layers for stage in clear.schedule.stages] == [
        stage.layers for stage in compressed.schedule.stages
    ]
    before, after = (one.prediction.stages[0].link_s for one in (clear, compressed) if one.prediction)
    assert after == pytest.approx(before / 4)


def with_memory(folder: Path, mem_mb: float) -> None:
    """Let layers have 10 MB each in float32, and hosts some memory."""
    for name, entry, key, value in (
        ("models", "vit-digits", "mem_MB", [10.0] * LAYERS),
        ("types", "board", "mem_MB", mem_mb),
    ):
        path = folder / f"{name}.yml"
        content = yaml.safe_load(path.read_text("utf-8"))
        content[entry][key] = value
        path.write_text(yaml.safe_dump(content), encoding="utf-8")


@pytest.mark.parametrize(("how", "mem_mb"), [("--plan auto", 30), ("--dtype auto", 30), ("", 100)])
def test_any_plan_may_have_to_survive_the_loss_of_a_host(tmp_path: Path, how: str, mem_mb: float) -> None:
    options = f"{files(tmp_path).replace('--plan auto', how)} -u 8 -c tcp"
    assert len(planned(f"{options} --survive-loss").schedule.stages) == 2
    with_memory(tmp_path, mem_mb)  # for more than half of the layers, and not for all
    assert len(planned(options).schedule.stages) == 2
    with pytest.raises(InfeasibleError, match="survives the loss of any one host: without h1, "):
        planned(f"{options} --survive-loss")


@pytest.mark.parametrize("how", ["--plan auto", "--dtype auto", ""])
@pytest.mark.parametrize("objective", ["latency", "energy"])
def test_any_plan_may_have_any_objective(tmp_path: Path, how: str, objective: str) -> None:
    options = with_watts(files(tmp_path)).replace("--plan auto", how).replace("energy", objective)
    found = planned(f"{options} -u 8")
    # On equal hosts that take watts while they wait, one computes faster, and with less energy, than two.
    assert found.schedule.ranks == (0,)
    assert found.prediction is not None
    if objective == "energy":
        assert found.prediction.joules_per_item == pytest.approx((1.6 if how else 2.4), rel=0.01)


def test_fewer_bits_for_latency_keep_the_agreement(tmp_path: Path) -> None:
    """The layers fit on no single host."""
    options = f"{files(tmp_path, bandwidth=0.8).replace('--plan auto', '')} -u 8 --objective latency"
    with_memory(tmp_path, 100)
    for more, bits in (
        ("", 0),
        ("--link-bits auto", 4),
        ("--link-bits auto --min-agreement 0.995", 8),
    ):
        stages = planned(f"{options} {more}").schedule.stages
        assert [stage.quant_bits for stage in stages] == [bits, 0], more


def test_plan_after_a_loss_keeps_the_limits_of_the_one_before(tmp_path: Path) -> None:
    options = f"{files(tmp_path)} -u 8"
    first = planned(options, trial=FewBits(int8=0.7))
    assert {stage.dtype for stage in first.schedule.stages} == {"float32"}
    request = parse_runtime(["0", "2", *options.split()], Environment()).request
    for limits, dtype in ((None, "int8"), (first.limits, "float32")):
        after = plan_schedule(request, DIGITS, following=Following(frozenset({0}), limits))
        assert {stage.dtype for stage in after.schedule.stages} == {dtype}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("-pt 1,4,5,16", "--plan auto needs automatic scheduling"),
        ("--plan cut --held-out 5", "--held-out needs --plan auto or --dtype auto"),
        ("--held-out 5 -D 1", "--held-out needs the input on rank 0"),
        ("--held-out -5", "--held-out -5: the number of items must not be negative"),
        ("--serve 80 --held-out 5", "leave out --held-out"),
        ("--min-throughput 5", "--min-throughput needs --objective energy"),
        ("--objective energy --min-throughput 0", "--min-throughput 0: must be a number of items"),
        ("--objective energy", "the power of h0, h1 is unknown"),
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
