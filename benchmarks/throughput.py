#!/usr/bin/env python3
"""Compare a pipeline with one process, and number types with float32; part of ``make bench``.

    pipeline    runtime.py, ViT-Base, 2 ranks with 1 thread each, cut 24/24, -b 128 -u 8
    reference   transformers' ViTForImageClassification, one process with 2 threads, batches of 8; in the same
                number type (int8: torch's dynamic quantisation of its linear layers)

All run the same images in separate processes, in turn; medians are reported. The reference is timed after a
warm-up. The pipeline's figure comes from its report: from the first microbatch in to the last result out,
including filling and draining. Needs two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from pipeedge.base.schedule import DTYPES

ROOT = Path(__file__).resolve().parents[1]
MODEL = "google/vit-base-patch16-224"
PARTITION = "1,24,25,48"
RANKS = 2
UBATCH = 8
TARGET = 0.95
"""Target relative to the reference, in float32."""
SPEEDUPS = {"bfloat16": 1.75, "int8": 2.8}
"""Targets relative to the pipeline in float32, on a machine with the instructions."""
LIMIT_S = 900

REFERENCE = """
import sys, time, warnings
import numpy as np, torch
from transformers import ViTConfig, ViTForImageClassification

warnings.filterwarnings("ignore")
torch.set_num_threads(2)
images = torch.from_numpy(np.load(sys.argv[1])["pixel_values"])
model = ViTForImageClassification(ViTConfig(num_labels=1000)).eval()
if sys.argv[3] == "int8":
    torch.backends.quantized.engine = "x86"
    model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
else:
    model, images = (each.to(getattr(torch, sys.argv[3])) for each in (model, images))
with torch.inference_mode():
    batches = images.split(int(sys.argv[2]))
    model(batches[0])
    began = time.perf_counter()
    for batch in batches:
        model(batch)
    print(len(images) / (time.perf_counter() - began))
"""


def prepare(directory: Path, items: int) -> tuple[Path, Path]:
    """Write random weights and images once; their values do not affect the time of a product."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "save_model_weights.py", "--random", "-m", MODEL, "-o", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    images = directory / f"images-{items}.npz"
    if not images.exists():
        pixels = np.random.default_rng(0).standard_normal((items, 3, 224, 224), dtype=np.float32)
        temporary = images.with_suffix(".part.npz")
        np.savez(temporary, pixel_values=pixels)
        temporary.replace(images)
    return directory / "ViT-B_16-224.npz", images


def run_pipeline(weights: Path, images: Path, directory: Path, dtype: str) -> dict:
    """Run the pipeline once and return its report."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    report = directory / "report.json"
    report.unlink(missing_ok=True)
    command = ["-m", MODEL, "-M", str(weights), "-pt", PARTITION, "-u", str(UBATCH), "--dtype", dtype]
    command += ["--input", str(images), "--port", str(port), "--report", str(report)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "runtime.py", str(rank), str(RANKS), *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    try:
        statuses = [process.wait(timeout=LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(statuses):
        sys.exit(f"throughput: the ranks ended with {statuses}; the reason is above")
    return dict(json.loads(report.read_text(encoding="utf-8")))


def run_reference(images: Path, dtype: str) -> float:
    """Run the reference once and return its items per second."""
    command = [sys.executable, "-c", REFERENCE, str(images), str(UBATCH), dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    )
    return float(ended.stdout)


def verdicts(pipeline: dict[str, list[float]], reference: dict[str, list[float]]) -> list[str]:
    """Return a line for each dtype, compared with transformers and with the pipeline's own float32."""
    lines = []
    for dtype, figures in pipeline.items():
        ours, theirs = statistics.median(figures), statistics.median(reference[dtype])
        line = f"{dtype:9} {ours:6.2f}/s, {ours / theirs:.3f} of transformers in {dtype}"
        if dtype == "float32":
            line += _verdict(ours / theirs, TARGET)
        elif "float32" in pipeline:
            speedup = ours / statistics.median(pipeline["float32"])
            line += f", {speedup:.2f} times float32" + _verdict(speedup, SPEEDUPS.get(dtype))
        lines.append(line)
    return lines


def _verdict(found: float, target: float | None) -> str:
    return "" if target is None else f" (target {target}: {'met' if found >= target else 'missed'})"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-b", "--items", type=int, metavar="N", help="images in a run (128)")
    parser.add_argument("-n", "--repetitions", type=int, metavar="N", help="runs of each (3)")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=["float32", "bfloat16", "int8"],
        help="number types to compare",
    )
    parser.add_argument(
        "--quick", action="store_true", help="only check that it works: 32 images, one run of each"
    )
    parser.add_argument("-o", "--directory", type=Path, default=ROOT / "bench-out", metavar="DIR")
    return parser.parse_args()


def print_conditions(console: Console, items: int, dtypes: Sequence[str]) -> None:
    """Print what is measured, with any reason not to trust the result."""
    console.print(
        f"{MODEL}, {', '.join(dtypes)}, {items} images, microbatches of {UBATCH}, cut 24/24", highlight=False
    )
    if (os.cpu_count() or 1) < RANKS:
        console.print(f"{RANKS} ranks on one core: the ratio says nothing here")
    load = os.getloadavg()[0]
    if load > 1:
        console.print(f"other work is running (load {load:.1f}): the ratio says nothing", highlight=False)


def main() -> None:
    """Print the table and the ratios."""
    args = arguments()
    items = args.items or (32 if args.quick else 128)
    repetitions = args.repetitions or (1 if args.quick else 3)
    directory = args.directory.resolve()
    weights, images = prepare(directory, items)
    console = Console()
    print_conditions(console, items, args.dtypes)
    table = Table(box=box.SIMPLE)
    for column in ("run", "dtype", "pipeline", "reference", "ratio", "busy, each stage"):
        table.add_column(column, justify="right")
    pipeline: dict[str, list[float]] = {dtype: [] for dtype in args.dtypes}
    reference: dict[str, list[float]] = {dtype: [] for dtype in args.dtypes}
    for repetition in range(repetitions):
        for dtype in args.dtypes:
            report = run_pipeline(weights, images, directory, dtype)
            ours, theirs = report["throughput_items_per_s"], run_reference(images, dtype)
            pipeline[dtype].append(ours)
            reference[dtype].append(theirs)
            busy = " ".join(f"{stage['busy_fraction']:.0%}" for stage in report["stages"])
            table.add_row(
                str(repetition), dtype, f"{ours:.2f}/s", f"{theirs:.2f}/s", f"{ours / theirs:.3f}", busy
            )
    console.print(table)
    for line in verdicts(pipeline, reference):
        console.print(line, highlight=False)


if __name__ == "__main__":
    main()
