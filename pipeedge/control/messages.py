"""Messages between the hub and its members: JSON objects with a length prefix.

    0        4
    +--------+---------------------------------+
    | length | {"kind": "beat", ...} in UTF-8  |      length: big-endian, of the JSON only
    +--------+---------------------------------+

Nothing is unpickled, and a length beyond the limit is refused before memory is allocated for it. Each kind of
message is a type, whose fields have the limits of ``pipeedge.base.fields``; anything else is refused. What
the hub only forwards (brief, facts, plan, stats) stays JSON until the program that knows its type reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from msgspec import Raw, Struct

from pipeedge.base.errors import PeerFailedError
from pipeedge.base.fields import MALFORMED, Amount, Count, Line, LongLine, Name, Number, encode, reader
from pipeedge.control.failures import Failure
from pipeedge.control.liveness import RankStatus, StageWork

__all__ = [
    "FROM_HUB",
    "MAX_BYTES",
    "TO_HUB",
    "Beat",
    "Brief",
    "Clock",
    "ClockAnswer",
    "Complete",
    "Decoder",
    "Done",
    "Facts",
    "Failed",
    "Hello",
    "Lost",
    "Malformed",
    "Message",
    "Notice",
    "Pace",
    "Planned",
    "Ready",
    "Record",
    "RankRecord",
    "Start",
    "Summary",
    "Verdict",
    "Waiting",
    "WorkByRank",
    "frame",
]

MAX_BYTES = 8 << 20
_LENGTH = struct.Struct(">I")


class Message(Struct, frozen=True, tag_field="kind", tag=str.lower):
    """A message of any kind."""

    @property
    def kind(self) -> str:
        """Name of the kind in the JSON and in messages to the user."""
        return str(self.__struct_config__.tag)


# -- to the hub --------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A rank introduces itself."""

    rank: Count
    world: Count
    """Number of ranks with which it was started."""
    host: Name


class Facts(Message, frozen=True):
    """A rank states the facts that the hub compares."""

    facts: Raw


class Beat(Message, frozen=True):
    """The heartbeat of a rank."""

    status: RankStatus


class Clock(Message, frozen=True):
    """A rank asks for the hub's clock."""

    sent: Number
    """Time of the question on the rank's clock, in seconds."""


class Ready(Message, frozen=True):
    """A rank has loaded its part and waits for the start."""


class Failed(Message, frozen=True):
    """A rank reports its own failure."""

    line: Line
    microbatch: Count | None = None
    """Number of the microbatch whose values led to it; None if none did."""


class Lost(Message, frozen=True):
    """A rank reports the loss of another."""

    rank: Count
    line: Line


class Record(Message, frozen=True):
    """A part of a rank's record of the run. Any number of them precede ``Done``."""

    text: str


class Complete(Message, frozen=True):
    """The data rank has written all results. It precedes its ``Done``; the hub forwards it to all ranks."""


class Done(Message, frozen=True):
    """A rank has finished its part."""

    stats: Raw


# -- from the hub ------------------------------------------------------------------------------------


class Brief(Message, frozen=True):
    """Information that a rank needs to state its facts."""

    brief: Raw


class Planned(Message, frozen=True, tag="plan"):
    """The plan of the session."""

    plan: Raw


class Start(Message, frozen=True):
    """All participants are ready, and start."""


class Pace(Message, frozen=True):
    """The heartbeat of the hub."""

    slowest_s: Amount = 0.0
    """Seconds that the slowest stage takes for a microbatch; 0 if that is unknown."""


class ClockAnswer(Message, frozen=True):
    """The answer to a ``Clock``."""

    sent: Number
    """Time of the question on the rank's clock, in seconds."""
    there: Number
    """Time of the answer on the hub's clock, in seconds."""


class Notice(Message, frozen=True):
    """A line for the user that ends nothing."""

    line: LongLine


class Waiting(Message, frozen=True):
    """A line for the user that names the ranks that are missing."""

    line: LongLine
    over: bool = False
    """Whether the wait is over."""


class RankRecord(Message, frozen=True):
    """A part of the record of ``rank``, for the data rank."""

    rank: Count
    text: str


class WorkByRank(Message, frozen=True, tag="work"):
    """The work of each stage by its rank, for the data rank."""

    work: Mapping[Count, StageWork]


class Summary(Message, frozen=True):
    """All have finished; the stats of each rank."""

    stats: Mapping[Count, Raw]


class Verdict(Message, frozen=True):
    """The session has failed."""

    failure: Failure


TO_HUB = Hello | Facts | Beat | Clock | Ready | Failed | Lost | Record | Complete | Done
FROM_HUB = (
    Brief
    | Planned
    | Start
    | Pace
    | ClockAnswer
    | Notice
    | Waiting
    | RankRecord
    | WorkByRank
    | Complete
    | Summary
    | Verdict
)


class Malformed(Struct, frozen=True):
    """A message whose kind is unknown or whose fields are invalid."""

    kind: Name


_READ_KIND = reader(Malformed)


def frame(message: Message) -> bytes:
    """Return ``message`` as bytes, with their length before them.

    Raises:
        ValueError: it is larger than the protocol allows; an error of the caller.
    """
    text = encode(message)
    if len(text) > MAX_BYTES:
        raise ValueError(f"a message of {len(text)} bytes; the protocol allows {MAX_BYTES}")
    return _LENGTH.pack(len(text)) + text


class Decoder:
    """Splits a stream of bytes into messages.

    Args:
        messages: types of the messages that are accepted, ``TO_HUB`` or ``FROM_HUB``.
        max_bytes: length of the longest message that is accepted.
    """

    def __init__(self, messages: object, max_bytes: int = MAX_BYTES) -> None:
        self._read: Callable[[bytes], Message] = reader(messages)
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message | Malformed]:
        """Return the messages that ``data`` completes.

        Raises:
            PeerFailedError: ``data`` is not part of a message.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise PeerFailedError(
                    "received data is not a message of this program: is another program on this port?"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._message(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages

    def _message(self, text: bytes) -> Message | Malformed:
        try:
            return self._read(text)
        except MALFORMED:
            pass
        try:
            found: Malformed = _READ_KIND(text)
        except MALFORMED as error:
            raise PeerFailedError("received data is not a message of this program") from error
        return found
