"""``runtime.py`` from outside: real ranks, real signals, every failure within its deadline.

Ranks mostly wait: for torch to be imported, and for one another. So the worlds of these tests run three
at a time in a pool, and each test waits for its own (``scenario``). What needs only one rank runs inside
this process, further below.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from networks import make_network
from places import ASSETS, RUNTIME
from processes import DEADLINE_S, DIES_WHEN_COMPLETE, Ended, World, environment, free_port, run_world
from rich.console import Console
from small_models import VOCABULARY, WORDS

from pipeedge.base.errors import RequestError
from pipeedge.base.program import guard
from pipeedge.control.member import Callbacks
from pipeedge.control.session import Forms, Session
from pipeedge.models import find_model
from pipeedge.request.config import Environment, WorldRequest
from pipeedge.request.options import parse_runtime
from pipeedge.run import pipeline

DIGITS = ("-m", "vit-digits")
ENDLESS = (*DIGITS, "-b", 10_000_000, "--output", "rows.csv", "--report", "report.json")
EVEN = 8
"""An uneven batch: 50 items in microbatches of 8 leave one of 2."""

Scenario = Callable[[Path, "Inputs"], None]
SCENARIOS: dict[str, Scenario] = {}


class Inputs:
    """Files that several worlds read."""

    def __init__(self, root: Path, model_dirs: dict[str, Path]) -> None:
        self.models = model_dirs
        self.collected: dict[str, bytes] = {}
        """The outputs of every split, which must be the same."""
        with np.load(ASSETS / "digits.npz") as arrays:
            pixels = (arrays["images_heldout"][:50, None].astype(np.float32) / 16 - 0.5) / 0.5
            labels = arrays["labels_heldout"][:50].astype(np.int64)
        self.digits = root / "digits.npz"
        np.savez(self.digits, pixel_values=pixels, labels=labels)
        chance = np.random.default_rng(1)
        self.images = root / "images.npz"
        np.savez(self.images, pixel_values=chance.standard_normal((7, 3, 16, 16), dtype=np.float32))
        self.sentences = root / "sentences.txt"
        lengths = [1, 9, 3, 14, 2, 5, 7]
        words = random.Random(3)
        self.sentences.write_text(
            "".join(" ".join(words.choice(WORDS) for _ in range(length)) + "\n" for length in lengths)
        )
        self.damaged = root / "damaged"
        shutil.copytree(model_dirs["vit"], self.damaged)
        weights = self.damaged / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        self.other = root / "other"
        shutil.copytree(model_dirs["vit"], self.other)
        _change_a_weight(self.other / "model.safetensors")


def _change_a_weight(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = max(tensors, key=lambda key: tensors[key].numel())
    tensors[name] = tensors[name] + 1
    save_file(tensors, path)


def scenario(run: Scenario) -> Scenario:
    """A test that takes a directory and the inputs, and spends its time waiting for ranks."""
    SCENARIOS[run.__name__] = run
    return run


def scenarios(**variants: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One scenario for each keyword; its value goes to the function as a further argument."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        for name, value in variants.items():
            SCENARIOS[f"{run.__name__}_{name}"] = functools.partial(run, variant=value)
        return run

    return register


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory, model_dirs: dict[str, Path]) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"), model_dirs)


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, inputs: Inputs
) -> Iterator[dict[str, Future[None]]]:
    """The scenarios that were selected, under way."""
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_ranks"
    ]
    with ThreadPoolExecutor(max_workers=3) as pool:
        yield {name: pool.submit(SCENARIOS[name], tmp_path_factory.mktemp(name), inputs) for name in wanted}


def outputs(path: Path) -> np.ndarray:
    with np.load(path) as arrays:
        return arrays["outputs"]


def succeeded(ended: dict[int, Ended]) -> None:
    for rank, end in ended.items():
        assert end.status == 0, f"rank {rank}: {end.err}"
        assert end.err == ""


# --- what is computed -------------------------------------------------------------------------------

SPLIT = (*DIGITS, "-u", EVEN, "--output", "o.npz", "--report", "r.json")
SPLITS: dict[str, tuple[int, tuple[object, ...], list[tuple[int, list[int]]]]] = {
    "one_rank": (1, ("-D", 0), [(0, [1, 16])]),
    "two_ranks": (2, ("-pt", "1,6,7,16", "-D", 1), [(0, [1, 6]), (1, [7, 16])]),
    "three_ranks_in_any_order": (
        3,
        ("-pt", "1,1,2,11,12,16", "-r", "2,0,1", "-D", 1),
        [(2, [1, 1]), (0, [2, 11]), (1, [12, 16])],
    ),
    "four_ranks": (
        4,
        ("-pt", "1,3,4,5,6,14,15,16", "-D", 2),
        [(0, [1, 3]), (1, [4, 5]), (2, [6, 14]), (3, [15, 16])],
    ),
    "more_ranks_than_stages": (4, ("-pt", "1,7,8,16", "-r", "1,0", "-D", 3), [(1, [1, 7]), (0, [8, 16])]),
}


@scenarios(**SPLITS)
def the_split(
    directory: Path, inputs: Inputs, variant: tuple[int, tuple[object, ...], list[tuple[int, list[int]]]]
) -> None:
    size, options, stages = variant
    ended = run_world(directory, size, *SPLIT, "--input", inputs.digits, *options)
    succeeded(ended)
    for rank, end in ended.items():
        assert bool(end.out) == (rank == options[-1]), "the data rank alone prints the table"
    with np.load(inputs.digits) as arrays, np.load(directory / "o.npz") as results:
        assert results["outputs"].shape == (50, 10)
        assert results["outputs"].dtype == np.float32
        assert results["labels"].tolist() == arrays["labels"].tolist()
    check_report(json.loads((directory / "r.json").read_text()), stages)
    inputs.collected[str(options)] = outputs(directory / "o.npz").tobytes()


@scenarios(two_ranks=())
def the_report_is_a_page(directory: Path, inputs: Inputs, variant: tuple[()]) -> None:
    options = (*DIGITS, "-b", 48, "-pt", "1,8,9,16", "-q", "8,0", "--report", "r.html")
    succeeded(run_world(directory, 2, *options))
    page = (directory / "r.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    for section in ("schedule", "gantt", "times", "charts", "stages", "origin"):
        assert f'<section id="{section}">' in page
    assert "layers 9–16" in page
    assert "Bottleneck" in page
    assert "--report r.html" in page


def check_report(report: dict[str, Any], stages: Sequence[tuple[int, list[int]]]) -> None:
    """Everything DESIGN 4.1 asks for, and that the numbers can be."""
    assert report["model"] == "vit-digits"
    assert [(stage["rank"], stage["layers"]) for stage in report["schedule"]] == list(stages)
    assert [stage["stage"] for stage in report["schedule"]] == list(range(len(stages)))
    assert {(stage["host"], stage["quant_bits"]) for stage in report["schedule"]} == {(None, 0)}
    assert (report["items"], report["microbatches"], report["ubatch_size"]) == (50, 7, EVEN)
    assert report["startup_s"] > 0.1
    assert report["throughput_items_per_s"] == pytest.approx(50 / report["elapsed_s"])
    latency = report["latency_s"]
    assert 0 < latency["p50"] <= latency["p95"] <= latency["max"] <= report["elapsed_s"] + 1e-6
    accuracy = report["accuracy"]
    assert accuracy["labelled"] == 50
    assert 48 <= accuracy["correct"] <= 50
    assert accuracy["top1"] == pytest.approx(accuracy["correct"] / 50)
    assert report["predicted"] == {"throughput_items_per_s": None}
    assert report["skipped"] == []
    assert [stage["rank"] for stage in report["stages"]] == [rank for rank, _ in stages]
    for stage in report["stages"]:
        assert stage["compute_s_mean"] > 0
        assert stage["send_s_mean"] >= 0
        assert stage["recv_wait_s_mean"] >= 0
        assert 0 < stage["busy_fraction"] <= 1
        assert 50 < stage["rss_peak_mb"] < 2000
    assert all(stage["bytes_out_mean"] > 8 * 65 * 4 for stage in report["stages"][:-1])


@scenarios(vit="vit", deit="deit")
def the_pipeline_is_the_model(directory: Path, inputs: Inputs, variant: str) -> None:
    import transformers

    options = ("-m", inputs.models[variant], "--input", inputs.images, "--output", "o.npz")
    succeeded(run_world(directory, 3, *options, "-u", 3, "-pt", "1,3,4,9,10,12", "-D", 2, "-r", "1,2,0"))
    classes = {
        "vit": transformers.ViTForImageClassification,
        "deit": transformers.DeiTForImageClassificationWithTeacher,
    }
    reference = classes[variant].from_pretrained(inputs.models[variant]).eval()
    with np.load(inputs.images) as arrays, torch.inference_mode():
        expected = reference(torch.from_numpy(arrays["pixel_values"])).logits
    np.testing.assert_allclose(outputs(directory / "o.npz"), expected, atol=1e-5, rtol=0)


@scenario
def sentences_of_any_length_are_padded_and_masked_at_every_stage(directory: Path, inputs: Inputs) -> None:
    import transformers

    model = inputs.models["bert"]
    options = ("-m", model, "--input", inputs.sentences, "--output", "o.npz", "-u", 3)
    succeeded(run_world(directory, 3, *options, "-pt", "1,1,2,6,7,12", "-D", 1))
    reference = transformers.BertForSequenceClassification.from_pretrained(model).eval()
    expected = []
    for line in inputs.sentences.read_text().splitlines():  # each alone, so without padding
        ids = [VOCABULARY.index(token) for token in ("[CLS]", *line.split(), "[SEP]")]
        with torch.inference_mode():
            expected.append(reference(torch.tensor([ids])).logits[0])
    np.testing.assert_allclose(outputs(directory / "o.npz"), torch.stack(expected), atol=1e-5, rtol=0)


def write_cluster(directory: Path, hosts: Sequence[str]) -> tuple[str, ...]:
    """The scheduler's three files for vit-digits, for one slow and two fast hosts."""
    layers = 16
    models = {
        "vit-digits": {
            "layers": layers,
            "parameters_in": 64,
            "parameters_out": [2080, 1040, 5200, 1040] * 4,
            "mem_MB": [1.0] * layers,
        }
    }
    profile = {"dtype": "torch.float32", "batch_size": 8}
    kinds = {
        kind: {
            "bw_Mbps": 1000,
            "mem_MB": 1024,
            "model_profiles": {"vit-digits": [{**profile, "time_s": [seconds] * layers}]},
        }
        for kind, seconds in (("slow", 0.02), ("fast", 0.01))
    }
    documents = {"m.yml": models, "t.yml": kinds, "d.yml": {"slow": [hosts[0]], "fast": [*hosts[1:]]}}
    for name, document in documents.items():
        (directory / name).write_text(yaml.safe_dump(document))
    return ("-sm", "m.yml", "-sdt", "t.yml", "-sd", "d.yml")


@scenarios(by_rank=("0", "1", "2"), by_name=("turtle", "hare", "greyhound"))
def the_scheduler_decides(directory: Path, inputs: Inputs, variant: Sequence[str]) -> None:
    files = write_cluster(directory, variant)
    named = variant[0] != "0"
    # The files are rank 0's alone: the others are given none.
    hosts = ("-H", ",".join(variant)) if named else ()
    options = (*DIGITS, "-b", 24, "--output", "o.npz", "--report", "r.json", *hosts)
    succeeded(run_world(directory, 3, *options, own={0: files}))
    report = json.loads((directory / "r.json").read_text())
    layers = {stage["rank"]: stage["layers"][1] - stage["layers"][0] + 1 for stage in report["schedule"]}
    assert sum(layers.values()) == 16
    assert layers[0] <= 4
    assert min(layers[1], layers[2]) >= 6
    assert report["predicted"]["throughput_items_per_s"] == pytest.approx(8 / 0.06, rel=0.2)
    assert {stage["host"] for stage in report["schedule"]} == (set(variant) if named else {None})


@scenarios(with_its_own_port=(), with_our_port=("--master-port", "{port}"))
def torchrun_starts_it_as_it_is(directory: Path, inputs: Inputs, variant: Sequence[str]) -> None:
    launcher = [part.format(port=free_port()) for part in variant] or ["--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *launcher]
    done = subprocess.run(
        [*command, str(RUNTIME), *DIGITS, "-b", "16", "--output", "o.npz"],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert outputs(directory / "o.npz").shape == (16, 10)
    assert "Traceback" not in done.stderr


# --- what fails -------------------------------------------------------------------------------------

KILL_S = 25.0
"""How soon after a death the others must have ended, on a busy machine too; silence alone takes 60 s."""


def nothing_is_left(directory: Path) -> None:
    names = {path.name for path in directory.iterdir()}
    assert not any(name.startswith(".") for name in names), names
    assert not names & {"rows.csv", "report.json", "o.npz"}


def others_name(ended: dict[int, Ended], culprit: int, *, says: str, since: float, within: float) -> None:
    """Every other rank has ended with code 4, in time, with one line that names the culprit."""
    for rank, end in ended.items():
        if rank == culprit:
            continue
        assert end.status == 4, f"rank {rank} ended with {end.status}: {end.err}"
        # One that dies before its hello is told first, and may be what never appears.
        early = "left before it introduced itself; ranks still missing"
        (line,) = [line for line in end.err.splitlines() if line.strip() and early not in line]
        assert re.search(rf"rank {culprit}\b.*{says}", line), f"rank {rank} said: {line}"
        assert end.at - since < within, f"rank {rank} took {end.at - since:.1f} s"


@scenarios(first=0, middle=1, last=2)
def a_rank_is_killed_in_full_swing(directory: Path, inputs: Inputs, variant: int) -> None:
    data_rank = (variant + 1) % 3
    with World(directory, 3, *ENDLESS, "-D", data_rank) as world:
        world.start().until_rows()
        since = world.signal(variant, signal.SIGKILL)
        ended = world.wait(within=2 * KILL_S)
    assert ended[variant].status == -signal.SIGKILL
    others_name(ended, variant, says=rf"\(stage {variant}, layers .* is gone", since=since, within=KILL_S)
    nothing_is_left(directory)


@scenario
def the_data_rank_is_killed(directory: Path, inputs: Inputs) -> None:
    """It has no stage, and its own half file is all that it leaves behind. Before that, a rank of another run
    comes to the same port: only that one ends."""
    (directory / "stray").mkdir()
    with World(directory, 3, *ENDLESS, "-pt", "1,8,9,16", "-D", 2) as world:
        world.start().until_rows()
        with World(directory / "stray", 2, *ENDLESS, port=world.port) as other:
            stray = other.start(1).wait()[1]
        assert stray.status == 2
        assert re.search("rank 0 says 3: rank 1 is already there, on .*: choose another --port", stray.line)
        # The rendezvous is over: rank 0 listens for control and, as everybody, for gloo's links alone.
        assert [len(world.listening(rank)) for rank in range(3)] == [2, 1, 1]
        assert world.port in world.listening(0)
        since = world.signal(2, signal.SIGKILL)
        ended = world.wait(within=2 * KILL_S)
    others_name(ended, 2, says=r"\(data rank.*is gone", since=since, within=KILL_S)
    assert not (directory / "rows.csv").exists()
    # It could not clean up; the next run that writes there does.
    assert list(directory.glob(".rows.csv.*.part"))
    run_world(directory, 1, *DIGITS, "-b", 8, "--output", "rows.csv")
    assert (directory / "rows.csv").is_file()
    assert not list(directory.glob(".*.part"))


@scenarios(the_hub=(0, False), a_stage=(1, False), with_a_report=(1, True))
def a_rank_is_killed_after_the_results_are_complete(
    directory: Path, inputs: Inputs, variant: tuple[int, bool]
) -> None:
    culprit, reports = variant
    options = (*DIGITS, "-b", 64, "--output", "rows.csv", "-D", 2)
    asked = ("--report", "report.json") if reports else ()
    with World(directory, 3, *options, own={2: asked}, env={DIES_WHEN_COMPLETE: str(culprit)}) as world:
        ended = world.start().wait()
    assert ended.pop(culprit).status == -signal.SIGKILL
    assert {rank: end.status for rank, end in ended.items()} == {1 - culprit: 0, 2: 4 if reports else 0}
    for rank, end in ended.items():
        told = end.err.splitlines()
        assert re.search(rf"rank {rank}: rank {culprit} \(.* is gone: .*; the results are complete$", told[0])
        assert len(told) == (2 if rank == 2 else 1), end.err
    without = "but there is nothing for --report" if reports else "without a table"
    assert without in ended[2].err.splitlines()[-1]
    assert len((directory / "rows.csv").read_text().splitlines()) == 65
    assert not (directory / "report.json").exists()


@scenarios(hub=0, member=1)
def a_rank_is_killed_before_all_are_there(directory: Path, inputs: Inputs, variant: int) -> None:
    timeout = 10
    with World(directory, 3, *ENDLESS, "--timeout", timeout) as world:
        world.start(0, 1).until_connected(2)
        since = world.signal(variant, signal.SIGKILL)
        ended = world.wait(within=2 * KILL_S)
    nothing_is_left(directory)
    if variant == 1 and "ranks 1, 2 of 3 never appeared" in ended[0].line:
        return  # it was killed before it had said which rank it is
    others_name(ended, variant, says="is gone", since=since, within=KILL_S)


@scenario
def a_rank_is_killed_at_any_moment(directory: Path, inputs: Inputs) -> None:
    """Moments that nobody has chosen: while torch is imported, weights are read, links are made."""
    chance = random.Random(7)
    for number in range(3):
        part = directory / str(number)
        part.mkdir()
        culprit = chance.randrange(2)
        with World(part, 2, *ENDLESS, "--timeout", 8, fresh=True) as world:
            world.start()
            time.sleep(chance.uniform(1.0, 4.5))
            since = world.signal(culprit, signal.SIGKILL)
            ended = world.wait(within=2 * KILL_S)
        # It may not have been there yet, and then it never appears.
        others_name(ended, culprit, says="(is gone|never appeared)", since=since, within=KILL_S + 8)
        assert not (part / "rows.csv").exists()


@scenarios(hub=0, middle=1, last=2)
def a_rank_stops_answering(directory: Path, inputs: Inputs, variant: int) -> None:
    timeout = 6
    with World(directory, 3, *ENDLESS, "--timeout", timeout, "-D", (variant + 2) % 3) as world:
        world.start().until_rows()
        since = world.signal(variant, signal.SIGSTOP)
        others = [rank for rank in range(3) if rank != variant]
        ended = world.wait(*others, within=3 * timeout)
    others_name(
        ended, variant, says=rf"\(stage {variant}, .*has been silent for", since=since, within=timeout
    )
    nothing_is_left(directory)


@scenario
def a_rank_stops_before_all_are_there(directory: Path, inputs: Inputs) -> None:
    timeout = 10  # two ranks must appear within it, on a busy machine too
    with World(directory, 3, *ENDLESS, "--timeout", timeout) as world:
        world.start(0, 1, 2).until_connected(2)
        since = world.signal(2, signal.SIGSTOP)
        ended = world.wait(0, 1, within=3 * timeout)
    others_name(ended, 2, says="(has been silent for|never appeared)", since=since, within=timeout + 3)
    nothing_is_left(directory)


@scenarios(the_hub=0, a_member=1)
def a_rank_never_appears(directory: Path, inputs: Inputs, variant: int) -> None:
    with World(directory, 2, *ENDLESS, "--timeout", 3) as world:
        present = 1 - variant
        since = time.monotonic()
        ended = world.start(present).wait(within=25)
    assert ended[present].at - since < 8
    assert ended[present].status == 4
    assert f"rank {variant}" in ended[present].line
    assert "never appeared" in ended[present].line
    nothing_is_left(directory)


@scenario
def bad_weights_on_one_rank_end_all(directory: Path, inputs: Inputs) -> None:
    options = ("-b", 64, "--output", "o.npz")
    own = {0: ("-m", inputs.models["vit"]), 1: ("-m", inputs.damaged)}
    ended = run_world(directory, 2, *options, own=own)
    assert ended[1].status == 2
    assert "model.safetensors" in ended[1].line
    assert ended[0].status == 4
    assert re.search(
        r"rank 1 \(stage 1, layers 5-12, on .*\) failed: .*model.safetensors", ended[0].line
    ) or (re.search(r"rank 1 \(.*\) failed: .*model.safetensors", ended[0].line))
    nothing_is_left(directory)


@scenario
def an_input_that_breaks_half_way_ends_all(directory: Path, inputs: Inputs) -> None:
    pictures = directory / "pictures"
    write_pictures(pictures, 200)
    (pictures / "150.png").write_bytes(b"no picture")
    options = ("-m", inputs.models["vit"], "--input", "pictures", "-u", 1, "--output", "o.npz")
    ended = run_world(directory, 2, *options, "-D", 1)
    assert ended[1].status == 2
    assert "150.png" in ended[1].line
    assert ended[0].status == 4
    assert re.search(r"rank 1 \(stage 1, .*\) failed: .*150\.png", ended[0].line)
    nothing_is_left(directory)


def write_pictures(folder: Path, count: int) -> None:
    from PIL import Image

    folder.mkdir()
    pixels = np.random.default_rng(5)
    for number in range(count):
        Image.fromarray(pixels.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(
            folder / f"{number:03}.png"
        )


DISAGREEMENTS: dict[str, tuple[Callable[[Inputs], dict[int, Sequence[object]]], str]] = {
    "on_the_model": (
        lambda inputs: {0: DIGITS, 1: ("-m", inputs.models["vit"])},
        "disagree on the (model|configuration)",
    ),
    "on_the_weights": (
        lambda inputs: {0: ("-m", inputs.models["vit"]), 1: ("-m", inputs.other)},
        "disagree on the weights",
    ),
    "on_the_microbatch": (
        lambda inputs: {0: (*DIGITS, "-u", 4), 1: (*DIGITS, "-u", 8)},
        "disagree on the microbatch size.*4 and 8",
    ),
    "on_the_partition": (
        lambda inputs: {0: (*DIGITS, "-pt", "1,8,9,16"), 1: (*DIGITS, "-pt", "1,4,5,16")},
        "disagree on -pt/--partition: 1,8,9,16 and 1,4,5,16",
    ),
}


@scenarios(**DISAGREEMENTS)
def ranks_that_disagree_all_hear_it(
    directory: Path, inputs: Inputs, variant: tuple[Callable[[Inputs], dict[int, Sequence[object]]], str]
) -> None:
    own, says = variant
    ended = run_world(directory, 2, "--output", "o.npz", own=own(inputs))
    for end in ended.values():
        assert end.status == 2
        assert re.search(rf"ranks 0 and 1 {says}", end.line)
    nothing_is_left(directory)


@scenario
def ranks_that_disagree_on_the_world_all_hear_it(directory: Path, inputs: Inputs) -> None:
    port = free_port()
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    two = World(directory / "a", 2, *ENDLESS, port=port)
    three = World(directory / "b", 3, *ENDLESS, port=port)
    with two, three:
        two.start(0)
        three.start(1)
        ended = {0: two.wait(within=30)[0], 1: three.wait(within=30)[1]}
    for end in ended.values():
        assert end.status == 2
        assert re.search("rank 1 on .* says the world has 3 ranks, rank 0 says 2: start", end.line)


@scenarios(ctrl_c=signal.SIGINT, terminated=signal.SIGTERM)
def it_is_interrupted(directory: Path, inputs: Inputs, variant: int) -> None:
    """As by Ctrl-C in a terminal, which every process in it hears."""
    with World(directory, 2, *ENDLESS) as world:
        world.start().until_rows()
        since = time.monotonic()
        for rank in range(2):
            world.signal(rank, variant)
        ended = world.wait(within=KILL_S)
    for end in ended.values():
        assert (end.status, end.out, end.err) == (130, "", "")
        assert end.at - since < 5
    nothing_is_left(directory)


@scenario
def one_rank_is_interrupted(directory: Path, inputs: Inputs) -> None:
    with World(directory, 2, *ENDLESS) as world:
        world.start().until_rows()
        since = world.signal(1, signal.SIGINT)
        ended = world.wait(within=KILL_S)
    assert (ended[1].status, ended[1].err) == (130, "")
    others_name(ended, 1, says="was interrupted", since=since, within=5)
    nothing_is_left(directory)


@scenario
def it_is_interrupted_at_any_moment(directory: Path, inputs: Inputs) -> None:
    """Quiet even while torch is imported, or while nobody else is there."""
    with World(directory, 2, *ENDLESS, "--timeout", 30, fresh=True) as world:
        for delay in (0.4, 0.9, 1.6):
            world.start(1)
            time.sleep(delay)
            world.signal(1, signal.SIGINT)
            end = world.wait(1, within=KILL_S)[1]
            assert end.err == "", f"after {delay} s"
            assert end.status in (130, -signal.SIGINT)  # -SIGINT: by the system, before it could answer


# A network of its own for each rank. ----------------------------------------------------------------


@scenarios(of_a_member=2, of_the_hub=0)
def a_cable_is_cut(directory: Path, inputs: Inputs, variant: int) -> None:
    timeout = 6
    with contextlib.ExitStack() as stack:
        net = make_network(f"pc{variant}", 3, stack)
        options = (*ENDLESS, "--timeout", timeout, "--addr", net.address(0), "-D", 1)
        world = stack.enter_context(World(directory, 3, *options, prefix=net.run))
        world.start().until_rows()
        since = net.cut(variant)
        ended = world.wait(within=3 * timeout)
    silent = rf"\(stage {variant}, .*has been silent for"
    if variant == 0:
        others_name(ended, 0, says=silent, since=since, within=timeout)
        assert ended[0].status == 4
    else:
        others = {rank: end for rank, end in ended.items() if rank != variant}
        others_name(others, variant, says=silent, since=since, within=timeout)
        # The one that is cut off knows only that it hears nothing.
        assert ended[variant].status == 4
        assert "rank 0 (stage 0, " in ended[variant].line
    nothing_is_left(directory)


@scenario
def one_link_of_several_is_cut(directory: Path, inputs: Inputs) -> None:
    """Both its ends go on talking to the hub, so neither is silent: the link is to blame."""
    timeout = 6
    with contextlib.ExitStack() as stack:
        net = make_network("pl", 3, stack)
        options = (*ENDLESS, "--timeout", timeout, "--addr", net.address(0))
        world = stack.enter_context(World(directory, 3, *options, prefix=net.run))
        world.start().until_rows()
        since = net.black_hole(1, 2)
        net.black_hole(2, 1)
        ended = world.wait(within=3 * timeout)
    for end in ended.values():
        assert end.status == 4
        assert re.search(
            r"rank 2 \(stage 2, .*waited .* for microbatch \d+ from rank 1 \(stage 1, .*link", end.line
        )
        assert end.at - since < timeout
    nothing_is_left(directory)


@scenario
def links_that_never_open_are_named(directory: Path, inputs: Inputs) -> None:
    """A firewall between two ranks, which both reach rank 0."""
    timeout = 6
    with contextlib.ExitStack() as stack:
        net = make_network("pf", 3, stack)
        net.black_hole(1, 2)
        net.black_hole(2, 1)
        options = (*ENDLESS, "--timeout", timeout, "--addr", net.address(0))
        world = stack.enter_context(World(directory, 3, *options, prefix=net.run))
        since = time.monotonic()
        ended = world.start().wait(within=5 * timeout)
    for end in ended.values():
        assert end.status == 4
        assert re.search(r"the links of rank \d to \d, \d over eth0 do not open", end.line)
        assert end.at - since < timeout + 20
    nothing_is_left(directory)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks(name: str, running: dict[str, Future[None]]) -> None:
    running[name].result(timeout=230)


def test_every_split_gives_the_same_bits(running: dict[str, Future[None]], inputs: Inputs) -> None:
    for name in SPLITS:
        future = running.get(f"the_split_{name}")
        if future is not None:
            future.result(timeout=100)
    assert len(set(inputs.collected.values())) <= 1
    if len(running) == len(SCENARIOS):
        assert len(inputs.collected) == len(SPLITS)


# --- one rank, in this process ----------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        assert "internal error" not in self.err
        return self.err


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Call]:
    """``runtime.py 0 1`` with more options, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*options: object, place: tuple[int, int] = (0, 1)) -> Call:
        console = io.StringIO()
        warnings: list[str] = []

        def main() -> None:
            words = [str(word) for word in (*place, "--port", free_port(), "--timeout", 20, *options)]
            command = parse_runtime(words, Environment())
            shown = Console(file=console, width=120)
            if command.dry_run:
                pipeline.show_schedule(command.request, shown)
            else:
                pipeline.run(command.request, shown, warnings.append)

        status = guard("runtime.py", main, verbose=False)
        out, err = capsys.readouterr()
        assert out == ""
        return Call(status, console.getvalue(), "".join(line + "\n" for line in warnings) + err)

    return run


def forward(name: Path | str, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the unsplit model makes of ``inputs``."""
    with torch.inference_mode():
        (result,) = find_model(name).load()(inputs)
    return result


@pytest.mark.parametrize(
    ("options", "items"),
    [
        (("-b", 1, "-u", 1), 1),
        (("-b", 5, "-u", 64), 5),
        (("-b", 7, "-u", 3), 7),
        (("-u", 1), 50),
        (("-b", 1000), 50),
    ],
)
def test_any_batch_and_microbatch(
    call: Callable[..., Call], inputs: Inputs, options: tuple[object, ...], items: int
) -> None:
    done = call(*DIGITS, "--input", inputs.digits, "--output", "o.npz", "--report", "r.json", *options)
    assert (done.status, done.err) == (0, "")
    with np.load(inputs.digits) as arrays:
        expected = forward("vit-digits", (torch.from_numpy(arrays["pixel_values"][:items]),))
    np.testing.assert_allclose(outputs(Path("o.npz")), expected, atol=1e-5, rtol=0)
    report = json.loads(Path("r.json").read_text())
    assert report["items"] == items
    assert report["microbatches"] == -(-items // report["ubatch_size"])


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_predictions_for_people_and_programs(call: Callable[..., Call], inputs: Inputs, suffix: str) -> None:
    done = call(*DIGITS, "--input", inputs.digits, "-b", 11, "--output", f"o.{suffix}")
    assert done.status == 0
    text = Path(f"o.{suffix}").read_text()
    if suffix == "csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        best = [int(row["class_1"]) for row in rows]
        labels = [int(row["label"]) for row in rows]
    else:
        documents = [json.loads(line) for line in text.splitlines()]
        best = [document["top"][0]["class"] for document in documents]
        labels = [document["label"] for document in documents]
    with np.load(inputs.digits) as arrays:
        expected = forward("vit-digits", (torch.from_numpy(arrays["pixel_values"][:11]),))
        assert labels == arrays["labels"][:11].tolist()
    assert best == expected.argmax(dim=1).tolist()


def test_folders_of_pictures_and_bad_ones_among_them(
    call: Callable[..., Call], inputs: Inputs, tmp_path: Path
) -> None:
    write_pictures(tmp_path / "pictures", 5)
    (tmp_path / "pictures" / "002.png").write_bytes(b"no picture")
    options = ("-m", inputs.models["vit"], "--input", "pictures", "-u", 2, "--output", "o.npz")
    refused = call(*options)
    assert refused.status == 2
    assert "pictures/002.png" in refused.line
    nothing_is_left(tmp_path)
    done = call(*options, "--skip-bad-input", "--report", "r.json")
    assert (done.status, done.err) == (0, "")
    assert "002.png" in done.out
    with np.load("o.npz") as arrays:
        assert arrays["outputs"].shape == (4, 7)
        assert arrays["items"].tolist() == [0, 1, 3, 4]
    (skipped,) = json.loads(Path("r.json").read_text())["skipped"]
    assert "002.png" in skipped


def test_the_default_input_is_repeated(call: Callable[..., Call], inputs: Inputs) -> None:
    done = call("-m", inputs.models["vit"], "-b", 5, "--output", "o.npz")
    assert done.status == 0
    found = outputs(Path("o.npz"))
    assert found.shape == (5, 7)
    np.testing.assert_allclose(found, np.broadcast_to(found[0], found.shape), atol=1e-6)


def test_a_dry_run_shows_the_schedule_and_starts_nothing(call: Callable[..., Call], tmp_path: Path) -> None:
    done = call(*DIGITS, "-pt", "1,5,6,16", "-r", "1,0", "--dry-run", "--output", "o.npz", place=(0, 2))
    assert (done.status, done.err) == (0, "")
    assert done.out == "stage 0: layers 1-5 on rank 1\nstage 1: layers 6-16 on rank 0\n"
    assert list(tmp_path.iterdir()) == []
    refused = call(*DIGITS, "-pt", "1,5,6,17", "--dry-run", place=(0, 2))
    assert (refused.status, refused.out) == (2, "")
    files = write_cluster(tmp_path, ("0", "1", "2"))
    done = call(*DIGITS, "--dry-run", *files, place=(0, 3))
    assert done.status == 0
    assert "predicted throughput" in done.out
    infeasible = tmp_path / "t.yml"
    infeasible.write_text(infeasible.read_text().replace("1024", "1"))
    refused = call(*DIGITS, "--dry-run", *files, place=(0, 3))
    assert refused.status == 3
    assert "sched-pipeline: " in refused.line


BAD_REQUESTS: dict[str, tuple[tuple[object, ...], str]] = {
    "beyond the model": ((*DIGITS, "-pt", "1,17"), "1-17 goes beyond the model: its layers are 1 to 16"),
    "uncovered": ((*DIGITS, "-pt", "1,15"), "layer 16 is covered by no stage"),
    "too many stages": ((*DIGITS, "-pt", "1,8,9,16"), "2 stages need as many ranks, the world has 1"),
    "unknown model": (("-m", "vit-digit"), "did you mean vit-digits"),
    "misspelt model": (("-m", "google/vit-base-patch16-225"), "did you mean google/vit-base-patch16-224"),
    "no weights": (("-m", "facebook/deit-tiny-distilled-patch16-224"), "save_model_weights.py"),
    "weights that are not there": ((*DIGITS, "-M", "no.safetensors"), "no.safetensors"),
    "weights that are none": ((*DIGITS, "-M", "junk.npz"), "junk.npz"),
    "truncated weights": (("-m", "{damaged}"), "model.safetensors"),
    "another model's weights": ((*DIGITS, "-M", "{vit}/model.safetensors"), r"\[.*\]|\(.*\)"),
    "no such input": ((*DIGITS, "--input", "nowhere.npz"), "nowhere.npz: no such file or folder"),
    "empty folder": (("-m", "{vit}", "--input", "empty"), "no image below this folder"),
    "empty text": (("-m", "{bert}", "--input", "empty.txt"), r"empty\.txt"),
    "the wrong kind": ((*DIGITS, "--input", "empty.txt"), "takes images"),
    "a picture that is none": (("-m", "{vit}", "--input", "junk.png"), r"junk\.png"),
    "a npz that is none": ((*DIGITS, "--input", "junk.npz"), r"junk\.npz is not a complete"),
    "arrays of another size": ((*DIGITS, "--input", "{images}"), "pixel_values"),
    "no such interface": ((*DIGITS, "-s", "nope0"), r"nope0: the interface does not exist; there are .*lo"),
    "no such name": ((*DIGITS, "--addr", "no-such-host.invalid"), "cannot resolve this name"),
    "not this machine": ((*DIGITS, "--addr", "203.0.113.5"), "not an address of this machine"),
    "an unknown device": ((*DIGITS, "-d", "tpu"), "use cpu, cuda or cuda:N"),
    "no GPU": ((*DIGITS, "-d", "cuda:77"), "CUDA"),
    "an unknown suffix": ((*DIGITS, "--output", "o.txt"), "unknown suffix"),
    "nowhere to write": ((*DIGITS, "--output", "nowhere/o.npz"), "does not exist"),
    "nowhere to report": ((*DIGITS, "--report", "nowhere/r.json"), "does not exist"),
    "no schedule file": ((*DIGITS, "--schedule-file", "no.yml"), r"no\.yml"),
    "no scheduler files": (
        (*DIGITS, "-sm", "a.yml", "-sdt", "b.yml", "-sd", "c.yml"),
        r"[abc]\.yml: no such file",
    ),
    "bits for more stages": ((*DIGITS, "-q", "8,0"), r"2 bit widths \(-q\) for 1 stage;"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_input_gets_one_line_and_leaves_nothing(
    name: str, call: Callable[..., Call], inputs: Inputs, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n")
    for junk in ("junk.npz", "junk.png"):
        (tmp_path / junk).write_bytes(b"\x00\x01junk" * 50)
    before = sorted(tmp_path.iterdir())
    options, says = BAD_REQUESTS[name]
    places = {"damaged": inputs.damaged, "images": inputs.images, **inputs.models}
    began = time.monotonic()
    done = call("--output", "o.npz", *(str(option).format(**places) for option in options))
    assert time.monotonic() - began < 60
    assert done.status == 2
    assert re.search(says, done.line), done.line
    assert sorted(tmp_path.iterdir()) == before


def test_a_port_in_use_is_said_and_a_single_rank_needs_none(call: Callable[..., Call]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, contextlib.ExitStack() as stack:
        port = taken.getsockname()[1]
        assert call(*DIGITS, "-b", 8, "--port", port).status == 0
        world = WorldRequest(rank=0, size=2, addr="127.0.0.1", port=port)
        session = stack.enter_context(Session(world, Forms(dict, dict, dict, dict), Callbacks()))
        with pytest.raises(RequestError, match=f"--port {port} is in use on 127.0.0.1"):
            session.open()


def test_a_run_leaves_no_thread_behind(call: Callable[..., Call]) -> None:
    before = threading.active_count()
    for _ in range(3):
        assert call(*DIGITS, "-b", 8).status == 0
    assert call(*DIGITS, "-b", 8, "-M", "nowhere.npz").status == 2
    assert threading.active_count() == before
