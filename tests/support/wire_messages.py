"""Messages of the control connection as bytes, for tests that play one of its ends."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from pipeedge.base.fields import encode
from pipeedge.control.connection import Connection
from pipeedge.control.messages import FROM_HUB, Decoder, Malformed, Message
from pipeedge.control.wire import ClearEnd


def framed(text: bytes) -> bytes:
    """Return ``text`` with its length before it."""
    return struct.pack(">I", len(text)) + text


def received(messages: object, kind: str, **body: Any) -> Message | Malformed:
    """Return a message as a receiver that accepts ``messages`` reads it.

    Raises:
        PeerFailedError: It is not a message.
    """
    (message,) = Decoder(messages).feed(framed(json.dumps({"kind": kind, **body}).encode()))
    return message


def connected(sock: socket.socket) -> Connection:
    """Return the connection of a rank to a hub without a key, over a socket that the test has connected."""
    return Connection(sock, ClearEnd(accepts=False), Decoder(FROM_HUB))


def plain(value: object) -> Any:
    """Return ``value`` as it is sent: objects, lists, texts and numbers."""
    return json.loads(encode(value))
