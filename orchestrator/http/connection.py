"""One HTTP/1.1 connection: uvicorn's, with bounds on how long a request may take to come, and its answer to be taken.

Deadlines are the connection's own, so that they also hold where nobody reads: behind an answer that did not wait for
its request's end, and for paths that there are none of.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.http.bodies import BODY_LIMIT_S
from orchestrator.http.errors import INVALID, SERVER, Failure
from specwire.rpc.options import PING_EVERY_MS, PING_TIMEOUT_MS, READ_AHEAD_BYTES

# A request's line and headers together: so much, and so long from its first byte, or the connection's beginning, on.
MOST_HEADER_BYTES = 16 * 1024
HEAD_LIMIT_S = 30.0
# Beyond what an endpoint gives a body, which then says so itself.
BODY_SLACK_S = 5.0
# A client that takes nothing of its answer for so long is gone, or wants to hold its session's place.
UNREAD_LIMIT_S = 600.0
# Each may hold READ_AHEAD_BYTES unread, and as much again of headers.
MOST_CONNECTIONS = 4096
# File descriptors that everything else may need.
OTHER_FILES = 128
LEAST_CONNECTIONS = 16


def most_connections() -> int:
    """As many as this process may have open, and no more than MOST_CONNECTIONS."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, files - OTHER_FILES))


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, with gRPC's bounds on what waits for a client that does not read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._in_body = False
        super().connection_made(made)
        if len(self.connections) > most_connections():
            self._refuse(Failure(503, "there are too many connections", SERVER, None, "too_many_connections", 1.0))
            return
        made.set_write_buffer_limits(high=READ_AHEAD_BYTES)
        _notice_dead_peers(made.get_extra_info("socket"))
        self._expect(HEAD_LIMIT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        if self.conn.their_state is h11.IDLE and self._arriving is None:
            self._expect(HEAD_LIMIT_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """What a request lacks must come in time."""
        in_body = self.conn.their_state is h11.SEND_BODY
        if in_body and not self._in_body:
            self._expect(BODY_LIMIT_S + BODY_SLACK_S)
        elif not in_body and (self._in_body or self.conn.their_state is not h11.IDLE):
            self._expect(None)
        self._in_body = in_body

    def _expect(self, seconds: float | None) -> None:
        """What is due must come within so long; None: nothing is due."""
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._arriving = None
        if self._in_body or self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self.transport.abort()  # an answer is under way, or nobody has asked for one
            return
        message = f"request: its line and headers did not come within {HEAD_LIMIT_S:g} s"
        self._refuse(Failure(408, message, INVALID, None, "timeout"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_LIMIT_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has too long headers, is told so as every other error is."""
        self._refuse(Failure(400, msg, INVALID, None, "invalid_http"))

    def _refuse(self, failure: Failure) -> None:
        """Without a request that could be answered: say so, and hang up."""
        answer = failure.response()
        head = [*answer.raw_headers, (b"connection", b"close")]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in head)
        self.transport.write(f"HTTP/1.1 {failure.status} \r\n".encode() + lines + b"\r\n" + bytes(answer.body))
        self.transport.close()


def _notice_dead_peers(connected: socket.socket) -> None:
    """As gRPC's pings do: a client that is gone without a word is noticed within 10 s."""
    every, timeout = PING_EVERY_MS // 1000, PING_TIMEOUT_MS // 1000
    with suppress(OSError, AttributeError):  # not every system has all of these
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, timeout)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)
