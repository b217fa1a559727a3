"""A head beside the target, through the whole stack: who is drafted for by it, and what is told of that."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import grpc.aio
import pytest

from specwire.client import Chunk, Completion
from specwire.client.requests import RequestOptions
from specwire.v1 import generation_pb2 as pb
from specwire.v1 import generation_pb2_grpc
from tests.lm.heads.by_hand import nearly_bigram
from tests.lm.models import VOCABULARY
from tests.orchestrator.stack import PROMPT, stack
from tests.orchestrator.test_generation import check_sources
from tests.wait import asked

WORDS = {f"w{index}": index for index in range(VOCABULARY)}
# Of RequestOptions drafting and ngram: automatic, drafters, n-grams, off.
WAYS = ((True, True), (True, False), (False, True), (False, False))
LENGTH = 200


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_it_drafts_for_those_that_leave_drafting_to_the_service(temperature: float, tmp_path: Path) -> None:
    """Whether it pays is measured: where the machine is busy, it is tried in another text."""
    where, heads = nearly_bigram(tmp_path, 512, WORDS)
    done: list[Completion] = []
    async with stack(where, heads=heads) as running:
        for drafting, ngram in WAYS:
            wish = RequestOptions(drafting=drafting, ngram=ngram, max_tokens=LENGTH, temperature=temperature, seed=3)
            ask = partial(running.client.complete, PROMPT, **wish)
            done.append(await (asked(ask, lambda told: told.stats.tested_head) if drafting and ngram else ask()))
    assert len({each.tokens for each in done}) == 1
    assert len(done[0].tokens) == LENGTH
    for (drafting, ngram), each in zip(WAYS, done, strict=True):
        check_sources(each.stats)
        assert (each.stats.proposed_head > 0) == (drafting and ngram)


async def test_the_time_that_it_takes_reaches_the_client(tmp_path: Path) -> None:
    where, heads = nearly_bigram(tmp_path, 512, WORDS)
    async with stack(where, heads=heads) as running:

        async def ask() -> list[Chunk]:
            events = running.client.generate(PROMPT, max_tokens=LENGTH, temperature=1.0, seed=3)
            return [event async for event in events if isinstance(event, Chunk)]

        await asked(ask, lambda told: any(each.timings and each.timings.step.drafted_us for each in told))


async def test_heads_alone(tmp_path: Path) -> None:
    """Without drafters and n-grams a head drafts all the same, if a request wants just that."""
    where, heads = nearly_bigram(tmp_path, 512, WORDS)
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), sources=pb.Sources(heads=True))
    request.stopping.max_tokens = LENGTH
    async with stack(where, heads=heads) as running, grpc.aio.insecure_channel(running.orchestrator.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def ask() -> pb.Stats:
            told = [event.finished async for event in stub.Generate(request) if event.HasField("finished")]
            ended: pb.Finished = told[-1]
            return ended.stats

        stats = await asked(ask, lambda told: told.accepted_head)
    assert (stats.proposed_ngram, stats.proposed) == (0, stats.proposed_head)
    assert stats.accepted_head > 0
