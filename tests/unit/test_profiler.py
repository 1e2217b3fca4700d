"""Test the profiler: measurements, files, and that mistakes leave files unchanged."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from control_groups import write_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import PeerFailedError, SpecError
from pipeedge.base.guard import guard
from pipeedge.base.machine import MemoryBudget, available_bytes
from pipeedge.base.schedule import LayerRange
from pipeedge.models import find_model
from pipeedge.models import shard as shards
from pipeedge.observe.energy import Source
from pipeedge.plan.specs import TransportHandling
from pipeedge.profile import transport_costs
from pipeedge.profile.data_work import DataRankRequest, measure_data_work
from pipeedge.profile.emitting import model_spec
from pipeedge.profile.job import Job
from pipeedge.profile.measuring import (
    Pacing,
    activation_peaks,
    made_up_payload,
    peaks_between,
    shard_bytes,
    summaries,
    time_layers,
    without_delays,
)
from pipeedge.profile.power import PowerMeter
from pipeedge.profile.request import MeasureRequest
from pipeedge.profile.result_files import load_results, save_results
from pipeedge.profile.results import LayerResult, LengthResult, Measurement, ProfileResults, ranges_text
from pipeedge.profile.transport_costs import measure_transports
from pipeedge.request.config import TRANSPORTS, ModelRequest

MIB = 2**20

CPU = torch.device("cpu")


# --- results files ----------------------------------------------------------------------------------

shapes = st.lists(
    st.lists(st.integers(1, 999), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
).map(tuple)
amounts = st.floats(0, 1e6)
maybe = st.none() | amounts
measurements = st.builds(
    Measurement,
    shape_in=shapes,
    shape_out=shapes,
    time_s=amounts,
    time_spread_s=maybe,
    activations_bytes=st.none() | amounts.map(lambda value: value * MIB),
    receive_s=maybe,
    send_s=maybe,
)


handling_costs = st.builds(
    TransportHandling, amounts, amounts, amounts, amounts, extra=st.sampled_from([{}, {"note": "kept"}])
)


@st.composite
def results(draw: st.DrawFn) -> ProfileResults:
    layers = draw(st.integers(1, 12))
    numbers = sorted(draw(st.sets(st.integers(1, layers))))
    tokens = draw(st.none() | st.integers(100, 999))
    shorter = () if tokens is None else tuple(draw(st.sets(st.integers(1, 99), max_size=2)))
    lengths = st.tuples(
        *(st.builds(LengthResult, tokens=st.just(length), measured=measurements) for length in shorter)
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
                measured=draw(measurements),
                float32_bytes=draw(st.none() | amounts.map(lambda value: value * MIB)),
                shared_with=draw(st.none() | st.integers(1, number - 1)) if number > 1 else None,
                lengths=draw(lengths),
                extra=draw(st.sampled_from([{}, {"note": "kept"}])),
            )
            for number in numbers
        ),
        device=draw(st.none() | st.just("cpu")),
        threads=draw(st.none() | st.integers(1, 64)),
        kernels=draw(st.sampled_from([None, "onednn", "torch"])),
        process_bytes=draw(st.none() | st.integers(1, 999).map(lambda value: value * MIB)),
        tokens=tokens,
        handling=draw(st.dictionaries(st.sampled_from(TRANSPORTS), handling_costs, max_size=4)),
        extra=draw(st.sampled_from([{}, {"board": [1, 2]}])),
    )


@settings(max_examples=40)
@given(written=results())
def test_results_read_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, written: ProfileResults
) -> None:
    path = tmp_path_factory.mktemp("results") / "r.yml"
    save_results(path, written)
    assert load_results(path) == written


@settings(max_examples=40)
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


@pytest.mark.parametrize("family", ["vit", "deit", "dinov2", "clip", "bert", "mpnet", "albert", "modernbert"])
def test_memory_of_a_layer_is_that_of_a_stage_of_it_alone(model_dirs: dict[str, Path], family: str) -> None:
    model = find_model(str(model_dirs[family]))
    alone = [model.weight_bytes(LayerRange(layer, layer + 1)) for layer in range(model.n_layers)]
    whole = model.build()
    assert [shard_bytes(whole, layer) for layer in range(model.n_layers)] == alone


@pytest.mark.parametrize(
    ("family", "shared"), [("albert", (0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8)), ("bert", ())]
)
def test_a_profile_says_which_layers_share_their_weights(
    model_dirs: dict[str, Path], family: str, shared: tuple[int, ...]
) -> None:
    (job,) = Job.each(MeasureRequest(model=ModelRequest(name=str(model_dirs[family]))))
    assert model_spec(job.expected(), "here").shared_with == shared


@pytest.mark.parametrize("family", ["vit", "deit", "dinov2", "clip", "bert", "mpnet", "albert", "modernbert"])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_times_of_layers_add_up_to_the_pass(
    model_dirs: dict[str, Path], family: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that advances by one per reading, each layer takes 1 for each part of a microbatch."""
    model = find_model(str(model_dirs[family]))
    tokens = 5 if model.takes_text else model.config.image.tokens
    monkeypatch.setattr(shards, "_LARGEST_INNER_BYTES", together * tokens * model.config.intermediate * 4)
    layers = LayerRange(2, 9)
    shard = model.random(layers)
    payload = made_up_payload(model.payload_specs(2, 3, 5), CPU, torch.Generator().manual_seed(1))
    ticks = iter(range(10**6))
    done: list[float] = []
    times, output = time_layers(shard, payload, Pacing(4), done.append, lambda: float(next(ticks)))
    assert [len(layer) for layer in times] == [4] * len(layers)
    parts = 4 - together  # of three items
    assert times == [[parts] * 4] * len(layers)
    assert done == [0.25, 0.5, 0.75, 1.0]
    expected = shard(payload)
    assert all(torch.equal(*pair) for pair in zip(output, expected, strict=True))


class Board(Source):
    """A board and its clock: it takes 3 W while it waits and 12 W while it computes."""

    name = "board"

    def __init__(self) -> None:
        self.now_s = self.used_j = 0.0
        self.works = True

    def joules(self, now_s: float) -> float:
        assert now_s == self.now_s
        if not self.works:
            raise OSError("gone")
        return self.used_j

    def spend(self, seconds: float, watts: float = 3.0) -> None:
        self.now_s += seconds
        self.used_j += seconds * watts


def test_power_is_that_of_waiting_and_of_passes_alone() -> None:
    board = Board()
    meter = PowerMeter(board, lambda: board.now_s, board.spend)
    assert meter.idle_w() == pytest.approx(3)
    for _ in range(2):
        board.spend(7, watts=100)  # loads weights
        with meter.computing():
            board.spend(2, watts=12)
            meter.sample()
            board.spend(1, watts=15)
    assert meter.take_watts() == pytest.approx(13)
    assert meter.take_watts() is None
    board.works = False
    with meter.computing():
        board.spend(1)
    assert meter.take_watts() is None
    assert meter.idle_w() is None
    assert PowerMeter(None).idle_w() is None


def test_short_passes_are_repeated_more_often() -> None:
    assert [Pacing().repetitions_of(seconds) for seconds in (0.0, 0.001, 0.01, 0.5, 60)] == [
        2500,
        250,
        50,
        10,
        5,
    ]
    assert Pacing(3).repetitions_of(0.01) == 3


def test_the_median_and_the_quartile_distance_are_kept() -> None:
    assert summaries([[5.0], [2.0]]) == [(5.0, 0.0), (2.0, 0.0)]
    assert summaries([[1.0, 2.0, 3.0, 4.0, 100.0]]) == [(3.0, 2.0)]
    assert summaries([[0.0], [0.0]]) == [(0.0, 0.0), (0.0, 0.0)]


def test_delays_count_at_most_half_as_long_again_as_the_median() -> None:
    assert list(without_delays([2.0, 90.0, 1.0, 2.0, 2.5])) == [2.0, 3.0, 1.0, 2.0, 2.5]
    with pytest.raises(ValueError, match="nothing was timed"):
        without_delays([])


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


@settings(max_examples=60)
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
    """Count a pre-norm block by hand: a norm is held until the product that reads it exists.

    Packed products take a little more, for oneDNN's own use.
    """
    model = find_model(str(model_dirs["vit"]))
    items, config = 2, model.config
    token = items * config.image.tokens * 4
    hidden, inner = config.hidden * token, config.intermediate * token
    for start, expected in ((6, hidden + inner), (5, hidden)):
        shard = model.random(LayerRange(start, start + 1), kernels="torch")
        payload = made_up_payload(model.payload_specs(start, items), CPU, torch.Generator())
        assert activation_peaks(shard, payload)[0] == [expected]
    shard = model.random(LayerRange(5, 7), kernels="torch")
    payload = made_up_payload(model.payload_specs(5, items), CPU, torch.Generator())
    projection, expansion = activation_peaks(shard, payload)[0]
    assert (projection, expansion) == (hidden, hidden + hidden + inner)


@pytest.mark.parametrize(
    "membership",
    ["0::/\n", "0::/a/b\n", "0::/not/seen/from/within/a/container\n", ""],
)
def test_the_memory_of_a_control_group_counts(tmp_path: Path, membership: str) -> None:
    unlimited = available_bytes(write_groups(tmp_path, membership, {"a/b/cgroup.procs": 1}))
    files = {
        "memory.max": 300 * MIB,
        "memory.current": 220 * MIB,
        "memory.stat": f"anon 1\ninactive_file {20 * MIB}",
    }
    assert available_bytes(write_groups(tmp_path, membership, files)) == 100 * MIB
    groups = write_groups(tmp_path, membership, {"memory.max": "max"})
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
    groups = write_groups(tmp_path, "9:memory:/a/b\n4:cpu,cpuacct:/x/y\n0::/\n", files)
    assert groups.free_bytes() == 70 * MIB
    assert groups.quota() == 0.25


@pytest.mark.parametrize(("text", "expected"), [("max 100000", None), ("50000 100000", 0.5)])
def test_a_quota_of_version_two_is_read(tmp_path: Path, text: str, expected: float | None) -> None:
    files = {"a/b/cpu.max": text, "a/cpu.max": "max 100000", "a/memory.max": "max"}
    assert write_groups(tmp_path, "0::/a/b\n", files).quota() == expected


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
    rank = DataRankRequest(model, 3, 5, dtype)
    found = measure_data_work(rank, clock=lambda: float(next(ticks)), stretch=0.5)
    # The clock is read once a microbatch.
    assert found.collect_s == found.feed_s == 0.5


def test_a_transport_that_this_machine_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PeerFailedError("no TensorPipe here")

    monkeypatch.setattr(transport_costs, "make_endpoint", fail)
    assert measure_transports(TRANSPORTS, whole_process=True) == {}


@given(amounts, amounts)
def test_costs_of_two_frames_lie_on_a_line_that_is_not_negative(small_s: float, large_s: float) -> None:
    fixed, per_byte = transport_costs._line(10, small_s, 110, large_s)
    assert min(fixed, per_byte) >= 0
    if small_s <= large_s <= 11 * small_s:
        assert fixed + 10 * per_byte == pytest.approx(small_s)
        assert fixed + 110 * per_byte == pytest.approx(large_s)


# --- interruption -----------------------------------------------------------------------------------


def test_faults_of_the_program_itself_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ZeroDivisionError("x")

    assert guard("profiler.py", broken, verbose=False) == 1
    assert "internal error" in capsys.readouterr().err
