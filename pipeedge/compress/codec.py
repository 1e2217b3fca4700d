"""Encoding and decoding of one tensor by the native codec (``src-native/codec/codec.hpp``).

    row of values   x x x x ...     a token, an item, or the whole tensor
    transform       y y y y ...     if there is one: the values below are these
    its range       scale, offset   y' = offset + code * scale,   code = 0 ... 2^bits - 1

The codes of all rows form one bit string, packed without gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pipeedge import _native as native
from pipeedge.base.errors import PipeEdgeError
from pipeedge.compress.clamping import WHOLE_RANGE, Levels
from pipeedge.compress.sizes import COMPRESSIBLE, Granularity, packed_bytes, row_count
from pipeedge.compress.transform import Transform

__all__ = [
    "EncodedTensor",
    "Granularity",
    "NonFiniteError",
    "as_array",
    "decode_tensor",
    "encode_tensor",
    "error_bound",
    "is_compressible",
]

_COMPRESSIBLE = tuple(getattr(torch, name) for name in COMPRESSIBLE)


class NonFiniteError(PipeEdgeError):
    """A tensor contains NaN or infinity, which no code can represent."""


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor in encoded form."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    granularity: Granularity
    codes: torch.Tensor
    """Codes, one-dimensional uint8 of ``packed_bytes``."""
    ranges: torch.Tensor
    """Ranges, float32 (2, rows): scales, then offsets."""
    transform: Transform | None = None
    """Transform of the rows that were quantised, or None if they are the tensor's own."""

    @property
    def bytes(self) -> int:
        """Size of codes and ranges in bytes."""
        return self.codes.numel() + 4 * self.ranges.numel()


def is_compressible(dtype: torch.dtype) -> bool:
    """Return whether tensors of ``dtype`` can be encoded. Masks and indices, which are exact, cannot."""
    return dtype in _COMPRESSIBLE


def encode_tensor(
    tensor: torch.Tensor,
    bits: int,
    levels: Levels = WHOLE_RANGE,
    granularity: Granularity = Granularity.TOKEN,
    transform: Transform | None = None,
) -> EncodedTensor:
    """Encode ``tensor``.

    Args:
        tensor: Tensor of any shape on the CPU: float32, bfloat16, or float16, which is decoded as float32.
        bits: Bits a value, 2 to 8 or 16.
        levels: Range of a row's values that the codes cover; values outside are clamped to it.
        granularity: Part of the tensor that has its own range.
        transform: Transform of each row before it is quantised. A tensor with values beyond 1e34, where its
            sums may overflow, is encoded without.

    Raises:
        NonFiniteError: The tensor contains NaN or infinity. The message names the row.
        ValueError: The number type or the bits are not supported.
    """
    if not is_compressible(tensor.dtype):
        raise ValueError(f"a tensor of {tensor.dtype} cannot be encoded")
    if tensor.dtype is torch.float16:
        tensor = tensor.float()
    shape = tuple(tensor.shape)
    rows = row_count(shape, granularity)
    codes = torch.empty(packed_bytes(tensor.numel(), bits), dtype=torch.uint8)
    ranges = torch.empty((2, rows), dtype=torch.float32)
    bad_row = native.encode(
        values=as_array(tensor.detach().contiguous()),
        rows=rows,
        bits=bits,
        low=levels.low,
        high=levels.high,
        codes=codes.numpy(),
        ranges=ranges.numpy(),
        block=transform.block if transform else 0,
        seed=transform.seed if transform else 0,
    )
    if bad_row is not None and transform is not None:
        return encode_tensor(tensor, bits, WHOLE_RANGE, granularity)
    if bad_row is not None:
        raise NonFiniteError(f"row {bad_row} of {rows} holds NaN or infinity")
    return EncodedTensor(shape, tensor.dtype, bits, granularity, codes, ranges, transform)


def decode_tensor(encoded: EncodedTensor) -> torch.Tensor:
    """Decode the tensor, up to the quantisation error."""
    tensor = torch.empty(encoded.shape, dtype=encoded.dtype)
    native.decode(
        codes=encoded.codes.numpy(),
        ranges=encoded.ranges.numpy(),
        bits=encoded.bits,
        values=as_array(tensor),
        block=encoded.transform.block if encoded.transform else 0,
        seed=encoded.transform.seed if encoded.transform else 0,
    )
    return tensor


def error_bound(encoded: EncodedTensor) -> torch.Tensor:
    """Return the largest possible error of a value in each row, float64 (rows,).

    The bound is half a step, plus the rounding of single precision: 2^-21 of the row's range and 2^-23 of its
    largest value (2^-8 if the result is bfloat16). It holds for values between the lowest and the highest
    level, which are all of them without clamping. Other values become the nearest level, and their error may
    exceed the bound by their distance from it. Without clamping a step is (max - min) / (2^bits - 1).

    With a transform, all this is about the transformed row, and so is the step. The inverse keeps the norm of
    the errors: their root mean square over a row has this bound, with another 2^-19 of the largest value for
    the roundings of sums. A single value may have all of it, sqrt(length) times as much, which is returned.
    """
    scale, offset = encoded.ranges[0].double(), encoded.ranges[1].double()
    top: int = 2**encoded.bits - 1
    largest = torch.maximum(offset.abs(), (offset + top * scale).abs())
    rounding = 2.0**-23 if encoded.dtype is torch.float32 else 2.0**-8
    bound = scale * (0.5 + top * 2.0**-21) + largest * rounding + (top + 1) * 2.0**-149
    if encoded.transform is None:
        return bound
    length = math.prod(encoded.shape) / max(scale.numel(), 1)
    return math.sqrt(length) * (bound + largest * 2.0**-19 + 2.0**-145)


def as_array(tensor: torch.Tensor) -> Any:
    """Return the memory of ``tensor`` as the native codec expects it: float32, or the bits of bfloat16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
