"""Introductions on the connections of ``-c tcp``. Pure: bytes in, values out.

    sending rank ──LinkHello──> receiving rank
                 <──Answer─────

An introduction has a fixed length, so that a stranger cannot make a rank wait for more or keep more. All
numbers are little-endian, and a checksum covers each message. The token names the group: rank 0 chooses one
at random for each plan, and the hub tells it to the participants alone. A connection that does not know it is
refused.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from pipeedge.base.errors import PeerFailedError
from pipeedge.transport.place import TOKEN_BYTES

__all__ = [
    "ANSWER_BYTES",
    "LINK_HELLO_BYTES",
    "Answer",
    "HelloError",
    "LinkHello",
    "Purpose",
    "pack_answer",
    "read_answer",
]

VERSION = 1

_CRC = struct.Struct("<I")
_HELLO = struct.Struct(f"<4sHBx{TOKEN_BYTES}sQIIIIQ")
_ANSWER = struct.Struct("<4sHBx")

LINK_HELLO_BYTES = _HELLO.size + _CRC.size
ANSWER_BYTES = _ANSWER.size + _CRC.size

_LINKING, _ANSWERING = b"PELK", b"PEOK"


class HelloError(PeerFailedError):
    """Received bytes are not a valid introduction."""


class Purpose(IntEnum):
    """Purpose of a connection of a link."""

    FRAMES = 1
    """Carries frames, from the rank that dials."""
    REPLIES = 2
    """Carries credits and receipts, to the rank that dials."""


class Answer(IntEnum):
    """Answer to a ``LinkHello``."""

    ACCEPTED = 1
    OTHER_GROUP = 2
    """The token or the epoch is that of another group."""
    OTHER_RANK = 3
    """The link does not lead here."""
    OTHER_LINK = 4
    """The link is connected already, or its ends differ on how many there were before it."""


@dataclass(frozen=True)
class LinkHello:
    """Introduction of one connection of a link, by the rank that dials, which sends the frames."""

    token: bytes
    """Token of the group."""
    epoch: int
    """Number of the plan that the link belongs to."""
    purpose: Purpose
    source: int
    destination: int
    serial: int
    """Number of earlier links between these two ranks, in this direction and group."""
    capacity: int
    """Size of the largest frame in bytes."""

    def pack(self) -> bytes:
        """Return the message."""
        return _sealed(
            _HELLO.pack(
                _LINKING,
                VERSION,
                self.purpose,
                self.token,
                self.epoch,
                self.source,
                self.destination,
                self.serial,
                0,
                self.capacity,
            )
        )

    @classmethod
    def unpack(cls, message: bytes) -> LinkHello:
        """Read a message of ``LINK_HELLO_BYTES``.

        Raises:
            HelloError: It is malformed.
        """
        magic, protocol, purpose, token, epoch, source, destination, serial, _, capacity = _HELLO.unpack(
            _opened(message, _HELLO)
        )
        _check(magic, _LINKING, protocol)
        if purpose not in (Purpose.FRAMES, Purpose.REPLIES):
            raise HelloError(f"a connection has the unknown purpose {purpose}")
        return cls(token, epoch, Purpose(purpose), source, destination, serial, capacity)


def pack_answer(answer: Answer) -> bytes:
    """Return the message for ``answer``."""
    return _sealed(_ANSWER.pack(_ANSWERING, VERSION, answer))


def read_answer(message: bytes) -> Answer:
    """Read a message of ``ANSWER_BYTES``.

    Raises:
        HelloError: It is malformed.
    """
    magic, protocol, answer = _ANSWER.unpack(_opened(message, _ANSWER))
    _check(magic, _ANSWERING, protocol)
    try:
        return Answer(answer)
    except ValueError as error:
        raise HelloError(f"received the unknown answer {answer}") from error


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(zlib.crc32(body))


def _unsealed(message: bytes) -> bytes:
    """Return ``message`` without its checksum.

    Raises:
        HelloError: The checksum does not match.
    """
    body = message[: -_CRC.size]
    if message[-_CRC.size :] != _CRC.pack(zlib.crc32(body)):
        raise HelloError("the checksum of an introduction does not match")
    return body


def _opened(message: bytes, form: struct.Struct) -> bytes:
    """Return a message of a fixed length without its checksum, which a stranger's magic number precedes."""
    if len(message) != form.size + _CRC.size:
        raise HelloError(f"an introduction has {len(message)} bytes instead of {form.size + _CRC.size}")
    if not message.startswith((_LINKING, _ANSWERING)):
        raise HelloError("received data is not of this program: is another program on this port?")
    return _unsealed(message)


def _check(magic: bytes, wanted: bytes, version: int) -> None:
    if magic != wanted:
        raise HelloError("received data is not of this program: is another program on this port?")
    if version != VERSION:
        raise HelloError(f"the other rank uses protocol version {version}, but this program {VERSION}")
