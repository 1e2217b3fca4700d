"""Introductions on the connections of ``-c tcp``. Pure: bytes in, values out.

    member ──Join──> rendezvous (rank 0)        sending rank ──LinkHello──> receiving rank
           <──GroupRoster── once all have come                     <──answer────

Every introduction has a fixed length, or one that its first bytes bound, so that a stranger cannot make a
rank wait for more or keep more. All numbers are little-endian, and a checksum covers each message. The token
names the group: the rendezvous chooses it at random, and a connection that does not know it is refused.
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from pipeedge.base.errors import PeerFailedError

__all__ = [
    "ANSWER_BYTES",
    "JOIN_BYTES",
    "LINK_HELLO_BYTES",
    "ROSTER_HEAD_BYTES",
    "TOKEN_BYTES",
    "Answer",
    "HelloError",
    "Join",
    "LinkHello",
    "Place",
    "Purpose",
    "GroupRoster",
    "pack_answer",
    "read_answer",
    "roster_length",
]

VERSION = 1
TOKEN_BYTES = 16
_MAX_MEMBERS = 1024

_CRC = struct.Struct("<I")
_JOIN = struct.Struct("<4sH2xIIB3x16s")
_HELLO = struct.Struct("<4sHBx16sQIIIIQ")
_ANSWER = struct.Struct("<4sHBx")
_ROSTER = struct.Struct("<4sHH16s")
_PLACE = struct.Struct("<IHBx16s")

JOIN_BYTES = _JOIN.size + _CRC.size
LINK_HELLO_BYTES = _HELLO.size + _CRC.size
ANSWER_BYTES = _ANSWER.size + _CRC.size
ROSTER_HEAD_BYTES = _ROSTER.size

_JOINING, _LINKING, _ANSWERING, _LISTING = b"PEJN", b"PELK", b"PEOK", b"PERO"


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
class Place:
    """Address at which a member listens for links."""

    address: str
    """IP address."""
    port: int

    def pack(self) -> tuple[int, int, bytes]:
        """Return port, IP version and address in bytes."""
        packed = ipaddress.ip_address(self.address)
        return self.port, packed.version, packed.packed.ljust(16, b"\0")

    @classmethod
    def unpack(cls, port: int, version: int, address: bytes) -> Place:
        """Return the place that ``pack`` has packed.

        Raises:
            HelloError: It is none.
        """
        if version not in (4, 6) or not 0 < port < 1 << 16:
            raise HelloError(f"a member claims to listen at port {port} of IP version {version}")
        packed = address[:4] if version == 4 else address
        return cls(str(ipaddress.ip_address(packed)), port)


@dataclass(frozen=True)
class Join:
    """Introduction of a member at the rendezvous."""

    rank: int
    place: Place

    def pack(self) -> bytes:
        """Return the message."""
        port, version, address = self.place.pack()
        return _sealed(_JOIN.pack(_JOINING, VERSION, self.rank, port, version, address))

    @classmethod
    def unpack(cls, message: bytes) -> Join:
        """Read a message of ``JOIN_BYTES``.

        Raises:
            HelloError: It is malformed.
        """
        magic, protocol, rank, port, version, address = _JOIN.unpack(_opened(message, _JOIN))
        _check(magic, _JOINING, protocol)
        return cls(rank, Place.unpack(port, version, address))


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


@dataclass(frozen=True)
class GroupRoster:
    """Members of a group, as the rendezvous announces them to each."""

    token: bytes
    places: Mapping[int, Place]
    """Place of each member, by rank."""

    def pack(self) -> bytes:
        """Return the message."""
        head = _ROSTER.pack(_LISTING, VERSION, len(self.places), self.token)
        return _sealed(
            head + b"".join(_PLACE.pack(rank, *place.pack()) for rank, place in sorted(self.places.items()))
        )

    @classmethod
    def unpack(cls, message: bytes) -> GroupRoster:
        """Read a message of ``roster_length``.

        Raises:
            HelloError: It is malformed.
        """
        if len(message) != roster_length(message):
            raise HelloError(f"a roster has {len(message)} bytes instead of {roster_length(message)}")
        body = _unsealed(message)
        (_, _, _, token), entries = _ROSTER.unpack(body[: _ROSTER.size]), body[_ROSTER.size :]
        return cls(
            token,
            {
                rank: Place.unpack(port, version, address)
                for rank, port, version, address in _PLACE.iter_unpack(entries)
            },
        )


def roster_length(head: bytes) -> int:
    """Return the length of the roster that begins with ``head`` (``ROSTER_HEAD_BYTES`` or more).

    Raises:
        HelloError: It is not the head of a roster, or of one that is too long.
    """
    if len(head) < _ROSTER.size:
        raise HelloError(f"a roster has only {len(head)} bytes")
    magic, protocol, count, _ = _ROSTER.unpack(head[: _ROSTER.size])
    count = int(count)
    _check(magic, _LISTING, protocol)
    if count > _MAX_MEMBERS:
        raise HelloError(f"the rendezvous announces {count} members, more than {_MAX_MEMBERS}")
    return _ROSTER.size + count * _PLACE.size + _CRC.size


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
    if not message.startswith((_JOINING, _LINKING, _ANSWERING)):
        raise HelloError("received data is not of this program: is another program on this port?")
    return _unsealed(message)


def _check(magic: bytes, wanted: bytes, version: int) -> None:
    if magic != wanted:
        raise HelloError("received data is not of this program: is another program on this port?")
    if version != VERSION:
        raise HelloError(f"the other rank uses protocol version {version}, but this program {VERSION}")
