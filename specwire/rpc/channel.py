"""Channels to other processes, plain or with TLS, and why one cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from specwire.core.sampling import InvalidParameter
from specwire.rpc.keys import show
from specwire.rpc.options import channel_options, host_of, is_loopback
from specwire.rpc.tls import ClientTls

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
C = TypeVar("C", grpc.Channel, grpc.aio.Channel)


def open_channel(address: str, tls: ClientTls | None = None, token: str = "", read_ahead: int = 0) -> grpc.aio.Channel:
    """A channel to HOST:PORT for asyncio; connects when it is used. Raises as `check_token_is_safe`.

    read_ahead: see `channel_options`.
    """
    check_token_is_safe(address, tls, token)
    options = channel_options(address, read_ahead)
    if tls is None:
        return _showing(grpc.aio.insecure_channel(address, options=options), token)
    return _showing(grpc.aio.secure_channel(address, tls.credentials(), options=options), token)


def open_blocking_channel(
    address: str, tls: ClientTls | None = None, token: str = "", read_ahead: int = 0
) -> grpc.Channel:
    """As open_channel, for threads."""
    check_token_is_safe(address, tls, token)
    options = channel_options(address, read_ahead)
    if tls is None:
        return _showing(grpc.insecure_channel(address, options=options), token)
    return _showing(grpc.secure_channel(address, tls.credentials(), options=options), token)


def check_token_is_safe(address: str, tls: ClientTls | None, token: str) -> None:
    """InvalidParameter where a token would leave this machine unencrypted: whoever reads it can use it."""
    if token and tls is None and not is_loopback(host_of(address)):
        raise InvalidParameter("token", f"is not sent to {address} unencrypted: give --tls or --tls-ca")


def _showing(channel: C, token: str) -> C:
    """The channel, on which every call shows `token`.

    gRPC's own call credentials are for encrypted channels only, and its interceptors for asyncio cost tasks per write.
    """
    if token:
        for kind in KINDS:
            setattr(channel, kind, _adding(getattr(channel, kind), show(token)))
    return channel


def _adding(make: Callable[..., Any], shown: tuple[tuple[str, str], ...]) -> Callable[..., _Shown]:
    """`make`, whose methods carry `shown` in the metadata of their calls."""

    def method(*args: object, **kwargs: object) -> _Shown:
        return _Shown(make(*args, **kwargs), shown)

    return method


class _Shown:
    """A method as generated stubs call it: at once, or for later."""

    def __init__(self, method: Any, shown: tuple[tuple[str, str], ...]) -> None:
        self._method = method
        self._shown = shown

    def __call__(self, *given: object, metadata: Any = (), **named: object) -> object:
        return self._method(*given, metadata=(*(metadata or ()), *self._shown), **named)

    def future(self, *given: object, metadata: Any = (), **named: object) -> object:
        return self._method.future(*given, metadata=(*(metadata or ()), *self._shown), **named)


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
