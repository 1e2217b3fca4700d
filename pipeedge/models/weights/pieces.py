"""Files of weights of which some pieces are on this machine; the others are fetched before they are read.

    reader  ──ranges──────────────────────>  node of this machine  ──>  other nodes
            <──numbers of pieces that are here──

    NAME           the file, whole in size, with holes where pieces are missing
    NAME.pieces    which socket to ask, and the size of a piece; absent once the file is whole

A node makes such files (``pipeedge.nodes.pieces``), so that a rank fetches no more than the layers that it
computes. Whoever reads the file through this module sees no difference, but that it takes longer.
"""

from __future__ import annotations

import io
import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeedge.base.errors import WeightsError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["PIECES_SUFFIX", "PartialFile", "Range"]

PIECES_SUFFIX = ".pieces"
"""Suffix of the file beside a file of which pieces are missing."""
_SILENCE_S = 120.0
"""Seconds within which the next piece must come."""

Range = tuple[int, int]
"""Numbers of the first byte, and of the one behind the last."""


class PartialFile:
    """A file of which some pieces may be missing. It is used by one thread at a time.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._here: set[int] = set()
        self._asked: set[int] = set()
        self._stream: io.BufferedRWPair | None = None
        self._piece_bytes, self._place = 0, ""
        beside = path.with_name(path.name + PIECES_SUFFIX)
        try:
            document = json.loads(beside.read_bytes())
            self._piece_bytes, self._place = int(document["piece_bytes"]), str(document["socket"])
        except FileNotFoundError:
            pass  # the file is whole
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{beside} cannot be read: {error}; delete it with {path.name}") from error

    @property
    def is_whole(self) -> bool:
        """Whether all of the file is here."""
        return not self._piece_bytes

    def announce(self, ranges: Iterable[Range]) -> None:
        """Have the pieces of these ranges fetched, in this order; return at once."""
        if not self.is_whole:
            wanted = [each for each in ranges if self._pieces(*each) - self._asked]
            for each in wanted:
                self._asked |= self._pieces(*each)
            if wanted:
                self._ask(wanted)

    def wait(self, start: int, stop: int) -> None:
        """Wait until all bytes from ``start`` up to ``stop`` are here.

        Raises:
            WeightsError: They cannot be fetched.
        """
        if self.is_whole:
            return
        self.announce([(start, stop)])
        missing = self._pieces(start, stop) - self._here
        while missing:
            number = self._next()
            self._here.add(number)
            missing.discard(number)

    def open(self) -> io.RawIOBase:
        """Return the open file, which the caller closes; what is read of it is fetched before."""
        file = self.path.open("rb", buffering=0)
        return file if self.is_whole else _Waiting(file, self)

    def close(self) -> None:
        """Ask for nothing more."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _pieces(self, start: int, stop: int) -> set[int]:
        if start >= stop:
            return set()
        return set(range(start // self._piece_bytes, -(-stop // self._piece_bytes)))

    def _connected(self) -> io.BufferedRWPair:
        stream = self._stream
        if stream is None:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(_SILENCE_S)
                sock.connect(os.path.realpath(self._place))  # a link: the path of a socket must be short
                stream = self._stream = sock.makefile("rwb")
            stream.write(json.dumps(str(self.path.resolve())).encode() + b"\n")
        return stream

    def _ask(self, ranges: list[Range]) -> None:
        try:
            stream = self._connected()
            stream.write(json.dumps(ranges).encode() + b"\n")
            stream.flush()
        except OSError as error:
            raise self._unreachable(error) from error

    def _next(self) -> int:
        """Return the number of the next piece that is here."""
        try:
            line = self._connected().readline()
        except OSError as error:
            raise self._unreachable(error) from error
        if not line:
            raise WeightsError(f"{self.path.name}: the node of this machine has stopped fetching it")
        answer = json.loads(line)
        if not isinstance(answer, int):
            raise WeightsError(f"{self.path.name} cannot be fetched: {answer}")
        return answer

    def _unreachable(self, error: OSError) -> WeightsError:
        return WeightsError(
            f"{self.path} is not whole, and the node that fetches the rest does not answer "
            f"({error.strerror or error}): is 'pipeedge node' running here?"
        )


class _Waiting(io.RawIOBase):
    """A file whose bytes are waited for."""

    def __init__(self, file: io.FileIO, pieces: PartialFile) -> None:
        self._file = file
        self._pieces = pieces

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: WriteableBuffer) -> int:
        start, memory = self._file.tell(), memoryview(buffer)
        stop = min(start + memory.nbytes, os.fstat(self._file.fileno()).st_size)
        self._pieces.wait(start, max(start, stop))
        return self._file.readinto(memory) or 0

    def close(self) -> None:
        self._file.close()
        super().close()
