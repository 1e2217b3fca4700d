"""Programs whose standard streams are closed, or read by nobody any longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from places import ROOT, RUNTIME
from ports import free_port
from processes import environment
from saved_reports import simulated_body
from waiting import LIMIT_S

from pipeedge.base.interrupt import INTERRUPTED
from pipeedge.cli.commands import COMMANDS
from pipeedge.plan.sched_pipeline import find_executable


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is not here")
def test_a_run_needs_no_standard_streams(tmp_path: Path) -> None:
    """Rank 0 writes its results although they are full disks; rank 1 starts with all three closed."""
    script = """
        "$@" --output rows.csv 0 2 >/dev/full 2>/dev/full & first=$!
        "$@" 1 2 <&- >&- 2>&- & second=$!
        wait $first; echo $?; wait $second; echo $?
    """
    run = [sys.executable, str(RUNTIME), "--port", str(free_port()), "-m", "vit-digits", "-b", "40"]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *run],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.stdout, done.stderr) == ("0\n0\n", "")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 41


def test_run_survives_a_reader_that_goes_away(tmp_path: Path, quick_python: Path) -> None:
    """With ``| head``, the rows are written, and the exit status is that of the run."""
    script = '"$@" | true; exit "${PIPESTATUS[0]}"'
    run = [quick_python, RUNTIME, "0", "1", "-m", "vit-digits", "-b", "40", "--output", "rows.csv"]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *run, "--port", str(free_port())],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 41


def printed_rows(script: str, folder: Path, python: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with a run of one rank as its arguments."""
    run = [python, RUNTIME, "0", "1", "-m", "vit-digits", "--port", str(free_port()), *options]
    return subprocess.run(
        ["bash", "-c", script, "bash", *run],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_answers_of_standard_input_are_all_that_is_printed(tmp_path: Path, quick_python: Path) -> None:
    """An image comes in through a pipe, and its classes go out through another."""
    Image.new("L", (8, 8), 99).save(tmp_path / "a.png")
    done = printed_rows('"$@" --input - < a.png', tmp_path, quick_python)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["item"], row["source"], len(row["top"])) == (0, "standard input", 5)
    assert "throughput" in done.stderr
    quiet = printed_rows('"$@" --quiet --output - -b 20', tmp_path, quick_python)
    assert [json.loads(line)["item"] for line in quiet.stdout.splitlines()] == list(range(20))
    assert quiet.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_run_that_prints_its_rows_ends_with_their_reader(tmp_path: Path, quick_python: Path) -> None:
    script = '"$@" | head -n 1; exit "${PIPESTATUS[0]}"'
    done = printed_rows(script, tmp_path, quick_python, "--output", "-", "-b", "100000", "--quiet")
    assert (done.returncode, done.stderr) == (INTERRUPTED, "")
    assert json.loads(done.stdout)["item"] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is not here")
def test_rows_that_cannot_be_printed_fail_the_run(tmp_path: Path, quick_python: Path) -> None:
    done = printed_rows('"$@" --output - -b 9 >/dev/full', tmp_path, quick_python)
    line = "runtime.py: standard output cannot be written: no space left on device\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_help_survives_a_reader_that_has_gone(tmp_path: Path, quick_python: Path) -> None:
    programs = {command.name: [quick_python, "-m", "pipeedge", command.name] for command in COMMANDS}
    programs["schedule"][0] = sys.executable  # it looks for sched-pipeline beside it
    programs["sched-pipeline"] = [find_executable()]
    programs["pipeedge"] = [sys.executable, "-m", "pipeedge"]
    unread, printed = os.pipe()
    os.close(unread)
    started = {}
    for name, command in programs.items():
        with (tmp_path / name).open("wb") as errors:
            started[name] = subprocess.Popen(
                [*command, "--help"],
                stdout=printed,
                stderr=errors,
                env={**environment(), "PYTHONPATH": str(ROOT)},
            )
    os.close(printed)
    ended = {name: (process.wait(60), (tmp_path / name).read_text()) for name, process in started.items()}
    assert ended == dict.fromkeys(programs, (0, ""))


def test_report_survives_a_reader_that_goes_away(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(simulated_body([0.1, 0.2])))
    command = [sys.executable, "-m", "pipeedge.report", "run.json"]
    done = subprocess.run(
        ["bash", "-c", '"$@" | true; exit "${PIPESTATUS[0]}"', "bash", *command],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run.html").exists()
