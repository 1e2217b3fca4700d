"""The header of a GGUF file: settings by name, and where each tensor is.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: ``GGUF``, version, counts; pairs of names and
values; names, shapes, types and offsets of tensors; then, aligned, their data. Nothing of it is trusted: a
count or a length is compared with what is left of the file before anything of that size is read.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from pipeedge.base.errors import WeightsError
from pipeedge.base.wording import excerpt

__all__ = ["GGUF_SUFFIX", "MAGIC", "Form", "GgufHeader", "StoredTensor", "Texts", "read_gguf_header"]

MAGIC = b"GGUF"
GGUF_SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_MOST_PAIRS = 1 << 16
_MOST_TENSORS = 1 << 18
_MOST_DIMENSIONS = 4
_MOST_VALUES = 1 << 40
_MOST_HEADER_BYTES = 512 << 20
_LONGEST_NAME = 1 << 12
_LARGEST_ALIGNMENT = 1 << 20
_ALIGNMENT = 32
_FIRST_READ = 1 << 20
_SHOWN = 60
_NUMBERS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
"""Types of values that are single numbers, as ``struct`` calls them."""
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class Form:
    """A form of the values of a tensor: plain numbers, or units of codes with their scales."""

    name: str
    values: int
    """Number of values of a unit."""
    bytes: int
    """Size of a unit in bytes."""


_FORMS: Mapping[int, Form] = MappingProxyType(
    {
        0: Form("F32", 1, 4),
        1: Form("F16", 1, 2),
        2: Form("Q4_0", 32, 18),
        3: Form("Q4_1", 32, 20),
        6: Form("Q5_0", 32, 22),
        7: Form("Q5_1", 32, 24),
        8: Form("Q8_0", 32, 34),
        10: Form("Q2_K", 256, 84),
        11: Form("Q3_K", 256, 110),
        12: Form("Q4_K", 256, 144),
        13: Form("Q5_K", 256, 176),
        14: Form("Q6_K", 256, 210),
        16: Form("IQ2_XXS", 256, 66),
        17: Form("IQ2_XS", 256, 74),
        18: Form("IQ3_XXS", 256, 98),
        19: Form("IQ1_S", 256, 50),
        20: Form("IQ4_NL", 32, 18),
        21: Form("IQ3_S", 256, 110),
        22: Form("IQ2_S", 256, 82),
        23: Form("IQ4_XS", 256, 136),
        28: Form("F64", 1, 8),
        29: Form("IQ1_M", 256, 56),
        30: Form("BF16", 1, 2),
        39: Form("MXFP4", 32, 17),
    }
)
"""Forms by their numbers in files."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is, and in which form."""

    shape: tuple[int, ...]
    """Sizes as PyTorch has them, rows first."""
    form: Form
    start: int
    """Number of its first byte in the file."""
    stop: int
    """Number behind that of its last byte."""


@dataclass(frozen=True)
class Texts:
    """Texts of a header, such as a vocabulary, which become strings when they are asked for."""

    data: bytes
    """Each with its length before it."""
    number: int

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[str]:
        place = 0
        for _ in range(self.number):
            (length,) = struct.unpack_from("<Q", self.data, place)
            yield self.data[place + 8 : place + 8 + length].decode(errors="replace")
            place += 8 + length


@dataclass(frozen=True)
class GgufHeader:
    """All of a file but the data of its tensors."""

    path: Path
    settings: Mapping[str, object]
    """Values by name: numbers, texts, and sequences of either."""
    tensors: Mapping[str, StoredTensor]
    raw: bytes
    """The header as it is in the file."""

    def floats(self, name: str) -> tuple[float, ...] | None:
        """Return the values of a small tensor in float32, or None if there is none of that name.

        Raises:
            WeightsError: It is in another form, or not small.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        count = math.prod(tensor.shape)
        if tensor.form.name != "F32" or count > _LONGEST_NAME:
            raise WeightsError(f"{self.path}: {name} is not a short list of float32")
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            data = file.read(4 * count)
        if len(data) < 4 * count:
            raise _truncated(self.path)
        return struct.unpack(f"<{count}f", data)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file, and compare the places of its tensors with its length.

    Raises:
        WeightsError: The file cannot be read, is truncated, or has a header that cannot be right.
    """
    try:
        with path.open("rb") as file:
            return _Reading(path, file).header()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error


def _truncated(path: Path) -> WeightsError:
    return WeightsError(f"{path} is truncated within its header; fetch the file again")


class _Reading:
    """Reads a header from the first byte to the last.

    Args:
        path: Path of the file, for messages.
        file: The file, open at its beginning.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size
        self._data = bytearray()
        self._place = 0

    def header(self) -> GgufHeader:
        """Return all of it."""
        magic, version = self._take("<4sI")
        if magic != MAGIC:
            raise WeightsError(f"{self._path} is not a GGUF file")
        if version not in _VERSIONS:
            turned = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "of a big-endian machine" if turned in _VERSIONS else f"of version {version}"
            raise WeightsError(f"{self._path} is a GGUF file {kind}; versions 2 and 3 are read")
        tensor_count, pair_count = self._take("<QQ")
        if pair_count > _MOST_PAIRS or tensor_count > _MOST_TENSORS:
            raise self._wrong(f"it counts {pair_count} settings and {tensor_count} tensors")
        settings: dict[str, object] = {}
        for _ in range(pair_count):
            name = self._name()
            if name in settings:
                raise self._wrong(f"{excerpt(name, _SHOWN)} is given twice")
            (kind,) = self._take("<I")
            settings[name] = self._value(kind, name)
        alignment = settings.get("general.alignment", _ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= _LARGEST_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._wrong(f"general.alignment is {excerpt(repr(alignment), _SHOWN)}")
        found = [self._tensor() for _ in range(tensor_count)]
        start = -(-self._place // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, form, offset in found:
            if name in tensors:
                raise self._wrong(f"{excerpt(name, _SHOWN)} is given twice")
            if offset % alignment:
                raise self._wrong(f"the offset of {excerpt(name, _SHOWN)} is not a multiple of {alignment}")
            size = math.prod(shape) // form.values * form.bytes
            tensors[name] = StoredTensor(shape, form, start + offset, start + offset + size)
        self._check_places(tensors)
        return GgufHeader(self._path, settings, tensors, bytes(self._data[: self._place]))

    def _check_places(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Check that no two tensors share bytes, and that the file has all of them."""
        order = sorted(tensors.items(), key=lambda item: item[1].start)
        for (one, first), (other, second) in itertools.pairwise(order):
            if second.start < first.stop:
                raise self._wrong(f"{excerpt(one, _SHOWN)} and {excerpt(other, _SHOWN)} have the same bytes")
        for name, tensor in order:
            if tensor.stop > self._size:
                raise WeightsError(
                    f"{self._path} is truncated: {self._size} bytes of {order[-1][1].stop}, the first tensor "
                    f"cut off is {excerpt(name, _SHOWN)}, shape {list(tensor.shape)}; fetch the file again"
                )

    def _tensor(self) -> tuple[str, tuple[int, ...], Form, int]:
        name = self._name()
        (dimensions,) = self._take("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._wrong(f"{excerpt(name, _SHOWN)} has {dimensions} dimensions")
        sizes = self._take(f"<{dimensions}Q")
        kind, offset = self._take("<IQ")
        form = _FORMS.get(kind)
        if form is None:
            raise WeightsError(
                f"{self._path}: {excerpt(name, _SHOWN)} is of type number {kind}, which is unknown"
            )
        if 0 in sizes or math.prod(sizes) > _MOST_VALUES or sizes[0] % form.values:
            raise self._wrong(
                f"{excerpt(name, _SHOWN)} cannot have the shape {list(reversed(sizes))} in {form.name}"
            )
        return name, tuple(reversed(sizes)), form, offset

    def _value(self, kind: int, name: str) -> object:
        if kind in _NUMBERS:
            return self._take("<" + _NUMBERS[kind])[0]
        if kind == _TEXT:
            (length,) = self._take("<Q")
            return self._bytes(length).decode(errors="replace")
        if kind != _ARRAY:
            raise self._wrong(f"{excerpt(name, _SHOWN)} has a value of type {kind}")
        element, count = self._take("<IQ")
        if element in _NUMBERS:
            size = struct.calcsize("<" + _NUMBERS[element])
            return struct.unpack(f"<{count}{_NUMBERS[element]}", self._bytes(size * count))
        if element != _TEXT:
            raise self._wrong(f"{excerpt(name, _SHOWN)} is a list of values of type {element}")
        return self._texts(count)

    def _texts(self, count: int) -> Texts:
        self._need(8 * count)
        begin = self._place
        for _ in range(count):
            self._need(8)
            (length,) = struct.unpack_from("<Q", self._data, self._place)
            self._need(8 + length)
            self._place += 8 + length
        return Texts(bytes(self._data[begin : self._place]), count)

    def _name(self) -> str:
        (length,) = self._take("<Q")
        if not 0 < length <= _LONGEST_NAME:
            raise self._wrong(f"a name has {length} bytes")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError:
            raise self._wrong("a name is not UTF-8") from None

    def _take(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))

    def _bytes(self, count: int) -> bytes:
        self._need(count)
        self._place += count
        return bytes(self._data[self._place - count : self._place])

    def _need(self, count: int) -> None:
        """Read on until so many bytes from the present place are there."""
        end = self._place + count
        if end > self._size:
            raise _truncated(self._path)
        if end > _MOST_HEADER_BYTES:
            raise self._wrong(f"it is longer than {_MOST_HEADER_BYTES >> 20} MB")
        while len(self._data) < end:
            more = self._file.read(max(_FIRST_READ, end - len(self._data), len(self._data)))
            if not more:
                raise _truncated(self._path)
            self._data += more

    def _wrong(self, why: str) -> WeightsError:
        return WeightsError(f"{self._path} is not a valid GGUF file: {why}")
