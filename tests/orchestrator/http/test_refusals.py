"""What is wrong is refused with its status, its field and one sentence; nothing is ignored, nothing is our failure."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from orchestrator.tenants import Access
from specwire.client import Client, SpecwireError
from specwire.client.requests import RequestOptions
from specwire.core.messages import FinishReason
from specwire.rpc.keys import Keys
from tests.orchestrator.http.front import CHAT, COMPLETIONS, LIMIT_S, MODEL, Front, another
from tests.orchestrator.stack import PROMPT

IDS = list(PROMPT)
TALK = [{"role": "user", "content": "5"}]
ADA, BOB = "token-of-ada-long-enough", "token-of-bob-long-enough"


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
        ({"prompt": [5] * 4096}, "prompt"),
        ({"prompt": [[5]] * 65}, "prompt"),
        ({"prompt": [[5]] * 40, "n": 2}, "n"),
        ({"prompt": IDS, "n": 0}, "n"),
        ({"prompt": IDS, "n": 2, "best_of": 3}, "best_of"),
        ({"prompt": IDS, "request_id": "x" * 129}, "request_id"),
        ({"prompt": IDS, "max_tokens": 5000}, "max_tokens"),
        ({"prompt": IDS, "max_tokens": True}, "max_tokens"),
        ({"prompt": IDS, "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": IDS, "temperature": "hot"}, "temperature"),
        ({"prompt": IDS, "temperature": -1}, "temperature"),
        ({"prompt": IDS, "temperature": 10**40}, "temperature"),
        ({"prompt": IDS, "top_p": 0}, "top_p"),
        ({"prompt": IDS, "top_k": -2}, "top_k"),
        ({"prompt": IDS, "seed": 1 << 64}, "seed"),
        ({"prompt": IDS, "rule": "typical"}, "rule"),
        ({"prompt": IDS, "stop": [""]}, "stop"),
        ({"prompt": IDS, "stop": 5}, "stop"),
        ({"prompt": IDS, "stop_token_ids": [64]}, "stop_token_ids"),
        ({"prompt": IDS, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": IDS, "logit_bias": {"64": 1}}, "logit_bias"),
        ({"prompt": IDS, "logprobs": 21}, "logprobs"),
        ({"prompt": IDS, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": IDS, "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": IDS, "max_tokens": 0, "parent": "x"}, "max_tokens"),
        ({"prompt": IDS, "logprobs": 1, "echo": True, "parent": "x"}, "logprobs"),
        ({"prompt": IDS, "suffix": "end"}, "suffix"),
        ({"prompt": IDS, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": IDS, "stream": True, "stream_options": {"more": True}}, "stream_options.more"),
        ({"prompt": IDS, "provisional": True}, "provisional"),
        ({"prompt": IDS, "timeout": 0}, "timeout"),
        ({"prompt": IDS, "priority": 101}, "priority"),
        ({"prompt": IDS, "drafting": "maybe"}, "drafting"),
        ({"prompt": IDS, "prediction": "5 6"}, "prediction"),
        ({"prompt": IDS, "prediction": {"type": "content", "content": 5}}, "prediction"),
        ({"prompt": IDS, "prediction": {"type": "content", "content": "5 " * 4097}}, "prediction"),
        ({"prompt": IDS, "references": 5}, "references"),
        ({"prompt": IDS, "references": ["5", [5]]}, "references"),
        ({"prompt": IDS, "references": ["5", ""]}, "references[1]"),
        ({"prompt": IDS, "references": ["5"] * 65}, "references"),
        ({"prompt": [IDS] * 32, "n": 2, "references": ["5 " * (1 << 17)]}, "references"),
        ({"prompt": IDS, "store": "yes"}, "store"),
        ({"prompt": IDS, "metadata": "x"}, "metadata"),
        ({"prompt": IDS, "verbosity": 3}, "verbosity"),
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


def test_a_default_that_does_not_fit_is_lowered(door: Front) -> None:
    answer = door.done(COMPLETIONS, prompt=[5] * 4090, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 6
    with Client(door.serving.address) as client:
        wish = RequestOptions(max_tokens=128, ignore_eos=True)
        known = client.complete([5] * 4090, max_tokens=128, fit_context=True, ignore_eos=True, timeout=LIMIT_S)
        assert (len(known.tokens), known.finish_reason) == (6, FinishReason.LENGTH)
        with pytest.raises(SpecwireError, match="max_tokens: 128 do not fit, the prompt leaves room for 6: this model"):
            client.complete([5] * 4090, **wish, timeout=LIMIT_S)


def test_the_requests_timeout_passes(door: Front) -> None:
    wish: dict[str, Any] = {"prompt": IDS, "max_tokens": 4000, "ignore_eos": True, "timeout": 0.3}
    answer = door.post(COMPLETIONS, **wish)
    assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
    events = door.events_begun(COMPLETIONS, **wish)
    assert events[0]["choices"]
    assert events[-1]["error"]["code"] == "deadline_exceeded"


def test_keys_are_grpcs_and_limits_say_when_to_come_again(door: Front) -> None:
    access = Access(keys=Keys({ADA: "ada", BOB: "bob"}), tokens_per_minute=100)
    wish = {"model": MODEL, "prompt": IDS, "max_tokens": 90, "ignore_eos": True}
    with another(door, access) as locked:
        for headers in ({}, {"Authorization": "Bearer token-of-nobody-here"}, {"Authorization": ADA}):
            answer = locked.client.post(COMPLETIONS, json=wish, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert locked.client.get("/metrics", headers=headers).status_code == 401
        assert locked.client.get("/health").status_code == locked.client.get("/ready").status_code == 200
        ada, bob = ({"Authorization": f"Bearer {token}"} for token in (ADA, BOB))
        assert locked.client.post(COMPLETIONS, json=wish, headers=ada).status_code == 200
        answer = locked.client.post(COMPLETIONS, json=wish, headers=ada)
        assert (answer.status_code, error_of(answer)["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) > 0
        assert locked.client.post(COMPLETIONS, json=wish, headers=bob).status_code == 200


def test_a_request_id_is_not_taken_for_another_request(door: Front) -> None:
    asked = {"prompt": list(PROMPT), "max_tokens": 3, "request_id": "one"}
    done = door.done(COMPLETIONS, **asked)
    assert door.done(COMPLETIONS, **asked)["choices"] == done["choices"]
    refused = door.post(COMPLETIONS, **{**asked, "max_tokens": 4})
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "already_exists")
    assert error["message"].startswith("request_id: 'one' stands for another request")
