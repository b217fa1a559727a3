"""Streams: cut, resumed here and elsewhere, silent, not read; clients that leave, and a front door that closes."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

import orchestrator.http
from orchestrator import server
from orchestrator.api.requests import keyed_seed
from orchestrator.http.openai.answers import COMMENT, EventStream, Stage, StreamPlace, places_of
from orchestrator.options import OrchestratorOptions
from orchestrator.session.output import Output
from specwire.client import Client
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import DRAWN_SEED_BITS
from specwire.core.messages import FinishReason
from tests.orchestrator.http.front import (
    CHAT,
    COMPLETIONS,
    LIMIT_S,
    MODEL,
    SAYS,
    WORDS,
    Front,
    another,
    front,
    parsed,
    text_of,
)
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import ALL, DRAFT, PROMPT, SLOW_TARGET, TARGET, Stack, held, plain, stack
from tests.wait import asked_blocking, eventually, raised, until

LENGTH = 10
BASE: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True, "stream": True, "temperature": 0}
ASKED = {**BASE, "prompt": list(PROMPT)}
TALK = {**BASE, "messages": [SAYS]}
DRAWN = {"temperature": 0.9, "seed": 5}
USAGE = {"stream_options": {"include_usage": True}}
TOKENS = plain(TARGET, PROMPT, LENGTH)
TEXT = " ".join(map(str, TOKENS))
# May begin behind the text's last token, so that token's text is withheld until the end.
WITHHELD = [f"{TOKENS[-1]} never"]


@dataclass
class Event:
    """One event of a stream; `place` is its id."""

    place: str | None
    data: str


@dataclass
class Seen:
    """What one choice brought."""

    text: str = ""
    reasons: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def events(answer: HTTPResponse) -> Iterator[Event]:
    place = None
    while line := answer.readline():
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            place = value
        if name == "data":
            yield Event(place, value)


def read(url: str, path: str, wish: dict[str, Any], after: str | None = None, most: int = 1 << 30) -> list[Event]:
    """The first `most` events of a stream that begins `after` an id; then the connection is cut."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    headers = {} if after is None else {"Last-Event-ID": after}
    with closing(HTTPConnection(host, int(port), timeout=LIMIT_S)) as line:
        line.request("POST", path, json.dumps(wish), headers)
        answer = line.getresponse()
        assert answer.status == 200, answer.read()
        return [event for event, _ in zip(events(answer), range(most), strict=False)]


def gathered(told: list[Event]) -> tuple[dict[int, Seen], list[object]]:
    """Each choice, and the usages. Both must have come as often as they are there."""
    seen: dict[int, Seen] = {}
    usages: list[object] = []
    for event in told:
        if event.data == "[DONE]":
            continue
        data = json.loads(event.data)
        assert "error" not in data, data
        usages += [data["usage"]["completion_tokens"]] if data.get("usage") else []
        for choice in data["choices"]:
            take(seen.setdefault(choice["index"], Seen()), choice)
    return seen, usages


def take(seen: Seen, choice: dict[str, Any]) -> None:
    seen.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    seen.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    seen.tokens += choice.get("specwire", {}).get("tokens", [])
    told = choice["logprobs"] or {}
    seen.offsets += told.get("text_offset", [])
    seen.logprobs += told.get("content", told.get("token_logprobs", []))


WISHES = {
    "echo, withheld": (COMPLETIONS, {**ASKED, **USAGE, "echo": True, "stop": WITHHELD, "details": True}),
    "logprobs, withheld": (COMPLETIONS, {**ASKED, **USAGE, "logprobs": 2, "stop": WITHHELD}),
    "two, stopped": (COMPLETIONS, {**ASKED, **DRAWN, **USAGE, "n": 2, "logprobs": 0, "stop": [" 3"]}),
    "two prompts": (COMPLETIONS, {**ASKED, "prompt": [list(PROMPT), "8 9"], "echo": True}),
    "chat, stopped": (CHAT, {**TALK, **USAGE, "logprobs": True, "top_logprobs": 1, "stop": [f" {TOKENS[6]}"]}),
    "two chats": (CHAT, {**TALK, **DRAWN, "n": 2, "logprobs": True, "stop": WITHHELD}),
}


def test_who_comes_back_is_told_the_same_usage_so_far(door: Front) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    asked = COMPLETIONS, {**ASKED, **options, "request_id": "usage so far"}
    whole = read(door.url, *asked)
    for cut in (1, 4, len(whole) - 2):
        opening, *rest = read(door.url, *asked, after=whole[cut - 1].place)
        assert told_usage(opening) == told_usage(whole[cut - 1])
        assert [told_usage(each) for each in rest[-2:-1]] == [told_usage(whole[-2])]


def told_usage(event: Event) -> tuple[int, int]:
    usage = json.loads(event.data)["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("name", WISHES)
def test_a_cut_after_any_event_costs_nothing_and_repeats_nothing(door: Front, name: str) -> None:
    path, wish = WISHES[name]
    whole = read(door.url, path, {**wish, "request_id": name})
    wanted = gathered(whole)
    assert all(seen.text for seen in wanted[0].values())
    assert all(event.place for event in whole[:-1])
    cut, most = 0, len(whole)
    while cut < most:
        named = {**wish, "request_id": f"{name} {cut}"}
        begun = read(door.url, path, named, most=cut)
        rest = read(door.url, path, named, begun[-1].place if begun else None)
        assert rest[-1].data == "[DONE]"
        assert gathered([*begun, *rest]) == wanted, f"cut behind {cut} of {most} events"
        most = max(most, len(begun) + len(rest) - 1)
        cut += 1


def test_what_is_compared_is_the_target_s(door: Front) -> None:
    path, wish = WISHES["logprobs, withheld"]
    (seen,) = gathered(read(door.url, path, wish))[0].values()
    starts = [len(" ".join(map(str, TOKENS[:index]))) for index in range(LENGTH)]
    assert (seen.text, seen.offsets) == (TEXT, starts)


def test_a_place_beyond_the_end_of_what_goes_on(door: Front) -> None:
    """An id that says that the reader knows the end, where there is more: DATA_LOSS, never a silent splice."""
    wish = {**ASKED, "max_tokens": 60, "request_id": "beyond"}
    # More than one: a text that nobody reads any more may still take some.
    with held(5):
        first = read(door.url, COMPLETIONS, wish, most=2)[1]
    assert first.place is not None
    told = read(door.url, COMPLETIONS, wish, f"{first.place[:-1]}{Stage.ENDED.value}")
    assert json.loads(told[-2].data)["error"]["code"] == "data_loss"


def test_ids_are_read_as_they_are_written() -> None:
    for place in (StreamPlace(3, 7), StreamPlace(12, 1 << 63, 40, Stage.OPENED), StreamPlace(12, 0, 40, Stage.COUNTED)):
        assert places_of(str(place), 1) == [place]
    assert places_of(",3-0000000000000007-0-1,", 3) == [None, StreamPlace(3, 7), None]
    for text, sessions in (
        ("3-7", 1),
        ("3-0000000000000007", 1),
        ("4294967296-0000000000000007-0-1", 1),
        ("3-0000000000000007-0-9", 1),
        ("", 2),
        (",", 1),
        ("3-0000000000000007-1", 1),
    ):
        with pytest.raises(InvalidParameter, match="Last-Event-ID"):
            places_of(text, sessions)


# ----------------------------------------------------------------------------------------------------------------------
# Clients that leave, come back or do not read; a front door that closes.

LONG: dict[str, Any] = {**ASKED, "max_tokens": 4000}


@contextmanager
def streaming(door: Front, wish: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The lines of a stream that begins; it is left at the end."""
    with door.client.stream("POST", COMPLETIONS, json=wish) as answer:
        assert answer.status_code == 200
        yield answer.iter_lines()


def ended(door: Front, session_id: str) -> FinishReason | None:
    with Client(door.serving.address) as client:
        return client.get_session(session_id).finish_reason


def test_leaving_a_stream_cancels_at_once(door: Front) -> None:
    with streaming(door, LONG) as lines:
        first = json.loads(next(lines).removeprefix("data: "))
    session_id = first["choices"][0]["specwire"]["session_id"]
    assert eventually(lambda: ended(door, session_id) is FinishReason.CANCELLED)


def test_leaving_before_the_answer_cancels_at_once(door: Front) -> None:
    """Not a stream: nothing has been answered yet when the client goes."""

    def left() -> set[str]:
        """The session that was begun, if it was in time."""
        known = set(door.serving.orchestrator.sessions)
        with httpx.Client(base_url=door.url, timeout=0.3) as raw, suppress(httpx.TimeoutException):
            raw.post(COMPLETIONS, json={**LONG, "stream": False})
        return set(door.serving.orchestrator.sessions) - known

    (session_id,) = asked_blocking(left, bool)
    assert eventually(lambda: ended(door, session_id) is FinishReason.CANCELLED)


def test_a_place_that_is_none_of_the_stream(door: Front) -> None:
    wish = {**LONG, "max_tokens": 5, "request_id": "placed"}
    door.events(COMPLETIONS, **wish)
    for place, status in (("5", 400), ("4-0000000000000000-0-1", 500), ("9999-0000000000000000-0-1", 500)):
        answer = door.client.post(COMPLETIONS, json=wish, headers={"Last-Event-ID": place})
        assert answer.status_code == status, answer.text
    del wish["request_id"]
    answer = door.client.post(COMPLETIONS, json=wish, headers={"Last-Event-ID": "4-0000000000000000-0-1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


@contextmanager
def not_reading(door: Front) -> Iterator[Output]:
    """A client that asks and never reads, when its session stands still for that; the session's output."""
    body = json.dumps({**LONG, "details": True}).encode()
    host, port = door.url.removeprefix("http://").split(":")
    sessions = door.serving.orchestrator.sessions
    known = set(sessions)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((host, int(port)))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body)
        assert eventually(lambda: bool(set(sessions) - known))
        (session_id,) = set(sessions) - known
        output = sessions[session_id].view.output

        def stands() -> bool:
            before = len(output.tokens)
            time.sleep(0.5)
            return len(output.tokens) == before > 0

        assert eventually(stands)
        yield output


def test_a_client_that_does_not_read_keeps_no_door_open(door: Front, caplog: pytest.LogCaptureFixture) -> None:
    before = door.loop.run(_tasks())
    with another(door) as closing, not_reading(closing):
        closing.loop.run(closing.serving.stop(0.0))
        assert closing.loop.run(_tasks()) <= before
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_front_door_that_closes_says_so_and_lets_streams_end(door: Front) -> None:
    before = door.loop.run(_tasks())
    with another(door) as closing:
        wish = {**LONG, "max_tokens": 40}
        with held(5) as let_go, streaming(closing, wish) as lines:
            next(lines)
            stopping = closing.loop.soon(closing.serving.stop(LIMIT_S))
            with httpx.Client(base_url=closing.url, timeout=LIMIT_S) as other:
                assert eventually(lambda: other.get("/ready").status_code == 503)
                refused = other.post(COMPLETIONS, json=wish)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            let_go(ALL)
            told = "".join(lines)
        assert told.endswith("data: [DONE]")
        assert '"finish_reason":"length"' in told
        stopping.result(LIMIT_S)
        assert eventually(lambda: closing.loop.run(_tasks()) <= before)


async def _tasks() -> set[asyncio.Task[Any]]:
    """Which tasks of front doors run: those of an earlier test's clients may be about to end."""
    names = ("_respond", "_disconnected", "run_asgi", "serve")
    running = [(task, getattr(task.get_coro(), "__qualname__", "")) for task in asyncio.all_tasks()]
    return {task for task, name in running if name.rpartition(".")[2] in names}


# ----------------------------------------------------------------------------------------------------------------------
# Streams that are silent in every place, read by the official client, by the standard's letter, and by the console.
#
# A comment keeps a silent stream alive. No blank line follows it: some clients take each blank line for an event once
# an `id` has come (openai's SSEDecoder), or always (openai-go).

# Silent for longer than the keep-alive before its first token and between tokens.
SLEEPY = f"{TARGET}:delay_ms=30"
SLOW_LENGTH = 4
SLOW_TEXT = " ".join(map(str, plain(TARGET, PROMPT, SLOW_LENGTH)))
COMMON: dict[str, Any] = {"model": MODEL, "max_tokens": SLOW_LENGTH, "temperature": 0, "stream": True}
WITH_USAGE = {"include_usage": True}
PAGE = Path(orchestrator.http.__file__).parent / "page"


@pytest.fixture(scope="module")
def sleepy() -> Iterator[Front]:
    with front(SLEEPY) as slow, another(slow, sse_keep_alive=0.005) as running:
        yield running


def of(path: str, request_id: str = "") -> dict[str, Any]:
    asked: dict[str, Any] = {**COMMON, "ignore_eos": True, "stream_options": WITH_USAGE}
    asked |= {"messages": [SAYS]} if path == CHAT else {"prompt": WORDS}
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


def silent_everywhere(stream: bytes) -> bytes:
    """With comments before every event, [DONE] too, and behind the last."""
    quiet = 2 * COMMENT
    return quiet + b"".join(each + b"\n\n" + quiet for each in stream.split(b"\n\n")[:-1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("request_id", ["", "silent"])
def test_by_the_letter_of_the_standard_and_by_the_official_client(sleepy: Front, path: str, request_id: str) -> None:
    """From the socket, and with silences in the places where this model has none."""
    asked = of(path, request_id and f"{request_id} {path}")
    stream = asked_blocking(lambda: sleepy.client.post(path, json=asked).text, lambda told: COMMENT.decode() in told)
    told, replay = dispatched(stream), silent_everywhere(stream.encode())
    assert told[-1] == "[DONE]"
    assert text_of([json.loads(data) for data in told[:-1]]) == SLOW_TEXT
    assert dispatched(replay.decode()) == told

    def silent(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=replay)

    assert text_by(openai.OpenAI(base_url=f"{sleepy.url}/v1", api_key="any", timeout=LIMIT_S), asked) == SLOW_TEXT
    replayed = httpx.Client(transport=httpx.MockTransport(silent))
    client = openai.OpenAI(base_url="http://replayed/v1", api_key="any", http_client=replayed)
    assert text_by(client, asked) == SLOW_TEXT


def text_by(client: openai.OpenAI, asked: dict[str, Any]) -> str:
    more = {name: asked[name] for name in ("ignore_eos", "request_id") if name in asked}
    known = {name: value for name, value in asked.items() if name not in more}
    with client:
        create = client.chat.completions.create if "messages" in asked else client.completions.create
        stream: Any = create(**known, extra_body=more)
        chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert chunks[-1].usage.completion_tokens == SLOW_LENGTH
    return "".join((choice.delta.content if "messages" in asked else choice.text) or "" for choice in choices)


def test_responses(sleepy: Front) -> None:
    with openai.OpenAI(base_url=f"{sleepy.url}/v1", api_key="any", timeout=LIMIT_S) as client:
        asked: dict[str, Any] = {"model": MODEL, "input": WORDS, "max_output_tokens": SLOW_LENGTH, "temperature": 0}
        told = list(client.responses.create(**asked, stream=True, extra_body={"ignore_eos": True}))
    assert told[-1].type == "response.incomplete"
    assert "".join(each.delta for each in told if each.type == "response.output_text.delta") == SLOW_TEXT


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
    asked = {"prompt": WORDS, "max_tokens": SLOW_LENGTH, "temperature": 0, "ignore_eos": True}
    raw = sleepy.client.post("/console/generate", json=asked).text
    assert COMMENT.decode() in raw
    (tmp_path / "stream.mjs").write_text((PAGE / "stream.js").read_text())
    command = ["node", "--input-type=module", "-e", FOLLOW.replace("./stream.js", f"{tmp_path}/stream.mjs")]
    done = subprocess.run([*command, sleepy.url, json.dumps(asked)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SLOW_TEXT


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_its_first_silence_is_before_its_first_token(sleepy: Front, path: str) -> None:
    """A loop that gets no time says nothing meanwhile."""

    def silent_at_first(told: str) -> bool:
        lines = [line for line in told.splitlines() if line]
        return lines.count(": nothing yet") > 3 and ": nothing yet" in lines[:2]

    told = asked_blocking(lambda: sleepy.client.post(path, json=of(path)).text, silent_at_first)
    assert text_of(parsed(told)) == SLOW_TEXT


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

    await raised(ConnectionResetError, EventStream(events(), 1.0, leave)({}, gone, gone))
    assert left == [True]


# ----------------------------------------------------------------------------------------------------------------------
# A stream that is resumed at another orchestrator with the same log.

WISH: dict[str, Any] = {**ASKED, "max_tokens": 80, "request_id": "moved"}
MOVED = " ".join(map(str, plain(TARGET, PROMPT, 80)))


@asynccontextmanager
async def two(target: str, *drafts: str) -> AsyncIterator[tuple[Stack, server.RunningOrchestrator, httpx.AsyncClient]]:
    """A stack, another orchestrator of its log, and a client of that one."""
    with RedisServer() as redis:
        async with stack(target, *drafts, redis_url=redis.url, http="127.0.0.1:0") as parts:
            options = OrchestratorOptions((parts.verifier.address,), redis_url=redis.url, http="127.0.0.1:0")
            other = await server.start(options)
            try:
                async with httpx.AsyncClient(base_url=str(other.http), timeout=LIMIT_S) as client:
                    yield parts, other, client
            finally:
                await other.stop(0.0)


async def begin(parts: Stack) -> tuple[str, str]:
    """The text of the first few events, and the last one's id."""
    told = await asyncio.to_thread(read, str(parts.orchestrator.http), COMPLETIONS, WISH, None, 3)
    return text_of([json.loads(event.data) for event in told]), str(told[-1].place)


async def test_who_has_lost_its_connection_may_have_the_session_driven_elsewhere() -> None:
    """Also before its first event, where there is no place in the stream that it could name."""
    async with two(SLOW_TARGET) as (parts, other, client):
        with held(30):
            await begin(parts)
            taking = asyncio.create_task(client.post(COMPLETIONS, json={**WISH, "take_over": True}))
            await until(lambda: other.orchestrator.tally.claims)
        for answer in (await taking, await client.post(COMPLETIONS, json=WISH)):
            assert text_of(parsed(answer.text)) == MOVED
        assert other.orchestrator.tally.claims == 1


async def test_one_request_id_has_one_seed_at_all_orchestrators_of_a_log() -> None:
    """Also where its session is gone: nothing of the first text is left then but the seed's secret."""
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "request_id": "drawn"}
    async with two(TARGET) as (parts, _, client):

        async def done(url: str = "") -> dict[str, Any]:
            answer = await client.post(url + COMPLETIONS, json={"prompt": list(PROMPT), **drawn})
            assert answer.status_code == 200, answer.text
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        first, joined = await done(str(parts.orchestrator.http)), await done()
        session_id = first["specwire"]["session_id"]
        await parts.client.delete_session(session_id)
        later = await done()
        await parts.client.delete_session(later["specwire"]["session_id"])
        called = await parts.client.complete(PROMPT, **drawn)
    assert joined["specwire"]["session_id"] == session_id != later["specwire"]["session_id"]
    assert {first["text"], joined["text"], later["text"]} == {called.text}
    assert {each["specwire"]["seed"] for each in (first, joined, later)} == {called.seed}


def test_a_drawn_seed_is_of_secret_tenant_request_and_prompt() -> None:
    asked = [(b"1", "a", "1", 0), (b"2", "a", "1", 0), (b"1", "", "a1", 0), (b"1", "a", "", 10), (b"1", "a", "1", 1)]
    assert len({keyed_seed(*each) for each in asked}) == len(asked)
    assert all(0 <= keyed_seed(*each) < 1 << DRAWN_SEED_BITS for each in asked)


def test_with_a_request_id_a_stream_goes_on_and_is_resumed_where_it_was(door: Front) -> None:
    wish = {**LONG, "max_tokens": 60, "request_id": "resumed"}
    with held(5):
        told = read(door.url, COMPLETIONS, wish, most=2)
    events = [json.loads(event.data) for event in told]
    begun = text_of(events)
    session_id = events[0]["choices"][0]["specwire"]["session_id"]
    rest = door.events(COMPLETIONS, headers={"Last-Event-ID": str(told[-1].place)}, **wish)
    assert rest[0]["choices"][0]["specwire"]["session_id"] == session_id
    assert begun + text_of(rest) == " ".join(map(str, plain(TARGET, PROMPT, 60)))
    assert begun
    assert text_of(rest)
    assert ended(door, session_id) is FinishReason.LENGTH
    again = {name: value for name, value in wish.items() if name not in ("stream", "request_id")}
    answer = door.client.post(COMPLETIONS, json=again, headers={"X-Specwire-Request-Id": "resumed"}).json()
    assert answer["choices"][0]["specwire"]["session_id"] == session_id
    assert answer["choices"][0]["text"] == begun + text_of(rest)


async def test_a_stream_goes_on_where_its_orchestrator_left_it() -> None:
    async with two(SLOW_TARGET, DRAFT) as (parts, _, client):
        begun, place = await begin(parts)
        await parts.orchestrator.stop(0.0)
        rest = await client.post(COMPLETIONS, json=WISH, headers={"Last-Event-ID": place})
    assert begun
    assert begun + text_of(parsed(rest.text)) == MOVED
