"""Runs of decoders with the scheduler's files: the cut, what is promised, and what the run tells of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from text_ranks import PUZZLES, run_ranks

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.schedule import LayerRange
from pipeedge.base.text_lengths import InputSizes
from pipeedge.models.decoder import find_decoder
from pipeedge.models.registry import find_any
from pipeedge.plan import scheduler
from pipeedge.plan.schedule_choice import Following, scheduler_request
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run.preview import show_schedule
from pipeedge.simulate.options import parse_simulate
from pipeedge.simulate.session import simulate_request

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
    assert losses[1][1].endswith(" tokens/s on the others")


def test_a_decoder_is_not_simulated(tmp_path: Path) -> None:
    scheduled = write_cluster(tmp_path, ends_mb=0.1, mem_mb=50)
    asked = parse_simulate(["-m", str(PUZZLES), *map(str, scheduled)])
    with pytest.raises(RequestError, match="generates text, and the simulation plays runs of encoders"):
        simulate_request(asked)
