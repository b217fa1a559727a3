"""No bytes that reach the HTTP front door break it, hang it, or are answered with a failure of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from unittest.mock import MagicMock

import pytest
from starlette.routing import Route

from orchestrator.http.app import routed
from tests.fuzz.http import tell, tell_figures, tell_flood, tell_template
from tests.fuzz.messages import try_examples
from tests.fuzz.requests import GOT, POSTED, Flood, endpoints, figures, floods, sources
from tests.fuzz.services import Services, services

EXAMPLES = 30
ENDPOINTS = endpoints()


@pytest.fixture(scope="module")
def running() -> Iterator[Services]:
    """Give all services, in one process."""
    with services() as started:
        yield started


def test_every_endpoint_is_a_target() -> None:
    """The console's own files apart, of which one stands for all."""
    routes = [route for route in routed(MagicMock()).routes if isinstance(route, Route)]
    posted = {route.path for route in routes if "POST" in (route.methods or ())}
    assert posted == set(POSTED)
    asked = [route for route in routes if "GET" in (route.methods or ())]
    missing = {route.path for route in asked if not any(route.path_regex.match(path) for path in GOT)}
    assert {path for path in missing if not path.startswith("/console/")} == set()


@pytest.mark.parametrize("name", list(ENDPOINTS))
def test_whatever_it_is_sent_it_serves_on(running: Services, name: str) -> None:
    try_examples(ENDPOINTS[name], partial(tell, running, name), EXAMPLES)
    running.check()


def test_no_flood_costs_much_nor_anybody_else_a_wait(running: Services) -> None:
    try_examples(floods(), partial(tell_flood, running), EXAMPLES)
    running.check()


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_a_million_chunks_of_a_byte(running: Services, host: str) -> None:
    """What once took 12 s of the loop, with and without the right to ask."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    tell_flood(running, Flood(head + b"1\r\n \r\n" * 1_000_000))


@pytest.mark.parametrize("unit", [b"[],", b"5,", b'"ab",', b"{},"])
def test_a_body_of_many_values(running: Services, unit: bytes) -> None:
    """What once took 4 s of the loop, and thirty times its size."""
    for size in (1 << 20, 15 << 20):
        body = b'{"prompt": [' + unit * (size // len(unit)) + b"5]}"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        tell_flood(running, Flood(head.encode() + body))


def test_no_chat_template_harms_anybody_else(running: Services) -> None:
    try_examples(sources, partial(tell_template, running), EXAMPLES)
    running.check()


def test_the_listener_for_figures_serves_on_too(running: Services) -> None:
    try_examples(figures(), partial(tell_figures, running), EXAMPLES)
    running.check()
