"""Shapes and number types of tensors by name: what planning needs to know of them, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

__all__ = ["Shape", "TensorShape", "shapes_bytes"]

Shape: TypeAlias = tuple[int, ...]

_WIDTHS: Mapping[str, int] = MappingProxyType(
    {"bool": 1, "uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}
)
"""Bytes of a value by the name of its number type."""


@dataclass(frozen=True)
class TensorShape:
    """Shape and number type of one tensor."""

    shape: Shape
    dtype: str
    """Name of the number type, as torch calls it."""

    @property
    def elements(self) -> int:
        """Number of values in the tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the values in bytes."""
        return self.elements * _WIDTHS[self.dtype]


def shapes_bytes(shapes: Iterable[TensorShape]) -> int:
    """Return the size in bytes of all tensors together."""
    return sum(shape.bytes for shape in shapes)
