"""Clients that leave, come back or do not read; a front door that closes."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2 as httpx
import pytest

from orchestrator.session.output import Output
from specwire.client import Client
from specwire.core.messages import FinishReason
from tests.orchestrator.http.front import COMPLETIONS, LIMIT_S, Front, another, text_of
from tests.orchestrator.stack import ALL, PROMPT, TARGET, held, plain
from tests.wait import asked_blocking, eventually

IDS = list(PROMPT)
LONG: dict[str, Any] = {"prompt": IDS, "temperature": 0, "ignore_eos": True, "max_tokens": 4000, "stream": True}


@contextmanager
def streaming(door: Front, wish: dict[str, Any], headers: dict[str, str] | None = None) -> Iterator[Iterator[str]]:
    """The lines of a stream that begins; it is left at the end."""
    with door.client.stream("POST", COMPLETIONS, json=wish, headers=headers) as answer:
        assert answer.status_code == 200
        yield answer.iter_lines()


def take_events(lines: Iterator[str], count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """That many events behind the opening one, and all ids."""
    events: list[dict[str, Any]] = []
    ids: list[str] = []
    for line in lines:
        if line.startswith("id: "):
            ids.append(line.removeprefix("id: "))
        if line.startswith("data: {"):
            events.append(json.loads(line.removeprefix("data: ")))
        if len(events) > count:
            break
    return events, ids


def ended(door: Front, session_id: str) -> FinishReason | None:
    with Client(door.serving.address) as client:
        return client.get_session(session_id).finish_reason


def test_leaving_a_stream_cancels_at_once(door: Front) -> None:
    with streaming(door, LONG) as lines:
        first = json.loads(next(lines).removeprefix("data: "))
    session_id = first["choices"][0]["specwire"]["session_id"]
    assert eventually(lambda: ended(door, session_id) is FinishReason.CANCELLED)


def test_leaving_before_the_answer_cancels_at_once(door: Front) -> None:
    """Not a stream: nothing has been answered yet when the client goes."""

    def left() -> set[str]:
        """The session that was begun, if it was in time."""
        known = set(door.serving.orchestrator.sessions)
        with httpx.Client(base_url=door.url, timeout=0.3) as raw, suppress(httpx.TimeoutException):
            raw.post(COMPLETIONS, json={**LONG, "stream": False})
        return set(door.serving.orchestrator.sessions) - known

    (session_id,) = asked_blocking(left, bool)
    assert eventually(lambda: ended(door, session_id) is FinishReason.CANCELLED)


def test_with_a_request_id_a_stream_goes_on_and_is_resumed_where_it_was(door: Front) -> None:
    wish = {**LONG, "max_tokens": 60, "request_id": "resumed"}
    with held(5), streaming(door, wish) as lines:
        events, ids = take_events(lines, 1)
    begun = text_of(events)
    session_id = events[0]["choices"][0]["specwire"]["session_id"]
    rest = door.events(COMPLETIONS, headers={"Last-Event-ID": ids[-1]}, **wish)
    assert rest[0]["choices"][0]["specwire"]["session_id"] == session_id
    assert begun + text_of(rest) == " ".join(map(str, plain(TARGET, PROMPT, 60)))
    assert begun
    assert text_of(rest)
    assert ended(door, session_id) is FinishReason.LENGTH
    again = {name: value for name, value in wish.items() if name not in ("stream", "request_id")}
    answer = door.client.post(COMPLETIONS, json=again, headers={"X-Specwire-Request-Id": "resumed"}).json()
    assert answer["choices"][0]["specwire"]["session_id"] == session_id
    assert answer["choices"][0]["text"] == begun + text_of(rest)


def test_a_place_that_is_none_of_the_stream(door: Front) -> None:
    wish = {**LONG, "max_tokens": 5, "request_id": "placed"}
    door.events(COMPLETIONS, **wish)
    for place, status in (("5", 400), ("4-0000000000000000-0-1", 500), ("9999-0000000000000000-0-1", 500)):
        answer = door.client.post(COMPLETIONS, json=wish, headers={"Last-Event-ID": place})
        assert answer.status_code == status, answer.text
    del wish["request_id"]
    answer = door.client.post(COMPLETIONS, json=wish, headers={"Last-Event-ID": "4-0000000000000000-0-1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


@contextmanager
def not_reading(door: Front) -> Iterator[Output]:
    """A client that asks and never reads, when its session stands still for that; the session's output."""
    body = json.dumps({**LONG, "details": True}).encode()
    host, port = door.url.removeprefix("http://").split(":")
    sessions = door.serving.orchestrator.sessions
    known = set(sessions)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((host, int(port)))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body)
        assert eventually(lambda: bool(set(sessions) - known))
        (session_id,) = set(sessions) - known
        output = sessions[session_id].view.output

        def stands() -> bool:
            before = len(output.tokens)
            time.sleep(0.5)
            return len(output.tokens) == before > 0

        assert eventually(stands)
        yield output


def test_a_client_that_does_not_read_holds_its_session_back(door: Front) -> None:
    """What it does not take is not decided: the session stands still long before its end."""
    with not_reading(door) as output:
        assert output.end is None
        assert len(output.tokens) < 2000
    assert eventually(lambda: output.end is not None and output.end.reason is FinishReason.CANCELLED)


def test_a_client_that_does_not_read_keeps_no_door_open(door: Front, caplog: pytest.LogCaptureFixture) -> None:
    before = door.loop.run(_tasks())
    with another(door) as closing, not_reading(closing):
        closing.loop.run(closing.serving.stop(0.0))
        assert closing.loop.run(_tasks()) <= before
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_front_door_that_closes_says_so_and_lets_streams_end(door: Front) -> None:
    before = door.loop.run(_tasks())
    with another(door) as closing:
        wish = {**LONG, "max_tokens": 40}
        with held(5) as let_go, streaming(closing, wish) as lines:
            next(lines)
            stopping = closing.loop.soon(closing.serving.stop(LIMIT_S))
            with httpx.Client(base_url=closing.url, timeout=LIMIT_S) as other:
                assert eventually(lambda: other.get("/ready").status_code == 503)
                refused = other.post(COMPLETIONS, json=wish)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            let_go(ALL)
            told = "".join(lines)
        assert told.endswith("data: [DONE]")
        assert '"finish_reason":"length"' in told
        stopping.result(LIMIT_S)
        assert eventually(lambda: closing.loop.run(_tasks()) <= before)


async def _tasks() -> set[asyncio.Task[Any]]:
    """Which tasks of front doors run: those of an earlier test's clients may be about to end."""
    names = ("_respond", "_disconnected", "run_asgi", "serve")
    running = [(task, getattr(task.get_coro(), "__qualname__", "")) for task in asyncio.all_tasks()]
    return {task for task, name in running if name.rpartition(".")[2] in names}
