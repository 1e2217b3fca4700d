#!/usr/bin/env python3
"""Count what native code on ARM executes, without a board. DIR is what ``scripts/test-arm DIR`` has made.

    instructions   executed for each multiply-add by ours, and by torch for the same product (qemu counts)
    loops          cycles of the inner loops by llvm-mca, of the least that a processor's multipliers need

Speed on a board also depends on memory, which neither shows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIDE = ROOT / "benchmarks" / "arm_side.py"
MCA = shutil.which("llvm-mca-19") or "llvm-mca"
"""Older ones know no Neoverse V2."""
LEAST_SHARE = 0.85
MOST_RATIO = 0.5


def count_instructions(prepared: Path, cpu: str) -> dict[str, dict[str, float]]:
    """Return the instructions for each multiply-add by what is computed, and by whom."""
    with tempfile.TemporaryDirectory() as directory:
        plugin = Path(directory) / "count.so"
        source = ROOT / "benchmarks" / "arm_instructions.c"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", plugin, source], check=True)
        root = prepared / "root"
        ended = subprocess.run(
            ["qemu-aarch64", "-plugin", plugin, "-L", root, root / "usr/bin/python3.11", SIDE],
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{prepared}/site",
                "PYTHONNOUSERSITE": "1",
                "OMP_NUM_THREADS": "1",
                "QEMU_CPU": cpu,
            },
            check=False,
            capture_output=True,
            text=True,
        )
    if ended.returncode:
        sys.exit(f"arm_kernels: the emulated process ended with {ended.returncode}: {ended.stderr[-2000:]}")
    counts = [int(line.split()[1]) for line in ended.stderr.splitlines() if line.startswith("instructions ")]
    found: dict[str, dict[str, float]] = {}
    pairs = zip(counts[0::2], counts[1::2], strict=True)
    for (name, multiply_adds), (before, after) in zip(json.loads(ended.stdout), pairs, strict=True):
        what, who = name.split("|")
        found.setdefault(what, {})[who] = (after - before) / multiply_adds
    return found


def show_instructions(prepared: Path, cpus: list[str]) -> bool:
    """Print what each processor executes; return whether ours executes at most half of what torch does."""
    good = True
    for cpu in cpus:
        print(f"\n{cpu}: instructions for each multiply-add")
        for what, by in count_instructions(prepared, cpu).items():
            ours = {who: count for who, count in by.items() if who != "torch"}
            torchs = by.get("torch")
            best = next(iter(ours.values()))
            ratio = None if torchs is None else best / torchs
            good = good and (ratio is None or ratio <= MOST_RATIO)
            beside = "torch has none" if torchs is None else f"torch {torchs:.3f}, ratio {ratio:.3f}"
            print(
                f"{what:28} " + ", ".join(f"{who} {count:.3f}" for who, count in ours.items()) + f"; {beside}"
            )
    return good


@dataclass(frozen=True)
class Loop:
    """An inner loop of an object file, and the processors that it is for."""

    what: str
    object: str
    """Library and file without its end."""
    function: str
    """Regular expression for the function that it is in, up to its number of rows if it has one."""
    rows: int
    multiplies: str
    """Regular expression for the instructions that multiply."""
    processors: tuple[str, ...]
    scales: str = ""
    """Regular expression for those that multiply the sums of a group by its scales, if the loop has them."""

    @property
    def is_row(self) -> bool:
        """Whether it multiplies a row alone, which waits for memory: it has no share to reach."""
        return self.rows == 1


A72, N1, V2 = "cortex-a72", "neoverse-n1", "neoverse-v2"
UNITS = {A72: 1, N1: 2, V2: 4}
"""Multiplications that a processor starts in a cycle, by its name for llvm-mca."""
LONG, SCALES = "smull|smlal", "fmla|fmul"
DECODERS = (
    Loop("float32, NEON", "decoder/neon", "FloatLanes.*columns", 6, "fmla", (A72, N1, V2)),
    Loop("bfloat16, NEON", "decoder/neon", "HalfLanes.*columns", 4, "fmla", (A72, N1)),
    Loop("bfloat16, BF16", "decoder/neonbf16", "PairLanes.*columns", 6, "bfdot", (V2,)),
    Loop("int8, NEON", "decoder/neon", "CodeProduct<.*LongQuads.*columns", 3, LONG, (A72,), SCALES),
    Loop("int8, dots", "decoder/neondot", "CodeProduct<.*DotQuads.*columns", 6, "sdot", (N1, V2), SCALES),
)
LOOPS = (
    Loop("int8, NEON", "linear8/neon", r"multiply_groups<.*::Neon, ", 4, LONG, (A72,)),
    Loop("int8, dots", "linear8/neondot", r"multiply_groups<.*::NeonDot, ", 6, "sdot", (N1, V2)),
    Loop("int8, I8MM", "linear8/neoni8mm", r"multiply_groups<.*::NeonI8mm, ", 3, "usmmla", (V2,)),
    Loop("float32, NEON", "attention/neon", "multiply_tile<.*Float32, ", 6, "fmla", (A72, N1, V2)),
    Loop("bfloat16, BF16", "attention/neonbf16", "multiply_tile<.*Pairs, ", 6, "bfdot", (V2,)),
    *DECODERS,
    *(replace(loop, rows=1) for loop in DECODERS),
    Loop("int4, NEON", "decoder/neon", "NibbleProduct<.*ShortQuads>::multiply", 1, LONG, (A72,), SCALES),
    Loop("int4, dots", "decoder/neondot", "NibbleProduct<.*DotQuads>::multiply", 1, "sdot", (N1, V2), SCALES),
)


def inner_loop(prepared: Path, loop: Loop) -> list[str]:
    """Return the instructions of the innermost loop with most multiplications in a function."""
    place = f"CMakeFiles/pipeedge_{loop.object.partition('/')[0]}.dir/{loop.object}.cpp.o"
    listing = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", prepared / "build" / place],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    best: list[str] = []
    for part in re.split(r"\n\n", listing):
        head, _, body = part.strip().partition("\n")
        if not re.search(rf"{loop.function}<?{loop.rows}ul", head):
            continue
        lines = [match for line in body.splitlines() if (match := re.match(r"\s*([0-9a-f]+):\s+(.*)", line))]
        places = {int(match[1], 16): number for number, match in enumerate(lines)}
        texts = [re.sub(r"\s*(//|<).*", "", match[2]) for match in lines]
        ends = []
        for number, text in enumerate(texts):
            jump = re.match(r"(?:b(?:\.\w+)?|cbn?z\s+\w+,)\s+([0-9a-f]+)$", text)
            start = None if jump is None else places.get(int(jump[1], 16))
            if start is not None and start <= number:
                ends.append((start, number))
        for start, end in ends:
            if any((a, b) != (start, end) and start <= a and b <= end for a, b in ends):
                continue
            found = [text for text in texts[start:end] if not re.match(r"b(\.|\s)", text)]
            if multiplications(found, loop.multiplies) > multiplications(best, loop.multiplies):
                best = found
    if not best:
        sys.exit(f"arm_kernels: {place} has no loop {loop.function}")
    return best


def multiplications(instructions: list[str], which: str) -> int:
    """Return the number of instructions that multiply."""
    return sum(re.match(which, text) is not None for text in instructions)


def products_of(instructions: list[str], loop: Loop) -> list[str]:
    """Return the part of a loop from its first product to the last one, without the scales."""
    places = [at for at, text in enumerate(instructions) if re.match(loop.multiplies, text)]
    return [text for text in instructions[places[0] : places[-1] + 1] if not re.match(loop.scales, text)]


def cycles(instructions: list[str], processor: str) -> float:
    """Return the cycles of a pass through a loop by llvm-mca."""
    passes = 400
    said = subprocess.run(
        [
            MCA,
            "-mtriple=aarch64",
            f"-mcpu={processor}",
            "-mattr=+dotprod,+i8mm,+bf16",
            f"-iterations={passes}",
        ],
        input="\n".join(instructions),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return (
        int(next(line.split()[-1] for line in said.splitlines() if line.startswith("Total Cycles"))) / passes
    )


def show_loops(prepared: Path) -> bool:
    """Print the loops; return whether those of several rows reach their share on all but a Neoverse N1."""
    good = True
    print(f"\n{'loop':44} {'instructions':>12} {'multiply':>8} {'processor':>12} {'cycles':>7} {'least':>6}")
    for loop in LOOPS:
        whole = inner_loop(prepared, loop)
        name = f"{loop.object.partition('/')[0]}, {loop.what}, {loop.rows}"
        all_multiply = f"{loop.multiplies}|{loop.scales}" if loop.scales else loop.multiplies
        if loop.scales:
            good = show_loop(loop, name, products_of(whole, loop), loop.multiplies) and good
            show_loop(loop, f"{name}, with scales", whole, all_multiply)
        else:
            good = show_loop(loop, name, whole, all_multiply) and good
    return good


def show_loop(loop: Loop, name: str, instructions: list[str], multiplies: str) -> bool:
    """Print a loop or a part of it for each processor; return whether all reach their share."""
    good = True
    count = multiplications(instructions, multiplies)
    for processor in loop.processors:
        took, least = cycles(instructions, processor), count / UNITS[processor]
        good = good and (loop.is_row or processor == N1 or least / took >= LEAST_SHARE)
        figures = f"{len(instructions):12} {count:8} {processor:>12} {took:7.1f} {least:6.0f}"
        print(f"{name:44} {figures} {100 * least / took:4.0f} %")
    return good


def main() -> int:
    """Print the tables; return 1 if something is worse than its target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prepared", type=Path, metavar="DIR")
    parser.add_argument(
        "--part", nargs="+", choices=("instructions", "loops"), default=["instructions", "loops"]
    )
    parser.add_argument(
        "--cpus", nargs="+", default=["cortex-a72", "cortex-a76", "max"], help="as qemu names them"
    )
    args = parser.parse_args()
    good = True
    if "loops" in args.part:
        good = show_loops(args.prepared)
    if "instructions" in args.part:
        good = show_instructions(args.prepared, args.cpus) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
