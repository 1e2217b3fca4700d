"""Who may take part in a run: the certificate that a member presents, and those that it accepts.

    membership file        private key and its self-signed     whoever has the file is a member: each presents
    (pipeedge-key FILE)    certificate, one file for all       it, and accepts it and those that it has signed
    file of a node         private key of its own, certificate each presents its own and accepts those that
    (pipeedge join CODE)   of its own, and the cluster's       the cluster's key has signed, unless removed
    certificate, key, CA   a certificate of its own for each   each presents its own and accepts those that
    (--tls-...)            rank, from somebody's own PKI       the CA issued

Every connection is TLS 1.3, and both of its ends present a certificate. There are no session tickets, so a
handshake always checks them. Host names are not compared: a certificate says that its holder belongs to the
run, not which rank it is, and what a rank dials is often a bare address. Whoever uses a PKI therefore needs a
CA (or an intermediate one, which is accepted as the root of a chain) for the members alone.

An ``ssl`` object must not be used by two threads at once, so each connection end belongs to one thread. The
contexts themselves may be shared.
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.request.files import STANDARD_INPUT
from pipeedge.request.keys import KeyRequest

__all__ = ["Membership", "describe_handshake_failure", "load_membership", "open_to_all", "refuse_revoked"]

_PROTOCOL = "pipeedge"
"""Name under which both ends agree that they are of this program, before they compare certificates."""
_MAX_BYTES = 64 << 10
"""Size of the largest file that is read. A key with its certificate has less than 1 KiB."""
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_CERTIFICATE = "CERTIFICATE"
_PRIVATE_KEY = "PRIVATE KEY"


@dataclass(frozen=True)
class Membership:
    """Certificate that this process presents to the other members, and those that it accepts.

    Raises:
        RequestError: OpenSSL does not accept the certificates or the key.
    """

    source: str
    """Option and file for messages: ``--key cluster.pem``."""
    certificate: str = field(repr=False)
    """Certificate that this process presents, with any intermediate ones, as PEM."""
    private_key: str = field(repr=False)
    """Private key of the certificate, as PEM."""
    trusted: str = field(repr=False)
    """Certificates whose holders are members, or the CAs that issue these, as PEM."""
    revoked: str = field(default="", repr=False)
    """List of the certificates that are not accepted any more, signed by the trusted one, as PEM."""

    def __post_init__(self) -> None:
        self.client_context()

    @classmethod
    def from_file(cls, path: Path, option: str = "--key") -> Membership:
        """Read a membership file; ``-`` is the standard input.

        Raises:
            RequestError: The file cannot be used, or others can read it.
        """
        text = _read(path, option, private=True)
        return cls.from_text(text, f"{option} {path}")

    @classmethod
    def from_text(cls, text: str, source: str) -> Membership:
        """Return the membership that the text of a file gives.

        Args:
            text: Contents of a membership file.
            source: Name of the file for messages.

        Raises:
            RequestError: It is not a membership file.
        """
        blocks = _blocks(text, source)
        key, certificates = _private_key(blocks, source), _certificates(blocks, source)
        if len(certificates) > 1 and not (len(certificates) == 2 and _can_sign(certificates[1])):
            raise RequestError(
                f"{source}: holds {len(certificates)} certificates, but a membership file has one, and a "
                "node its cluster's too; for a PKI use --tls-cert, --tls-key and --tls-ca"
            )
        return cls(source, certificates[0], key, certificates[-1])

    @classmethod
    def from_pki(cls, certificate: Path, private_key: Path, authority: Path) -> Membership:
        """Read the certificate and the key of this rank, and the CA that issues those of all ranks.

        Raises:
            RequestError: A file cannot be used, or others can read the key.
        """
        option = f"--tls-cert {certificate}"
        chain = _certificates(_blocks(_read(certificate, "--tls-cert"), option), option)
        option = f"--tls-key {private_key}"
        key = _private_key(_blocks(_read(private_key, "--tls-key", private=True), option), option)
        option = f"--tls-ca {authority}"
        trusted = _certificates(_blocks(_read(authority, "--tls-ca"), option), option)
        source = f"--tls-cert {certificate} with --tls-key {private_key}"
        return cls(source, "\n".join(chain), key, "\n".join(trusted))

    def to_text(self) -> str:
        """Return the text of the membership file. A secret."""
        issuer = "" if self.holds_trusted else f"{self.trusted}\n"
        return f"{self.private_key}\n{self.certificate}\n{issuer}"

    @property
    def holds_trusted(self) -> bool:
        """Whether this is the key that the others trust itself, rather than one that it has signed."""
        return self.certificate == self.trusted

    @property
    def fingerprint(self) -> str:
        """Beginning of the SHA-256 of what is trusted, by which people can compare ranks. Not a secret."""
        blocks = (block for _, block in _blocks(self.trusted, self.source))
        contents = b"".join(ssl.PEM_cert_to_DER_cert(block) for block in blocks)
        return hashlib.sha256(contents).hexdigest()[:16]

    def server_context(self) -> ssl.SSLContext:
        """Return the settings of the ends that accept connections."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the settings of the ends that dial."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.options |= ssl.OP_NO_TICKET
        context.set_alpn_protocols([_PROTOCOL])
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        # What the user names is trusted as it is, even if somebody else has issued it in turn.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            with _unnamed_file(self.to_text()) as name:
                # With a password, OpenSSL does not ask for one at the terminal.
                context.load_cert_chain(name, password="")
            context.load_verify_locations(cadata=self.trusted)
            if self.revoked:
                refuse_revoked(context, self.revoked)
        except ssl.SSLError as error:
            raise RequestError(self._explain(error)) from error
        return context

    def _explain(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"{self.source}: the private key does not belong to the certificate"
        why = (error.reason or "unknown format").lower().replace("_", " ")
        return f"{self.source}: is damaged ({why}); copy it again"


def refuse_revoked(context: ssl.SSLContext, revoked: str) -> None:
    """Have ``context`` refuse the certificates of a list from its next handshake on.

    Args:
        context: Settings of TLS, which trust the certificate that has signed the list.
        revoked: The list as PEM. Of several, the newest counts.

    Raises:
        ssl.SSLError: It is not a list.
    """
    with _unnamed_file(revoked) as name:
        context.load_verify_locations(cafile=name)
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def load_membership(keys: KeyRequest) -> Membership | None:
    """Read the key that this process was given; call this once, because standard input can be read once.

    Returns:
        What makes this process a member, or None without a key.

    Raises:
        RequestError: A file cannot be used, or others can read the key.
    """
    if keys.key is not None:
        return Membership.from_file(keys.key)
    if keys.certificate is None or keys.private_key is None or keys.authority is None:
        return None
    return Membership.from_pki(keys.certificate, keys.private_key, keys.authority)


def open_to_all() -> str:
    """Return the warning about a run without a key on a network."""
    return (
        "links and control are open: whoever is on this network can take part in the run, and read and "
        f"change what is sent; --key FILE prevents that ({program_name('pipeedge-key')} makes the file)"
    )


def describe_handshake_failure(error: ssl.SSLError, end: ssl.SSLObject | ssl.SSLSocket) -> str:
    """Return why the other end of a failed handshake is no member, to follow its name in a sentence.

    Args:
        error: Error of the handshake.
        end: This end of the connection.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        if end.selected_alpn_protocol() != _PROTOCOL:
            return "is another program"
        if error.verify_message in _DATES:
            return f"has a certificate that is not valid now ({error.verify_message}; check the clocks)"
        if error.verify_message == _REVOKED:
            return "was removed from the cluster"
        return "has another key"
    return _REASONS.get(error.reason or "", "does not speak TLS 1.3")


_REVOKED = "certificate revoked"
_DATES = ("certificate has expired", "certificate is not yet valid")
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "has no key",
    "SSLV3_ALERT_NO_CERTIFICATE": "has no key",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "finds the certificate of this rank expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "has removed this node from the cluster",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "has another key",
    "SSLV3_ALERT_BAD_CERTIFICATE": "has another key",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "does not accept this kind of certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "has another key",
    "TLSV1_ALERT_UNKNOWN_CA": "has another key",
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "is another program",
}
"""Meaning of each reason for which OpenSSL fails; an alert is what the other end says."""


def _read(path: Path, option: str, *, private: bool = False) -> str:
    """Return the text of a PEM file.

    Args:
        path: The file; ``-`` is the standard input.
        option: Option that names it, for messages.
        private: Whether to refuse a file that others can read.

    Raises:
        RequestError: The file cannot be used.
    """
    try:
        if path == STANDARD_INPUT:
            with open(0, "rb", closefd=False) as stream:
                content = stream.read(_MAX_BYTES + 1)
            if not content:
                raise RequestError(f"{option} -: standard input is empty; the key is read from there")
        else:
            with path.open("rb") as stream:
                mode = os.fstat(stream.fileno()).st_mode
                if private and stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise RequestError(
                        f"{option} {path}: other users may read it (mode {stat.S_IMODE(mode):03o}): run "
                        f"chmod 600 on it, and replace it if anybody has (a new one by "
                        f"{program_name('pipeedge-key')})"
                    )
                content = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise RequestError(
            f"{option} {path}: no such file: make it with {program_name('pipeedge-key')}, and copy it to "
            "every machine"
            if option == "--key"
            else f"{option} {path}: no such file"
        ) from error
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot be read ({error.strerror})") from error
    if len(content) > _MAX_BYTES:
        raise RequestError(f"{option} {path}: is larger than {_MAX_BYTES >> 10} KiB, so it is no PEM file")
    return content.decode("ascii", errors="replace")


def _blocks(text: str, source: str) -> list[tuple[str, str]]:
    """Return the label and the text of each PEM block.

    Raises:
        RequestError: A block is cut off.
    """
    blocks = [(found[1], found[0]) for found in _BLOCK.finditer(text)]
    if text.count("-----BEGIN ") != len(blocks):
        raise RequestError(f"{source}: is cut off within a PEM block; copy it again")
    if not all(block.isascii() for _, block in blocks):
        raise RequestError(f"{source}: is damaged (it holds bytes that are no text); copy it again")
    return blocks


def _private_key(blocks: list[tuple[str, str]], source: str) -> str:
    keys = [block for label, block in blocks if label.endswith(_PRIVATE_KEY)]
    if not keys:
        raise RequestError(f"{source}: holds no private key")
    if len(keys) > 1:
        raise RequestError(f"{source}: holds {len(keys)} private keys, but one is needed")
    if "ENCRYPTED" in keys[0]:
        raise RequestError(
            f"{source}: the private key has a password, which no rank could be asked for: remove it with "
            "openssl pkey"
        )
    return keys[0]


def _certificates(blocks: list[tuple[str, str]], source: str) -> list[str]:
    found = [block for label, block in blocks if label == _CERTIFICATE]
    if not found:
        raise RequestError(f"{source}: holds no certificate, or lacks its end; copy it again")
    return found


def _can_sign(certificate: str) -> bool:
    """Return whether a certificate is that of a cluster, which signs those of its nodes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate)
    except ssl.SSLError:
        return False
    return bool(context.get_ca_certs(binary_form=True))


@contextmanager
def _unnamed_file(text: str) -> Iterator[str]:
    """Yield the path of a file with ``text`` that no other user can open; OpenSSL reads keys from files only.

    On Linux the file is in memory, so that a key which was handed over never gets to a disk.
    """
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("key"), "w", encoding="ascii") as stream:  # noqa: PTH123 - of a descriptor
            stream.write(text)
            stream.flush()
            yield f"/proc/self/fd/{stream.fileno()}"
        return
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        yield file.name
