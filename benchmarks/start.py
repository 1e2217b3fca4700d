#!/usr/bin/env python3
"""Time how soon a program answers, and how soon a run begins; part of ``make bench``.

    answer     from the start of the process to its end: --help, --dry-run
    run        from the start of the data rank's process to the first microbatch: vit-digits on two ranks

Importing torch alone is timed too, because it takes most of the start of a run. All are repeated in turn;
medians are reported. The seconds need two idle cores. The processor seconds, of all ranks together until they
end, depend less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from local_ranks import wait_for
from rich import box
from rich.console import Console
from rich.table import Table

from pipeedge.launch.main import free_port

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
LIMIT_S = 120
MODEL = ("-m", "vit-digits")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass
class Start:
    """One row of the table: what is timed, the target in seconds, and the measurements."""

    name: str
    measure: Callable[[], float]
    target_s: float | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor seconds of all its processes."""

    def run(self) -> None:
        """Measure once more."""
        before = _children_cpu_s()
        self.seconds.append(self.measure())
        self.cpu_seconds.append(_children_cpu_s() - before)

    @property
    def median_s(self) -> float:
        """Median of the measurements."""
        return statistics.median(self.seconds)


def _children_cpu_s() -> float:
    """Return the processor seconds of all processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def answer(*words: str) -> Callable[[], float]:
    """Return a function that times a command of the interpreter from its start to its end."""

    def measure() -> float:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=ENVIRONMENT,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        return time.perf_counter() - began

    return measure


def first_microbatch() -> float:
    """Run a pipeline of two ranks; return the seconds until the first microbatch, from its report."""
    port = str(free_port("127.0.0.1"))
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        options = (*MODEL, "--port", port, "--report", str(report), "--quiet")
        ranks = [
            subprocess.Popen(
                [sys.executable, "runtime.py", str(rank), str(RANKS), *options], cwd=ROOT, env=ENVIRONMENT
            )
            for rank in range(RANKS)
        ]
        wait_for(ranks)
        return float(json.loads(report.read_text(encoding="utf-8"))["startup_s"])


def main() -> None:
    """Print the table; the status says whether all targets are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--repetitions", type=int, default=7, metavar="N", help="runs of each (7)")
    arguments = parser.parse_args()
    rows = [
        Start("runtime.py --help", answer("runtime.py", "--help"), 0.4),
        Start("--dry-run, vit-digits", answer("runtime.py", "0", "2", *MODEL, "--dry-run"), 0.4),
        Start("import torch", answer("-c", "import torch")),
        Start("vit-digits, 2 ranks, first microbatch", first_microbatch, 1.1),
    ]
    console = Console()
    console.print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", highlight=False)
    for row in rows:
        row.measure()  # reads the files into memory
    for _ in range(arguments.repetitions):
        for row in rows:
            row.run()
    table = Table(box=box.SIMPLE)
    for column in ("", "median s", "fastest", "slowest", "processor s", "target"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        cpu_s = statistics.median(row.cpu_seconds)
        figures = (row.median_s, min(row.seconds), max(row.seconds), cpu_s)
        target = "" if row.target_s is None else f"<= {row.target_s}"
        table.add_row(row.name, *(f"{figure:.2f}" for figure in figures), target)
    console.print(table)
    sys.exit(0 if all(row.target_s is None or row.median_s <= row.target_s for row in rows) else 1)


if __name__ == "__main__":
    main()
