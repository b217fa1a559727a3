"""A whole stack with an HTTP front door, on an event loop of its own: tests call it as other processes do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2 as httpx
import openai

from orchestrator import server
from orchestrator.options import UNLIMITED, OrchestratorOptions, OutputLengths
from orchestrator.tenants import Access
from tests.orchestrator.stack import PROMPT, Stack, stack
from tests.wait import asked_blocking

T = TypeVar("T")

LIMIT_S = 120.0
# What messages say, and that the model is to answer: enough to tell a template from none.
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}"
# It writes calls as Hermes and Qwen have them.
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
MODEL = "scripted:7"
EVERYBODY = Access()
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
# The prompt of most tests, as ids, as a text and as a message.
IDS = list(PROMPT)
WORDS = " ".join(map(str, PROMPT))
SAYS: Any = {"role": "user", "content": WORDS}


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.soon(coroutine).result(LIMIT_S)

    def soon(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()


@dataclass
class Front:
    """`url`: of the front door. `client`: an HTTP client for it."""

    loop: Loop
    parts: Stack
    serving: server.RunningOrchestrator
    client: httpx.Client

    @property
    def url(self) -> str:
        assert self.serving.http is not None
        return self.serving.http

    @property
    def model(self) -> str:
        """Its name."""
        return str(self.client.get("/v1/models").json()["data"][0]["id"])

    @property
    def fingerprint(self) -> str:
        """Of the target that is served, as answers name it."""
        return f"fp_{self.serving.orchestrator.pool.target_named('').identity.digest[:12]}"

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.client.post(path, json=body)

    def done(self, path: str, **body: object) -> dict[str, Any]:
        """The answer of a request that must succeed."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def events(self, path: str, headers: dict[str, str] | None = None, **body: object) -> list[dict[str, Any]]:
        """What a stream that must succeed brings; it must end with [DONE]."""
        answer = self.client.post(path, json={"stream": True, **body}, headers=headers)
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        return parsed(answer.text)

    def events_begun(self, path: str, **body: object) -> list[dict[str, Any]]:
        """As `events`, of a stream whose time may be over before it begins: then it is asked for again."""

        def told() -> list[dict[str, Any]]:
            answer = self.client.post(path, json={"stream": True, **body})
            assert answer.status_code in (200, 504), answer.text
            return parsed(answer.text) if answer.status_code == 200 else []

        return asked_blocking(told, bool)


def parsed(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@contextmanager
def front(target: str, *drafts: str, context: int | None = None) -> Iterator[Front]:
    loop = Loop()
    try:
        entered = loop.run(_enter(target, *drafts, context=context))
        parts, stack_of = entered
        try:
            serving = parts.orchestrator
            assert serving.http is not None
            with httpx.Client(base_url=serving.http, timeout=LIMIT_S) as client:
                yield Front(loop, parts, serving, client)
        finally:
            loop.run(stack_of.aclose())
    finally:
        loop.end()


async def _enter(target: str, *drafts: str, context: int | None) -> tuple[Stack, AsyncExitStack]:
    """With a fixed plan: on a busy machine a verifier may find that drafting does not pay."""
    entered = AsyncExitStack()
    more: dict[str, Any] = {"http": "127.0.0.1:0", "chat_template": TEMPLATE, "context": context}
    wanted = stack(target, *drafts, plan="stream:2,16", **more)
    parts = await entered.enter_async_context(wanted)
    return parts, entered


def client_of(door: Front, key: str = "any") -> openai.OpenAI:
    """The official client, which repeats nothing."""
    return openai.OpenAI(base_url=f"{door.url}/v1", api_key=key, timeout=LIMIT_S, max_retries=0)


@contextmanager
def another(
    known: Front, access: Access = EVERYBODY, verify: Any = True, lengths: OutputLengths = UNLIMITED, **more: Any
) -> Iterator[Front]:
    """A second orchestrator before the same verifier. more: of its options."""
    more = {"max_tokens_default": lengths.default, "max_tokens_limit": lengths.limit, **more}
    more = {"http": "127.0.0.1:0", "chat_template": TEMPLATE, "access": access, **more}
    options = OrchestratorOptions((known.parts.verifier.address,), **more)
    serving = known.loop.run(server.start(options))
    try:
        assert serving.http is not None
        with httpx.Client(base_url=serving.http, timeout=LIMIT_S, verify=verify) as client:
            yield Front(known.loop, known.parts, serving, client)
    finally:
        known.loop.run(serving.stop(0.0))
