"""What a tenant may have is one share for both doors; beyond it each says when to come again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from orchestrator.tenants import Access
from specwire.client import Client, SpecwireError
from specwire.rpc.keys import Keys
from tests.orchestrator.http.front import COMPLETIONS, LIMIT_S, Front, another
from tests.orchestrator.stack import PROMPT
from tests.wait import eventually
from verify_service.engine import session_manager
from verify_service.engine.session_manager import SessionManager

ADA, BOB = "the-token-of-ada", "the-token-of-bob"
KEYS = Keys({ADA: "ada", BOB: "bob"})
SHORT: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": 3, "ignore_eos": True}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 4000, "stream": True}


def asked(door: Front, token: str, **wish: Any) -> httpx.Response:
    return door.client.post(COMPLETIONS, json=wish, headers={"Authorization": f"Bearer {token}"})


def told_to_wait(answer: httpx.Response, message: str) -> None:
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert message in error["message"]
    assert int(answer.headers["retry-after"]) >= 1


def refused(door: Front, token: str, max_tokens: int) -> SpecwireError:
    """What gRPC's Generate ends with."""
    with Client(door.serving.address, token=token, patience=0.0) as client, pytest.raises(SpecwireError) as error:
        client.complete(PROMPT, max_tokens=max_tokens, timeout=LIMIT_S)
    return error.value


@contextmanager
def running(door: Front, token: str) -> Iterator[None]:
    """A session that has begun, over HTTP."""
    headers = {"Authorization": f"Bearer {token}"}
    with door.client.stream("POST", COMPLETIONS, json=LONG, headers=headers) as answer:
        lines = answer.iter_lines()  # whoever forgets them leaves the stream
        next(lines)
        yield


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "as it comes"])
@pytest.mark.parametrize(("told_ms", "header"), [(2001, "3"), (0, "1")], ids=["by the verifier", "by nobody"])
def test_a_verifier_that_refuses_says_when_to_come_again(
    door: Front, told_ms: int, header: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole seconds, and not before it."""
    monkeypatch.setattr(session_manager, "RETRY_MS", told_ms)
    monkeypatch.setattr(SessionManager, "_beyond_limits", lambda *_: "this tenant has enough")
    answer = door.post(COMPLETIONS, **SHORT, **more)
    told_to_wait(answer, "this tenant has enough")
    assert answer.headers["retry-after"] == header


def test_tenants_that_use_one_request_id_share_no_noise(door: Front) -> None:
    with another(door, Access(KEYS)) as several:
        answers = [asked(several, token, **SHORT, request_id="1").json()["choices"][0] for token in (ADA, BOB, ADA)]
    seeds = [answer["specwire"]["seed"] for answer in answers]
    assert seeds[0] == seeds[2] != seeds[1]


def test_sessions_at_once(door: Front) -> None:
    message = "this tenant has 1 sessions running, of at most 1"
    with another(door, Access(KEYS, sessions=1)) as limited:
        with running(limited, ADA):
            for more in ({}, {"stream": True}, {"n": 2}):
                told_to_wait(asked(limited, ADA, **SHORT, **more), message)
            error = refused(limited, ADA, 3)
            assert (error.code, message in str(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            assert asked(limited, BOB, **SHORT).status_code == 200
        assert eventually(lambda: asked(limited, ADA, **SHORT).status_code == 200)
        with Client(limited.serving.address, token=ADA) as ada:
            events = ada.generate(PROMPT, max_tokens=4000, ignore_eos=True, timeout=LIMIT_S)
            next(events)
            told_to_wait(asked(limited, ADA, **SHORT), message)
            events.close()
        assert eventually(lambda: asked(limited, ADA, **SHORT).status_code == 200)


def test_of_several_completions_none_is_left_running_where_not_all_may_begin(door: Front) -> None:
    with another(door, Access(KEYS, sessions=2)) as limited:
        told_to_wait(asked(limited, ADA, **{**SHORT, "max_tokens": 4000}, n=3), "2 sessions running, of at most 2")
        assert eventually(lambda: asked(limited, ADA, **SHORT, n=2).status_code == 200)


def test_tokens_a_minute(door: Front) -> None:
    message = "this tenant's 100 tokens a minute are used up"
    with another(door, Access(KEYS, tokens_per_minute=100)) as limited:
        assert asked(limited, ADA, **{**SHORT, "max_tokens": 60}).status_code == 200
        told_to_wait(asked(limited, ADA, **{**SHORT, "max_tokens": 60}), message)
        error = refused(limited, ADA, 60)
        assert (error.code, message in str(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        with Client(limited.serving.address, token=BOB) as bob:
            bob.complete(PROMPT, max_tokens=60, ignore_eos=True, timeout=LIMIT_S)
        told_to_wait(asked(limited, BOB, **{**SHORT, "max_tokens": 60}), message)
        answer = asked(limited, BOB, **{**SHORT, "max_tokens": 98})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
