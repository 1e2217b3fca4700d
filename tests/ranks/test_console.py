"""Standard output: how wide it is, and what happens when nobody reads it any longer."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT, RUNTIME
from processes import environment, free_port
from saved_reports import simulated_body

from pipeedge.base.console import StandardOutput
from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.streams import print_notice, print_result, say


@pytest.mark.parametrize(("columns", "width"), [(None, 120), ("75", 75), ("200", 200)])
def test_output_to_a_file_is_wide_enough_for_figures(
    monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "__stdout__", None)  # the terminal of whoever runs the tests
    assert StandardOutput().width == width


def test_file_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    StandardOutput().print("report  a\x1b[2J.html\nand more", highlight=False, markup=False)
    say("runtime.py", "a\x1b[2J.csv: there already")
    out, err = capsys.readouterr()
    assert out == "report  a\\x1b[2J.html\nand more\n"
    assert err == "runtime.py: a\\x1b[2J.csv: there already\n"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")


def test_unprintable_notice_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (FullDisk(), closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        say("runtime.py", "a notice")


def test_only_unprinted_results_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    print_notice("1 of 2 items")
    StandardOutput().print("1 of 2 items")
    for show in (print_result, StandardOutput(result=True).print):
        with pytest.raises(PipeEdgeError, match="cannot be written: no space left on device"):
            show("a schedule")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is not here")
def test_a_run_needs_no_standard_streams(tmp_path: Path) -> None:
    """Rank 0 finds full disks behind them, and writes the results; rank 1 starts with all three closed."""
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


def test_run_survives_a_reader_that_goes_away(tmp_path: Path) -> None:
    """As ``| head`` does: the rows are written, and the exit status is that of the run."""
    script = '"$@" | true; exit "${PIPESTATUS[0]}"'
    run = [sys.executable, str(RUNTIME), "0", "1", "-m", "vit-digits", "-b", "40", "--output", "rows.csv"]
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
