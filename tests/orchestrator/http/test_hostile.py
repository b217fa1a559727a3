"""What pages of other origins, and callers that nobody knows, may ask of the HTTP server: little, and told so."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any

import pytest

from orchestrator.http import connection
from orchestrator.options import HttpAccess
from orchestrator.tenants import Access
from specwire.core.invalid import InvalidParameter
from specwire.rpc.keys import Keys
from tests.orchestrator.http.front import COMPLETIONS, LIMIT_S, Front, another
from tests.orchestrator.http.test_limits import dialled, rest
from tests.orchestrator.stack import PROMPT

BODY = json.dumps({"prompt": list(PROMPT), "max_tokens": 2}).encode()
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"
TINY = b"1\r\n \r\n"
ADA = "token-of-ada-long-enough"


def told(line: socket.socket) -> tuple[int, str, str]:
    """Status, code and message of the one answer, behind which the connection ends."""
    status, body = rest(line)
    return status, body["error"]["code"], body["error"]["message"]


def status_of(door: Front, headers: dict[str, str]) -> tuple[int, str]:
    answer = door.client.post(COMPLETIONS, content=BODY, headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("code", "")


# Names and origins


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:80", "10.1.2.3:80", "a.localhost"])
def test_names_of_its_own(door: Front, host: str) -> None:
    assert status_of(door, {"Host": host}) == (200, "")


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "a@b", "x:y"]
)
def test_a_name_that_somebody_else_has_pointed_here(door: Front, host: str) -> None:
    """DNS rebinding: the page's origin and Host agree then, so it is the name that is refused, for every path."""
    assert status_of(door, {"Host": host, "Origin": f"http://{host}"}) == (421, "unknown_host")
    answer = door.client.get("/console/status", headers={"Host": host})
    assert answer.status_code == 421
    assert f"does not answer to '{host}'; --http-host NAME adds a name" in answer.json()["error"]["message"]


def test_a_page_of_its_own(door: Front) -> None:
    """A proxy that takes the encryption off leaves Host as it was."""
    for origin in ("http://localhost:8000", "https://localhost:8000"):
        headers = {"Host": "localhost:8000", "Origin": origin, "Sec-Fetch-Site": "same-origin"}
        assert status_of(door, headers) == (200, "")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://localhost"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_pages_of_other_origins(door: Front, headers: dict[str, str]) -> None:
    """Another port is another origin, though the browser calls it the same site."""
    assert status_of(door, {"Host": "localhost:8000", **headers}) == (403, "cross_site")


def test_who_is_no_page_has_no_origin(door: Front) -> None:
    for headers in ({}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}):
        assert status_of(door, headers) == (200, "")
    assert door.client.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200  # somebody follows a link


def test_what_the_operator_lets_in(door: Front) -> None:
    access = HttpAccess(("Api.Example",), ("https://chat.example",))
    with another(door, http_access=access) as named:
        headers = {"Host": "api.example:8000", "Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}
        assert status_of(named, headers) == (200, "")
        assert status_of(named, {"Host": "other.example"}) == (421, "unknown_host")
        assert status_of(named, {**headers, "Origin": "http://chat.example"}) == (403, "cross_site")
    with another(door, http_access=HttpAccess(("*",), ("*",))) as anybody:
        assert status_of(anybody, {"Host": "x.example", "Origin": "null"}) == (200, "")


@pytest.mark.parametrize(
    ("access", "field"),
    [
        ({"hosts": ("http://x",)}, "http-host"),
        ({"hosts": ("x:80",)}, "http-host"),
        ({"origins": ("x.example",)}, "http-origin"),
        ({"origins": ("https://x.example/",)}, "http-origin"),
        ({"body": 5}, "http-body"),
    ],
)
def test_what_the_operator_cannot_mean(access: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{field}: must be"):
        HttpAccess(**access)


# Bodies of those who are refused


@pytest.fixture(scope="module")
def locked(door: Front) -> Iterator[Front]:
    with another(door, Access(keys=Keys({ADA: "ada"}))) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (COMPLETIONS, "Host: localhost\r\n", 401),
        (COMPLETIONS, f"Host: evil.example\r\nAuthorization: Bearer {ADA}\r\n", 421),
        (COMPLETIONS, f"Host: localhost\r\nOrigin: http://evil.example\r\nAuthorization: Bearer {ADA}\r\n", 403),
        ("/nowhere", "Host: localhost\r\n", 404),
        ("/health", "Host: localhost\r\n", 405),
    ],
)
def test_bodies_of_refused_callers_are_not_parsed(
    locked: Front, path: str, headers: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a chunk of them, though all of them came with the head; the answer arrives all the same."""
    seen = _counted(monkeypatch)
    with dialled(locked) as line:
        line.sendall(f"POST {path} HTTP/1.1\r\n{headers}{CHUNKED}".encode() + TINY * 100_000)
        answered, _ = rest(line)
    assert (answered, sum(seen)) == (status, 0)


def test_a_body_that_is_too_long_by_its_own_account(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _counted(monkeypatch)
    with another(door, http_access=HttpAccess(body=10_000)) as small, dialled(small) as line:
        line.sendall(f"{HEAD}Content-Length: 10001\r\n\r\n".encode() + b" " * 10_001)
        status, code, message = told(line)
    assert (status, code, sum(seen)) == (413, "too_large", 0)
    assert message.startswith("body: more than 10000 bytes")


def test_a_body_that_is_too_long_without_saying_so(door: Front) -> None:
    with another(door, http_access=HttpAccess(body=10_000)) as small, dialled(small) as line:
        line.sendall(f"{HEAD}{CHUNKED}".encode() + (b"400\r\n" + b" " * 1024 + b"\r\n") * 10)
        assert told(line)[:2] == (413, "too_large")


def test_a_body_may_be_as_long_as_the_context_needs(door: Front) -> None:
    (model,) = door.client.get("/v1/models").json()["data"]
    most = (1 << 20) + 64 * model["max_model_len"]
    assert door.client.post(COMPLETIONS, content=BODY.ljust(most)).status_code == 200
    answer = door.client.post(COMPLETIONS, content=BODY.ljust(most + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_chunks_that_are_too_small(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs much more than its byte: so only so many are looked at."""
    seen = _counted(monkeypatch)
    with dialled(door) as line:
        line.sendall(f"{HEAD}{CHUNKED}".encode() + TINY * 100_000)
        status, code, message = told(line)
    assert (status, code) == (400, "invalid_http")
    assert "chunks are too small" in message
    assert sum(seen) <= connection.FREE_CHUNKS * 1.1


def test_chunks_of_ordinary_size(door: Front) -> None:
    """Also some small ones, as a client that writes JSON piece by piece sends them; the connection is kept."""
    with dialled(door) as line:
        for size in (1, 7, len(BODY)):
            parts = [BODY[at : at + size] for at in range(0, len(BODY), size)]
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
            line.sendall(f"{HEAD}{CHUNKED}".encode() + chunks + b"0\r\n\r\n")
            answer = HTTPResponse(line)
            answer.begin()
            assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 2)


def test_a_client_that_asks_first_is_told_before_it_sends(locked: Front) -> None:
    for headers, expected in (("", b"HTTP/1.1 401 "), (f"Authorization: Bearer {ADA}\r\n", b"HTTP/1.1 100 ")):
        with dialled(locked) as line:
            line.sendall(f"{HEAD}{headers}Expect: 100-continue\r\nContent-Length: {len(BODY)}\r\n\r\n".encode())
            assert line.recv(13) == expected


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each piece of a body that is looked at."""
    seen: list[int] = []
    count = connection.Parser._count

    def counted(parser: connection.Parser, data: Any) -> None:
        seen.append(1)
        count(parser, data)

    monkeypatch.setattr(connection.Parser, "_count", counted)
    return seen


# Heads


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("size", [connection.MOST_HEADER_BYTES + 1, 120_000, 1_000_000])
def test_too_long_headers(door: Front, size: int, whole: bool) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: localhost\r\nX: {'x' * size}\r\n".encode()
    with dialled(door) as line:
        line.sendall(head + b"\r\n" if whole else head)
        assert told(line)[:2] == (431, "headers_too_large")


def test_many_headers_behind_another_request(door: Front) -> None:
    """They have all come before the answer to the first is done."""
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with dialled(door) as line:
        line.sendall(first + first.replace(b"\r\n\r\n", b"\r\n" + b"x: y\r\n" * 4000 + b"\r\n"))
        answers = line.makefile("rb").read()
    assert re.findall(rb"HTTP/1.1 (\d+) ", answers) == [b"200", b"431"]


def test_headers_behind_a_body(door: Front) -> None:
    with dialled(door) as line:
        chunk = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
        line.sendall(f"{HEAD}{CHUNKED}".encode() + chunk + b"x: y\r\n" * 4000 + b"\r\n")
        assert told(line)[:2] == (431, "headers_too_large")


def test_headers_of_ordinary_size(door: Front) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: {'x' * 16_000}\r\n\r\n"
    with dialled(door) as line:
        line.sendall(head.encode())
        assert rest(line)[0] == 200


def test_two_lengths(door: Front) -> None:
    """A proxy before this server may believe the other one: the rest would be another request."""
    with dialled(door) as line:
        line.sendall(f"{HEAD}Content-Length: 6\r\n{CHUNKED}0\r\n\r\nGET /health HTTP/1.1\r\n\r\n".encode())
        answers = line.makefile("rb").read()
    assert re.findall(rb"HTTP/1.1 (\d+) ", answers) == [b"400"]
    assert b"Content-Length: must not stand beside Transfer-Encoding" in answers


# A neighbour


def test_a_neighbour_is_served_while_somebody_floods(locked: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a byte, without a key: the loop looks at none, and each flood is cut off, not taken for ever."""
    seen, ends, enough = _counted(monkeypatch), list[type[OSError] | None](), threading.Event()
    with ThreadPoolExecutor(1) as beside:
        flooding = beside.submit(_flood, locked, ends, enough)
        try:
            while len(ends) < 3 and not flooding.done():
                with dialled(locked) as neighbour:
                    neighbour.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    assert rest(neighbour)[0] == 200
        finally:
            enough.set()
        flooding.result(LIMIT_S)
    assert set(ends) <= {BrokenPipeError, ConnectionResetError}
    assert sum(seen) == 0


def _flood(door: Front, ends: list[type[OSError] | None], enough: threading.Event) -> None:
    """One after the other, until it is enough. ends: how each was cut off; None where all of it was taken."""
    while not enough.is_set():
        with dialled(door) as line:
            try:
                line.sendall(f"{HEAD}{CHUNKED}".encode())
                for _ in range(1000):
                    line.sendall(TINY * 10_000)
            except OSError as error:
                ends.append(type(error))
            else:
                ends.append(None)
