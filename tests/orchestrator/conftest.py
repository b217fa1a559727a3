"""Redis servers for the orchestrator's tests."""

from collections.abc import Iterator

import pytest

from tests.orchestrator.redis_for_tests import RedisServer


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One for all tests of a file."""
    with RedisServer() as running:
        yield running
