#!/usr/bin/env python3
"""Compare pipelined training with one process: ``make bench-training``.

    pipelines    train.py, vgg19 for 128x128 images, 4 batches of 64, microbatches of 4, sgd; 2 workers with
                 one thread each, bound to one core each; 4 and 8 stages, --partition auto
    sequential   train.py --schedule sequential, whole batches; on one core, and on all
    plain torch  the same network as one nn.Sequential, whole batches, all cores; without this package

Everything runs in separate processes, one after the other; plain torch runs first and last, and the faster of
the two counts. Times of a batch are medians over the run without the first batch; bubbles and memory come
from the reports. Peak memory is shown in total, and without what a worker has before its first batch
(libraries, weights), which does not depend on the schedule. Needs two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 2
TARGET = 1.15
LESS_MEMORY = 0.30
LIMIT_S = 600

PLAIN = """
import resource, sys, time
import torch
from torch import nn

torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
layers, channels = [], 3
for width in (64, 64, 0, 128, 128, 0, *([256] * 4), 0, *([512] * 4), 0, *([512] * 4), 0):
    if width:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
        channels = width
    else:
        layers += [nn.MaxPool2d(2)]
layers += [nn.Flatten(), nn.Linear(8192, 4096), nn.ReLU(inplace=True), nn.Dropout()]
layers += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
times = []
for batch in range(int(sys.argv[2])):
    images, labels = torch.randn(64, 3, 128, 128), torch.randint(1000, (64,))
    began = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, *times)
"""


@dataclass(frozen=True)
class Result:
    """Result of one run."""

    batch_s: float
    peaks_mb: tuple[float, ...]
    """Peak memory of each worker."""
    before_mb: tuple[float, ...] = ()
    """Memory of each worker before its first batch."""
    bubble: float | None = None
    bubble_in_theory: float | None = None

    @property
    def batches_mb(self) -> tuple[float, ...]:
        """Return the memory that the batches added to each worker."""
        return tuple(peak - before for peak, before in zip(self.peaks_mb, self.before_mb, strict=True))


def plain_torch(threads: int, batches: int) -> Result:
    """Train in one process without this package."""
    ended = subprocess.run(
        [sys.executable, "-c", PLAIN, str(threads), str(batches)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
    )
    peak, *times = map(float, ended.stdout.split())
    return Result(after_the_first(times), (peak,))


def after_the_first(times: list[float]) -> float:
    """Return the median batch time of a run, leaving out the first batch, which allocates the memory."""
    return statistics.median(times[1:] or times)


def train(directory: Path, batches: int, *options: object) -> Result:
    """Run ``train.py`` once."""
    report = directory / "report.json"
    command = [sys.executable, "train.py", "--batches", batches, "--report", report, *options]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    training = json.loads(report.read_text(encoding="utf-8"))["training"]
    return Result(
        after_the_first(training["batch_s"]),
        tuple(training["rss_peak_mb"]),
        tuple(training["rss_before_mb"]),
        training["bubble"],
        training["bubble_in_theory"],
    )


def pipelines(quick: bool) -> list[tuple[str, int]]:
    """Schedule and stages of each run."""
    if quick:
        return [("gpipe", 4), ("1f1b", 4)]
    of_four = [(name, 4) for name in ("gpipe", "staggered", "1f1b", "interleaved", "zero-bubble")]
    return [*of_four, ("gpipe", 8), ("staggered", 8)]


def table_of(
    rows: list[tuple[str, str, Result]], plain: Result, one_core: Result | None, all_cores: Result
) -> Table:
    """Return the table, with the columns of the original and more."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    columns = ("schedule", "stages", "a batch", "to plain", "to 1 core", "to all", "bubble", "in theory")
    for column in (*columns, "peak, MB", "added by batches"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name, stages, result in rows:
        table.add_row(
            name,
            stages,
            f"{result.batch_s:.2f} s",
            f"{plain.batch_s / result.batch_s:.2f}x",
            f"{one_core.batch_s / result.batch_s:.2f}x" if one_core else "",
            f"{all_cores.batch_s / result.batch_s:.2f}x",
            "" if result.bubble is None else f"{result.bubble:.1%}",
            "" if result.bubble_in_theory is None else f"{result.bubble_in_theory:.1%}",
            " ".join(f"{peak:.0f}" for peak in result.peaks_mb),
            " ".join(f"{added:.0f}" for added in result.batches_mb) if result.before_mb else "",
        )
    return table


def verdicts(found: dict[tuple[str, int], Result], plain: Result, together: Result) -> list[tuple[str, bool]]:
    """Return each target as a line of text, with whether it was met."""
    lines = []
    slowest = max(found, key=lambda key: found[key].batch_s)
    for name, other in (("plain torch", plain), (f"sequential on {WORKERS} cores", together)):
        ratio = found[slowest].batch_s / other.batch_s
        lines.append(
            (
                f"slowest pipeline ({slowest[0]}, {slowest[1]} stages) takes {ratio:.2f} times as long as "
                f"{name}; target {TARGET}",
                ratio <= TARGET,
            )
        )
    for stages in (4, 8):
        if ("staggered", stages) in found:
            ratio = found["staggered", stages].batch_s / found["gpipe", stages].batch_s
            lines.append((f"staggered, {stages} stages, {ratio:.3f}x gpipe; target 1", ratio <= 1.0))
    gpipe, other = found["gpipe", 4], found["1f1b", 4]
    each = [1 - b / a for a, b in zip(gpipe.peaks_mb, other.peaks_mb, strict=True)]
    batches = [1 - b / a for a, b in zip(gpipe.batches_mb, other.batches_mb, strict=True)]
    lines.append(
        (
            f"1f1b needs {percents(each)} less memory than gpipe on each worker; of what batches add "
            f"{percents(batches)}; target {LESS_MEMORY:.0%}",
            min(each) >= LESS_MEMORY,
        )
    )
    return lines


def percents(parts: list[float]) -> str:
    """Format fractions as percentages, for example ``46%, 31%``."""
    return ", ".join(f"{part:.0%}" for part in parts)


def main() -> None:
    """Print the table and the verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-n", "--batches", type=int, default=4, metavar="N", help="batches of 64 images in a run (4)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="only check that it works: two schedules, two batches"
    )
    args = parser.parse_args()
    batches = 2 if args.quick else args.batches
    cores = os.cpu_count() or 1
    console = Console(width=130)
    console.print(f"vgg19, {batches} batches of 64, microbatches of 4, {WORKERS} workers", highlight=False)
    if cores < WORKERS:
        console.print(f"{WORKERS} workers on one core: the ratios say nothing here")
    load = os.getloadavg()[0]
    if load > 1:
        console.print(f"other work is running (load {load:.1f}): the ratios say little", highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        plain = plain_torch(WORKERS, batches)
        sequential = ("--schedule", "sequential")
        alone = None if args.quick else train(directory, batches, *sequential, "--threads", 1)
        together = train(directory, batches, *sequential, "--threads", WORKERS)
        found = {
            (name, stages): train(
                directory,
                batches,
                "--schedule",
                name,
                "--stages",
                stages,
                "--workers",
                WORKERS,
                "--threads",
                1,
            )
            for name, stages in pipelines(args.quick)
        }
        plain = min(plain, plain_torch(WORKERS, batches), key=lambda result: result.batch_s)
    rows = [(f"plain torch, {WORKERS} cores", "", plain)]
    rows += [("sequential, 1 core", "1", alone)] if alone else []
    rows += [(f"sequential, {WORKERS} cores", "1", together)]
    rows += [(name, str(stages), result) for (name, stages), result in found.items()]
    console.print(table_of(rows, plain, alone, together))
    for line, met in verdicts(found, plain, together):
        console.print(f"{line}: {'met' if met else 'missed'}", highlight=False)


if __name__ == "__main__":
    main()
