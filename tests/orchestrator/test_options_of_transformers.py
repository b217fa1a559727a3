"""Every option that transformers' `generate` has, too: greedily the same text and log-probabilities, whoever drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo_pair import TARGET
from specwire.client import Completion
from specwire.client.requests import RequestOptions
from tests.orchestrator.stack import drafted, stack
from tests.orchestrator.tiny import tiny
from tests.wait import asked

TOKENIZER = str(TARGET / "tokenizer.json")
PROMPT: list[int] = Tokenizer.from_file(TOKENIZER).encode("def area(width").ids
COUNT = 32
NEAR_TIE = 1e-4
EOS = 0


@dataclass(frozen=True)
class Case:
    """What transformers is asked for, and what the stack is. processed: whose log-probabilities are reported."""

    theirs: dict[str, Any] = field(default_factory=dict)
    ours: RequestOptions = field(default_factory=lambda: RequestOptions())
    processed: bool = False


@dataclass(frozen=True)
class Written:
    """By transformers. scores: logits (tokens, vocabulary) of the model, and what is left of them to choose from."""

    tokens: list[int]
    logits: torch.Tensor
    scores: torch.Tensor


def by_transformers(model: Any, theirs: dict[str, Any]) -> Written:
    """Near-ties would make the comparison a matter of luck: there are none. Without `eos_token_id` nothing ends it."""
    model.generation_config.eos_token_id = None
    given = torch.tensor([PROMPT])
    done = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        pad_token_id=EOS,
        do_sample=False,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **{"max_new_tokens": COUNT, **theirs},
    )
    logits, scores = torch.cat(done.logits), torch.cat(done.scores)
    best = scores.topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > NEAR_TIE
    return Written(done.sequences[0, len(PROMPT) :].tolist(), logits, scores)


def bias_to_end(plain: Written) -> float:
    """Of the end of sequence, so that it comes where it is least unlikely, and nowhere before."""
    gaps = (plain.logits.max(dim=1).values - plain.logits[:, EOS])[: COUNT // 2]
    at = int(gaps[3:].argmin()) + 3
    before = float(gaps[:at].min())
    assert before > float(gaps[at]), "the least unlikely place is the first"
    return (float(gaps[at]) + before) / 2


def cases(plain: Written, text: str) -> dict[str, Case]:
    """`plain`, `text`: what is written without any option."""
    some, other = plain.tokens[6], plain.tokens[11]
    bias = {plain.tokens[0]: -3.0, some: 1.5, 40: 2.0}
    biased = {"sequence_bias": {(token,): value for token, value in bias.items()}}
    to_end = bias_to_end(plain)
    ending = {"sequence_bias": {(EOS,): to_end}}
    on = RequestOptions(ignore_eos=True, logprobs=0)
    ends = {"eos_token_id": [some, other]}
    stops = [text[9:12], text[20:23]]
    return {
        "nothing": Case({}, RequestOptions(ignore_eos=True)),
        "filters, which leave the best": Case({}, {**on, "top_k": 2, "top_p": 0.5, "min_p": 0.3}),
        "repetition_penalty": Case({"repetition_penalty": 1.3}, {**on, "repetition_penalty": 1.3}),
        "logit_bias": Case(biased, {**on, "logit_bias": bias}),
        "max_tokens": Case({"max_new_tokens": 7}, {**on, "max_tokens": 7}),
        "stop_ids": Case(ends, {**on, "stop_ids": [some, other]}),
        "min_tokens": Case(ends | {"min_new_tokens": 15}, {**on, "stop_ids": [some, other], "min_tokens": 15}),
        "stop": Case({"stop_strings": stops, "tokenizer": words()}, {**on, "stop": stops}),
        "the end": Case(ending | {"eos_token_id": EOS}, RequestOptions(logit_bias={EOS: to_end}, logprobs=0)),
        "ignore_eos": Case(ending, {**on, "logit_bias": {EOS: to_end}}),
        "logprobs": Case({}, {**on, "logprobs": 3}),
        "of the processed": Case(
            {"repetition_penalty": 1.3},
            {**on, "repetition_penalty": 1.3, "logprobs": 3, "logprobs_of": "processed"},
            processed=True,
        ),
        "all": Case(
            {"repetition_penalty": 0.8, "min_new_tokens": 20} | biased | ends,
            {**on, "repetition_penalty": 0.8, "logit_bias": bias, "stop_ids": [some, other], "min_tokens": 20},
        ),
    }


def words() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=TOKENIZER)


def check(name: str, case: Case, written: Written, done: Completion) -> None:
    assert list(done.tokens) == written.tokens, name
    if "logprobs" not in case.ours:
        return
    log_p = (written.scores if case.processed else written.logits).double().log_softmax(dim=1)
    for row, token, told in zip(log_p, done.tokens, done.logprobs, strict=True):
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [each for each, _ in told.top] == row.topk(case.ours["logprobs"] or 0).indices.tolist()


async def told(address: Any, wishes: Sequence[RequestOptions]) -> list[Completion]:
    return list(await asyncio.gather(*(address.complete(PROMPT, **wish) for wish in wishes)))


async def test_equals_transformers_whoever_drafts(tmp_path: Path) -> None:
    """Nobody, a good drafter, a random one."""
    torch.set_num_threads(1)
    target = tiny(tmp_path / "target", 1)
    good, bad = tiny(tmp_path / "good", 2, like=target, noise=0.01), tiny(tmp_path / "bad", 9)
    model: Any = LlamaForCausalLM.from_pretrained(target).eval()
    plain = by_transformers(model, {})
    wanted = cases(plain, str(words().decode(plain.tokens)))
    written = {name: by_transformers(model, case.theirs) for name, case in wanted.items()}
    lengths = {name: len(each.tokens) for name, each in written.items()}
    assert lengths["stop"] < COUNT > lengths["the end"] < lengths["ignore_eos"] == COUNT
    assert lengths["stop_ids"] < 15 < lengths["min_tokens"]
    wishes: list[RequestOptions] = [{**RequestOptions(max_tokens=COUNT), **case.ours} for case in wanted.values()]
    off: list[RequestOptions] = [{**wish, "drafting": False} for wish in wishes]
    async with stack(target, good, plan="stream:4,8,4", patient=True) as running:
        found = [await told(running.client, off), await drafted(lambda: told(running.client, wishes))]
    async with stack(target, bad, plan="stream:4,8,4", patient=True) as running:
        found.append(
            await asked(lambda: told(running.client, wishes), lambda texts: sum(done.stats.recovered for done in texts))
        )
    for way in found:
        for (name, case), done in zip(wanted.items(), way, strict=True):
            check(name, case, written[name], done)
