"""Runs of decoders with the scheduler's files: the cut, what is promised, and what the run tells of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from text_ranks import PUZZLES, run_ranks

from pipeedge.base.errors import InfeasibleError, PipeEdgeError
from pipeedge.base.schedule import LayerRange
from pipeedge.base.text_lengths import InputSizes, TextLengths
from pipeedge.decoding.step_limits import CacheSize, StepLimits
from pipeedge.decoding.step_times import StepTimes
from pipeedge.decoding.steps import StepScheduler
from pipeedge.models.decoder import find_decoder
from pipeedge.models.registry import find_any
from pipeedge.plan import scheduler
from pipeedge.plan.schedule_choice import Following, scheduler_request
from pipeedge.report import read_run
from pipeedge.report.render import render_run
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run.preview import show_schedule
from pipeedge.simulate.options import parse_simulate
from pipeedge.simulate.session import simulate_request
from pipeedge.simulate.texts import FinishedTexts

NO_OTHERS: Mapping[str, float] = MappingProxyType({})


def write_cluster(
    folder: Path, ends_mb: float, mem_mb: float, *, slower: int = 1, faster: Mapping[str, float] = NO_OTHERS
) -> tuple[object, ...]:
    """Write the scheduler's files for ``llama-puzzles`` on two hosts; return the options that name them.

    ``faster``: how many times as fast the hosts are in number types besides float32.
    """
    layers = 16
    steps = {
        "fixed_s": [1e-4] * layers,
        "start_s": [0.0] * layers,
        "row_s": [1e-5] * layers,
        "position_s": [1e-8, 0.0, 0.0, 0.0] * (layers // 4),
        "chunk_position_s": [1e-8, 0.0, 0.0, 0.0] * (layers // 4),
        "cache_bytes": [512, 0, 0, 0] * (layers // 4),
        "ends": {
            **dict.fromkeys(("fixed_s", "start_s", "row_s", "feed_s", "feed_row_s"), 1e-5),
            "mem_MB": ends_mb,
        },
    }
    model = find_decoder(PUZZLES)
    sizes = [model.weight_bytes(LayerRange(one, one + 1), torch.float32) / 2**20 for one in range(layers)]
    profile = {"batch_size": 1, "dtype": "float32", "time_s": [1e-4] * layers, "steps": steps}
    slow = {**profile, "steps": {**steps, "fixed_s": [slower * 1e-4] * layers}}
    others = [
        {**profile, "dtype": dtype, "steps": {**steps, "fixed_s": [1e-4 / times] * layers}}
        for dtype, times in faster.items()
    ]
    kinds = {
        "small": {"mem_MB": mem_mb, "bw_Mbps": 1000, "model_profiles": {str(PUZZLES): [slow, *others]}},
        "large": {"mem_MB": 100, "bw_Mbps": 1000, "model_profiles": {str(PUZZLES): [profile, *others]}},
    }
    entry = {
        "layers": layers,
        "mem_MB": sizes,
        "parameters_in": 96,
        "parameters_out": [192, 96, 384, 96],
        "context": 256,
    }
    files = {"-sm": {str(PUZZLES): entry}, "-sdt": kinds, "-sd": {"small": ["0"], "large": ["1"]}}
    options: list[object] = []
    for option, content in files.items():
        path = folder / f"{option[1:]}.yml"
        path.write_text(json.dumps(content))
        options += [option, path]
    return tuple(options)


def test_a_decoder_is_scheduled_and_its_prediction_compared(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is 1 + 2?\nWhat is 30 + 4?\n")
    scheduled = write_cluster(tmp_path, ends_mb=0.1, mem_mb=1.2)
    paths = [tmp_path / "planned.jsonl", tmp_path / "even.jsonl"]
    # Only rank 0 is given the files.
    about = ("--input", prompts, "--max-tokens", 8, "-u", 2)
    report = tmp_path / "report.json"
    own = (*scheduled, "--report", report)
    ranks = run_ranks(2, *about, "--context", 64, own=(*own, "--output", paths[0]))
    (alone,) = run_ranks(1, *about, "--output", paths[1], "--quiet")
    assert [rank.error for rank in (*ranks, alone)] == [None] * 3
    assert paths[0].read_bytes() == paths[1].read_bytes()
    told = json.loads(report.read_text())
    # The data rank's host has no room for all layers beside the ends.
    assert [stage["rank"] for stage in told["schedule"]] in ([0, 1], [1, 0], [1])
    predicted = told["predicted"]
    assert predicted["streams"] == 2
    assert predicted["context"] == 64
    assert predicted["cache_bytes"] == predicted["cache_bytes_measured"] == 2 * 64 * 4 * 512
    for key in ("tokens_per_s", "between_tokens_s"):
        assert predicted[key] > 0 < predicted[f"{key}_measured"]
    printed = ranks[0].printed.getvalue()
    assert "tokens/s of 2 streams, measured" in printed
    assert "of cache for them, measured" in printed


@pytest.mark.parametrize("options", [("--dtype", "auto"), ("--plan", "auto")])
@pytest.mark.parametrize("fastest", ["int8", "int4"])
def test_number_types_are_chosen_from_profiles(
    options: tuple[str, ...], fastest: str, tmp_path: Path
) -> None:
    scheduled = write_cluster(tmp_path, 0.1, 8, faster={"int8": 2, "int4": 2, fastest: 4})
    words = ["0", "2", "-m", str(PUZZLES), *map(str, scheduled), *options]
    shown: list[str] = []
    show_schedule(parse_runtime(words, Environment()).request, shown.append)
    stages = [line for line in shown if line.startswith("stage ")]
    assert stages
    assert all(line.endswith(f", {fastest}") for line in stages), stages  # and no bits of links
    assert re.fullmatch(rf"{' '.join(options)} takes {fastest}, \S+ tokens/s of 8 streams", shown[-1])


@pytest.mark.parametrize("option", [("--dtype", "auto"), ("--plan", "auto")])
def test_number_types_are_chosen_anew_while_a_run_goes_on(option: tuple[str, str], tmp_path: Path) -> None:
    scheduled = write_cluster(tmp_path, 0.1, 8, faster={"int8": 2})
    words = ["0", "2", "-m", str(PUZZLES), *map(str, scheduled), *option, "-u", "4"]
    request = parse_runtime(words, Environment()).request
    following = Following(ranks=(0, 1))
    asked, _ = scheduler_request(request, find_any(PUZZLES), InputSizes(eight_bit=False), following)
    costs = scheduler.plan(asked, hosts=("0", "1")).costs
    assert {stage.dtype for stage in costs.schedule} == {"int8"}
    assert costs.text is not None
    assert costs.text.streams == 4


@pytest.mark.parametrize("prompt", [20, 63, 96, 128, 130, 190, 250])
@pytest.mark.parametrize("mem_mb", [1.6, 8])
def test_a_plan_has_the_chunks_of_a_run(mem_mb: float, prompt: int, tmp_path: Path) -> None:
    scheduled = write_cluster(tmp_path, 0.1, mem_mb)
    kinds = json.loads((tmp_path / "sdt.yml").read_text())
    kinds["large"]["mem_MB"] = mem_mb
    (tmp_path / "sdt.yml").write_text(json.dumps(kinds))
    request = parse_runtime(
        ["0", "2", "-m", str(PUZZLES), *map(str, scheduled), "-u", "1"], Environment()
    ).request
    sizes = InputSizes(texts=TextLengths(prompt, 6, prompt + 6, 1), eight_bit=False)
    asked, _ = scheduler_request(request, find_any(PUZZLES), sizes, Following(ranks=(0, 1)))
    costs = scheduler.plan(asked, hosts=("0", "1")).costs
    stages = len(costs.schedule)
    assert stages == (2 if mem_mb < 2 else 1)
    assert costs.text is not None
    # A step takes as long as ten rows, or longer if it has more.
    times = StepTimes(((1.0, 16e-4), (10.0, 16e-4), (1000.0, 0.16)))
    limits = StepLimits(prompt + 6, 2 * stages, stages, rows=300, attention=0.0, times=times)
    scheduler_of_steps = StepScheduler(limits, CacheSize(pages=100))
    scheduler_of_steps.add(0, range(prompt), 6)
    step = scheduler_of_steps.next()
    assert step is not None
    assert step.rows == pytest.approx(costs.text.chunk, abs=1)


def test_too_long_a_context_is_refused_with_what_fits(tmp_path: Path) -> None:
    scheduled = write_cluster(tmp_path, ends_mb=0.1, mem_mb=3.5)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Spell a.\n" * 8)
    (rank,) = run_ranks(1, *scheduled, "--input", prompts, "--context", 256, "-u", 8, "--quiet")
    assert isinstance(rank.error, PipeEdgeError)
    assert rank.error.exit_code == 3
    assert "the longest context that fits is" in str(rank.error)
    assert "with --context 256, at most" in str(rank.error)


def test_losses_are_told_in_tokens(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Spell a.\nSpell b.\n")
    scheduled = write_cluster(tmp_path, ends_mb=0.1, mem_mb=50, slower=50)
    about = ("-c", "tcp", "--on-failure", "continue", "--input", prompts, "-u", 2, "--dry-run")
    words = ["0", "2", "-m", str(PUZZLES), *map(str, (*scheduled, *about))]
    shown: list[str] = []
    show_schedule(parse_runtime(words, Environment()).request, shown.append)
    losses = [line.split(": ", 1) for line in shown if line.startswith("loss of ")]
    assert [host for host, _ in losses] == ["loss of 0", "loss of 1"]
    assert re.fullmatch(r"[0-9.]+ tokens/s on the others, after a pause of 0\.[0-9]+ s", losses[1][1])


def simulated(scheduled: Sequence[object], *options: object) -> FinishedTexts:
    found = simulate_request(parse_simulate(["-m", str(PUZZLES), *map(str, (*scheduled, *options))]))
    assert isinstance(found, FinishedTexts)
    return found


def test_a_simulated_text_takes_the_sum_of_its_steps(tmp_path: Path) -> None:
    scheduled = write_cluster(tmp_path, 0.1, 8, slower=1)
    prompt, answer = 60, 40
    sizes = ("-b", 1, "-u", 1, "--context", 128, "--prompt-tokens", prompt, "--answer-tokens", answer)
    found = simulated(scheduled, *sizes, "-pt", "1,16")

    def step_s(rows: int, first: int) -> float:
        layers = 16 * max(1e-4, rows * 1e-5)
        attention = 4 * 1e-8 * sum(range(first + 1, first + rows + 1))
        return layers + attention + 1e-5 * (1 + rows) + 2e-5

    steps = [step_s(prompt, 0), *(step_s(1, position) for position in range(prompt, prompt + answer - 1))]
    assert found.length_s == pytest.approx(sum(steps), rel=1e-2)
    figures = found.report().text
    assert figures is not None
    assert figures.completion_tokens == answer
    assert figures.first_token_s is not None
    assert figures.first_token_s.p50 == pytest.approx(steps[0], rel=1e-2)


@pytest.mark.parametrize(("streams", "mem_mb"), [(1, 1.6), (6, 2.8)])
def test_a_simulated_run_of_texts_has_the_rate_that_was_predicted(
    streams: int, mem_mb: float, tmp_path: Path
) -> None:
    scheduled = write_cluster(tmp_path, 0.1, mem_mb, slower=1)
    kinds = json.loads((tmp_path / "sdt.yml").read_text())
    kinds["large"]["mem_MB"] = mem_mb
    (tmp_path / "sdt.yml").write_text(json.dumps(kinds))
    sizes = ("-b", streams, "-u", streams, "--context", 128, "--prompt-tokens", 32, "--answer-tokens", 90)
    found = simulated(scheduled, *sizes, "--data-host", 0)
    assert len(found.schedule.stages) == 2
    comparison = found.report().text_comparison
    assert comparison is not None
    figures = dict(comparison.figures())
    wanted = {"tokens_per_s", "between_tokens_s", "cache_bytes"} | (
        {"first_token_s"} if streams == 1 else set()
    )
    assert figures.keys() == wanted
    for name, figure in figures.items():
        assert figure.error == pytest.approx(0.0, abs=0.1), name


def test_simulated_texts_go_on_after_a_loss(tmp_path: Path) -> None:
    """The tokens so far are computed again, and all texts are written."""
    scheduled = write_cluster(tmp_path, 0.1, 100, slower=1)
    (tmp_path / "sd.yml").write_text(json.dumps({"small": ["0", "2"], "large": ["1"]}))
    sizes = ("-b", 6, "-u", 3, "--context", 128, "--prompt-tokens", 70, "--answer-tokens", 50)
    options = (*sizes, "-pt", "1,4,5,8,9,16", "--transport", "tcp", "--lose", "1@0.15", "--detect-s", "0.01")
    found = simulated(scheduled, *options)
    report = found.report()
    assert report.text is not None
    assert report.text.completion_tokens == 6 * 50
    assert [one.record.number for one in found.epochs] == [1, 2]
    assert found.length_s > found.undisturbed_s
    assert report.text.repeated_tokens > 0
    body = found.to_body(["pipeedge", "simulate"])
    assert read_run(body, "the report").epochs
    render_run(read_run(body, "the report"))


def test_what_ranks_keep_shortens_a_simulated_recovery(tmp_path: Path) -> None:
    """The middle one of three ranks is lost; outputs spare the first layers, copies all that was full."""
    scheduled = write_cluster(tmp_path, 0.1, 100, slower=1)
    (tmp_path / "sd.yml").write_text(json.dumps({"small": ["0", "2"], "large": ["1"]}))
    sizes = ("-b", 3, "-u", 3, "--context", 256, "--prompt-tokens", 70, "--answer-tokens", 150)
    lost = ("-pt", "1,6,7,10,11,16", "--transport", "tcp", "--lose", "1@0.3", "--load-MBps", 1000)
    plain, outputs, copies = (
        simulated(scheduled, *sizes, *lost, *more) for more in ((), ("--keep-outputs",), ("--replicate",))
    )
    texts = [found.report().text for found in (plain, outputs, copies)]
    assert [text is not None and text.completion_tokens for text in texts] == [3 * 150] * 3
    assert plain.length_s > outputs.length_s > copies.length_s
    assert plain.undisturbed_s == outputs.undisturbed_s == copies.undisturbed_s
    assert texts[2] is not None
    assert texts[2].kept_tokens > 3 * 64


@pytest.mark.parametrize("mem_mb", [2.2, 3.5])
def test_texts_are_planned_again_after_a_loss(mem_mb: float, tmp_path: Path) -> None:
    """The scheduler is told what hosts have loaded, and says which plan follows, or why there is none."""
    scheduled = write_cluster(tmp_path, 0.1, mem_mb, slower=1)
    kinds = json.loads((tmp_path / "sdt.yml").read_text())
    kinds["large"]["mem_MB"] = 2.2
    (tmp_path / "sdt.yml").write_text(json.dumps(kinds))
    sizes = ("-b", 4, "-u", 4, "--context", 128, "--prompt-tokens", 32, "--answer-tokens", 90)
    options = (*scheduled, *sizes, "--transport", "tcp", "--lose", "1@0.1")
    if mem_mb < 3:
        with pytest.raises(InfeasibleError, match=r"--lose 1@0.1: .* nothing fits without it: .* memory"):
            simulated(options)
    else:
        assert simulated(options).schedule.ranks == (0,)
