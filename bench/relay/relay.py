"""A link of our own between two processes: delay, jitter, bandwidth, stall and cut, in user space.

    python -m bench.relay.relay --listen HOST:PORT --to HOST:PORT

Prints {"address": ...}, then takes commands as lines of JSON on stdin and answers each on stdout (`Relay.command`).
The end of stdin ends it. What is in flight is not serialised: pieces wait in a queue for their due time, and reading
goes on meanwhile. A connection is set up without delay; only what it carries is delayed. select() and not epoll,
whose timeouts Python rounds to milliseconds.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from bench.relay.frames import HEADER, Count, Frames

READ_SIZE = 1 << 18
# Beyond this the relay stops reading, as a full buffer in a network would.
MOST_QUEUED = 32 << 20
KEPT_LATENESS = 1 << 14


@dataclass(slots=True)
class LineShape:
    """How one direction of a link behaves; seconds and bytes per second. bandwidth 0: unlimited.

    stalled_until: nothing is delivered before; what is under way stays under way.
    """

    delay: float = 0.0
    jitter: float = 0.0
    bandwidth: float = 0.0
    stalled_until: float = 0.0


@dataclass(slots=True)
class Lateness:
    """By how many seconds deliveries missed their due time: the latest ones."""

    kept: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENESS))

    def quantile(self, share: float) -> float:
        ordered = sorted(self.kept)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class RelayWay:
    """Bytes from `source` to `sink`. An empty piece in the queue is the end of the stream.

    Invariant: due times never fall, so bytes keep their order whatever the jitter.
    """

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        shape: LineShape,
        frames: Frames,
        lateness: Lateness,
        random: Random,
    ) -> None:
        self.source, self.sink, self.frames = source, sink, frames
        self.shape = shape
        self.reading = True
        self.ended = False
        self.blocked = False
        self._queue: deque[tuple[float, bytes]] = deque()
        self._queued = 0
        self._line_free = 0.0
        self._last_due = 0.0
        self._lateness = lateness
        self._random = random

    @property
    def wants_to_read(self) -> bool:
        return self.reading and self._queued < MOST_QUEUED

    def next_due(self) -> float | None:
        """When something can be delivered; None if nothing waits for its time."""
        if not self._queue or self.blocked:
            return None
        return max(self._queue[0][0], self.shape.stalled_until)

    def read(self, now: float) -> None:
        """Take in what has come. OSError if the connection broke."""
        data = self.source.recv(READ_SIZE)
        self.frames.feed(data)
        self.reading = bool(data)
        self._queue.append((self._due(len(data), now), data))
        self._queued += len(data)

    def _due(self, size: int, now: float) -> float:
        """The line is busy with a piece for size / bandwidth, then the piece travels."""
        if self.shape.bandwidth:
            self._line_free = max(now, self._line_free) + size / self.shape.bandwidth
            now = self._line_free
        due = now + max(0.0, self.shape.delay + self.shape.jitter * self._random.uniform(-1.0, 1.0))
        self._last_due = max(self._last_due, due)
        return self._last_due

    def deliver(self, now: float) -> None:
        """Pass on everything that is due. OSError if the connection broke."""
        self.blocked = False
        while (due := self.next_due()) is not None and due <= now:
            planned, data = self._queue.popleft()
            if not data:
                self.sink.shutdown(socket.SHUT_WR)
                self.ended = True
                return
            if self.shape.stalled_until <= planned:
                self._lateness.kept.append(now - planned)
            self._send(planned, data)

    def _send(self, planned: float, data: bytes) -> None:
        try:
            sent = self.sink.send(data)
        except BlockingIOError:
            sent = 0
        self._queued -= sent
        if sent < len(data):
            self._queue.appendleft((planned, data[sent:]))
            self.blocked = True


UP, DOWN = "up", "down"
CONNECT_LIMIT_S = 2.0
# The relay stands for a network, which does not wait for a core.
NICENESS = -15
# A socket closed so resets its connection.
RESET = struct.pack("ii", 1, 0)
MOST_SECONDS = 3600.0


class CommandError(ValueError):
    """A command that cannot be carried out; the message says why."""


@dataclass(frozen=True, slots=True)
class RelayedPair:
    """A connection from the dialling side (client) and the one to the served side."""

    client: socket.socket
    server: socket.socket
    up: RelayWay
    down: RelayWay

    @property
    def ways(self) -> tuple[tuple[str, RelayWay], ...]:
        return ((UP, self.up), (DOWN, self.down))

    @property
    def over(self) -> bool:
        return self.up.ended and self.down.ended


class Relay:
    """Owns its sockets; `run` ends with the end of `control`, a file descriptor."""

    def __init__(self, listen: tuple[str, int], to: tuple[str, int], control: int, seed: int = 0) -> None:
        self._listener = socket.create_server(listen)
        self._listener.setblocking(False)
        self._to = to
        self._control = control
        self._commands = b""
        self._open = True
        self._pairs: list[RelayedPair] = []
        self._shapes = {UP: LineShape(), DOWN: LineShape()}
        self._past = {UP: Count(), DOWN: Count()}
        self._lateness = Lateness()
        self._cut_until = 0.0
        self._random = Random(seed)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def run(self) -> None:
        try:
            while self._open:
                self._turn()
        finally:
            for pair in list(self._pairs):
                self._drop(pair)
            self._listener.close()

    def _turn(self) -> None:
        """Wait for the next event, then do everything that is due."""
        ways = [(pair, way) for pair in self._pairs for _, way in pair.ways]
        sources = {way.source: (pair, way) for pair, way in ways if way.wants_to_read}
        blocked = [way.sink for _, way in ways if way.blocked]
        due = [at for _, way in ways if (at := way.next_due()) is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        watched: list[int | socket.socket] = [self._control, self._listener, *sources]
        readable, _, _ = select.select(watched, blocked, [], timeout)
        for one in readable:
            if isinstance(one, int):
                self._take_commands()
            elif one is self._listener:
                self._accept()
            else:
                self._guard(*sources[one], read=True)
        for pair, way in ways:
            self._guard(pair, way, read=False)

    def _guard(self, pair: RelayedPair, way: RelayWay, read: bool) -> None:
        """A connection that breaks at one end breaks at the other."""
        if pair not in self._pairs:
            return
        try:
            if read:
                way.read(time.monotonic())
            else:
                way.deliver(time.monotonic())
        except OSError:
            self._drop(pair)
            return
        if pair.over:
            self._drop(pair)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if time.monotonic() < self._cut_until:
            _reset(client)
            return
        try:
            server = socket.create_connection(self._to, CONNECT_LIMIT_S)
        except OSError:
            _reset(client)
            return
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up = RelayWay(client, server, self._shapes[UP], Frames(client=True), self._lateness, self._random)
        down = RelayWay(server, client, self._shapes[DOWN], Frames(client=False), self._lateness, self._random)
        self._pairs.append(RelayedPair(client, server, up, down))

    def _drop(self, pair: RelayedPair) -> None:
        self._pairs.remove(pair)
        for name, way in pair.ways:
            self._past[name].add(way.frames.count)
        for end in (pair.client, pair.server):
            if pair.over:
                end.close()
            else:
                _reset(end)

    # Commands

    def _take_commands(self) -> None:
        data = os.read(self._control, 1 << 16)
        self._open = bool(data)
        self._commands += data
        while b"\n" in self._commands:
            line, _, self._commands = self._commands.partition(b"\n")
            try:
                answer = self.command(json.loads(line))
            except (CommandError, json.JSONDecodeError) as error:
                answer = {"error": str(error)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    def command(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Carry out one of

        {"do": "shape", "rtt_ms": R, "jitter_ms": J, "mbit": B}: R/2 each way, each piece up to J more or less,
            B megabits per second each way (0: unlimited); from now on, for new and open connections;
        {"do": "stall", "seconds": S}: hold everything back for S seconds;
        {"do": "cut", "seconds": S}: reset all connections, and new ones for S seconds; what is in flight is lost;
        {"do": "count"}: sums by direction (up is from who dialled), and by how much deliveries were late;
        {"do": "capture"}, {"do": "captured"}: keep the payload of DATA frames; give it, by connection and stream.
        """
        match request.get("do"):
            case "shape":
                self._reshape(request)
            case "stall":
                until = time.monotonic() + _number(request, "seconds", MOST_SECONDS)
                for shape in self._shapes.values():
                    shape.stalled_until = until
            case "cut":
                self._cut_until = time.monotonic() + _number(request, "seconds", MOST_SECONDS)
                for pair in list(self._pairs):
                    self._drop(pair)
            case "count":
                return self._count()
            case "capture":
                for pair in self._pairs:
                    pair.up.frames.capture()
                    pair.down.frames.capture()
            case "captured":
                return {"connections": [self._captured(pair) for pair in self._pairs]}
            case other:
                raise CommandError(f"do: no such command: {other!r}")
        return {"ok": True}

    def _reshape(self, request: Mapping[str, Any]) -> None:
        delay = _number(request, "rtt_ms", 60_000.0) / 2000
        jitter = _number(request, "jitter_ms", 60_000.0) / 1000
        bandwidth = _number(request, "mbit", 1e6) * 1e6 / 8
        for shape in self._shapes.values():
            shape.delay, shape.jitter, shape.bandwidth = delay, jitter, bandwidth

    def _count(self) -> dict[str, object]:
        answer: dict[str, object] = {}
        for name, past in self._past.items():
            total = Count()
            total.add(past)
            for pair in self._pairs:
                total.add(dict(pair.ways)[name].frames.count)
            answer[name] = {**asdict(total), "frame_header": HEADER}
        answer["late_ms"] = {str(share): round(1000 * self._lateness.quantile(share), 4) for share in (0.5, 0.9, 0.99)}
        answer["connections"] = len(self._pairs)
        return answer

    def _captured(self, pair: RelayedPair) -> dict[str, dict[str, str]]:
        return {
            name: {
                str(stream): base64.b64encode(payload).decode()
                for stream, payload in way.frames.take_captured().items()
            }
            for name, way in pair.ways
        }


def _number(request: Mapping[str, Any], name: str, most: float) -> float:
    value = request.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise CommandError(f"{name}: must be a number from 0 to {most:g}, not {value!r}")
    return float(value)


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    end.close()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.relay.relay", description="A link with a delay.")
    parser.add_argument("--listen", type=_address, default=("127.0.0.1", 0), metavar="ADDR", help="HOST:PORT")
    parser.add_argument("--to", type=_address, required=True, metavar="ADDR", help="HOST:PORT")
    args = parser.parse_args()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    relay = Relay(args.listen, args.to, sys.stdin.fileno())
    sys.stdout.write(json.dumps({"address": relay.address}) + "\n")
    sys.stdout.flush()
    relay.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
