"""Shapes of what crosses a compressed link, without torch; ``wire`` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

from pipeedge.base.shapes import TensorShape

__all__ = [
    "COLUMNS",
    "COMPRESSIBLE",
    "MAX_DIMS",
    "Granularity",
    "code_shapes",
    "packed_bytes",
    "row_count",
    "wire_shapes",
]

COMPRESSIBLE = ("float32", "bfloat16", "float16")
"""Names of the number types of tensors that can be encoded."""
MAX_DIMS = 6
"""Largest number of dimensions of an encoded tensor."""
COLUMNS = 6 + MAX_DIMS
"""Number of columns of the table at the beginning of a payload."""


class Granularity(IntEnum):
    """The part of a tensor that has its own range."""

    TOKEN = 0
    """A range for each vector along the last dimension."""
    ITEM = 1
    """A range for each item of the microbatch: all but the first dimension."""
    TENSOR = 2
    """One range for the whole tensor."""


def row_count(shape: tuple[int, ...], granularity: Granularity) -> int:
    """Return the number of ranges of a tensor of ``shape``; 0 if it is empty."""
    elements = math.prod(shape)
    if not elements or granularity is Granularity.TENSOR or not shape:
        return min(elements, 1)
    return shape[0] if granularity is Granularity.ITEM else elements // shape[-1]


def packed_bytes(elements: int, bits: int) -> int:
    """Return the size in bytes of the codes of ``elements`` values.

    Raises:
        ValueError: ``bits`` is not one of 2 to 8 and 16.
    """
    from pipeedge import _native as native  # imports numpy

    return native.packed_bytes(elements, bits)


def wire_shapes(
    shapes: Sequence[TensorShape], bits: int, granularity: Granularity = Granularity.TOKEN
) -> tuple[TensorShape, ...]:
    """Return what crosses a link for payloads of ``shapes`` with ``bits`` bits a value (0: uncompressed).

    Raises:
        ValueError: ``bits`` is not 0, 2 to 8 or 16.
    """
    found = [TensorShape((len(shapes), COLUMNS), "int64")]
    for shape in shapes:
        encoded = bits and shape.dtype in COMPRESSIBLE
        found += code_shapes(shape, bits, granularity) if encoded else (shape,)
    return tuple(found)


def code_shapes(shape: TensorShape, bits: int, granularity: Granularity) -> tuple[TensorShape, TensorShape]:
    """Return the codes and the ranges of a tensor of ``shape``."""
    return (
        TensorShape((packed_bytes(shape.elements, bits),), "uint8"),
        TensorShape((2, row_count(shape.shape, granularity)), "float32"),
    )
