"""Test frames: they read back as written, and damaged ones are refused."""

from __future__ import annotations

import math
import mmap
import random
import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import rounds

from pipeedge.base.payload import TensorSpec
from pipeedge.transport.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    MAX_DIMS,
    MAX_TENSORS,
    Frame,
    FrameBuffer,
    FrameError,
    Kind,
    frame_capacity,
    read_frame,
    write_frame,
)

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
]
PRELUDE = "<4sHBBQQII"
DESCRIPTOR = "<BB6xQ6Q"
FUZZ_ROUNDS = rounds(1500)
"""Hostile headers that a fuzz test reads."""


def header(
    descriptors: list[tuple[int, int, int, tuple[int, ...]]],
    *,
    magic: bytes = b"PEDG",
    version: int = 1,
    kind: int = 1,
    count: int | None = None,
    number: int = 0,
    length: int = HEADER_BYTES,
    items: int = 1,
    crc: int | None = None,
) -> bytes:
    """Return the header of a frame with any content, by default with the right checksum."""
    packed = b"".join(
        struct.pack(DESCRIPTOR, code, ndim, offset, *(tuple(dims) + (0,) * 6)[:6])
        for code, ndim, offset, dims in descriptors
    )
    fields = (magic, version, kind, len(descriptors) if count is None else count, number, length, items)
    right = zlib.crc32(packed, zlib.crc32(struct.pack(PRELUDE, *fields, 0)))
    return struct.pack(PRELUDE, *fields, right if crc is None else crc) + packed


def buffer_of(data: bytes, capacity: int) -> torch.Tensor:
    buffer = torch.zeros(capacity, dtype=torch.uint8)
    buffer[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return buffer


def resealed(data: bytearray) -> bytes:
    """Return ``data`` with the checksum of its present header."""
    count = min(data[7], MAX_TENSORS)
    bare = bytes(data[:28]) + bytes(4)
    crc = zlib.crc32(bytes(data[32 : 32 + 64 * count]), zlib.crc32(bare))
    return bytes(data[:28]) + struct.pack("<I", crc) + bytes(data[32:])


@st.composite
def payloads(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    shapes = st.lists(st.integers(0, 4), max_size=MAX_DIMS).map(tuple)
    tensors = []
    for _ in range(draw(st.integers(0, MAX_TENSORS))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
        values = torch.randint(0, 255, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
        if dtype is torch.bool:
            values = values % 2
        tensor = values.view(dtype).view(shape)
        if draw(st.booleans()) and tensor.dim() > 1:
            tensor = tensor.transpose(0, -1)  # not contiguous
        tensors.append(tensor)
    return tuple(tensors)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.contiguous().flatten().view(torch.uint8).tolist()
        == other.contiguous().flatten().view(torch.uint8).tolist()
    )


@settings(max_examples=150)
@given(payloads(), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 200))
def test_written_frame_is_read_back_bit_for_bit(
    payload: tuple[torch.Tensor, ...], number: int, items: int, spare: int
) -> None:
    specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in payload)
    buffer = torch.full((frame_capacity(specs) + spare,), 0xAB, dtype=torch.uint8)
    length = write_frame(buffer, kind=Kind.MICROBATCH, number=number, items=items, payload=payload)
    assert length == frame_capacity(specs)
    frame = read_frame(buffer)
    assert (frame.kind, frame.number, frame.items, frame.length) == (Kind.MICROBATCH, number, items, length)
    assert len(frame.payload) == len(payload)
    assert all(map(same_bits, frame.payload, payload))
    for tensor in frame.payload:
        assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert (tensor.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0 or tensor.numel() == 0
        assert tensor.is_contiguous()
    assert bool((buffer[length:] == 0xAB).all())


def test_a_buffer_from_the_allocator_gives_aligned_tensors() -> None:
    payload = (torch.ones(3, 5), torch.ones(7, dtype=torch.int8), torch.zeros(2, 2, dtype=torch.int64))
    specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in payload)
    buffer = torch.empty(frame_capacity(specs), dtype=torch.uint8)
    write_frame(buffer, kind=Kind.MICROBATCH, number=0, items=1, payload=payload)
    assert [tensor.data_ptr() % ALIGNMENT for tensor in read_frame(buffer).payload] == [0, 0, 0]


def test_an_end_mark_is_as_long_as_the_header() -> None:
    buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    assert write_frame(buffer, kind=Kind.END, number=7) == HEADER_BYTES == frame_capacity(())
    assert read_frame(buffer) == Frame(Kind.END, 7, 0, (), HEADER_BYTES)


@pytest.mark.parametrize(
    "payload",
    [
        (torch.zeros(1),) * (MAX_TENSORS + 1),
        (torch.zeros((1,) * (MAX_DIMS + 1)),),
        (torch.zeros(1, dtype=torch.complex64),),
        (torch.zeros(4096),),
    ],
    ids=["tensors", "dimensions", "dtype", "capacity"],
)
def test_payload_beyond_the_capacity_is_refused(payload: tuple[torch.Tensor, ...]) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(ValueError, match="frame"):
        write_frame(buffer, kind=Kind.MICROBATCH, number=0, items=1, payload=payload)
    assert not buffer.any()


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a frame"),
        (b"GET / HTTP/1.1\r\n\r\n", "another program"),
        (header([], version=2), "version 2, but this program uses 1"),
        (header([], count=9), "9 tensors"),
        (header([], count=255), "255 tensors"),
        (header([], crc=1), "checksum"),
        (header([(1, 1, 576, (1,))], length=640, crc=1), "checksum"),
        (header([], kind=0), "kind 0"),
        (header([], kind=3), "kind 3"),
        (header([], length=0), "claims 0 bytes"),
        (header([], length=575), "claims 575 bytes"),
        (header([], length=1025), "agreed capacity is 1024"),
        (header([], length=HUGE), "agreed capacity is 1024"),
        (header([], length=640), "tensors take 576"),
        (header([(0, 1, 576, (1,))], length=640), "type code 0"),
        (header([(9, 1, 576, (1,))], length=640), "type code 9"),
        (header([(1, 7, 576, (1,))], length=640), "7 dimensions"),
        (header([(1, 255, 576, (1,))], length=640), "255 dimensions"),
        (header([(1, 1, 0, (1,))], length=640), "does not lie"),
        (header([(1, 1, 580, (1,))], length=640), "does not lie"),
        (header([(1, 1, HUGE, (1,))], length=640), "does not lie"),
        (header([(1, 1, 576, (17,))], length=640), "does not lie"),
        (header([(1, 1, 576, (HUGE,))], length=640), "can have"),
        (header([(1, 1, 576, (2**62,))], length=640), "can have"),  # times 4 it is 0 modulo 2^64
        (header([(1, 2, 576, (2**32, 2**32))], length=640), "can have"),
        (header([(1, 6, 576, (HUGE,) * 6)], length=640), "can have"),
        (header([(1, 2, 576, (HUGE, 0))], length=576), "dimension"),
        (header([(1, 2, 576, (0, HUGE))], length=576), "dimension"),
        (header([(1, 3, 576, (2**62, 0, 2**62))], length=576), "dimension"),
        (header([(1, 1, 576, (1,)), (1, 1, 576, (1,))], length=640), "tensor 1"),
        (header([(1, 1, 576, (1,))], length=1024), "tensors take 640"),
    ],
)
def test_a_hostile_header_is_refused_with_a_message(data: bytes, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        read_frame(buffer_of(data, 1024))


@pytest.mark.parametrize("size", [0, 1, 31, 32, 95, 575])
def test_a_truncated_frame_is_refused(size: int) -> None:
    whole = torch.zeros(1024, dtype=torch.uint8)
    write_frame(whole, kind=Kind.MICROBATCH, number=0, items=1, payload=(torch.ones(3),))
    with pytest.raises(FrameError, match=f"{size} were received"):
        read_frame(whole[:size])


def test_a_frame_cut_within_its_values_is_refused() -> None:
    whole = torch.zeros(1024, dtype=torch.uint8)
    length = write_frame(whole, kind=Kind.MICROBATCH, number=0, items=1, payload=(torch.ones(40),))
    for size in range(HEADER_BYTES, length):
        with pytest.raises(FrameError, match=f"claims {length} bytes"):
            read_frame(whole[:size])


def test_every_flipped_header_bit_is_detected() -> None:
    whole = torch.zeros(1024, dtype=torch.uint8)
    write_frame(whole, kind=Kind.MICROBATCH, number=5, items=2, payload=(torch.ones(2, 3), torch.ones(4)))
    for bit in range(8 * (32 + 2 * 64)):
        damaged = whole.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            read_frame(damaged)


class Hostile:
    """Headers with the right checksum, and numbers that are chosen to do harm."""

    EDGES = (0, 1, 2, 3, 7, 63, 64, 65, 448, 576, 640, 1024, 1025, 2**31, 2**32 - 1, 2**32, 2**61, 2**62)
    MORE = (2**63 - 1, 2**63, HUGE)

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        valid = torch.zeros(1024, dtype=torch.uint8)
        length = write_frame(
            valid,
            kind=Kind.MICROBATCH,
            number=3,
            items=2,
            payload=(torch.ones(2, 3), torch.ones(4, dtype=torch.int8)),
        )
        self._valid = bytes(valid[:length].tolist())

    def number(self) -> int:
        if self._random.random() < 0.2:
            return self._random.getrandbits(64)
        return self._random.choice(self.EDGES + self.MORE)

    def built(self) -> bytes:
        """Build a header field by field."""
        offset = HEADER_BYTES
        descriptors: list[Any] = []
        for _ in range(self._random.randrange(4)):
            ndim = self._random.randrange(8)
            dims = tuple(self.number() for _ in range(min(ndim, 6)))
            descriptors.append(
                (self._random.randrange(10), ndim, self._random.choice([offset, self.number()]), dims)
            )
            offset += min(-(-math.prod(dims) * 4 // 64) * 64, 448)
        return header(
            descriptors,
            kind=self._random.choice([1, 2, self._random.randrange(256)]),
            number=self.number(),
            length=self._random.choice([offset, self.number()]),
            items=self._random.getrandbits(32),
        )

    def mutated(self) -> bytes:
        """Return a valid frame with changed bytes in its header, half of the time with a new checksum."""
        data = bytearray(self._valid)
        for _ in range(self._random.randrange(1, 5)):
            data[self._random.randrange(32 + 2 * 64)] = self._random.randrange(256)
        return resealed(data) if self._random.random() < 0.5 else bytes(data)

    def noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(HEADER_BYTES))


@pytest.mark.parametrize("what", ["built", "mutated", "noise"])
def test_reader_refuses_every_random_header(what: str) -> None:
    """A hostile frame is refused or gives views within the buffer; there is no other exception."""
    hostile = Hostile(20)
    capacity = 1024
    accepted = 0
    used_again = FrameBuffer(capacity)  # keeps the layout of the frame before, which must not matter
    for _ in range(FUZZ_ROUNDS // 3):
        data = getattr(hostile, what)()
        buffer = buffer_of(data[:capacity], capacity)
        used_again.memory.copy_(buffer)
        start, stop = buffer.data_ptr(), buffer.data_ptr() + capacity
        try:
            frame = read_frame(buffer)
        except FrameError:
            with pytest.raises(FrameError):
                used_again.read()
            continue
        again = used_again.read()
        assert (again.kind, again.number, again.items, again.length) == (
            frame.kind,
            frame.number,
            frame.items,
            frame.length,
        )
        assert [(t.dtype, t.shape, t.storage_offset()) for t in again.payload] == [
            (t.dtype, t.shape, t.storage_offset()) for t in frame.payload
        ]
        accepted += 1
        assert HEADER_BYTES <= frame.length <= capacity
        for tensor in frame.payload:
            assert tensor.untyped_storage().data_ptr() == start  # a view: nothing was allocated
            if tensor.numel():
                first = tensor.data_ptr()
                assert start + HEADER_BYTES <= first
                assert first + tensor.numel() * tensor.element_size() <= stop
    if what != "noise":
        assert accepted, "the fuzz never gets past the first checks"


def test_memory_of_frames_lies_apart_from_the_heap() -> None:
    """Frames stay, and would divide the memory that activations use in turn."""
    assert FrameBuffer(1 << 20).memory.data_ptr() % mmap.PAGESIZE == 0
