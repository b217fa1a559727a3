"""Counts what an HTTP/2 connection in plaintext carries in one direction (RFC 9113, section 4.1), as it passes by."""

from __future__ import annotations

from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER = 9
DATA, SETTINGS = 0x0, 0x4
PADDED = 0x8
MOST_CAPTURED = 8 << 20


@dataclass(slots=True)
class Count:
    """Sums since the start.

    Attributes:
        bytes: everything that TCP carried.
        data_frames, data_bytes: DATA frames, and their payload: gRPC's messages with its prefix of 5 bytes each.
    """

    bytes: int = 0
    frames: int = 0
    data_frames: int = 0
    data_bytes: int = 0

    def add(self, other: Count) -> None:
        self.bytes += other.bytes
        self.frames += other.frames
        self.data_frames += other.data_frames
        self.data_bytes += other.data_bytes


class Frames:
    """Reads one direction of a connection, whatever pieces it comes in. Bytes that are no HTTP/2 are counted alone.

    `captured`: payload of DATA frames by stream, from `capture` on; at most MOST_CAPTURED bytes, of streams that were
    there before. Those that are opened meanwhile are other calls, such as looks at whether a peer is still the same.
    """

    def __init__(self, client: bool) -> None:
        """client: this direction begins with the client's preface. The other one begins with SETTINGS."""
        self.count = Count()
        self.capturing = False
        self.captured: dict[int, bytearray] = {}
        self._newest = self._captures_up_to = 0
        self._buffer = bytearray()
        self._preface = PREFACE if client else b""
        self._known = True

    def feed(self, data: bytes) -> None:
        self.count.bytes += len(data)
        if self._known:
            self._buffer += data
            self._read()

    def capture(self) -> None:
        self.capturing, self._captures_up_to = True, self._newest

    def take_captured(self) -> dict[int, bytes]:
        """What was captured; capturing ends."""
        taken = {stream: bytes(payload) for stream, payload in self.captured.items()}
        self.capturing, self.captured = False, {}
        return taken

    def _read(self) -> None:
        if not self._skip_preface():
            return
        while self._known and len(self._buffer) >= HEADER:
            length = int.from_bytes(self._buffer[:3], "big")
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9], "big") & 0x7FFFFFFF
            if self.count.frames == 0 and (kind, stream) != (SETTINGS, 0):
                self._give_up()
            elif len(self._buffer) < HEADER + length:
                return
            else:
                self._frame(kind, flags, stream, bytes(self._buffer[HEADER : HEADER + length]))
                del self._buffer[: HEADER + length]

    def _skip_preface(self) -> bool:
        """Whether frames follow in the buffer."""
        have = min(len(self._buffer), len(self._preface))
        if self._buffer[:have] != self._preface[:have]:
            self._give_up()
            return False
        del self._buffer[:have]
        self._preface = self._preface[have:]
        return not self._preface

    def _give_up(self) -> None:
        self._known = False
        self._buffer.clear()

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.count.frames += 1
        self._newest = max(self._newest, stream)
        if kind != DATA:
            return
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        self.count.data_frames += 1
        self.count.data_bytes += len(payload)
        wanted = self.capturing and stream <= self._captures_up_to
        if wanted and sum(map(len, self.captured.values())) + len(payload) <= MOST_CAPTURED:
            self.captured.setdefault(stream, bytearray()).extend(payload)
