"""TLS for servers and channels: files on the command line are read and checked at once.

    server    --tls-cert FILE --tls-key FILE    encrypts; clients check the certificate
              --tls-client-ca FILE              mutual: a client must show a certificate of this authority
    client    --tls | --tls-ca FILE             encrypts; trusts the system's authorities, or those in FILE
              --tls-client-cert --tls-client-key  what it shows to a server that asks

Files are PEM. Where they change they are read again (`specwire.rpc.renewal`): a renewed certificate is shown at the
next handshake, and whoever shows one of an authority that is no longer trusted is refused.
"""

from __future__ import annotations

import argparse
import re
import ssl
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from specwire.core.invalid import InvalidParameter
from specwire.rpc.renewal import Origin


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM bytes of a server's certificate chain and its key; with `client_ca` clients must be certified by it.

    `current` is what stands in the files by now; what the methods return follows it.
    """

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    client_ca: bytes | None = field(default=None, repr=False)
    origin: Origin[ServerTls] | None = field(default=None, repr=False, compare=False)

    @property
    def current(self) -> ServerTls:
        return self if self.origin is None else self.origin.latest

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC servers."""
        used = self.current
        mutual = used.client_ca is not None
        if self.origin is None:
            return grpc.ssl_server_credentials([(used.key, used.certificate)], used.client_ca, mutual)

        def fetch() -> Any:
            """At each handshake, in a thread of gRPC's; None where nothing has changed."""
            nonlocal used
            latest = self.current
            if latest is used:
                return None
            used = latest
            return _configuration(latest)

        return grpc.dynamic_ssl_server_credentials(_configuration(used), fetch, mutual)

    def context(self) -> ssl.SSLContext:
        """For HTTP servers."""
        first = made = _context(self.current)
        if self.origin is None:
            return first
        used = self.current

        def choose(handshake: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            """At each handshake, whether or not the client names the server."""
            nonlocal used, made
            if used is not self.current:
                used, made = self.current, _context(self.current)
            handshake.context = made

        first.sni_callback = choose
        return first


def _configuration(tls: ServerTls) -> Any:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], tls.client_ca)


def _context(tls: ServerTls) -> ssl.SSLContext:
    """Python reads certificates from files only; these are private, and removed at once."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory(prefix="specwire-tls-") as folder:
        certificate, key = Path(folder, "cert.pem"), Path(folder, "key.pem")
        certificate.write_bytes(tls.certificate)
        key.touch(mode=0o600)
        key.write_bytes(tls.key)
        context.load_cert_chain(certificate, key)
    if tls.client_ca is not None:
        context.load_verify_locations(cadata=tls.client_ca.decode("ascii", "ignore"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM bytes. ca: whom to trust, None for the system's authorities. certificate, key: shown to servers that ask."""

    ca: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    origin: Origin[ClientTls] | None = field(default=None, repr=False, compare=False)

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel; of what stands in the files by now."""
        now = self if self.origin is None else self.origin.latest
        return grpc.ssl_channel_credentials(now.ca or system_authorities(), now.key, now.certificate)


# ----------------------------------------------------------------------------------------------------------------------
# Certificates that were shown to connections before the trusted authorities changed.

# Certificates in a chain, the longest that OpenSSL follows by default being 100: far more than anybody has.
MOST_ISSUERS = 10
MOST_JUDGED = 1024
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class Certification:
    """Whether a certificate that was trusted at its handshake would still be.

    While the authorities are those of the start nothing is looked at.

    Args: tls: of the server; None or without `client_ca` everybody is let in.
    """

    def __init__(self, tls: ServerTls | None) -> None:
        self._tls = tls
        self._first = self._judged_by = None if tls is None else tls.current.client_ca
        self._judged: dict[tuple[bytes, bytes], bool] = {}

    @property
    def changed(self) -> bool:
        return self._tls is not None and self._tls.current.client_ca != self._first

    def holds(self, shown: Callable[[], tuple[bytes, bytes]]) -> bool:
        """shown: tells the certificate and what else of its chain came with it, PEM or DER."""
        if self._tls is None or not self.changed:
            return True
        trusted = self._tls.current.client_ca
        if trusted != self._judged_by or len(self._judged) >= MOST_JUDGED:
            self._judged.clear()
            self._judged_by = trusted
        chain = shown()
        if chain not in self._judged:
            self._judged[chain] = is_issued(*chain, trusted or b"")
        return self._judged[chain]


def shown_in(connection: ssl.SSLObject | None) -> tuple[bytes, bytes]:
    """The certificate of the other end in DER, b"" without one; and nothing of its chain: Python does not tell it."""
    return (b"" if connection is None else connection.getpeercert(binary_form=True) or b""), b""


def is_issued(certificate: bytes, more: bytes, authorities: bytes) -> bool:
    """Whether one of the `authorities` signed the certificate, itself or by way of those in `more`.

    Dates and purposes are not looked at: the handshake did.
    """
    known, between = _parsed(authorities), _parsed(more)
    link = next(iter(_parsed(certificate)), None)
    for _ in range(MOST_ISSUERS):
        if link is None:
            return False
        if link in known or any(_signed(link, by) for by in known):
            return True
        link = next((by for by in between if _signed(link, by)), None)
    return False


def _parsed(certificates: bytes) -> list[Any]:
    """Those that can be parsed, of PEM text, or of one in DER."""
    from cryptography import x509  # 40 ms, and needed only once authorities have changed

    readers: Iterable[Callable[[], Any]]
    if certificates.startswith(b"\x30"):
        readers = [partial(x509.load_der_x509_certificate, certificates)]
    else:
        readers = [partial(x509.load_pem_x509_certificate, each) for each in PEM.findall(certificates)]
    found = []
    for read in readers:
        try:
            found.append(read())
        except ValueError:  # of an authority: then it vouches for nobody
            continue
    return found


def _signed(certificate: Any, issuer: Any) -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def server_tls(args: argparse.Namespace) -> ServerTls | None:
    """None without --tls-cert; InvalidParameter names the flag and the file that is wrong."""
    if args.tls_cert is None and args.tls_key is None:
        if args.tls_client_ca is not None:
            raise InvalidParameter("--tls-client-ca", "needs --tls-cert and --tls-key")
        return None
    given = args.tls_cert, args.tls_key, args.tls_client_ca
    origin = Origin([each for each in given if each is not None], partial(_server_tls, *given))
    return replace(origin.latest, origin=origin)


def _server_tls(cert: str | None, key: str | None, client_ca: str | None) -> ServerTls:
    certificate, secret = _pair("--tls-cert", cert, "--tls-key", key) or (b"", b"")  # one of the two is named
    return ServerTls(certificate, secret, _certificates("--tls-client-ca", client_ca))


def client_tls(args: argparse.Namespace) -> ClientTls | None:
    """None where no flag asks for TLS; InvalidParameter names the flag and the file that is wrong."""
    given = args.tls_ca, args.tls_client_cert, args.tls_client_key
    files = [each for each in given if each is not None]
    if not files:  # the system's authorities are read at each dialling
        return ClientTls() if args.tls else None
    origin = Origin(files, partial(_client_tls, *given))
    return replace(origin.latest, origin=origin)


def _client_tls(ca: str | None, cert: str | None, key: str | None) -> ClientTls:
    pair = _pair("--tls-client-cert", cert, "--tls-client-key", key)
    return ClientTls(_certificates("--tls-ca", ca), *(pair or (None, None)))


def _pair(cert_flag: str, cert: str | None, key_flag: str, key: str | None) -> tuple[bytes, bytes] | None:
    """Certificate and key, or None where neither is named."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing, given = (cert_flag, key_flag) if cert is None else (key_flag, cert_flag)
        raise InvalidParameter(missing, f"must come with {given}")
    certificate, secret = _certificates(cert_flag, cert), _read(key_flag, key)
    try:
        # A password makes an encrypted key an error here; without one OpenSSL would ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidParameter(key_flag, f"{key} is not the key of the certificate in {cert}") from None
        raise InvalidParameter(key_flag, f"{key} holds no private key in PEM without a password") from None
    return certificate or b"", secret


def _certificates(flag: str, file: str | None) -> bytes | None:
    if file is None:
        return None
    content = _read(flag, file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):  # ValueError: there is nothing in it
        raise InvalidParameter(flag, f"{file} holds no certificate in PEM") from None
    return content


def _read(flag: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidParameter(flag, f"{file} cannot be read: {error.strerror}") from None


def system_authorities() -> bytes | None:
    """The authorities that OpenSSL trusts on this machine (SSL_CERT_FILE and SSL_CERT_DIR hold); None: gRPC's list."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile is not None:
        return Path(paths.cafile).read_bytes()
    hashed = sorted(Path(paths.capath).glob("*.[0-9]")) if paths.capath is not None else []
    return b"\n".join(file.read_bytes() for file in hashed) or None
