"""Frames: one microbatch as one typed, sized, checksummed message. Pure: bytes in, values out.

    0        4        6    7    8          16         24      28      32
    +--------+--------+----+----+----------+----------+-------+-------+
    | "PEDG" | version|kind| n  | number   | length   | items | crc32 |   prelude, 32 bytes
    +--------+--------+----+----+----------+----------+-------+-------+
    | dtype ndim . . . . . . | offset | dims[6] ...                   |   n descriptors of 64 bytes,
    +----------------------------------------------------------------+   always room for 8
    | tensor 0 (aligned to 64) | tensor 1 (aligned to 64) | ...       |   from byte 576 on
    +----------------------------------------------------------------+

All numbers are little-endian. ``length`` is the length of the whole frame. A receiver's buffer may be larger:
its capacity is agreed at start-up, and everything is checked against that capacity before it is used. The
checksum covers prelude and descriptors, but not the values: TCP has its own checksum, and only a misread
header could do harm. There is no pickle, and nothing is allocated by what a header says. Tensors are aligned
so that kernels that read them in place behave as they do on memory of their own.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from mmap import ACCESS_COPY, mmap
from types import MappingProxyType
from typing import NamedTuple

import torch

from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import Payload, TensorSpec

__all__ = [
    "HEADER_BYTES",
    "Frame",
    "FrameBuffer",
    "FrameError",
    "FrameHeader",
    "Kind",
    "frame_capacity",
    "read_frame",
    "write_frame",
]

MAGIC = b"PEDG"
VERSION = 1
MAX_TENSORS = 8
MAX_DIMS = 6
ALIGNMENT = 64

_PRELUDE = struct.Struct("<4sHBBQQII")
_CRC = struct.Struct("<I")
_CRC_AT = _PRELUDE.size - _CRC.size
_NO_CRC = bytes(_CRC.size)
"""Bytes in place of the checksum while it is computed."""
_DESCRIPTOR = struct.Struct("<BB6xQ6Q")
HEADER_BYTES = 576
"""Offset of the first tensor: prelude and all descriptors, rounded up to the alignment."""

_MAX_EXTENT = 1 << 59
"""Largest number of values, for which strides in bytes still fit signed 64-bit numbers."""

_DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.float16,
    3: torch.bfloat16,
    4: torch.int64,
    5: torch.int32,
    6: torch.uint8,
    7: torch.int8,
    8: torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class FrameError(PeerFailedError):
    """Received bytes are not a valid frame of this protocol."""


class Kind(IntEnum):
    """Kind of a frame."""

    MICROBATCH = 1
    END = 2


_KINDS: Mapping[int, Kind] = MappingProxyType({kind.value: kind for kind in Kind})


class Frame(NamedTuple):
    """A received frame; its tensors are views of the buffer it was read from."""

    kind: Kind
    number: int
    items: int
    payload: Payload
    length: int


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def frame_capacity(specs: tuple[TensorSpec, ...]) -> int:
    """Return the size in bytes of a frame that holds a payload of these ``specs``."""
    return HEADER_BYTES + sum(_aligned(spec.bytes) for spec in specs)


class FrameBuffer:
    """Reusable memory for one frame, either written and sent, or received and read.

    The microbatches of a link are nearly always alike, so the tensor layout is kept from one frame to the
    next. This saves more than time: each operation on a tensor releases the interpreter lock, and gets it
    back only when another thread releases it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Apart from the heap, where what stays would divide the memory that activations use in turn.
        self.memory = torch.frombuffer(mmap(-1, capacity, access=ACCESS_COPY), dtype=torch.uint8)
        self._bytes = self.memory.numpy().data
        self._written: tuple[tuple[tuple[torch.dtype, tuple[int, ...]], ...], _Layout] | None = None
        self._read: tuple[bytes, int, Payload] | None = None
        self._message = self.memory

    def message(self, length: int) -> torch.Tensor:
        """Return the first ``length`` bytes of the memory."""
        if self._message.numel() != length:
            self._message = self.memory[:length]
        return self._message

    def write(self, *, kind: Kind, number: int, items: int = 0, payload: Payload = ()) -> torch.Tensor:
        """Write a frame and return the part of the memory to send.

        Raises:
            ValueError: The payload does not fit the buffer or the protocol, which is a bug of the caller.
        """
        known = self._written
        # What ``place`` returned needs no comparison of shapes.
        layout = known[1] if known is not None and payload is known[1].views else self._layout(payload)
        header = _header(kind, number, items, layout)
        self._bytes[: len(header)] = header
        for target, tensor in zip(layout.views, payload, strict=True):
            if tensor is not target:
                target.copy_(tensor)
        return layout.message

    def place(self, specs: Sequence[TensorSpec]) -> Payload:
        """Return where a payload of ``specs`` will lie: if it is computed there, ``write`` need not copy it.

        Raises:
            ValueError: The payload does not fit the buffer or the protocol, which is a bug of the caller.
        """
        return self._layout(specs).views

    @property
    def view(self) -> memoryview:
        """The memory, for sockets."""
        return self._bytes

    def header(self) -> FrameHeader:
        """Return the header, which is received before the rest of the frame.

        Raises:
            FrameError: It is not the header of a frame that fits the memory.
        """
        return _check_header(bytes(self._bytes[:HEADER_BYTES]), self._capacity)

    def read(self, header: FrameHeader | None = None) -> Frame:
        """Return the frame that was received. Its tensors are views of the memory.

        Args:
            header: What ``header`` has returned for this frame, if it was called.

        Raises:
            FrameError: The memory does not contain a complete, consistent frame.
        """
        if header is None:
            header = self.header()
        known = self._read
        if known is None or known[0] != header.descriptors or known[1] != header.length:
            self._read = known = header.descriptors, header.length, _tensors(header, self.memory)
        return Frame(header.kind, header.number, header.items, known[2], header.length)

    def _layout(self, payload: Sequence[torch.Tensor | TensorSpec]) -> _Layout:
        key = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in payload)
        if self._written is None or self._written[0] != key:
            self._written = key, _Layout.of(payload, self.memory)
        return self._written[1]


def read_frame(buffer: torch.Tensor) -> Frame:
    """Return the frame at the start of ``buffer`` (1-dimensional, uint8). Tensors are views, not copies.

    Raises:
        FrameError: The buffer does not contain a complete, consistent frame.
    """
    header = _check_header(bytes(buffer[:HEADER_BYTES].numpy()), buffer.numel())
    return Frame(header.kind, header.number, header.items, _tensors(header, buffer), header.length)


def write_frame(
    buffer: torch.Tensor, *, kind: Kind, number: int, items: int = 0, payload: Payload = ()
) -> int:
    """Write a frame into ``buffer`` (1-dimensional, uint8) and return its length.

    Raises:
        ValueError: The payload does not fit the buffer or the protocol, which is a bug of the caller.
    """
    layout = _Layout.of(payload, buffer)
    header = _header(kind, number, items, layout)
    buffer.numpy().data[: len(header)] = header
    for target, tensor in zip(layout.views, payload, strict=True):
        target.copy_(tensor)
    return layout.length


@dataclass(frozen=True)
class _Layout:
    """Positions of a payload's tensors in a buffer."""

    descriptors: bytes
    views: Payload
    message: torch.Tensor
    """Part of the buffer that the frame takes."""
    length: int

    @classmethod
    def of(cls, payload: Sequence[torch.Tensor | TensorSpec], buffer: torch.Tensor) -> _Layout:
        if len(payload) > MAX_TENSORS:
            raise ValueError(f"a frame holds up to {MAX_TENSORS} tensors, not {len(payload)}")
        offset = HEADER_BYTES
        descriptors = bytearray()
        places: list[tuple[int, int]] = []
        for tensor in payload:
            shape = tuple(tensor.shape)
            if len(shape) > MAX_DIMS or tensor.dtype not in _CODES:
                raise ValueError(f"a frame cannot hold {tensor.dtype} of {len(shape)} dimensions")
            size = math.prod(shape) * tensor.dtype.itemsize
            dims = shape + (0,) * (MAX_DIMS - len(shape))
            descriptors += _DESCRIPTOR.pack(_CODES[tensor.dtype], len(shape), offset, *dims)
            places.append((offset, size))
            offset += _aligned(size)
        if offset > buffer.numel():
            raise ValueError(f"a frame of {offset} bytes does not fit the agreed {buffer.numel()}")
        views = tuple(
            buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
            for tensor, (start, size) in zip(payload, places, strict=True)
        )
        return cls(bytes(descriptors), views, buffer[:offset], offset)


def _header(kind: Kind, number: int, items: int, layout: _Layout) -> bytes:
    prelude = _PRELUDE.pack(MAGIC, VERSION, kind, len(layout.views), number, layout.length, items, 0)
    header = prelude + layout.descriptors
    return header[:_CRC_AT] + _CRC.pack(zlib.crc32(header)) + layout.descriptors


class FrameHeader(NamedTuple):
    """A header that is consistent and within the capacity."""

    kind: Kind
    number: int
    length: int
    items: int
    descriptors: bytes


def _check_header(header: bytes, capacity: int) -> FrameHeader:
    if capacity < HEADER_BYTES:
        raise FrameError(f"a frame needs at least {HEADER_BYTES} bytes, but {capacity} were received")
    magic, version, kind, count, number, length, items, crc = _PRELUDE.unpack_from(header)
    if magic != MAGIC:
        raise FrameError("received data is not a frame of this program: is another program on this port?")
    if version != VERSION:
        raise FrameError(f"the frame has protocol version {version}, but this program uses {VERSION}")
    if count > MAX_TENSORS:
        raise FrameError(f"the frame claims {count} tensors, but the protocol allows {MAX_TENSORS}")
    descriptors = header[_PRELUDE.size : _PRELUDE.size + count * _DESCRIPTOR.size]
    if zlib.crc32(header[:_CRC_AT] + _NO_CRC + descriptors) != crc:
        raise FrameError("the checksum of the frame's header does not match: it was damaged in transit")
    if kind not in _KINDS:
        raise FrameError(f"the frame has the unknown kind {kind}")
    if not HEADER_BYTES <= length <= capacity:
        raise FrameError(f"the frame claims {length} bytes, but the agreed capacity is {capacity}")
    return FrameHeader(_KINDS[kind], number, length, items, descriptors)


def _tensors(header: FrameHeader, buffer: torch.Tensor) -> Payload:
    payload = []
    expected = HEADER_BYTES
    fields = _DESCRIPTOR.iter_unpack(header.descriptors)
    for index, (code, ndim, offset, *dims) in enumerate(fields):
        dtype = _DTYPES.get(code)
        if dtype is None or ndim > MAX_DIMS:
            raise FrameError(f"tensor {index} of the frame has type code {code} and {ndim} dimensions")
        # Python integers do not overflow, so neither does the product of hostile dimensions.
        shape = dims[:ndim]
        size = math.prod(shape) * dtype.itemsize
        # Dimensions of 0 would hide any others from the product, but no tensor can have such others.
        if math.prod(max(dim, 1) for dim in shape) > _MAX_EXTENT:
            raise FrameError(f"tensor {index} of the frame ({shape}) has a dimension that no tensor can have")
        if offset != expected or offset + size > header.length:
            raise FrameError(
                f"tensor {index} of the frame ({shape}) does not lie within its {header.length} bytes"
            )
        payload.append(buffer[offset : offset + size].view(dtype).view(shape))
        expected = offset + _aligned(size)
    if expected != header.length:
        raise FrameError(f"the frame claims {header.length} bytes, but its tensors take {expected}")
    return tuple(payload)
