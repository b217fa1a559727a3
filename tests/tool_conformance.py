"""`python -m tests.tool_conformance`: BFCL's requests for tools on a real model, with guesses and without.

The Berkeley Function Calling Leaderboard's questions and functions (the package bfcl-eval) are asked as chats with
tools, every second one with a call that is forced. What is compared is the whole answer: text, calls, and why it ended.
The verifier refuses to start where a guess could change a bit. It exits with 1 where an answer differs. A whole run is
recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from specwire.progress import ProgressBar
from tests.conformance import Json, keep, service, version

FILES = ("simple_python", "multiple", "parallel", "parallel_multiple")
# What BFCL calls types, by JSON Schema's names; "any" has none.
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
MODEL, REQUESTS, TOKENS, CONTEXT = "qwen2.5-coder-1.5b", 200, 160, 4096
ANSWER_LIMIT_S = 600.0


def requests(data: Path, count: int) -> Iterator[Json]:
    """So many chats with tools, of all files in turn."""
    files = [(data / f"BFCL_v4_{name}.json").read_text().splitlines() for name in FILES]
    lines = (line for some in zip(*files, strict=False) for line in some)
    for number, line in enumerate(islice(lines, count)):
        told = json.loads(line)
        yield {
            "messages": told["question"][0],
            "tools": [{"type": "function", "function": function_of(each)} for each in told["function"]],
            "tool_choice": ("auto", "required")[number % 2],
            "max_tokens": TOKENS,
            "temperature": 0,
        }


def function_of(told: Json) -> Json:
    """In OpenAI's form: names without dots, JSON Schema's types."""
    name = told["name"].replace(".", "_")
    return {"name": name, "description": told["description"], "parameters": schema_of(told["parameters"])}


def schema_of(told: Any) -> Any:
    if isinstance(told, list):
        return [schema_of(each) for each in told]
    if not isinstance(told, dict):
        return told
    typed = isinstance(told.get("type"), str)
    found = {key: schema_of(value) for key, value in told.items() if not (typed and key == "type")}
    if typed and told["type"] != "any":
        found["type"] = TYPES.get(told["type"], told["type"])
    return found


def answer_of(choice: Json) -> Json:
    """What may not differ: all but the calls' ids."""
    calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
    return {"content": choice["message"].get("content"), "calls": calls, "reason": choice["finish_reason"]}


def asked(url: str, request: Json, drafting: str) -> tuple[Json, int]:
    """An answer, and how many of its tokens were guessed."""
    body = json.dumps(request | {"drafting": drafting}).encode()
    call = Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    try:
        with urlopen(call, timeout=ANSWER_LIMIT_S) as answer:
            told = json.load(answer)
    except HTTPError as error:
        return {"refused": json.load(error)["error"]["message"]}, 0
    return answer_of(told["choices"][0]), told["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]


def row_of(model: str, count: int, called: int, refused: int, guessed: int, differ: int) -> Json:
    return {
        "suite": f"bfcl-eval {version('bfcl-eval')}: {model}, drafting on and off",
        "passed": count - refused - differ,
        "by_design": refused,
        "failed": differ,
        "told": f"{called} with calls, {guessed:,} tokens guessed",
    }


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(prog="python -m tests.tool_conformance", description=__doc__)
    line.add_argument("--model", default=MODEL, help="(default: %(default)s)")
    line.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help="(default: %(default)s)")
    args = line.parse_args(argv)
    (data,) = Path(sys.prefix, "conformance").glob("lib/python*/site-packages/bfcl_eval/data")
    differ = called = guessed = refused = count = 0
    with ExitStack() as started:
        verifier = started.enter_context(
            service("verify", args.model, "--context", str(CONTEXT), "--slots", "2", "--deterministic")
        )
        front = started.enter_context(
            service("orchestrate", "--verifier", verifier["address"], "--http", "127.0.0.1:0")
        )
        bar = started.enter_context(ProgressBar("requests", args.requests))
        for count, request in enumerate(requests(data, args.requests), 1):
            plain, _ = asked(front["http"], request, "off")
            drafted, accepted = asked(front["http"], request, "auto")
            differ, guessed = differ + (plain != drafted), guessed + accepted
            called, refused = called + bool(plain.get("calls")), refused + ("refused" in plain)
            if plain != drafted or "refused" in plain:
                print(f"{count}: {json.dumps(plain)}\n   {json.dumps(drafted)}", flush=True)
            bar.at(count, f"{differ} differ")
    print(
        f"{count} requests: {called} with calls, {refused} refused, {guessed} tokens guessed; {differ} answers differ"
    )
    if count == REQUESTS:
        keep(row_of(args.model, count, called, refused, guessed, differ))
    return 1 if differ or not count else 0


if __name__ == "__main__":
    sys.exit(main())
