"""Make the contents of a membership file: a private key and its self-signed certificate.

Only this needs the library ``cryptography``: ranks use a key through the standard library's ``ssl``.
"""

from __future__ import annotations

import datetime

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name

__all__ = ["make_key"]

# A board without a battery starts in 1970, perhaps minus its time zone; 1950 is the first year of the format.
_NOT_BEFORE = datetime.datetime(1950, 1, 1)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59)
"""The date that stands for "never" in a certificate (RFC 5280, 4.1.2.5)."""
_OTHER_USES = dict.fromkeys(
    (
        *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign"),
        *("crl_sign", "encipher_only", "decipher_only"),
    ),
    False,
)


def make_key() -> str:
    """Return the text of a new membership file.

    Raises:
        RequestError: The library is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise RequestError(
            "making a key needs the package cryptography: pip install 'pipeedge[runtime]', or run "
            f"{program_name('pipeedge-key')} on another machine (using a key needs no package)"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pipeedge")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        # It signs handshakes only, no further certificates: those that accept it accept nothing else.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **_OTHER_USES), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode("ascii")
