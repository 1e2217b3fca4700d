"""Make the contents of a membership file: a private key and its self-signed certificate.

Only this and ``authority`` need the library ``cryptography``: ranks use a key through the standard library's
``ssl``.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = [
    "NOT_AFTER",
    "NOT_BEFORE",
    "certificate_builder",
    "make_key",
    "named",
    "new_private_key",
    "private_text",
]

# A board without a battery starts in 1970, perhaps minus its time zone; 1950 is the first year of the format.
NOT_BEFORE = datetime.datetime(1950, 1, 1)
NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59)
"""The date that stands for "never" in a certificate (RFC 5280, 4.1.2.5)."""
_OTHER_USES = dict.fromkeys(
    (
        *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("encipher_only", "decipher_only"),
    ),
    False,
)


def make_key() -> str:
    """Return the text of a new membership file, for one run: its holders accept each other and nobody else.

    Raises:
        RequestError: The library is not installed.
    """
    key = new_private_key()
    from cryptography.hazmat.primitives import hashes, serialization

    # It signs handshakes only, no further certificates: those that accept it accept nothing else.
    own = named("pipeedge")
    certificate = certificate_builder(own, own, key.public_key(), signs=False).sign(key, hashes.SHA256())
    return private_text(key) + certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def new_private_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key.

    Raises:
        RequestError: The library is not installed.
    """
    try:
        from cryptography import x509  # noqa: F401 - what follows needs it
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise RequestError(
            "making a key needs the package cryptography: pip install 'pipeedge[runtime]', or run "
            f"{program_name('pipeedge-key')} on another machine (using a key needs no package)"
        ) from error
    return ec.generate_private_key(ec.SECP256R1())


def private_text(key: ec.EllipticCurvePrivateKey) -> str:
    """Return a private key as PEM."""
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode("ascii")


def named(name: str) -> x509.Name:
    """Return a name as certificates have it."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, signs: bool
) -> x509.CertificateBuilder:
    """Return a certificate that is still to be signed, and depends on no date.

    Args:
        subject: Name of the holder of ``key``.
        issuer: Name of the one who will sign.
        key: Public key of the holder.
        signs: Whether the holder may sign certificates, and lists of those that are removed.
    """
    from cryptography import x509

    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=signs, crl_sign=signs, **_OTHER_USES)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
    )
