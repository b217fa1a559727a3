"""Each option of a request, through the whole stack: none depends on who drafts.

Nobody, the text itself, a good drafter, a random one; at temperature 0 and above. Tokens, log-probabilities and the end
are those of the target alone (tests/reference_target.py), the text is cut where a stop string begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from specwire.client import AsyncClient, Completion
from specwire.client.requests import RequestOptions, generate_request
from specwire.core.messages import FinishReason
from specwire.lm.scripted import Script
from specwire.rpc import convert
from specwire.v1 import common_pb2, generation_pb2
from tests.orchestrator.stack import stack
from tests.reference_target import alone, close
from tests.wait import asked

VOCABULARY = 12
# Repeats itself, so that penalties have something to do; both plain texts end after 17 and 18 tokens.
MODEL = f"scripted:115:vocab={VOCABULARY}:memory=2:spread=4:eos=0.1"
SCRIPT = Script.parse(MODEL)
PROMPT = (5, 6, 7, 5)
LENGTH = 24
TIMEOUT = 30.0

GREEDY, DRAWN = RequestOptions(), RequestOptions(temperature=0.9, seed=5)
ALONE: dict[str, RequestOptions] = {
    "nothing": RequestOptions(),
    "temperature": RequestOptions(temperature=1.6, seed=3),
    "top_k": RequestOptions(top_k=3),
    "top_p": RequestOptions(top_p=0.7),
    "min_p": RequestOptions(min_p=0.2),
    "seed": RequestOptions(seed=1 << 63),
    "choice": RequestOptions(choice=2),
    "repetition_penalty": RequestOptions(repetition_penalty=1.4),
    "presence_penalty": RequestOptions(presence_penalty=0.9),
    "frequency_penalty": RequestOptions(frequency_penalty=0.6),
    "logit_bias": RequestOptions(logit_bias={3: 3.0, 9: -100.0}),
    "logprobs": RequestOptions(logprobs=3),
    "logprobs_of": RequestOptions(logprobs=VOCABULARY, logprobs_of="processed", top_k=4, repetition_penalty=1.2),
    "stop_ids": RequestOptions(stop_ids=[3, 8]),
    "fit_context": RequestOptions(fit_context=True),
    "stop": RequestOptions(stop=["1 9", "2 9"]),
    "min_tokens": RequestOptions(min_tokens=9, stop_ids=[3, 8]),
    "max_tokens": RequestOptions(max_tokens=5),
    "ignore_eos": RequestOptions(ignore_eos=True),
    "echo": RequestOptions(echo=True),
    "prediction_text": RequestOptions(prediction="7 5 2 9 4 1"),
    "prediction_tokens": RequestOptions(prediction=[7, 5, 2, 9, 4, 1]),
    "references": RequestOptions(references=["7 5 2 9 4 1", [3, 8, 1]]),
    "priority": RequestOptions(priority=7),
    "private": RequestOptions(private=True),
}
# Of a request, what says of whom it is asked and by whom, not what for.
# `sources` says what `drafting` says.
NO_OPTIONS = {"text", "tokens", "chat", "sampling", "stopping", "request_id", "parent", "whole_prompt", "model"}
NO_OPTIONS |= {"take_over", "note", "sources", "provisional"}
# Two names of the temperature's own rule; what the other rules are is no matter of options.
RULES = {0.0: "greedy", 0.9: "coupled"}


async def ways(clients: tuple[AsyncClient, ...], wish: RequestOptions) -> list[Completion]:
    """Nobody drafts, the text itself, a good drafter, a random one."""
    off: RequestOptions = {**wish, "drafting": False}
    ngram: RequestOptions = {**off, "ngram": True}
    asked = [clients[0].complete(PROMPT, timeout=TIMEOUT, **each) for each in (off, ngram)]
    asked += [each.complete(PROMPT, timeout=TIMEOUT, **wish) for each in clients[1:]]
    return list(await asyncio.gather(*asked))


def told(done: Completion) -> tuple[object, ...]:
    return done.tokens, done.text, done.logprobs, done.finish_reason, done.prompt


def cut(tokens: Sequence[int], stops: Sequence[str], least: int) -> tuple[int, int] | None:
    """How many tokens the first stop string that counts needs, more than `least`, and where in their text it begins."""
    for count in range(least + 1, len(tokens) + 1):
        text, before = " ".join(map(str, tokens[:count])), len(" ".join(map(str, tokens[: count - 1])))
        found = [text.find(stop, max(0, before - len(stop) + 1)) for stop in stops]
        begins = [begin for begin in found if begin >= 0]
        if begins:
            return count, min(begins)
    return None


def check(wish: RequestOptions, done: Completion) -> None:
    """Against the target alone."""
    request = generate_request(PROMPT, **wish)
    sampling = convert.sampling_from_wire(request.sampling, default_seed=0)
    stopping = convert.stopping_from_wire(request.stopping)
    tokens, reports, reason = alone(SCRIPT, PROMPT, sampling, stopping)
    stopped = cut(tokens[: len(tokens) - (reason is FinishReason.EOS)], wish.get("stop", ()), stopping.min_tokens)
    if stopped is not None:
        count, begin = stopped
        tokens, reports, reason = tokens[:count], reports[:count], FinishReason.STOP_STRING
        assert done.text == " ".join(map(str, tokens))[:begin]
    assert (list(done.tokens), done.finish_reason) == (tokens, reason), wish
    assert close(done.logprobs, reports if sampling.logprobs is not None else ())
    assert (done.prompt is not None and done.prompt.tokens == PROMPT) is wish.get("echo", False)


async def compared(wishes: Mapping[str, RequestOptions]) -> dict[str, list[Completion]]:
    """Each wish's completions, which are the same in all ways.

    There are stacks without a drafter, with a good one, and with a random one; the latter two wait for what is drafted.
    """
    target = f"{MODEL}:delay_ms=4"
    more: dict[str, Any] = {"plan": "stream:2,6,2", "slots": 32, "patient": True}
    async with (
        stack(target, slots=32) as plain,
        stack(target, f"{MODEL}:agree=0.8", **more) as good,
        stack(target, f"scripted:99:vocab={VOCABULARY}", **more) as bad,
    ):
        clients = plain.client, good.client, bad.client
        found = await asyncio.gather(*(ways(clients, wish) for wish in wishes.values()))
    for name, wish, each in zip(wishes, wishes.values(), found, strict=True):
        assert len({told(done) for done in each}) == 1, (name, [told(done) for done in each])
        check(wish, each[0])
    return dict(zip(wishes, found, strict=True))


@pytest.mark.parametrize("base", [GREEDY, DRAWN], ids=["greedy", "coupled"])
async def test_each_option_alone(base: RequestOptions) -> None:
    wishes: dict[str, RequestOptions] = {
        name: {**RequestOptions(max_tokens=LENGTH), **base, **wish} for name, wish in ALONE.items()
    }
    wishes["rule"] = {**wishes["nothing"], "rule": RULES[base.get("temperature", 0.0)]}

    def both_drafted(found: dict[str, list[Completion]]) -> bool:
        """Of guesses from the text nothing is promised: whether they pay is measured."""
        helped, misled = ([each[way].stats for each in found.values()] for way in (2, 3))
        return any(stats.accepted for stats in helped) and any(stats.recovered for stats in misled)

    found = await asked(lambda: compared(wishes), both_drafted)
    changed = {name for name, done in found.items() if told(done[0]) != told(found["nothing"][0])}
    filters = {"top_k", "top_p", "min_p", "seed", "choice"}
    of_speed = {"prediction_text", "prediction_tokens", "references", "priority", "private"}
    fits = {"fit_context"}  # LENGTH does
    assert not changed & (of_speed | fits)
    assert set(ALONE) - changed <= {"nothing", "temperature"} | of_speed | fits | (filters if base is GREEDY else set())


def test_no_option_is_left_out() -> None:
    """`drafting` is asked for in four ways throughout, `n` in tests/orchestrator/test_options.py."""
    messages = (common_pb2.Sampling, common_pb2.Stopping, generation_pb2.GenerateRequest)
    fields = {name for message in messages for name in message.DESCRIPTOR.fields_by_name} - NO_OPTIONS
    # tests/orchestrator/test_constrained.py, tests/orchestrator/http/test_tools.py
    constraints = {"json_schema", "regex", "choices", "grammar", "constraint_behind"}
    assert fields == {*ALONE, *constraints, "rule", "drafting", "n"} - {"nothing"}
