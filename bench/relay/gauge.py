"""The relay's own cost: round trips and throughput of an echo through it, measured first."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

from bench.harness.interval import percentile
from bench.relay.link import RelayLink

PINGS = 100
PING = b"x" * 64
BULK = 64 << 20
PIECE = 1 << 18
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Milliseconds of an echo of 64 bytes through the relay told to delay by `wanted`."""

    wanted: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Gauge:
    """The relay measured; megabytes per second there and back with no delay."""

    round_trips: tuple[RoundTrip, ...]
    megabytes_per_second: float
    late_ms: dict[str, float]


def gauge(rtts_ms: tuple[float, ...] = (0.0, 20.0, 80.0), pings: int = PINGS, bulk: int = BULK) -> Gauge:
    """Measure a relay of its own to an echo server of its own, on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        server = threading.Thread(target=_echo, args=(listener,), daemon=True)
        server.start()
        with RelayLink(f"{host}:{port}") as link:
            dialled = link.address.rpartition(":")
            with socket.create_connection((dialled[0], int(dialled[2])), LIMIT_S) as end:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                round_trips = tuple(_round_trips(end, link, rtt, pings) for rtt in rtts_ms)
                link.shape(0)
                speed = _throughput(end, bulk)
            late = link.late_ms()
        server.join(LIMIT_S)
    return Gauge(round_trips, speed, late)


def _echo(listener: socket.socket) -> None:
    end, _ = listener.accept()
    end.settimeout(LIMIT_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with end:
        while piece := end.recv(PIECE):
            end.sendall(piece)


def _round_trips(end: socket.socket, link: RelayLink, rtt_ms: float, pings: int) -> RoundTrip:
    link.shape(rtt_ms)
    times = []
    for _ in range(pings):
        began = time.perf_counter()
        end.sendall(PING)
        _take(end, len(PING))
        times.append(1000 * (time.perf_counter() - began))
    return RoundTrip(rtt_ms, percentile(times, 50), percentile(times, 99))


def _throughput(end: socket.socket, size: int) -> float:
    sender = threading.Thread(target=end.sendall, args=(bytes(size),), daemon=True)
    began = time.perf_counter()
    sender.start()
    _take(end, size)
    sender.join(LIMIT_S)
    return size / 1e6 / (time.perf_counter() - began)


def _take(end: socket.socket, size: int) -> None:
    while size:
        piece = end.recv(min(size, PIECE))
        if not piece:
            raise ConnectionError("the relay closed the connection")
        size -= len(piece)
