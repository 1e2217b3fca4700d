"""``.npz`` files: zip archives of ``.npy`` arrays, read header first with the data as a stream.

numpy reads a whole member, whatever size its header or the table of contents claims. Here nothing takes more
memory than what the caller asks for. Files that numpy would not write are refused: duplicate names,
compression other than stored or deflated, headers of unusual length.
"""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from pipeedge.base.errors import RequestError, one_line
from pipeedge.base.wording import excerpt

__all__ = ["ArrayHeader", "NpzArchive", "read_exactly"]

_LONGEST_NAME = 200
_LONGEST_REASON = 200
_SUFFIX = ".npy"
_MAX_HEADER_BYTES = 10_000
"""Limit that numpy sets too."""
_LENGTHS = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}
"""``struct`` format of the header length, by version of the ``.npy`` format."""
_LOCAL_HEADER_BYTES = 30
_LOCAL_EXTRA_BYTES = 192
"""Bytes for a larger extra field than that of the table of contents, and for the header of an array."""
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError),
    *(ValueError, OverflowError, struct.error),
)
"""Exceptions that ``zipfile`` raises for a damaged table or member, and for an encrypted one."""

_parsing = threading.Lock()
"""Held to parse: Python 3.11 may fail (SystemError) if threads do so at once while garbage is collected."""


@dataclass(frozen=True)
class ArrayHeader:
    """Header of one array in an archive, without its data."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    column_major: bool


class NpzArchive:
    """The arrays of one file, as a context manager.

    Args:
        path: Path of the file.
        error: Exception type raised for every error in the file.
        stream: The open file, if it is not to be opened by its path; it is closed with the archive.

    Raises:
        RequestError: Of type ``error``, if the file is not an archive, or one that numpy would not write.
    """

    def __init__(self, path: Path, error: type[RequestError], stream: io.RawIOBase | None = None) -> None:
        self._path = path
        self._error = error
        self._stream = None if stream is None else io.BufferedReader(stream)
        try:
            self._zip = zipfile.ZipFile(path if self._stream is None else self._stream)
        except zipfile.BadZipFile:
            raise error(
                f"{path} is not a complete .npz file (its table of contents, at the end, is missing): "
                "it is truncated or of another kind; fetch the file again"
            ) from None
        except OSError as failure:
            raise error(f"{path} cannot be read: {failure.strerror or failure}") from failure
        except _DAMAGE as failure:
            raise error(f"{path} is damaged ({one_line(failure)}); fetch the file again") from failure
        self.other_names = [name for name in self._zip.namelist() if not name.endswith(_SUFFIX)]
        """Names of members that are not arrays."""
        infos = [info for info in self._zip.infolist() if info.filename.endswith(_SUFFIX)]
        self.members = {info.filename.removesuffix(_SUFFIX): info for info in infos}
        """Entries of the table of contents, by array name."""
        if len(self.members) < len(infos):
            self._zip.close()
            (twice, _), *_ = Counter(info.filename for info in infos).most_common(1)
            raise error(f"{path} holds {excerpt(twice)} twice; write the file again")

    def __enter__(self) -> NpzArchive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._zip.close()
        if self._stream is not None:
            self._stream.close()

    def extent(self, name: str) -> tuple[int, int]:
        """Return the range of bytes of the file in which an array is, with its headers."""
        info = self.members[name]
        # The local header may have another extra field than the table of contents, and an npy header.
        header = _LOCAL_HEADER_BYTES + len(info.filename.encode()) + len(info.extra) + _LOCAL_EXTRA_BYTES
        return info.header_offset, info.header_offset + header + info.compress_size

    def header(self, name: str) -> ArrayHeader:
        """Read the shape and number type of an array."""
        with self._member(name) as stream:
            return self._read_header(name, stream)

    @contextmanager
    def data(self, name: str, *, to_the_end: bool = True) -> Iterator[IO[bytes]]:
        """Open a stream positioned at the first value of an array.

        Args:
            name: Name of the array.
            to_the_end: Whether the caller reads all of it, so that leftover bytes or a wrong checksum are
                reported as damage.
        """
        with self._member(name) as stream:
            self._read_header(name, stream)
            yield stream
            # The checksum is compared at the end of the member, which a deflated one may not have reached.
            if to_the_end and stream.read(1):
                raise self._error(f"{self._path} is damaged at {name}: it holds more than its header says")

    @contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        info = self.members[name]
        if info.compress_type not in _PACKINGS:
            raise self._error(
                f"{self._path}: {excerpt(name, _LONGEST_NAME)} is packed by zip method {info.compress_type}; "
                "np.savez and np.savez_compressed write what can be read"
            )
        try:
            with self._zip.open(info) as stream:
                yield stream
        except _DAMAGE as failure:
            raise self._error(
                f"{self._path} is damaged at {excerpt(name, _LONGEST_NAME)} "
                f"({excerpt(one_line(failure), _LONGEST_REASON)}); fetch the file again"
            ) from failure

    def _read_header(self, name: str, stream: IO[bytes]) -> ArrayHeader:
        start = bytes(read_exactly(stream, np.lib.format.MAGIC_LEN) or b"")
        kind = _LENGTHS.get((start[-2], start[-1])) if len(start) == np.lib.format.MAGIC_LEN else None
        prefix = bytes(read_exactly(stream, struct.calcsize(kind)) or b"") if kind else b""
        length = struct.unpack(kind, prefix)[0] if kind and prefix else None
        if length is None or length > _MAX_HEADER_BYTES:
            raise self._error(f"{self._path}: {excerpt(name, _LONGEST_NAME)} is not a readable array")
        text = io.BytesIO(start + prefix + bytes(read_exactly(stream, length) or b""))
        try:
            with _parsing, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                np.lib.format.read_magic(text)
                # Version 3 differs only in the encoding of field names, which no array here has.
                read = np.lib.format.read_array_header_1_0
                if start[-2] > 1:
                    read = np.lib.format.read_array_header_2_0
                shape, column_major, dtype = read(text)
        except Exception as failure:  # numpy parses foreign text as Python, and raises whatever that raises
            raise self._error(
                f"{self._path}: {excerpt(name, _LONGEST_NAME)} is not a readable array"
            ) from failure
        if any(isinstance(side, bool) or side < 0 for side in shape):
            raise self._error(f"{self._path}: {excerpt(name, _LONGEST_NAME)} is not a readable array")
        return ArrayHeader(shape, dtype, column_major and len(shape) > 1)


def read_exactly(stream: IO[bytes], size: int) -> bytearray | None:
    """Read ``size`` bytes, or return None if the stream ends first."""
    data = bytearray()
    while len(data) < size:
        piece = stream.read(size - len(data))
        if not piece:
            return None
        data += piece
    return data
