"""What a body may make of itself as JSON: a small multiple of its size, and no pause for anybody else."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from orchestrator.admission import LONG_BYTES, MOST_DEPTH, Admission
from orchestrator.chat.fields import SHOWN, shown
from orchestrator.http import bodies
from orchestrator.http.bodies import HOOKS, parse, parsed
from orchestrator.options import HttpAccess
from specwire.core.invalid import MOST_PARTS, InvalidParameter
from tests.orchestrator.http.front import COMPLETIONS, LIMIT_S, MODEL, Front, another
from tests.orchestrator.stack import PROMPT

SIZE = 1 << 20
# Each takes, as Python's values, many times the bytes that it is written in.
HOSTILE = {
    "lists": b"[" + b"[]," * (SIZE // 3) + b"[]]",
    "objects": b"[" + b"{}," * (SIZE // 3) + b"{}]",
    "strings": b"[" + b'"ab",' * (SIZE // 5) + b'""]',
    "keys": b"{" + b",".join(b'"%x":0' % number for number in range(SIZE // 10)) + b"}",
    "behind a string": b'["\\\\\\"[[[\\\\",' + b"[]," * (SIZE // 3) + b"[]]",
}
LARGE = {
    "ids": b"[" + b"5," * (SIZE // 2) + b"5]",
    "larger ids": b"[" + b"151936," * (SIZE // 7) + b"5]",
    "numbers": b"[" + b"1.5," * (SIZE // 4) + b"5]",
    "text": b'"' + b"{[so it goes]}, " * (SIZE // 16) + b'"',
    "escapes": b'"' + b"\\u00e9" * (SIZE // 6) + b'"',
    "quotes": b'"' + b'\\"' * (SIZE // 2) + b'"',
    "backslashes": b'"' + b"\\\\" * (SIZE // 2) + b'"',
    "wide": b'"' + b"a" * SIZE + "\U0001f600".encode() + b'"',
}
# Body, its text and its values. A list of numbers takes ten times what they are written in; a wide text four times.
MOST_TIMES = 16


@pytest.mark.parametrize("value", [*HOSTILE.values(), *LARGE.values()], ids=[*HOSTILE, *LARGE])
def test_memory_is_a_small_multiple_of_the_body(value: bytes) -> None:
    body = b'{"x": %s}' % value
    tracemalloc.start()
    try:
        with suppress(InvalidParameter):
            parsed(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_TIMES * len(body)


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_what_would_take_much_more_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidParameter, match=f"^body: has more than {MOST_PARTS} strings, lists and objects$"):
        parsed(b'{"x": %s}' % value)


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_what_a_prompt_may_be_is_not(value: bytes) -> None:
    assert parsed(b'{"x": %s}' % value, *HOOKS)["x"] == json.loads(value)


@pytest.mark.parametrize("hooks", [(), HOOKS])
def test_values_are_jsons(hooks: Any) -> None:
    told = {"a": [1, -2, 10**30, 1.5, 1e-300, True, None, {"b": 'x"\\[{'}], "é": "\U0001f600"}
    for ascii_only in (True, False):
        assert parsed(json.dumps(told, ensure_ascii=ascii_only).encode(), *hooks) == told


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_ends_before_the_stack_does(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"

    def nested(depth: int) -> bytes:
        return b'{"x":' + opening * (depth - 1) + b"0" + closing * (depth - 1) + b"}"

    assert parsed(nested(MOST_DEPTH))
    for depth in (MOST_DEPTH + 1, 30_000):
        with pytest.raises(InvalidParameter, match="^body: is nested too deeply"):
            parsed(nested(depth))


def test_what_is_wrong_is_shown_in_part() -> None:
    for value in ([[5] * 10**6] * 10, "x" * 10**7, {str(number): 0 for number in range(10**5)}, 10**4000):
        assert len(shown(value)) <= SHOWN
    assert shown([1, "x", None]) == "[1, 'x', None]"


async def test_the_loop_goes_on_while_a_large_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing waits here for something that only the loop can do."""
    admission, loop, told = Admission(lambda tenant, tokens: None), asyncio.get_running_loop(), asyncio.Event()

    def waiting(body: bytes, *hooks: Any) -> dict[str, Any]:
        asyncio.run_coroutine_threadsafe(told.wait(), loop).result(LIMIT_S)
        return parsed(body, *hooks)

    monkeypatch.setattr(bodies, "parsed", waiting)
    body = b'{"x": %s}' % LARGE["ids"]
    both = [asyncio.create_task(parse(admission, body, tenant)) for tenant in ("ada", "bob")]
    await asyncio.sleep(0)
    told.set()
    assert all(len(found["x"]) > 1000 for found in await asyncio.gather(*both))
    admission.stop()


def test_a_prompt_that_cannot_fit_is_not_copied(door: Front) -> None:
    """For each of the request's completions, that is: 64 times a body of megabytes."""
    context = door.client.get("/v1/models").json()["data"][0]["max_model_len"]
    with another(door, http_access=HttpAccess(body=16 << 20)) as large:
        for prompt in ([5] * 2_000_000, "5 " * 2_000_000):
            answer = large.post(COMPLETIONS, prompt=prompt, n=64)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "prompt"
            assert f"maximum context length is {context} tokens" in error["message"]


def test_large_bodies_are_served(door: Front) -> None:
    """Beyond what is parsed at once: with spaces, which clients may send."""
    wish = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 2}
    answer = door.client.post(COMPLETIONS, content=json.dumps(wish).encode().ljust(LONG_BYTES + 1))
    assert answer.json()["usage"]["completion_tokens"] == 2
