"""The demo pair's target over two processes: it writes its own text, and neither process outlives the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
from tokenizers import Tokenizer

from demo_pair import TARGET, held_out_prompts
from deploy.stack.processes import descendants
from specwire.lm import Feed, LanguageModel, load_model
from specwire.v1 import common_pb2, verify_pb2_grpc
from tests.verify_service.peer import Peer
from tests.wait import lives, until

PATIENCE_S = 100.0
COUNT = 48
# Two scores that are closer are a near-tie (docs/EXACTNESS.md).
NEAR_TIE = 1e-4


@asynccontextmanager
async def verifier() -> AsyncIterator[tuple[Process, str, int]]:
    """A verifier of its own process, its address, and the process of its other rank."""
    arguments = ["--tensor-parallel-size=2", "--dtype=float32", "--slots=2", "--json"]
    command = [sys.executable, "-m", "verify_service", str(TARGET), *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            ready = json.loads(await process.stdout.readline())
        (other,) = descendants(process.pid)
        yield process, ready["address"], other
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_serves_and_ends_on_a_signal_with_its_other_rank() -> None:
    one = load_model(str(TARGET), slots=1, threads=1)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompt = tokenizer.encode(held_out_prompts()[0].text, add_special_tokens=False).ids
    async with verifier() as (process, address, other):
        info, tokens = await written(address, prompt)
        assert info.weights_fingerprint == one.info.weights_fingerprint
        assert info.kv_bytes == info.slots * one.kv_bytes
        assert len(tokens) == COUNT
        assert largest_gap(one, prompt, tokens) <= NEAR_TIE
        for pid in (other, process.pid):  # as a supervisor signals all of them
            os.kill(pid, signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
        await until(lambda: not lives(other))


async def test_the_other_rank_ends_with_a_verifier_that_is_killed() -> None:
    async with verifier() as (process, _, other):
        process.kill()
        await until(lambda: not lives(process.pid) and not lives(other))


async def written(address: str, prompt: Sequence[int]) -> tuple[common_pb2.GetModelInfoResponse, list[int]]:
    """What the verifier says of itself, and COUNT tokens of its behind the prompt."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        info = await stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=PATIENCE_S)
        call = stub.Connect()
        peer = Peer(call, info)
        await peer.open(1, prompt, stopping=common_pb2.Stopping(max_tokens=COUNT, ignore_eos=True))
        await peer.until_finished(1)
        call.cancel()
        return info, peer.tokens[1]


def largest_gap(lm: LanguageModel, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """By how much a token was ever worse than the best one behind the text before it."""
    logits = lm.forward([Feed(0, 0, [*prompt, *tokens[:-1]], len(tokens))])
    chosen = [float(row[token]) for row, token in zip(logits, tokens, strict=True)]
    return max(float(row.max()) - score for row, score in zip(logits, chosen, strict=True))
