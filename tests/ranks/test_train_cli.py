"""``train.py`` as a program: real workers, their output and files, and how they end."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from PIL import Image
from places import ROOT
from processes import environment

from pipeedge.base.errors import InputError, ModelError, RequestError
from pipeedge.report import read_run, render_run
from pipeedge.request.config import Environment
from pipeedge.train import main
from pipeedge.train.networks import Vgg, find_network
from pipeedge.train.options import parse_train
from pipeedge.train.request import TrainingRequest
from pipeedge.train.samples import open_samples

TRAIN = ROOT / "train.py"
DIGITS = ("--model", "vit-digits", "--data", "digits", "--optimizer", "adamw", "--lr", "0.002")
FOUR_ON_TWO = ("--stages", 4, "--workers", 2, "--partition", "1,3,4,8,9,13,14,16")
DEADLINE_S = 90.0


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(TRAIN), *map(str, arguments)]


def run(directory: Path, *arguments: object) -> str:
    """Run a training that must succeed, and return its output."""
    ended = subprocess.run(
        command(*arguments),
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def losses(printed: str) -> dict[int, float]:
    """Return the losses by batch, from 1."""
    found = re.findall(r"^batch (\d+): loss (\S+),", printed, re.MULTILINE)
    return {int(number): float(loss) for number, loss in found}


def correct(printed: str) -> int:
    (items,) = re.findall(r"^held-out accuracy \S+ \((\d+)/360\)", printed, re.MULTILINE)
    return int(items)


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of 40 batches of the unpipelined model."""
    return run(tmp_path_factory.mktemp("sequential"), *DIGITS, "--schedule", "sequential", "--batches", 40)


def test_four_stages_reach_the_accuracy_of_the_sequential_run(sequential: str, tmp_path: Path) -> None:
    options = (*FOUR_ON_TWO, "--schedule", "zero-bubble", "--batches", 40, "--microbatch-size", 16)
    printed = run(tmp_path, *DIGITS, *options, "--report", "report.json", "--trace", "trace.json")
    for number, loss in losses(sequential).items():
        assert losses(printed)[number] == pytest.approx(loss, rel=0.02)
    assert losses(printed)[1] == pytest.approx(losses(sequential)[1], rel=1e-5)
    assert correct(sequential) > 120
    assert abs(correct(printed) - correct(sequential)) <= 12
    body = json.loads((tmp_path / "report.json").read_text())
    assert [entry["loss"] for entry in body["training"]["batches"]] == pytest.approx(
        list(losses(printed).values()), abs=1e-6
    )
    assert [stage["layers"] for stage in body["schedule"]] == [[1, 3], [4, 8], [9, 13], [14, 16]]
    assert 0 < body["training"]["bubble"] < 1
    read = read_run(body, "report.json")
    assert read.timeline is not None
    assert read.timeline.lanes == ((0, "stages 0-1"), (1, "stages 2-3"))
    assert "backward" in render_run(read)
    for rank, lane in read.timeline.lanes:
        spans = sorted(
            (s for s in read.timeline.spans if (s.rank, s.lane) == (rank, lane)), key=lambda s: s.start_s
        )
        for before, after in itertools.pairwise(spans):
            assert after.start_s == pytest.approx(before.end_s, abs=1e-4)  # no gap, no overlap
        forward = [s.microbatch for s in spans if s.doing.value == "forward"]
        assert len(forward) == 40 * 4 * 2
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"forward 0", "backward 3", "update", "fill"} <= names


def test_with_sgd_four_stages_print_the_sequential_results(tmp_path: Path) -> None:
    """The weights differ only by rounding, so each loss and each item of the accuracy is the same."""
    sgd = ("--model", "vit-digits", "--data", "digits", "--lr", 0.1, "--batches", 40)
    whole = run(tmp_path, *sgd, "--schedule", "sequential")
    printed = run(tmp_path, *sgd, *FOUR_ON_TWO, "--microbatch-size", 16)
    assert list(losses(printed).values()) == pytest.approx(list(losses(whole).values()), rel=1e-5)
    assert len(losses(whole)) == 40
    assert losses(whole)[40] < 0.99 * losses(whole)[1]
    assert correct(printed) == correct(whole) > 40


def test_a_killed_worker_stops_all_and_its_checkpoint_resumes_on_two_stages(tmp_path: Path) -> None:
    kept = ("--checkpoint-dir", "kept", "--checkpoint-every", 20)
    options = (*DIGITS, *FOUR_ON_TWO, "--microbatch-size", 16, "--batches", 100000, *kept)
    started = subprocess.Popen(
        command(*options),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        told = ""
        for line in started.stdout:
            told += line
            if line.startswith("batch 23:"):
                break
        workers = psutil.Process(started.pid).children()
        (victim,) = [worker for worker in workers if worker.environ()["RANK"] == "1"]
        killed_at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        rest, err = started.communicate(timeout=DEADLINE_S)
        assert time.monotonic() - killed_at < 40  # the workers would wait 60 s for a silent one
    finally:
        for worker in psutil.Process(started.pid).children() if started.poll() is None else []:
            worker.kill()
        started.kill()
    assert started.returncode == 4
    (line,) = err.splitlines()
    assert line.startswith("train.py: rank 1 (stages 2-3, layers 9-13 14-16")
    assert "is gone" in line
    steps = [int(path.name.removeprefix("step-")) for path in (tmp_path / "kept").glob("step-*")]
    assert steps
    assert len(steps) <= 2
    last = max(steps)
    assert last >= 20
    resumed = (*DIGITS, "--stages", 2, "--workers", 2, "--partition", "1,7,8,16", "--schedule", "gpipe")
    printed = run(tmp_path, *resumed, "--batches", last + 2, *kept, "--resume")
    assert list(losses(printed)) == [last + 1, last + 2]
    before = losses(told + rest)
    assert last + 1 in before  # it was killed three batches after the checkpoint
    assert losses(printed)[last + 1] == pytest.approx(before[last + 1], rel=1e-5)
    if last + 2 in before:
        assert losses(printed)[last + 2] == pytest.approx(before[last + 2], rel=0.02)
    assert not list((tmp_path / "kept").glob(".*"))
    again = subprocess.run(
        command(*resumed, "--batches", last + 2, *kept, "--resume"),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert again.returncode == 2
    assert f"{last + 2} batches behind it" in again.stderr
    assert len(again.stderr.splitlines()) == 1


def test_workers_stop_when_train_py_is_killed(tmp_path: Path) -> None:
    started = subprocess.Popen(
        command(*DIGITS, *FOUR_ON_TWO, "--batches", 100000),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    workers: list[psutil.Process] = []
    try:
        next(iter(started.stdout))
        workers = psutil.Process(started.pid).children()
        started.kill()
        gone, alive = psutil.wait_procs(workers, timeout=DEADLINE_S)
        assert len(gone) == 2
        assert not alive
    finally:
        started.kill()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        started.communicate()


def test_interrupt_during_imports_is_status_130(tmp_path: Path) -> None:
    """The interpreter is interrupted as it reads the first module of the package."""
    (tmp_path / "pipeedge").mkdir()
    (tmp_path / "pipeedge" / "__init__.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    )
    (tmp_path / "train.py").write_bytes(TRAIN.read_bytes())
    ended = subprocess.run(
        [sys.executable, "-S", "train.py"], cwd=tmp_path, capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


@pytest.mark.parametrize("first_speaks", [True, False])
def test_launcher_prints_a_failure_once(first_speaks: bool, capsys: pytest.CaptureFixture[str]) -> None:
    cause = "rank 3 (stage (3)) failed: disk full"  # text that looks like a report is not taken for one
    line = f"rank 1 (stage 1, on pi1) failed: {cause}"
    output = main._Output()
    for _ in range(2):
        output.line(main.SecondHand(cause, line).to_text(), error=True)
    if first_speaks:
        output.line(f"train.py: {cause}\n", error=True)
    output.release()
    assert capsys.readouterr().err == f"train.py: {cause if first_speaks else line}\n"


def test_under_torchrun(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
            *(str(TRAIN), *DIGITS, "--schedule", "interleaved", "--partition", "1,4,5,8,9,12,13,16"),
            *("--batches", "2", "--microbatch-size", "16"),
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert list(losses(ended.stdout)) == [1, 2]
    assert "0, 2" in ended.stdout


# --- the request -------------------------------------------------------------------------------------


def parsed(*arguments: object, environ: Environment | None = None, cores: int = 2) -> TrainingRequest:
    return parse_train([str(a) for a in arguments], environ or Environment(), cores=cores).request


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch-size", 64, "--microbatch-size", 5), "64 is not divisible by --microbatch-size 5"),
        (("--schedule", "pipedream"), "invalid choice: 'pipedream'"),
        (("--partition", "1,10,12,44"), "layer 11 is covered by no stage"),
        (("--partition", "1,10,11,44", "--stages", 3), "--partition has 2 stages, but --stages is 3"),
        (("--partition", "1,10,11"), "3 numbers were given"),
        (("--partition", "half"), "neither auto nor a list"),
        (("--stages", 4, "--workers", 4, "--batch-size", 6, "--microbatch-size", 2), "but there are 3 for 4"),
        (("--schedule", "interleaved", "--stages", 2, "--workers", 2), "at least 2"),
        (("--schedule", "sequential", "--workers", 2, "--stages", 2), "runs on 1 worker"),
        (("--stages", 0), "--stages 0"),
        (("--workers", 0), "--workers 0"),
        (("--workers", 5), "each worker needs at least one stage"),
        (("--threads", 0), "--threads 0"),
        (("--threads", 10**8), "1 to 1024"),
        (("--stages", 10**7, "--workers", 2), "more than 100000 steps"),
        (("--batch-size", 10**7, "--microbatch-size", 1), "more than 100000 steps"),
        (("--model", ""), "it is empty"),
        (("--data", " "), "it is empty"),
        (("--checkpoint-dir", ""), "it is empty"),
        (("--lr", 0), "--lr 0"),
        (("--lr", "nan"), "--lr nan"),
        (("--lr", "1e30"), "--lr above 10^18: must be above 0 and at most 1,000,000"),
        (("--batches", 0), "--batches 0"),
        (("--batch-size", 0), "--batch-size 0"),
        (("--seed", -1), "--seed -1"),
        (("--resume",), "--resume needs the directory of the checkpoint: give --checkpoint-dir"),
        (("--checkpoint-every", 0), "--checkpoint-every 0"),
        (("--report", "report.txt"), "FILE.json"),
        (("--memory", 0), "--memory 0"),
        (("--memory", "1e300"), "--memory above 10^18: must be megabytes above 0 and up to 1,000,000,000"),
        (("--memory", 100, "--partition", "1,10,11,44"), "--memory has no effect with a given --partition"),
    ],
)
def test_bad_requests_are_rejected(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        parsed(*arguments)


def test_defaults_follow_from_given_options() -> None:
    alone, four = parsed("--schedule", "sequential"), parsed()
    assert (alone.pipeline.stages, alone.pipeline.workers, alone.pipeline.threads) == (1, 1, 2)
    assert alone.microbatch_size == alone.batch_size == 64
    assert (four.pipeline.stages, four.pipeline.workers, four.pipeline.threads) == (4, 2, 1)
    assert (four.microbatch_size, four.microbatches) == (4, 16)
    elastic = Environment(rank=1, world_size=4, local_rank=1, local_world_size=2, master_port=1234)
    under = parse_train([], elastic, cores=8)
    assert under.is_worker
    assert (under.request.pipeline.workers, under.request.pipeline.threads, under.place) == (4, 4, 1)
    with pytest.raises(RequestError, match="leave it out under torchrun"):
        parsed("--workers", 2, environ=elastic)


def test_a_mistake_gets_one_line_and_a_status(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    small = ("--model", "vit-digits", "--data", "digits", "--workers", 2)
    for arguments, words, status in (
        (("--microbatch-size", 5), "not divisible", 2),
        (("--stages", 45, "--workers", 2), "45 stages need at least 45 layers", 2),
        ((*small, "--checkpoint-dir", "file"), "cannot be made", 2),
        (("--schedule", "sequential", "--batch-size", 10**8), "its images alone take 18750000 MB", 2),
        ((*small, "--memory", 1), "fits into the 0 MB that a worker has", 3),
    ):
        ended = subprocess.run(
            command(*arguments),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        (line,) = ended.stderr.splitlines()
        assert ended.returncode == status
        assert line.startswith("train.py: ")
        assert words in line


# --- models and data ---------------------------------------------------------------------------------


def test_vgg19_has_the_seeds_layers_and_sizes() -> None:
    network = Vgg()
    assert network.n_layers == 44
    assert network.crossing(0, 4)[0].shape == (4, 3, 128, 128)
    assert network.crossing(10, 4)[0].shape == (4, 128, 32, 32)
    assert network.crossing(19, 4)[0].shape == (4, 256, 16, 16)
    assert network.crossing(28, 4)[0].shape == (4, 512, 8, 8)
    assert network.crossing(37, 4)[0].shape == (4, 512, 4, 4)
    assert network.crossing(44, 4)[0].shape == (4, 1000)


def test_models_that_cannot_be_trained_are_rejected() -> None:
    for name, pretrained in (("bert-base-uncased", False), ("vgg19", True), ("no-such-model", False)):
        with pytest.raises(ModelError):
            find_network(name, seed=0, pretrained=pretrained)


def test_a_folder_of_classes_gives_labelled_images(tmp_path: Path) -> None:
    for number, name in enumerate(("cat", "dog", "eel")):
        (tmp_path / name).mkdir()
        for place in range(number + 2):
            Image.new("RGB", (20, 30), (80 * number, 10 * place, 0)).save(tmp_path / name / f"{place}.png")
    network = Vgg(widths=(4, None), side=8, classes=3)
    samples = open_samples(str(tmp_path), network, batch_size=9, seed=1)
    assert samples.images(0).shape == (9, 3, 8, 8)
    assert sorted(samples.labels(0).tolist()) == [0, 0, 1, 1, 1, 2, 2, 2, 2]  # each item once
    red = (samples.images(1)[:, 0, 0, 0] + 1) / 2 * 255 / 80
    assert red.round().long().tolist() == samples.labels(1).tolist()
    assert samples.labels(0).tolist() != samples.labels(1).tolist()
    long = open_samples(str(tmp_path), network, batch_size=30, seed=1)
    assert long.labels(0).tolist()[:18] == [*samples.labels(0).tolist(), *samples.labels(1).tolist()]
    small = open_samples(str(tmp_path), network, batch_size=9, seed=1, max_image_pixels=599)
    with pytest.raises(InputError, match=r"more than 599, .* --max-image-pixels allows more"):
        small.images(0)
    with pytest.raises(InputError, match="has only 2"):
        open_samples(str(tmp_path), Vgg(widths=(4, None), side=8, classes=2), batch_size=1, seed=0)
    with pytest.raises(InputError, match="no such folder"):
        open_samples(str(tmp_path / "cow"), network, batch_size=1, seed=0)
    with pytest.raises(InputError, match="no folders with images"):
        open_samples(str(tmp_path / "cat"), network, batch_size=1, seed=0)
    with pytest.raises(InputError, match="--model vit-digits"):
        open_samples("digits", network, batch_size=1, seed=0)
