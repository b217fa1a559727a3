"""The official client, unmodified: blocking, asyncio, streams, errors."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.orchestrator.http.front import LIMIT_S, MODEL, Front
from tests.orchestrator.stack import PROMPT, TARGET, plain

WORDS = " ".join(map(str, PROMPT))
GREEDY = {"ignore_eos": True}
WHOLE = " ".join(map(str, plain(TARGET, PROMPT, 20)))


def client_of(door: Front, max_retries: int = 2) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{door.url}/v1", api_key="any", timeout=LIMIT_S, max_retries=max_retries)


def test_blocking(door: Front) -> None:
    with client_of(door) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).object == "model"
        done = client.completions.create(model=MODEL, prompt=WORDS, max_tokens=20, temperature=0, extra_body=GREEDY)
        assert done.choices[0].text == WHOLE
        assert done.choices[0].finish_reason == "length"
        chat = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": WORDS}],
            max_completion_tokens=20,
            temperature=0,
            n=2,
            logprobs=True,
            top_logprobs=2,
            prediction={"type": "content", "content": WHOLE},
            extra_body=GREEDY,
        )
    assert [choice.message.content for choice in chat.choices] == [WHOLE, WHOLE]
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert [entry.token for entry in chat.choices[0].logprobs.content] == WHOLE.split()
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (3, 40)
    assert chat.system_fingerprint == done.system_fingerprint == door.fingerprint
    assert chat.usage.completion_tokens_details is not None
    assert (chat.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 0


def test_a_full_context_is_known_by_its_code(door: Front) -> None:
    with client_of(door) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "5 " * 5000}], service_tier="flex", store=True
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "maximum context length" in str(caught.value)
    assert (caught.value.request_id or "").startswith("req_")


def test_blocking_streams(door: Front) -> None:
    with client_of(door) as client:
        texts, usage = [], None
        for chunk in client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": WORDS}],
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=GREEDY,
        ):
            usage = chunk.usage or usage
            assert chunk.system_fingerprint == door.fingerprint
            texts += [choice.delta.content or "" for choice in chunk.choices]
        assert ("".join(texts), usage and usage.completion_tokens) == (WHOLE, 20)
        wish = {**GREEDY, "stop": f" {WHOLE.split()[9]}"}
        with client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": WORDS}], max_tokens=20, temperature=0, extra_body=wish
        ) as stream:
            gathered = stream.get_final_completion().choices[0]
        assert (gathered.message.content, gathered.finish_reason) == (" ".join(WHOLE.split()[:9]), "stop")


async def test_asyncio(door: Front) -> None:
    """Many at once, of which one is given up."""
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="any", timeout=LIMIT_S) as client:

        async def text(prompt: tuple[int, ...]) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=list(prompt), max_tokens=10, temperature=0, stream=True, extra_body=GREEDY
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        prompts = [(n, n + 1) for n in range(2, 8)]
        given_up = await client.completions.create(model=MODEL, prompt=WORDS, max_tokens=4000, stream=True)
        await anext(aiter(given_up))
        texts = await asyncio.gather(*map(text, prompts))
        await given_up.close()
    assert texts == [" ".join(map(str, plain(TARGET, prompt, 10))) for prompt in prompts]


def test_its_errors(door: Front) -> None:
    with client_of(door, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-9", prompt=WORDS)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(model=MODEL, prompt=WORDS, top_p=2.0)
        assert wrong.value.param == "top_p"
        with pytest.raises(openai.APIError) as late:
            list(
                client.completions.create(
                    model=MODEL, prompt=WORDS, max_tokens=4000, stream=True, extra_body={**GREEDY, "timeout": 0.3}
                )
            )
        assert late.value.code == "deadline_exceeded"


def test_a_raw_stream_is_named_by_its_request_id(door: Front) -> None:
    """The extension fields come through the client's own models."""
    with client_of(door) as client:
        stream = client.completions.create(
            model=MODEL, prompt=WORDS, max_tokens=4, stream=True, extra_body={**GREEDY, "request_id": "by-openai"}
        )
        first = next(iter(stream))
        stream.close()
        again = client.completions.create(
            model=MODEL, prompt=WORDS, max_tokens=4, extra_body={**GREEDY, "request_id": "by-openai"}
        )
    sessions = [(choice.model_extra or {})["specwire"]["session_id"] for choice in (*first.choices, *again.choices)]
    assert sessions[0] == sessions[1]
