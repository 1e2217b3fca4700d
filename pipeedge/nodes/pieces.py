"""Files of weights that a node fetches piece by piece, as its ranks read them.

    rank ──ranges──> socket ──> a thread of PieceKeeper ──GetRanges──> another node
         <──numbers──                └─ digest is right: into the file

    DIR/weights.sock           link to the socket, which only the user of this machine may open
    .../NAME, NAME.pieces      file with holes, and what readers need to know (``models.weights.pieces``)
    .../.NAME.have             a byte for each piece: whether it is here

A piece counts when its SHA-256 is the one that was announced with the model; so it does not matter from whom
it comes: the node that has announced it, or any other that has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pipeedge.base.errors import PeerFailedError, PipeEdgeError, RequestError, one_line
from pipeedge.models.weights.pieces import PIECES_SUFFIX, Range
from pipeedge.nodes.messages import ModelFile, News

__all__ = [
    "FetchPieces",
    "PieceFile",
    "PieceKeeper",
    "check_pieces",
    "piece_bytes",
    "piece_digests",
    "whole_digest",
]

_SMALLEST = 1 << 20
_MOST_PIECES = 1 << 16
"""Largest number of pieces of a model: their digests travel in one message."""
_LONGEST_LINE = 1 << 20
_TOGETHER = 16
"""Number of pieces that are asked for at once."""

FetchPieces = Callable[[ModelFile, Sequence[int], Callable[[int, bytes], None]], None]
"""Fetches pieces of a file from other nodes, in order, and hands on each with its number. What takes them
raises PeerFailedError for one that is damaged."""


def piece_bytes(whole: int) -> int:
    """Return the size of a piece for a model of so many bytes."""
    size = _SMALLEST
    while whole > size * _MOST_PIECES:
        size *= 2
    return size


def piece_digests(path: Path, size: int) -> tuple[str, ...]:
    """Return the digests of the pieces of a file."""
    with path.open("rb") as stream:
        return tuple(hashlib.sha256(part).hexdigest() for part in iter(lambda: stream.read(size), b""))


def whole_digest(pieces: Iterable[str]) -> str:
    """Return the digest of a file of which the pieces have these digests."""
    return hashlib.sha256("".join(pieces).encode()).hexdigest()


def check_pieces(file: ModelFile) -> None:
    """Check that the pieces of a file are those of its size and digest.

    Raises:
        RequestError: They are not.
    """
    count = -(-file.size // file.piece_bytes) if file.piece_bytes else 0
    if count != len(file.pieces) or (file.pieces and whole_digest(file.pieces) != file.sha256):
        raise RequestError(f"the pieces of {file.name} are not those of its size and digest")


class PieceFile:
    """A file of which some pieces may be missing. Any thread may use it.

    Args:
        path: Where it is; it is made, with holes, unless it exists.
        file: The whole file.
        socket_path: Socket that readers ask.
    """

    def __init__(self, path: Path, file: ModelFile, socket_path: Path) -> None:
        self.path = path
        self.file = file
        self.samples: frozenset[Range] = frozenset()
        """Ranges that are here though their pieces may be missing (``patch``)."""
        self._lock = threading.Lock()
        self._beside = path.with_name(path.name + PIECES_SUFFIX)
        self._kept = path.with_name(f".{path.name}.have")
        count = len(file.pieces)
        kept = self._kept.read_bytes() if self._kept.exists() and path.exists() else b""
        self._have = bytearray(kept if len(kept) == count else count)
        document = {"piece_bytes": file.piece_bytes, "socket": str(socket_path)}
        self._beside.write_text(json.dumps(document))
        with path.open("ab") as stream:
            stream.truncate(file.size)
        if len(kept) != count:
            self._kept.write_bytes(self._have)

    def has(self, number: int) -> bool:
        """Return whether a piece is here."""
        return 0 <= number < len(self._have) and bool(self._have[number])

    def missing(self, ranges: Iterable[Range]) -> list[int]:
        """Return the numbers of the pieces of these ranges that are not here, in their order."""
        return [number for number in self.numbers(ranges) if not self._have[number]]

    def numbers(self, ranges: Iterable[Range]) -> list[int]:
        """Return the numbers of the pieces of these ranges, each once."""
        size, count = self.file.piece_bytes, len(self._have)
        return list(
            dict.fromkeys(
                number
                for start, stop in ranges
                if start < stop
                for number in range(max(0, start // size), min(count, -(-stop // size)))
            )
        )

    def can_give(self, ranges: Iterable[Range]) -> bool:
        """Return whether all bytes of these ranges are here."""
        return not self.missing(each for each in ranges if each not in self.samples)

    def size_of(self, number: int) -> int:
        """Return the bytes of a piece; the last one may be shorter."""
        return min(self.file.piece_bytes, self.file.size - number * self.file.piece_bytes)

    def write(self, number: int, data: bytes) -> None:
        """Keep a piece.

        Raises:
            PeerFailedError: Its digest is not the announced one.
        """
        if hashlib.sha256(data).hexdigest() != self.file.pieces[number]:
            raise PeerFailedError(
                f"piece {number} of {self.file.name} arrived damaged: its digest is not the one announced"
            )
        self.patch(number * self.file.piece_bytes, data)
        with self._lock:
            self._have[number] = 1
            with self._kept.open("r+b") as stream:
                stream.seek(number)
                stream.write(b"\1")
            if all(self._have):
                self._beside.unlink(missing_ok=True)

    def patch(self, offset: int, data: bytes) -> None:
        """Write bytes of pieces that are missing still."""
        with self.path.open("r+b") as stream:
            stream.seek(offset)
            stream.write(data)


class PieceKeeper:
    """Fetches pieces for the ranks of this machine, which ask at a socket.

    Args:
        directory: Directory of the node.
        fetch: Fetches pieces from other nodes.
    """

    def __init__(self, directory: Path, fetch: FetchPieces) -> None:
        self.link = directory / "weights.sock"
        self._fetch = fetch
        self._lock = threading.Lock()
        self._files: dict[str, PieceFile] = {}
        self._fetching: dict[Path, threading.Lock] = {}
        self._listeners: list[Callable[[News], None]] = []
        # The path of a socket has about a hundred letters at most.
        self._place = Path(tempfile.mkdtemp(prefix="pipeedge-"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._place / "sock"))
        self._listener.listen(16)
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(self._place / "sock")
        threading.Thread(target=self._serve, name="pieces", daemon=True).start()

    def close(self) -> None:
        """Answer no more readers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self._place, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.link.unlink()

    def keep(self, path: Path, file: ModelFile) -> PieceFile:
        """Return a file whose pieces are fetched as they are needed."""
        with self._lock:
            found = self._files.get(str(path.resolve()))
        if found is None:
            found = PieceFile(path, file, self.link)
            with self._lock:
                self._files[str(path.resolve())] = found
                self._fetching[path.resolve()] = threading.Lock()
        return found

    def drop(self, file: PieceFile) -> None:
        """Remove a file that could not be prepared."""
        with self._lock:
            self._files.pop(str(file.path.resolve()), None)
        file.path.unlink(missing_ok=True)

    def holder(self, sha256: str) -> PieceFile | None:
        """Return a file by its digest, or None."""
        with self._lock:
            return next((each for each in self._files.values() if each.file.sha256 == sha256), None)

    @contextlib.contextmanager
    def listening(self, listener: Callable[[News], None]) -> Iterator[None]:
        """Tell ``listener`` what is fetched in the body, as bytes of a total."""
        with self._lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def fetch(self, file: PieceFile, numbers: Sequence[int]) -> Iterator[int]:
        """Fetch the pieces that are missing; yield the number of each piece once it is here.

        Raises:
            PipeEdgeError: No node has them, or the disk is full.
        """
        total = float(sum(file.size_of(number) for number in numbers if not file.has(number)))
        done = 0.0

        def take(number: int, data: bytes) -> None:
            nonlocal done
            file.write(number, data)
            done += len(data)
            self._tell(News(f"fetching {file.file.name}", done=done, total=total))

        for start in range(0, len(numbers), _TOGETHER):
            part = numbers[start : start + _TOGETHER]
            with self._fetching[file.path.resolve()]:  # another reader may wait for the same ones
                wanted = [number for number in part if not file.has(number)]
                if wanted:
                    self._fetch(file.file, wanted, take)
            yield from part

    def _tell(self, news: News) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for each in listeners:
            each(news)

    # -- readers ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(reader,), name="reader", daemon=True).start()

    def _answer(self, reader: socket.socket) -> None:
        # A reader that has gone is noticed at the latest when the stream is closed, which sends what is left.
        with contextlib.suppress(OSError, ValueError), reader, reader.makefile("rwb") as stream:
            name = json.loads(stream.readline(_LONGEST_LINE))
            with self._lock:
                file = self._files.get(str(name))
            while line := stream.readline(_LONGEST_LINE):
                try:
                    if file is None:
                        raise PeerFailedError("this node does not fetch it now: run 'pipeedge up' again")
                    ranges = [(int(start), int(stop)) for start, stop in json.loads(line)]
                    for number in self.fetch(file, file.numbers(ranges)):
                        stream.write(b"%d\n" % number)
                        stream.flush()
                except PipeEdgeError as error:
                    stream.write(json.dumps(one_line(error)).encode() + b"\n")
                    stream.flush()
