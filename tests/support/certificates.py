"""Certificates of all kinds, for tests of those that a run accepts."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> str:
        """The certificate as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def key_pem(self, password: bytes | None = None) -> str:
        """The private key as PEM."""
        encryption: Any = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password)
        form = serialization.PrivateFormat.PKCS8
        return self.key.private_bytes(serialization.Encoding.PEM, form, encryption).decode()


def read_issued(text: str) -> Issued:
    """Read a membership file."""
    key = serialization.load_pem_private_key(text.encode(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Issued(x509.load_pem_x509_certificate(text[text.index("-----BEGIN CERT") :].encode()), key)


def issue(
    name: str,
    issuer: Issued | None = None,
    *,
    is_ca: bool = False,
    begins: datetime.datetime = NOW - DAY,
    ends: datetime.datetime = NOW + DAY,
) -> Issued:
    """Issue a certificate, by itself if there is no other issuer."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    return Issued(builder.sign(key if issuer is None else issuer.key, hashes.SHA256()), key)


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext
) -> tuple[ssl.SSLObject, ssl.SSLObject, dict[str, ssl.SSLError]]:
    """Join a server and a client in memory; return both, and the error of each that failed."""
    to_server, to_client, from_server, from_client = (ssl.MemoryBIO() for _ in range(4))
    ends = {
        "client": client.wrap_bio(to_client, from_client),
        "server": server.wrap_bio(to_server, from_server, server_side=True),
    }
    errors: dict[str, ssl.SSLError] = {}
    for _ in range(4):
        for name, end in ends.items():
            if name in errors:
                continue
            try:
                end.do_handshake()
                end.read(1)  # under TLS 1.3 the client hears of its refusal only now
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                errors[name] = error
            to_server.write(from_client.read())
            to_client.write(from_server.read())
    return ends["server"], ends["client"], errors
