"""Channels to other processes, plain or with TLS, the options of both ends, and when to dial again."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from specwire.core.invalid import InvalidParameter
from specwire.rpc.decoding import MOST_ANSWERED_PARTS, message_type
from specwire.rpc.errors import reading
from specwire.rpc.keys import Token, show, text_of
from specwire.rpc.tls import ClientTls

# ----------------------------------------------------------------------------------------------------------------------
# Options of every channel and every server, in one place so that both ends accept what the other does.

Options = list[tuple[str, int | str]]

# A prompt of 128k tokens takes less than 1 MiB; a tokenizer.json up to about 10 MiB.
MOST_MESSAGE_BYTES = 16 * 1024 * 1024

# A dead peer, or a connection that a proxy forgot, is noticed within 10 s, also while no call is running; within 5 s
# while something is sent. Both ends ping. That is longer than a network's short breaks, often enough for proxies and
# NATs that cut idle connections, and far from what proxies take for a flood.
PING_EVERY_MS = 5_000
PING_TIMEOUT_MS = 5_000

# How often a client may ping before the server calls it abuse; below PING_EVERY_MS, for clocks and pauses differ.
LEAST_PING_INTERVAL_MS = 2_500

# Redialling: gRPC's own backoff grows to two minutes, too long where a session waits to be resumed.
FIRST_REDIAL_MS = 100
MOST_REDIAL_MS = 2_000
# For TCP's and TLS's handshakes and HTTP/2's settings, four round trips, some of them lost: not only for near peers.
CONNECT_MS = 10_000

# Bytes that a client takes of a stream that nobody reads: a few hundred tokens. By itself gRPC lets that grow with the
# connection's speed. Further tokens wait at the service, which then decides no more.
READ_AHEAD_BYTES = 16 * 1024

# Calls that may wait for a busy server to take them up. gRPC's own bounds are 1,000 and 3,000: from the first on it
# refuses some at random, as CANCELLED, which is the wrong status for a busy server.
PENDING_CALLS, MOST_PENDING_CALLS = 8_192, 16_384


def _shared() -> Options:
    return [
        ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # this one ends the connection; its default is a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # 0: no limit, or pings would stop on an idle stream
    ]


def channel_options(target: str, read_ahead: int = 0) -> Options:
    """Options for a client channel to `target` (HOST:PORT).

    A loopback target is dialled directly: HTTP proxies are meant for targets outside of the machine.
    read_ahead: bytes that a stream may bring before they are read; 0 leaves that to gRPC.
    """
    redial: Options = [
        ("grpc.initial_reconnect_backoff_ms", FIRST_REDIAL_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # in spite of its name, how long an attempt may take
        ("grpc.max_reconnect_backoff_ms", MOST_REDIAL_MS),
    ]
    direct: Options = [("grpc.enable_http_proxy", 0)] if is_loopback(host_of(target)) else []
    ahead: Options = [("grpc.http2.lookahead_bytes", read_ahead), ("grpc.http2.bdp_probe", 0)] if read_ahead else []
    return _shared() + redial + direct + ahead


def server_options() -> Options:
    """Options for a server.

    SO_REUSEPORT is off: with it, a second process binds the same port without an error and takes half the calls.
    """
    return [
        *_shared(),
        ("grpc.so_reuseport", 0),
        ("grpc.server.max_pending_requests", PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING_CALLS),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_INTERVAL_MS),
    ]


def host_of(target: str) -> str:
    """The host part of HOST:PORT, without an IPv6 address's brackets."""
    return target.rpartition(":")[0].strip("[]")


def exposure(listen: str, *, encrypted: bool, insecure: bool) -> str | None:
    """Why HOST:PORT must not be listened on, or None: other machines could read along without permission."""
    if encrypted or insecure or is_loopback(host_of(listen) or "localhost"):
        return None
    return (
        f"{listen} can be reached from other machines and the connection is not encrypted; "
        "give --tls-cert and --tls-key, use a loopback address, or --insecure if the network is trusted"
    )


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine only; any name but localhost counts as foreign."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ----------------------------------------------------------------------------------------------------------------------
# How long to wait before the next attempt.

STABLE_S = 5.0


class Backoff:
    """Waits that double from `first` to `most` seconds, each scattered over its upper half.

    Scattered, so that many that lost the same peer do not all come back at the same moment.
    """

    def __init__(self, first: float, most: float) -> None:
        self._first = self._next = first
        self._most = most
        self._random = random.Random()

    def next(self, held: float = 0.0) -> float:
        """Seconds to wait now. held: for which a connection did; what broke a short one may still be there."""
        if held > STABLE_S:
            self.reset()
        wait, self._next = self._next, min(self._most, 2 * self._next)
        return wait * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Reset after an attempt that worked."""
        self._next = self._first


# ----------------------------------------------------------------------------------------------------------------------
# Channels to other processes, plain or with TLS, and why one fails.

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
T = TypeVar("T")


def open_channel(
    address: str, tls: ClientTls | None = None, token: Token | str = "", read_ahead: int = 0
) -> grpc.aio.Channel:
    """A channel to HOST:PORT for asyncio; connects when it is used. Raises as `check_token_is_safe`.

    tls, token: as they are now; who takes up renewed ones opens another channel. read_ahead: see `channel_options`.
    """
    channel: grpc.aio.Channel = _opened(grpc.aio, address, tls, token, read_ahead)
    return channel


def open_peer_channel(address: str, tls: ClientTls | None = None, token: Token | str = "") -> grpc.aio.Channel:
    """Like open_channel. What is answered on it is to be taken by `specwire.rpc.errors.readable` or `ReadableStream`.

    Its parts are counted before any is made, as a server does with what it is asked.
    """
    channel = open_channel(address, tls, token)
    for kind in KINDS:
        setattr(channel, kind, _counting(getattr(channel, kind)))
    return channel


def open_blocking_channel(
    address: str, tls: ClientTls | None = None, token: str = "", read_ahead: int = 0
) -> grpc.Channel:
    """Like open_channel, for threads."""
    channel: grpc.Channel = _opened(grpc, address, tls, token, read_ahead)
    return channel


def immediate(answer: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as done:
        returned: T = done.value
        return returned
    raise RuntimeError("it waits")


def check_token_is_safe(address: str, tls: ClientTls | None, token: Token | str) -> None:
    """InvalidParameter where a token would leave this machine unencrypted: anybody on the way could use it."""
    if token and tls is None and not is_loopback(host_of(address)):
        raise InvalidParameter("token", f"is not sent to {address} unencrypted: give --tls or --tls-ca")


def _opened(library: Any, address: str, tls: ClientTls | None, token: Token | str, read_ahead: int) -> Any:
    """A channel of gRPC's library for asyncio, or of that for threads, on which every call shows `token`.

    gRPC's own call credentials are for encrypted channels only, and its interceptors for asyncio cost tasks per write.
    """
    check_token_is_safe(address, tls, token)
    options, shown = channel_options(address, read_ahead), show(text_of(token))
    if tls is None:
        channel = library.insecure_channel(address, options=options)
    else:
        channel = library.secure_channel(address, tls.credentials(), options=options)
    for kind in KINDS if shown else ():
        setattr(channel, kind, _adding(getattr(channel, kind), shown))
    return channel


def _counting(make: Callable[..., Any]) -> Callable[..., Any]:
    def method(name: str, request_serializer: Any = None, response_deserializer: Any = None, **more: object) -> Any:
        kind = message_type(name, answer=True)
        return make(name, request_serializer, reading(response_deserializer, kind, MOST_ANSWERED_PARTS), **more)

    return method


def _adding(make: Callable[..., Any], shown: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """`make`, whose methods carry `shown` in the metadata of their calls."""

    def method(*args: object, **kwargs: object) -> Callable[..., Any]:
        made = make(*args, **kwargs)

        def call(*given: object, metadata: Any = (), **named: object) -> Any:
            return made(*given, metadata=(*(metadata or ()), *shown), **named)

        return call

    return method


def distrust(details: str, address: str) -> str | None:
    """Why the two ends will never trust each other, or None if `details` does not say that.

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
