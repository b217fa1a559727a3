"""Greedy texts under options are those of transformers' `generate`, with right, wrong and no proposals."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specwire.core.text import hash_of
from specwire.v1 import common_pb2
from tests.verify_service.peer import connected, serving

PROMPT = [5, 17, 80, 3]
COUNT = 40
NEAR_TIE = 1e-4
BIAS = {7: 1.5, 19: -3.0, 80: 2.0}


@dataclass(frozen=True)
class Case:
    """What transformers is asked for, and what the verifier is."""

    theirs: dict[str, Any]
    sampling: dict[str, Any] = field(default_factory=dict)
    stopping: dict[str, Any] = field(default_factory=dict)


def cases(end: int) -> dict[str, Case]:
    """`end`: an id that the plain text soon comes to."""
    bias = {"sequence_bias": {(token,): value for token, value in BIAS.items()}}
    ends = {"eos_token_id": end, "pad_token_id": end}
    return {
        "repetition": Case({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        "bias": Case(bias, {"logit_bias": BIAS}),
        "end": Case(ends, {}, {"stop_ids": [end]}),
        "minimum": Case(ends | {"min_new_tokens": 12}, {}, {"stop_ids": [end], "min_tokens": 12}),
        "all": Case(
            {"repetition_penalty": 0.8, "min_new_tokens": 20} | bias | ends,
            {"repetition_penalty": 0.8, "logit_bias": BIAS},
            {"stop_ids": [end], "min_tokens": 20},
        ),
    }


def by_transformers(model: Any, options: dict[str, Any]) -> list[int]:
    """Near-ties would make the comparison a matter of luck: the models have none."""
    done = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=COUNT,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    for scores in done.scores:
        best = scores[0].topk(2).values
        assert float(best[0] - best[1]) > NEAR_TIE
    tokens: list[int] = done.sequences[0, len(PROMPT) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def asked(llama: Path) -> dict[str, tuple[Case, list[int]]]:
    """Each case with the text that it must come to."""
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    end = by_transformers(model, {})[2]
    asked = {name: (case, by_transformers(model, case.theirs)) for name, case in cases(end).items()}
    assert len(asked["end"][1]) <= 3
    assert len(asked["minimum"][1]) > 12
    return asked


@pytest.mark.parametrize("right", [0, 2, 5])
async def test_equals_transformers(llama: Path, asked: dict[str, tuple[Case, list[int]]], right: int) -> None:
    """`right`: how many of each proposal's tokens are; two more are not."""
    names = dict(enumerate(asked, 1))
    async with serving(str(llama), slots=len(names), context=None) as running, connected(running) as peer:
        for handle, name in names.items():
            case, _ = asked[name]
            sampling = common_pb2.Sampling(seed=0, **case.sampling)
            stopping = common_pb2.Stopping(max_tokens=COUNT, **case.stopping)
            await peer.open(handle, PROMPT, sampling=sampling, stopping=stopping)
        proposed = dict.fromkeys(names, 0)
        while not names.keys() <= peer.finished.keys():
            await peer.receive()
            for handle, name in names.items():
                done = len(peer.tokens.get(handle, []))
                if right and proposed[handle] < done and handle not in peer.finished:
                    proposed[handle] = done
                    expected = asked[name][1]
                    text, guess = PROMPT + expected[:done], [*expected[done : done + right], 96, 95]
                    chunk = common_pb2.Proposal(
                        handle=handle, chain=done, base=len(text), tokens=guess, prefix_hash=hash_of(text)
                    )
                    await peer.send(proposals=[chunk])
        for handle, name in names.items():
            assert peer.tokens[handle] == asked[name][1], name
