"""First meeting: who knows a short-lived code gets a certificate from the holder of the cluster's key.

    join                                          key (the host)
      │──── "PEJOIN1", message of SPAKE2 ──────────>│     both derive a secret, which is the same
      │<─── message of SPAKE2 ──────────────────────│     only if they know the same code
      │──── proof ─────────────────────────────────>│     wrong: one of three tries is used up
      │<─── proof ──────────────────────────────────│     wrong: the host does not know the code
      │──── sealed: name, public key ──────────────>│
      │<─── sealed: certificate, that of the cluster│     the code is used up

SPAKE2 (RFC 9382) lets an eavesdropper, and whoever guesses wrong, learn nothing but that the guess was wrong.
The host proves nothing before the other end has. The private key of a node never leaves it.

``Inviter`` and ``Guest`` are protocols without sockets: bytes in, bytes out. Each message is shorter than
``MOST_BYTES``, and travels with its length before it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from pipeedge.base.errors import DeadlineError, PeerFailedError, RequestError
from pipeedge.base.fields import Name, Text, decode, decoding, encode
from pipeedge.transport.authority import Authority, check_name
from pipeedge.transport.membership import Membership

__all__ = ["CODE_S", "JOIN_PORT", "TRIES", "Guest", "Inviter", "host_one", "join_at", "new_code", "read_code"]

JOIN_PORT = 29601
CODE_S = 600.0
"""Seconds for which a code is valid."""
TRIES = 3
"""Number of wrong proofs after which a code is used up."""
MOST_BYTES = 8192
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
"""Letters of a code: none that look alike."""
_GROUPS, _GROUP = 3, 4
_MAGIC = b"PEJOIN1\n"
_PATIENCE_S = 10.0
"""Seconds within which the other end must go on."""
_LENGTH = struct.Struct(">H")
_PAKE_BYTES = 33
"""Length of a message of SPAKE2: which end it is from, and a point of the curve."""
_NONCE_BYTES = 12


class _Wish(Struct, frozen=True):
    """What the joining node asks for."""

    name: Name
    public_key: Text


class _Grant(Struct, frozen=True):
    """What it gets."""

    certificate: Text
    cluster: Text


class WrongCodeError(PeerFailedError):
    """The other end does not know the code."""


def new_code() -> str:
    """Return a new code, such as ``k7mp-2xqa-9fhd``, of 59 bits."""
    return "-".join("".join(secrets.choice(_LETTERS) for _ in range(_GROUP)) for _ in range(_GROUPS))


def read_code(text: str) -> str:
    """Return a code as it was made, however it was typed.

    Raises:
        RequestError: It cannot be a code.
    """
    letters = "".join(letter for letter in text.lower() if letter.isalnum())
    if len(letters) != _GROUPS * _GROUP or not set(letters) <= set(_LETTERS):
        raise RequestError(
            f"{text!r} is not a code: it has {_GROUPS} groups of {_GROUP} letters and digits, as "
            "'pipeedge key' prints it"
        )
    return "-".join(letters[place : place + _GROUP] for place in range(0, len(letters), _GROUP))


class _Sealed:
    """What both ends have once they have agreed: two proofs, and a key for each direction."""

    def __init__(self, secret: bytes, transcript: bytes) -> None:
        self._secret = secret
        self._transcript = hashlib.sha256(transcript).digest()

    def proof(self, of: str) -> bytes:
        return self._derived(f"proof of {of}")

    def seal(self, by: str, message: Struct) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + AESGCM(self._derived(f"key of {by}")).encrypt(nonce, encode(message), None)

    def open(self, by: str, data: bytes, kind: Any) -> Any:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            text = AESGCM(self._derived(f"key of {by}")).decrypt(
                data[:_NONCE_BYTES], data[_NONCE_BYTES:], None
            )
        except (InvalidTag, ValueError) as error:
            raise PeerFailedError("the other end sent something that was changed on the way") from error
        with decoding("what the other end sent"):
            return decode(text, kind)

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self._secret, purpose.encode() + self._transcript, "sha256")


class Inviter:
    """The end that holds the cluster's key, for one caller.

    Args:
        code: The code.
        authority: The cluster's key.
    """

    def __init__(self, code: str, authority: Authority) -> None:
        self._authority = authority
        self._pake = _spake2("SPAKE2_B", code)
        self._sealed: _Sealed | None = None
        self._is_proved = False
        self.joined = ""
        """Name of the node that has joined, once it has."""

    def hear(self, message: bytes) -> bytes:
        """Take a message, and return the reply.

        Raises:
            WrongCodeError: The other end does not know the code.
            PeerFailedError: The message is malformed.
        """
        if self._sealed is None:
            if not message.startswith(_MAGIC):
                raise PeerFailedError("is another program")
            own: bytes = self._pake.start()
            self._sealed = _agreed(self._pake, message[len(_MAGIC) :], message + own)
            return own
        if not self._is_proved:
            if not hmac.compare_digest(self._sealed.proof("guest"), message):
                raise WrongCodeError("has another code")
            self._is_proved = True
            return self._sealed.proof("host")
        wish: _Wish = self._sealed.open("guest", message, _Wish)
        certificate = self._authority.sign(wish.name, wish.public_key)
        self.joined = wish.name
        return self._sealed.seal("host", _Grant(certificate, self._authority.certificate))


class Guest:
    """The end that joins.

    Args:
        code: The code.
        name: Name of this node.
        public_key: Public key of this node, as PEM.
    """

    def __init__(self, code: str, name: str, public_key: str) -> None:
        self._wish = _Wish(name, public_key)
        self._pake = _spake2("SPAKE2_A", code)
        self._opening: bytes = _MAGIC + self._pake.start()
        self._sealed: _Sealed | None = None
        self._is_proved = False
        self.grant: _Grant | None = None
        """Certificates of this node and of the cluster, once they have come."""

    @property
    def is_proving(self) -> bool:
        """Whether the host is to say whether the code is right."""
        return self._sealed is not None and not self._is_proved

    def open(self) -> bytes:
        """Return the first message."""
        return self._opening

    def hear(self, message: bytes) -> bytes | None:
        """Take a message, and return the reply, or None at the end.

        Raises:
            WrongCodeError: The other end does not know the code.
            PeerFailedError: The message is malformed.
        """
        if self._sealed is None:
            self._sealed = _agreed(self._pake, message, self._opening + message)
            return self._sealed.proof("guest")
        if not self._is_proved:
            if not hmac.compare_digest(self._sealed.proof("host"), message):
                raise WrongCodeError("has another code")
            self._is_proved = True
            return self._sealed.seal("guest", self._wish)
        self.grant = self._sealed.open("host", message, _Grant)
        return None


def _spake2(side: str, code: str) -> Any:
    try:
        import spake2
    except ImportError as error:
        raise RequestError(
            "joining a cluster needs the package spake2: pip install 'pipeedge[nodes]'"
        ) from error
    return getattr(spake2, side)(code.encode(), idA=b"pipeedge join", idB=b"pipeedge key")


def _agreed(pake: Any, message: bytes, transcript: bytes) -> _Sealed:
    from spake2 import SPAKEError
    from spake2.ed25519_basic import NotOnCurve

    try:
        # The library takes shorter and longer ones for numbers, too.
        if len(message) != _PAKE_BYTES:
            raise ValueError(f"{len(message)} bytes")
        return _Sealed(pake.finish(message), transcript)
    except (SPAKEError, NotOnCurve, ValueError) as error:
        raise PeerFailedError("sent something else than a message of SPAKE2") from error


# -- over sockets ------------------------------------------------------------------------------------


def host_one(
    listener: socket.socket,
    code: str,
    authority: Authority,
    tell: Callable[[str], None],
    *,
    within_s: float = CODE_S,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Let one node join, and return its name. Callers are served one at a time, for seconds each.

    Args:
        listener: Listening socket.
        code: The code, which is valid for this call only.
        authority: The cluster's key.
        tell: Called with a line about each caller that did not join.
        within_s: Seconds for which the code is valid.
        clock: Monotonic clock in seconds.

    Raises:
        DeadlineError: Nobody has joined in time.
        PeerFailedError: There were too many wrong codes.
    """
    deadline, wrong = clock() + within_s, 0
    while True:
        try:
            listener.settimeout(max(0.01, deadline - clock()))
            sock, address = listener.accept()
        except TimeoutError:
            raise DeadlineError(
                f"nobody has joined within {within_s / 60:g} minutes, and the code is void: print another"
            ) from None
        with sock:
            who = str(address[0]).removeprefix("::ffff:")
            try:
                sock.settimeout(min(_PATIENCE_S, max(0.01, deadline - clock())))
                host = Inviter(code, authority)
                while not host.joined:
                    _put(sock, host.hear(_take(sock)))
                return host.joined
            except WrongCodeError:
                wrong += 1
                tell(f"{who}: wrong code ({wrong} of {TRIES} tries)")
                if wrong == TRIES:
                    raise PeerFailedError(
                        f"the code was tried {TRIES} times in vain, and is void: print another"
                    ) from None
            except (OSError, PeerFailedError, RequestError) as error:
                tell(f"{who}: has not joined ({error})")


def join_at(address: tuple[str, int], code: str, name: str, key: tuple[str, str]) -> Membership:
    """Join a cluster, and return the membership of this node.

    Args:
        address: Where ``host_one`` runs.
        code: The code.
        name: Name of this node.
        key: Private and public key of this node, as PEM.

    Raises:
        WrongCodeError: The code is wrong, void or used up.
        PeerFailedError: Nobody is there, or it is another program.
    """
    check_name(name)
    private, public = key
    guest = Guest(code, name, public)
    where = f"{address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=_PATIENCE_S) as sock:
            reply: bytes | None = guest.open()
            while reply is not None:
                _put(sock, reply)
                try:
                    heard = _take(sock)
                except ConnectionResetError as error:
                    if guest.is_proving:
                        raise WrongCodeError(
                            f"{where} has another code: type it as 'pipeedge key' prints it there, or print "
                            "another"
                        ) from error
                    raise
                reply = guest.hear(heard)
    except WrongCodeError:
        raise
    except OSError as error:
        raise PeerFailedError(
            f"no cluster to join at {where} ({error.strerror or error}): run 'pipeedge key' there, and use "
            "its code within ten minutes"
        ) from error
    if guest.grant is None:
        raise PeerFailedError(f"{where} ended before it let this node join")
    text = f"{private}\n{guest.grant.certificate}\n{guest.grant.cluster}\n"
    return Membership.from_text(text, f"the key from {where}")


def _put(sock: socket.socket, message: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(message)) + message)


def _take(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if length > MOST_BYTES:
        raise PeerFailedError("is another program")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionResetError("it closed the connection")
        data += part
    return data
