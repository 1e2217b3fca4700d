"""The unfinished output of a run, which keeps the rows as they come, so that a later run can go on from it.

    FILE.part    PipeEdge unfinished output 1
                 {"the model": "vit of ...", "the input": "3f0a...", ...}    what the rows depend on
                 ┌────────┬─────────┬───────┬──────┬─────────┐
                 │ length │ length  │ crc32 │ meta │ payload │              one record a microbatch
                 │ of meta│ of both │       │ JSON │  rows   │
                 └────────┴─────────┴───────┴──────┴─────────┘ ...

A record is appended by a single write, and counts if its checksum is right. So rows are whole or not there,
when a process is killed, the disk is full, or the power fails: a record that did not reach the disk ends the
file. The process that uses the file holds a lock on it, which ends with the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from msgspec import Struct

from pipeedge.base.errors import RequestError
from pipeedge.base.fields import MALFORMED, Count, encode, reader
from pipeedge.base.wording import printable

__all__ = ["Found", "Rows", "UnfinishedOutput", "find_unfinished", "unfinished_path"]

_MAGIC = b"PipeEdge unfinished output 1\n"
_MAX_HEADER = 1 << 16
_HEAD = struct.Struct("<IQI")
_LENGTHS = 12
"""Bytes of the head that precede the checksum, which covers them."""


class Rows(Struct, frozen=True):
    """Description of the rows of one microbatch."""

    numbers: tuple[Count, ...]
    """Position of each item in the input."""
    labels: tuple[int, ...]
    """True class of each item, negative if not known."""
    count: Count = 0
    """Number of rows of an array."""
    shape: tuple[Count, ...] = ()
    """Shape of a row of an array."""
    tokens: tuple[Count, ...] = ()
    """Number of tokens of each item, where each has a class."""


_read_rows = reader(Rows)


@dataclass(frozen=True)
class Found:
    """Results that an earlier run has left, locked until ``close``.

    The last record is computed again, so that there is always something to run.
    """

    path: Path
    stream: BinaryIO
    depends_on: Mapping[str, str]
    """Fingerprints of what the rows depend on."""
    start: int
    """Offset of the first record, in bytes."""
    end: int
    """Offset at which a run goes on, in bytes."""
    items: int
    """Number of items in all whole records."""
    kept_items: int
    """Number of these that are not computed again."""
    position: int
    """Position in the input at which a run goes on, if rows come in input order."""
    numbers: frozenset[int] = frozenset()
    """Positions of the items that are not computed again, if rows come in any order."""

    def close(self) -> None:
        """Release the lock, so that another run can take the file."""
        self.stream.close()


def unfinished_path(path: Path) -> Path:
    """Return the path of the unfinished output that will become ``path``."""
    return path.with_name(f"{path.name}.part")


def find_unfinished(path: Path) -> Found | None:
    """Return what an earlier run has left of the output ``path``, or None if there are no rows.

    Raises:
        RequestError: The file of that name is another one, is in use, or cannot be read.
    """
    part = unfinished_path(path)
    try:
        if not part.exists():
            return None
        stream = _locked(part)
        try:
            found = _survey(part, stream)
        except BaseException:
            stream.close()
            raise
    except OSError as error:
        raise RequestError(f"{part}: cannot be read ({error.strerror})") from error
    if not found.items:
        found.close()
        return None
    return found


def _survey(part: Path, stream: BinaryIO) -> Found:
    """Read all records."""
    start, depends_on = _read_header(stream, part)
    before = end = start
    position = previous_position = items = kept = 0
    numbers: list[int] = []
    for after, rows in _records(stream, start):
        before, end = end, after
        previous_position, position = position, rows.numbers[-1] + 1
        kept, items = items, items + len(rows.numbers)
        numbers += rows.numbers
    return Found(
        part, stream, depends_on, start, before, items, kept, previous_position, frozenset(numbers[:kept])
    )


def _read_header(stream: BinaryIO, part: Path) -> tuple[int, Mapping[str, str]]:
    """Return the offset of the first record, and what the rows depend on.

    Raises:
        RequestError: It is a file of another kind.
    """
    begin = stream.read(len(_MAGIC))
    if not _MAGIC.startswith(begin):
        raise RequestError(
            f"{printable(part)}: is not an unfinished output, which goes by this name; rename it"
        )
    line = stream.readline(_MAX_HEADER)
    try:
        found = json.loads(line)
    except ValueError:  # the process ended before it wrote the first row
        found = {}
    depends_on = found if isinstance(found, dict) else {}
    return stream.tell(), {str(key): str(value) for key, value in depends_on.items()}


def _records(stream: BinaryIO, offset: int) -> Iterator[tuple[int, Rows]]:
    """Yield the end and the description of each whole record; stop at the first that is not."""
    size = stream.seek(0, os.SEEK_END)
    while True:
        stream.seek(offset)
        head = stream.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        described, length, checksum = _HEAD.unpack(head)
        offset += _HEAD.size + length
        if offset > size:
            return
        body = stream.read(length)
        if zlib.crc32(body, zlib.crc32(head[:_LENGTHS])) != checksum:
            return
        try:
            rows = _read_rows(body[:described])
        except MALFORMED:
            return
        if not rows.numbers:
            return
        yield offset, rows


class UnfinishedOutput:
    """The unfinished output of this run. Create it with ``begin`` or ``go_on``."""

    def __init__(self, path: Path, stream: BinaryIO, start: int) -> None:
        self._path = path
        self._stream = stream
        self._start = start
        self._end = stream.seek(0, os.SEEK_END)

    @classmethod
    def begin(cls, path: Path, depends_on: Mapping[str, str]) -> UnfinishedOutput:
        """Begin the unfinished output of ``path``, in place of what an earlier run has left.

        Raises:
            RequestError: Another process is writing it.
            OSError: It cannot be written.
        """
        part = unfinished_path(path)
        stream = _locked(part)
        try:
            stream.truncate(0)
            _write(stream, _MAGIC + json.dumps(dict(depends_on)).encode() + b"\n")
            return cls(part, stream, stream.tell())
        except OSError:
            stream.close()
            raise

    @classmethod
    def go_on(cls, found: Found) -> UnfinishedOutput:
        """Go on with what an earlier run has left.

        Raises:
            OSError: It cannot be written.
        """
        found.stream.truncate(found.end)
        return cls(found.path, found.stream, found.start)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows."""
        return self._end == self._start

    def append(self, rows: Rows, payload: bytes) -> None:
        """Append the rows of one microbatch.

        Raises:
            OSError: They cannot be written.
        """
        described = encode(rows)
        length = len(described) + len(payload)
        lengths = _HEAD.pack(len(described), length, 0)[:_LENGTHS]
        checksum = zlib.crc32(payload, zlib.crc32(described, zlib.crc32(lengths)))
        record = _HEAD.pack(len(described), length, checksum) + described + payload
        self._stream.seek(self._end)
        _write(self._stream, record)
        self._end += len(record)

    def rows(self) -> Iterator[Rows]:
        """Yield the description of the rows of each microbatch, as they were appended."""
        for rows, _, _ in self._survey():
            yield rows

    def payloads(self) -> Iterator[bytes]:
        """Yield the rows of each microbatch, as they were appended."""
        for _, offset, length in self._survey():
            yield self._payload(offset, length)

    def payloads_in_order(self) -> Iterator[bytes]:
        """Yield the rows of each microbatch, in the order of its first item in the input."""
        for _, offset, length in sorted((rows.numbers[0], *place) for rows, *place in self._survey()):
            yield self._payload(offset, length)

    def _survey(self) -> Iterator[tuple[Rows, int, int]]:
        """Yield the description of each record, with the offset and the size of its payload in bytes."""
        offset = self._start
        while offset < self._end:
            self._stream.seek(offset)
            described, length, _ = _HEAD.unpack(self._stream.read(_HEAD.size))
            rows = _read_rows(self._stream.read(described))
            offset += _HEAD.size
            yield rows, offset + described, length - described
            offset += length

    def _payload(self, offset: int, length: int) -> bytes:
        self._stream.seek(offset)
        return self._stream.read(length)

    def close(self) -> None:
        """Close the file; a later run can go on from it. Without rows, it is removed."""
        if self._stream.closed:
            return
        if self.is_empty:
            self.remove()
            return
        with suppress(OSError):
            self._stream.truncate(self._end)  # drop what a full disk took of a record
        self._stream.close()

    def remove(self) -> None:
        """Remove the file, whose rows nobody needs any longer."""
        self._path.unlink(missing_ok=True)
        self._stream.close()


def _write(stream: BinaryIO, data: bytes) -> None:
    """Write all of ``data``; a disk that is nearly full takes a part of it first."""
    left = memoryview(data)
    while left:
        left = left[stream.write(left) :]


def _locked(part: Path) -> BinaryIO:
    """Open a file for this process alone, whatever it contains.

    Raises:
        RequestError: Another process has it open.
        OSError: It cannot be opened.
    """
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Unbuffered, so that what has been written survives the end of the process.
        stream: Any = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            raise RequestError(
                f"{printable(part)}: another run is writing it; wait for it, or name another --output"
            ) from None
        except OSError:  # a file system without locks
            return cast(BinaryIO, stream)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), part.stat()):
                return cast(BinaryIO, stream)
        stream.close()  # the other run has finished and removed it meanwhile
