"""Messages between the hub and its members: JSON objects with a length prefix.

    to the hub      at any time: beat, clock, failed, linklost; before the plan: hello, facts
                    of an epoch: ready, declined, passed, stopped; from the data rank: complete
                    at the end: record, any number of them, then done
    from the hub    at any time: pace, clockanswer, notice, verdict; before the plan: brief, waiting; plan
                    of an epoch: prepare, run, retire, abort; at the end: complete, summary
                    to the data rank alone: rankrecord, work

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
from pipeedge.base.fields import (
    MALFORMED,
    Amount,
    Count,
    Line,
    LongLine,
    Name,
    Number,
    Positive,
    encode,
    reader,
)
from pipeedge.control.failures import Failure
from pipeedge.control.liveness import RankStatus
from pipeedge.observe.metrics import StageWork
from pipeedge.transport.place import Place

__all__ = [
    "FROM_HUB",
    "MAX_BYTES",
    "TO_HUB",
    "Abort",
    "Beat",
    "Brief",
    "Clock",
    "ClockAnswer",
    "Complete",
    "Decoder",
    "Declined",
    "Done",
    "Facts",
    "Failed",
    "Hello",
    "LinkLost",
    "Malformed",
    "Message",
    "Notice",
    "Pace",
    "Passed",
    "Planned",
    "Prepare",
    "RankRecord",
    "Ready",
    "Record",
    "Retire",
    "Run",
    "Stopped",
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
    place: Place | None = None
    """Place at which it listens for other ranks; None if it does not."""


class Beat(Message, frozen=True):
    """The heartbeat of a rank."""

    status: RankStatus


class Clock(Message, frozen=True):
    """A rank asks for the hub's clock."""

    sent: Number
    """Time of the question on the rank's clock, in seconds."""


class Failed(Message, frozen=True):
    """A rank reports its own failure."""

    line: Line
    microbatch: Count | None = None
    """Number of the microbatch whose values led to it; None if none did."""


class LinkLost(Message, frozen=True):
    """A rank has lost a link to another, or cannot open it."""

    epoch: Count
    """Number of the epoch that the link belongs to; 0 if there is none yet."""
    peer: Count
    """Rank at the other end."""
    line: LongLine


class Ready(Message, frozen=True):
    """A rank has loaded its part, and its links are open."""

    epoch: Positive


class Declined(Message, frozen=True):
    """A rank cannot prepare an epoch beside the one that runs."""

    epoch: Positive
    line: LongLine
    """The reason, for the user."""


class Passed(Message, frozen=True):
    """All that came to a rank in the epoch has passed, and nothing follows."""

    epoch: Positive
    first: Count | None = None
    """Lowest number of a microbatch that the next epoch is fed; None from ranks that feed nothing."""


class Stopped(Message, frozen=True):
    """A rank has stopped: it neither computes for the epoch nor takes frames of it any longer."""

    epoch: Positive
    written: Count | None = None
    """Lowest number of a microbatch that is not written; None from ranks that write none."""
    copied: Raw = Raw(b"null")
    """What a standby has copied of the state of others, for whoever makes the next plan; null if nothing."""


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


class Prepare(Message, frozen=True):
    """The hub asks a participant to load its part and to open its links."""

    epoch: Positive
    plan: Raw
    token: bytes = b""
    """Random bytes that only the participants know, in base64; new for each epoch."""
    places: Mapping[Count, Place] = {}
    """Place at which each member of the session listens, if it does."""


class Run(Message, frozen=True):
    """All participants are ready, and start."""

    epoch: Positive


class Retire(Message, frozen=True):
    """All that the epoch was fed has passed, and another one feeds what follows: its links can be closed."""

    epoch: Positive


class Abort(Message, frozen=True):
    """The epoch has failed, or is not wanted any longer: the participants that are left stop it."""

    epoch: Positive
    line: LongLine
    """The reason, for the user."""


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


TO_HUB = (
    Hello
    | Facts
    | Beat
    | Clock
    | Failed
    | LinkLost
    | Ready
    | Declined
    | Passed
    | Stopped
    | Record
    | Complete
    | Done
)
FROM_HUB = (
    Brief
    | Planned
    | Prepare
    | Run
    | Retire
    | Abort
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
        ValueError: It is larger than the protocol allows; an error of the caller.
    """
    text = encode(message)
    if len(text) > MAX_BYTES:
        raise ValueError(f"a message of {len(text)} bytes; the protocol allows {MAX_BYTES}")
    return _LENGTH.pack(len(text)) + text


class Decoder:
    """Splits a stream of bytes into messages.

    Args:
        messages: Types of the messages that are accepted, ``TO_HUB`` or ``FROM_HUB``.
        max_bytes: Length of the longest message that is accepted.
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
