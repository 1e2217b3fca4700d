#!/usr/bin/env python3
"""Compare decoders of public shapes, with random weights, with llama.cpp and transformers.

    decode     tokens a second of one sequence that begins with nothing
    memory     bytes of weights read a second while decoding, of what all threads together can read
    prefill    tokens a second of a prompt of 512 tokens, against the better of llama.cpp and transformers
    products   operations a second of a block's products for 512 rows, against the fastest library's: what it
               costs that rows do not see each other. Of one thread: a step starts its threads once for all
               products, and one product alone would count their start
    load       seconds from the page cache until the weights are packed
    resident   memory at its peak, of weights, cache and libraries

    start      seconds from a command to the first token of llama-puzzles
    hop        milliseconds that each of the two hops of two ranks over tcp adds to a token of one sequence:
               the median time between tokens less what the stages compute

    outliers   how number types agree with float32 on a wide model with outliers (``outliers.py``)

Speed and memory are of one process with two threads, the median of processes in turn: reading, ours,
llama.cpp, transformers. How fast a process can read depends on where the system has put its memory (46 or 77
GB/s by chance on one machine), so decode and memory compare the fastest round of each. ``--part speed``,
``--part run`` or ``--part outliers`` measures some alone. Weights of a shape are written once, to
``--files``. Needs two idle cores, and 8 GB of disk for the larger shape. llama.cpp runs its F32, BF16, Q8_0
and Q4_0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outliers import measure_outliers
from random_decoders import SHAPES, DecoderShape, write_directory, write_gguf
from rich import box
from rich.console import Console
from rich.table import Table

SIDES = Path(__file__).with_name("decoder_sides.py")
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's number type with as many bits."""
LIBRARY_TYPES = ("float32", "bfloat16")
"""Number types that transformers computes in."""
LIMIT_S = 900
HOW_TO_BUILD = (
    "no llama-bench in {}: build llama.cpp (its source is in the sdist of llama-cpp-python; cmake --build "
    "DIR --target llama-bench llama-quantize) and give --llama-cpp DIR"
)


@dataclass(frozen=True)
class Targets:
    """What the ratios of a number type should reach."""

    decode: float
    memory: float
    prefill: float


TARGETS = {
    "float32": Targets(0.95, 0.85, 1.0),
    "bfloat16": Targets(0.95, 0.85, 1.0),
    "int8": Targets(0.95, 0.8, 1.2),
    "int4": Targets(0.95, 0.7, 0.9),
}
PRODUCTS_TARGET, RESIDENT_TARGET = 0.95, 1.05
START_TARGET_S, HOP_TARGET_S = 1.5, 0.3e-3
PARTS = ("speed", "run", "outliers")
PUZZLES = "llama-puzzles"
TOKENS_OF_RUN = "240"


@dataclass
class Row:
    """A shape in a number type, and what was measured of it, by the side and the figure."""

    shape: DecoderShape
    dtype: str
    found: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, side: str, figures: dict[str, float]) -> None:
        """Add figures of one process."""
        for name, value in figures.items():
            self.found.setdefault((side, name), []).append(value)

    def median(self, side: str, name: str) -> float | None:
        """Return the median of a figure, or None if it was not measured."""
        values = self.found.get((side, name))
        return statistics.median(values) if values else None

    def fastest(self, side: str, name: str) -> float | None:
        """Return the largest value of a figure, or None if it was not measured."""
        return max(self.found.get((side, name), ()), default=None)

    def best(self, name: str, sides: Sequence[str]) -> float | None:
        """Return the largest of the medians of some sides."""
        values = [value for side in sides if (value := self.median(side, name)) is not None]
        return max(values, default=None)

    @property
    def ratios(self) -> dict[str, tuple[float, float]]:
        """Return each ratio that could be formed, with its target; a resident ratio is to stay below it."""
        targets, ratios = TARGETS[self.dtype], {}

        def compare(name: str, ours: float | None, theirs: float | None, target: float) -> None:
            if ours is not None and theirs:
                ratios[name] = (ours / theirs, target)

        decode = self.fastest("ours", "decode")
        compare("decode", decode, self.fastest("llama.cpp", "decode"), targets.decode)
        weights = self.median("ours", "weights")
        read = None if decode is None or weights is None else decode * weights
        compare("memory", read, self.fastest("memory", "bytes_per_s"), targets.memory)
        rivals = self.best("prefill", ("llama.cpp", "transformers"))
        compare("prefill", self.median("ours", "prefill"), rivals, targets.prefill)
        library = self.median("products", "library")
        compare("products", self.median("products", "ours"), library, PRODUCTS_TARGET)
        parts = [self.median("ours", name) for name in ("weights", "cache", "imported")]
        whole = sum(part for part in parts if part is not None)
        compare("resident", self.median("ours", "peak"), whole, RESIDENT_TARGET)
        return ratios


def run_side(*arguments: object) -> dict[str, Any]:
    """Return what a process of ``decoder_sides.py`` prints."""
    command = [sys.executable, str(SIDES), *map(str, arguments)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S).stdout
    return dict(json.loads(output))


def run_llama(program: Path, model: Path, threads: int, prompt: int, tokens: int) -> dict[str, float]:
    """Return what llama-bench measures."""
    command = [str(program), "-m", str(model), "-t", str(threads), "-p", str(prompt), "-n", str(tokens)]
    output = subprocess.run(
        [*command, "-r", "3", "-o", "json"],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=LIMIT_S,
    ).stdout
    return {
        "prefill" if one["n_prompt"] else "decode": statistics.median(one["samples_ts"])
        for one in json.loads(output)
    }


def gguf_of(shape: DecoderShape, dtype: str, files: Path, binaries: Path) -> Path:
    """Return the GGUF file of a shape in a number type, made by llama.cpp itself if it is not there."""
    kind = GGUF_TYPES[dtype]
    path = files / f"{shape.name}.{kind}.gguf"
    if not path.exists():
        source = files / f"{shape.name}.F32.gguf"
        write_gguf(shape, source)
        if path != source:
            command = [binaries / "llama-quantize", source, path, kind, "2"]
            subprocess.run([str(word) for word in command], check=True, capture_output=True)
    return path


def measure(row: Row, args: argparse.Namespace, files: Path, console: Console) -> None:
    """Measure all sides of a row once."""
    directory = files / row.shape.name
    write_directory(row.shape, directory)
    sizes = (args.threads, args.prompt, args.tokens)
    row.add("memory", run_side("memory", args.threads))
    row.add("ours", run_side("ours", directory, row.dtype, *sizes))
    if args.llama_cpp is not None:
        binaries = args.llama_cpp / "bin"
        model = gguf_of(row.shape, row.dtype, files, binaries)
        row.add("llama.cpp", run_llama(binaries / "llama-bench", model, *sizes))
    if row.dtype in LIBRARY_TYPES and not args.skip_transformers:
        row.add("transformers", run_side("transformers", directory, row.dtype, *sizes))
    row.add("products", run_side("products", directory, row.dtype, 1, args.prompt))
    last = {" ".join(key): float(f"{values[-1]:.4g}") for key, values in row.found.items()}
    console.print(f"{row.shape.name} {row.dtype}", last, style="dim")


def start_s() -> float:
    """Return the seconds from the start of a command to the first character of its answer."""
    command = [sys.executable, "-m", "pipeedge", "run", "0", "1", "-m", PUZZLES, "--prompt", "Spell house."]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        first = process.stdout.read(1) if process.stdout is not None else b""
        elapsed = time.perf_counter() - began
        process.communicate(timeout=LIMIT_S)
    if not first:
        sys.exit("decoding: the command has printed no answer")
    return elapsed


def token_s(ranks: int, directory: Path) -> tuple[float, float]:
    """Return the median time between tokens of one sequence, and what the stages compute of it."""
    prompts, report = directory / "prompts.jsonl", directory / "report.json"
    # A prompt of one token, so that all steps have one row.
    prompts.write_text(json.dumps({"prompt_token_ids": [10], "ignore_eos": True}) + "\n")
    command = [sys.executable, "-m", "pipeedge", "launch", "--local", str(ranks), "--"]
    command += ["-m", PUZZLES, "-c", "tcp", "--input", str(prompts), "--max-tokens", TOKENS_OF_RUN]
    command += ["--output", str(directory / "answers.jsonl"), "--report", str(report)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    found = json.loads(report.read_text())
    computed = sum(stage["compute_s_mean"] for stage in found["stages"])
    return float(found["text"]["between_tokens_s"]["p50"]), computed


def measure_runs(rounds: int, directory: Path, console: Console) -> bool:
    """Measure whole runs, and return whether the targets are reached."""
    starts, alone, divided, hops = [], [], [], []
    for _ in range(rounds):
        starts.append(start_s())
        alone.append(token_s(1, directory)[0])
        between, computed = token_s(2, directory)
        divided.append(between)
        hops.append((between - computed) / 2)
    start, hop = statistics.median(starts), statistics.median(hops)
    console.print(f"start to the first token: {start:.2f} s ({START_TARGET_S})", highlight=False)
    console.print(
        f"one sequence, {PUZZLES}: {statistics.median(alone) * 1e3:.2f} ms a token on one rank, "
        f"{statistics.median(divided) * 1e3:.2f} ms on two; a hop adds {hop * 1e3:.2f} ms "
        f"({HOP_TARGET_S * 1e3:.1f})",
        highlight=False,
    )
    return start <= START_TARGET_S and hop <= HOP_TARGET_S


def number(value: float | None) -> str:
    """Return a figure for the table."""
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def show(rows: Sequence[Row], console: Console) -> bool:
    """Print the tables, and return whether all targets are reached."""
    table = Table(box=box.SIMPLE)
    for column in (
        "",
        "decode",
        "llama.cpp",
        "transformers",
        "GB/s",
        "memory's",
        "prefill",
        "llama.cpp",
        "transformers",
        "GOP/s",
        "library's",
        "load",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        decode, weights = row.median("ours", "decode") or 0.0, row.median("ours", "weights") or 0.0
        table.add_row(
            f"{row.shape.name} {row.dtype}",
            *(number(row.median(side, "decode")) for side in ("ours", "llama.cpp", "transformers")),
            number(decode * weights / 1e9),
            number((row.median("memory", "bytes_per_s") or 0.0) / 1e9),
            *(number(row.median(side, "prefill")) for side in ("ours", "llama.cpp", "transformers")),
            *(number((row.median("products", side) or 0.0) / 1e9) for side in ("ours", "library")),
            f"{row.median('ours', 'load_s') or 0.0:.1f} s",
        )
    console.print(table)
    reached = True
    for row in rows:
        words = []
        for name, (ratio, target) in row.ratios.items():
            good = ratio <= target if name == "resident" else ratio >= target
            reached = reached and good
            words.append(f"{name} {ratio:.3f} ({'' if good else 'misses '}{target})")
        console.print(f"{row.shape.name} {row.dtype}: {', '.join(words)}", highlight=False)
    return reached


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="where llama.cpp was built")
    parser.add_argument("--files", type=Path, metavar="DIR", help="where weights are kept from run to run")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2.5-0.5b", "llama-3.2-1b"])
    parser.add_argument("--dtypes", nargs="+", choices=GGUF_TYPES, default=["float32", "bfloat16", "int8"])
    parser.add_argument("--part", choices=PARTS, help="only this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are decoded")
    parser.add_argument("--skip-transformers", action="store_true")
    args = parser.parse_args()
    if args.llama_cpp is None and args.part in (None, "speed"):
        print("decoding: llama.cpp is left out;", HOW_TO_BUILD.format("sight"), file=sys.stderr)
    elif args.llama_cpp is not None and not (args.llama_cpp / "bin" / "llama-bench").exists():
        sys.exit("decoding: " + HOW_TO_BUILD.format(args.llama_cpp / "bin"))
    return args


def main() -> None:
    """Measure everything in turn, and print the tables."""
    args, console = arguments(), Console(width=160)
    with tempfile.TemporaryDirectory() as temporary:
        files = args.files or Path(temporary)
        files.mkdir(parents=True, exist_ok=True)
        reached = True
        if args.part in (None, "speed"):
            rows = [Row(SHAPES[shape], dtype) for shape in args.shapes for dtype in args.dtypes]
            for _ in range(args.rounds):
                for row in rows:
                    measure(row, args, files, console)
            reached = show(rows, console)
        if args.part in (None, "run"):
            reached = measure_runs(args.rounds, Path(temporary), console) and reached
        if args.part in (None, "outliers"):
            measure_outliers(files, args.threads, console)
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
