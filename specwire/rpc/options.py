"""Options of every channel and every server, in one place so that both ends accept what the other does."""

from __future__ import annotations

import ipaddress

Options = list[tuple[str, int | str]]

# A prompt of 128k tokens takes less than 1 MiB; a tokenizer.json up to about 10 MiB.
MOST_MESSAGE_BYTES = 16 * 1024 * 1024

# A dead peer, or a connection that a proxy forgot, is noticed within 10 s, also while no call is running; within 5 s
# while something is sent. Both ends ping. Longer than a network's short breaks, which the connection outlives; often
# enough for any proxy or address translation that cuts what is idle, and far from what proxies take for a flood.
PING_EVERY_MS = 5_000
PING_TIMEOUT_MS = 5_000

# How often a client may ping before the server calls it abuse; below PING_EVERY_MS, for clocks and pauses differ.
LEAST_PING_INTERVAL_MS = 2_500

# Redialling: gRPC's own backoff grows to two minutes, too long where a session waits to be resumed.
FIRST_REDIAL_MS = 100
MOST_REDIAL_MS = 2_000
# For TCP's and TLS's handshakes and HTTP/2's settings, four round trips, some of them lost: not only for near peers.
CONNECT_MS = 10_000

# A client takes so many bytes of a stream that nobody reads, a few hundred tokens; by itself gRPC lets that grow with
# the connection's speed. What is beyond it waits at the service, which then decides no more.
READ_AHEAD_BYTES = 16 * 1024

# Calls that may wait for a busy server to take them up. gRPC's own bounds are 1,000 and 3,000: from the first on it
# refuses some by chance, as CANCELLED, which is no word for a server that is busy.
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

    A loopback target is dialled directly: HTTP proxy variables are meant for the way out of the machine.
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
    """Why HOST:PORT must not be listened on, or None: others would read along, and nobody has said that they may."""
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
