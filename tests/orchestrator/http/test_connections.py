"""What a caller may hold and send: connections, half requests, names, headers, bodies, shares; beyond it is refused."""

from __future__ import annotations

import argparse
import json
import re
import socket
import ssl
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from threading import Event
from typing import Any

import httpx2 as httpx
import pytest

from bench.harness.certificates import Authority
from orchestrator.admission import MOST_DEPTH
from orchestrator.chat.fields import SHOWN, shown
from orchestrator.http import endpoint, server
from orchestrator.http.endpoint import HOOKS, parsed
from orchestrator.options import HttpAccess
from orchestrator.tenants import Access
from specwire.client import Client
from specwire.core.invalid import MOST_PARTS, InvalidParameter
from specwire.core.messages import FinishReason
from specwire.options import add_options
from specwire.rpc import renewal
from specwire.rpc.keys import Keys
from specwire.rpc.tls import server_tls
from tests.orchestrator.http.front import COMPLETIONS, LIMIT_S, Front, another
from tests.orchestrator.http.test_streams import not_reading
from tests.orchestrator.stack import PROMPT, TARGET, plain
from tests.wait import asked_blocking, eventually
from verify_service.engine import session_manager
from verify_service.engine.session_manager import SessionManager

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
    monkeypatch.setattr(server, "HEAD_LIMIT_S", SOON_S)
    with dialled(door) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost:")
        status, told = rest(line)
    assert (status, told["error"]["code"]) == (408, "timeout")
    with dialled(door) as silent:
        assert silent.recv(1) == b""


def test_a_second_head_that_does_not_come(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a connection that is kept, drop by drop: each byte begins no new time."""
    monkeypatch.setattr(server, "HEAD_LIMIT_S", SOON_S)
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
    monkeypatch.setattr(server, "BODY_LIMIT_S", SOON_S)
    monkeypatch.setattr(server, "BODY_SLACK_S", SOON_S)
    monkeypatch.setattr(endpoint, "BODY_LIMIT_S", SOON_S)
    with dialled(door) as line:
        line.sendall(posted(100, path) + b"{")
        status, _ = rest(line)
    assert status == first


def test_requests_that_come_in_time_are_kept_apart_and_answered(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of one request are not those of the next: a kept connection outlives all of them."""
    for name in ("HEAD_LIMIT_S", "BODY_LIMIT_S", "BODY_SLACK_S"):
        monkeypatch.setattr(server, name, 1.0)
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
        monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
        monkeypatch.setattr(server, "LEAST_CONNECTIONS", 1)
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
    assert 1 <= server.most_connections() <= server.MOST_CONNECTIONS


def test_a_tenants_bodies_at_once(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    body, there, take = json.dumps(WISH).encode().ljust(900), Event(), endpoint.BodyReservation.take

    def taking(space: endpoint.BodyReservation, size: int) -> None:
        take(space, size)
        if space.held >= 800:
            there.set()

    monkeypatch.setattr(endpoint, "MOST_TENANT_BYTES", 1000)
    monkeypatch.setattr(endpoint.BodyReservation, "take", taking)
    with dialled(door) as first:
        first.sendall(posted(900) + body[:800])
        assert there.wait(LIMIT_S)
        refused = door.client.post(COMPLETIONS, content=body)
        assert (refused.json()["error"]["code"], refused.headers["retry-after"]) == ("rate_limit_exceeded", "1")
        first.sendall(body[800:])
        assert status_of(first) == 200
    assert eventually(lambda: door.client.post(COMPLETIONS, content=body).status_code == 200)


def test_a_client_that_never_reads_is_cut(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot hold its session, and a verifier's place, for ever."""
    monkeypatch.setattr(server, "UNREAD_LIMIT_S", 2.0)
    with not_reading(door) as output:
        assert eventually(lambda: output.end is not None and output.end.reason is FinishReason.CANCELLED)


# ----------------------------------------------------------------------------------------------------------------------
# What pages of other origins, and callers that nobody knows, may ask of the HTTP server: little, and told so.

BODY = json.dumps({"prompt": list(PROMPT), "max_tokens": 2}).encode()
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"
TINY = b"1\r\n \r\n"
ADA, BOB = "the-token-of-ada", "the-token-of-bob"


def told(line: socket.socket) -> tuple[int, str, str]:
    """Status, code and message of the one answer, behind which the connection ends."""
    status, body = rest(line)
    return status, body["error"]["code"], body["error"]["message"]


def status_and_code(door: Front, headers: dict[str, str]) -> tuple[int, str]:
    answer = door.client.post(COMPLETIONS, content=BODY, headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("code", "")


# Names and origins


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:80", "10.1.2.3:80", "a.localhost"])
def test_names_of_its_own(door: Front, host: str) -> None:
    assert status_and_code(door, {"Host": host}) == (200, "")


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "a@b", "x:y"]
)
def test_a_name_that_somebody_else_has_pointed_here(door: Front, host: str) -> None:
    """DNS rebinding: the page's origin and Host agree then, so it is the name that is refused, for every path."""
    assert status_and_code(door, {"Host": host, "Origin": f"http://{host}"}) == (421, "unknown_host")
    answer = door.client.get("/console/status", headers={"Host": host})
    assert answer.status_code == 421
    assert f"does not answer to '{host}'; --http-host NAME adds a name" in answer.json()["error"]["message"]


def test_a_page_of_its_own(door: Front) -> None:
    """A proxy that takes the encryption off leaves Host as it was."""
    for origin in ("http://localhost:8000", "https://localhost:8000"):
        headers = {"Host": "localhost:8000", "Origin": origin, "Sec-Fetch-Site": "same-origin"}
        assert status_and_code(door, headers) == (200, "")


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
    assert status_and_code(door, {"Host": "localhost:8000", **headers}) == (403, "cross_site")


def test_who_is_no_page_has_no_origin(door: Front) -> None:
    for headers in ({}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}):
        assert status_and_code(door, headers) == (200, "")
    assert door.client.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200  # somebody follows a link


def test_what_the_operator_lets_in(door: Front) -> None:
    access = HttpAccess(("Api.Example",), ("https://chat.example",))
    with another(door, http_access=access) as named:
        headers = {"Host": "api.example:8000", "Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}
        assert status_and_code(named, headers) == (200, "")
        assert status_and_code(named, {"Host": "other.example"}) == (421, "unknown_host")
        assert status_and_code(named, {**headers, "Origin": "http://chat.example"}) == (403, "cross_site")
    with another(door, http_access=HttpAccess(("*",), ("*",))) as anybody:
        assert status_and_code(anybody, {"Host": "x.example", "Origin": "null"}) == (200, "")
        answer = anybody.client.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


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


def test_a_body_that_is_too_long(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own account, and without saying so."""
    with another(door, http_access=HttpAccess(body=10_000)) as small:
        seen = _counted(monkeypatch)
        with dialled(small) as line:
            line.sendall(f"{HEAD}Content-Length: 10001\r\n\r\n".encode() + b" " * 10_001)
            status, code, message = told(line)
        assert (status, code, sum(seen)) == (413, "too_large", 0)
        assert message.startswith("body: more than 10000 bytes")
        with dialled(small) as line:
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
    assert sum(seen) <= server.FREE_CHUNKS * 1.1


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
    count = server.Parser._count

    def counted(parser: server.Parser, data: Any) -> None:
        seen.append(1)
        count(parser, data)

    monkeypatch.setattr(server.Parser, "_count", counted)
    return seen


# Heads


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("size", [server.MOST_HEADER_BYTES + 1, 120_000, 1_000_000])
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


# ----------------------------------------------------------------------------------------------------------------------
# What a body may make of itself as JSON: a small multiple of its size, and no pause for anybody else.

SIZE = 1 << 20
# Each takes, as Python's values, many times the bytes that it is written in.
HOSTILE = {
    "lists": b"[" + b"[]," * (SIZE // 3) + b"[]]",
    "objects": b"[" + b"{}," * (SIZE // 3) + b"{}]",
    "strings": b"[" + b'"ab",' * (SIZE // 5) + b'""]',
    "keys": b"{" + b",".join(b'"%x":0' % number for number in range(SIZE // 10)) + b"}",
    "behind a string": b'["\\\\\\"[[[\\\\",' + b"[]," * (SIZE // 3) + b"[]]",
}
LARGE = {
    "ids": b"[" + b"5," * (SIZE // 2) + b"5]",
    "larger ids": b"[" + b"151936," * (SIZE // 7) + b"5]",
    "numbers": b"[" + b"1.5," * (SIZE // 4) + b"5]",
    "text": b'"' + b"{[so it goes]}, " * (SIZE // 16) + b'"',
    "escapes": b'"' + b"\\u00e9" * (SIZE // 6) + b'"',
    "quotes": b'"' + b'\\"' * (SIZE // 2) + b'"',
    "backslashes": b'"' + b"\\\\" * (SIZE // 2) + b'"',
    "wide": b'"' + b"a" * SIZE + "\U0001f600".encode() + b'"',
}
# Body, its text and its values. A list of numbers takes ten times what they are written in; a wide text four times.
MOST_TIMES = 16


@pytest.mark.parametrize("name", [*HOSTILE, *LARGE])
def test_memory_is_a_small_multiple_of_the_body(name: str) -> None:
    """What would take much more is refused, what a prompt may be is not."""
    body, refused = b'{"x": %s}' % {**HOSTILE, **LARGE}[name], ""
    tracemalloc.start()
    try:
        assert parsed(body)
    except InvalidParameter as error:
        refused = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_TIMES * len(body)
    assert refused == (f"body: has more than {MOST_PARTS} strings, lists and objects" if name in HOSTILE else "")
    assert refused or parsed(body, *HOOKS) == json.loads(body)


@pytest.mark.parametrize("hooks", [(), HOOKS])
def test_values_are_jsons(hooks: Any) -> None:
    told = {"a": [1, -2, 10**30, 1.5, 1e-300, True, None, {"b": 'x"\\[{'}], "é": "\U0001f600"}
    for ascii_only in (True, False):
        assert parsed(json.dumps(told, ensure_ascii=ascii_only).encode(), *hooks) == told


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_ends_before_the_stack_does(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"

    def nested(depth: int) -> bytes:
        return b'{"x":' + opening * (depth - 1) + b"0" + closing * (depth - 1) + b"}"

    assert parsed(nested(MOST_DEPTH))
    for depth in (MOST_DEPTH + 1, 30_000):
        with pytest.raises(InvalidParameter, match="^body: is nested too deeply"):
            parsed(nested(depth))


def test_what_is_wrong_is_shown_in_part() -> None:
    for value in ([[5] * 10**6] * 10, "x" * 10**7, {str(number): 0 for number in range(10**5)}, 10**4000):
        assert len(shown(value)) <= SHOWN
    assert shown([1, "x", None]) == "[1, 'x', None]"


def test_a_prompt_that_cannot_fit_is_not_copied(door: Front) -> None:
    """For each of the request's completions, that is: 64 times a body of megabytes."""
    context = door.client.get("/v1/models").json()["data"][0]["max_model_len"]
    with another(door, http_access=HttpAccess(body=16 << 20)) as large:
        for prompt in ([5] * 2_000_000, "5 " * 2_000_000):
            answer = large.post(COMPLETIONS, prompt=prompt, n=64)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "prompt"
            assert f"maximum context length is {context} tokens" in error["message"]


# ----------------------------------------------------------------------------------------------------------------------
# HTTPS: the same certificates as gRPC's, asked of both sides where they are.


def test_both_sides_show_certificates(door: Front, tmp_path: Path) -> None:
    ours = Authority()
    trusting = ssl.create_default_context(cafile=ours.save(tmp_path, "authority"))
    certified = ssl.create_default_context(cafile=ours.save(tmp_path, "authority"))
    certified.load_cert_chain(*ours.sign().save(tmp_path, "client"))
    with another(door, tls=ours.server(client_ca=ours), verify=certified) as encrypted:
        assert encrypted.url.startswith("https://")
        answer = encrypted.done(COMPLETIONS, prompt=list(PROMPT), max_tokens=5, temperature=0, ignore_eos=True)
        assert answer["choices"][0]["text"] == " ".join(map(str, plain(TARGET, PROMPT, 5)))
        nobody = httpx.Client(base_url=encrypted.url, timeout=LIMIT_S, verify=trusting)
        with nobody, pytest.raises(httpx.TransportError):
            nobody.get("/health")


def test_connections_of_an_authority_that_is_removed_are_cut(
    door: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LOOK_EVERY_S", 0.05)
    ours, left, gone = Authority("ours"), Authority("left"), Authority("gone")

    def certified(by: Authority) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=ours.pem.decode())
        context.load_cert_chain(*by.sign().save(tmp_path, "client"))
        return context

    def trust(*authorities: Authority) -> str:
        fresh = tmp_path / "trusted.new"
        fresh.write_bytes(b"".join(each.pem for each in authorities))
        return str(fresh.replace(tmp_path / "trusted.pem"))

    parser = argparse.ArgumentParser()
    add_options(parser, "orchestrate")
    cert, key = ours.sign().save(tmp_path, "server")
    flags = ["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", trust(left, gone)]
    body = {"prompt": list(PROMPT), "ignore_eos": True, "stream": True}
    with another(door, tls=server_tls(parser.parse_args(flags)), verify=certified(left)) as known:
        bob = httpx.Client(base_url=known.url, timeout=LIMIT_S, verify=certified(gone))
        assert known.client.get("/health").status_code == 200
        with bob, bob.stream("POST", COMPLETIONS, json=body) as his:
            lines = his.iter_lines()
            assert next(lines)
            trust(left)
            with pytest.raises(httpx.TransportError):
                for _ in lines:
                    pass
            with pytest.raises(httpx.TransportError):
                bob.get("/health")
        assert known.client.get("/health").status_code == 200


# ----------------------------------------------------------------------------------------------------------------------
# What a tenant may have is one share for both doors; beyond it each says when to come again.

KEYS = Keys({ADA: "ada", BOB: "bob"})
SHORT: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": 3, "ignore_eos": True}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 4000, "stream": True}


def asked(door: Front, token: str, **wish: Any) -> httpx.Response:
    return door.client.post(COMPLETIONS, json=wish, headers={"Authorization": f"Bearer {token}"})


def told_to_wait(answer: httpx.Response, message: str) -> None:
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert message in error["message"]
    assert int(answer.headers["retry-after"]) >= 1


@contextmanager
def running(door: Front, token: str) -> Iterator[None]:
    """A session that has begun, over HTTP."""
    headers = {"Authorization": f"Bearer {token}"}
    with door.client.stream("POST", COMPLETIONS, json=LONG, headers=headers) as answer:
        lines = answer.iter_lines()  # whoever forgets them leaves the stream
        next(lines)
        yield


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "as it comes"])
@pytest.mark.parametrize(("told_ms", "header"), [(2001, "3"), (0, "1")], ids=["by the verifier", "by nobody"])
def test_a_verifier_that_refuses_says_when_to_come_again(
    door: Front, told_ms: int, header: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole seconds, and not before it."""
    monkeypatch.setattr(session_manager, "RETRY_MS", told_ms)
    monkeypatch.setattr(SessionManager, "_beyond_limits", lambda *_: "this tenant has enough")
    answer = door.post(COMPLETIONS, **SHORT, **more)
    told_to_wait(answer, "this tenant has enough")
    assert answer.headers["retry-after"] == header


def test_tenants_that_use_one_request_id_share_no_noise(door: Front) -> None:
    with another(door, Access(KEYS)) as several:
        answers = [asked(several, token, **SHORT, request_id="1").json()["choices"][0] for token in (ADA, BOB, ADA)]
    seeds = [answer["specwire"]["seed"] for answer in answers]
    assert seeds[0] == seeds[2] != seeds[1]


def test_sessions_at_once(door: Front) -> None:
    message = "this tenant has 1 sessions running, of at most 1"
    with another(door, Access(KEYS, sessions=1)) as limited:
        with running(limited, ADA):
            for more in ({}, {"stream": True}, {"n": 2}):
                told_to_wait(asked(limited, ADA, **SHORT, **more), message)
            assert asked(limited, BOB, **SHORT).status_code == 200
        assert eventually(lambda: asked(limited, ADA, **SHORT).status_code == 200)
        with Client(limited.serving.address, token=ADA) as ada:
            events = ada.generate(PROMPT, max_tokens=4000, ignore_eos=True, timeout=LIMIT_S)
            next(events)
            told_to_wait(asked(limited, ADA, **SHORT), message)
            events.close()
        assert eventually(lambda: asked(limited, ADA, **SHORT).status_code == 200)


def test_of_several_completions_none_is_left_running_where_not_all_may_begin(door: Front) -> None:
    with another(door, Access(KEYS, sessions=2)) as limited:
        told_to_wait(asked(limited, ADA, **{**SHORT, "max_tokens": 4000}, n=3), "2 sessions running, of at most 2")
        assert eventually(lambda: asked(limited, ADA, **SHORT, n=2).status_code == 200)


def test_tokens_a_minute(door: Front) -> None:
    message = "this tenant's 100 tokens a minute are used up"
    with another(door, Access(KEYS, tokens_per_minute=100)) as limited:
        assert asked(limited, ADA, **{**SHORT, "max_tokens": 60}).status_code == 200
        told_to_wait(asked(limited, ADA, **{**SHORT, "max_tokens": 60}), message)
        with Client(limited.serving.address, token=BOB) as bob:
            bob.complete(PROMPT, max_tokens=60, ignore_eos=True, timeout=LIMIT_S)
        told_to_wait(asked(limited, BOB, **{**SHORT, "max_tokens": 60}), message)
        answer = asked(limited, BOB, **{**SHORT, "max_tokens": 98})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
