"""The profiler: its measurements, the files it makes, and that mistakes leave files unchanged."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from pipeedge.base.errors import EXIT_REQUEST, PipeEdgeError, SpecError
from pipeedge.base.machine import ControlGroups, MemoryBudget, available_bytes
from pipeedge.base.payload import specs_bytes
from pipeedge.base.program import guard
from pipeedge.base.schedule import LayerRange
from pipeedge.models import find_model
from pipeedge.plan import specs
from pipeedge.profile import session
from pipeedge.profile.converting import convert_to_device_type, convert_to_model
from pipeedge.profile.data_work import measure_data_work
from pipeedge.profile.handling import Wire
from pipeedge.profile.measuring import (
    Pacing,
    activation_peaks,
    made_up_payload,
    peaks_between,
    shard_bytes,
    summaries,
    time_layers,
)
from pipeedge.profile.options import (
    ProfileCommand,
    SyntheticCommand,
    parse_device_types,
    parse_models,
    parse_profiler,
)
from pipeedge.profile.results import (
    LayerResult,
    LengthResult,
    ProfileResults,
    load_results,
    ranges_text,
    save_results,
)
from pipeedge.transport.frame import HEADER_BYTES

MIB = 2**20
CPU = torch.device("cpu")
DIGITS = ("-m", "vit-digits", "-i", "2")


# --- results files ----------------------------------------------------------------------------------

shapes = st.lists(
    st.lists(st.integers(1, 999), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
).map(tuple)
amounts = st.floats(0, 1e6)
maybe = st.none() | amounts


@st.composite
def results(draw: st.DrawFn) -> ProfileResults:
    layers = draw(st.integers(1, 12))
    numbers = sorted(draw(st.sets(st.integers(1, layers))))
    tokens = draw(st.none() | st.integers(100, 999))
    shorter = () if tokens is None else tuple(draw(st.sets(st.integers(1, 99), max_size=2)))
    lengths = st.tuples(
        *(
            st.builds(
                LengthResult,
                tokens=st.just(length),
                shape_in=shapes,
                shape_out=shapes,
                time_s=amounts,
                time_spread_s=maybe,
                activations_bytes=st.none() | amounts.map(lambda value: value * MIB),
                receive_s=maybe,
                send_s=maybe,
            )
            for length in shorter
        )
    )
    return ProfileResults(
        model_name=draw(st.sampled_from(["google/vit-base-patch16-224", "my model", "yes"])),
        dtype=draw(st.sampled_from(["torch.float32", "torch.int8"])),
        batch_size=draw(st.integers(1, 64)),
        layers=layers,
        profile_data=tuple(
            LayerResult(
                layer=number,
                memory_bytes=draw(amounts) * MIB,
                shape_in=draw(shapes),
                shape_out=draw(shapes),
                time_s=draw(amounts),
                time_spread_s=draw(maybe),
                activations_bytes=draw(st.none() | amounts.map(lambda value: value * MIB)),
                receive_s=draw(maybe),
                send_s=draw(maybe),
                lengths=draw(lengths),
                extra=draw(st.sampled_from([{}, {"note": "kept"}])),
            )
            for number in numbers
        ),
        device=draw(st.none() | st.just("cpu")),
        threads=draw(st.none() | st.integers(1, 64)),
        process_bytes=draw(st.none() | st.integers(1, 999).map(lambda value: value * MIB)),
        tokens=tokens,
        extra=draw(st.sampled_from([{}, {"board": [1, 2]}])),
    )


@settings(max_examples=40, deadline=None)
@given(written=results())
def test_results_read_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, written: ProfileResults
) -> None:
    path = tmp_path_factory.mktemp("results") / "r.yml"
    save_results(path, written)
    assert load_results(path) == written


@settings(max_examples=40, deadline=None)
@given(whole=results(), data=st.data())
def test_parts_add_up_to_the_whole_in_any_order(whole: ProfileResults, data: st.DataObject) -> None:
    first = data.draw(st.sets(st.integers(1, whole.layers)))
    one = replace(whole, profile_data=tuple(x for x in whole.profile_data if x.layer in first))
    other = replace(whole, profile_data=tuple(x for x in whole.profile_data if x.layer not in first))
    assert one.joined(other, "f").profile_data == whole.profile_data
    assert other.joined(one, "f").profile_data == whole.profile_data


def test_a_file_of_the_original_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "profiler_results.yml"
    path.write_text(
        "batch_size: 8\ndtype: torch.float32\nlayers: 48\nmodel_name: m\nprofile_data:\n"
        "- layer: 1\n  memory: 2.5\n  shape_in:\n  - [3, 224, 224]\n"
        "  shape_out:\n  - [197, 768]\n  - [197, 768]\n  time: 0.25\n"
    )
    loaded = load_results(path)
    assert loaded.profile_data[0].memory_bytes == 2.5 * MIB
    assert loaded.missing == tuple(range(2, 49))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("layers: 48", "layers: is 0"),
        ("time: 0.25", "time: is -1"),
        ("- layer: 1", "must be at least 1"),
        ("memory: 2.5", "the key memory is missing"),
    ],
)
def test_an_invalid_results_file_is_rejected(tmp_path: Path, change: str, says: str) -> None:
    text = (
        "batch_size: 8\ndtype: torch.float32\nlayers: 48\nmodel_name: m\nprofile_data:\n"
        "- layer: 1\n  memory: 2.5\n  shape_in: [[3]]\n  shape_out: [[1]]\n  time: 0.25\n"
    )
    spoilt = {
        "layers: 48": "layers: 0",
        "time: 0.25": "time: -1",
        "- layer: 1": "- layer: 0",
        "memory: 2.5": "m: 1",
    }
    (tmp_path / "r.yml").write_text(text.replace(change, spoilt[change]))
    with pytest.raises(SpecError, match=rf"r\.yml.*{says}"):
        load_results(tmp_path / "r.yml")


def test_layer_numbers_are_formatted_as_ranges() -> None:
    assert ranges_text([7, 1, 2, 3, 9, 10]) == "1-3, 7, 9-10"


# --- measuring --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["vit", "deit", "bert"])
def test_memory_is_the_size_of_the_parameters(model_dirs: dict[str, Path], family: str) -> None:
    model = find_model(str(model_dirs[family]))
    for layers in (LayerRange(0, model.n_layers), LayerRange(3, 7), LayerRange(7, model.n_layers)):
        shard = model.build(layers)
        found = [shard_bytes(shard, layer) for layer in range(layers.start, layers.stop)]
        assert sum(found) == model.weight_bytes(layers)
    alone = [model.weight_bytes(LayerRange(layer, layer + 1)) for layer in range(model.n_layers)]
    whole = model.build()
    assert [shard_bytes(whole, layer) for layer in range(model.n_layers)] == alone


@pytest.mark.parametrize("family", ["vit", "deit", "bert"])
def test_times_of_layers_add_up_to_the_pass(model_dirs: dict[str, Path], family: str) -> None:
    """With a clock that advances by one per reading, each layer takes 1 and the pass takes their sum."""
    model = find_model(str(model_dirs[family]))
    layers = LayerRange(2, 9)
    shard = model.random(layers)
    payload = made_up_payload(model.payload_specs(2, 3, 5), CPU, torch.Generator().manual_seed(1))
    ticks = iter(range(10**6))
    done: list[float] = []
    times, output = time_layers(shard, payload, Pacing(4), done.append, lambda: float(next(ticks)))
    assert [len(layer) for layer in times] == [4] * len(layers)
    assert all(seconds == 1 for layer in times for seconds in layer)
    assert done == [0.25, 0.5, 0.75, 1.0]
    expected = shard(payload)
    assert all(torch.equal(*pair) for pair in zip(output, expected, strict=True))
    assert not any(part._forward_hooks for part in shard.parts.values())


def test_short_passes_are_repeated_more_often() -> None:
    assert [Pacing().repetitions_of(seconds) for seconds in (0.0, 0.01, 0.5, 60)] == [50, 50, 10, 5]
    assert Pacing(3).repetitions_of(0.01) == 3


def test_the_median_and_the_quartile_distance_are_kept() -> None:
    assert summaries([[5.0], [2.0]]) == [(5.0, 0.0), (2.0, 0.0)]
    assert summaries([[1.0, 2.0, 3.0, 4.0, 100.0]]) == [(3.0, 2.0)]
    assert summaries([[0.0], [0.0]]) == [(0.0, 0.0), (0.0, 0.0)]


@given(st.data(), st.integers(1, 6), st.integers(1, 9))
def test_a_delay_in_a_different_layer_of_each_pass_is_counted(
    data: st.DataObject, layers: int, passes: int
) -> None:
    """In each pass another layer takes longer, never the same one twice if possible."""
    usual = data.draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    held_up = data.draw(st.permutations(range(layers)))
    times = [
        [float(usual[layer]) + (held_up[repetition % layers] == layer) for repetition in range(passes)]
        for layer in range(layers)
    ]
    found = [middle for middle, _ in summaries(times)]
    assert sum(found) == pytest.approx(sum(usual) + 1)
    if passes == layers >= 3:  # no layer's median knows of it, so it is shared out by their times
        assert found == pytest.approx([each * (sum(usual) + 1) / sum(usual) for each in usual])


@settings(deadline=None, max_examples=60)
@given(parts=st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=4))
def test_peaks_are_the_largest_running_totals(parts: list[list[int]]) -> None:
    expected, before = [], 0
    for part in parts:
        totals = [before + sum(part[:count]) for count in range(len(part) + 1)]
        expected.append(max(totals))
        before = totals[-1]
    changes: list[int | None] = []
    for part in parts:
        changes += [*part, None]
    assert peaks_between(changes[:-1]) == expected


def test_activation_peaks_match_the_allocations_of_the_layers(model_dirs: dict[str, Path]) -> None:
    """Count a pre-norm block by hand: a norm is held until the product that reads it exists."""
    model = find_model(str(model_dirs["vit"]))
    items, config = 2, model.config
    token = items * config.image_tokens * 4
    hidden, inner = config.hidden * token, config.intermediate * token
    for start, expected in ((6, hidden + inner), (5, hidden)):
        shard = model.random(LayerRange(start, start + 1))
        payload = made_up_payload(model.payload_specs(start, items), CPU, torch.Generator())
        assert activation_peaks(shard, payload)[0] == [expected]
    shard = model.random(LayerRange(5, 7))
    payload = made_up_payload(model.payload_specs(5, items), CPU, torch.Generator())
    projection, expansion = activation_peaks(shard, payload)[0]
    assert (projection, expansion) == (hidden, hidden + hidden + inner)


def _groups(place: Path, membership: str, files: dict[str, object]) -> ControlGroups:
    for name, text in files.items():
        (place / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "cgroup" / name).write_text(f"{text}\n")
    (place / "membership").write_text(membership)
    return ControlGroups(place / "cgroup", place / "membership")


@pytest.mark.parametrize(
    "membership",
    ["0::/\n", "0::/a/b\n", "0::/not/seen/from/within/a/container\n", ""],
)
def test_the_memory_of_a_control_group_counts(tmp_path: Path, membership: str) -> None:
    unlimited = available_bytes(_groups(tmp_path, membership, {"a/b/cgroup.procs": 1}))
    files = {
        "memory.max": 300 * MIB,
        "memory.current": 220 * MIB,
        "memory.stat": f"anon 1\ninactive_file {20 * MIB}",
    }
    assert available_bytes(_groups(tmp_path, membership, files)) == 100 * MIB
    groups = _groups(tmp_path, membership, {"memory.max": "max"})
    assert available_bytes(groups) == pytest.approx(unlimited, rel=0.5)


def test_the_tightest_limit_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": 90 * MIB,
        "memory/a/memory.usage_in_bytes": 20 * MIB,
        "memory/a/b/memory.limit_in_bytes": 80 * MIB,
        "memory/a/b/memory.usage_in_bytes": 5 * MIB,
        "memory/c/memory.limit_in_bytes": MIB,
        "memory/c/memory.usage_in_bytes": 0,
        "cpu/x/cpu.cfs_quota_us": 25_000,
        "cpu/x/cpu.cfs_period_us": 100_000,
        "cpu/x/y/cpu.cfs_quota_us": -1,
        "cpu/x/y/cpu.cfs_period_us": 100_000,
        "cpu/z/cpu.cfs_quota_us": 1000,
        "cpu/z/cpu.cfs_period_us": 100_000,
    }
    groups = _groups(tmp_path, "9:memory:/a/b\n4:cpu,cpuacct:/x/y\n0::/\n", files)
    assert groups.free_bytes() == 70 * MIB
    assert groups.quota() == 0.25


@pytest.mark.parametrize(("text", "expected"), [("max 100000", None), ("50000 100000", 0.5)])
def test_a_quota_of_version_two_is_read(tmp_path: Path, text: str, expected: float | None) -> None:
    files = {"a/b/cpu.max": text, "a/cpu.max": "max 100000", "a/memory.max": "max"}
    assert _groups(tmp_path, "0::/a/b\n", files).quota() == expected


class _Standing:
    """Two clocks of a process that runs for 1 s and then pauses for 3."""

    def __init__(self) -> None:
        self.worked = 0.0

    def work(self) -> float:
        self.worked += 0.4
        return self.worked

    def wall(self) -> float:
        whole, part = divmod(self.worked, 1.0)
        return 4 * whole + part


def test_under_a_quota_no_layer_is_charged_with_a_pause(model_dirs: dict[str, Path]) -> None:
    model = find_model(str(model_dirs["vit"]))
    shard = model.random(LayerRange(0, model.n_layers))
    payload = made_up_payload(model.payload_specs(0, 1), CPU, torch.Generator())
    process, pacing = _Standing(), Pacing(5, warmup=False)
    plain, _ = time_layers(shard, payload, pacing, clock=process.wall, work_clock=process.work)
    # Each layer works for 0.4 s, which takes 1.6 s in the long run.
    assert len(plain) == model.n_layers
    for times in plain:
        assert times == pytest.approx([times[0]] * 5)
        assert times[0] == pytest.approx(1.6, rel=0.1)


def test_the_memory_reserve_is_reported() -> None:
    budget = MemoryBudget(4000 * MIB, 200 * MIB)
    assert budget.usable_bytes == (4000 - 256 - 200) * MIB
    assert str(budget) == "3544 MB: 4000 free, less 256 for the system and 200 for a process"
    assert MemoryBudget(100 * MIB, 200 * MIB).usable_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("name", ["vit-digits", "vit", "bert"])
def test_the_data_rank_feeds_and_collects_as_in_a_run(
    name: str, dtype: torch.dtype, model_dirs: dict[str, Path]
) -> None:
    model = find_model(name if name not in model_dirs else str(model_dirs[name]))
    ticks = itertools.count()
    wire = Wire(receive_s_per_byte=1.0, send_s_per_byte=1.0)
    found = measure_data_work(
        model, 3, tokens=5, dtype=dtype, wire=wire, clock=lambda: float(next(ticks)), stretch=0.5
    )
    # The clock is read once a microbatch. Pictures go out as bytes, and what comes back is float32.
    outputs = specs_bytes(model.payload_specs(model.n_layers, 3, 5))
    assert found.collect_s == pytest.approx(0.5 + outputs)
    values = specs_bytes(model.input_specs(3, 5))
    assert 0 <= found.feed_s - 0.5 - values - HEADER_BYTES < 64 * len(model.input_names)


# --- the whole program ------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def profiled(*arguments: object) -> list[str]:
    """Run ``profiler.py`` with ``arguments`` in this process, and return its lines."""
    told: list[str] = []
    command = parse_profiler([str(argument) for argument in arguments])
    if isinstance(command, SyntheticCommand):
        session.synthesize(command, told.append)
    else:
        assert isinstance(command, ProfileCommand)
        work = session.profile if command.measure is not None else session.use_results
        work(command, told.append, told.append)
    return told


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def refused(directory: Path, *arguments: object) -> str:
    """Run ``profiler.py``, check that it changes no file, and return the one line it ends with."""
    before = content(directory)
    with pytest.raises(PipeEdgeError) as caught:
        profiled(*arguments)
    assert content(directory) == before
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.exit_code == EXIT_REQUEST
    return line


def test_one_command_writes_all_that_the_scheduler_needs(here: Path) -> None:
    told = profiled(*DIGITS, "-dt", "board", "--bw-Mbps", 1000, "--plot", "p.html")
    assert any("mem_MB" in line and "free, less" in line for line in told)
    model = find_model("vit-digits")
    written = yaml.safe_load((here / "profiler_results.yml").read_text())
    assert (written["model_name"], written["dtype"], written["batch_size"], written["layers"]) == (
        "vit-digits",
        "torch.float32",
        8,
        16,
    )
    assert [entry["layer"] for entry in written["profile_data"]] == list(range(1, 17))
    assert written["profile_data"][0]["shape_out"] == [[17, 64], [17, 64]]
    assert sum(entry["memory"] for entry in written["profile_data"]) * MIB == model.weight_bytes()
    spec = specs.load_models("models.yml")["vit-digits"]
    assert spec.elements_in == 64
    assert spec.elements_out[:4] == (2 * 17 * 64, 17 * 64, 17 * (256 + 64), 17 * 64)
    kind = specs.load_device_types("device_types.yml")["board"]
    (profile,) = kind.profiles["vit-digits"]
    assert profile.time_s == tuple(entry["time"] for entry in written["profile_data"])
    assert len(profile.extra["receive_s"]) == len(profile.extra["send_s"]) == 16
    assert (profile.extra["feed_s"], profile.extra["collect_s"]) == (written["feed"], written["collect"])
    assert min(written["feed"], written["collect"]) > 0
    assert any(line.startswith("data rank    feeds a microbatch in ") for line in told)
    assert "<svg" in (here / "p.html").read_text()

    (here / "devices.yml").write_text("board: [a, b]\n")
    scheduled = subprocess.run(
        ["sched-pipeline", "-m", "vit-digits", "--format=json"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    plan = json.loads(scheduled.stdout)
    for stage in plan["schedule"]:
        first, last = stage["layers"]
        beside = profile.extra["receive_s"][first - 1] if first > 1 else 0.0
        beside += profile.extra["send_s"][last - 1] if last < len(profile.time_s) else 0.0
        assert stage["compute_s"] == pytest.approx(sum(profile.time_s[first - 1 : last]) + beside)


def test_only_new_layers_are_added_to_the_file(here: Path) -> None:
    profiled(*DIGITS, "-l", 6, "-L", 9)
    first = load_results(here / "profiler_results.yml")
    refusal = refused(here, *DIGITS, "-l", 9, "-L", 10)
    assert "has layers 9 already" in refusal
    assert "lacks layers 1-5, 10-16" in refused(here, "--from-results", "-dt", "b", "--bw-Mbps", 1)
    profiled(*DIGITS, "-L", 5, "--by-block", "--no-warmup", "-i", 1)
    profiled(*DIGITS, "-l", 10, "-dt", "board", "--bw-Mbps", 1)
    whole = load_results(here / "profiler_results.yml")
    assert whole.missing == ()
    assert whole.profile_data[5:9] == first.profile_data
    assert specs.load_models(here / "models.yml")["vit-digits"].layers == 16


def test_block_by_block_gives_the_same_results_except_times(here: Path) -> None:
    profiled(*DIGITS, "-o", "a.yml")
    profiled(*DIGITS, "-o", "b.yml", "--by-block")
    whole, blocks = load_results(here / "a.yml"), load_results(here / "b.yml")
    for one, other in zip(whole.profile_data, blocks.profile_data, strict=True):
        assert (one.layer, one.memory_bytes, one.shape_in, one.shape_out) == (
            other.layer,
            other.memory_bytes,
            other.shape_in,
            other.shape_out,
        )


def test_a_model_too_large_for_memory_is_measured_block_by_block(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[LayerRange] = []
    load = session._Job._load

    def recorded(job: Any, layers: LayerRange) -> Any:
        loaded.append(layers)
        return load(job, layers)

    monkeypatch.setattr(session._Job, "_load", recorded)
    monkeypatch.setattr(session, "available_bytes", lambda: 100_000)
    profiled(*DIGITS, "-l", 3, "-L", 10)
    assert loaded == [LayerRange(2, 4), LayerRange(4, 8), LayerRange(8, 10)]


def test_a_worked_example_is_not_written_by_default(here: Path) -> None:
    for name in ("models.yml", "device_types.yml"):
        shutil.copy(ROOT / name, here)
    before = content(here)
    told = profiled(*DIGITS, "-dt", "mine", "--bw-Mbps", "100")
    assert set(content(here)) - set(before) == {"profiler_results.yml", "my-models.yml", "my-types.yml"}
    assert before.items() <= content(here).items()
    assert told[-1] == "use          sched-pipeline and runtime.py with -sm my-models.yml -sdt my-types.yml"
    assert parse_models([]).models_file == Path("my-models.yml")
    assert parse_device_types(["mine"]).emit.dev_types_file == Path("my-types.yml")
    # Named, they are extended, and files of one's own under these names need no option.
    told = profiled("--from-results", "-dt", "mine", "--bw-Mbps", "100", "-sm", "models.yml", "--overwrite")
    assert "vit-digits" in specs.load_models(here / "models.yml")
    assert parse_models([]).models_file == Path("models.yml")


def test_text_is_measured_at_the_requested_length(here: Path, model_dirs: dict[str, Path]) -> None:
    model = str(model_dirs["bert"])
    profiled("-m", model, "-i", 1, "-s", 7, "-L", 2, "-b", 3)
    profiled("-m", model, "-i", 1, "-s", "7,24", "-l", 3, "-L", 4, "-b", 3)
    data = load_results(here / "profiler_results.yml").profile_data
    assert data[0].shape_in == ((7,), (7,), (7,))
    assert data[2].shape_in == ((7, 24), (7,))
    longest = refused(here, "-m", model, "-s", 999)
    assert "999 tokens" in longest


def test_text_is_measured_at_several_lengths(here: Path, model_dirs: dict[str, Path]) -> None:
    model = str(model_dirs["bert"])
    options = ("-m", model, "-i", 1, "-b", 2)
    told = profiled(*options, "--tokens", "4,16,8", "-dt", "here", "--bw-Mbps", 100)
    assert any(re.search(r"sentences of 16 tokens, .* s for 8, .* s for 4$", line) for line in told)
    (name,) = specs.load_models(here / "models.yml")
    spec = specs.load_models(here / "models.yml")[name]
    (profile,) = specs.load_device_types(here / "device_types.yml")["here"].profiles[name]
    assert profile.known_tokens == (4, 8, 16)
    assert profile.tokens == 16
    found = find_model(model)
    for tokens in (1, 8, 13):  # sizes are the model's own at any length
        cuts = [found.payload_specs(cut, 1, tokens) for cut in range(found.n_layers + 1)]
        sizes = [sum(math.prod(each.shape) for each in cut) for cut in cuts]
        assert [spec.at_tokens(tokens).elements_in, *spec.at_tokens(tokens).elements_out] == sizes
    for other in profile.lengths:
        at = profile.at_tokens(other.tokens)
        assert at.time_s == other.time_s
        assert at.extra["activations_MB"] == other.extra["activations_MB"]
    # A slower board, measured at other lengths, shares the same model entry.
    profiled(*options, "--tokens", "3,6", "-dt", "board", "--bw-Mbps", 100, "-o", "board.yml")
    assert specs.load_models(here / "models.yml") == {name: spec}
    profiled("--synthetic", "2", "--from", "here", "-dt", "half")
    (half,) = specs.load_device_types(here / "device_types.yml")["half"].profiles[name]
    assert half.at_tokens(6).time_s == pytest.approx([2 * time_s for time_s in profile.at_tokens(6).time_s])
    assert "another sentence length: 4, 8, 16 tokens, but now it is 16 tokens" in refused(
        here, *options, "-s", 16
    )


def test_a_model_of_text_is_profiled_at_three_lengths_by_default(
    here: Path, model_dirs: dict[str, Path]
) -> None:
    model = str(model_dirs["bert"])
    profiled("-m", model, "-i", 1, "-L", 1)
    longest = find_model(model).max_tokens
    results = load_results(here / "profiler_results.yml")
    assert (results.tokens, *results.other_tokens) == (longest, longest // 4, longest // 16)
    assert f"--tokens 999: {model} takes 1 to {longest}" in refused(here, "-m", model, "--tokens", "999")


def test_lengths_are_added_to_a_models_entry_without_them(here: Path, model_dirs: dict[str, Path]) -> None:
    options = ("-m", str(model_dirs["bert"]), "-i", 1, "-dt", "here", "--bw-Mbps", 100)
    profiled(*options, "-s", 16)
    (before,) = specs.load_models(here / "models.yml").values()
    assert before.tokens is None
    profiled(*options, "--tokens", "16,4", "-o", "new.yml", "--overwrite")
    (after,) = specs.load_models(here / "models.yml").values()
    assert (after.tokens, after.elements_out) == (16, before.elements_out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-m", "vit-digit"), "did you mean vit-digits"),
        ((*DIGITS, "-i", "0"), "-i/--iterations 0"),
        ((*DIGITS, "-b", "0"), "-b/--batch-size 0"),
        ((*DIGITS, "-l", "0"), "-l/--layer-start 0"),
        ((*DIGITS, "-l", "5", "-L", "4"), "-L/--layer-end 4 is before -l/--layer-start 5"),
        ((*DIGITS, "-L", "17"), "its layers are 1 to 16"),
        ((*DIGITS, "-s", "3,224,224"), "does not match layer 1 of vit-digits, which takes 1,8,8"),
        ((*DIGITS, "-l", "2", "-s", "17,64"), "takes 17,64 and 17,64"),
        ((*DIGITS, "-s", "1,x"), "not a shape"),
        ((*DIGITS, "--tokens", "8,16"), "--tokens is for text models"),
        ((*DIGITS, "--tokens", "0,16"), "--tokens 0: a sentence has at least 1 token"),
        ((*DIGITS, "--tokens", "16,16"), "--tokens 16,16: give each length once"),
        ((*DIGITS, "-s", "8", "--tokens", "16"), "either -s/--shape-input or --tokens"),
        ((*DIGITS, "-d", "cuda:99"), "-d/--device cuda:99"),
        ((*DIGITS, "-d", "tpu"), "-d/--device tpu"),
        ((*DIGITS, "-o", "no/where.yml"), "does not exist"),
        ((*DIGITS, "-o", "."), "is a directory"),
        ((*DIGITS, "-M", "missing.npz"), "--random-weights"),
        ((*DIGITS, "-M", "w.npz", "--random-weights"), "not both"),
        ((*DIGITS, "-w", "--no-warmup"), "not allowed with"),
        ((*DIGITS, "-dt", "new"), "give its bandwidth"),
        ((*DIGITS, "-dt", "new", "--bw-Mbps", "-1"), "must be above 0"),
        ((*DIGITS, "-dt", "new", "--bw-Mbps", "1", "--measure-link", "x"), "not both"),
        ((*DIGITS, "-dt", "new", "--bw-Mbps", "1", "-L", "4"), "lacks layers 5-16"),
        ((*DIGITS, "-dt", "new", "--bw-Mbps", "1", "-sm", "no/m.yml"), "does not exist"),
        ((*DIGITS, "--mem-MB", "5"), "name it with -dt"),
        ((*DIGITS, "--plot", "p.gif"), "FILE.html or FILE.png"),
        ((*DIGITS, "--plot", "no/p.png"), "does not exist"),
        (("--from-results", "-dt", "x"), "no such file"),
        (("--from-results", *DIGITS), "excludes --iterations, --model-name"),
        (("--synthetic", "2"), "name it with -dt"),
        (("--synthetic", "0", "-dt", "x"), "must be above 0"),
        (("--synthetic", "2", "-dt", "x"), "no such file"),
        (("--synthetic", "2", "-dt", "x", "--no-warmup"), "excludes --no-warmup"),
        (("--from", "x"), "only with --synthetic"),
        (("--serve-link", "-i", "3"), "excludes --iterations"),
        (("--model",), "unknown option --model; did you mean"),
    ],
)
def test_a_mistake_gets_one_line_and_changes_nothing(
    here: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in refused(here, *arguments)


def write_results(path: Path, **changed: Any) -> ProfileResults:
    layer = LayerResult(1, 1.0, ((1, 8, 8),), ((17, 64), (17, 64)), 0.5)
    values = {"model_name": "vit-digits", "dtype": "torch.float32", "batch_size": 8, "layers": 16}
    made = ProfileResults(**{**values, "profile_data": (layer,), **changed})
    save_results(path, made)
    return made


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_name": "other"}, "another model: other, but now it is vit-digits"),
        ({"dtype": "torch.float16"}, "another dtype: float16"),
        ({"batch_size": 4}, "another batch size: 4, but now it is 8"),
        ({"layers": 12}, "another number of layers: 12"),
        ({"device": "cuda"}, "another device: cuda"),
        ({"threads": 77}, "another thread count: 77"),
        ({}, "has layers 1 already"),
    ],
)
def test_results_of_other_conditions_are_left_unchanged(
    here: Path, changed: dict[str, Any], says: str
) -> None:
    write_results(here / "profiler_results.yml", **changed)
    assert says in refused(here, *DIGITS)


def test_entries_are_kept_and_a_conflict_names_the_difference(here: Path) -> None:
    emit = ("-dt", "board", "--bw-Mbps", 1000, "--mem-MB", 64)
    profiled(*DIGITS, *emit)
    again = ("--from-results", "-dt", "board")
    assert "already, with" in refused(here, *again)
    other = ("--from-results", "-dt", "other", "--bw-Mbps", 7, "--mem-MB", 9)
    models = (here / "models.yml").read_bytes()
    assert any("unchanged" in line for line in profiled(*other))
    assert (here / "models.yml").read_bytes() == models

    # Another microbatch size joins the type; its figures may be left out, or must agree.
    third = (*DIGITS, "-b", 2, "-o", "two.yml", "-dt", "board")
    assert "has bw_Mbps 1,000, but 7 was given" in refused(here, *third, "--bw-Mbps", 7)
    profiled(*third)
    types = specs.load_device_types(here / "device_types.yml")
    assert [profile.batch_size for profile in types["board"].profiles["vit-digits"]] == [8, 2]
    assert types["board"].mem_bytes == 64 * MIB

    profiled(*again, "--mem-MB", 65, "--overwrite")
    assert specs.load_device_types(here / "device_types.yml")["board"].mem_bytes == 65 * MIB
    assert specs.load_device_types(here / "device_types.yml")["other"] == types["other"]


def test_a_models_entry_of_another_tool_is_kept_if_only_memory_differs(here: Path) -> None:
    profiled(*DIGITS)
    emit = ("--from-results", "-dt", "board", "--bw-Mbps", 1, "--mem-MB", 1)
    own = load_results(here / "profiler_results.yml")
    values = [layer.memory_bytes / MIB + 1 for layer in own.profile_data]
    entry = {"layers": 16, "mem_MB": values, "parameters_in": 64, "parameters_out": [2176, 1088, 5440, 1088]}
    entry["parameters_out"] = [2176, 1088, 5440, 1088] * 3 + [2176, 1088, 5440, 10]
    (here / "models.yml").write_text(yaml.safe_dump({"vit-digits": {**entry, "parameters_in": 65}}))
    assert "parameters_in is 65 in the file, 64 now" in refused(here, *emit)
    (here / "models.yml").write_text(yaml.safe_dump({"vit-digits": entry}))
    told = profiled(*emit)
    assert any("is kept unchanged: mem_MB of layers 1-16" in line for line in told)
    assert specs.load_models(here / "models.yml")["vit-digits"].mem_bytes[0] == values[0] * MIB


def test_a_synthetic_type_is_a_multiple_of_another(here: Path) -> None:
    profiled(*DIGITS, "-dt", "board", "--bw-Mbps", 1000, "--mem-MB", 64)
    profiled("--synthetic", 2.5, "--from", "board", "-dt", "slow", "--mem-MB", 32)
    profiled("--synthetic", 0.5, "-dt", "fast", "--mem-MB", 128, "--bw-Mbps", 10)
    types = specs.load_device_types(here / "device_types.yml")
    (base,), (slow,), (fast,) = (types[name].profiles["vit-digits"] for name in ("board", "slow", "fast"))
    assert slow.time_s == pytest.approx([2.5 * value for value in base.time_s])
    assert slow.extra["send_s"] == pytest.approx([2.5 * value for value in base.extra["send_s"]])
    assert slow.extra["synthetic"] == {"from": "board", "factor": 2.5}
    assert fast.time_s == pytest.approx([0.5 * value for value in base.time_s])
    assert (types["slow"].mem_bytes, types["slow"].bw_bytes_per_s) == (
        32 * MIB,
        types["board"].bw_bytes_per_s,
    )
    assert "already" in refused(here, "--synthetic", 3, "--from", "board", "-dt", "slow")
    assert "no device type x" in refused(here, "--synthetic", 3, "--from", "x", "-dt", "y")
    assert "no profile of m" in refused(here, "--synthetic", 3, "--from", "board", "-dt", "y", "-m", "m")


def test_the_converters_write_the_same_files(here: Path) -> None:
    profiled(*DIGITS, "-dt", "board", "--bw-Mbps", 1000, "--mem-MB", 64)
    told: list[str] = []
    models = ["-i", "profiler_results.yml", "-o", "m.yml"]
    convert_to_model(parse_models(models), told.append)
    convert_to_model(parse_models(models), told.append)
    assert told[1] == "m.yml: vit-digits unchanged, it is there already"
    assert (here / "m.yml").read_bytes() == (here / "models.yml").read_bytes()
    kinds = ["board", "-o", "t.yml"]
    with pytest.raises(SpecError, match="-dtm"):
        convert_to_device_type(parse_device_types(kinds), told.append)
    assert not (here / "t.yml").exists()
    kinds += ["-dtm", "64", "-dtb", "1000"]
    convert_to_device_type(parse_device_types(kinds), told.append)
    assert (here / "t.yml").read_bytes() == (here / "device_types.yml").read_bytes()
    with pytest.raises(SpecError, match="already"):
        convert_to_device_type(parse_device_types(kinds), told.append)
    convert_to_device_type(parse_device_types([*kinds, "-f"]), told.append)


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_results_are_plotted(here: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    write_results(here / "profiler_results.yml")
    profiled("--from-results", "--plot", f"p{suffix}")
    begins = {".png": b"\x89PNG", ".html": b"<!DOCTYPE html>"}
    assert (here / f"p{suffix}").read_bytes().startswith(begins[suffix])
    assert sorted(path.name for path in here.iterdir()) == [f"p{suffix}", "profiler_results.yml"]


def test_without_matplotlib_a_plot_is_rejected_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'pipeedge[plot]'" in refused(here, *DIGITS, "--plot", "p.png")


# --- interruption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["time_layers", "activation_peaks", "measure_handling", "save_results"])
def test_an_interruption_leaves_complete_files(
    here: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    profiled(*DIGITS, "-L", 4)
    (here / "models.yml").write_text((ROOT / "models.yml").read_text())
    before = content(here)

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        profiled(*DIGITS, "-l", 5, "-dt", "x", "--bw-Mbps", 1)
    assert content(here) == before


def started(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "profiler.py"), *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_ends_quietly(here: Path) -> None:
    write_results(here / "profiler_results.yml", threads=1)
    before = content(here)
    # Far more passes than there is time for.
    process = started(here, "-m", "vit-digits", "-l", "2", "-i", "100000000")
    try:
        until(lambda: thread_seconds(process.pid) > 3.0, "it measures")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "")
    assert content(here) == before


def until(happened: Callable[[], bool], what: str, within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def thread_seconds(pid: int) -> float:
    """Return the processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_scripts_report_a_mistake_at_once(here: Path) -> None:
    process = started(here, "-i", "0")
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (EXIT_REQUEST, "")
    assert err == "profiler.py: -i/--iterations 0: must be at least 1\n"
    for script in ("profiler_results_to_models.py", "profiler_results_to_device_types.py"):
        arguments = ["x"] if "types" in script else []
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *arguments],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == EXIT_REQUEST
        assert done.stderr == f"{script}: profiler_results.yml: no such file\n"
    assert not list(here.iterdir())


def test_faults_of_the_program_itself_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ZeroDivisionError("x")

    assert guard("profiler.py", broken, verbose=False) == 1
    assert "internal error" in capsys.readouterr().err


# --- the repository's own files ---------------------------------------------------------------------


def test_the_examples_include_a_profile_of_this_tool() -> None:
    types = specs.load_device_types(ROOT / "device_types.yml")
    made = {
        name: profile
        for name, kind in types.items()
        for profile in kind.profiles.get("google/vit-base-patch16-224", ())
        if "receive_s" in profile.extra
    }
    assert len(made) == 1
    (profile,) = made.values()
    assert len(profile.time_s) == len(profile.extra["send_s"]) == 48
    hosts = specs.load_devices(ROOT / "devices.yml")
    assert not set(made) & set(hosts)
