"""What a caller may hold: connections, half requests, bodies, unread answers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from threading import Event
from typing import Any

import pytest

from orchestrator.http import bodies, connection
from specwire.core.messages import FinishReason
from tests.orchestrator.http.front import COMPLETIONS, LIMIT_S, Front, another
from tests.orchestrator.http.test_leaving import not_reading
from tests.orchestrator.stack import PROMPT
from tests.wait import asked_blocking, eventually

WISH: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": 3, "temperature": 0, "ignore_eos": True}
SOON_S = 0.5


@contextmanager
def dialled(door: Front) -> Iterator[socket.socket]:
    host, _, port = door.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as line:
        yield line


def rest(line: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the one answer that comes before the connection ends."""
    head, _, body = line.makefile("rb").read().partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def status_of(line: socket.socket) -> int:
    """Of the next answer, which is read whole."""
    answer = HTTPResponse(line)
    answer.begin()
    answer.read()
    return answer.status


def posted(size: int, path: str = COMPLETIONS) -> bytes:
    """A request's head."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()


# Requests that do not come


def test_a_head_that_does_not_come(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_LIMIT_S", SOON_S)
    with dialled(door) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost:")
        status, told = rest(line)
    assert (status, told["error"]["code"]) == (408, "timeout")
    with dialled(door) as silent:
        assert silent.recv(1) == b""


def test_a_second_head_that_does_not_come(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a connection that is kept, drop by drop: each byte begins no new time."""
    monkeypatch.setattr(connection, "HEAD_LIMIT_S", SOON_S)
    with dialled(door) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(line) == 200
        began = time.monotonic()
        with pytest.raises(OSError):  # reset or broken pipe: whichever the system says
            while time.monotonic() < began + LIMIT_S:
                line.sendall(b"G")
                time.sleep(SOON_S / 10)


@pytest.mark.parametrize(("path", "first"), [("/nowhere", 404), (COMPLETIONS, 408)])
def test_a_body_that_does_not_come(door: Front, path: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody waits for it: behind an answer that needs none."""
    monkeypatch.setattr(connection, "BODY_LIMIT_S", SOON_S)
    monkeypatch.setattr(connection, "BODY_SLACK_S", SOON_S)
    monkeypatch.setattr(bodies, "BODY_LIMIT_S", SOON_S)
    with dialled(door) as line:
        line.sendall(posted(100, path) + b"{")
        status, _ = rest(line)
    assert status == first


def test_requests_that_come_in_time_are_kept_apart_and_answered(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of one request are not those of the next: a kept connection outlives all of them."""
    for name in ("HEAD_LIMIT_S", "BODY_LIMIT_S", "BODY_SLACK_S"):
        monkeypatch.setattr(connection, name, 1.0)
    body = json.dumps(WISH).encode()

    def statuses() -> list[int]:
        told = []
        with dialled(door) as line, suppress(OSError, HTTPException):
            for pause in (2.5, 0.0):  # longer than all of them
                line.sendall(posted(len(body)))
                line.sendall(body)
                told.append(status_of(line))
                time.sleep(pause)
        return told

    # On a busy machine a second may pass within a request, too.
    asked_blocking(statuses, lambda told: told == [200, 200])


# Too much


def test_too_many_connections(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    with another(door) as crowded, ExitStack() as held:
        monkeypatch.setattr(connection, "MOST_CONNECTIONS", 2)
        monkeypatch.setattr(connection, "LEAST_CONNECTIONS", 1)
        for _ in range(2):
            line = held.enter_context(dialled(crowded))
            line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(line) == 200
        with dialled(crowded) as refused:
            status, told = rest(refused)
        assert (status, told["error"]["code"]) == (503, "too_many_connections")
        held.close()
        assert eventually(lambda: crowded.client.get("/health").status_code == 200)


def test_as_many_connections_as_there_are_files_for() -> None:
    assert 1 <= connection.most_connections() <= connection.MOST_CONNECTIONS


def test_a_tenants_bodies_at_once(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    body, there, take = json.dumps(WISH).encode().ljust(900), Event(), bodies.BodyReservation.take

    def taking(space: bodies.BodyReservation, size: int) -> None:
        take(space, size)
        if space.held >= 800:
            there.set()

    monkeypatch.setattr(bodies, "MOST_TENANT_BYTES", 1000)
    monkeypatch.setattr(bodies.BodyReservation, "take", taking)
    with dialled(door) as first:
        first.sendall(posted(900) + body[:800])
        assert there.wait(LIMIT_S)
        refused = door.client.post(COMPLETIONS, content=body)
        assert (refused.json()["error"]["code"], refused.headers["retry-after"]) == ("rate_limit_exceeded", "1")
        first.sendall(body[800:])
        assert status_of(first) == 200
    assert eventually(lambda: door.client.post(COMPLETIONS, content=body).status_code == 200)


def test_more_tokens_than_a_context_are_not_made_text_of(door: Front) -> None:
    context = door.client.get("/v1/models").json()["data"][0]["max_model_len"]
    answer = door.post("/detokenize", tokens=[5] * (context + 1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    assert door.post("/detokenize", tokens=[5] * context).status_code == 200


def test_a_client_that_never_reads_is_cut(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot hold its session, and a verifier's place, for ever."""
    monkeypatch.setattr(connection, "UNREAD_LIMIT_S", 2.0)
    with not_reading(door) as output:
        assert eventually(lambda: output.end is not None and output.end.reason is FinishReason.CANCELLED)
