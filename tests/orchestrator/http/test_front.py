"""The HTTP front door end to end: over the same sessions as gRPC, so with the same texts; by the official client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from orchestrator.chat.models import ChatModels
from orchestrator.http import app
from orchestrator.http.app import routed
from orchestrator.http.endpoint import HttpService
from orchestrator.options import HttpAccess
from specwire.client import Client
from tests.orchestrator.http.front import (
    CHAT,
    COMPLETIONS,
    IDS,
    LIMIT_S,
    MODEL,
    SAYS,
    WORDS,
    Front,
    another,
    text_of,
)
from tests.orchestrator.stack import PROMPT, TARGET, plain
from tests.wait import asked_blocking

# What is asked for unless a test says otherwise: thirty tokens, greedily.
ASKED: dict[str, Any] = {"prompt": IDS, "max_tokens": 30, "temperature": 0, "ignore_eos": True}


def expected(prompt: tuple[int, ...] = PROMPT, length: int = 30) -> str:
    return " ".join(map(str, plain(TARGET, prompt, length)))


@pytest.mark.parametrize("prompt", [WORDS, IDS, [WORDS], [IDS]], ids=["text", "ids", "texts", "lists"])
def test_greedy_text_is_grpcs(door: Front, prompt: object) -> None:
    answer = door.done(COMPLETIONS, model=MODEL, **{**ASKED, "prompt": prompt})
    with Client(door.parts.orchestrator.address) as client:
        known = client.complete(PROMPT, max_tokens=30, ignore_eos=True, timeout=LIMIT_S)
    assert answer["choices"][0]["text"] == known.text == expected()
    assert (answer["object"], answer["choices"][0]["finish_reason"]) == ("text_completion", "length")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 30)


def test_every_option_is_grpcs(door: Front) -> None:
    """All at once, streamed and not, with a seed that was drawn and told.

    The names are the same but for stop ids, and JSON's keys, which are strings. Temperature is 1 unless told otherwise,
    as OpenAI's.
    """
    same: dict[str, Any] = {
        "max_tokens": 30,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.2,
        "min_tokens": 4,
        "ignore_eos": True,
        "logprobs": 2,
        "logprobs_of": "processed",
    }
    bias = {7: 2.5, 11: -100.0}
    spelt = {str(token): value for token, value in bias.items()}
    asked = {"prompt": IDS, "logit_bias": spelt, "stop_token_ids": [3], **same}
    found = door.done(COMPLETIONS, **asked)["choices"][0]
    seed = found["specwire"]["seed"]
    streamed = text_of(door.events(COMPLETIONS, **asked, seed=seed))
    with Client(door.parts.orchestrator.address) as client:
        known = client.complete(
            PROMPT, logit_bias=bias, stop_ids=[3], temperature=1.0, seed=seed, timeout=LIMIT_S, **same
        )
    assert (found["specwire"]["rule"], seed < 1 << 53) == ("coupled", True)
    assert found["text"] == streamed == known.text
    assert found["logprobs"]["tokens"] == known.text.split()


def test_nothing_ends_a_text_before_min_tokens(door: Front) -> None:
    """Neither a stop string, wherever it is completed, nor a stop id, streamed or not, over HTTP or gRPC."""
    words = expected().split()
    stop = f" {words[2]}"
    for least in (0, 2, 3, 4, 30):
        found = " ".join(words).find(stop, len(" ".join(words[:least])) - len(stop) + 1 if least else 0)
        wanted = " ".join(words)[:found] if found >= 0 else " ".join(words)
        choice = door.done(COMPLETIONS, **ASKED, stop=stop, min_tokens=least)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (wanted, "length" if wanted == expected() else "stop")
        assert text_of(door.events(COMPLETIONS, **ASKED, stop=stop, min_tokens=least)) == wanted
        with Client(door.parts.orchestrator.address) as client:
            known = client.complete(PROMPT, max_tokens=30, ignore_eos=True, stop=[stop], min_tokens=least)
        assert known.text == wanted
        of_ids = door.done(COMPLETIONS, **ASKED, stop_token_ids=[int(words[2])], min_tokens=least)
        count = of_ids["usage"]["completion_tokens"]
        assert count > least if count < 30 else words[2] not in of_ids["choices"][0]["text"].split()[:least]


def test_several_prompts_with_several_choices_each(door: Front) -> None:
    more = {"prompt": [[2, 3], [4, 5]], "n": 2, "max_tokens": 12, "temperature": 0.8, "seed": 5}
    wish: dict[str, Any] = {**ASKED, **more}
    answer = door.done(COMPLETIONS, **wish)
    events = door.events(COMPLETIONS, **wish)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [text_of(events, index) for index in range(4)]
    assert len(set(texts)) == 4
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 48


def test_equal_prompts_of_a_request_with_an_id_have_noise_of_their_own(door: Front) -> None:
    """Choices of one prompt share a seed, which together with n replays them; prompts do not."""
    wish: dict[str, Any] = {"prompt": [IDS] * 4, "n": 2, "max_tokens": 20, "ignore_eos": True, "request_id": "four"}
    choices = door.done(COMPLETIONS, **wish)["choices"]
    seeds = [choice["specwire"]["seed"] for choice in choices]
    assert len({choice["text"] for choice in choices}) == 8
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == 4
    again = door.done(COMPLETIONS, **wish)["choices"]
    assert [choice["text"] for choice in again] == [choice["text"] for choice in choices]
    alone = door.done(COMPLETIONS, **{**wish, "prompt": IDS, "seed": seeds[4], "request_id": None})["choices"]
    assert [choice["text"] for choice in alone] == [choice["text"] for choice in choices[4:6]]


def test_a_chat_is_its_template(door: Front) -> None:
    messages = [{"role": "system", "content": "5"}, {"role": "user", "content": [{"type": "text", "text": "6 7"}]}]
    wish: dict[str, Any] = {"messages": messages, "max_completion_tokens": 30, "temperature": 0, "ignore_eos": True}
    answer = door.done(CHAT, model=MODEL, **wish)
    message: dict[str, Any] = {"role": "assistant", "content": expected(), "refusal": None, "annotations": []}
    assert answer["choices"][0]["message"] == message
    assert (answer["object"], answer["system_fingerprint"]) == ("chat.completion", door.fingerprint)
    events = door.events(CHAT, **wish, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == expected()
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 30)
    assert {event["usage"] for event in events[:-1]} == {None}  # as OpenAI's, so that nobody misses the key
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert {event["system_fingerprint"] for event in events} == {door.fingerprint}


@pytest.mark.parametrize(("path", "asked"), [(COMPLETIONS, {"prompt": [IDS, WORDS]}), (CHAT, {"messages": [SAYS]})])
@pytest.mark.parametrize("include", [True, False])
def test_usage_so_far(door: Front, path: str, asked: dict[str, Any], include: bool) -> None:
    """`continuous_usage_stats`, as vLLM has it: of the whole request, and only where the usage is asked for at all."""
    options = {"include_usage": include, "continuous_usage_stats": True, "include_obfuscation": True}
    events = door.events(path, **asked, n=2, max_tokens=9, ignore_eos=True, stream_options=options)
    if not include:
        assert not any("usage" in event for event in events)
        return
    *parts, last = (event["usage"] for event in events)
    counted = [each["completion_tokens"] for each in parts]
    assert counted == sorted(counted)
    assert (counted[0], len(set(counted)) > 2) == (0, True)
    assert parts[-1] == {name: last[name] for name in parts[-1]}
    assert all(each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"] for each in parts)


@pytest.mark.parametrize(("path", "asked"), [(COMPLETIONS, {"prompt": WORDS}), (CHAT, {"messages": [SAYS]})])
def test_what_clients_send_for_other_services_changes_nothing(door: Front, path: str, asked: dict[str, Any]) -> None:
    known = {
        "user": "ada",
        "safety_identifier": "ada",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit", "ttl": "30m", "prewarm": False},
        "metadata": {"topic": "x"},
        "store": True,
        "service_tier": "flex",
        "reasoning_effort": "low",
        "verbosity": "low",
    }
    wish: dict[str, Any] = {**asked, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    plain, more = door.done(path, **wish)["choices"][0], door.done(path, **wish, **known)["choices"][0]
    assert (more.get("text"), more.get("message")) == (plain.get("text"), plain.get("message"))


def test_a_template_may_know_the_reasoning_effort(door: Front) -> None:
    with another(door, chat_template="{{ {'low': '5', 'high': '6'}[reasoning_effort] }} 7") as thinking:
        assert thinking.done("/tokenize", messages=[SAYS], reasoning_effort="high")["tokens"] == [6, 7]
        assert thinking.done("/tokenize", messages=[SAYS], reasoning_effort="low")["tokens"] == [5, 7]
        newer = {"reasoning": {"effort": "high", "summary": "auto"}}
        assert thinking.done("/tokenize", messages=[SAYS], **newer)["tokens"] == [6, 7]
        refused = thinking.post("/tokenize", messages=[SAYS], reasoning_effort="low", **newer)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_effort")
        assert "contradicts reasoning.effort, 'high'" in refused.text


def test_a_stop_string_ends_it_and_echo_begins_it(door: Front) -> None:
    whole = expected()
    stop = " ".join(whole.split()[10:12])
    wish: dict[str, Any] = {**ASKED, "prompt": WORDS, "stop": stop, "echo": True}
    answer = door.done(COMPLETIONS, **wish)["choices"][0]
    assert answer["text"] == WORDS + whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"
    events = door.events(COMPLETIONS, **wish)
    assert text_of(events) == answer["text"]


def test_logprobs(door: Front) -> None:
    wish: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    found = door.done(COMPLETIONS, prompt=IDS, logprobs=3, **wish)["choices"][0]
    told = found["logprobs"]
    assert told["tokens"] == found["text"].split()
    pairs = list(zip(told["top_logprobs"], told["tokens"], strict=True))
    assert all(len(top) == 3 and max(top, key=top.get) == token for top, token in pairs)
    assert [top[token] for top, token in pairs] == told["token_logprobs"]
    begins = told["text_offset"]
    assert begins[0] == 0
    assert [found["text"][a:b].strip() for a, b in zip(begins, [*begins[1:], None], strict=True)] == told["tokens"]
    events = door.events(CHAT, messages=[SAYS], logprobs=True, top_logprobs=1, **wish)
    reports = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    entries = [entry for report in reports for entry in report["content"]]
    assert [entry["token"] for entry in entries] == told["tokens"]
    assert [entry["logprob"] for entry in entries] == told["token_logprobs"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("echo", [False, True])
def test_the_token_itself_is_always_among_the_most_probable(door: Front, count: int, echo: bool) -> None:
    """Up to one more than were asked for, as OpenAI says of completions."""
    asked = {"prompt": IDS, "logprobs": count, "echo": echo, "temperature": 2.0, "max_tokens": 12, "ignore_eos": True}
    told = door.done(COMPLETIONS, **asked)["choices"][0]["logprobs"]
    begin = 1 if echo else 0  # nothing stands before the first token
    tops, tokens = told["top_logprobs"][begin:], told["tokens"][begin:]
    assert [top[token] for top, token in zip(tops, tokens, strict=True)] == told["token_logprobs"][begin:]
    assert {len(top) for top in tops} <= {max(1, count), count + 1}
    assert count == 0 or any(max(top, key=top.get) != token for top, token in zip(tops, tokens, strict=True))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_predictions_and_references_save_forwards_and_change_nothing(door: Front, path: str) -> None:
    """References are longer than the context; the answer is quoted from the second one."""
    whole = expected(length=60)
    wrong = " ".join(["1", *whole.split()[1:30], "2", *whole.split()[31:]])
    wish: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "drafting": "ngram"}
    wish |= {"prompt": IDS} if path == COMPLETIONS else {"messages": [SAYS]}

    def told(**more: object) -> tuple[int, int, int]:
        """Forwards, tokens of what was brought along that were accepted, and refused."""
        answer = door.done(path, **wish, **more)
        (choice,), usage = answer["choices"], answer["usage"]
        assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == whole
        counted = usage["speculative_decoding"]["sources"]["prediction"]
        refused = counted["proposed"] - counted["accepted"]
        if more:
            details = usage["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == counted["accepted"]
            assert details["rejected_prediction_tokens"] == refused
        return choice["specwire"]["stats"]["target_forwards"], counted["accepted"], refused

    def predicted(content: object) -> dict[str, object]:
        return {"prediction": {"type": "content", "content": content}}

    parts = [{"type": "text", "text": text} for text in ("8 8 9 9 ", whole)]
    referring: dict[str, object] = {"references": ["8 9 " * 5000, whole]}
    asked = [{}, predicted(whole), predicted(wrong), predicted(parts), referring]

    def saves_more(seen: list[tuple[int, int, int]]) -> bool:
        """How wide windows are is measured, and on a busy machine not in every text the same."""
        (alone, *_), (right, most, _), (partly, fewer, refused), (quoted, *_), (referred, some, _) = seen
        return right < partly < alone > max(quoted, referred) and most > fewer and refused > 0 and some > 20

    seen = asked_blocking(lambda: [told(**each) for each in asked], saves_more)
    assert (seen[0][1:], seen[1][2]) == ((0, 0), 0)


def test_details(door: Front) -> None:
    def details_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [choice["specwire"] for event in events for choice in event["choices"] if "specwire" in choice]

    def drafted(events: list[dict[str, Any]]) -> bool:
        return bool(details_of(events)[-1]["stats"]["accepted"])

    events = asked_blocking(lambda: door.events(COMPLETIONS, **ASKED, details=True), drafted)
    more = details_of(events)
    assert [token for each in more for token in each.get("tokens", [])] == plain(TARGET, PROMPT, 30)
    outcomes = [outcome for each in more for outcome in each.get("outcomes", [])]
    assert outcomes.count("accepted") == more[-1]["stats"]["accepted"]
    assert text_of(events) == expected()


def test_small_endpoints(door: Front) -> None:
    get = door.client.get
    assert get("/health").json() == {"status": "ok"}
    assert get("/ready").json() == {"ready": True, "reason": None}
    assert set(get("/version").json()) == {"version"}
    (model,) = get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 4096)
    assert get(f"/v1/models/{MODEL}").json() == model
    tokens = door.done("/tokenize", prompt=WORDS, return_token_strs=True)
    assert tokens == {"count": 3, "max_model_len": 4096, "tokens": IDS, "token_strs": ["5", "6", "7"]}
    assert door.done("/tokenize", messages=[SAYS])["tokens"] == IDS
    assert door.done("/detokenize", tokens=IDS) == {"prompt": WORDS}


def test_metrics_count_what_was_done(door: Front) -> None:
    def counted() -> dict[str, float]:
        lines = door.client.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = counted()
    door.done(COMPLETIONS, prompt=IDS, max_tokens=20, temperature=0, ignore_eos=True)
    after = counted()

    def grew(name: str, **labels: str) -> float:
        told = ",".join(f'{key}="{value}"' for key, value in sorted({"service": "orchestrator", **labels}.items()))
        key = f"specwire:{name}{{{told}}}"
        return after[key] - before.get(key, 0.0)

    assert grew("sessions_finished_total", finished_reason="length") == 1
    assert grew("http_responses_total", route=COMPLETIONS, status="200") == 1
    decided = [grew("generation_tokens_total", outcome=each) for each in ("accepted", "recovered", "bonus", "direct")]
    assert sum(decided) == 20


@pytest.mark.parametrize(("rule", "lossy"), [("coupled", False), ("threshold(0.1)", True), ("typical(0.3,0.09)", True)])
def test_every_answer_says_whether_its_rule_is_lossy(door: Front, rule: str, lossy: bool) -> None:
    """Whole ones, and the first event of streams, of both endpoints and of each choice."""
    wish: dict[str, Any] = {"temperature": 1.0, "rule": rule, "n": 2}
    asked = {
        COMPLETIONS: {"prompt": IDS, "max_tokens": 5, **wish},
        CHAT: {"messages": [SAYS], "max_completion_tokens": 5, **wish},
    }
    for path, body in asked.items():
        whole = door.done(path, **body)["choices"]
        firsts: dict[int, dict[str, Any]] = {}
        for event in door.events(path, **body):
            for choice in event["choices"]:
                firsts.setdefault(choice["index"], choice)
        for choice in (*whole, *firsts.values()):
            assert (choice["specwire"]["rule"], choice["specwire"]["lossy"]) == (rule, lossy)
        assert len(whole) == len(firsts) == 2


# ----------------------------------------------------------------------------------------------------------------------
# What every answer has, and what docs/HTTP.md says of endpoints.

PAGE, OTHER = "https://chat.example", "https://evil.example"
WISH = {"prompt": list(PROMPT), "max_tokens": 2}
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def shared(door: Front) -> Iterator[Front]:
    with another(door, http_access=HttpAccess(origins=(PAGE.upper(),))) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nowhere", COMPLETIONS])
def test_every_answer_has_a_name(door: Front, path: str) -> None:
    """Also one that is an error: no endpoint, no body, a stranger's page."""
    drawn = {door.client.get(path).headers["x-request-id"] for _ in range(2)}
    assert len(drawn) == 2
    assert all(re.fullmatch("req_[0-9a-f]{32}", name) for name in drawn)
    assert door.client.get(path, headers={"X-Request-Id": "mine/1"}).headers["x-request-id"] == "mine/1"
    refused = door.client.get(path, headers={"Origin": OTHER, "X-Request-Id": "mine/2"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (403, "mine/2")


@pytest.mark.parametrize("odd", ["", "two words", "x" * 129, "\u00e9"])
def test_what_is_no_name_is_not_echoed(door: Front, odd: str) -> None:
    answer = door.client.get("/health", headers={b"X-Request-Id": odd.encode("latin-1")})
    assert answer.headers.get_list("x-request-id")[0].startswith("req_")


def test_a_failure_of_ours_is_logged_under_that_name(
    door: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> Response:
        raise RuntimeError("broken")

    monkeypatch.setattr(app, "JSONResponse", fail)
    answer = door.client.get("/version", headers={"X-Request-Id": "theirs"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert [record.getMessage() for record in caplog.records] == ["HTTP request theirs failed"]


def test_a_request_id_in_that_header_repeats_nothing(door: Front) -> None:
    """Proxies add it by themselves; what a request is repeated by is X-Specwire-Request-Id."""
    asked = [door.client.post(COMPLETIONS, json=WISH, headers={"X-Request-Id": "same"}) for _ in range(2)]
    assert len({answer.json()["choices"][0]["specwire"]["session_id"] for answer in asked}) == 2


def test_a_page_of_an_allowed_origin_may_call_and_read(shared: Front) -> None:
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    asked = shared.client.options(COMPLETIONS, headers=preflight)
    assert (asked.status_code, asked.headers[ALLOWED]) == (200, PAGE)
    assert asked.headers["access-control-allow-headers"] == preflight["Access-Control-Request-Headers"]
    for more in ({}, {"stream": True}, {"max_tokens": -2}):
        answer = shared.client.post(COMPLETIONS, json={**WISH, **more}, headers={"Origin": PAGE})
        assert (answer.status_code, answer.headers[ALLOWED]) == (400 if "max_tokens" in more else 200, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    strange = {**preflight, "Origin": OTHER}
    asked, posted = (
        shared.client.options(COMPLETIONS, headers=strange),
        shared.client.post(COMPLETIONS, json=WISH, headers=strange),
    )
    assert [(each.status_code, ALLOWED in each.headers) for each in (asked, posted)] == [(403, False)] * 2
    assert ALLOWED not in shared.client.get("/v1/models").headers


# ----------------------------------------------------------------------------------------------------------------------
# The example of docs/HTTP.md runs, and its table names every endpoint.

# The console's own are no interface.
PUBLIC = ("/v1/", "/tokenize", "/detokenize", "/metrics", "/health", "/ready", "/version")
DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "HTTP.md").read_text()


def test_the_example_runs(door: Front) -> None:
    code = re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert code is not None
    source = (
        code[1]
        .replace("http://127.0.0.1:8000", door.url)
        .replace("stream=True", 'stream=True, extra_body={"ignore_eos": True}')
    )
    written = StringIO()
    with redirect_stdout(written):
        exec(compile(source, "docs/HTTP.md", "exec"), {})
    assert written.getvalue() == " ".join(map(str, plain(TARGET, (1, 2, 3), 40)))


def test_every_endpoint_is_named(door: Front) -> None:
    async def paths() -> set[str]:
        orchestrator = door.serving.orchestrator
        app = routed(HttpService(orchestrator, ChatModels(orchestrator.pool)))
        return {getattr(route, "path", "") for route in app.routes}

    public = {path for path in door.loop.run(paths()) if path.startswith(PUBLIC)}
    assert len(public) == 14
    for path in public:
        assert f"{path.replace('{model:path}', 'ID').replace('{response}', 'ID')}`" in DOCUMENT
