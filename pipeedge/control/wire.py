"""The bytes of a control connection, in clear or sealed by TLS. No sockets: bytes go in, bytes come out.

    network ──receive──> messages                    an end that accepts looks at the first byte:
    network <──outgoing── put ── messages            0x16 begins TLS, 0x00 the length of a message in clear

An end belongs to one thread. A peer that is no member costs its end nothing but these objects: TLS begins
only with the first byte that looks like it, and ``failure`` says what was wrong. What ``outgoing`` then holds
tells the peer, as far as it can understand it.
"""

from __future__ import annotations

import ssl
from typing import Protocol

from pipeedge.base.errors import EXIT_REQUEST
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.messages import Verdict, frame
from pipeedge.transport.sealed import Sealing

__all__ = ["ClearEnd", "SealedEnd", "WireEnd"]

_TLS_HANDSHAKE = 0x16
"""First byte of a connection in TLS."""
_CLEAR_LENGTH = 0x00
"""First byte of a connection in clear, because no message is as long as 16 MiB."""
_NO_KEY_ALERT = bytes((0x15, 3, 3, 0, 2, 2, 41))
"""Record of TLS with the fatal alert ``no_certificate``, which a peer with a key understands."""
_NO_KEY_VERDICT = Failure(
    FailureKind.REFUSED,
    "rank 0 has a key, and this rank has none: give every rank the same --key",
    exit_code=EXIT_REQUEST,
)
_READ_BYTES = 1 << 16


class WireEnd(Protocol):
    """One end of a connection."""

    failure: str
    """Predicate for a peer that is no member, to follow its name in a sentence; empty if all is well."""

    @property
    def established(self) -> bool:
        """Whether the peer is known to be a member, as far as can be known."""

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the network; return those of messages that they hold."""

    def put(self, data: bytes) -> None:
        """Add bytes of messages to what is to be sent."""

    def outgoing(self) -> bytes:
        """Return, and forget, what is to be sent to the network."""


class ClearEnd:
    """An end without a key, to which every peer is a member.

    Args:
        accepts: Whether the peer speaks first.
    """

    def __init__(self, *, accepts: bool) -> None:
        self.established = True
        self.failure = ""
        self._awaits_first_byte = accepts
        self._outgoing = bytearray()

    def receive(self, data: bytes) -> bytes:
        """Return ``data``, unless it begins TLS."""
        if self._awaits_first_byte and data:
            self._awaits_first_byte = False
            if data[0] == _TLS_HANDSHAKE:
                self._outgoing += _NO_KEY_ALERT
                self.failure = "has a key, and rank 0 has none"
        return b"" if self.failure else data

    def put(self, data: bytes) -> None:
        """Add bytes of messages to what is to be sent."""
        self._outgoing += data

    def outgoing(self) -> bytes:
        """Return, and forget, what is to be sent to the network."""
        data, self._outgoing = bytes(self._outgoing), bytearray()
        return data


class SealedEnd:
    """An end with a key: TLS in memory.

    Args:
        sealing: TLS of an end that has dialed, or settings of TLS for one that accepts, which begins with the
            peer's first byte.
    """

    def __init__(self, sealing: Sealing | ssl.SSLContext) -> None:
        self.failure = ""
        self._heard = False  # whether a message has come, so that the peer has accepted this end
        self._in_clear = b""
        self._sealing = sealing
        if isinstance(sealing, Sealing) and not sealing.established:
            self._go_on(sealing)

    @property
    def established(self) -> bool:
        """Whether the peer has proved to be a member."""
        return isinstance(self._sealing, Sealing) and self._sealing.established

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the network; return those of messages that they hold."""
        if self.failure or not data:
            return b""
        if not isinstance(self._sealing, Sealing):
            if data[0] != _TLS_HANDSHAKE:
                self._turn_away(data[0])
                return b""
            self._sealing = Sealing(self._sealing, accepts=True)
        self._sealing.from_network.write(data)
        return self._go_on(self._sealing)

    def _turn_away(self, first: int) -> None:
        if first == _CLEAR_LENGTH:
            self._in_clear = frame(Verdict(_NO_KEY_VERDICT))
            self.failure = "has no key"
        else:
            self.failure = "is another program"

    def _go_on(self, sealing: Sealing) -> bytes:
        parts = []
        try:
            while sealing.shake_hands() and (part := sealing.tls.read(_READ_BYTES)):
                self._heard = True
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.failure = (
                f"sent a damaged record ({(error.reason or 'unknown').lower().replace('_', ' ')})"
                if self._heard
                else sealing.describe(error)
            )
        return b"".join(parts)

    def put(self, data: bytes) -> None:
        """Add bytes of messages to what is to be sent; the handshake must be over."""
        if not isinstance(self._sealing, Sealing) or not self._sealing.established:
            raise ValueError("a message before the handshake")
        view = memoryview(data)
        while view:
            view = view[self._sealing.tls.write(view) :]

    def outgoing(self) -> bytes:
        """Return, and forget, what is to be sent to the network."""
        records = self._sealing.to_network.read() if isinstance(self._sealing, Sealing) else b""
        data, self._in_clear = self._in_clear + records, b""
        return data
