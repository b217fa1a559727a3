"""Certificates for tests and benches, made on the spot: authorities, and what they sign for 127.0.0.1, localhost."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from specwire.rpc.tls import ClientTls, ServerTls

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Signed:
    """PEM bytes of a certificate and its key."""

    certificate: bytes
    key: bytes

    def save(self, folder: Path, name: str) -> tuple[str, str]:
        """Write NAME.pem and NAME.key; returns their paths."""
        files = folder / f"{name}.pem", folder / f"{name}.key"
        for file, content in zip(files, (self.certificate, self.key), strict=True):
            file.write_bytes(content)
        return str(files[0]), str(files[1])


class Authority:
    """Signs certificates; `pem` is its own. above: who signs that, None for itself."""

    def __init__(self, name: str = "test authority", above: Authority | None = None) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        signer = above or self
        builder = _builder(self._name, signer._name, self._key.public_key()).add_extension(constraints, critical=True)
        self.pem = _pem(builder.sign(signer._key, hashes.SHA256()))

    def sign(self, host: str = "127.0.0.1", name: str = "test") -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(host)), x509.DNSName("localhost")]
        builder = _builder(_name(name), self._name, key.public_key())
        certificate = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Signed(_pem(certificate.sign(self._key, hashes.SHA256())), secret)

    def server(self, host: str = "127.0.0.1", client_ca: Authority | None = None) -> ServerTls:
        signed = self.sign(host)
        return ServerTls(signed.certificate, signed.key, client_ca.pem if client_ca else None)

    def client(self, shown: Signed | None = None) -> ClientTls:
        """What trusts this authority, and shows `shown`."""
        return ClientTls(self.pem, shown.certificate, shown.key) if shown else ClientTls(self.pem)

    def save(self, folder: Path, name: str) -> str:
        file = folder / f"{name}.pem"
        file.write_bytes(self.pem)
        return str(file)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
