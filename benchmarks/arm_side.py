#!/usr/bin/env python3
"""Compute the cases of ``arm_kernels.py``, and print their names and multiply-adds as JSON.

A call of ``getpriority`` before and after each case tells the emulator's plugin to write its count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from pipeedge import _native as native

ROWS, WIDTH, HEADS, HEAD, TOKENS = 32, 768, 12, 64, 197
SQUARE = WIDTH * WIDTH
RANDOM = np.random.default_rng(1)


class Cases:
    """Cases that were computed: name and multiply-adds of each."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def count(self, name: str, multiply_adds: int, work: Callable[[], object]) -> None:
        """Compute a case once for warmth, and once to be counted; leave it out if torch does not have it."""
        try:
            work()
        except (RuntimeError, NotImplementedError, AttributeError):
            return
        os.getpriority(os.PRIO_PROCESS, 0)
        work()
        os.getpriority(os.PRIO_PROCESS, 0)
        self.found.append((name, multiply_adds))


def floats(*shape: int) -> np.ndarray:
    """Return random float32."""
    return RANDOM.standard_normal(shape).astype(np.float32)


def whole(low: int, high: int, kind: type) -> np.ndarray:
    """Return a square of random integers."""
    return RANDOM.integers(low, high, (WIDTH, WIDTH), kind)


def encoders(cases: Cases) -> None:
    """Compute linear layers in int8."""
    codes = whole(-127, 128, np.int8)
    x = (floats(ROWS, WIDTH).view(np.uint32) >> 16).astype(np.uint16)
    out, scales = np.empty((ROWS, WIDTH), np.uint16), np.abs(floats(WIDTH))
    for variant in native.linear8_variants()[:-1]:
        packed = np.empty(native.linear8_packed_bytes(WIDTH, WIDTH, variant), np.int8)
        native.linear8_pack(weights=codes, packed=packed, variant=variant)

        def work(variant: str = variant, packed: np.ndarray = packed) -> None:
            native.linear8_apply(
                x=x,
                norm=None,
                packed=packed,
                scales=scales,
                bias=None,
                activation="none",
                residual=None,
                out=out,
                threads=1,
                variant=variant,
            )

        cases.count(f"int8, encoders|{variant}", ROWS * SQUARE, work)
    rows, columns = torch.from_numpy(codes[:ROWS].copy()), torch.from_numpy(codes)
    cases.count("int8, encoders|torch", ROWS * SQUARE, lambda: torch._int_mm(rows, columns))


def decoders(cases: Cases, rows: int) -> None:
    """Compute products of decoders, and those that torch has for the same number types."""
    kind = "a row" if rows == 1 else "rows"
    hidden, scores = floats(rows, WIDTH), np.empty((rows, WIDTH), np.float32)
    x, w = torch.from_numpy(hidden), torch.from_numpy(floats(WIDTH, WIDTH))
    half_x, half_w = x.bfloat16(), w.bfloat16()
    codes, scales = torch.from_numpy(whole(-127, 128, np.int8)), torch.ones(WIDTH)
    nibbles, pairs = torch.from_numpy(whole(0, 16, np.int32)), torch.ones(WIDTH // 32, WIDTH, 2)
    aten = torch.ops.aten
    by_torch: dict[str, Callable[[], object]] = {
        "float32": lambda: F.linear(x, w),
        "bfloat16": lambda: F.linear(half_x, half_w),
        "int8": lambda: aten._weight_int8pack_mm(x, codes, scales),
    }
    try:
        packed = aten._convert_weight_to_int4pack_for_cpu(nibbles, 2)
        by_torch["int4"] = lambda: aten._weight_int4pack_mm_for_cpu(x, packed, 32, pairs)
    except (RuntimeError, NotImplementedError):
        pass  # not on this processor
    for weights in ("float32", "bfloat16", "int8", "int4"):
        head = native.DecoderHead(
            weights=weights,
            stream="float32",
            hidden=WIDTH,
            tokens=WIDTH,
            norm_centred=False,
            eps=1e-6,
            scale=1.0,
            cap=0.0,
        )
        head.fill("weight", 0, w.numpy())
        name = f"{weights}, decoders, {kind}"
        for variant in native.decoder_variants()[:-1]:

            def work(head: native.DecoderHead = head, variant: str = variant) -> None:
                head.score(hidden, scores, threads=1, variant=variant)

            cases.count(f"{name}|{variant}", rows * SQUARE, work)
        if weights in by_torch:
            cases.count(f"{name}|torch", rows * SQUARE, by_torch[weights])


def attention(cases: Cases) -> None:
    """Compute the attention of a block of ViT-Base."""
    qkv, out = floats(1, TOKENS, 3 * HEADS * HEAD), np.empty((1, TOKENS, HEADS * HEAD), np.float32)
    multiply_adds = 2 * HEADS * TOKENS * TOKENS * HEAD

    def ours() -> None:
        native.attend(
            qkv=qkv, heads=HEADS, bias=None, distances=None, rotation=None, reach=None, out=out, threads=1
        )

    q, k, v = torch.from_numpy(qkv).view(1, TOKENS, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
    cases.count("attention, float32|native", multiply_adds, ours)
    cases.count(
        "attention, float32|torch",
        multiply_adds,
        lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous(),
    )


def main() -> None:
    """Compute all cases."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    cases = Cases()
    encoders(cases)
    attention(cases)
    decoders(cases, 1)
    decoders(cases, ROWS)
    print(json.dumps(cases.found))


if __name__ == "__main__":
    main()
