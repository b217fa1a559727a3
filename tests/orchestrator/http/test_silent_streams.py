"""Streams that are silent in every place, read by the official client, by the standard's letter, and by the console.

A comment keeps a silent stream alive. No blank line follows it: some clients take each blank line for an event once an
`id` has come (openai's SSEDecoder), or always (openai-go).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

import orchestrator.http.page
from orchestrator.http.openai.answers import COMMENT, EventStream
from tests.orchestrator.http.front import CHAT, COMPLETIONS, LIMIT_S, MODEL, Front, another, front, parsed, text_of
from tests.orchestrator.stack import PROMPT, TARGET, plain
from tests.wait import asked_blocking, eventually

# Silent for longer than the keep-alive before its first token and between tokens.
SLEEPY = f"{TARGET}:delay_ms=30"
LENGTH = 4
WORDS = " ".join(map(str, PROMPT))
TEXT = " ".join(map(str, plain(TARGET, PROMPT, LENGTH)))
COMMON: dict[str, Any] = {"model": MODEL, "max_tokens": LENGTH, "temperature": 0, "stream": True}
USAGE = {"include_usage": True}
PAGE = Path(orchestrator.http.page.__file__).parent


@pytest.fixture(scope="module")
def sleepy() -> Iterator[Front]:
    with front(SLEEPY) as slow, another(slow, sse_keep_alive=0.005) as running:
        yield running


def of(path: str, request_id: str = "") -> dict[str, Any]:
    asked: dict[str, Any] = {**COMMON, "ignore_eos": True, "stream_options": USAGE}
    asked |= {"messages": [{"role": "user", "content": WORDS}]} if path == CHAT else {"prompt": WORDS}
    return asked | ({"request_id": request_id} if request_id else {})


def dispatched(stream: str) -> list[str]:
    """The data of each event, by the standard (section 9.2.6); a blank line that dispatches nothing is a mistake."""
    data: list[str] = []
    told: list[str] = []
    *lines, cut = stream.split("\n")
    assert cut == ""
    for line in lines:
        name, _, value = line.partition(":")
        if not line:
            assert data, "a blank line behind no data"
            told.append("\n".join(data))
            data = []
        elif name == "data":
            data.append(value.removeprefix(" "))
        else:
            assert name in ("", "id", "event"), line
    assert data == []
    return told


def text_in(told: list[str]) -> str:
    choices = [choice for data in told if data != "[DONE]" for choice in json.loads(data)["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def silent_everywhere(stream: bytes) -> bytes:
    """With comments before every event, [DONE] too, and behind the last."""
    quiet = 2 * COMMENT
    return quiet + b"".join(each + b"\n\n" + quiet for each in stream.split(b"\n\n")[:-1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("request_id", ["", "by the standard"])
def test_by_the_letter_of_the_standard(sleepy: Front, path: str, request_id: str) -> None:
    asked = of(path, request_id and f"{request_id} {path}")
    stream = asked_blocking(lambda: sleepy.client.post(path, json=asked).text, lambda told: COMMENT.decode() in told)
    told = dispatched(stream)
    assert told[-1] == "[DONE]"
    assert text_in(told) == TEXT
    assert dispatched(silent_everywhere(stream.encode()).decode()) == told


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("request_id", ["", "by openai"])
def test_by_the_official_client(sleepy: Front, path: str, request_id: str) -> None:
    """From the socket, and with silences in the places where this model has none."""
    asked = of(path, request_id and f"{request_id} {path}")
    raw = sleepy.client.post(path, json=asked).content

    def silent(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=silent_everywhere(raw))

    assert text_by(openai.OpenAI(base_url=f"{sleepy.url}/v1", api_key="any", timeout=LIMIT_S), asked) == TEXT
    replayed = httpx.Client(transport=httpx.MockTransport(silent))
    assert text_by(openai.OpenAI(base_url="http://replayed/v1", api_key="any", http_client=replayed), asked) == TEXT


def text_by(client: openai.OpenAI, asked: dict[str, Any]) -> str:
    more = {name: asked[name] for name in ("ignore_eos", "request_id") if name in asked}
    known = {name: value for name, value in asked.items() if name not in more}
    with client:
        create = client.chat.completions.create if "messages" in asked else client.completions.create
        stream: Any = create(**known, extra_body=more)
        chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert chunks[-1].usage.completion_tokens == LENGTH
    return "".join((choice.delta.content if "messages" in asked else choice.text) or "" for choice in choices)


def test_responses(sleepy: Front) -> None:
    with openai.OpenAI(base_url=f"{sleepy.url}/v1", api_key="any", timeout=LIMIT_S) as client:
        asked: dict[str, Any] = {"model": MODEL, "input": WORDS, "max_output_tokens": LENGTH, "temperature": 0}
        told = list(client.responses.create(**asked, stream=True, extra_body={"ignore_eos": True}))
    assert told[-1].type == "response.incomplete"
    assert "".join(each.delta for each in told if each.type == "response.output_text.delta") == TEXT


FOLLOW = """
import { follow } from "./stream.js";
const [url, asked] = process.argv.slice(1);
const fetched = globalThis.fetch;
globalThis.fetch = (path, options) => fetched(url + path, options);
let text = "";
await follow(JSON.parse(asked), "", undefined, (told) => { text += told.text ?? ""; });
console.log(text);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_console(sleepy: Front, tmp_path: Path) -> None:
    """It took each comment for an event, and failed after the first silence."""
    asked = {"prompt": WORDS, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    raw = sleepy.client.post("/console/generate", json=asked).text
    assert COMMENT.decode() in raw
    (tmp_path / "stream.mjs").write_text((PAGE / "stream.js").read_text())
    command = ["node", "--input-type=module", "-e", FOLLOW.replace("./stream.js", f"{tmp_path}/stream.mjs")]
    done = subprocess.run([*command, sleepy.url, json.dumps(asked)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == TEXT


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_its_first_silence_is_before_its_first_token(sleepy: Front, path: str) -> None:
    """A loop that gets no time says nothing meanwhile."""

    def silent_at_first(told: str) -> bool:
        lines = [line for line in told.splitlines() if line]
        return lines.count(": nothing yet") > 3 and ": nothing yet" in lines[:2]

    told = asked_blocking(lambda: sleepy.client.post(path, json=of(path)).text, silent_at_first)
    assert text_of(parsed(told)) == TEXT


def test_what_fails_in_silence_is_an_event(sleepy: Front) -> None:
    events = sleepy.events_begun(COMPLETIONS, **{**of(COMPLETIONS), "max_tokens": 40, "timeout": 0.2})
    assert events[-1]["error"]["code"] == "deadline_exceeded"


def test_leaving_a_silent_stream_ends_its_session(sleepy: Front) -> None:
    with httpx.Client(base_url=sleepy.url, timeout=LIMIT_S) as client:
        wish = {**of(COMPLETIONS), "max_tokens": 4000}
        with client.stream("POST", COMPLETIONS, json=wish) as answer:
            assert ": nothing yet" in answer.iter_lines()
    running = sleepy.serving.orchestrator.sessions
    assert eventually(lambda: all(each.view.output.end is not None for each in list(running.values())))


async def test_what_ends_before_it_began_is_left_all_the_same() -> None:
    left: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b""

    async def leave() -> None:
        left.append(True)

    async def gone(_: object = None) -> Any:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await EventStream(events(), 1.0, leave)({}, gone, gone)
    assert left == [True]
