"""The HTTP front door, told anything over a socket, and what it may answer."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from typing import Any

from orchestrator.chat.templates import TemplateInvalid
from specwire.core.invalid import InvalidParameter
from tests.fuzz.requests import Flood, Raw
from tests.fuzz.services import LIMIT_S, Services

# What no caller may bring about. A contradicted place in a stream is data_loss, and a timeout that has passed 504.
OURS = ("internal_error", "unavailable")
ALLOWED = {*range(200, 500), 500, 504}
FIGURES_ALLOWED = (200, 400, 404, 405)
# What a caller's bytes may cost in processor time, ten times of what was measured: 20 ns for a byte of JSON, 10 us for
# a chunk, half a millisecond for a request; and how long a turn of the loop may be, for a neighbour waits as long.
BASE_COST_S, BYTE_COST_S, CHUNK_COST_S, REQUEST_COST_S = 0.5, 2e-7, 1e-4, 5e-3
TURN_COST_S = 1.0
ATTEMPTS = 3
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PARTS = {"message", "type", "param", "code"}
EVENTS = "text/event-stream"
# What ends a stream: of completions, and of a response.
DONE, LAST_EVENTS = b"[DONE]", ("response.completed", "response.incomplete", "response.failed", "error")


def tell(services: Services, name: str, raw: Raw) -> Counter[str]:
    """Send it; the status, and codes of what is refused. AssertionError if it is our own failure, or nothing comes."""
    answer = answer_of(services.http, raw)
    logged = services.failures.take()
    assert not logged, f"{name}: {raw.data!r}: {logged}"
    if answer is None:
        assert not raw.whole, f"{name} did not answer {raw.data!r}"
        return Counter({"CLOSED": 1})
    status, kind, body = answer
    seen = [str(status), *_codes(status, kind, body)]
    assert status in ALLOWED, f"{name} answered {status} {body!r} to {raw.data!r}"
    assert not set(seen) & set(OURS), f"{name} answered {status} {body!r} to {raw.data!r}"
    return Counter(each.upper() for each in seen)


def tell_figures(services: Services, raw: Raw) -> Counter[str]:
    """The same of the listener for figures, which knows no codes."""
    answer = answer_of(services.figures, raw)
    logged = services.failures.take()
    assert not logged, f"figures: {raw.data!r}: {logged}"
    if answer is None:
        assert not raw.whole, f"figures: {raw.data!r} was not answered"
        return Counter({"CLOSED": 1})
    assert answer[0] in FIGURES_ALLOWED, f"figures: {answer} to {raw.data!r}"
    return Counter({str(answer[0]): 1})


def tell_flood(services: Services, flood: Flood) -> Counter[str]:
    """The same of much at once, which must cost little, and nobody else a wait.

    The loop of a busy machine may get no core while a thread beside it computes, and what another test left behind may
    compute meanwhile; so a wait, or a cost, counts that comes each time.
    """
    waits, costs = [], []
    for _ in range(ATTEMPTS):
        answer, turn, over = _flooded(services, flood)
        waits.append(turn)
        costs.append(over)
        if turn <= TURN_COST_S and over <= 0:
            return answer
    assert min(costs) <= 0, f"{flood}: it took {min(costs):.2f} s of computing more than is allowed"
    raise AssertionError(f"{flood}: nobody else was served for {min(waits):.2f} s of computing")


def _flooded(services: Services, flood: Flood) -> tuple[Counter[str], float, float]:
    """What came of it, the longest turn of the loop, and by how many seconds the computing is above its bar."""
    with services.watched() as watch, ThreadPoolExecutor(1) as pool:
        told = pool.submit(answer_of, services.http, Raw(flood.data, whole=True))
        neighbours = Counter(_ask_health(services, told))
    logged = services.failures.take()
    assert not logged, f"{flood}: {logged}"
    assert set(neighbours) == {200}, f"{flood}: a neighbour was answered {dict(neighbours)}"
    requests = flood.requests + neighbours.total()
    bar = BASE_COST_S + len(flood.data) * BYTE_COST_S + flood.chunks * CHUNK_COST_S + requests * REQUEST_COST_S
    answer, over = told.result(), watch.cpu - bar
    if answer is None:
        return Counter({"CLOSED": 1}), watch.turn, over
    assert answer[0] in ALLOWED, f"{answer[0]} to {flood}"
    return Counter({str(answer[0]): 1}), watch.turn, over


def _ask_health(services: Services, told: Future[Any]) -> Iterator[int]:
    """Once at least, and again until the other one is told."""
    while True:
        answer = answer_of(services.http, Raw(HEALTH, whole=True))
        yield 0 if answer is None else answer[0]
        if told.done():
            return


def tell_template(services: Services, source: str) -> Counter[str]:
    """A chat template of a model: text, or one sentence."""
    with services.watched() as watch:
        try:
            told, said = services.render(source, [{"role": "user", "content": "5 6"}], {"extra": [1]}), "OK"
        except (InvalidParameter, TemplateInvalid) as error:
            told, said = str(error), type(error).__name__.upper()
    assert said == "OK" or "the chat template" in told, f"{source!r}: {told}"
    assert "root:" not in told
    assert watch.turn <= TURN_COST_S, f"{source!r}: nobody else was served for {watch.turn:.2f} s of computing"
    return Counter({said: 1})


def answer_of(url: str, raw: Raw) -> tuple[int, str, bytes] | None:
    """Status, content type and body; None where the connection ended without."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as line:
        try:
            line.sendall(raw.data)
            if not raw.whole:
                line.shutdown(socket.SHUT_WR)
            answer = HTTPResponse(line, method=raw.data.partition(b" ")[0].decode("latin-1"))
            answer.begin()
            return answer.status, answer.getheader("content-type", ""), answer.read()
        except TimeoutError:
            raise AssertionError(f"nothing came within {LIMIT_S:g} s") from None
        except (HTTPException, OSError):  # the other end may hang up at any moment
            return None


def _codes(status: int, kind: str, body: bytes) -> Iterator[str]:
    """Of the errors in an answer, each of which says what an error says; a stream says that it has ended."""
    if kind.startswith(EVENTS):
        events = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
        found = [json.loads(event) for event in events if event != DONE]
        assert events[-1] == DONE or found[-1].get("type") in LAST_EVENTS, body
    elif status >= 400 and body:
        found = [json.loads(body)]
    else:
        return
    for each in found:
        error = each.get("error")
        if error is not None:
            assert set(error) == PARTS, each
            yield str(error["code"])
