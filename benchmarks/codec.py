"""Measure the error and the speed of the codec on one thread: ``python benchmarks/codec.py``.

The payload is 8x197x768 float32, as sent by a stage of ViT-Base. Rates count float32 bytes, and are the best
of several short repetitions, to exclude the effect of other processes. The whole link is timed too, with
the choice of levels and transform, the wire format and newly allocated memory for the result.

Errors are those of the default link, relative to the Euclidean norm, on normally distributed values; and on
values of which two of 768 channels are twenty times as large, as in the hidden state of trained transformers,
with either option that turns the transform on or off. ``--blocks`` compares the lengths of its blocks.
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
from pipeedge.compress import (
    LinkDecoder,
    LinkEncoder,
    Sample,
    Transform,
    choose_levels,
    decode_tensor,
    encode_tensor,
    hadamard,
)

SHAPE = (8, 197, 768)
TARGETS = {bits: 4.0 if bits in (4, 8) else 2.0 for bits in BIT_WIDTHS}
"""Target for encoding and for decoding, in GB/s (10^9 bytes)."""
TRANSFORM_TARGETS = (4.0, 8.0)
"""Targets for encoding and decoding with a transform, in GB/s."""
LARGE = 20
ERRORS = {2: (0.344, 0.37), 3: (0.194, 0.21), 4: (0.108, 0.12), 8: (0.0072, 0.009)}
"""Largest error on normally distributed values, and with two large channels."""
BLOCKS = (32, 64, 128, 256, 512, 1024)


def best_rate(size: int, work: Callable[[], object], repetitions: int) -> float:
    """Return the best rate for ``size`` bytes, in GB/s."""
    best = float("inf")
    for _ in range(repetitions):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return size / best / 1e9


def measure(variant: str, bits: int, repetitions: int) -> tuple[float, ...]:
    """Measure the rates of encoding (clamped, whole range), decoding, both with a transform, and copying."""
    values = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    rows = SHAPE[0] * SHAPE[1]
    codes = np.zeros(native.packed_bytes(values.size, bits), np.uint8)
    ranges = np.zeros((2, rows), np.float32)
    decoded = np.zeros_like(values)
    transform = hadamard(SHAPE[-1])

    def encode(factor: float, block: int = 0) -> None:
        native.encode(
            values=values,
            rows=rows,
            bits=bits,
            low=factor,
            high=factor,
            codes=codes,
            ranges=ranges,
            block=block,
            seed=transform.seed,
            variant=variant,
        )

    def decode(block: int = 0) -> None:
        native.decode(
            codes=codes,
            ranges=ranges,
            bits=bits,
            values=decoded,
            block=block,
            seed=transform.seed,
            variant=variant,
        )

    return (
        best_rate(values.nbytes, lambda: encode(3.0), repetitions),
        best_rate(values.nbytes, lambda: encode(float("inf")), repetitions),
        best_rate(values.nbytes, decode, repetitions),
        best_rate(values.nbytes, lambda: encode(3.0, transform.block), repetitions),
        best_rate(values.nbytes, lambda: decode(transform.block), repetitions),
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


def normal(*large: int, length: int = SHAPE[-1]) -> torch.Tensor:
    """Return normally distributed rows, with the channels ``large`` twenty times as large as the others."""
    values = torch.randn((*SHAPE[:-1], length), generator=torch.Generator().manual_seed(1))
    values[..., list(large)] *= LARGE
    return values


def relative_error(values: torch.Tensor, decoded: torch.Tensor) -> float:
    """Return the relative error (Euclidean norm)."""
    return float((decoded - values).norm() / values.norm())


def link_error(values: torch.Tensor, bits: int, transform: str) -> float:
    """Return the relative error of a link with ``--link-transform`` and the default clamp."""
    encoder = LinkEncoder("mse", transform=transform)
    (decoded,) = LinkDecoder().decode(encoder.encode((values,), bits))
    return relative_error(values, decoded)


def print_errors(console: Console) -> list[str]:
    """Print the errors of links; return a line for each that is too large."""
    table = Table(title=f"relative error, {'x'.join(map(str, SHAPE))}")
    rows = {
        "normal": normal(),
        "two large channels, 100 and 500": normal(100, 500),
        "two neighbours, 100 and 101": normal(100, 101),
    }
    for name in ("values", "--link-transform", *(f"{bits} bits" for bits in ERRORS)):
        table.add_column(name, justify="right")
    missed = []
    for number, (name, values) in enumerate(rows.items()):
        for transform in ("off", "hadamard", "auto"):
            errors = {bits: link_error(values, bits, transform) for bits in ERRORS}
            table.add_row(name, transform, *(f"{error:.4f}" for error in errors.values()))
            for bits, error in errors.items():
                limit = ERRORS[bits][min(number, 1)]
                if transform == "auto" and error > 1.01 * limit:
                    missed.append(f"{name}, {bits} bits: an error of {error:.4f}, {limit} is the target")
    console.print(table)
    return missed


def measure_block(values: torch.Tensor, transform: Transform) -> tuple[list[float], float]:
    """Return the errors of rows quantised after ``transform``, and its rate in GB/s."""
    sample = Sample.of(transform.rows(values[::25].contiguous().numpy()), symmetric=True)
    errors = []
    for bits in ERRORS:
        encoded = encode_tensor(values, bits, choose_levels("mse", sample, bits), transform=transform)
        errors.append(relative_error(values, decode_tensor(encoded)))
    return errors, best_rate(4 * values.numel(), lambda: transform.rows(values.numpy()), 5)


def print_blocks(console: Console) -> None:
    """Print errors and rates by the length of blocks, for rows of several widths with two large channels."""
    table = Table(title="two large channels of each row, by the block of the transform")
    for name in ("row", "block", *(f"{bits} bits" for bits in ERRORS), "GB/s"):
        table.add_column(name, justify="right")
    for length in (192, 384, 768, 800, 1024, 1280, 3072):
        values = normal(10, 20, length=length).reshape(-1, length)
        for block in BLOCKS:
            if block <= length:
                errors, rate = measure_block(values, Transform(block, hadamard(length).seed))
                chosen = " (chosen)" if hadamard(length).block == block else ""
                table.add_row(
                    str(length), f"{block}{chosen}", *(f"{error:.4f}" for error in errors), f"{rate:.1f}"
                )
    console.print(table)


def main() -> int:
    """Print the tables; return 1 if the best variant or an error misses a target."""
    parser = argparse.ArgumentParser(description="Error and speed of the codec on one thread.")
    parser.add_argument("--repetitions", type=int, default=25, help="repetitions of each measurement (25)")
    parser.add_argument("--variant", choices=native.codec_variants(), help="instruction set to measure (all)")
    parser.add_argument("--blocks", action="store_true", help="compare blocks of the transform instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    if arguments.blocks:
        print_blocks(console)
        return 0
    missed = print_errors(console)
    for variant in [arguments.variant] if arguments.variant else native.codec_variants():
        table = Table(title=f"{variant}: GB/s of float32, {'x'.join(map(str, SHAPE))}")
        for name in (
            "bits",
            "encode, clamped",
            "encode, whole range",
            "decode",
            "encode, transformed",
            "decode, transformed",
            "memcpy",
            "target",
        ):
            table.add_column(name, justify="right")
        for bits in BIT_WIDTHS:
            rates = measure(variant, bits, arguments.repetitions)
            table.add_row(str(bits), *(f"{rate:.1f}" for rate in rates), f"{TARGETS[bits]:.0f}")
            if variant == native.codec_variants()[0] and min(rates[:3]) < TARGETS[bits]:
                missed.append(f"{bits} bits: {min(rates[:3]):.1f} GB/s, {TARGETS[bits]:.0f} are the target")
            for rate, target in zip(rates[3:5], TRANSFORM_TARGETS, strict=True):
                if variant == native.codec_variants()[0] and rate < target:
                    missed.append(
                        f"{bits} bits with a transform: {rate:.1f} GB/s, {target:.0f} are the target"
                    )
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
