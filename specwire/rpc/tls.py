"""TLS for servers and channels: files on the command line are read and checked at once.

    server    --tls-cert FILE --tls-key FILE    encrypts; clients check the certificate
              --tls-client-ca FILE              mutual: a client must show a certificate of this authority
    client    --tls | --tls-ca FILE             encrypts; trusts the system's authorities, or those in FILE
              --tls-client-cert --tls-client-key  what it shows to a server that asks

Files are PEM. They are read once: a renewed certificate needs a restart.
"""

from __future__ import annotations

import argparse
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from specwire.core.invalid import InvalidParameter
from specwire.rpc.keys import add_token_argument


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM bytes of a server's certificate chain and its key; with `client_ca` clients must be certified by it."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    client_ca: bytes | None = field(default=None, repr=False)

    def credentials(self) -> grpc.ServerCredentials:
        pair = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pair, self.client_ca, require_client_auth=self.client_ca is not None)

    def context(self) -> ssl.SSLContext:
        """For HTTP servers. Python reads certificates from files only; these are private, and removed at once."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory(prefix="specwire-tls-") as folder:
            certificate, key = Path(folder, "cert.pem"), Path(folder, "key.pem")
            certificate.write_bytes(self.certificate)
            key.touch(mode=0o600)
            key.write_bytes(self.key)
            context.load_cert_chain(certificate, key)
        if self.client_ca is not None:
            context.load_verify_locations(cadata=self.client_ca.decode("ascii", "ignore"))
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM bytes. ca: whom to trust, None for the system's authorities. certificate, key: shown to servers that ask."""

    ca: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca or system_authorities(), self.key, self.certificate)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """What server_tls reads."""
    group = parser.add_argument_group("TLS of the address it listens on")
    group.add_argument("--tls-cert", metavar="FILE", help="the certificate chain, PEM")
    group.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    group.add_argument("--tls-client-ca", metavar="FILE", help="clients must show a certificate of this authority")


def add_client_arguments(parser: argparse.ArgumentParser, whom: str, variable: bool = False) -> None:
    """What client_tls and keys.read_token read; `whom` says which connections these are. variable: see read_token."""
    group = parser.add_argument_group(f"TLS to {whom}")
    group.add_argument("--tls", action="store_true", help="encrypt, and trust the system's authorities")
    group.add_argument("--tls-ca", metavar="FILE", help="encrypt, and trust the authorities in FILE")
    group.add_argument("--tls-client-cert", metavar="FILE", help="show this certificate to a server that asks for one")
    group.add_argument("--tls-client-key", metavar="FILE", help="its private key")
    add_token_argument(parser, whom, variable)


def server_tls(args: argparse.Namespace) -> ServerTls | None:
    """None without --tls-cert; InvalidParameter names the flag and the file that is wrong."""
    pair = _pair("--tls-cert", args.tls_cert, "--tls-key", args.tls_key)
    if pair is None:
        if args.tls_client_ca is not None:
            raise InvalidParameter("--tls-client-ca", "needs --tls-cert and --tls-key")
        return None
    return ServerTls(*pair, _certificates("--tls-client-ca", args.tls_client_ca))


def client_tls(args: argparse.Namespace) -> ClientTls | None:
    """None where no flag asks for TLS; InvalidParameter names the flag and the file that is wrong."""
    pair = _pair("--tls-client-cert", args.tls_client_cert, "--tls-client-key", args.tls_client_key)
    if not (args.tls or args.tls_ca is not None or pair):
        return None
    return ClientTls(_certificates("--tls-ca", args.tls_ca), *(pair or (None, None)))


def check_client_files(prefix: str, ca: str | None, cert: str | None, key: str | None) -> None:
    """Check files that a library reads: InvalidParameter names prefix + ca, cert or key, and the wrong file."""
    _certificates(f"{prefix}ca", ca)
    _pair(f"{prefix}cert", cert, f"{prefix}key", key)


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
