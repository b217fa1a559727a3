"""A tiny random Llama through the whole service writes what transformers writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from specwire.core.text import hash_of
from specwire.v1 import common_pb2
from tests.verify_service.peer import connected, serving

PROMPT = [5, 17, 80, 3]
COUNT = 48
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    """Greedy continuation by transformers; the test's seed has no near-ties, which would make it a matter of luck."""
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, use_cache=True)
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    with torch.inference_mode():
        best = model(output).logits[0, len(PROMPT) - 1 : -1].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > NEAR_TIE
    return tokens


@pytest.mark.parametrize("right", [0, 1, 3, 5])
async def test_equals_transformers_with_and_without_proposals(llama: Path, expected: list[int], right: int) -> None:
    stopping = common_pb2.Stopping(max_tokens=COUNT, ignore_eos=True)
    async with serving(str(llama), slots=2, context=None) as running, connected(running) as peer:
        await peer.open(1, PROMPT, stopping=stopping)
        await peer.open(2, PROMPT[:2], stopping=stopping)
        number = 0
        while not {1, 2} <= peer.finished.keys():
            await peer.receive()
            done = len(peer.tokens.get(1, []))
            if right and number < done < COUNT:
                number = done
                text, guess = PROMPT + expected[:done], [*expected[done : done + right], 96, 95]
                chunk = common_pb2.Proposal(
                    handle=1, chain=number, base=len(text), tokens=guess, prefix_hash=hash_of(text)
                )
                await peer.send(proposals=[chunk])
        assert peer.tokens[1] == expected
        assert len(peer.tokens[2]) == COUNT


async def test_equals_transformers_behind_a_prefix_that_others_left(llama: Path, expected: list[int]) -> None:
    """A turn that goes on behind what was decided, one that begins alike, and one whose slot was needed meanwhile."""
    text = PROMPT + expected
    async with serving(str(llama), slots=2, context=None) as running, connected(running) as peer:
        cached = []
        for handle, (length, scope) in enumerate([(30, b"a"), (40, b"a"), (20, b"a"), (20, b"b"), (30, b"a")], 1):
            stopping = common_pb2.Stopping(max_tokens=len(text) - length, ignore_eos=True)
            await peer.open(handle, text[:length], stopping=stopping, cache_scope=scope)
            while handle not in peer.finished:
                cached += [opened.cached for opened in (await peer.receive()).opened]
            assert peer.tokens[handle] == text[length:]
            await peer.send(closes=[common_pb2.Close(handle=handle)])
    assert cached == [0, 38, 18, 0, 28]
