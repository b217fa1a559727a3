"""Verifiers that are not equal: other EOS ids, another context. A text ends where the model that began it ends it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import grpc
import pytest

from orchestrator.peers.models import identity_of
from orchestrator.server import RunningOrchestrator
from specwire.client import AsyncClient, Chunk, Finished, Started
from specwire.core.messages import FinishReason
from specwire.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import PROMPT, TARGET, Reading, Services, plain
from tests.orchestrator.test_watching import watched
from tests.wait import raised, until
from verify_service.server import RunningVerifier

LIMIT_S = 20.0
# Slow enough to be interfered with: an emulation.
SLOW = f"{TARGET}:delay_ms=20"
LENGTH = 60
KILLED_AT = 8
# What comes soon after the moment at which a verifier is killed here.
WORD = plain(TARGET, PROMPT, 12)[-1]
OTHER_END = f"{SLOW}:end={WORD}"
LARGE, SMALL = 2048, 256


class Parts(Services):
    async def one_by_one(self, *verifiers: RunningVerifier, **more: Any) -> RunningOrchestrator:
        """It has heard of the first before it hears of the others."""
        addresses = [each.address for each in verifiers]
        running = await self.orchestrator(addresses[:1], **more)
        pool = running.orchestrator.pool
        for address in addresses[1:]:
            pool.verifiers.append(pool._dialled.verifier(address, pool._accept_target))
            pool._dialled.start(pool.verifiers[-1])
        await until(lambda: all(each.info is not None for each in pool.verifiers))
        return running


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async with AsyncExitStack() as owned:
        yield Parts(owned)


async def interrupted(client: AsyncClient, verifier: RunningVerifier, **asked: Any) -> Reading:
    """A session whose verifier is killed once the client has KILLED_AT tokens."""
    shown = Reading(client, **asked)
    await shown.until(KILLED_AT)
    await verifier.stop(0.0)
    return shown


async def test_other_eos_ids_end_no_session_that_was_begun_without_them(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = await parts.verifier(SLOW), await parts.verifier(OTHER_END)
    running = await parts.one_by_one(first, other, verifier_wait=1.0)
    assert f"serves EOS ids [{WORD}], but sessions here are pinned to [0]" in caplog.text
    shown = await interrupted(await parts.client(running, patience=0.0), first, max_tokens=LENGTH)
    await shown.rest()
    assert shown.tokens == plain(TARGET, PROMPT, len(shown.tokens))
    assert shown.reason is None
    assert shown.error is not None
    assert shown.error.code is grpc.StatusCode.UNAVAILABLE
    assert "no verifier serves EOS ids [0] of model 'scripted:7', which the session began with" in str(shown.error)


@pytest.mark.parametrize("asked", [{"max_tokens": 400}, {}])
async def test_a_text_that_a_smaller_context_cannot_hold_is_not_taken_there(
    parts: Parts, asked: dict[str, Any]
) -> None:
    """Neither does it end early, nor is it refused half-way."""
    large, small = await parts.verifier(SLOW, context=LARGE), await parts.verifier(SLOW, context=SMALL)
    running = await parts.one_by_one(large, small, verifier_wait=1.0)
    shown = await interrupted(await parts.client(running, patience=0.0), large, **asked)
    await shown.rest()
    assert shown.tokens == plain(TARGET, PROMPT, len(shown.tokens))
    assert shown.reason is None
    assert shown.error is not None
    assert shown.error.code is grpc.StatusCode.UNAVAILABLE
    end = len(PROMPT) + asked["max_tokens"] if asked else LARGE
    message = f"no verifier of model 'scripted:7' holds a text of {end} tokens, the most is {SMALL}"
    assert message in str(shown.error)


async def test_a_text_that_fits_goes_on_at_a_smaller_context(parts: Parts) -> None:
    large, small = await parts.verifier(SLOW, context=LARGE), await parts.verifier(SLOW, context=SMALL)
    running = await parts.one_by_one(large, small)
    asked: dict[str, Any] = {
        "max_tokens": LENGTH,
        "prediction": tuple(range(3, 60)) * 10,
    }  # longer than the smaller context
    shown = await interrupted(await parts.client(running, patience=0.0), large, **asked)
    await shown.rest()
    assert (shown.tokens, shown.reason) == (plain(TARGET, PROMPT, LENGTH), FinishReason.LENGTH)


async def test_what_is_begun_later_has_the_room_that_there_is(parts: Parts) -> None:
    """A context that is gone is not promised; one that may come back is waited for by whoever asks for so much."""
    large, small = await parts.verifier(TARGET, context=LARGE), await parts.verifier(TARGET, context=SMALL)
    running = await parts.one_by_one(large, small, verifier_wait=1.0)
    client = await parts.client(running, patience=0.0)
    assert (await client.server_info()).target.context == LARGE
    whole = await Reading(client).rest()
    assert (len(whole.tokens), whole.reason) == (LARGE - len(PROMPT), FinishReason.LENGTH)
    await large.stop(0.0)
    await until(lambda: sum(each.up for each in running.orchestrator.pool.verifiers) == 1)
    rest = await Reading(client).rest()
    assert (len(rest.tokens), rest.reason) == (SMALL - len(PROMPT), FinishReason.LENGTH)
    long = await Reading(client, max_tokens=SMALL).rest()
    assert long.error is not None
    assert long.error.code is grpc.StatusCode.UNAVAILABLE
    assert "no verifier of model 'scripted:7' holds a text of" in str(long.error)
    too_long = await Reading(client, max_tokens=LARGE).rest()
    assert too_long.error is not None
    assert too_long.error.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_orchestrator_of_another_version_shows_what_was_and_drives_nothing(
    redis: RedisServer, parts: Parts
) -> None:
    here = await parts.one_by_one(await parts.verifier(SLOW), redis_url=redis.url)
    there = await parts.one_by_one(await parts.verifier(OTHER_END), redis_url=redis.url)
    client, elsewhere = await parts.client(here, patience=0.0), await parts.client(there, patience=0.0)
    done = await client.complete(PROMPT, max_tokens=20, temperature=0.0)
    shown = [each async for each in elsewhere.watch(done.session_id)]
    assert [token for each in shown if isinstance(each, Chunk) for token in each.tokens] == list(done.tokens)
    assert isinstance(shown[-1], Finished)
    assert (shown[-1].reason, shown[-1].text_length) == (done.finish_reason, len(done.text))
    async with aclosing(client.generate(PROMPT, max_tokens=2000, temperature=0.0)) as events:
        started = await anext(events)
        assert isinstance(started, Started)
        no = await raised(
            grpc.aio.AioRpcError,
            watched(there.address, session_id=started.session_id, take_over=True),
            r"no verifier serves EOS ids \[0\] of model 'scrip",
        )
        assert no.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(await anext(events), Chunk)  # and its owner goes on


async def test_named_verifiers_that_all_change_are_a_new_version(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """One after the other, at their addresses: the first is refused until the other one has changed, too."""
    one, other = await parts.verifier(TARGET), await parts.verifier(TARGET)
    running = await parts.one_by_one(one, other)
    client, pool = await parts.client(running, patience=0.0), running.orchestrator.pool
    ended = plain(TARGET, PROMPT, 12)
    await one.stop(0.0)
    await parts.verifier(f"{TARGET}:end={WORD}", listen=one.address)
    await until(lambda: pool.verifiers[0].refusal is not None)
    assert len((await Reading(client, max_tokens=LENGTH).rest()).tokens) == LENGTH
    await other.stop(0.0)
    await parts.verifier(f"{TARGET}:end={WORD}", listen=other.address)
    await until(lambda: all(each.up for each in pool.verifiers))
    assert f"another version of scripted:7: EOS ids [{WORD}] rather than [0]" in caplog.text
    shown = await Reading(client, max_tokens=LENGTH).rest()
    assert (shown.tokens, shown.reason) == (ended, FinishReason.EOS)


async def test_who_repeats_a_call_joins_what_would_not_fit_now(redis: RedisServer, parts: Parts) -> None:
    large, small = await parts.verifier(SLOW, context=LARGE), await parts.verifier(SLOW, context=SMALL)
    here = await parts.one_by_one(large, redis_url=redis.url)
    there = await parts.one_by_one(small, redis_url=redis.url)
    client, elsewhere = await parts.client(here, patience=0.0), await parts.client(there, patience=0.0)
    asked: dict[str, Any] = {"max_tokens": 400, "request_id": "mine", "temperature": 0.0}
    async with aclosing(client.generate(PROMPT, **asked)) as events:
        started = await anext(events)
        assert isinstance(started, Started)
        async with aclosing(elsewhere.generate(PROMPT, **asked)) as repeated:
            joined = await anext(repeated)
            assert isinstance(joined, Started)
            assert joined.session_id == started.session_id
    never = await Reading(elsewhere, max_tokens=400, request_id="another").rest()
    assert never.error is not None
    assert never.error.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_all_choices_of_a_request_are_of_one_version(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes between the first and the last of them."""
    running = await parts.one_by_one(await parts.verifier(SLOW), await parts.verifier(f"{SLOW}:agree=0.999999"))
    pool = running.orchestrator.pool
    refused = pool.verifiers[1]
    assert refused.info is not None
    assert pool._accept_version(refused.info) is None
    versions = pool.models.named("scripted:7")
    turns = itertools.cycle(versions)
    monkeypatch.setattr(pool, "target_named", lambda model="": next(turns))
    request = generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenIds(ids=PROMPT), n=6, stopping=common_pb2.Stopping(max_tokens=4)
    )
    async with grpc.aio.insecure_channel(running.address) as channel:
        stream = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=LIMIT_S)
        begun = [each.started.session_id async for each in stream if each.HasField("started")]
    records = [running.orchestrator.sessions[each].view.record for each in begun]
    assert len(records) == 6
    assert len(versions) == 2
    assert len({identity_of(each) for each in records}) == 1
