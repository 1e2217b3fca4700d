"""The cluster's key as an authority: it signs the keys of nodes, and the list of those that were removed.

    cluster.pem ──sign────> certificates of pi1, pi2, ...   each presents its own, and accepts the others
                └─remove──> list 3: {pi2}                   who has the list refuses pi2 in the handshake

Lists have numbers that grow, and contain what the earlier ones do. Only this and ``new_key`` need the library
``cryptography``; TLS itself checks certificates and lists.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import (
    NOT_AFTER,
    NOT_BEFORE,
    certificate_builder,
    named,
    new_private_key,
    private_text,
)

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = [
    "NODE_NAME",
    "Authority",
    "Removals",
    "make_cluster_key",
    "make_node_key",
    "name_in",
    "read_removals",
]

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
"""Pattern of the names of nodes."""
_CLUSTER = "pipeedge"
_MOST_REMOVED = 10_000
_LONGEST_TEXT = 4 << 20


@dataclass(frozen=True)
class Removals:
    """A list of removed nodes, as the cluster's key has signed it."""

    text: str
    """The list as PEM."""
    number: int
    """Number of the list; of two, the greater counts."""
    serials: frozenset[int]
    """Serial numbers of the certificates that are not accepted any more."""


@dataclass(frozen=True)
class Authority:
    """The private key of a cluster and its certificate."""

    certificate: str
    """Certificate of the cluster, as PEM."""
    private_key: str = field(repr=False)
    """Private key of the cluster, as PEM."""

    @classmethod
    def of(cls, membership: Membership) -> Authority | None:
        """Return the authority that a membership file makes its holder, or None if it is that of a node.

        Raises:
            RequestError: The file cannot sign, because an earlier version made it.
        """
        if not membership.holds_trusted:
            return None
        if not _can_sign(_certificate(membership.certificate)):
            raise RequestError(
                f"{membership.source}: this key is of an earlier version and cannot sign those of nodes: "
                f"make another with {program_name('pipeedge-key')}"
            )
        return cls(membership.certificate, membership.private_key)

    def sign(self, name: str, public_key: str) -> str:
        """Return a certificate, as PEM, that says that the holder of a key is the node ``name``.

        Args:
            name: Name of the node.
            public_key: Its public key, as PEM.

        Raises:
            RequestError: The name or the key cannot be used.
        """
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        check_name(name)
        try:
            key = serialization.load_pem_public_key(public_key.encode())
        except ValueError as error:
            raise RequestError(f"the public key of {name} cannot be read") from error
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise RequestError(f"the public key of {name} is of another kind than this version makes")
        issuer = _certificate(self.certificate).subject
        built = certificate_builder(named(name), issuer, key, signs=False).sign(self._key(), hashes.SHA256())
        return built.public_bytes(serialization.Encoding.PEM).decode("ascii")

    def remove(self, serials: Collection[int], before: Removals | None = None) -> Removals:
        """Return the list that also removes the certificates with these serial numbers.

        Args:
            serials: Serial numbers of certificates.
            before: Newest list so far, if any.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        number = 1 if before is None else before.number + 1
        removed = frozenset(serials) | (frozenset() if before is None else before.serials)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(_certificate(self.certificate).subject)
            # OpenSSL takes the list with the latest date of several. The date must have passed even on a
            # board whose clock starts in 1970, so it counts lists instead of time.
            .last_update(NOT_BEFORE + datetime.timedelta(seconds=number))
            .next_update(NOT_AFTER)
            .add_extension(x509.CRLNumber(number), critical=False)
        )
        for serial in sorted(removed):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(NOT_BEFORE)
            builder = builder.add_revoked_certificate(entry.build())
        signed = builder.sign(self._key(), hashes.SHA256())
        return Removals(signed.public_bytes(serialization.Encoding.PEM).decode("ascii"), number, removed)

    def _key(self) -> ec.EllipticCurvePrivateKey:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = serialization.load_pem_private_key(self.private_key.encode(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise RequestError("the cluster's key is of another kind than this version makes")
        return key


def make_cluster_key() -> str:
    """Return the text of a new membership file whose key can sign those of nodes.

    Raises:
        RequestError: The library is not installed.
    """
    key = new_private_key()
    from cryptography.hazmat.primitives import hashes, serialization

    name = named(_CLUSTER)
    made = certificate_builder(name, name, key.public_key(), signs=True).sign(key, hashes.SHA256())
    return private_text(key) + made.public_bytes(serialization.Encoding.PEM).decode("ascii")


def make_node_key() -> tuple[str, str]:
    """Return a new private key for a node, and the public one that the cluster's key signs, as PEM.

    Raises:
        RequestError: The library is not installed.
    """
    key = new_private_key()
    from cryptography.hazmat.primitives import serialization

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    return private_text(key), public.decode("ascii")


def check_name(name: str) -> None:
    """Refuse a text that cannot be the name of a node.

    Raises:
        RequestError: It cannot.
    """
    if NODE_NAME.fullmatch(name) is None or name == _CLUSTER:
        raise RequestError(
            f"{name!r} cannot be the name of a node: use up to 63 letters, digits, dots and hyphens, "
            f"and not {_CLUSTER}"
        )


def name_in(certificate: str) -> tuple[str, int]:
    """Return the name of a node, and the serial number, in its certificate."""
    from cryptography.x509.oid import NameOID

    read = _certificate(certificate)
    return str(read.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value), read.serial_number


def read_removals(text: str, cluster: str) -> Removals:
    """Read a list of removed nodes.

    Args:
        text: The list as PEM.
        cluster: Certificate of the cluster, as PEM.

    Raises:
        RequestError: It is not a list that the cluster's key has signed.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = _certificate(cluster).public_key()
    try:
        if len(text) > _LONGEST_TEXT or not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("not a list of this cluster")
        found = x509.load_pem_x509_crl(text.encode())
        if not found.is_signature_valid(key):
            raise ValueError("signed by another key")
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        serials = frozenset(entry.serial_number for entry in found)
        if len(serials) > _MOST_REMOVED:
            raise ValueError("too long")
    except (ValueError, x509.ExtensionNotFound) as error:
        raise RequestError(
            f"the list of removed nodes is not signed by the cluster's key ({error})"
        ) from error
    return Removals(text, number, serials)


def _certificate(text: str) -> x509.Certificate:
    from cryptography import x509

    return x509.load_pem_x509_certificate(text.encode())


def _can_sign(certificate: x509.Certificate) -> bool:
    from cryptography import x509

    try:
        return bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        return False
