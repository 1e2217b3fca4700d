"""Compressed payloads as ordinary tensors. Pure functions.

    payload         hidden                skip                   mask
    on the wire     table | codes ranges | codes ranges         | mask
                    int64  uint8 float32   uint8 float32          bool

The table has a row for each tensor of the payload: bits (0: the tensor follows unencoded), granularity, type,
block of the transform (0: none) and its seed, number of dimensions, dimensions. Each microbatch describes its
own encoding, the bits may change from one to the next, and transports need not know about compression.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import Payload, TensorSpec
from pipeedge.base.schedule import BIT_WIDTHS
from pipeedge.compress.codec import EncodedTensor
from pipeedge.compress.sizes import COLUMNS, MAX_DIMS, Granularity, code_shapes, wire_shapes
from pipeedge.compress.transform import Transform

__all__ = ["WirePart", "from_wire", "to_wire", "wire_specs"]

WirePart: TypeAlias = torch.Tensor | EncodedTensor
"""A tensor sent unencoded, or its codes."""

_TYPES = {1: torch.float32, 3: torch.bfloat16}
_TYPE_CODES = {dtype: code for code, dtype in _TYPES.items()}
_MAX_ELEMENTS = 1 << 48
_NO_TRANSFORM = (0, 0)


def to_wire(parts: Sequence[WirePart]) -> Payload:
    """Return the tensors to send for ``parts``.

    Raises:
        ValueError: A tensor has more dimensions than the table has room for.
    """
    rows: list[list[int]] = []
    tensors: list[torch.Tensor] = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            rows.append([0] * COLUMNS)
            tensors.append(part)
            continue
        if len(part.shape) > MAX_DIMS:
            raise ValueError(f"a compressed tensor has up to {MAX_DIMS} dimensions, not {len(part.shape)}")
        dims = part.shape + (0,) * (MAX_DIMS - len(part.shape))
        transform = (part.transform.block, part.transform.seed) if part.transform else _NO_TRANSFORM
        code = _TYPE_CODES[part.dtype]
        rows.append([part.bits, part.granularity, code, *transform, len(part.shape), *dims])
        tensors += [part.codes, part.ranges]
    table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), COLUMNS)
    return (table, *tensors)


def from_wire(payload: Payload) -> tuple[WirePart, ...]:
    """Return the parts that ``to_wire`` was given. Everything is checked before use; nothing is copied.

    Raises:
        PeerFailedError: The payload is malformed.
    """
    if not payload or payload[0].dtype is not torch.int64 or payload[0].shape[1:] != (COLUMNS,):
        raise PeerFailedError("a payload on a compressed link does not begin with its table")
    rest = iter(payload[1:])
    parts = tuple(_part(row, rest) for row in payload[0].tolist())
    if next(rest, None) is not None:
        raise PeerFailedError("a payload on a compressed link has more tensors than its table says")
    return parts


def _part(row: list[int], rest: Iterator[torch.Tensor]) -> WirePart:
    bits, granularity, code, block, seed, ndim, *dims = row
    if bits == 0:
        return _next(rest)
    if bits not in BIT_WIDTHS or code not in _TYPES or not 0 <= ndim <= MAX_DIMS:
        raise PeerFailedError(f"a compressed tensor claims {bits} bits, type {code}, {ndim} dimensions")
    shape = tuple(dims[:ndim])
    if granularity not in tuple(Granularity) or min(shape, default=0) < 0:
        raise PeerFailedError(f"a compressed tensor claims granularity {granularity} and the shape {shape}")
    # Dimensions of 0 would hide any others from the product, but no tensor can have such others.
    if math.prod(max(dim, 1) for dim in shape) > _MAX_ELEMENTS:
        raise PeerFailedError(f"a compressed tensor claims the impossible shape {shape}")
    transform = _transform(block, seed)
    part = EncodedTensor(
        shape, _TYPES[code], bits, Granularity(granularity), _next(rest), _next(rest), transform
    )
    wanted = map(TensorSpec.of, code_shapes(TensorSpec(shape, part.dtype).named, bits, part.granularity))
    for tensor, spec in zip((part.codes, part.ranges), wanted, strict=True):
        if tensor.dtype is not spec.dtype or tuple(tensor.shape) != spec.shape:
            raise PeerFailedError(
                f"the codes of a tensor {shape} are {tensor.dtype} {tuple(tensor.shape)} instead of "
                f"{spec.dtype} {spec.shape}"
            )
    if not bool(torch.isfinite(part.ranges).all()):
        raise PeerFailedError(f"the ranges of a compressed tensor {shape} are not finite")
    return part


def _transform(block: int, seed: int) -> Transform | None:
    if (block, seed) == _NO_TRANSFORM:
        return None
    try:
        return Transform(block, seed)
    except ValueError as error:
        raise PeerFailedError(
            f"a compressed tensor claims a transform that does not exist: {error}"
        ) from None


def _next(rest: Iterator[torch.Tensor]) -> torch.Tensor:
    tensor = next(rest, None)
    if tensor is None:
        raise PeerFailedError("a payload on a compressed link has fewer tensors than its table says")
    return tensor


def wire_specs(
    specs: Sequence[TensorSpec], bits: int, granularity: Granularity = Granularity.TOKEN
) -> tuple[TensorSpec, ...]:
    """Return what ``sizes.wire_shapes`` does, as specifications of tensors."""
    shapes = wire_shapes([spec.named for spec in specs], bits, granularity)
    return tuple(map(TensorSpec.of, shapes))
