"""How long an answer may get where a request does not say, and where it says too much: --max-tokens-default, -limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from orchestrator.options import OutputLengths
from specwire.client import Client, SpecwireError
from specwire.core.messages import FinishReason
from tests.orchestrator.http.front import CHAT, COMPLETIONS, LIMIT_S, Front, another, front
from tests.orchestrator.stack import TARGET

CONTEXT = 64
PROMPT = [5, 6, 7]
TALK = [{"role": "user", "content": "5 6 7"}]
DEFAULT, LIMIT = 7, 20
RESPONSES = "/v1/responses"
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT},
    CHAT: {"messages": TALK},
    RESPONSES: {"input": TALK},
}
NAMES = [
    (COMPLETIONS, "max_tokens"),
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (RESPONSES, "max_output_tokens"),
]


@pytest.fixture(scope="module")
def open_door() -> Iterator[Front]:
    with front(TARGET, context=CONTEXT) as running:
        yield running


@pytest.fixture(scope="module")
def limited(open_door: Front) -> Iterator[Front]:
    with another(open_door, lengths=OutputLengths(DEFAULT, LIMIT)) as running:
        yield running


def length(door: Front, path: str, **more: Any) -> int:
    """Of an answer that was cut, which must say so."""
    answer = door.done(path, **{"ignore_eos": True, **ASKED[path], **more})
    if path == RESPONSES:
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        return int(answer["usage"]["output_tokens"])
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    return int(answer["usage"]["completion_tokens"])


def test_what_says_nothing_gets_the_default(open_door: Front, limited: Front) -> None:
    limit, default = OutputLengths(limit=LIMIT), OutputLengths(default=CONTEXT + 1)
    with another(open_door, lengths=limit) as by_limit, another(open_door, lengths=default) as by_default:
        for path, without in ((COMPLETIONS, 16), (CHAT, CONTEXT - 3), (RESPONSES, CONTEXT - 3)):
            assert length(open_door, path) == without
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


def test_a_call(limited: Front) -> None:
    with Client(limited.serving.address) as client:
        given: dict[str, Any] = {"ignore_eos": True, "timeout": LIMIT_S}
        for asked, fits, wanted in (
            (0, False, DEFAULT),
            (0, True, DEFAULT),
            (LIMIT, False, LIMIT),
            (LIMIT + 1, True, LIMIT),
            (1000, True, LIMIT),
        ):
            done = client.complete(PROMPT, max_tokens=asked, fit_context=fits, **given)
            assert (len(done.tokens), done.finish_reason) == (wanted, FinishReason.LENGTH)
        chat = client.chat([{"role": "user", "content": "5 6 7"}], **given)
        assert (len(chat.tokens), chat.finish_reason) == (DEFAULT, FinishReason.LENGTH)
        with pytest.raises(SpecwireError, match=f"max_tokens: {LIMIT + 1} are more than {LIMIT}") as raised:
            client.complete(PROMPT, max_tokens=LIMIT + 1, **given)
        assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_little_room(limited: Front) -> None:
    """The context cuts before both, and what is only scored generates nothing."""
    prompt = [5] * (CONTEXT - 2)
    assert length(limited, COMPLETIONS, prompt=prompt) == 2
    assert length(limited, COMPLETIONS, prompt=prompt, max_tokens=-1) == 2
    told = limited.post(COMPLETIONS, prompt=prompt, max_tokens=LIMIT).json()["error"]
    assert told["code"] == "context_length_exceeded"
    with another(limited, lengths=OutputLengths(1, 1)) as door:
        scored = door.done(COMPLETIONS, prompt=[5] * CONTEXT, max_tokens=0, echo=True, logprobs=1)
        assert len(scored["choices"][0]["logprobs"]["tokens"]) == CONTEXT
