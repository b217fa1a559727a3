"""A log that somebody has damaged in Redis is named, and costs its own session only."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
import redis
from hypothesis import HealthCheck, given, settings

from specwire.client import Client, SpecwireError
from tests.fuzz import registry
from tests.fuzz.files import Spoilt, read_spoilt
from tests.fuzz.logs import meet
from tests.fuzz.services import LIMIT_S, Services, services
from tests.fuzz.values import Damage, cases, try_all
from tests.orchestrator.redis_for_tests import RedisServer

EXAMPLES, FEW = 40, 15


@pytest.fixture(scope="module")
def log() -> Iterator[RedisServer]:
    """Give a real Redis."""
    with RedisServer() as server:
        yield server


def test_no_value_gets_more_than_an_error_of_the_stores_own(log: RedisServer) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
    @given(cases)
    def damage(what: list[Damage]) -> None:
        try_all(log.url, what)

    damage()


def test_no_value_gets_more_than_an_error_of_the_registry_s_own(log: RedisServer) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
    @given(registry.cases)
    def damage(what: list[registry.Written]) -> None:
        registry.try_all(log.url, what)

    damage()


def test_whoever_meets_a_damaged_log_is_told_a_status() -> None:
    with RedisServer() as log, services(log.url) as running:

        @settings(max_examples=FEW, suppress_health_check=[HealthCheck.too_slow])
        @given(cases)
        def damage(what: list[Damage]) -> None:
            meet(running, log.url, what)

        damage()
        running.check()


def test_services_that_look_into_a_damaged_registry_serve_on() -> None:
    with RedisServer() as log, services(log.url, registered=True) as running:

        @settings(max_examples=FEW, suppress_health_check=[HealthCheck.too_slow])
        @given(registry.cases)
        def damage(what: list[registry.Written]) -> None:
            registry.meet(running, log.url, what)

        damage()
        running.check()


def test_a_damaged_log_is_data_loss_to_its_reader_and_nothing_to_others() -> None:
    with RedisServer() as log, services(log.url) as running:
        _spoil(log, running)
        with Client(running.orchestrator) as client:
            for session_id in running.sessions:
                with pytest.raises(SpecwireError) as lost:
                    client.get_session(session_id, timeout=LIMIT_S)
                assert lost.value.code is grpc.StatusCode.DATA_LOSS
        running.check()


def _spoil(log: RedisServer, running: Services) -> None:
    with redis.Redis.from_url(log.url) as client:
        for session_id in running.sessions:
            client.hset(f"specwire:{{{session_id}}}:meta", "record", "{}")


def test_a_log_s_file_of_which_sqlite_tells_in_bytes_that_are_no_text_is_kept_aside() -> None:
    read_spoilt(Spoilt("log", ((0.75, False, 255, 1),), 1.0))
