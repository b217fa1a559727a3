"""Channels to other processes, plain or with TLS, and why one cannot be had."""

from __future__ import annotations

import grpc
import grpc.aio

from specwire.rpc.options import channel_options
from specwire.rpc.tls import ClientTls


def open_channel(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to HOST:PORT for asyncio; connects when it is used."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=channel_options(address))
    return grpc.aio.secure_channel(address, tls.credentials(), options=channel_options(address))


def open_blocking_channel(address: str, tls: ClientTls | None = None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=channel_options(address))
    return grpc.secure_channel(address, tls.credentials(), options=channel_options(address))


def distrust(details: str, address: str) -> str | None:
    """Why the two ends will not trust each other however often they try, or None if that is not what `details` says.

    Args:
        details: gRPC's, of a call with the status UNAVAILABLE. It carries OpenSSL's name of what failed.
    """
    if "Hostname Verification Check failed" in details:
        return f"the certificate of {address} is for another name"
    if "WRONG_VERSION_NUMBER" in details:
        return f"{address} does not speak TLS"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        reason = details.partition("CERTIFICATE_VERIFY_FAILED: ")[2].partition(":")[0]
        return f"the certificate of {address} is not trusted: {reason or 'it cannot be verified'}"
    return None


def unreachable(details: str, address: str, *, tls: bool) -> str | None:
    """One sentence for `details` of a connection that could not be made, or None if it is about something else.

    A server that wants TLS, or a client's certificate, closes the connection without a word.
    """
    if not details.startswith("failed to connect"):
        return None
    known = distrust(details, address)
    if known is None and details.endswith("Socket closed"):
        hint = "it may want a client's certificate that it trusts" if tls else "it may want TLS"
        known = f"{address} closed the connection at once: {hint}"
    return known or f"cannot connect to {address}"
