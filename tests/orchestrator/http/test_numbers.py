"""Every number that a request may hold, at the ends of its type and beyond: an answer in JSON, or 400 and its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NoReturn

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.orchestrator.http.front import CHAT, COMPLETIONS, Front, front
from tests.orchestrator.stack import TARGET

# As they stand in JSON, which has no bounds of its own; the last few are none, or no number.
NUMBERS = [
    *("0", "-0.0", "1", "1.0", "-1", "0.5", "2", "2.5", "-2", "20", "21", "64", "65", "100", "100.5", "-100", "1000"),
    *("5e-324", "1e-310", "1.2e-38", "1e-9", "9e-5", "1e-4", "0.0099", "0.01", "1e38", "1e300", "1e308", "1e400"),
    *("-1e400", "2147483648", "4294967295", "4294967296", "9007199254740993", "9223372036854775808"),
    *("18446744073709551615", "18446744073709551616", "1" * 400, "1" * 5000, "NaN", "Infinity", "true", '"1"', "[1]"),
]
# A field as it stands in a body, and what an error may call it.
SHARED = {
    **{f'"{name}": {{}}': (name,) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **{f'"{name}": {{}}': (name,) for name in ("presence_penalty", "frequency_penalty", "seed", "n", "min_tokens")},
    **{f'"{name}": {{}}': (name,) for name in ("max_tokens", "priority", "timeout")},
    '"logit_bias": {{"7": {}}}': ("logit_bias", "logit_bias.7"),
    '"logit_bias": {{"{}": 1}}': ("logit_bias",),
    '"stop_token_ids": [{}]': ("stop_token_ids",),
    '"rule": "threshold({})"': ("rule",),
    '"rule": "typical({0},{0})"': ("rule",),
}
COMPLETION = {**SHARED, '"best_of": {}': ("best_of",), '"logprobs": {}': ("logprobs",), '"prompt": [{}]': ("prompt",)}
ANSWER = {
    **SHARED,
    '"max_completion_tokens": {}': ("max_tokens", "max_completion_tokens"),
    '"top_logprobs": {}': ("top_logprobs", "logprobs"),
}
PLAIN = {
    COMPLETIONS: '"prompt": "5 6 7", "max_tokens": 2, "logprobs": 3',
    CHAT: '"messages": [{"role": "user", "content": "5"}], "max_tokens": 2, "logprobs": true, "top_logprobs": 3',
}


@pytest.fixture(scope="module")
def quick() -> Iterator[Front]:
    with front(TARGET) as running:
        yield running


def no_number(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


def check(answer: httpx.Response, names: set[str], body: str) -> None:
    assert answer.status_code in ((200, 400, 504) if "timeout" in names else (200, 400)), (body, answer.text)
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        told = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        found = [json.loads(each, parse_constant=no_number) for each in told]
        codes = {each["error"]["code"] for each in found if "error" in each}
        assert codes <= ({"deadline_exceeded"} if "timeout" in names else set()), (body, answer.text)
        return
    found = json.loads(answer.text, parse_constant=no_number)
    if answer.status_code == 400:
        known = {"body"} if "no JSON" in found["error"]["message"] else names
        assert found["error"]["param"] in known, (body, answer.text)


def asked(door: Front, path: str, *fields: str, stream: bool) -> tuple[httpx.Response, str]:
    of = "processed" if stream else "model"
    body = ", ".join([PLAIN[path], f'"logprobs_of": "{of}", "stream": {str(stream).lower()}', *fields])
    return door.client.post(path, content="{" + body + "}"), body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "field", "names"),
    [
        pytest.param(path, field, names, id=f"{path.rpartition('/')[2]}-{field}")
        for path, fields in ((COMPLETIONS, COMPLETION), (CHAT, ANSWER))
        for field, names in fields.items()
    ],
)
def test_a_number(quick: Front, path: str, field: str, names: tuple[str, ...], stream: bool) -> None:
    for number in NUMBERS:
        if '"{}"' in field and '"' in number:
            continue
        answer, body = asked(quick, path, field.format(number), stream=stream)
        check(answer, {*names, "max_tokens"} if "min_tokens" in field else set(names), body)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from([*SHARED][:10]), st.sampled_from(NUMBERS[:33]), min_size=2, max_size=4),
    st.booleans(),
)
def test_numbers_together(quick: Front, numbers: dict[str, str], stream: bool) -> None:
    fields = [field.format(number) for field, number in numbers.items()]
    answer, body = asked(quick, COMPLETIONS, *fields, stream=stream)
    names = {name for field in numbers for name in SHARED[field]}
    check(answer, names | {"max_tokens", "min_tokens"}, body)
