"""No bytes that reach the HTTP front door break it, hang it, or are answered with a failure of its own."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
from hypothesis import HealthCheck, given, settings
from starlette.routing import Route

from orchestrator.http.app import routed
from tests.fuzz.http import tell, tell_figures
from tests.fuzz.requests import GOT, POSTED, Raw, endpoints, figures
from tests.fuzz.services import Services, services

EXAMPLES = 30
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
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
    @settings(max_examples=EXAMPLES, suppress_health_check=SLOW)
    @given(ENDPOINTS[name])
    def send(raw: Raw) -> None:
        tell(running, name, raw)

    send()
    running.check()


def test_the_listener_for_figures_serves_on_too(running: Services) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=SLOW)
    @given(figures())
    def send(raw: Raw) -> None:
        tell_figures(running, raw)

    send()
    running.check()
