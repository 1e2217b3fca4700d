"""The layout of packed codes, bit by bit."""

from __future__ import annotations

import math

import numpy as np


def unpack(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Unpack codes of blocks of 2048 values in planes of 8, 4, 2, 1 bits, lowest plane first."""
    codes = np.zeros(count, dtype=np.int64)
    widths = [8, 8] if bits == 16 else [width for width in (8, 4, 2, 1) if bits & width]
    position = 0
    for start in range(0, count, 2048):
        size = min(2048, count - start)
        shift = 0
        for width in widths:
            stride = math.ceil(size * width / 8)
            plane = packed[position : position + stride].astype(np.int64)
            for index in range(size):
                part = plane[index % stride] >> (index // stride * width) & ((1 << width) - 1)
                codes[start + index] |= part << shift
            position += stride
            shift += width
    assert position == len(packed)
    return codes
