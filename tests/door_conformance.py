"""`make conformance-door`: schemathesis sends a stack what an OpenAPI document allows, and what it does not.

The document is ours, below, with all that docs/HTTP.md has; `--document FILE` takes another, as of Open Responses. An
answer of 5xx, or none within ANSWER_LIMIT_S, is a fault; what is refused with 4xx is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import demo_pair
from tests.conformance import Json, keep, service, version

PROGRAM = Path(sys.prefix, "conformance", "bin", "schemathesis")
TEMPLATE = Path(__file__).parents[1] / "examples" / "chatml.jinja"
CHECKS = "not_a_server_error"
SECONDS, ANSWER_LIMIT_S, BEYOND_S = 600, 60, 300
# A text may be long: each ends soon enough to be one of thousands.
MOST_TOKENS = 64

STRING: Json = {"type": "string"}
FLAG: Json = {"type": "boolean"}
ANY_OBJECT: Json = {"type": "object"}


def whole(least: int = 0, most: int | None = None) -> Json:
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


def number(least: float, most: float) -> Json:
    return {"type": "number", "minimum": least, "maximum": most}


def listed(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def one_of(*values: str) -> Json:
    return {"enum": list(values)}


def known(properties: Json) -> Json:
    """An object; what it must have ends in an exclamation mark."""
    required = [name.removesuffix("!") for name in properties if name.endswith("!")]
    own = {name.removesuffix("!"): value for name, value in properties.items()}
    return {"type": "object", "properties": own, "required": required, "additionalProperties": False}


SCHEMA = known({"name!": STRING, "strict": FLAG, "schema!": ANY_OBJECT})
TOOL: Json = {"name!": STRING, "parameters": ANY_OBJECT, "strict": FLAG}
TOKENS = listed(whole(0, 4095), maxItems=64)
SAMPLING: Json = {
    "temperature": number(0, 2),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": whole(-1),
    "min_p": number(0, 1),
    "seed": {"type": "integer"},
    "stream": FLAG,
    "min_tokens": whole(),
    "ignore_eos": FLAG,
    "user": STRING,
    "safety_identifier": STRING,
    "prompt_cache_key": STRING,
    "service_tier": STRING,
    "timeout": number(60, 86_400),  # a shorter one is answered by 504
    "priority": whole(-100, 100),
    "rule": one_of("standard", "exact", "greedy", "typical"),
    "drafting": one_of("auto", "off", "drafters", "ngram"),
    "specwire": known({"sources": listed(one_of("drafters", "ngram", "heads"))}),
    "private": FLAG,
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
}
SHARED: Json = SAMPLING | {
    "model": one_of("target"),
    "max_tokens": whole(-1, MOST_TOKENS),
    "n": whole(1, 4),
    "best_of": whole(1, 4),
    "stop": {"anyOf": [STRING, listed(STRING, maxItems=4)]},
    "stop_token_ids": TOKENS,
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,3}$": number(-100, 100)},
        "additionalProperties": False,
    },
    "stream_options": known({"include_usage": FLAG, "include_obfuscation": FLAG, "continuous_usage_stats": FLAG}),
    "prediction": known({"type!": one_of("content"), "content!": STRING}),
    "response_format": {
        "anyOf": [
            known({"type!": one_of("text", "json_object")}),
            known({"type!": one_of("json_schema"), "json_schema!": SCHEMA}),
        ]
    },
    "structured_outputs": known(
        {"json": ANY_OBJECT, "regex": STRING, "choice": listed(STRING), "grammar": STRING, "json_object": FLAG}
    ),
    "references": listed(STRING, maxItems=4),
    "request_id": STRING,
    "take_over": FLAG,
    "parent": STRING,
    "details": FLAG,
    "metadata": ANY_OBJECT,
    "store": FLAG,
    "logprobs_of": one_of("model", "processed"),
    "prompt_logprobs": whole(0, 20),
}
CALL = known({"id!": STRING, "type!": one_of("function"), "function!": known({"name!": STRING, "arguments!": STRING})})
PART = known({"type!": one_of("text"), "text!": STRING})
MESSAGE = known(
    {
        "role!": one_of("system", "developer", "user", "assistant", "tool"),
        "content": {"anyOf": [STRING, {"type": "null"}, listed(PART)]},
        "name": STRING,
        "tool_calls": listed(CALL, maxItems=3),
        "tool_call_id": STRING,
        "reasoning_content": STRING,
    }
)
FUNCTION = known({"name!": STRING, "description": STRING, "parameters": ANY_OBJECT, "strict": FLAG})
CHOICE = {
    "anyOf": [
        one_of("auto", "none", "required"),
        known({"type!": one_of("function"), "function!": known({"name!": STRING})}),
    ]
}
ROLE = one_of("system", "developer", "user", "assistant")
ITEM = {
    "anyOf": [
        known({"type": one_of("message"), "role!": ROLE, "content!": STRING}),
        known({"type!": one_of("function_call"), "call_id!": STRING, "name!": STRING, "arguments!": STRING}),
        known({"type!": one_of("function_call_output"), "call_id!": STRING, "output!": STRING}),
    ]
}
BODIES: dict[str, Json] = {
    "/v1/completions": known(
        SHARED
        | {
            "prompt!": {"anyOf": [STRING, TOKENS, listed(STRING, maxItems=3), listed(TOKENS, maxItems=3)]},
            "logprobs": whole(0, 20),
            "echo": FLAG,
        }
    ),
    "/v1/chat/completions": known(
        SHARED
        | {
            "messages!": listed(MESSAGE, maxItems=6),
            "max_completion_tokens": whole(-1, MOST_TOKENS),
            "logprobs": FLAG,
            "top_logprobs": whole(0, 20),
            "tools": listed(known({"type!": one_of("function"), "function!": FUNCTION}), maxItems=4),
            "tool_choice": CHOICE,
            "parallel_tool_calls": FLAG,
            "add_generation_prompt": FLAG,
            "continue_final_message": FLAG,
            "chat_template_kwargs": ANY_OBJECT,
            "reasoning_effort": STRING,
            "verbosity": STRING,
            "modalities": {"const": ["text"]},
        }
    ),
    "/v1/responses": known(
        SAMPLING
        | {
            "model": one_of("target"),
            "input!": {"anyOf": [STRING, listed(ITEM, maxItems=5)]},
            "instructions": STRING,
            "previous_response_id": STRING,
            "max_output_tokens": whole(-1, MOST_TOKENS),
            "store": FLAG,
            "tools": listed(known({"type!": one_of("function"), **TOOL}), maxItems=4),
            "tool_choice": one_of("auto", "none", "required"),
            "text": known({"format": known({"type!": one_of("text", "json_object")}), "verbosity": STRING}),
            "reasoning": known({"effort": STRING, "summary": one_of("auto", "concise", "detailed")}),
            "truncation": one_of("auto", "disabled"),
            "include": listed(STRING, maxItems=2),
            "metadata": ANY_OBJECT,
            "client_metadata": ANY_OBJECT,
            "max_tool_calls": whole(1),
            "top_logprobs": whole(0, 20),
        }
    ),
    "/tokenize": known(
        {
            "model": one_of("target"),
            "prompt": STRING,
            "messages": listed(MESSAGE, maxItems=6),
            "return_token_strs": FLAG,
            "add_special_tokens": FLAG,
        }
    ),
    "/detokenize": known({"model": one_of("target"), "tokens!": TOKENS}),
}
# Methods of paths without a body; what stands in braces is a text.
OTHERS = {
    "/v1/responses/{name}": ("get", "delete"),
    "/v1/responses/{name}/cancel": ("post",),
    "/v1/models": ("get",),
    "/v1/models/{name}": ("get",),
    **dict.fromkeys(("/health", "/ready", "/version", "/metrics"), ("get",)),
}


def document() -> Json:
    """Ours, in OpenAPI 3.1."""
    answers: Json = {"default": {"description": "an answer, or an error as docs/HTTP.md has them"}}
    paths: dict[str, Json] = {
        path: {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": answers,
            }
        }
        for path, body in BODIES.items()
    }
    name = {"name": "name", "in": "path", "required": True, "schema": STRING | {"minLength": 1}}
    for path, methods in OTHERS.items():
        paths[path] = {method: {"responses": answers} for method in methods}
        if "{" in path:
            paths[path]["parameters"] = [name]
    return {"openapi": "3.1.0", "info": {"title": "specwire", "version": "1"}, "paths": paths}


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(prog="python -m tests.door_conformance", description=__doc__)
    line.add_argument("--document", type=Path, metavar="FILE", help="OpenAPI of others (default: ours)")
    line.add_argument("--seconds", type=int, default=SECONDS, help="(default: %(default)s)")
    args = line.parse_args(argv)
    with TemporaryDirectory() as folder:
        asked = Path(folder, "specwire.json") if args.document is None else args.document.absolute()
        if args.document is None:
            asked.write_text(json.dumps(document()))
        words = ("--target", str(demo_pair.TARGET), "--draft", str(demo_pair.DRAFT), "--chat-template", str(TEMPLATE))
        limits = ("--max-tokens-default", str(MOST_TOKENS), "--http", "127.0.0.1:0")
        with service("up", *words, *limits) as ready:
            url = ready["http"] if args.document is None else f"{ready['http']}/v1"
            options = ["--checks", CHECKS, "--request-timeout", str(ANSWER_LIMIT_S), "--max-time", str(args.seconds)]
            command = [str(PROGRAM), "run", str(asked), "--url", url, *options, "--phases", "coverage,fuzzing"]
            report = Path(folder, "report.json")
            done = subprocess.run(
                [*command, "--continue-on-failure", "--max-examples", "1000000", "--report-json-path", str(report)],
                cwd=folder,  # it keeps what it found there
                timeout=args.seconds + BEYOND_S,
            )
            with urlopen(f"{ready['http']}/ready", timeout=ANSWER_LIMIT_S) as answer:
                ready_again = bool(json.load(answer)["ready"])
        whose = "these endpoints" if args.document is None else args.document.stem
        keep(row_of(json.loads(report.read_text())["test_cases"], whose, args.seconds))
    return done.returncode or not ready_again


def row_of(counts: Json, whose: str, seconds: int) -> Json:
    wrong = counts["with_failures"] + counts["errored"]
    suite = f"schemathesis {version('schemathesis')}: {whose}"
    row = {"passed": counts["generated"] - wrong, "by_design": 0, "failed": wrong}
    return {"suite": suite, **row, "told": f"in {seconds} s"}


if __name__ == "__main__":
    sys.exit(main())
