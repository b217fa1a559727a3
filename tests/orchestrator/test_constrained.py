"""Constrained output through the whole stack: every text fits, and none depends on who drafts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from specwire.client import Completion, SpecwireError
from specwire.client.requests import RequestOptions
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.core.messages import FinishReason
from tests.orchestrator.stack import Stack, stack
from tests.orchestrator.tiny import tiny
from tests.text.schemas import fits
from tests.text.test_constrained import children_of
from tests.wait import asked, raised, until

PROMPT = "def area(width"
LENGTH = 60
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# At most 50 tokens, so that each text of it ends, whatever is drawn.
SHORT: dict[str, Any] = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {"tag": {"enum": ["red", "green"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["tag", "age"],
    "additionalProperties": False,
}
GRAMMAR = 'start: item ("," item){0,3}\nitem: /[a-z]{1,3}/ | "(" start ")"\n'

WISHES: dict[str, RequestOptions] = {
    "schema": RequestOptions(json_schema=SCHEMA),
    "any object": RequestOptions(
        json_schema='{"type": "object", "maxProperties": 2}', temperature=0.8, seed=4, top_k=40
    ),
    "expression": RequestOptions(regex=r"[a-c]{3,12} (é|\d{2,4})+;", temperature=1.0, seed=3),
    "choices": RequestOptions(choices=["yes, it is", "no, it is not", "nobody knows"], temperature=1.0, seed=6),
    "grammar": RequestOptions(grammar=GRAMMAR, temperature=1.2, seed=7, frequency_penalty=0.5),
    "stopped": RequestOptions(regex="[a-z ]{5,40}", stop=["e"], min_tokens=3, logprobs=2, logprobs_of="processed"),
    "weighed": RequestOptions(json_schema=SHORT, temperature=1.0, seed=5, rule="rejection"),
    "in blocks": RequestOptions(json_schema=SHORT, temperature=1.0, seed=8, rule="block"),
    "lossy": RequestOptions(json_schema=SHORT, temperature=1.0, seed=8, rule="threshold(0.1)"),
}
INEXACT = ("weighed", "in blocks", "lossy")
# What ends by itself before LENGTH, so that it must fit.
ENDING = WISHES.keys() - {"stopped"}


def constraint_of(wish: RequestOptions) -> Constraint:
    for kind in ConstraintKind:
        value: Any = wish.get(kind)  # by name
        if value:
            text = json.dumps(value) if isinstance(value, Mapping) else value
            return Constraint(kind, tuple(text) if isinstance(text, list) else (text,))
    raise AssertionError(wish)


async def told(running: Stack, **changes: bool) -> dict[str, Completion]:
    common = RequestOptions(max_tokens=LENGTH)
    common.update(changes)  # type: ignore[typeddict-item]  # who may propose, by name
    wishes: list[RequestOptions] = [{**common, **wish} for wish in WISHES.values()]
    done = await asyncio.gather(*(running.client.complete(PROMPT, **wish) for wish in wishes))
    found = dict(zip(WISHES, done, strict=True))
    for name, each in found.items():
        assert each.finish_reason in (FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP_STRING)
        if each.finish_reason is FinishReason.EOS:
            assert fits(constraint_of(WISHES[name]), each.text), (name, each.text)
    return found


def exact(found: dict[str, Completion]) -> dict[str, object]:
    return {
        name: (each.tokens, each.text, each.finish_reason, [round(of.logprob, 3) for of in each.logprobs])
        for name, each in found.items()
        if name not in INEXACT
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("target"), 1)


async def test_every_text_fits_and_is_the_same_whoever_drafts(target: str, tmp_path: Path) -> None:
    """Nobody, the text itself, a good drafter, a random one."""
    good, bad = tiny(tmp_path / "good", 2, like=target, noise=0.01), tiny(tmp_path / "bad", 9)
    async with stack(target, good, plan="stream:4,8,4", patient=True) as running:
        plain = await told(running, drafting=False)
        ngram = await told(running, drafting=False, ngram=True)
        helped = await asked(lambda: told(running), lambda found: sum(each.stats.accepted for each in found.values()))
    async with stack(target, bad, plan="stream:4,8") as running:
        misled = await told(running)
    assert exact(plain) == exact(ngram) == exact(helped) == exact(misled)
    for found in (plain, ngram, helped, misled):
        assert {name for name, each in found.items() if each.finish_reason is FinishReason.EOS} == ENDING
        assert re.fullmatch("[a-z ]*", found["stopped"].text)


async def test_completions_of_one_prompt_fit_each(target: str) -> None:
    wish = RequestOptions(json_schema=SCHEMA, temperature=1.0, seed=2, max_tokens=LENGTH)
    before = nurseries()
    async with stack(target) as running:
        several = await running.client.complete_many(PROMPT, 3, **wish)
        ended = [each for each in several if each.finish_reason is FinishReason.EOS]
        assert len({each.tokens for each in several}) == 3
        assert all(fits(constraint_of(wish), each.text) for each in ended)
        await until(lambda: not any(children_of(each) for each in nurseries() if each not in before))
        assert len([each for each in nurseries() if each not in before]) == 1
    assert [each for each in nurseries() if each not in before] == []


def nurseries() -> list[int]:
    """Of this process's services. Threads and processes may end while they are looked at."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if b"specwire.text.constraint_process" in command_of(child)]


def command_of(process: int) -> bytes:
    """Empty for one that has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


# Compiles for hours; and is compiled, but its first masks are of too many ways to go on.
HOURS = {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}"} for n in range(60)]}
MANY_WAYS = "start: " + " ".join(['("a" | "aa" | "aaa")?'] * 2800)
REFUSED: list[tuple[RequestOptions, str]] = [
    (RequestOptions(regex="a("), "regex: at 1(8): invalid regex"),
    (RequestOptions(json_schema="[1]"), "json_schema: must be a JSON object, not [1]"),
    (RequestOptions(json_schema="{"), "json_schema: is no JSON: "),
    (RequestOptions(json_schema={"type": "frob"}), "json_schema: Invalid type: frob"),
    (RequestOptions(grammar="start: nobody"), "grammar: at 1(8): unknown name"),
    (RequestOptions(choices=["a", ""]), "choices: must not be empty"),
    (RequestOptions(choices=["a"] * 1025), "choices: must be from 1 to 1024, not 1025"),
    (RequestOptions(regex="a" * 65537), "regex: at most 65536 bytes are allowed, not 65537"),
    (RequestOptions(regex="a", grammar="b"), "grammar: contradicts regex"),
    (RequestOptions(regex="a", ignore_eos=True), "ignore_eos: contradicts regex"),
    (RequestOptions(grammar=MANY_WAYS, min_tokens=10), "grammar: Parser Error: Current row has"),
    (RequestOptions(json_schema=HOURS), "json_schema: took more time or memory than it may: 2 s of a processor, 2 GiB"),
]
STUCK: list[tuple[RequestOptions, str]] = [
    (RequestOptions(regex="a", min_tokens=3), "regex: the text may neither go on nor end at"),
    (RequestOptions(choices=["red"], max_tokens=60, min_tokens=50, logprobs=0), "choices: the text may neither go on"),
]


async def test_what_cannot_be_served_is_refused_and_costs_nobody_else_anything(target: str) -> None:
    async with stack(target) as running:
        ordinary = asyncio.create_task(running.client.complete(PROMPT, max_tokens=300, ignore_eos=True))
        refused = [(*each, grpc.StatusCode.INVALID_ARGUMENT) for each in REFUSED]
        for options, message, code in [*refused, *((*each, grpc.StatusCode.OUT_OF_RANGE) for each in STUCK)]:
            wish: RequestOptions = {**RequestOptions(max_tokens=20), **options}
            with pytest.raises(SpecwireError) as caught:
                done = await running.client.complete(PROMPT, **wish)
                raise AssertionError(f"{options} was served: {done.text!r}")
            assert (caught.value.code, message in caught.value.message) == (code, True), caught.value.message
        assert len((await ordinary).tokens) == 300


async def test_without_the_library_it_is_said_what_to_install(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specwire.text.constraints.installed_version", lambda: "")
    async with stack(target, target) as running:
        caught = await raised(SpecwireError, running.client.complete(PROMPT, regex="a", max_tokens=5))
        assert (await running.client.complete(PROMPT, max_tokens=3)).tokens
    assert caught.code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.message == "regex: needs llguidance here (pip install 'specwire[constrained]')"


async def test_a_model_that_has_no_tokenizer_cannot_be_constrained() -> None:
    async with stack() as running:
        with pytest.raises(SpecwireError, match="regex: this model's tokenizer cannot be constrained") as caught:
            await running.client.complete((5, 6, 7), regex="a", max_tokens=5)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
