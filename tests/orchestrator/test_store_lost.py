"""A whole stack whose Redis goes away: nothing is shown that is not durable, and the end has a status."""

from __future__ import annotations

import grpc

from specwire.client import AsyncClient
from specwire.core.messages import FinishReason
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.redis_groups import SERVICE, log_bytes, replicated, sentinel
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, Reading, plain, stack

LIMIT_S = 120.0


async def test_a_log_that_stays_away_ends_the_stream_and_shows_nothing_more() -> None:
    with RedisServer() as redis:
        async with (
            stack(SLOW_TARGET, redis_url=redis.url, store_timeout=1.0) as running,
            AsyncClient(running.orchestrator.address, patience=0) as client,
        ):
            reading = Reading(client, max_tokens=1000, ignore_eos=True, timeout=LIMIT_S)
            await reading.until(30)
            driver = running.orchestrator.orchestrator.sessions[reading.session_id]
            session = driver.session
            redis.stop()
            await reading.rest()
            assert reading.error is not None
            assert reading.error.code is grpc.StatusCode.UNAVAILABLE
            assert "session log" in reading.error.message
            assert len(PROMPT) + len(reading.tokens) == session.emitted == session.durable
            assert (
                session.durable < len(session.text) <= session.credit
            )  # it went on deciding as far as its credit went
            assert reading.tokens == plain(SLOW_TARGET, PROMPT, len(reading.tokens))


async def test_a_primary_lost_under_a_stream_is_replaced() -> None:
    with replicated() as (primary, replica), sentinel(primary) as address:
        async with stack(SLOW_TARGET, redis_url=f"redis+sentinel://{address}/{SERVICE}") as running:
            reading = Reading(running.client, max_tokens=400, ignore_eos=True, timeout=LIMIT_S)
            await reading.until(50)
            primary.stop()
            await reading.rest()
            assert reading.error is None
            assert reading.tokens == plain(SLOW_TARGET, PROMPT, 400)
            assert reading.finished is not None
            assert reading.finished.reason is FinishReason.LENGTH
            assert log_bytes(replica, reading.session_id) == 4 * (len(PROMPT) + 400)
