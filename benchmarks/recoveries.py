"""What the benchmark of failures runs, the figures of a recovery, and their table."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from disturbing import KINDS, Cables, Progress, Ranks
from rich import box
from rich.console import Console
from rich.table import Table

from pipeedge.models import find_model
from pipeedge.models.weights.locating import hub_tensors
from pipeedge.models.weights.random_weights import RandomWeights
from pipeedge.models.weights.writing import write_converted

__all__ = [
    "CONTINUE",
    "LIMIT_S",
    "OWN",
    "SHAPES",
    "STOP",
    "WORLD",
    "Load",
    "Recovery",
    "base_load",
    "digits_load",
    "made",
    "print_recoveries",
    "run_alone",
]

LIMIT_S = 300.0
"""Longest time in seconds for a result or an end that is due."""
ALONE_LIMIT_S = 1800.0
"""Longest time in seconds for a run without disturbances."""
WORLD = 4
CONTINUE = ("-c", "tcp", "--on-failure", "continue")
STOP = ("-c", "tcp", "--on-failure", "stop")
SHAPES = (
    ("-pt", "1,4,5,8,9,12,13,16"),
    ("-pt", "1,6,7,12,13,16"),
    ("-pt", "1,8,9,16", "-r", "1,2"),
)
"""Partitions: every rank has a stage; rank 3 is a spare; rank 0 has no stage, and rank 3 is a spare."""
BASE_ITEMS = 60


def noise(path: Path, items: int, shape: tuple[int, ...]) -> Path:
    """Write different pictures, so that a result shows which one it is for."""
    np.savez(path, pixel_values=np.random.default_rng(0).standard_normal((items, *shape), np.float32))
    return path


def made(directory: Path) -> Path:
    """Create a directory and return it."""
    directory.mkdir(parents=True)
    return directory


@dataclass
class Recovery:
    """One recovery, in seconds."""

    kind: str
    decide_s: float
    """Seconds from the disturbance until the new plan is known."""
    load_s: float
    fill_s: float
    repeated: int
    stages: int

    @property
    def total_s(self) -> float:
        """Time from the disturbance to the first result of the new epoch."""
        return self.decide_s + self.load_s + self.fill_s


@dataclass(frozen=True)
class Load:
    """What the ranks of a benchmark run."""

    options: tuple[str, ...]
    directory: Path
    net: Cables | None
    size: int = 0
    """Bytes of the unfinished output at its end."""
    microbatches: int = 1
    results: bytes = b""
    """Output file of the undisturbed run."""
    elapsed_s: float = 0.0
    """Seconds that the undisturbed run took."""

    @property
    def record(self) -> float:
        """Bytes of the unfinished output for a microbatch."""
        return self.size / self.microbatches


OWN = ("--output", "out.npz", "--report", "report.json", "--quiet")
"""Options of rank 0."""


def run_alone(load: Load, name: str, *options: str, world: int = WORLD) -> Load:
    """Run without disturbances; return what it takes and gives."""
    place = made(load.directory / name)
    progress = Progress(place / "out.npz")
    with Ranks(world, (*load.options, *options), OWN, place, load.net) as ranks:
        ranks.watch(progress, sys.maxsize, ALONE_LIMIT_S)
        if ranks.status(0, LIMIT_S) != 0:
            sys.exit(f"failover: the undisturbed run failed: {ranks.said()}")
    body = json.loads((place / "report.json").read_text())
    return dataclasses.replace(
        load,
        size=progress.size,
        microbatches=body["microbatches"],
        results=(place / "out.npz").read_bytes(),
        elapsed_s=body["elapsed_s"],
    )


def base_load(directory: Path, net: Cables | None) -> Load:
    """Return ViT-Base with random weights, in three stages, and its results."""
    model = find_model("google/vit-base-patch16-224")
    weights, shard = directory / "base.safetensors", model.build()
    write_converted(
        weights, shard, model.config, RandomWeights(hub_tensors(shard, model.config), 0), "random"
    )
    pictures = noise(directory / "large.npz", BASE_ITEMS, (3, 224, 224))
    options = ("-m", model.name, "-M", str(weights), "-u", "1", "--input", str(pictures), "--timeout", "60")
    cut = ("-pt", "1,16,17,32,33,48")
    return run_alone(Load((*options, *cut), directory, net), "base", "-c", "tcp")


def digits_load(
    directory: Path, net: Cables | None, items: int, name: str, timeout_s: float, *options: str
) -> Load:
    """Return the digits model on different pictures, and its results."""
    pictures = noise(directory / f"{name}.npz", items, (1, 8, 8))
    options = ("-m", "vit-digits", "--input", str(pictures), "--timeout", str(timeout_s), *options)
    return run_alone(Load(options, directory, net), name, *SHAPES[0], "-c", "tcp")


def print_recoveries(console: Console, recoveries: Sequence[Recovery]) -> None:
    """Print the parts of recoveries, by what made them necessary."""
    table = Table(box=box.SIMPLE)
    for name in (
        "",
        "recoveries",
        "until the plan, s",
        "load, s",
        "fill, s",
        "in all, s",
        "95 %",
        "most",
    ):
        table.add_column(name, justify="right" if name else "left")
    for kind in KINDS:
        found = [one for one in recoveries if one.kind == kind]
        if not found:
            continue
        totals = sorted(one.total_s for one in found)
        parts = (
            [one.decide_s for one in found],
            [one.load_s for one in found],
            [one.fill_s for one in found],
        )
        medians = [statistics.median(part) for part in (*parts, totals)]
        ends = (totals[min(len(totals) - 1, int(0.95 * len(totals)))], totals[-1])
        table.add_row(kind, str(len(found)), *(f"{seconds:.3f}" for seconds in (*medians, *ends)))
    console.print(table)
