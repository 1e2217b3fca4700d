"""Measure the speed of the codec on one thread: ``python benchmarks/codec.py``.

The payload is 8x197x768 float32, as sent by a stage of ViT-Base. Rates count float32 bytes, and are the best
of several short repetitions, to exclude the effect of other processes. The whole link is timed too, with
the choice of levels, the wire format and newly allocated memory for the result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from pipeedge import _native as native
from pipeedge.base.schedule import BIT_WIDTHS
from pipeedge.compress import LinkDecoder, LinkEncoder

SHAPE = (8, 197, 768)
TARGETS = {bits: 4.0 if bits in (4, 8) else 2.0 for bits in BIT_WIDTHS}
"""Target for encoding and for decoding, in GB/s (10^9 bytes)."""


def best_rate(size: int, work: Callable[[], object], repetitions: int) -> float:
    """Return the best rate for ``size`` bytes, in GB/s."""
    best = float("inf")
    for _ in range(repetitions):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return size / best / 1e9


def measure(variant: str, bits: int, repetitions: int) -> tuple[float, float, float, float]:
    """Measure the rates of encoding (clamped and whole range), decoding, and copying the same bytes."""
    values = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    rows = SHAPE[0] * SHAPE[1]
    codes = np.zeros(native.packed_bytes(values.size, bits), np.uint8)
    ranges = np.zeros((2, rows), np.float32)
    decoded = np.zeros_like(values)

    def encode(factor: float) -> None:
        native.encode(
            values=values,
            rows=rows,
            bits=bits,
            low=factor,
            high=factor,
            codes=codes,
            ranges=ranges,
            variant=variant,
        )

    def decode() -> None:
        native.decode(codes=codes, ranges=ranges, bits=bits, values=decoded, variant=variant)

    return (
        best_rate(values.nbytes, lambda: encode(3.0), repetitions),
        best_rate(values.nbytes, lambda: encode(float("inf")), repetitions),
        best_rate(values.nbytes, decode, repetitions),
        best_rate(values.nbytes, lambda: np.copyto(decoded, values), repetitions),
    )


def link_seconds(bits: int, repetitions: int) -> tuple[float, float, float]:
    """Return median seconds of ``LinkEncoder``, choosing levels and reusing them, and of ``LinkDecoder``."""
    payload = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)),)
    times: list[list[float]] = [[], [], []]
    for _ in range(repetitions):
        encoder, decoder = LinkEncoder("mse"), LinkDecoder()
        for which in (0, 1, 2):
            began = time.perf_counter()
            if which < 2:
                wire = encoder.encode(payload, bits)
            else:
                decoder.decode(wire)
            times[which].append(time.perf_counter() - began)
    first, next_, decode = (sorted(found)[repetitions // 2] for found in times)
    return first, next_, decode


def main() -> int:
    """Print the table; return 1 if the best variant misses a target."""
    parser = argparse.ArgumentParser(description="Speed of the codec on one thread.")
    parser.add_argument("--repetitions", type=int, default=25, help="repetitions of each measurement (25)")
    parser.add_argument("--variant", choices=native.codec_variants(), help="instruction set to measure (all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    missed = []
    for variant in [arguments.variant] if arguments.variant else native.codec_variants():
        table = Table(title=f"{variant}: GB/s of float32, {'x'.join(map(str, SHAPE))}")
        for name in ("bits", "encode, clamped", "encode, whole range", "decode", "memcpy", "target"):
            table.add_column(name, justify="right")
        for bits in BIT_WIDTHS:
            rates = measure(variant, bits, arguments.repetitions)
            table.add_row(str(bits), *(f"{rate:.1f}" for rate in rates), f"{TARGETS[bits]:.0f}")
            if variant == native.codec_variants()[0] and min(rates[:3]) < TARGETS[bits]:
                missed.append(f"{bits} bits: {min(rates[:3]):.1f} GB/s, {TARGETS[bits]:.0f} are the target")
        console.print(table)
    table = Table(title="a link with --clamp mse, ms per microbatch")
    for name in ("bits", "encode, choosing levels", "encode", "decode"):
        table.add_column(name, justify="right")
    for bits in (2, 4, 8):
        table.add_row(
            str(bits), *(f"{1e3 * seconds:.2f}" for seconds in link_seconds(bits, arguments.repetitions))
        )
    console.print(table)
    for line in missed:
        console.print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
