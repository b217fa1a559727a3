"""No bytes that reach the HTTP front door break it, hang it, or are answered with a failure of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.http import tell
from tests.fuzz.requests import Raw, endpoints
from tests.fuzz.services import Services, services

EXAMPLES = 30
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
ENDPOINTS = endpoints()


@pytest.fixture(scope="module")
def running() -> Iterator[Services]:
    """Give all services, in one process."""
    with services() as started:
        yield started


@pytest.mark.parametrize("name", list(ENDPOINTS))
def test_whatever_it_is_sent_it_serves_on(running: Services, name: str) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=SLOW)
    @given(ENDPOINTS[name])
    def send(raw: Raw) -> None:
        tell(running, name, raw)

    send()
    running.check()
