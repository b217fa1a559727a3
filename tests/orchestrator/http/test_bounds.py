"""Each limit of a request through the doors: nothing, one, exactly the limit, one more, which is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from specwire.client import Client, SpecwireError
from tests.orchestrator.http.front import CHAT, COMPLETIONS, LIMIT_S, MODEL, Front, front

CONTEXT, VOCABULARY = 64, 2048
PROMPT = [5, 6, 7]
ROOM = CONTEXT - len(PROMPT)
TALK = [{"role": "user", "content": "5 6 7"}]
BIG = (1 << 32) - 1


@pytest.fixture(scope="module")
def small() -> Iterator[Front]:
    with front(f"{MODEL}:vocab={VOCABULARY}", context=CONTEXT) as running:
        yield running


@dataclass(frozen=True)
class Bound:
    """What a request has with each number. param: the field that a refusal names, where the row has another name."""

    asked: Callable[[Any], dict[str, Any]]
    good: Sequence[float]
    bad: Sequence[float]
    param: str = ""


def field(name: str, good: Sequence[float], bad: Sequence[float], **more: Any) -> tuple[str, Bound]:
    return name, Bound(lambda value: {name: value, **more}, good, bad, name)


def ids(count: int) -> list[int]:
    return [3 + index % 50 for index in range(count)]


SAMPLING = [
    field("temperature", [0, 1e-4, 1, 100], [-1e-9, 9e-5, 100.001]),
    field("top_p", [1e-9, 1], [0, 1.001, -1]),
    field("min_p", [0, 1], [-0.001, 1.001]),
    field("presence_penalty", [-2, 0, 2], [-2.001, 2.001]),
    field("frequency_penalty", [-2, 0, 2], [-2.001, 2.001]),
    field("repetition_penalty", [0.01, 1, 100], [0, 0.009, 100.001]),
    field("priority", [-100, 0, 100], [-101, 101]),
    field("min_tokens", [0, 1, 4], [-1, 5], max_tokens=4),
    field("logprobs", [0, 1, 20], [-1, 21]),
    ("logit_bias", Bound(lambda n: {"logit_bias": {str(each): 1 for each in range(n)}}, [0, 1, 1024], [1025])),
    ("its value", Bound(lambda b: {"logit_bias": {"5": b}}, [-100, 0, 100], [-100.001, 100.001], "logit_bias")),
    ("its id", Bound(lambda n: {"logit_bias": {str(n): 1}}, [0, VOCABULARY - 1], [VOCABULARY], "logit_bias")),
    ("stop", Bound(lambda n: {"stop": [f"never {each}" for each in range(n)]}, [0, 1, 16], [17])),
    ("its length", Bound(lambda n: {"stop": ["x" * n]}, [1, 1024], [0, 1025], "stop")),
    ("references", Bound(lambda n: {"references": ["5 6"] * n}, [0, 1, 64], [65])),
    ("request_id", Bound(lambda n: {"request_id": "x" * n}, [0, 1, 128], [129])),
]
HTTP = [
    *SAMPLING,
    ("prompt", Bound(lambda n: {"prompt": ids(n), "max_tokens": 1}, [1, CONTEXT - 1], [0, CONTEXT, CONTEXT + 1])),
    field("max_tokens", [-1, 0, 1, ROOM], [-2, ROOM + 1, BIG, BIG + 1]),
    ("prompts", Bound(lambda n: {"prompt": [ids(2)] * n, "max_tokens": 1}, [1, 64], [0, 65], "prompt")),
    field("n", [1, 64], [0, -1, 65]),
    ("n of two", Bound(lambda n: {"prompt": [ids(2)] * 2, "n": n}, [1, 32], [33], "n")),
    ("best_of", Bound(lambda n: {"n": 2, "best_of": n}, [2], [0, 1, 3])),
    field("prompt_logprobs", [0, 1, 20], [-1, 21]),
    field("top_k", [-1, 0, 1, BIG], [-2, BIG + 1]),
    field("seed", [-(1 << 63), 0, (1 << 64) - 1], [-(1 << 63) - 1, 1 << 64]),
    field("timeout", [LIMIT_S, 86_400], [0, -1, 86_400.1]),
    ("stop_token_ids", Bound(lambda n: {"stop_token_ids": [2000] * n}, [0, 1, 1024], [1025])),
    ("their ids", Bound(lambda n: {"stop_token_ids": [n]}, [0, VOCABULARY - 1], [-1, VOCABULARY], "stop_token_ids")),
    (
        "prediction",
        Bound(lambda n: {"prediction": {"type": "content", "content": "5 " * n}}, [0, 1, CONTEXT], [CONTEXT + 1]),
    ),
    (
        "scored",
        Bound(lambda n: {"prompt": ids(n), "max_tokens": 0, "echo": True, "logprobs": 1}, [1, CONTEXT], [0], "prompt"),
    ),
    ("too long to score", Bound(lambda n: {"prompt": ids(n), "max_tokens": 0}, [CONTEXT], [CONTEXT + 1], "prompt")),
    (
        "scored and more",
        Bound(
            lambda n: {"prompt": ids(n), "prompt_logprobs": 0, "max_tokens": 1},
            [CONTEXT - 1],
            [CONTEXT, CONTEXT + 1],
            "prompt",
        ),
    ),
    ("nothing of", Bound(lambda n: {"max_tokens": 0, "min_tokens": n}, [0], [1], "min_tokens")),
    (
        "id of two",
        Bound(lambda n: {"request_id": "y" * n, "n": 2}, [1, 125, 126, 128], [129], "request_id"),
    ),
]
CHATS = [
    field("max_tokens", [-1, 1, CONTEXT - 3], [-2, 0, CONTEXT - 2]),
    field("max_completion_tokens", [-1, 1, CONTEXT - 3], [-2, 0, CONTEXT - 2]),
    field("top_logprobs", [0, 1, 20], [-1, 21], logprobs=True),
    field("top_logprobs", [0], [1], logprobs=False),
    field("n", [1, 64], [0, 65], max_tokens=1),
]
GRPC = [
    *((name, bound) for name, bound in SAMPLING if name not in ("logit_bias", "request_id")),
    ("request_id", Bound(lambda n: {"request_id": "g" * n}, [0, 1, 128], [129])),
    field("max_tokens", [0, 1, ROOM], [ROOM + 1, BIG]),
    field("top_k", [0, 1, BIG], []),
    field("seed", [0, (1 << 64) - 1], []),
    ("logit_bias", Bound(lambda n: {"logit_bias": dict.fromkeys(range(n), 1)}, [0, 1, 1024], [1025])),
    ("stop_ids", Bound(lambda n: {"stop_ids": [2000] * n}, [0, 1, 1024], [1025])),
    ("their ids", Bound(lambda n: {"stop_ids": [n]}, [0, VOCABULARY - 1], [VOCABULARY], "stop_ids")),
    ("prediction", Bound(lambda n: {"prediction": ids(n)}, [0, 1, CONTEXT], [CONTEXT + 1])),
]


def named(bounds: Sequence[tuple[str, Bound]]) -> list[Any]:
    return [pytest.param(bound.param or name, bound, id=f"{name}-{at}") for at, (name, bound) in enumerate(bounds)]


def check(door: Front, path: str, given: dict[str, Any], param: str, bound: Bound) -> None:
    for value in bound.good:
        answer = door.post(path, **{**given, **bound.asked(value)})
        assert answer.status_code == 200, (value, answer.text)
    for value in bound.bad:
        answer = door.post(path, **{**given, **bound.asked(value)})
        assert (answer.status_code, answer.json()["error"].get("param")) == (400, param), (value, answer.text)


@pytest.mark.parametrize(("param", "bound"), named(HTTP))
def test_a_completion(small: Front, param: str, bound: Bound) -> None:
    check(small, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}, param, bound)


@pytest.mark.parametrize(("param", "bound"), named(CHATS))
def test_a_chat(small: Front, param: str, bound: Bound) -> None:
    check(small, CHAT, {"messages": TALK, "ignore_eos": True}, param, bound)


def test_a_response(small: Front) -> None:
    bound = Bound(lambda n: {"max_output_tokens": n}, [-1, 1, CONTEXT - 3], [-2, 0, CONTEXT - 2])
    check(small, "/v1/responses", {"input": TALK, "ignore_eos": True}, "max_output_tokens", bound)


def test_a_header_s_request_id(small: Front) -> None:
    for length, status in ((1, 200), (128, 200), (129, 400)):
        header = {"X-Specwire-Request-Id": "z" * length}
        answer = small.client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 1}, headers=header)
        assert answer.status_code == status, answer.text


def test_tokens_made_text(small: Front) -> None:
    check(small, "/detokenize", {}, "tokens", Bound(lambda n: {"tokens": ids(n)}, [0, 1, CONTEXT], [CONTEXT + 1]))


@pytest.mark.parametrize(("param", "bound"), named(GRPC))
def test_a_call(small: Front, param: str, bound: Bound) -> None:
    given: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
    with Client(small.serving.address) as client:
        for value in bound.good:
            assert client.complete(PROMPT, **{**given, **asked_by_call(bound, value)}, timeout=LIMIT_S).tokens
        for value in bound.bad:
            with pytest.raises(SpecwireError, match=rf"{param}\b") as raised:
                client.complete(PROMPT, **{**given, **asked_by_call(bound, value)}, timeout=LIMIT_S)
            assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT, value


def asked_by_call(bound: Bound, value: float) -> dict[str, Any]:
    asked = bound.asked(value)
    if isinstance(asked.get("logit_bias"), dict):
        asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
    return asked


def test_a_call_s_prompt_and_completions(small: Front) -> None:
    with Client(small.serving.address) as client:
        for count in (1, CONTEXT - 1):
            assert len(client.complete(ids(count), max_tokens=1, ignore_eos=True, timeout=LIMIT_S).tokens) == 1
        for count in (0, CONTEXT):
            with pytest.raises(SpecwireError, match="prompt: "):
                client.complete(ids(count), max_tokens=1, timeout=LIMIT_S)
        for count in (1, 64):
            assert len(client.complete_many(PROMPT, count, max_tokens=1, timeout=LIMIT_S)) == count
        with pytest.raises(SpecwireError, match="n: must be from"):
            client.complete_many(PROMPT, 65, max_tokens=1, timeout=LIMIT_S)


def test_a_score_as_long_as_the_context(small: Front) -> None:
    """Its last token is in the place of the one that a session would decide; it was refused."""
    body: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 0}
    told = [
        small.done(COMPLETIONS, prompt=ids(count), **body)["choices"][0]["logprobs"]["token_logprobs"]
        for count in (CONTEXT - 1, CONTEXT)
    ]
    assert [len(each) for each in told] == [CONTEXT - 1, CONTEXT]
    assert told[1][:-1] == told[0]
    events = small.events(COMPLETIONS, prompt=ids(CONTEXT), **body)
    streamed = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [value for part in streamed for value in part["token_logprobs"]] == told[1]
    with Client(small.serving.address) as client:
        for before in (1, CONTEXT - 1):
            [score] = client.score_text(ids(CONTEXT)[:before], [[ids(CONTEXT)[before:]]])
            assert list(score.parts[0].logprobs) == pytest.approx(told[1][before:], abs=1e-6)
        with pytest.raises(SpecwireError, match=f"continuations: .* maximum context length is {CONTEXT} tokens"):
            client.score_text(ids(1), [[ids(CONTEXT)]])


def test_as_many_as_fit(small: Front) -> None:
    """As llama.cpp's clients ask for it."""
    for path, given, name in (
        (COMPLETIONS, {"prompt": PROMPT}, "max_tokens"),
        (CHAT, {"messages": TALK}, "max_tokens"),
        (CHAT, {"messages": TALK}, "max_completion_tokens"),
    ):
        done = small.done(path, **given, ignore_eos=True, **{name: -1})
        assert done["usage"]["total_tokens"] == CONTEXT
        assert done["choices"][0]["finish_reason"] == "length"
    done = small.done("/v1/responses", input=TALK, ignore_eos=True, max_output_tokens=-1)
    assert (done["usage"]["total_tokens"], done["status"]) == (CONTEXT, "incomplete")
