"""The HTTP front door, told anything over a socket, and what it may answer."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse

from tests.fuzz.requests import Raw
from tests.fuzz.services import LIMIT_S, Services

# What no caller may bring about. A contradicted place in a stream is data_loss, and a timeout that has passed 504.
OURS = ("internal_error", "unavailable")
ALLOWED = {*range(200, 500), 500, 504}
FIGURES_ALLOWED = (200, 400, 404, 405)
PARTS = {"message", "type", "param", "code"}
EVENTS = "text/event-stream"


def tell(services: Services, name: str, raw: Raw) -> Counter[str]:
    """Send it; the status, and codes of what is refused. AssertionError if it is our own failure, or nothing comes."""
    answer = _answer(services.http, raw)
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
    answer = _answer(services.figures, raw)
    logged = services.failures.take()
    assert not logged, f"figures: {raw.data!r}: {logged}"
    if answer is None:
        assert not raw.whole, f"figures: {raw.data!r} was not answered"
        return Counter({"CLOSED": 1})
    assert answer[0] in FIGURES_ALLOWED, f"figures: {answer} to {raw.data!r}"
    return Counter({str(answer[0]): 1})


def _answer(url: str, raw: Raw) -> tuple[int, str, bytes] | None:
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
    """Of the errors in an answer, each of which says what an error says; a stream of completions ends with [DONE]."""
    if kind.startswith(EVENTS):
        events = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]", body
        found = [json.loads(event) for event in events[:-1]]
    elif status >= 400 and body:
        found = [json.loads(body)]
    else:
        return
    for each in found:
        error = each.get("error")
        if error is not None:
            assert set(error) == PARTS, each
            yield str(error["code"])
