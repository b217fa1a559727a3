"""Each field of a request through the doors: within its bounds an answer, beyond them a refusal by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import httpx2 as httpx
import pytest

from orchestrator.options import OutputLengths
from orchestrator.tenants import Access
from specwire.client import Client, SpecwireError
from specwire.core.messages import FinishReason
from specwire.rpc.keys import Keys
from tests.orchestrator.http.front import CHAT, COMPLETIONS, IDS, LIMIT_S, MODEL, RESPONSES, SAYS, Front, another, front

# ----------------------------------------------------------------------------------------------------------------------
# What is wrong is refused with its status, its field and one sentence; nothing is ignored, nothing is our failure.

TALK = [SAYS]
ADA = "token-of-ada-long-enough"


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": IDS, "unknown": 1}, "unknown"),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[5], "6", []]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5, 64]}, "prompt"),
        ({"prompt": IDS, "max_tokens": True}, "max_tokens"),
        ({"prompt": IDS, "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": IDS, "temperature": "hot"}, "temperature"),
        ({"prompt": IDS, "temperature": 10**40}, "temperature"),
        ({"prompt": IDS, "rule": "typical"}, "rule"),
        ({"prompt": IDS, "stop": 5}, "stop"),
        ({"prompt": IDS, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": IDS, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": IDS, "max_tokens": 0, "parent": "x"}, "max_tokens"),
        ({"prompt": IDS, "logprobs": 1, "echo": True, "parent": "x"}, "logprobs"),
        ({"prompt": IDS, "suffix": "end"}, "suffix"),
        ({"prompt": IDS, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": IDS, "stream": True, "stream_options": {"more": True}}, "stream_options.more"),
        ({"prompt": IDS, "provisional": True}, "provisional"),
        ({"prompt": IDS, "drafting": "maybe"}, "drafting"),
        ({"prompt": IDS, "prediction": "5 6"}, "prediction"),
        ({"prompt": IDS, "prediction": {"type": "content", "content": 5}}, "prediction"),
        ({"prompt": IDS, "references": 5}, "references"),
        ({"prompt": IDS, "references": ["5", [5]]}, "references"),
        ({"prompt": IDS, "references": ["5", ""]}, "references[1]"),
        ({"prompt": [IDS] * 32, "n": 2, "references": ["5 " * (1 << 17)]}, "references"),
        ({"prompt": IDS, "store": "yes"}, "store"),
        ({"prompt": IDS, "metadata": "x"}, "metadata"),
        ({"prompt": IDS, "verbosity": 3}, "verbosity"),
        ({"prompt": IDS, "specwire": {"sources": ["medusa"]}}, "specwire.sources"),
        ({"prompt": IDS, "specwire": {"sources": 3}}, "specwire.sources"),
        ({"prompt": IDS, "specwire": {"source": ["ngram"]}}, "specwire.source"),
        ({"prompt": IDS, "specwire": []}, "specwire"),
        ({"prompt": IDS, "specwire": {"sources": ["ngram"]}, "drafting": "off"}, "specwire.sources"),
    ],
)
def test_a_completions_field(door: Front, body: dict[str, object], param: str) -> None:
    answer = door.post(COMPLETIONS, **body)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"content": "5"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "foo", "content": "5"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": TALK, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": TALK, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": TALK, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"messages": TALK, "prompt": "5"}, "prompt"),
    ],
)
def test_a_chats_field(door: Front, body: dict[str, object], param: str) -> None:
    answer = door.post(CHAT, **body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"prompt": NaN}', b"\xff", b"[" * 100_000, b'{"x": "\xed\xa0\x80"}', rb'{"x": "\ud800"}'],
)
def test_what_is_no_json_object(door: Front, body: bytes) -> None:
    answer = door.client.post(COMPLETIONS, content=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "body")


def test_another_model_another_path_another_method(door: Front) -> None:
    answer = door.post(COMPLETIONS, model="gpt-9", prompt=IDS)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
    missing = error_of(door.client.get("/v2/completions"))
    assert (missing["code"], missing["message"]) == ("not_found", "GET /v2/completions: Not Found")
    answer = door.client.get(COMPLETIONS)
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert error_of(answer)["message"] == f"GET {COMPLETIONS}: Method Not Allowed"
    assert answer.headers["allow"] == "POST"


def test_a_model_without_a_template_cannot_chat(door: Front) -> None:
    with another(door, chat_template="") as bare:
        answer = bare.post(CHAT, messages=TALK)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "no_chat_template")
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}5"
    with another(door, chat_template=refusing) as strict:
        error = error_of(strict.post(CHAT, messages=[{"role": "system", "content": "5"}]))
        assert (error["param"], "users first" in error["message"]) == ("messages", True)


@pytest.mark.parametrize(
    ("path", "wish", "param"),
    [
        (COMPLETIONS, {"prompt": [5] * 4096}, "prompt"),
        (COMPLETIONS, {"prompt": "5 " * 40_000}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 4000, "max_tokens": 97}, "max_tokens"),
        (COMPLETIONS, {"prompt": [5] * 4096, "stream": True}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "5 " * 4096}]}, "messages"),
        (CHAT, {"messages": TALK, "max_completion_tokens": 4096}, "max_completion_tokens"),
        (CHAT, {"messages": TALK, "max_tokens": 4096}, "max_tokens"),
    ],
)
def test_a_full_context_is_told_as_clients_look_for_it(
    door: Front, path: str, wish: dict[str, Any], param: str
) -> None:
    """The code and these words are what litellm and langchain look for."""
    answer = door.post(path, **wish)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "this model's maximum context length is 4096 tokens" in error["message"]


def test_the_requests_timeout_passes(door: Front) -> None:
    wish: dict[str, Any] = {"prompt": IDS, "max_tokens": 4000, "ignore_eos": True, "timeout": 0.3}
    answer = door.post(COMPLETIONS, **wish)
    assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
    events = door.events_begun(COMPLETIONS, **wish)
    assert events[0]["choices"]
    assert events[-1]["error"]["code"] == "deadline_exceeded"


def test_keys_are_grpcs(door: Front) -> None:
    wish = {"model": MODEL, "prompt": IDS, "max_tokens": 3}
    with another(door, Access(keys=Keys({ADA: "ada"}))) as locked:
        for headers in ({}, {"Authorization": "Bearer token-of-nobody-here"}, {"Authorization": ADA}):
            answer = locked.client.post(COMPLETIONS, json=wish, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert locked.client.get("/metrics", headers=headers).status_code == 401
        assert locked.client.get("/health").status_code == locked.client.get("/ready").status_code == 200
        ada = {"Authorization": f"Bearer {ADA}"}
        assert locked.client.post(COMPLETIONS, json=wish, headers=ada).status_code == 200


def test_a_request_id_is_not_taken_for_another_request(door: Front) -> None:
    asked = {"prompt": IDS, "max_tokens": 3, "request_id": "one"}
    done = door.done(COMPLETIONS, **asked)
    assert door.done(COMPLETIONS, **asked)["choices"] == done["choices"]
    refused = door.post(COMPLETIONS, **{**asked, "max_tokens": 4})
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "already_exists")
    assert error["message"].startswith("request_id: 'one' stands for another request")


# ----------------------------------------------------------------------------------------------------------------------
# Each limit: nothing, one, exactly the limit, one more, which is refused by name.

CONTEXT, VOCABULARY = 64, 2048
ROOM = CONTEXT - len(IDS)
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


HTTP = [
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
    ("id of two", Bound(lambda n: {"request_id": "y" * n, "n": 2}, [1, 125, 126, 128], [129], "request_id")),
]
CHATS = [
    field("max_tokens", [-1, 1, CONTEXT - 3], [-2, 0, CONTEXT - 2]),
    field("max_completion_tokens", [-1, 1, CONTEXT - 3], [-2, 0, CONTEXT - 2]),
    field("top_logprobs", [0, 1, 20], [-1, 21], logprobs=True),
    field("top_logprobs", [0], [1], logprobs=False),
    field("n", [1, 64], [0, 65], max_tokens=1),
]


def named(bounds: Sequence[tuple[str, Bound]]) -> list[Any]:
    return [pytest.param(bound.param or name, bound, id=f"{name}-{at}") for at, (name, bound) in enumerate(bounds)]


def no_number(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


def check(door: Front, path: str, given: dict[str, Any], param: str, bound: Bound) -> None:
    for value in bound.good:
        answer = door.post(path, **{**given, **bound.asked(value)})
        assert answer.status_code == 200, (value, answer.text)
        assert json.loads(answer.text, parse_constant=no_number)
    for value in bound.bad:
        answer = door.post(path, **{**given, **bound.asked(value)})
        assert (answer.status_code, answer.json()["error"].get("param")) == (400, param), (value, answer.text)


@pytest.mark.parametrize(("param", "bound"), named(HTTP))
def test_a_completion(small: Front, param: str, bound: Bound) -> None:
    check(small, COMPLETIONS, {"prompt": IDS, "max_tokens": 2, "ignore_eos": True, "logprobs": 3}, param, bound)


@pytest.mark.parametrize(("param", "bound"), named(CHATS))
def test_a_chat(small: Front, param: str, bound: Bound) -> None:
    check(small, CHAT, {"messages": TALK, "ignore_eos": True}, param, bound)


def test_a_response(small: Front) -> None:
    bound = Bound(lambda n: {"max_output_tokens": n}, [-1, 1, CONTEXT - 3], [-2, 0, CONTEXT - 2])
    check(small, RESPONSES, {"input": TALK, "ignore_eos": True}, "max_output_tokens", bound)


def test_a_header_s_request_id(small: Front) -> None:
    for length, status in ((1, 200), (128, 200), (129, 400)):
        header = {"X-Specwire-Request-Id": "z" * length}
        answer = small.client.post(COMPLETIONS, json={"prompt": IDS, "max_tokens": 1}, headers=header)
        assert answer.status_code == status, answer.text


def test_tokens_made_text(small: Front) -> None:
    check(small, "/detokenize", {}, "tokens", Bound(lambda n: {"tokens": ids(n)}, [0, 1, CONTEXT], [CONTEXT + 1]))


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


# ----------------------------------------------------------------------------------------------------------------------
# How long an answer may get where a request does not say, and where it says too much: --max-tokens-default, -limit.

DEFAULT, LIMIT = 7, 20
ASKED: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": IDS}, CHAT: {"messages": TALK}, RESPONSES: {"input": TALK}}
NAMES = [
    (COMPLETIONS, "max_tokens"),
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (RESPONSES, "max_output_tokens"),
]


@pytest.fixture(scope="module")
def limited(small: Front) -> Iterator[Front]:
    with another(small, lengths=OutputLengths(DEFAULT, LIMIT)) as running:
        yield running


def length(door: Front, path: str, **more: Any) -> int:
    """Of an answer that was cut, which must say so."""
    answer = door.done(path, **{"ignore_eos": True, **ASKED[path], **more})
    if path == RESPONSES:
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        return int(answer["usage"]["output_tokens"])
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    return int(answer["usage"]["completion_tokens"])


def test_as_many_as_fit(small: Front) -> None:
    """As llama.cpp's clients ask for it."""
    for path, name in NAMES:
        assert length(small, path, **{name: -1}) == CONTEXT - 3


def test_what_says_nothing_gets_the_default(small: Front, limited: Front) -> None:
    limit, default = OutputLengths(limit=LIMIT), OutputLengths(default=CONTEXT + 1)
    with another(small, lengths=limit) as by_limit, another(small, lengths=default) as by_default:
        for path, without in ((COMPLETIONS, 16), (CHAT, CONTEXT - 3), (RESPONSES, CONTEXT - 3)):
            assert length(small, path) == without
            assert length(limited, path) == DEFAULT
            assert length(by_limit, path) == min(without, LIMIT)
            assert length(by_default, path) == CONTEXT - 3
    for path in (COMPLETIONS, CHAT):
        events = limited.events(path, **ASKED[path], ignore_eos=True, stream_options={"include_usage": True})
        assert [each["finish_reason"] for event in events for each in event["choices"]][-1] == "length"
        assert events[-1]["usage"]["completion_tokens"] == DEFAULT


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_what_says_more_than_the_limit_is_refused(limited: Front, path: str, name: str) -> None:
    for asked in (1, DEFAULT + 1, LIMIT):
        assert length(limited, path, **{name: asked}) == asked
    assert length(limited, path, **{name: -1}) == LIMIT
    for asked in (LIMIT + 1, CONTEXT - 3, CONTEXT + 1):
        for stream in (False, True):
            answer = limited.post(path, **ASKED[path], stream=stream, **{name: asked})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, name, "invalid_value")
            assert f"{asked} are more than {LIMIT}, which this service allows" in error["message"]


def test_the_length_of_a_call(limited: Front) -> None:
    with Client(limited.serving.address) as client:
        given: dict[str, Any] = {"ignore_eos": True, "timeout": LIMIT_S}
        for asked, fits, wanted in (
            (0, False, DEFAULT),
            (0, True, DEFAULT),
            (LIMIT, False, LIMIT),
            (LIMIT + 1, True, LIMIT),
            (1000, True, LIMIT),
        ):
            done = client.complete(IDS, max_tokens=asked, fit_context=fits, **given)
            assert (len(done.tokens), done.finish_reason) == (wanted, FinishReason.LENGTH)
        chat = client.chat([{"role": "user", "content": "5 6 7"}], **given)
        assert (len(chat.tokens), chat.finish_reason) == (DEFAULT, FinishReason.LENGTH)
        with pytest.raises(SpecwireError, match=f"max_tokens: {LIMIT + 1} are more than {LIMIT}") as raised:
            client.complete(IDS, max_tokens=LIMIT + 1, **given)
        assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_little_room(limited: Front) -> None:
    """The context cuts before both, and what is only scored generates nothing."""
    prompt = [5] * (CONTEXT - 2)
    assert length(limited, COMPLETIONS, prompt=prompt) == 2
    assert length(limited, COMPLETIONS, prompt=prompt, max_tokens=-1) == 2
    told = limited.post(COMPLETIONS, prompt=prompt, max_tokens=LIMIT).json()["error"]
    assert told["code"] == "context_length_exceeded"
    with Client(limited.serving.address) as client:
        left = f"max_tokens: {LIMIT} do not fit, the prompt leaves room for 2: this model"
        with pytest.raises(SpecwireError, match=left):
            client.complete(prompt, max_tokens=LIMIT, timeout=LIMIT_S)
    with another(limited, lengths=OutputLengths(1, 1)) as door:
        scored = door.done(COMPLETIONS, prompt=[5] * CONTEXT, max_tokens=0, echo=True, logprobs=1)
        assert len(scored["choices"][0]["logprobs"]["tokens"]) == CONTEXT
