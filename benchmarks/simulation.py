"""Compare simulated runs with real ones: ``python benchmarks/simulation.py``.

For each model and cut, profiles two cores of this machine, lets the scheduler cut the model, simulates the
schedule with the code of ``pipeedge-simulate``, runs it with a rank pinned to each core, and compares the two
reports. Uses the profiles, cuts and pinning of ``prediction.py``, and also needs an idle machine.

``--scale`` runs nothing, but times the simulation of 1,000 stages and 10,000 microbatches.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from beds import steady_items_per_s
from prediction import (
    CUTS,
    LEAST_MICROBATCHES,
    LIMIT_S,
    MODELS,
    ROOT,
    UBATCH,
    Cores,
    common_options,
    profile,
    read,
    run,
)
from prediction import write_cluster as write_hosts
from rich.console import Console
from rich.table import Table

from pipeedge.report import find_bottleneck, read_run
from pipeedge.simulate.options import SimulationRequest
from pipeedge.simulate.session import simulate_request
from pipeedge.simulate.simulation import PipelineModel, SimulatedLink, SimulatedStage, simulate

TARGET = 0.05
RUN_S = 12.0
SCALE = 1_000, 10_000
SCALE_LIMIT_S = 30.0


def simulated(model: str, directory: Path, items: int) -> dict[str, Any]:
    """Return the simulated report of the run that ``prediction.run`` starts."""
    request = SimulationRequest(
        models_file=directory / "models.yml",
        dev_types_file=directory / "kinds.yml",
        dev_file=directory / "devices.yml",
        model_name=model,
        items=items,
        microbatch_size=UBATCH,
    )
    return simulate_request(request).to_body(["pipeedge-simulate"])


def compare(model: str, weights: Path, directory: Path, part: float, arguments: Any, port: int) -> list[Any]:
    """Compare one cut; return it with simulated, measured and error, overall and for the full pipeline."""
    cores = Cores(tuple(int(core) for core in arguments.cores.split(",")), arguments.first)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    profile(model, directory, cores, arguments.iterations)
    write_hosts(model, directory, part)
    kind = read(directory / "device_types.yml")["core0"]
    pass_s = sum(kind["model_profiles"][model][0]["time_s"])
    items = UBATCH * max(LEAST_MICROBATCHES, int(arguments.seconds / (pass_s * max(part, 1 - part))))
    promised = simulated(model, directory, items)
    measured = run(model, weights, directory, cores, items, port)
    found = [f"{measured['schedule'][0]['layers'][1]}"]
    for figure in (lambda body: body["throughput_items_per_s"], steady_items_per_s):
        a, b = figure(promised), figure(measured)
        found += [a, b, b / a - 1]
    named = [find_bottleneck(read_run(body, "report")) for body in (promised, measured)]
    return [*found, *(f"{one.part.value} {one.number}" if one else "-" for one in named)]


def measure(model: str, arguments: argparse.Namespace, table: Table, console: Console) -> float:
    """Compare one model at all cuts by medians over repetitions; return the worst error of the whole run."""
    worst, name = 0.0, model.split("/")[-1]
    with tempfile.TemporaryDirectory() as text:
        command = [sys.executable, str(ROOT / "save_model_weights.py"), "--random", "-m", model, "-o", text]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT_S
        )
        (weights,) = Path(text).glob("*.npz")
        for number, part in enumerate(CUTS[: arguments.cuts]):
            runs = []
            for repetition in range(arguments.repetitions):
                port = arguments.port + repetition + number * arguments.repetitions
                runs.append(compare(model, weights, Path(text) / "profile", part, arguments, port))
                console.print(f"{name}, cut {number + 1}: {runs[-1][3]:+.1%}", highlight=False)
            figures = [statistics.median(run[column] for run in runs) for column in range(1, 7)]
            shown = [
                f"{value:.2f}" if column % 3 != 2 else f"{value:+.1%}" for column, value in enumerate(figures)
            ]
            table.add_row(name, runs[-1][0], *shown, *runs[-1][7:])
            worst = max(worst, abs(figures[2]))
    return worst


def scale(console: Console) -> int:
    """Time a large simulation; return 1 if it exceeds the limit."""
    stages, microbatches = SCALE
    chance = random.Random(0)
    model = PipelineModel(
        tuple(SimulatedStage(chance.uniform(0.5, 1.0), send_s=0.01) for _ in range(stages)),
        tuple(SimulatedLink(chance.uniform(0.1, 0.9), 0.01) for _ in range(stages + 1)),
        microbatches,
    )
    began = time.perf_counter()
    found = simulate(model)
    simulated_s = time.perf_counter() - began
    found.timeline(range(stages))
    took_s = time.perf_counter() - began
    console.print(
        f"{stages} stages, {microbatches} microbatches: {simulated_s:.2f} s, {took_s:.2f} s with spans, "
        f"asked < {SCALE_LIMIT_S:.0f} s",
        highlight=False,
    )
    return 0 if took_s < SCALE_LIMIT_S else 1


def main() -> int:
    """Print the table; return 1 if an error exceeds the target."""
    parser = common_options(__doc__, 29800)
    parser.add_argument(
        "--cuts", type=int, default=len(CUTS), metavar="N", help=f"number of cuts ({len(CUTS)})"
    )
    parser.add_argument(
        "--seconds", type=float, default=RUN_S, metavar="S", help=f"length of a run ({RUN_S:g})"
    )
    parser.add_argument("--scale", action="store_true", help="only time a large simulation")
    arguments = parser.parse_args()
    console = Console(width=140)
    if arguments.scale:
        return scale(console)
    console.print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", highlight=False)
    headings = ("simulated", "measured", "error", "once full", "measured", "error")
    table = Table("model", "cut after", *headings, "bottleneck", "measured")
    worst = max(measure(model, arguments, table, console) for model in arguments.model_name or MODELS)
    console.print(table)
    console.print(f"worst error {worst:.1%}, asked <= {TARGET:.0%}", highlight=False)
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
