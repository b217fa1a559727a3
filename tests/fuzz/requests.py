"""HTTP requests of any kind, byte by byte: mostly ones that a client could send, some that are no HTTP at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.faults.streams import PROMPT
from tests.fuzz.messages import Values
from tests.fuzz.talks import FORMS, ODD_RULES, RULES, WARM

Json = dict[str, Any]

numbers = st.one_of(
    st.integers(-2, 9), st.integers(-(1 << 70), 1 << 70), st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.one_of(st.text(max_size=8), st.sampled_from(["", "5 6", "\ud800", "\0", "é" * 3000, "../x"]))
junk: Values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
ids = st.lists(st.integers(0, 70), min_size=1, max_size=12)
places = st.sampled_from(
    ["3-0000000000000000-0-1", f"{len(PROMPT)}-738f1a9a24f28c68-0-1", "9999999999-ffffffffffffffff-0-1", "x"]
)

# Values that a field may have. Everything else is tried beside them.
SAMPLING: dict[str, Values] = {
    "temperature": st.sampled_from([0, 0.9, 1.0]),
    "top_p": st.sampled_from([1, 0.9]),
    "top_k": st.integers(-1, 8),
    "min_p": st.sampled_from([0, 0.1]),
    "seed": st.integers(-3, 8),
    "presence_penalty": st.sampled_from([0, 0.5]),
    "frequency_penalty": st.sampled_from([0, -0.5]),
    "repetition_penalty": st.sampled_from([1, 1.2]),
    "logit_bias": st.dictionaries(st.sampled_from(["0", "5", "63", "64", "-1", "x"]), numbers, max_size=3),
    "rule": st.sampled_from([*RULES[0.0], *RULES[WARM], *ODD_RULES]),
    "logprobs_of": st.sampled_from(["model", "processed"]),
    "min_tokens": st.integers(0, 3),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 64), max_size=3),
    "stop": st.one_of(st.sampled_from(["5", " "]), st.lists(st.sampled_from(["5", "1 2", ""]), max_size=5)),
}
REQUEST: dict[str, Values] = {
    "n": st.integers(0, 3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans(), "other": junk}
    ),
    "drafting": st.sampled_from(["auto", "off", "drafters", "ngram"]),
    "request_id": st.sampled_from(["", "h1", "h2", "x" * 129]),
    "parent": st.sampled_from(["", "nobody's"]),
    "priority": st.sampled_from([0, 5, -100, 100, 101]),
    "private": st.booleans(),
    "take_over": st.booleans(),
    "details": st.booleans(),
    "timeout": st.sampled_from([0.001, 5, 0, -1, 1e9]),
    "references": st.lists(texts, max_size=3),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": texts}),
    "user": texts,
    "metadata": st.dictionaries(texts, texts, max_size=2),
    "model": st.sampled_from(["scripted:7:vocab=64", "scripted:7", "gpt-4"]),
    "response_format": st.sampled_from(
        [{"type": "text"}, {"type": "json_object"}, {"type": "regex"}, {"type": "json_schema"}]
    ),
    "guided_regex": st.sampled_from(FORMS["regex"]),
    "guided_json": st.sampled_from([{}, {"type": "integer"}, {"$ref": "#"}, "x", *FORMS["json_schema"]]),
    "guided_grammar": st.sampled_from(FORMS["grammar"]),
    "guided_choice": st.lists(st.sampled_from(["5", "6 7", ""]), max_size=3),
    "structured_outputs": st.fixed_dictionaries({}, optional={"regex": texts, "json_object": st.booleans(), "x": junk}),
    "tools": st.sampled_from([[], [{"type": "function", "function": {"name": "f"}}]]),
}
COMPLETION: dict[str, Values] = {
    "logprobs": st.integers(0, 21),
    "echo": st.booleans(),
    "best_of": st.integers(0, 3),
    "suffix": st.sampled_from(["", "x"]),
}
spoken = st.sampled_from(["5 6", "7", "1 2 3", [{"type": "text", "text": "5"}], "\ud800", "", [{"type": "image_url"}]])
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "user", "system", "assistant", "developer", ""]), "content": spoken},
        optional={"name": texts},
    ),
    min_size=1,
    max_size=3,
)
CHAT: dict[str, Values] = {
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 21),
    "max_completion_tokens": st.integers(0, 9),
    "add_generation_prompt": st.booleans(),
    "chat_template_kwargs": st.dictionaries(texts, junk, max_size=2),
    "modalities": st.sampled_from([["text"], ["audio"]]),
}
spoken_items = st.one_of(
    st.sampled_from(["5 6 7", "", [{"role": "user", "content": "5"}], [{"type": "message"}], [{}], [5]]),
    st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["function_call", "function_call_output", "reasoning", "message", "image"])},
            optional={
                "role": texts,
                "content": junk,
                "call_id": texts,
                "name": texts,
                "namespace": junk,
                "arguments": texts,
                "output": junk,
            },
        ),
        max_size=3,
    ),
)
response_tools = st.one_of(
    st.sampled_from([{"type": "function", "name": "f"}, {"type": "web_search"}, {"type": ["function"]}, "function"]),
    st.fixed_dictionaries(
        {"type": st.just("namespace")},
        optional={"name": texts, "tools": st.sampled_from([[], [{"type": "function", "name": "f"}], ["f"], [{}], 5])},
    ),
    junk,
)
RESPONSE: dict[str, Values] = {
    "instructions": texts,
    "previous_response_id": st.sampled_from(["", "resp_", "resp_nobody's", "x" * 300]),
    "store": st.booleans(),
    "text": st.sampled_from([{}, {"format": {"type": "text"}}, {"format": {"type": "json_schema"}}, {"format": 5}]),
    "reasoning": st.sampled_from([{}, {"effort": "low"}, {"effort": 5}, {"summary": "auto"}]),
    "tools": st.lists(response_tools, max_size=3),
    "tool_choice": st.one_of(
        st.sampled_from(["auto", "none", "required", {"type": "function", "name": "f"}, {}]),
        st.fixed_dictionaries({"type": st.just("allowed_tools")}, optional={"tools": junk, "mode": junk}),
    ),
    "truncation": st.sampled_from(["disabled", "auto"]),
    "include": st.sampled_from([[], ["x"], ["reasoning.encrypted_content"], 5, [[]]]),
    "client_metadata": junk,
    "max_tool_calls": st.integers(-1, 2),
}
prompts = st.one_of(
    st.sampled_from([list(PROMPT), "5 6 7", [list(PROMPT), [5]], ["5", "6 7"]]),
    ids,
    texts,
    st.lists(st.one_of(ids, texts), max_size=3),
)
asked = st.sampled_from([1, 3, 12, 30])
COMPLETE = {"prompt": prompts, "max_tokens": asked}, {**SAMPLING, **REQUEST, **COMPLETION}
# By path: the fields of a body that belongs there, and those that it may have beside them.
POSTED: Mapping[str, tuple[Mapping[str, Values], Mapping[str, Values]]] = {
    "/v1/completions": COMPLETE,
    "/v1/chat/completions": ({"messages": messages, "max_tokens": asked}, {**SAMPLING, **REQUEST, **CHAT}),
    "/tokenize": (
        {"prompt": texts},
        {"messages": messages, "return_token_strs": st.booleans(), "add_special_tokens": st.booleans()},
    ),
    "/detokenize": ({"tokens": ids}, {"model": texts}),
    "/console/generate": COMPLETE,
    "/v1/responses": ({"input": spoken_items, "max_output_tokens": asked}, {**SAMPLING, **REQUEST, **RESPONSE}),
    "/v1/responses/compact": ({"input": spoken_items}, {"model": texts}),
    "/v1/responses/{response}/cancel": ({}, {"model": texts}),
}
GOT = (
    *("/", "/v1/models", "/v1/models/scripted:7:vocab=64", "/v1/models/%00", "/console/status", "/metrics", "/health"),
    *(
        "/ready",
        "/version",
        "/v1/responses/resp_nobody",
        "/console/none",
        "/console/console.js",
        "/v1",
        "/%2e%2e/etc/passwd",
        "*",
        "/v1/models?x=%zz",
    ),
)
MOST_BESIDE = 4
# One of twelve has something wrong with its HTTP. Smaller numbers than this one are what hypothesis prefers.
ODD, ODD_ONE = st.sampled_from(range(12)), 7

HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "X-Specwire-Request-Id": st.sampled_from(["h1", "h3", "", "x" * 200]),
        "Last-Event-ID": places,
        "Authorization": st.sampled_from(["Bearer x", "Bearer", "Basic eDp5", ""]),
        "traceparent": st.sampled_from([f"00-{'1' * 32}-{'2' * 16}-01", "00"]),
        "Sec-Fetch-Site": st.sampled_from(["same-origin", "none", "none", "none", "cross-site", "same-site"]),
        "Origin": st.sampled_from(
            [*["http://localhost"] * 4, "http://localhost:1", "http://evil.example", "null", "", "http://", "[::1]"]
        ),
        "Content-Type": st.sampled_from(["application/json", "text/plain", "multipart/form-data"]),
        "Expect": st.just("100-continue"),
        "Upgrade": st.sampled_from(["websocket", "h2c"]),
    },
)


HOSTS = st.sampled_from(
    [
        *["localhost"] * 12,
        *(
            "127.0.0.1:1",
            "[::1]:80",
            "evil.example",
            "localhost.evil.example",
            "a@localhost",
            "localhost:99999",
            "[::1",
        ),
        *(
            "",
            "x y",
            "\xe9",
            "1" * 5000,
            "%6cocalhost",
            "localhost,evil.example",
            "http://localhost",
            "[::ffff:1.2.3.4]",
        ),
    ]
)


@dataclass(frozen=True, slots=True)
class Raw:
    """What is sent. whole: it is one request of HTTP/1.1 which must be answered; of others nothing is expected."""

    data: bytes
    whole: bool


@st.composite
def _bodies(draw: st.DrawFn, needed: Mapping[str, Values], beside: Mapping[str, Values]) -> bytes:
    """JSON that fits, three times of four; else with a field or two that are something else, or no JSON at all."""
    names = draw(st.lists(st.sampled_from(sorted(beside)), max_size=MOST_BESIDE, unique=True))
    body = {name: draw(strategy) for name, strategy in needed.items()} | {name: draw(beside[name]) for name in names}
    way = draw(st.sampled_from(range(16)))
    if way in (5, 6, 7):
        known = sorted({*needed, *beside, "other"})
        body |= draw(st.dictionaries(st.sampled_from(known), junk, min_size=1, max_size=2))
    data = json.dumps(body).encode()
    if way == 8:
        at = draw(st.integers(0, len(data)))
        return data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 3)) :]
    if way == 9:
        return draw(st.sampled_from([b"", b"null", b"[]", b"[" * 100_000, b"{" * 9, b'{"a":1e999}', b"1" * 5000]))
    return data


@st.composite
def _requests(draw: st.DrawFn, method: str, paths: Values, body: Values) -> Raw:
    """One time of eight something is wrong with the HTTP itself."""
    data, headers = draw(body), draw(HEADERS)
    path = draw(paths)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {draw(HOSTS)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if draw(ODD) != ODD_ONE:
        framed = lines if method == "GET" else [*lines, f"Content-Length: {len(data)}"]
        return Raw(written(framed) + (b"" if method == "GET" else data), whole=True)
    return Raw(draw(st.sampled_from(_damaged(lines, data))), whole=False)


def written(lines: list[str]) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _damaged(lines: list[str], body: bytes) -> list[bytes]:
    size = f"Content-Length: {len(body)}"
    chunked = "Transfer-Encoding: chunked"
    whole = written([*lines, size]) + body
    return [
        whole[: len(whole) // 2],  # and then nothing
        written([*lines, f"Content-Length: {len(body) + 9}"]) + body,
        written([*lines, "Content-Length: -1"]) + body,
        written([*lines, size, "Content-Length: 1"]) + body,
        written([*lines, size, chunked]) + body,
        written([*lines, chunked]) + b'5\r\n{"pro\r\nzz\r\n' + body,
        written([*lines, chunked]) + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n",
        written([*lines, "X: " + "x" * 20_000]),
        written([*lines, "no colon"]),
        written([lines[0].replace("HTTP/1.1", "HTTP/9.9"), *lines[1:]]),
        written([lines[0] + " more", *lines[1:]]),
        written(["\x00\x16\x03\x01", *lines[1:]]),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        whole + whole,
    ]


@dataclass(frozen=True, slots=True)
class Flood:
    """Much of the same. chunks: of a body, requests: of a connection, which may cost more than their bytes."""

    data: bytes
    chunks: int = 0
    requests: int = 1

    def __repr__(self) -> str:
        """The beginning: Hypothesis refuses to show all of it, and would hide what failed."""
        head, _, rest = self.data.partition(b"\r\n\r\n")
        return f"{len(self.data)} bytes, {self.chunks} chunks, {self.requests} requests, {head[:80]!r} {rest[:80]!r}"


# What is cheap to write, and dear to read if it is read without care.
UNITS = [
    *(
        "[],",
        "{},",
        '"ab",',
        '{"a":',
        "[",
        "5,",
        "151936,",
        "1.5,",
        "null,",
        "\\u00e9",
        '\\"',
        "\\\\",
        "[{ ",
        "\U0001f600",
    ),
    *("1e9,", '"x":[', "-", "\\ud800", '"', "a: b\r\n", " ", "\t[", "9" * 50),
]
AROUND = [
    *(
        ('{"max_tokens": 1, "prompt": [', "5]}"),
        ('{"max_tokens": 1, "prompt": "', '"}'),
        ("[", "]"),
        ("", ""),
        ('{"max_tokens": 1, "prompt": "5", "stop": ["', '"]}'),
    ),
    ('{"max_tokens": 1, "messages": [{"role": "user", "content": "', '"}]}'),
    ('{"max_tokens": 1, "messages": [{"role": "user", "content": "5"}], "chat_template_kwargs": {"x": [', "0]}}"),
    (
        '{"prompt": "5", "max_tokens": 1, "response_format": {"type": "json_schema", '
        '"json_schema": {"schema": {"enum": [',
        "0]}}}}",
    ),
]
SIZES = st.sampled_from([1000, 30_000, 300_000, 1_000_000, 3_000_000])


@st.composite
def floods(draw: st.DrawFn) -> Flood:
    """A body of much, in one piece or in many, or many headers or requests."""
    size, path = draw(SIZES), draw(st.sampled_from(sorted(POSTED)))
    way = draw(st.sampled_from(["body", "body", "chunks", "headers", "requests", "trailers"]))
    host = draw(st.sampled_from(["localhost", "localhost", "localhost", "evil.example"]))
    unit = draw(st.sampled_from(UNITS)).encode() or b" "
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}"]
    chunked = written([*lines, "Transfer-Encoding: chunked"])
    match way:
        case "headers":
            line = draw(st.sampled_from([b"x: y\r\n", b"x: " + b"y" * 1000 + b"\r\n", b"x:" + b" " * 5000 + b"\r\n"]))
            return Flood(written(lines)[:-2] + line * (size // len(line)) + b"\r\n")
        case "requests":
            one = draw(st.sampled_from([b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", written(lines)]))
            count = min(size, 20_000) // len(one) + 1
            return Flood(one * count, requests=count)
        case "trailers":
            return Flood(chunked + b"1\r\n5\r\n0\r\n" + b"x: y\r\n" * (size // 6) + b"\r\n", 1)
    before, behind = draw(st.sampled_from(AROUND))
    body = before.encode() + unit * (size // len(unit)) + behind.encode()
    if way == "body":
        return Flood(written([*lines, f"Content-Length: {len(body)}"]) + body)
    step = draw(st.sampled_from([1, 2, 16, 64, 1000, 65_536]))
    pieces = [body[at : at + step] for at in range(0, min(len(body), 200_000 * step), step)]
    data = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return Flood(chunked + data + b"0\r\n\r\n", len(pieces))


# What chat templates are made of, and what they may be made of if their maker means harm.
STATEMENTS = [
    *("{{ messages[0].content }}", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"),
    *("{{ messages | tojson }}", "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ extra }}", "plain"),
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    *(
        "{{ lipsum(n=200000) }}",
        "{{ 'a' * 8000000000 }}",
        "{{ messages[0].content * 8000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
    ),
    *("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 3000 + "{% endif %}" * 3000),
    *("{{ '%9999999999d' | format(1) }}", "{{ ([0] * 800000000) | length }}", "{{ range(10**9) | list }}"),
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% set x = namespace(s='a' * 1000) %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
    *("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}"),
    *("{{ self._TemplateReference__context }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}"),
    *("{{ '\\ud800' }}", "{% if %}", "{{", "{% endfor %}", "{{ messages | map(attribute='content') | join(' ') }}"),
    *("{{ dict(a=1).items() | list }}", "{{ joiner }}", "{{ messages | groupby('role') }}", "{{ messages.append(1) }}"),
    *("{{ 'x' | center(99999999999) }}", "{{ bos_token }}", "{{ 'x' | indent(99999999999) }}"),
]
sources: Values = st.lists(st.one_of(st.sampled_from(STATEMENTS), st.text(max_size=6)), min_size=1, max_size=3).map(
    "".join
)


def figures() -> Values:
    """What is sent to the listener for figures."""
    paths = st.sampled_from(["/metrics", "/metrics?x=1", "/health", "/", "/metrics/x", "*"])
    methods = st.sampled_from(["GET", "GET", "HEAD", "POST", "BREW"])
    return methods.flatmap(lambda method: _requests(method, paths, st.just(b"")))


def endpoints() -> dict[str, Values]:
    """By name, what is sent to each."""
    posted = {
        f"POST {path}": _requests("POST", st.just(path), _bodies(needed, beside))
        for path, (needed, beside) in POSTED.items()
    }
    others = st.sampled_from(["HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "GET", "BREW"])
    anywhere = st.sampled_from([*POSTED, *GOT])
    return {
        **posted,
        "GET": _requests("GET", st.sampled_from(GOT), st.just(b"")),
        "other methods": others.flatmap(lambda method: _requests(method, anywhere, st.binary(max_size=20))),
    }
