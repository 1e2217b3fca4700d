#!/usr/bin/env python3
"""Measure the overhead of observing a run; part of ``make bench``.

    rows        time that a lane takes for one microbatch, in this process
    display     processor time of the live table's thread, in this process
    pairs       runtime.py, 2 ranks with 1 thread each, the same run in turn: --quiet, with the table in a
                terminal, with --trace, and with --metrics-dir; medians of the ratios to --quiet, in items
                per second and in processor time of both ranks

Targets: below 1 % for the table, and below 2 % for the trace. Needs two idle cores: the spread of the pairs
shows how much the machine varies. Processor time varies much less, and the first two figures hardly at all.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from local_ranks import wait_for
from rich.console import Console
from throughput import MODEL, PARTITION, RANKS, ROOT, prepare

from pipeedge.launch.main import free_port
from pipeedge.observe.lanes import STAGE, Lane
from pipeedge.observe.live import Display, Progress
from pipeedge.observe.metrics import StageWork
from pipeedge.observe.timeline import LaneId, ThreadState


def row_cost_s(count: int = 100_000) -> float:
    """Return the seconds that a lane takes for a microbatch, including clock readings."""
    lane = Lane(LaneId.stage(0), STAGE, time.perf_counter)
    began = time.perf_counter()
    lane.begin()
    for number in range(count):
        for phase in (ThreadState.DECODE, ThreadState.COMPUTE, ThreadState.ENCODE, ThreadState.WAIT_LINK):
            lane.enter(phase)
        lane.finish(number, 8, 1000)
    return (time.perf_counter() - began) / count


def display_cost(seconds: float = 10.0) -> float:
    """Return the fraction of a processor that the live table of four stages takes."""
    master, slave = pty.openpty()
    threading.Thread(target=_swallow, args=(master,), daemon=True).start()
    with os.fdopen(slave, "w") as terminal:
        console = Console(file=terminal, force_terminal=True, width=120)
        progress = Progress(100_000, range(4), time.monotonic())
        with Display(
            progress, lambda: console, lambda: int(1000 * time.monotonic()) % 100_000, time.monotonic
        ) as shown:
            before = _cpu_s()
            for beat in range(1, int(seconds) + 1):
                shown.heard({rank: StageWork(beat * 0.5, beat * 0.3, beat * 0.2, 8) for rank in range(4)})
                time.sleep(1)
            return (_cpu_s() - before) / seconds


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _swallow(master: int) -> None:
    try:
        while os.read(master, 1 << 16):
            pass
    except OSError:
        pass


def run_pipeline(
    weights: Path, images: Path, directory: Path, options: list[str], *, terminal: bool
) -> tuple[float, float]:
    """Return the items per second of one run, and the processor seconds of its ranks."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    port = free_port("127.0.0.1")
    report = directory / "report.json"
    command = ["-m", MODEL, "-M", str(weights), "-pt", PARTITION, "--input", str(images)]
    command += ["--port", str(port), "--report", str(report), *options]
    master, slave = pty.openpty()
    threading.Thread(target=_swallow, args=(master,), daemon=True).start()
    ranks = [
        subprocess.Popen(
            [sys.executable, "runtime.py", str(rank), str(RANKS), *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"},
            stdout=slave if terminal and rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    os.close(slave)
    wait_for(ranks)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return float(json.loads(report.read_text(encoding="utf-8"))["throughput_items_per_s"]), spent


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-b", "--items", type=int, default=32, metavar="N", help="images in a run (32)")
    parser.add_argument("-n", "--repetitions", type=int, default=5, metavar="N", help="runs of each (5)")
    parser.add_argument("-o", "--directory", type=Path, default=ROOT / "bench-out", metavar="DIR")
    args = parser.parse_args()
    console = Console()
    directory = args.directory.resolve()
    weights, images = prepare(directory, args.items)
    metrics = directory / "metrics"
    console.print(f"a lane: {1e6 * row_cost_s():.1f} us per microbatch", highlight=False)
    console.print(f"the live table: {display_cost():.2%} of a processor", highlight=False)

    variants = {
        "quiet": (["--quiet"], False),
        "table": ([], True),
        "trace": (["--quiet", "--trace", str(directory / "trace.json")], False),
        "metrics": (["--quiet", "--metrics-dir", str(metrics)], False),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(args.repetitions):
        for name, (options, terminal) in variants.items():
            shutil.rmtree(metrics, ignore_errors=True)
            found[name].append(run_pipeline(weights, images, directory, options, terminal=terminal))
    for name, runs in found.items():
        for what, which in (("items/s", 0), ("processor s", 1)):
            ratios = [run[which] / base[which] for run, base in zip(runs, found["quiet"], strict=True)]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            median = statistics.median(run[which] for run in runs)
            console.print(
                f"{name:8} {median:8.3f} {what:12} {statistics.median(ratios):.3f} of quiet ({spread})",
                highlight=False,
            )


if __name__ == "__main__":
    main()
