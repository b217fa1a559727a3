"""What form an output must have, from the command line to the request."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.clients.generate import add_sampling_arguments, sampling_options
from specwire.client.requests import generate_request
from specwire.core.invalid import InvalidParameter
from specwire.rpc.convert import constraint_from_wire, sampling_from_wire, stopping_from_wire
from specwire.v1 import generation_pb2


def request_of(*words: str) -> generation_pb2.GenerateRequest:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_sampling_arguments(parser)
    parser.set_defaults(json=False, provisional=False)
    return generate_request("x", **sampling_options(parser.parse_args(words)))


def asked(*words: str) -> Any:
    return constraint_from_wire(request_of(*words).sampling)


NUMBERS = ("0", "1", "-1", "-0.0", "2.5", "5e-324", "1e-310", "1e308", "1e400", "nan", "inf", "-inf", "1" * 30, "x", "")
OPTIONS = {
    **{f"--{name}={{}}": name for name in ("max-tokens", "min-tokens", "temperature", "top-k", "top-p", "min-p")},
    **{f"--{name}-penalty={{}}": f"{name}-penalty" for name in ("repetition", "presence", "frequency")},
    **{f"--{name}={{}}": name for name in ("seed", "priority", "n")},
    "--logit-bias={}=1": "logit-bias",
    "--logit-bias=7={}": "logit-bias",
    "--stop-id={}": "stop-id",
    "--rule=threshold({})": "rule",
}


def refused(words: str) -> str:
    """The option that is wrong; "" where the service takes what is asked for, too."""
    try:
        request = request_of(words)
    except argparse.ArgumentError as error:
        return str(error.argument_name).removeprefix("--")
    except InvalidParameter as error:
        return error.field.replace("_", "-")
    sampling_from_wire(request.sampling, default_seed=0)
    stopping_from_wire(request.stopping)
    return ""


@pytest.mark.parametrize(("option", "name"), OPTIONS.items())
def test_a_number_is_refused_before_anything_starts_or_by_nobody(option: str, name: str) -> None:
    """What a service would refuse is refused here, so that nobody waits for a stack to be told."""
    found = [refused(option.format(number)) for number in NUMBERS]
    also = {"max-tokens": {"min-tokens"}, "stop-id": {"stop-ids"}, "n": {"-n/--n"}}
    assert {"", name} <= set(found) <= {"", name} | also.get(name, set())


def test_a_default_of_tokens_is_as_many_as_fit() -> None:
    asked, told = request_of().stopping, request_of("--max-tokens", "7").stopping
    assert (asked.max_tokens, asked.fit_context) == (128, True)
    assert (told.max_tokens, told.fit_context) == (7, False)


def test_a_seed_may_be_signed() -> None:
    """As over HTTP: the same 64 bits."""
    assert request_of("--seed", "-1").sampling.seed == request_of("--seed", str((1 << 64) - 1)).sampling.seed


def test_each_kind(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text("start: /a/\n")
    assert asked() is None
    found = [
        asked("--json-schema", ' {"type": "object"}'),
        asked("--json-schema", str(schema)),
        asked("--regex", "a+"),
        asked("--choice", "yes", "--choice", "no"),
        asked("--grammar", str(grammar)),
    ]
    assert [(each.kind.value, each.texts) for each in found] == [
        ("json_schema", ('{"type": "object"}',)),
        ("json_schema", ('{"type": "object"}',)),
        ("regex", ("a+",)),
        ("choices", ("yes", "no")),
        ("grammar", ("start: /a/\n",)),
    ]


def test_an_output_has_one_form() -> None:
    with pytest.raises(argparse.ArgumentError, match="not allowed with argument"):
        asked("--regex", "a", "--choice", "b")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xff")
    with pytest.raises(InvalidParameter, match="grammar: .* is not UTF-8 at byte 0"):
        asked("--grammar", str(tmp_path / "odd"))
    with pytest.raises(InvalidParameter, match="regex: is not valid Unicode at index 1"):
        asked("--regex", "a\udcff")
