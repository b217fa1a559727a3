"""A log that somebody has damaged in Redis is named, and costs its own session only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.fuzz import registry
from tests.fuzz.files import Spoilt, read_spoilt
from tests.fuzz.logs import meet
from tests.fuzz.messages import try_examples
from tests.fuzz.services import services
from tests.fuzz.values import cases, try_all
from tests.orchestrator.redis_for_tests import RedisServer

EXAMPLES, FEW = 40, 15


@pytest.fixture(scope="module")
def log() -> Iterator[RedisServer]:
    """Give a real Redis."""
    with RedisServer() as server:
        yield server


def test_no_value_gets_more_than_an_error_of_the_stores_own(log: RedisServer) -> None:
    try_examples(cases, partial(try_all, log.url), EXAMPLES)


def test_no_value_gets_more_than_an_error_of_the_registry_s_own(log: RedisServer) -> None:
    try_examples(registry.cases, partial(registry.try_all, log.url), EXAMPLES)


def test_whoever_meets_a_damaged_log_is_told_a_status() -> None:
    with RedisServer() as log, services(log.url) as running:
        try_examples(cases, partial(meet, running, log.url), FEW)
        running.check()


def test_services_that_look_into_a_damaged_registry_serve_on() -> None:
    with RedisServer() as log, services(log.url, registered=True) as running:
        try_examples(registry.cases, partial(registry.meet, running, log.url), FEW)
        running.check()


def test_a_log_s_file_of_which_sqlite_tells_in_bytes_that_are_no_text_is_kept_aside() -> None:
    read_spoilt(Spoilt("log", ((0.75, False, 255, 1),), 1.0))
