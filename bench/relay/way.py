"""One direction of one connection through the relay: a queue of (due time, bytes), never a sleep."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field
from random import Random

from bench.relay.frames import Frames

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
