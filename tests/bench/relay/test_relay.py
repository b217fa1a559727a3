"""The relay between two real sockets: in order, delayed, not serialised; stalled, cut, counted."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest

from bench.harness.child import descendants
from bench.harness.runs import BenchError
from bench.relay.frames import Frames
from bench.relay.link import RelayLink
from bench.relay.relay import MOST_QUEUED, Lateness, LineShape, RelayWay

LIMIT_S = 120.0


@contextmanager
def served() -> Iterator[tuple[socket.socket, RelayLink]]:
    """A listening socket and a link to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        host, port = listener.getsockname()
        with RelayLink(f"{host}:{port}") as link:
            yield listener, link


def dialled(link: RelayLink) -> tuple[str, int]:
    host, _, port = link.address.rpartition(":")
    return host, int(port)


@contextmanager
def connected(listener: socket.socket, link: RelayLink) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_connection(dialled(link), LIMIT_S) as near:
        far, _ = listener.accept()
        far.settimeout(LIMIT_S)
        with far:
            yield near, far


def send_in_pieces(end: socket.socket, data: bytes) -> None:
    for at in range(0, len(data), 997):
        end.sendall(data[at : at + 997])


def take(end: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        piece = end.recv(1 << 16)
        assert piece, "closed too early"
        got += piece
    return got


def test_bytes_pass_in_order_both_ways_and_so_does_the_end() -> None:
    before = descendants(os.getpid())
    with served() as (listener, link), connected(listener, link) as (near, far):
        link.shape(rtt_ms=10, jitter_ms=5)
        sent = bytes(index % 251 for index in range(300_000))
        threading.Thread(target=send_in_pieces, args=(near, sent), daemon=True).start()
        assert take(far, len(sent)) == sent
        far.sendall(sent)
        assert take(near, len(sent)) == sent
        near.shutdown(socket.SHUT_WR)
        assert far.recv(1) == b""
        far.sendall(b"still open this way")
        assert take(near, 19) == b"still open this way"
    assert descendants(os.getpid()) == before


def test_what_is_in_flight_is_not_serialised() -> None:
    """Ten pieces sent one after the other are under way together: delayed by 1 s once, not ten times."""
    with served() as (listener, link), connected(listener, link) as (near, far):
        link.shape(rtt_ms=2000)
        began = time.monotonic()
        for index in range(10):
            near.sendall(bytes((index,)))
            time.sleep(0.005)
        assert take(far, 10) == bytes(range(10))
        assert 1.0 <= time.monotonic() - began < 5.0


def test_a_stall_holds_back_and_loses_nothing() -> None:
    with served() as (listener, link), connected(listener, link) as (near, far):
        near.sendall(b"first")
        assert take(far, 5) == b"first"
        link.stall(0.5)
        began = time.monotonic()
        near.sendall(b"second")
        assert take(far, 6) == b"second"
        assert time.monotonic() - began >= 0.45


def test_a_cut_resets_connections_and_refuses_new_ones_until_it_is_over(dead_address: str) -> None:
    """As does a relay to where nobody is."""
    nowhere = RelayLink(dead_address)
    with nowhere, socket.create_connection(dialled(nowhere), LIMIT_S) as near, pytest.raises(ConnectionResetError):
        near.recv(1)
    with served() as (listener, link):
        with connected(listener, link) as (near, far):
            link.cut(0.3)
            for end in (near, far):
                with pytest.raises(ConnectionResetError):
                    end.recv(1)
        with pytest.raises(ConnectionResetError), socket.create_connection(dialled(link), LIMIT_S) as refused:
            refused.recv(1)
        time.sleep(0.35)
        with connected(listener, link) as (near, far):
            near.sendall(b"again")
            assert take(far, 5) == b"again"


def test_traffic_is_counted_by_direction_past_connections_included() -> None:
    with served() as (listener, link):
        for _ in range(2):
            with connected(listener, link) as (near, far):
                near.sendall(b"abc")
                assert take(far, 3) == b"abc"
                far.sendall(b"xy")
                assert take(near, 2) == b"xy"
        traffic = link.traffic()
    assert (traffic.up.bytes, traffic.down.bytes) == (6, 4)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ({"do": "fly"}, "do: no such command: 'fly'"),
        ({"do": "shape", "rtt_ms": -1}, "rtt_ms: must be a number from 0 to 60000, not -1"),
        ({"do": "stall", "seconds": "x"}, "seconds: must be a number from 0 to 3600, not 'x'"),
    ],
)
def test_a_wrong_command_is_named_and_the_relay_goes_on(command: dict[str, object], message: str) -> None:
    with served() as (_, link):
        with pytest.raises(BenchError, match=message):
            link._ask(command)
        link.shape(0)


# One way, with a clock of the test's own


@pytest.fixture
def way() -> Iterator[tuple[RelayWay, socket.socket, socket.socket]]:
    """Give a way between two socket pairs, and the outer ends: (way, where to send, where it arrives)."""
    start, source = socket.socketpair()
    sink, end = socket.socketpair()
    with start, source, sink, end:
        for one in (start, source, sink, end):
            one.setblocking(False)
        yield RelayWay(source, sink, LineShape(), Frames(client=True), Lateness(), Random(1)), start, end


def test_bandwidth_makes_pieces_queue_for_the_line(way: tuple[RelayWay, socket.socket, socket.socket]) -> None:
    one, start, _ = way
    one.shape.delay, one.shape.bandwidth = 0.1, 1000.0
    start.send(bytes(500))
    one.read(10.0)
    assert one.next_due() == pytest.approx(10.6)
    start.send(bytes(500))
    one.read(10.0)
    one.deliver(10.7)
    assert one.next_due() == pytest.approx(11.1)


def test_a_shorter_delay_overtakes_nothing(way: tuple[RelayWay, socket.socket, socket.socket]) -> None:
    one, start, end = way
    one.shape.delay = 1.0
    start.send(b"slow")
    one.read(0.0)
    one.shape.delay = 0.1
    start.send(b"fast")
    one.read(0.0)
    one.deliver(0.5)
    with pytest.raises(BlockingIOError):
        end.recv(100)
    one.deliver(1.0)
    assert end.recv(100) == b"slowfast"


def test_reading_stops_when_too_much_is_queued(way: tuple[RelayWay, socket.socket, socket.socket]) -> None:
    one, start, _ = way
    one.shape.delay = 100.0
    queued = 0
    while one.wants_to_read:
        queued += start.send(bytes(1 << 16))
        one.read(0.0)
    assert MOST_QUEUED <= queued < MOST_QUEUED + (1 << 20)


def test_a_full_sink_keeps_the_rest(way: tuple[RelayWay, socket.socket, socket.socket]) -> None:
    one, start, end = way
    sent = 0
    while not one.blocked:
        sent += start.send(bytes(1 << 14))
        one.read(0.0)
        one.deliver(0.0)
    assert one.next_due() is None
    got = 0
    while got < sent:
        got += len(end.recv(1 << 16))
        one.deliver(0.0)
    assert got == sent
