"""profiler.py as a program: interrupted, or asked for what it cannot do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from processes import Programs, environment, run_program
from profiles import content, write_results
from waiting import LIMIT_S

from pipeedge.base.errors import EXIT_REQUEST


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("worked_s", [0.1, 0.4, 0.8, 1.6])
def test_ctrl_c_ends_quietly_at_any_moment(worked_s: float, tmp_path: Path, logs: Path) -> None:
    """While modules are imported, and while it measures."""
    write_results(tmp_path / "profiler_results.yml", threads=1)
    before = content(tmp_path)
    with Programs(tmp_path, logs=logs) as programs:
        # Far more passes than there is time for.
        programs.launch(0, "profiler.py", "-m", "vit-digits", "-l", 2, "-i", 100_000_000)
        programs.until(lambda: processor_seconds(programs.pid(0)) > worked_s, "it works")
        programs.signal(0, signal.SIGINT)
        ended = programs.wait()[0]
    assert (ended.status, ended.out, ended.err) == (130, "", "")
    assert content(tmp_path) == before


def test_the_scripts_report_a_mistake_at_once(tmp_path: Path, logs: Path) -> None:
    missing = "profiler_results.yml: no such file"
    for script, arguments, told in (
        ("profiler.py", ("-i", 0), "-i/--iterations 0: must be at least 1"),
        ("profiler_results_to_models.py", (), missing),
        ("profiler_results_to_device_types.py", ("x",), missing),
    ):
        ended = run_program(tmp_path, logs, script, *arguments)
        assert (ended.status, ended.out) == (EXIT_REQUEST, "")
        assert ended.err == f"{script}: {told}\n"
    assert not list(tmp_path.iterdir())


def test_a_host_that_does_not_know_its_own_name_is_no_matter(tmp_path: Path) -> None:
    """The links that are measured are on the loopback, and torch would warn of each."""
    alone = ["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /etc/hosts && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root can hide /etc/hosts")
    profiler = [sys.executable, ROOT / "profiler.py", "-m", "vit-digits", "-i", "1"]
    done = subprocess.run(
        [*alone, *map(str, profiler)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if not line.startswith("profiler.py: ")] == []
