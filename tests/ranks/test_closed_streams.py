"""Programs whose standard streams are closed, or read by nobody any longer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT, RUNTIME
from ports import free_port
from processes import environment
from saved_reports import simulated_body


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
        timeout=60,
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
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 41


def test_report_survives_a_reader_that_goes_away(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(simulated_body([0.1, 0.2])))
    command = [sys.executable, "-m", "pipeedge.report", "run.json"]
    done = subprocess.run(
        ["bash", "-c", '"$@" | true; exit "${PIPESTATUS[0]}"', "bash", *command],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run.html").exists()
