"""Compare predictions over each transport with measurements: ``python benchmarks/handling.py``.

Profiles two cores of this machine for microbatches of one item, whose handling is a good part of a stage's
time, and runs a rank on each core over each transport. Shows the predicted throughput of the full pipeline
without what the profile says of the transport, with it, and the measured one. All transports take turns in
each repetition, which has a profile of its own; reports medians. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from prediction import ROOT, Cores, profile, random_weights, read, start, wait, write_cluster
from rich.console import Console
from rich.table import Table

from pipeedge.plan import scheduler
from pipeedge.request.config import TRANSPORTS
from pipeedge.transport.new_key import make_key

MODELS = ("vit-digits", "facebook/deit-tiny-distilled-patch16-224")
RUN_S = 8.0


def options_of(transport: str) -> list[str]:
    """Return the options of a run over ``transport``."""
    return ["--key", "key.pem"] if transport == "tcp-tls" else ["-c", transport]


def run(
    model: str, weights: Path | None, work: Path, cores: Cores, items: int, transport: str, port: int
) -> Any:
    """Run two ranks with a computed schedule and return what the report says of the prediction."""
    common = ["-m", model, "-u", "1", "-b", str(items), "--port", str(port), *options_of(transport)]
    common += [] if weights is None else ["-M", str(weights)]
    files = ["-sm", "models.yml", "-sdt", "kinds.yml", "-sd", "devices.yml", "--report", "report.json"]
    files += ["--output", "results.csv"]  # the profile writes them, too
    script = [sys.executable, str(ROOT / "runtime.py")]
    wait(
        [
            start([*cores.pinned(rank), *script, str(rank), "2", *common, *own], work)
            for rank, own in enumerate((files, []))
        ]
    )
    return read(work / "report.json")["predicted"]


def without_handling(model: str, work: Path) -> float:
    """Return the throughput that the scheduler predicts if the profiles say nothing about transports."""
    kinds = read(work / "kinds.yml")
    for kind in kinds.values():
        for known in kind["model_profiles"][model]:
            known.pop("handling")
    (work / "bare.yml").write_text(yaml.safe_dump(kinds))
    asked = scheduler.SchedulerRequest(
        work / "models.yml", work / "bare.yml", work / "devices.yml", model, 1, data_host="0"
    )
    return scheduler.plan(asked).costs.throughput_items_per_s or 0.0


def measure(model: str, cores: Cores, arguments: argparse.Namespace, table: Table) -> None:
    """Compare one model over all transports."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arguments.transports}
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        weights = None if model == "vit-digits" else random_weights(model, directory)
        for repetition in range(arguments.repetitions):
            work = directory / f"profile{repetition}"
            work.mkdir()
            (work / "key.pem").write_text(make_key())
            (work / "key.pem").chmod(0o600)
            profile(model, work, cores, None, 1)
            write_cluster(model, work, 1 / 2, 1)
            bare = without_handling(model, work)
            for number, transport in enumerate(found):
                port = arguments.port + repetition * len(found) + number
                report = run(model, weights, work, cores, int(RUN_S * bare), transport, port)
                name = "throughput_items_per_s"
                found[transport].append((bare, report[name], report[f"{name}_measured"]))
    for transport, rows in found.items():
        bare, predicted, measured = (statistics.median(each) for each in zip(*rows, strict=True))
        before = statistics.median(row[2] / row[0] - 1 for row in rows)
        now = statistics.median(row[2] / row[1] - 1 for row in rows)
        rates = (f"{rate:.1f}" for rate in (measured, bare, predicted))
        table.add_row(model.split("/")[-1], transport, *rates, f"{before:+.1%}", f"{now:+.1%}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-m", "--model-name", action="append", metavar="NAME", help="model to measure (vit-digits, DeiT-Tiny)"
    )
    parser.add_argument(
        "--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="transports to compare (all)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=3, metavar="N", help="repetitions of profile and runs (3)"
    )
    parser.add_argument("--cores", default="0,1", metavar="A,B", help="cores of the two ranks (0,1)")
    parser.add_argument(
        "--port", type=int, default=29700, metavar="PORT", help="first of the ports to use (29700)"
    )
    parser.add_argument(
        "--first", action="store_true", help="give the ranks priority over other work; needs root"
    )
    arguments = parser.parse_args()
    cores = Cores(tuple(int(core) for core in arguments.cores.split(",")), arguments.first)
    console = Console()
    console.print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", highlight=False)
    table = Table("model", "transport", "measured", "predicted without", "with", "error without", "with")
    for model in arguments.model_name or MODELS:
        measure(model, cores, arguments, table)
    console.print(table)


if __name__ == "__main__":
    main()
