"""Test ``train.py`` as a program: real workers, their output and files, and their end."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from places import ROOT
from ports import free_port
from processes import Ended, Programs, environment, torchrun
from waiting import LIMIT_S

from pipeedge.report import read_run, render_run

DIGITS = ("--model", "vit-digits", "--data", "digits", "--optimizer", "adamw", "--lr", "0.002")
FOUR_STAGES = ("--stages", 4, "--partition", "1,3,4,8,9,13,14,16")


def work(directory: Path, workers: int, *arguments: object) -> dict[int, Ended]:
    """Train with workers as torchrun starts them, but forked: only the launcher's tests pay for imports."""
    port = free_port()
    with Programs(directory) as programs:
        for rank in range(workers):
            local = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": workers}
            place = {**local, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = {name: str(value) for name, value in place.items()}
            programs.launch(rank, "train.py", "--threads", 1, *arguments, env=env)
        return programs.wait(within=LIMIT_S)


def train(directory: Path, workers: int, *arguments: object) -> str:
    """Run a training that must succeed, and return its output."""
    ended = work(directory, workers, *arguments)
    assert [(end.status, end.err) for end in ended.values()] == [(0, "")] * workers
    return "".join(end.out for end in ended.values())


def losses(printed: str) -> dict[int, float]:
    """Return the losses by batch, from 1."""
    found = re.findall(r"^batch (\d+) of \d+: loss (\S+),", printed, re.MULTILINE)
    return {int(number): float(loss) for number, loss in found}


def correct(printed: str) -> int:
    (items,) = re.findall(r"^held-out accuracy \S+ \((\d+)/360\)", printed, re.MULTILINE)
    return int(items)


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of 24 batches of the unpipelined model."""
    return train(
        tmp_path_factory.mktemp("sequential"), 1, *DIGITS, "--schedule", "sequential", "--batches", 24
    )


def test_four_stages_reach_the_accuracy_of_the_sequential_run(sequential: str, tmp_path: Path) -> None:
    options = (*FOUR_STAGES, "--schedule", "zero-bubble", "--batches", 24, "--microbatch-size", 16)
    printed = train(tmp_path, 2, *DIGITS, *options, "--report", "report.json", "--trace", "trace.json")
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
        assert len(forward) == 24 * 4 * 2
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"forward 0", "backward 3", "update", "fill"} <= names


def test_with_sgd_four_stages_print_the_sequential_results(tmp_path: Path) -> None:
    """The weights differ only by rounding, so each loss and each item of the accuracy is the same."""
    sgd = ("--model", "vit-digits", "--data", "digits", "--lr", 0.1, "--batches", 24)
    whole = train(tmp_path, 1, *sgd, "--schedule", "sequential")
    printed = train(tmp_path, 2, *sgd, *FOUR_STAGES, "--microbatch-size", 16)
    assert list(losses(printed).values()) == pytest.approx(list(losses(whole).values()), rel=1e-5)
    assert len(losses(whole)) == 24
    assert losses(whole)[24] < 0.99 * losses(whole)[1]
    assert correct(printed) == correct(whole) > 40


def test_a_killed_worker_stops_all_and_its_checkpoint_resumes_on_two_stages(tmp_path: Path) -> None:
    kept = ("--checkpoint-dir", "kept", "--checkpoint-every", 5)
    options = (*DIGITS, *FOUR_STAGES, "--workers", 2, "--microbatch-size", 16, "--batches", 100000, *kept)
    with Programs(tmp_path) as programs:
        programs.launch(0, "train.py", *options)
        programs.until(lambda: "\nbatch 8 of" in programs.text(0, "out"), "three batches follow a checkpoint")
        workers = psutil.Process(programs.pid(0)).children()
        (victim,) = [worker for worker in workers if worker.environ()["RANK"] == "1"]
        os.kill(victim.pid, signal.SIGKILL)
        ended = programs.wait(within=40)[0]  # the workers would wait 60 s for a silent one
    assert ended.status == 4
    assert ended.line.startswith("train.py: rank 1 (stages 2-3, layers 9-13 14-16")
    assert "is gone" in ended.line
    steps = [int(path.name.removeprefix("step-")) for path in (tmp_path / "kept").glob("step-*")]
    assert steps
    assert len(steps) <= 2
    before = losses(ended.out)
    # The newest is passed over if rank 1 was killed right after it.
    last = max(step for step in steps if step + 1 in before)
    assert last >= 5
    for step in filter(last.__lt__, steps):
        shutil.rmtree(tmp_path / "kept" / f"step-{step:08d}")
    resumed = (*DIGITS, "--stages", 2, "--partition", "1,7,8,16", "--schedule", "gpipe")
    printed = train(tmp_path, 2, *resumed, "--batches", last + 2, *kept, "--resume")
    assert list(losses(printed)) == [last + 1, last + 2]
    assert losses(printed)[last + 1] == pytest.approx(before[last + 1], rel=1e-5)
    if last + 2 in before:
        assert losses(printed)[last + 2] == pytest.approx(before[last + 2], rel=0.02)
    assert not list((tmp_path / "kept").glob(".*"))
    again = work(tmp_path, 2, *resumed, "--batches", last + 2, *kept, "--resume")[0]
    assert again.status == 2
    assert f"is at batch {last + 2} already" in again.line


def test_workers_stop_when_train_py_is_killed(tmp_path: Path) -> None:
    with Programs(tmp_path) as programs:
        programs.launch(0, "train.py", *DIGITS, *FOUR_STAGES, "--workers", 2, "--batches", 100000)
        launcher = psutil.Process(programs.pid(0))
        programs.until(lambda: len(launcher.children()) == 2, "both workers are started")
        workers = launcher.children()
        os.kill(programs.pid(0), signal.SIGKILL)
        gone, alive = psutil.wait_procs(workers, timeout=LIMIT_S)
        assert len(gone) == 2
        assert not alive


def test_under_torchrun(tmp_path: Path, quick_python: Path) -> None:
    cut = ("--schedule", "interleaved", "--partition", "1,4,5,8,9,12,13,16")
    printed = torchrun(
        tmp_path, quick_python, "train.py", *DIGITS, *cut, "--batches", 2, "--microbatch-size", 16
    )
    assert list(losses(printed)) == [1, 2]
    assert "0, 2" in printed


@pytest.mark.parametrize(
    ("workers", "arguments", "words", "status"),
    [
        (1, ("--microbatch-size", 5), "not divisible", 2),
        (2, ("--stages", 45), "45 stages need at least 45 layers", 2),
        (
            2,
            ("--model", "vit-digits", "--data", "digits", "--checkpoint-dir", "file"),
            "cannot be created",
            2,
        ),
        (1, ("--schedule", "sequential", "--batch-size", 10**8), "its images alone take 18750000 MB", 2),
    ],
)
def test_a_mistake_gets_one_line_and_a_status(
    workers: int, arguments: tuple[object, ...], words: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    first = work(tmp_path, workers, *arguments)[0]
    assert first.status == status
    assert first.line.startswith("train.py: ")
    assert words in first.line


def test_the_launcher_prints_what_both_workers_say_once(tmp_path: Path, quick_python: Path) -> None:
    arguments = ("--model", "vit-digits", "--data", "digits", "--workers", "2", "--memory", "1")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ended = subprocess.run(
        [quick_python, ROOT / "train.py", *arguments],
        cwd=tmp_path,
        env={**environment(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 3
    (line,) = ended.stderr.splitlines()
    assert line.startswith("train.py: ")
    assert "fits into the 0 MB that a worker has" in line
