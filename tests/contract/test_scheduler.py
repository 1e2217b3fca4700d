"""Test requests to the native scheduler, its results, and schedule files."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from pipeedge.base.errors import (
    InfeasibleError,
    PipeEdgeError,
    RequestError,
    ScheduleError,
    SpecError,
    exit_code,
)
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.plan import sched_pipeline, scheduler
from pipeedge.plan.sched_pipeline import find_executable
from pipeedge.plan.schedule_files import format_schedule, load_schedule, save_schedule
from pipeedge.plan.scheduler import SchedulerRequest, Solution

VIT_BASE = "google/vit-base-patch16-224"
VIT_LARGE = "google/vit-large-patch16-224"
HOSTS = [f"rcc-{i}" for i in range(4)] + [f"mb-{i}" for i in range(4)]


def request(model: str = VIT_BASE, **changes: object) -> SchedulerRequest:
    files = {
        "models_file": ROOT / "models.yml",
        "dev_types_file": ROOT / "device_types.yml",
        "dev_file": ROOT / "devices.yml",
    }
    return SchedulerRequest(**{**files, "model_name": model, **changes})  # type: ignore[arg-type]


def plan(asked: SchedulerRequest, hosts: list[str] | None = None) -> Solution:
    return scheduler.plan(asked, hosts=hosts)


# --- planning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "layers", "best"), [(VIT_BASE, 48, 1.548760), (VIT_LARGE, 96, 5.042833)])
def test_the_examples_are_planned_at_their_optimum(model: str, layers: int, best: float) -> None:
    found = plan(request(model), hosts=HOSTS)
    assert found.costs.bottleneck_s == pytest.approx(best, abs=5e-7)
    assert found.costs.throughput_items_per_s == pytest.approx(8 / best, rel=1e-6)
    assert found.costs.gap == 0
    assert found.costs.warnings == ()
    found.schedule.check(n_layers=layers, world_size=8)
    for stage in found.schedule.stages:
        assert HOSTS[stage.rank] == stage.host
    assert f"computes {best:.3f} s" in found.costs.bottleneck.words


def test_hosts_may_be_called_by_their_ranks(tmp_path: Path) -> None:
    devices = tmp_path / "devices.yml"
    devices.write_text("Minnowboard-E3845: [2, '0']\nRCC-VE-C2000: [1]\n")
    found = plan(request(dev_file=devices))
    assert sorted(found.schedule.ranks) == [0, 1, 2]
    assert {stage.host for stage in found.schedule.stages} == {None}


def test_hosts_that_are_no_ranks_need_a_list() -> None:
    with pytest.raises(ScheduleError, match="the host mb-0 is no rank; name the host of each rank with -H"):
        plan(request())


def test_a_host_without_a_rank_is_named() -> None:
    with pytest.raises(
        ScheduleError, match="the host rcc-3 has no rank; the hosts that have one are rcc-0, "
    ):
        plan(request(), hosts=[host for host in HOSTS if host != "rcc-3"])


def test_a_list_that_names_a_host_twice_is_refused() -> None:
    with pytest.raises(ScheduleError, match="names mb-0 twice"):
        plan(request(), hosts=[*HOSTS, "mb-0"])


def test_the_options_reach_the_program(tmp_path: Path) -> None:
    latency = plan(request(objective="latency"), hosts=HOSTS)
    assert len(latency.schedule.stages) == 1
    here, there = (plan(request(data_host=host), hosts=HOSTS).costs for host in (None, "mb-3"))
    assert there.latency_s > here.latency_s
    neighbors = tmp_path / "n.yml"
    neighbors.write_text(
        "".join(f"{a}: {{{', '.join(f'{b}: {{bw_Mbps: 0}}' for b in HOSTS)}}}\n" for a in HOSTS)
    )
    assert len(plan(request(dev_neighbors_file=neighbors), hosts=HOSTS).schedule.stages) == 1
    with pytest.raises(InfeasibleError, match="layer 1 fits on no host"):
        plan(request(buffers_in=10_000, buffers_out=10_000), hosts=HOSTS)


def test_types_left_out_are_reported(tmp_path: Path) -> None:
    devices = tmp_path / "devices.yml"
    devices.write_text("Minnowboard-E3845: [0]\nquick: [1, 2]\n")
    found = plan(request(dev_file=devices))
    (warning,) = found.costs.warnings
    assert "the type quick is not in" in warning
    assert found.schedule.ranks == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models_file": Path("none.yml")}, "sched-pipeline: none.yml: no such file"),
        ({"model_name": "bert"}, "no model bert; the file has: DummyModel, google/vit-base"),
        ({"model_name": ""}, "the value is empty"),
        ({"model_name": "a\0b"}, "a name cannot be passed to sched-pipeline"),
        ({"microbatch_size": 3}, "no profile for google/vit-base-patch16-224, batch size 3"),
        ({"dtype": "float64"}, "unknown dtype float64"),
        ({"data_host": "zz"}, "--data-host zz: no such host"),
    ],
)
def test_a_wrong_request_is_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan(request(**changes), hosts=HOSTS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert exit_code(caught.value) == 2


def test_messages_name_the_command_that_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeedge run"])
    with pytest.raises(RequestError, match=r"^pipeedge schedule: none\.yml: no such file"):
        plan(request(models_file=Path("none.yml")))


@pytest.mark.parametrize(
    "changes",
    [
        {"microbatch_size": 0},
        {"buffers_in": -1},
        {"buffers_out": -1},
        {"objective": "cost"},
        {"time_limit_s": 0.0},
        {"time_limit_s": float("nan")},
        {"time_limit_s": float("inf")},
    ],
)
def test_a_request_is_checked_on_creation(changes: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        request(**changes)


# --- the program ------------------------------------------------------------------------------------


def fake_program(folder: Path, script: str) -> Path:
    path = folder / "sched-pipeline"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -SEGV $$", "sched-pipeline was ended by signal 11"),
        (
            "echo 'sched-pipeline: error: out of memory' >&2; exit 1",
            "failed with exit status 1: .*out of memory",
        ),
        ("echo '[]'", "sched-pipeline is of another version"),
        ("echo nonsense", "sched-pipeline is of another version"),
        (
            """echo '{"schedule": [{"host": "mb-0", "layers": [1]}]}'""",
            "sched-pipeline is of another version",
        ),
    ],
)
def test_a_failing_program_is_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    program = fake_program(tmp_path, script)
    monkeypatch.setattr(sched_pipeline, "find_executable", lambda: program)
    with pytest.raises(PipeEdgeError, match=message) as caught:
        plan(request(), hosts=HOSTS)
    assert exit_code(caught.value) == 1


def answer(*stages: tuple[str, int, int], layers: int) -> dict[str, object]:
    costs = dict.fromkeys(("compute_s", "data_s", "link_in_s", "link_out_s"), 0.0)
    schedule = [
        {"host": host, "layers": [first, last], "quant_bits": 0, "dtype": "float32", **costs}
        for host, first, last in stages
    ]
    figures = dict.fromkeys(("bottleneck_s", "latency_s", "feed_s", "collect_s", "loss"), 0.0)
    return {
        "schedule": schedule,
        "layers": layers,
        "batch_size": 8,
        "throughput_items_per_s": None,
        "losses_known": False,
        "bottleneck": {"words": ""},
        "warnings": [],
        **figures,
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (answer(("mb-0", 1, 3), layers=4), "layer 4 is covered by no stage"),
        (answer(("mb-0", 1, 2), ("mb-1", 4, 4), layers=4), "layer 3 is covered by no stage"),
        (answer(("mb-0", 1, 2), ("mb-1", 2, 4), layers=4), "overlaps"),
        (answer(("mb-0", 1, 2), ("mb-0", 3, 4), layers=4), "the host mb-0 is given 2 stages"),
        (answer(("mb-0", 1, 5), layers=4), "goes beyond the model"),
        (answer(("mb-9", 1, 4), layers=4), "the host mb-9 has no rank"),
    ],
)
def test_the_answer_is_checked(body: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        scheduler.read_answer(body, HOSTS)


def test_the_program_is_found_beside_the_interpreter_then_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_executable().name == "sched-pipeline"
    environment, elsewhere = tmp_path / "bin", tmp_path / "elsewhere"
    environment.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))
    with pytest.raises(
        RequestError, match=r"sched-pipeline is neither in .* nor on the PATH; install the package"
    ):
        find_executable()
    on_path = fake_program(elsewhere, "")
    assert find_executable() == on_path
    beside = fake_program(environment, "")
    assert find_executable() == beside


# --- schedule files ---------------------------------------------------------------------------------

host_lists = st.lists(
    st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=8).filter(
        lambda name: name != "quant_bits"
    ),
    min_size=1,
    max_size=6,
    unique=True,
)


@settings(max_examples=80)
@given(data=st.data(), hosts=host_lists, named=st.booleans())
def test_a_schedule_reads_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, hosts: list[str], named: bool
) -> None:
    ranks = data.draw(st.permutations(range(len(hosts))))[: data.draw(st.integers(1, len(hosts)))]
    start, stages = 0, []
    for rank in ranks:
        stop = start + data.draw(st.integers(1, 9))
        bits = data.draw(st.sampled_from([0, 0, 2, 8, 16]))
        stages.append(StagePlan(LayerRange(start, stop), rank, hosts[rank] if named else None, bits))
        start = stop
    schedule = Schedule(tuple(stages))
    path = tmp_path_factory.mktemp("schedules") / "s.yml"
    save_schedule(path, schedule)
    assert load_schedule(path, hosts=hosts if named else None) == schedule


def test_without_bits_the_form_is_the_original_s() -> None:
    schedule = Schedule.from_partition([1, 6, 7, 12]).with_hosts(["mb-0", "mb-1"])
    assert format_schedule(schedule) == "- mb-0: [1, 6]\n- mb-1: [7, 12]\n"
    compressed = Schedule.from_partition([1, 6, 7, 12]).with_hosts(["mb-0", "mb-1"]).with_quant_bits([8, 0])
    assert format_schedule(compressed) == "- mb-0: [1, 6]\n  quant_bits: 8\n- mb-1: [7, 12]\n"
    assert yaml.safe_load(format_schedule(compressed))[0] == {"mb-0": [1, 6], "quant_bits": 8}


def test_a_printed_schedule_is_a_schedule_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.yml"
    with path.open("w") as stream:
        subprocess.run([find_executable()], cwd=ROOT, stdout=stream, check=True)
    assert load_schedule(path, hosts=HOSTS) == plan(request(), hosts=HOSTS).schedule


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", SpecError, "s.yml: is empty"),
        ("[]\n", SpecError, "s.yml:1: holds no stage"),
        ("mb-0: [1, 2]\n", SpecError, "s.yml:1: is a map; a list is expected"),
        ("- mb-0\n", SpecError, "s.yml:1: entry 1: is 'mb-0'; a map is expected"),
        ("- {mb-0: [1, 2], mb-1: [3, 4]}\n", SpecError, "s.yml:1: entry 1: must have one host"),
        ("- {quant_bits: 8}\n", SpecError, "s.yml:1: entry 1: must have one host"),
        ("- mb-0: [1, 2, 3]\n", SpecError, "s.yml:1: entry 1: mb-0: has 3 numbers; the first and the last"),
        ("- mb-0: [2, 1]\n", SpecError, "s.yml:1: entry 1: mb-0: [2, 1] is not a range of layers"),
        ("- mb-0: [0, 1]\n", SpecError, "s.yml:1: entry 1: mb-0: [0, 1] is not a range of layers"),
        ("- mb-0: [1, x]\n", SpecError, "mb-0: entry 2: is 'x'; a number is expected"),
        (
            "- {mb-0: [1, 2], quant_bits: 64}\n",
            SpecError,
            "quant_bits: is 64; a link carries 2 to 8 or 16 bits per value",
        ),
        ("- {mb-0: [1, 2], quant_bits: -1}\n", SpecError, "quant_bits: is -1; it must not be negative"),
        ("- mb-0: [1, 2]\n- mb-1: [4, 5]\n", ScheduleError, "s.yml: layer 3 is covered by no stage"),
        ("- mb-0: [1, 2]\n- mb-0: [3, 4]\n", ScheduleError, "s.yml: the host mb-0 is given 2 stages"),
        (
            "- mb-7: [1, 2]\n",
            ScheduleError,
            "s.yml: the host mb-7 has no rank; the hosts that have one are mb-0",
        ),
    ],
)
def test_a_bad_schedule_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yml").write_text(text)
    with pytest.raises(error) as caught:
        load_schedule("s.yml", hosts=["mb-0", "mb-1"])
    assert message in str(caught.value)


def test_a_host_named_like_a_key_is_refused(tmp_path: Path) -> None:
    schedule = Schedule.from_partition([1, 2]).with_hosts(["quant_bits"])
    with pytest.raises(ScheduleError, match="cannot be written"):
        save_schedule(tmp_path / "s.yml", schedule)
    assert not list(tmp_path.iterdir())
