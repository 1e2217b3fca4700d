"""Messages between the hub and its members: JSON objects with a length prefix.

    0        4
    +--------+---------------------------------+
    | length | {"kind": "beat", ...} in UTF-8  |      length: big-endian, of the JSON only
    +--------+---------------------------------+

Nothing is unpickled, and a length beyond the limit is refused before memory is allocated for it. Numbers
must be finite, and integers must fit into 64 bits; anything else is refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeedge.base import fields
from pipeedge.base.errors import PeerFailedError

__all__ = ["MAX_BYTES", "Decoder", "Message", "encode"]

MAX_BYTES = 8 << 20
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Message:
    """A message. The module ``pipeedge.control.rules`` lists the fields of each kind."""

    kind: str
    body: Mapping[str, Any] = field(default_factory=dict)


def encode(message: Message) -> bytes:
    """Return ``message`` as bytes.

    Raises:
        ValueError: it is larger than the protocol allows; an error of the caller.
    """
    text = json.dumps({"kind": message.kind, **message.body}, allow_nan=False).encode()
    if len(text) > MAX_BYTES:
        raise ValueError(f"a message of {len(text)} bytes; the protocol allows {MAX_BYTES}")
    return _LENGTH.pack(len(text)) + text


class Decoder:
    """Splits a stream of bytes into messages.

    Args:
        max_bytes: length of the longest message that is accepted.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
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
            messages.append(_parse(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


def _parse(text: bytes) -> Message:
    try:
        value = fields.parse(text)
        kind = value.pop("kind")
    except fields.MALFORMED as error:
        raise PeerFailedError("received data is not a message of this program") from error
    if not isinstance(kind, str):
        raise PeerFailedError("received data is not a message of this program")
    return Message(kind, value)
