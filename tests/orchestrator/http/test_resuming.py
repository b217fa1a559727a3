"""Streams that are cut after every event in turn: with what came before, the rest is what an uncut one brings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from orchestrator.http.openai.answers import Stage, StreamPlace, parse
from specwire.core.invalid import InvalidParameter
from tests.orchestrator.http.front import CHAT, COMPLETIONS, LIMIT_S, Front
from tests.orchestrator.stack import PROMPT, TARGET, held, plain

LENGTH = 10
BASE: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True, "stream": True, "temperature": 0}
ASKED = {**BASE, "prompt": list(PROMPT)}
TALK = {**BASE, "messages": [{"role": "user", "content": "5 6 7"}]}
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


def read(door: Front, path: str, wish: dict[str, Any], after: str | None = None, most: int = 1 << 30) -> list[Event]:
    """The first `most` events of a stream that begins `after` an id; then the connection is cut."""
    host, _, port = door.url.removeprefix("http://").rpartition(":")
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
    whole = read(door, *asked)
    for cut in (1, 4, len(whole) - 2):
        opening, *rest = read(door, *asked, after=whole[cut - 1].place)
        assert told_usage(opening) == told_usage(whole[cut - 1])
        assert [told_usage(each) for each in rest[-2:-1]] == [told_usage(whole[-2])]


def told_usage(event: Event) -> tuple[int, int]:
    usage = json.loads(event.data)["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("name", WISHES)
def test_a_cut_after_any_event_costs_nothing_and_repeats_nothing(door: Front, name: str) -> None:
    path, wish = WISHES[name]
    whole = read(door, path, {**wish, "request_id": name})
    wanted = gathered(whole)
    assert all(seen.text for seen in wanted[0].values())
    assert all(event.place for event in whole[:-1])
    cut, most = 0, len(whole)
    while cut < most:
        named = {**wish, "request_id": f"{name} {cut}"}
        begun = read(door, path, named, most=cut)
        rest = read(door, path, named, begun[-1].place if begun else None)
        assert rest[-1].data == "[DONE]"
        assert gathered([*begun, *rest]) == wanted, f"cut behind {cut} of {most} events"
        most = max(most, len(begun) + len(rest) - 1)
        cut += 1


def test_what_is_compared_is_the_target_s(door: Front) -> None:
    path, wish = WISHES["logprobs, withheld"]
    (seen,) = gathered(read(door, path, wish))[0].values()
    starts = [len(" ".join(map(str, TOKENS[:index]))) for index in range(LENGTH)]
    assert (seen.text, seen.offsets) == (TEXT, starts)


def test_one_event_at_a_time(door: Front) -> None:
    """A reader that is cut after each event of what is left has the same in the end."""
    path, wish = WISHES["logprobs, withheld"]
    named = {**wish, "request_id": "again and again"}
    told: list[Event] = []
    place = None
    for _ in range(100):
        opening, *rest = read(door, path, named, place, most=2)
        told += [opening, *rest] if place is None else rest
        if told[-1].data == "[DONE]":
            break
        place = told[-1].place
    assert gathered(told) == gathered(read(door, path, wish))


def test_two_orders_of_one_id_draw_one_seed(door: Front) -> None:
    """The sessions of a repeated request share a seed, also those that its first call did not get to."""
    wish = {**ASKED, "temperature": 0.9, "n": 2, "request_id": "drawn"}
    told = [json.loads(event.data) for event in read(door, COMPLETIONS, wish)[:-1]]
    openings = [
        choice["specwire"] for event in told for choice in event["choices"] if "seed" in choice.get("specwire", {})
    ]
    assert len(openings) == 2
    assert len({opening["session_id"] for opening in openings}) == 2
    assert len({opening["seed"] for opening in openings}) == 1


def test_a_place_beyond_the_end_of_what_goes_on(door: Front) -> None:
    """An id that says that the reader knows the end, where there is more: DATA_LOSS, never a silent splice."""
    wish = {**ASKED, "max_tokens": 60, "request_id": "beyond"}
    # More than one: a text that nobody reads any more may still take some.
    with held(5):
        first = read(door, COMPLETIONS, wish, most=2)[1]
    assert first.place is not None
    told = read(door, COMPLETIONS, wish, f"{first.place[:-1]}{Stage.ENDED.value}")
    assert json.loads(told[-2].data)["error"]["code"] == "data_loss"


def test_ids_are_read_as_they_are_written() -> None:
    for place in (StreamPlace(3, 7), StreamPlace(12, 1 << 63, 40, Stage.OPENED), StreamPlace(12, 0, 40, Stage.COUNTED)):
        assert parse(str(place), 1) == [place]
    assert parse(",3-0000000000000007-0-1,", 3) == [None, StreamPlace(3, 7), None]
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
            parse(text, sessions)
