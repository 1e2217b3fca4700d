#!/usr/bin/env python3
"""Compare a pipeline with one process of transformers in the same number type; part of ``make bench``.

    pipeline    runtime.py, 2 ranks with 1 thread each, cut in the middle
    reference   transformers' own model, one process with 2 threads, batches as large as the microbatches
                (int8: torch's dynamic quantisation of its linear layers)

Both process the same 192 items (sentences have 128 tokens) in separate processes, in turn; medians are
reported. The reference is timed after a warm-up. The pipeline's figure comes from its report: from the first
microbatch in to the last result out, including filling and draining. Needs two idle cores.

The last column is what the busiest stage spends on a microbatch outside its kernels: receiving, sending,
recording, and waiting for other threads. It counts most for a small model with small microbatches, which is
measured by itself, without the reference, within a minute:

    throughput.py --only "DeiT-Tiny float32 -u 1" --ours
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from local_ranks import wait_for
from rich import box
from rich.console import Console
from rich.table import Table

from pipeedge.base.schedule import DTYPES
from pipeedge.launch.main import free_port
from pipeedge.models import find_model

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
ITEMS = 192
TOKENS = 128
LIMIT_S = 900


@dataclass(frozen=True)
class Outside:
    """Mean seconds of a microbatch at the busiest stage, as the timeline of a report shows them."""

    kernels_s: float
    wait_input_s: float
    wait_link_s: float
    """Sending, and the wait for room on the link."""

    @property
    def total_s(self) -> float:
        """Seconds outside the kernels."""
        return self.wait_input_s + self.wait_link_s

    def __str__(self) -> str:
        parts = f"{self.wait_input_s * 1e3:.2f} input, {self.wait_link_s * 1e3:.2f} link"
        return f"{self.total_s * 1e3:.2f} ms of {(self.kernels_s + self.total_s) * 1e3:.2f} ({parts})"


@dataclass
class Row:
    """One row of the table: what runs, the target for its ratio, and the measurements."""

    title: str
    model: str
    dtype: str
    ubatch: int
    target: float
    outside_target_s: float | None = None
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Title, number type and size of a microbatch."""
        return f"{self.title} {self.dtype} -u {self.ubatch}"

    @property
    def ratio(self) -> float:
        """Ratio of the median throughputs, pipeline to transformers."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def outside_s(self) -> float:
        """Median seconds of a microbatch outside the kernels of the busiest stage."""
        return statistics.median(one.total_s for one in self.outside)


VIT, DEIT = "google/vit-base-patch16-224", "facebook/deit-base-distilled-patch16-224"
TINY, BERT = "facebook/deit-tiny-distilled-patch16-224", "bert-base-uncased"


def all_rows() -> list[Row]:
    """Return the rows, with nothing measured."""
    return [
        Row("ViT-Base", VIT, "float32", 8, 1.9),
        Row("DeiT-Base", DEIT, "float32", 8, 1.9),
        Row("BERT-Base", BERT, "float32", 8, 1.9),
        Row("DeiT-Tiny", TINY, "float32", 8, 1.6),
        Row("DeiT-Tiny", TINY, "float32", 1, 1.6, outside_target_s=0.3e-3),
        Row("ViT-Base", VIT, "bfloat16", 8, 1.5),
        Row("ViT-Base", VIT, "int8", 8, 1.7),
    ]


REFERENCE = """
import sys, time, warnings
import numpy as np, torch, transformers

warnings.filterwarnings("ignore")
torch.set_num_threads(2)
path, ubatch, dtype, family, hidden, heads, labels = sys.argv[1:]
sizes = {"hidden_size": int(hidden), "num_attention_heads": int(heads), "intermediate_size": 4 * int(hidden)}
if family == "bert":
    model = transformers.BertModel(transformers.BertConfig(**sizes))
elif family == "deit":
    model = transformers.DeiTForImageClassificationWithTeacher(
        transformers.DeiTConfig(**sizes, num_labels=int(labels))
    )
else:
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=int(labels)))
model.eval()
data = torch.from_numpy(np.load(path)["input_ids" if family == "bert" else "pixel_values"])
if dtype == "int8":
    torch.backends.quantized.engine = "x86"
    model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
else:
    model = model.to(getattr(torch, dtype))
    data = data.to(getattr(torch, dtype)) if data.is_floating_point() else data
with torch.inference_mode():
    batches = data.split(int(ubatch))
    for batch in batches[:2]:
        model(batch)
    began = time.perf_counter()
    for batch in batches:
        model(batch)
    print(len(data) / (time.perf_counter() - began))
"""


def prepare(row: Row, directory: Path, items: int) -> tuple[Path, Path]:
    """Write random weights and input once; their values do not affect the time of a product."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "save_model_weights.py", "--random", "-m", row.model, "-o", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    model = find_model(row.model)
    text = model.takes_text
    data = directory / f"{'sentences' if text else 'images'}-{items}.npz"
    if not data.exists():
        random = np.random.default_rng(0)
        temporary = data.with_suffix(".part.npz")
        if text:
            ids = random.integers(1000, 30000, (items, TOKENS))
            same = {"attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            np.savez(temporary, input_ids=ids, **same)
        else:
            np.savez(temporary, pixel_values=random.standard_normal((items, 3, 224, 224), dtype=np.float32))
        temporary.replace(data)
    return directory / model.weights_path().name, data


def run_pipeline(row: Row, weights: Path, data: Path, directory: Path, options: list[str]) -> dict:
    """Run the pipeline once and return its report."""
    port = free_port("127.0.0.1")
    report = directory / "report.json"
    report.unlink(missing_ok=True)
    layers = find_model(row.model).n_layers
    partition = f"1,{layers // 2},{layers // 2 + 1},{layers}"
    command = ["-m", row.model, "-M", str(weights), "-pt", partition, "-u", str(row.ubatch)]
    command += ["--dtype", row.dtype, "--input", str(data), "--port", str(port), "--report", str(report)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "runtime.py", str(rank), str(RANKS), *command, *options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    wait_for(ranks)
    return dict(json.loads(report.read_text(encoding="utf-8")))


def outside_kernels(report: dict[str, Any]) -> Outside:
    """Return what the busiest stage did between the first microbatch that it computed and its last.

    What comes before is the filling of the pipeline, which happens once.
    """

    def seconds(lane: dict[str, Any], doing: str) -> float:
        first = lane["doing"].index("compute")
        spans = zip(lane["doing"], lane["start_us"], lane["end_us"], strict=True)
        return sum((end - start) * 1e-6 for what, start, end in list(spans)[first:] if what == doing)

    lanes = [lane for lane in report["timeline"]["lanes"] if lane["lane"].startswith("stage")]
    stages = [lane for lane in lanes if "compute" in lane["doing"]]
    busiest = max(stages, key=lambda lane: seconds(lane, "compute"))
    microbatches = int(report["microbatches"])
    return Outside(
        *(seconds(busiest, doing) / microbatches for doing in ("compute", "wait input", "wait link"))
    )


def run_reference(row: Row, data: Path) -> float:
    """Run the reference once and return its items per second."""
    config = find_model(row.model).config
    sizes = [config.family, str(config.hidden), str(config.heads), str(config.num_labels)]
    command = [sys.executable, "-c", REFERENCE, str(data), str(row.ubatch), row.dtype, *sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    )
    return float(ended.stdout)


def verdicts(rows: list[Row]) -> list[str]:
    """Return a line for each figure of a row that has a target, and whether it is reached."""
    lines = []
    for row in rows:
        if row.theirs:
            lines.append(
                f"{row.name:26} {statistics.median(row.ours):7.2f}/s, {row.ratio:.2f} of transformers "
                f"(target {row.target}: {_met(row.ratio >= row.target)})"
            )
        if row.outside_target_s is not None:
            lines.append(
                f"{row.name:26} {row.outside_s * 1e3:.2f} ms a microbatch outside the kernels "
                f"(target {row.outside_target_s * 1e3:.1f}: {_met(row.outside_s <= row.outside_target_s)})"
            )
    return lines


def _met(reached: bool) -> str:
    return "met" if reached else "missed"


def all_reached(rows: list[Row]) -> bool:
    """Return whether every row reaches its targets, as far as they were measured."""
    fast = all(row.ratio >= row.target for row in rows if row.theirs)
    return fast and all(
        row.outside_s <= row.outside_target_s for row in rows if row.outside_target_s is not None
    )


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; options behind ``--`` are for ``runtime.py``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-b", "--items", type=int, default=ITEMS, metavar="N", help="items (192)")
    parser.add_argument("-n", "--repetitions", type=int, metavar="N", help="runs of each (3)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="only these number types")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains this")
    parser.add_argument("--ours", action="store_true", help="run the pipeline only, not the reference")
    parser.add_argument("--quick", action="store_true", help="one run of each: does it work at all")
    parser.add_argument("-o", "--directory", type=Path, default=ROOT / "bench-out", metavar="DIR")
    own = sys.argv[1:]
    rest: list[str] = []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    return parser.parse_args(own), rest


def print_conditions(console: Console, items: int) -> None:
    """Print what is measured, with any reason not to trust the result."""
    console.print(f"{items} items, cut in the middle", highlight=False)
    if (os.cpu_count() or 1) < RANKS:
        console.print(f"{RANKS} ranks on one core: the ratio says nothing here")
    load = os.getloadavg()[0]
    if load > 1:
        console.print(f"other work is running (load {load:.1f}): the ratio says nothing", highlight=False)


def cells(row: Row, report: dict[str, Any]) -> list[str]:
    """Return the cells of the last measurement of ``row``."""
    busy = " ".join(f"{stage['busy_fraction']:.0%}" for stage in report["stages"])
    theirs, ratio = "", ""
    if row.theirs:
        theirs, ratio = f"{row.theirs[-1]:.2f}/s", f"{row.ours[-1] / row.theirs[-1]:.3f}"
    return [f"{row.ours[-1]:.2f}/s", theirs, ratio, busy, str(row.outside[-1])]


def main() -> None:
    """Print the table and the ratios."""
    args, options = arguments()
    repetitions = args.repetitions or (1 if args.quick else 3)
    directory = args.directory.resolve()
    rows = [row for row in all_rows() if row.dtype in args.dtypes and args.only in row.name]
    if not rows:
        names = ", ".join(row.name for row in all_rows())
        sys.exit(f"throughput: no row matches; the rows are {names}")
    console = Console()
    print_conditions(console, args.items)
    table = Table(box=box.SIMPLE)
    columns = (
        "run",
        "",
        "pipeline",
        "reference",
        "ratio",
        "busy, each stage",
        "outside the kernels, busiest",
    )
    for column in columns:
        table.add_column(column, justify="right")
    prepared: dict[str, tuple[Path, Path]] = {}
    for repetition in range(repetitions):
        for row in rows:
            if row.model not in prepared:
                prepared[row.model] = prepare(row, directory, args.items)
            weights, data = prepared[row.model]
            report = run_pipeline(row, weights, data, directory, options)
            row.ours.append(report["throughput_items_per_s"])
            row.outside.append(outside_kernels(report))
            if not args.ours:
                row.theirs.append(run_reference(row, data))
            table.add_row(str(repetition), row.name, *cells(row, report))
    console.print(table)
    for line in verdicts(rows):
        console.print(line, highlight=False)
    sys.exit(0 if all_reached(rows) else 1)


if __name__ == "__main__":
    main()
