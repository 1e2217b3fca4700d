"""Profiling in the test's process: the files that it makes, and that mistakes leave files unchanged."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from decoder_cases import DecoderCase
from places import ROOT
from profiles import content, write_results
from waiting import LIMIT_S

from pipeedge.base.errors import EXIT_REQUEST, PipeEdgeError, SpecError
from pipeedge.base.schedule import LayerRange
from pipeedge.models import find_model
from pipeedge.models.decoder import find_decoder
from pipeedge.models.layers.decoder import PAGE
from pipeedge.observe.energy import Source
from pipeedge.plan import spec_files, spec_writing
from pipeedge.plan.specs import TransportHandling
from pipeedge.profile import layer_work, power, rehearsal, session
from pipeedge.profile.converting import convert_to_device_type, convert_to_model
from pipeedge.profile.job import Job
from pipeedge.profile.options import parse_device_types, parse_models, parse_profiler
from pipeedge.profile.request import ProfileCommand, SyntheticCommand
from pipeedge.profile.result_files import load_results, save_results
from pipeedge.profile.results import ProfileResults
from pipeedge.profile.synthetic import synthesize

MIB = 2**20

DIGITS = ("-m", "vit-digits", "-i", "2")
PUZZLES = ("-m", "llama-puzzles", "-i", "2")


# --- the whole program ------------------------------------------------------------------------------


TCP = TransportHandling(1e-5, 2e-10, 3e-5, 4e-10)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "measure_links", lambda job: {"tcp": TCP})
    monkeypatch.setattr(layer_work, "LONGEST_PASS_S", 0.0)  # no rehearsals
    monkeypatch.setattr(session, "open_source", lambda: (None, ()))
    monkeypatch.setattr(session, "emulated_here", lambda *_: False)
    return tmp_path


def profiled(*arguments: object) -> list[str]:
    """Run ``profiler.py`` with ``arguments`` in this process, and return its lines."""
    told: list[str] = []
    command = parse_profiler([str(argument) for argument in arguments])
    if isinstance(command, SyntheticCommand):
        synthesize(command, told.append)
    else:
        assert isinstance(command, ProfileCommand)
        work = session.profile if command.measure is not None else session.use_results
        work(command, told.append, told.append)
    return told


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


def test_emulated_types_are_left_out_of_several(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "emulated_here", lambda dtype, _: dtype is torch.bfloat16)
    told = profiled(*DIGITS, "-b", 1, "-l", 15, "--dtype", "float32,bfloat16")
    assert any(line.startswith("bfloat16 is left out: this processor emulates it") for line in told)
    assert [path.name for path in here.iterdir()] == ["profiler_results-1-float32.yml"]
    profiled(*DIGITS, "-b", 1, "-l", 15, "--dtype", "bfloat16", "-o", "alone.yml")
    assert load_results(Path("alone.yml")).dtype == "torch.bfloat16"


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
    spec = spec_files.load_models("models.yml")["vit-digits"]
    assert spec.elements_in == 64
    assert spec.elements_out[:4] == (2 * 17 * 64, 17 * 64, 17 * (256 + 64), 17 * 64)
    kind = spec_files.load_device_types("device_types.yml")["board"]
    (profile,) = kind.profiles["vit-digits"]
    assert profile.time_s == tuple(entry["time"] for entry in written["profile_data"])
    assert len(profile.receive_s) == len(profile.send_s) == 16
    assert (profile.feed_s, profile.collect_s) == (written["feed"], written["collect"])
    assert min(written["feed"], written["collect"]) > 0
    assert any(line.startswith("data rank    feeds a microbatch in ") for line in told)
    assert "<svg" in (here / "p.html").read_text()

    (here / "devices.yml").write_text("board: [a, b]\n")
    scheduled = subprocess.run(
        ["sched-pipeline", "-m", "vit-digits", "--format=json"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        check=True,
        timeout=LIMIT_S,
    )
    plan = json.loads(scheduled.stdout)
    for stage in plan["schedule"]:
        first, last = stage["layers"]
        beside = profile.receive_s[first - 1] if first > 1 else 0.0
        beside += profile.send_s[last - 1] if last < len(profile.time_s) else 0.0
        assert stage["compute_s"] == pytest.approx(sum(profile.time_s[first - 1 : last]) + beside)


def test_one_command_makes_all_profiles_of_a_joint_plan(here: Path) -> None:
    several = ("-b", "1,4", "--dtype", "float32,int8", "--agreement", 40)
    told = profiled(*DIGITS, *several, "-dt", "board", "--bw-Mbps", 100)
    # Processors without instructions for int8 have a line before.
    assert any(line.startswith("measuring    4 profiles, ") for line in told[:2])
    files = [f"profiler_results-{size}-{dtype}.yml" for dtype in ("float32", "int8") for size in (1, 4)]
    assert sorted(path.name for path in here.glob("profiler_results*")) == sorted(files)
    profiles = spec_files.load_device_types("device_types.yml")["board"].profiles["vit-digits"]
    for file, profile in zip(files, profiles, strict=True):
        results = load_results(here / file)
        assert (profile.batch_size, profile.dtype) == (results.batch_size, results.dtype)
        assert profile.time_s == tuple(layer.measured.time_s for layer in results.profile_data)
    assert [profile.agreement is None for profile in profiles] == [True, True, False, False]
    assert profiles[2].agreement == profiles[3].agreement
    assert refused(here, *DIGITS, *several).startswith("profiler_results-1-float32.yml has layers 1-16")


def test_an_interrupted_run_goes_on_with_the_profiles_that_are_missing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = ("-b", "1,2,4", "--dtype", "float32", "-L", 4, "--no-warmup", "-i", 1)
    measure, begun = session.measure_model, []

    def interrupted(job: Job, *more: Any) -> ProfileResults:
        begun.append(job.batch_size)
        if begun == [1, 2]:
            raise KeyboardInterrupt
        return measure(job, *more)

    monkeypatch.setattr(session, "measure_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profiled("-m", "vit-digits", *several)
    assert [path.name for path in here.iterdir()] == ["profiler_results-1-float32.yml"]
    before = content(here)
    told = profiled("-m", "vit-digits", *several)
    assert begun == [1, 2, 2, 4]
    assert told[0].startswith("measured     profiler_results-1-float32.yml is kept from an earlier run")
    after = content(here)
    assert len(after) == 3
    assert before.items() <= after.items()
    # What is whole is used for the files that are missing, and not measured again.
    profiled("-m", "vit-digits", *several[:4], "-l", 5, "--no-warmup", "-i", 1)
    profiled("-m", "vit-digits", "-b", "1,2,4", "-dt", "board", "--bw-Mbps", 100)
    assert begun == [1, 2, 2, 4, 1, 2, 4]
    assert len(spec_files.load_device_types("device_types.yml")["board"].profiles["vit-digits"]) == 3
    first = here / "profiler_results-1-float32.yml"
    save_results(first, replace(load_results(first), threads=99))
    with pytest.raises(SpecError, match="results of another thread count"):
        profiled("-m", "vit-digits", *several)


class Plug(Source):
    """A meter at the plug of a machine that always takes 5 W."""

    name = "plug"

    def joules(self, now_s: float) -> float:
        return 5 * now_s


def test_power_is_measured_where_the_machine_counts_energy(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "open_source", lambda: (Plug(), ()))
    monkeypatch.setattr(power, "IDLE_S", power.STEP_S)
    told = profiled(*DIGITS, "-dt", "board", "--bw-Mbps", 100)
    assert "power        5 W while it computes, 5 W while it waits" in told
    board = spec_files.load_device_types("device_types.yml")["board"]
    (profile,) = board.profiles["vit-digits"]
    assert (profile.busy_w, board.idle_w) == (pytest.approx(5), pytest.approx(5))
    # A type with the watts of a meter keeps them.
    spec_writing.save_device_types("own.yml", {"board": replace(board, busy_w=9.0, idle_w=7.0, profiles={})})
    profiled("--from-results", "-dt", "board", "-sdt", "own.yml")
    board = spec_files.load_device_types("own.yml")["board"]
    assert (board.busy_w, board.idle_w) == (9, 7)
    assert board.profiles["vit-digits"][0].busy_w is None


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
    assert spec_files.load_models(here / "models.yml")["vit-digits"].layers == 16


def test_block_by_block_gives_the_same_results_except_times(here: Path) -> None:
    profiled(*DIGITS, "-o", "a.yml")
    profiled(*DIGITS, "-o", "b.yml", "--by-block")
    whole, blocks = load_results(here / "a.yml"), load_results(here / "b.yml")
    for one, other in zip(whole.profile_data, blocks.profile_data, strict=True):
        assert (one.layer, one.memory_bytes) == (other.layer, other.memory_bytes)
        assert one.measured.shape_in == other.measured.shape_in
        assert one.measured.shape_out == other.measured.shape_out


def test_a_model_too_large_for_memory_is_measured_block_by_block(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[LayerRange] = []
    load = Job.load

    def recorded(job: Any, layers: LayerRange) -> Any:
        loaded.append(layers)
        return load(job, layers)

    monkeypatch.setattr(Job, "load", recorded)
    monkeypatch.setattr(layer_work, "available_bytes", lambda: 100_000)
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
    assert "vit-digits" in spec_files.load_models(here / "models.yml")
    assert parse_models([]).models_file == Path("models.yml")


def test_text_is_measured_at_the_requested_length(here: Path, model_dirs: dict[str, Path]) -> None:
    model = str(model_dirs["bert"])
    profiled("-m", model, "-i", 1, "-s", 7, "-L", 2, "-b", 3)
    profiled("-m", model, "-i", 1, "-s", "7,24", "-l", 3, "-L", 4, "-b", 3)
    data = load_results(here / "profiler_results.yml").profile_data
    assert data[0].measured.shape_in == ((7,), (7,), (7,))
    assert data[2].measured.shape_in == ((7, 24), (7,))
    longest = refused(here, "-m", model, "-s", 999)
    assert "999 tokens" in longest


def test_text_is_measured_at_several_lengths(here: Path, model_dirs: dict[str, Path]) -> None:
    model = str(model_dirs["bert"])
    options = ("-m", model, "-i", 1, "-b", 2)
    told = profiled(*options, "--tokens", "4,16,8", "-dt", "here", "--bw-Mbps", 100)
    assert any(re.search(r"sentences of 16 tokens, .* s for 8, .* s for 4$", line) for line in told)
    (name,) = spec_files.load_models(here / "models.yml")
    spec = spec_files.load_models(here / "models.yml")[name]
    (profile,) = spec_files.load_device_types(here / "device_types.yml")["here"].profiles[name]
    assert profile.known_tokens == (4, 8, 16)
    assert profile.tokens == 16
    found = find_model(model)
    for tokens in (1, 8, 13):  # sizes are the model's own at any length
        cuts = [found.payload_specs(cut, 1, tokens) for cut in range(found.n_layers + 1)]
        sizes = [sum(math.prod(each.shape) for each in cut) for cut in cuts]
        assert [spec.at_tokens(tokens).elements_in, *spec.at_tokens(tokens).elements_out] == sizes
    # A slower board, measured at other lengths, shares the same model entry.
    profiled(*options, "--tokens", "3,6", "-dt", "board", "--bw-Mbps", 100, "-o", "board.yml")
    assert spec_files.load_models(here / "models.yml") == {name: spec}
    profiled("--synthetic", "2", "--from", "here", "-dt", "half")
    (half,) = spec_files.load_device_types(here / "device_types.yml")["half"].profiles[name]
    assert half.time_s == pytest.approx([2 * time_s for time_s in profile.time_s])
    assert half.known_tokens == profile.known_tokens
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
    (before,) = spec_files.load_models(here / "models.yml").values()
    assert before.tokens is None
    profiled(*options, "--tokens", "16,4", "-o", "new.yml", "--overwrite")
    (after,) = spec_files.load_models(here / "models.yml").values()
    assert (after.tokens, after.elements_out) == (16, before.elements_out)


def test_older_results_of_decoders_have_one_line_for_all_rows(here: Path) -> None:
    profiled(*PUZZLES)
    results = here / "profiler_results.yml"
    body = yaml.safe_load(results.read_text())
    for entry in body["profile_data"]:
        entry["steps"] = {key: value for key, value in entry["steps"].items() if "many" not in key}
    results.write_text(yaml.safe_dump(body))
    for layer in load_results(results).profile_data:
        assert layer.steps is not None
        assert (layer.steps.many_start_s, layer.steps.many_row_s) == (layer.steps.start_s, layer.steps.row_s)


def test_a_decoder_is_measured_in_steps(here: Path) -> None:
    lines = profiled(*PUZZLES, "--dtype", "float32,int8", "-dt", "one", "--bw-Mbps", "940", "--mem-MB", "100")
    assert any(line.startswith("fit ") for line in lines)
    model = spec_files.load_models(here / "models.yml")["llama-puzzles"]
    assert (model.layers, model.context, model.elements_out[:4]) == (16, 256, (192, 96, 384, 96))
    decoder = find_decoder("llama-puzzles")
    exact, small = spec_files.load_device_types(here / "device_types.yml")["one"].profiles["llama-puzzles"]
    for profile, dtype in ((exact, torch.float32), (small, torch.int8)):
        steps = profile.steps
        assert steps is not None
        assert steps.residual is not None
        assert steps.variation is not None
        assert 0 <= steps.variation < 1
        full, _ = decoder.page_bytes(LayerRange(0, 16), dtype)
        assert sum(steps.cache_bytes) * PAGE == full
        assert len(steps.many_row_s) == 16
        assert sum(profile.weights_of(model)) == pytest.approx(decoder.weight_bytes(LayerRange(0, 16), dtype))
        # Blocks that differ in nothing but their weights have the same costs.
        assert steps.fixed_s[:4] == steps.fixed_s[4:8]
        # Of one row, either line may be the lower one, as the machine's speed decides.
        few = map(sum, zip(steps.start_s, steps.row_s, strict=True))
        many = map(sum, zip(steps.many_start_s, steps.many_row_s, strict=True))
        assert profile.time_s == tuple(map(max, steps.fixed_s, map(min, few, many)))
        assert steps.ends.memory_bytes == decoder.end_bytes(dtype)
    assert load_results(here / "profiler_results-1-int8.yml").missing == ()


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_decoder_of_very_short_texts_is_measured_or_refused(here: Path, tokens: int) -> None:
    DecoderCase("LlamaForCausalLM", {"max_position_embeddings": tokens}).save(here / "short")
    if tokens < 3:
        message = refused(here, "-m", "./short", "-dt", "one", "--bw-Mbps", "1")
        assert f"up to {tokens} token" in message
        assert "of 3 or more" in message
        return
    profiled("-m", "./short", "-i", "2", "-dt", "one", "--bw-Mbps", "1")
    (profile,) = spec_files.load_device_types(here / "device_types.yml")["one"].profiles["./short"]
    assert profile.steps is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*PUZZLES, "-b", "4"), "-b/--batch-size: llama-puzzles generates text"),
        ((*PUZZLES, "-l", "2"), "-l/--layer-start: llama-puzzles generates text"),
        ((*PUZZLES, "--tokens", "8"), "--tokens: llama-puzzles generates text"),
        ((*PUZZLES, "--dtype", "float16"), "models that generate text have float32, bfloat16, int8, int4"),
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
        ((*DIGITS, "--tokens", "0,16"), "--tokens 0,16: a sentence has at least 1 token"),
        ((*DIGITS, "--tokens", "16,16"), "--tokens 16,16: give each length once"),
        ((*DIGITS, "-s", "8", "--tokens", "16"), "either -s/--shape-input or --tokens"),
        ((*DIGITS, "-b", "4,0"), "-b/--batch-size 4,0: give each size once, and at least 1"),
        ((*DIGITS, "--dtype", "int8,int8"), "--dtype int8,int8: give each type once: float32, "),
        ((*DIGITS, "--dtype", "int3"), "--dtype int3: give each type once: float32, "),
        ((*DIGITS, "-b", "1,2", "--plot", "p.html"), "--plot draws one profile"),
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
        (("--from-results", *DIGITS), "excludes --iterations, --model"),
        (("--synthetic", "2"), "name it with -dt"),
        (("--synthetic", "0", "-dt", "x"), "must be above 0"),
        (("--synthetic", "2", "-dt", "x"), "no such file"),
        (("--synthetic", "2", "-dt", "x", "--no-warmup"), "excludes --no-warmup"),
        (("--from", "x"), "only with --synthetic"),
        (("--serve-link", "-i", "3"), "excludes --iterations"),
        (("--modle",), "unknown option --modle; did you mean"),
    ],
)
def test_a_mistake_gets_one_line_and_changes_nothing(
    here: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in refused(here, *arguments)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_name": "other"}, "another model: other, but now it is vit-digits"),
        ({"dtype": "torch.float16"}, "another dtype: float16"),
        ({"batch_size": 4}, "another batch size: 4, but now it is 8"),
        ({"layers": 12}, "another number of layers: 12"),
        ({"device": "cuda"}, "another device: cuda"),
        ({"threads": 77}, "another thread count: 77"),
        ({"kernels": "emulated"}, "another set of kernels: emulated"),
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
    types = spec_files.load_device_types(here / "device_types.yml")
    assert [profile.batch_size for profile in types["board"].profiles["vit-digits"]] == [8, 2]
    assert types["board"].mem_bytes == 64 * MIB

    profiled(*again, "--mem-MB", 65, "--overwrite")
    assert spec_files.load_device_types(here / "device_types.yml")["board"].mem_bytes == 65 * MIB
    assert spec_files.load_device_types(here / "device_types.yml")["other"] == types["other"]


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
    assert spec_files.load_models(here / "models.yml")["vit-digits"].mem_bytes[0] == values[0] * MIB


def test_a_synthetic_type_is_a_multiple_of_another(here: Path) -> None:
    profiled(*DIGITS, "-dt", "board", "--bw-Mbps", 1000, "--mem-MB", 64)
    profiled("--synthetic", 2.5, "--from", "board", "-dt", "slow", "--mem-MB", 32)
    profiled("--synthetic", 0.5, "-dt", "fast", "--mem-MB", 128, "--bw-Mbps", 10)
    types = spec_files.load_device_types(here / "device_types.yml")
    (base,), (slow,), (fast,) = (types[name].profiles["vit-digits"] for name in ("board", "slow", "fast"))
    assert slow.time_s == pytest.approx([2.5 * value for value in base.time_s])
    assert slow.send_s == pytest.approx([2.5 * value for value in base.send_s])
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
    assert told[1] == "m.yml: vit-digits unchanged, it exists already"
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


def test_a_small_model_is_rehearsed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_work, "LONGEST_PASS_S", 10.0)
    monkeypatch.setattr(rehearsal, "ROUNDS", 1)
    monkeypatch.setattr(rehearsal, "_ROUND_S", 0.01)
    profiled(*DIGITS, "-b", 2, "--random-weights", "-dt", "board", "--mem-MB", 100, "--bw-Mbps", 100)
    written = yaml.safe_load((here / "profiler_results.yml").read_text())
    (profile,) = spec_files.load_device_types("device_types.yml")["board"].profiles["vit-digits"]
    assert profile.overhead_s == written["overhead"] >= 0
    assert profile.handling["tcp"] != TCP
    assert load_results(here / "profiler_results.yml").overhead_s == profile.overhead_s


# --- interruption -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "moment"),
    [
        (layer_work, "time_layers"),
        (layer_work, "activation_peaks"),
        (layer_work, "measure_handling"),
        (session, "save_results"),
    ],
)
def test_an_interruption_leaves_complete_files(
    here: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, moment: str
) -> None:
    profiled(*DIGITS, "-L", 4)
    (here / "models.yml").write_text((ROOT / "models.yml").read_text())
    before = content(here)

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        profiled(*DIGITS, "-l", 5, "-dt", "x", "--bw-Mbps", 1)
    assert content(here) == before
