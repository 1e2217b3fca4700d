#!/usr/bin/env python3
"""Throughput of a pipeline against one process: ``make bench``.

    pipeline    runtime.py, ViT-Base, float32, 2 ranks with 1 thread each, cut 24/24, -b 128 -u 8
    reference   transformers' ViTForImageClassification, one process with 2 threads, batches of 8

Both run the same images, in processes of their own, in turn; medians count. The reference is timed after
a warm-up. The pipeline's figure is that of its report: from the first microbatch in to the last result out,
so filling and draining count against it. Needs two cores with nothing else on them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MODEL = "google/vit-base-patch16-224"
PARTITION = "1,24,25,48"
RANKS = 2
UBATCH = 8
TARGET = 0.95
LIMIT_S = 900

REFERENCE = """
import sys, time
import numpy as np, torch
from transformers import ViTConfig, ViTForImageClassification

torch.set_num_threads(2)
images = torch.from_numpy(np.load(sys.argv[1])["pixel_values"])
model = ViTForImageClassification(ViTConfig(num_labels=1000)).eval()
with torch.inference_mode():
    batches = images.split(int(sys.argv[2]))
    model(batches[0])
    began = time.perf_counter()
    for batch in batches:
        model(batch)
    print(len(images) / (time.perf_counter() - began))
"""


def prepare(directory: Path, items: int) -> tuple[Path, Path]:
    """Weights and images, written once, random: values do not change how long a float32 product takes."""
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


def run_pipeline(weights: Path, images: Path, directory: Path) -> dict:
    """The report of one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    report = directory / "report.json"
    report.unlink(missing_ok=True)
    command = ["-m", MODEL, "-M", str(weights), "-pt", PARTITION, "-u", str(UBATCH)]
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


def run_reference(images: Path) -> float:
    """Items a second of one process."""
    command = [sys.executable, "-c", REFERENCE, str(images), str(UBATCH)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    )
    return float(ended.stdout)


def main() -> None:
    """Print the table and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-b", "--items", type=int, metavar="N", help="images (128)")
    parser.add_argument("-n", "--repetitions", type=int, metavar="N", help="runs of each (3)")
    parser.add_argument(
        "--quick", action="store_true", help="32 images, one run of each: does it work at all"
    )
    parser.add_argument("-o", "--directory", type=Path, default=ROOT / "bench-out", metavar="DIR")
    args = parser.parse_args()
    items = args.items or (32 if args.quick else 128)
    repetitions = args.repetitions or (1 if args.quick else 3)
    directory = args.directory.resolve()
    weights, images = prepare(directory, items)

    console = Console()
    console.print(f"{MODEL}, float32, {items} images, microbatches of {UBATCH}, cut 24/24", highlight=False)
    if (os.cpu_count() or 1) < RANKS:
        console.print(f"{RANKS} ranks on one core: the ratio says nothing here")
    load = os.getloadavg()[0]
    if load > 1:
        console.print(f"other work is running (load {load:.1f}): the ratio says nothing", highlight=False)
    table = Table(box=box.SIMPLE)
    for column in ("run", "pipeline", "reference", "ratio", "busy, each stage"):
        table.add_column(column, justify="right")
    pipeline, reference = [], []
    for repetition in range(repetitions):
        report = run_pipeline(weights, images, directory)
        pipeline.append(report["throughput_items_per_s"])
        reference.append(run_reference(images))
        busy = " ".join(f"{stage['busy_fraction']:.0%}" for stage in report["stages"])
        ratio = pipeline[-1] / reference[-1]
        table.add_row(
            str(repetition), f"{pipeline[-1]:.2f}/s", f"{reference[-1]:.2f}/s", f"{ratio:.3f}", busy
        )
    console.print(table)
    ratio = statistics.median(pipeline) / statistics.median(reference)
    verdict = "met" if ratio >= TARGET else "missed"
    console.print(f"ratio of the medians {ratio:.3f}; target {TARGET}: {verdict}", highlight=False)


if __name__ == "__main__":
    main()
