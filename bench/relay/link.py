"""A relay process as its owner sees it, and its own cost: round trips and throughput of an echo through it."""

from __future__ import annotations

import base64
import socket
import sys
import threading
import time
from dataclasses import dataclass

from bench.harness.child import BenchChild, Message
from bench.harness.interval import percentile
from bench.relay.frames import Count

LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums by direction; up is from who dialled."""

    up: Count
    down: Count


class RelayLink:
    """A relay between whoever dials `address` and the server at `to`; close it, or use it as a context manager."""

    def __init__(self, to: str, listen: str = "127.0.0.1:0") -> None:
        self._child = BenchChild("relay", [sys.executable, "-m", "bench.relay.relay", "--listen", listen, "--to", to])
        try:
            self.address = str(self._child.answer(LIMIT_S)["address"])
        except BaseException:
            self._child.stop()
            raise

    def shape(self, rtt_ms: float, jitter_ms: float = 0.0, mbit: float = 0.0) -> None:
        self._ask({"do": "shape", "rtt_ms": rtt_ms, "jitter_ms": jitter_ms, "mbit": mbit})

    def stall(self, seconds: float) -> None:
        """Hold everything back; connections live on."""
        self._ask({"do": "stall", "seconds": seconds})

    def cut(self, seconds: float) -> None:
        """Reset all connections, and new ones for so long."""
        self._ask({"do": "cut", "seconds": seconds})

    def traffic(self) -> Traffic:
        answer = self._ask({"do": "count"})
        return Traffic(_count(answer["up"]), _count(answer["down"]))

    def late_ms(self) -> dict[str, float]:
        """Quantiles (0.5, 0.9, 0.99) of how late deliveries were."""
        late: dict[str, float] = self._ask({"do": "count"})["late_ms"]
        return late

    def capture(self) -> None:
        """Keep the payload of DATA frames of the connections that are open."""
        self._ask({"do": "capture"})

    def captured(self) -> tuple[list[bytes], list[bytes]]:
        """The payload of the oldest stream of each connection, (up, down); capturing ends.

        That is the Connect stream: calls that were made before it are over, and later ones are not what is counted. A
        connection that was idle has none.
        """
        connections = self._ask({"do": "captured"})["connections"]
        up, down = ([_oldest(one[name]) for one in connections if one[name]] for name in ("up", "down"))
        return up, down

    def close(self) -> None:
        self._child.stop()

    def __enter__(self) -> RelayLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Message) -> Message:
        return self._child.ask(request, LIMIT_S)


def _count(fields: dict[str, int]) -> Count:
    return Count(fields["bytes"], fields["frames"], fields["data_frames"], fields["data_bytes"])


def _oldest(streams: dict[str, str]) -> bytes:
    """The payload of the stream of the lowest number."""
    return base64.b64decode(streams[min(streams, key=int)])


PINGS = 100
PING = b"x" * 64
BULK = 64 << 20
PIECE = 1 << 18
ECHO_LIMIT_S = 60.0


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
            with socket.create_connection((dialled[0], int(dialled[2])), ECHO_LIMIT_S) as end:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                round_trips = tuple(_round_trips(end, link, rtt, pings) for rtt in rtts_ms)
                link.shape(0)
                speed = _throughput(end, bulk)
            late = link.late_ms()
        server.join(ECHO_LIMIT_S)
    return Gauge(round_trips, speed, late)


def _echo(listener: socket.socket) -> None:
    end, _ = listener.accept()
    end.settimeout(ECHO_LIMIT_S)
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
    sender.join(ECHO_LIMIT_S)
    return size / 1e6 / (time.perf_counter() - began)


def _take(end: socket.socket, size: int) -> None:
    while size:
        piece = end.recv(min(size, PIECE))
        if not piece:
            raise ConnectionError("the relay closed the connection")
        size -= len(piece)
