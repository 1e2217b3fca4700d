"""What the structure of a PNG file says: its size, before it is decoded, and whether rows are missing.

Where compressed data has a proper end but too few rows, Pillow raises nothing and leaves the rest black.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["has_all_rows", "is_small_png"]

_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_HEADER = struct.Struct(">IIBBBBB")
"""Width, height, bits a value, type of colour, and three bytes of which the last tells of interlacing."""
_CHUNK = struct.Struct(">I4s")
_VALUES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Number of values of a pixel by type of colour."""
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column and row, and the distances between columns and rows, of each pass of an interlaced image."""
_WHOLE = ((0, 0, 1, 1),)
_PIECE = 1 << 16


def is_small_png(data: bytes, most_pixels: int) -> bool:
    """Return whether ``data`` is a PNG of at most ``most_pixels`` pixels, as its only head says."""
    if not data.startswith(_START) or len(data) < len(_START) + _HEADER.size or data.count(b"IHDR") != 1:
        return False
    width, height, *_ = _HEADER.unpack_from(data, len(_START))
    return bool(width * height <= most_pixels)


def has_all_rows(stream: BinaryIO) -> bool:
    """Return whether the compressed data of a PNG holds all rows that its header promises.

    Args:
        stream: The file, which a decoder has found to be a PNG, from its beginning.
    """
    head = stream.read(len(_START) + _HEADER.size)
    if len(head) < len(_START) + _HEADER.size:
        return False
    missing = _uncompressed_bytes(*_HEADER.unpack_from(head, len(_START)))
    stream.seek(4, 1)  # the checksum of the header
    # Only the data count, not the checksum behind them: decoders pass over that, too.
    unpacking = zlib.decompressobj(-zlib.MAX_WBITS)
    is_first = True
    try:
        for piece in _data(stream):
            rest = piece[2:] if is_first else piece  # behind the two bytes of a zlib header
            is_first = False
            while missing > 0 and not unpacking.eof:
                unpacked = len(unpacking.decompress(rest, _PIECE))
                missing -= unpacked
                rest = unpacking.unconsumed_tail
                if not rest and unpacked < _PIECE:
                    break
            if missing <= 0 or unpacking.eof:
                break
    except zlib.error:
        return False
    return missing <= 0


def _data(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the compressed data in pieces of at least two bytes, if there are that many."""
    held = b""
    while len(head := stream.read(_CHUNK.size)) == _CHUNK.size:
        length, kind = _CHUNK.unpack(head)
        if kind != b"IDAT":
            stream.seek(length + 4, 1)
            continue
        while length and (piece := stream.read(min(length, _PIECE))):
            length -= len(piece)
            held += piece
            if len(held) > 1:
                yield held
                held = b""
        stream.seek(4, 1)


def _uncompressed_bytes(
    width: int, height: int, bits: int, colour: int, _compression: int, _filter: int, interlace: int
) -> int:
    """Return the number of bytes of all rows, each with the byte that names its filter."""
    total = 0
    for left, top, across, down in _ADAM7 if interlace else _WHOLE:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits * _VALUES[colour] + 7) // 8)
    return total
