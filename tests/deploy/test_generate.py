"""What `specwire generate --json` prints: all that is known of a completion, under the names that the pages use."""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.clients import chat, generate
from deploy.cli.clients.generate import add_sampling_arguments, as_object, by_source, sampling_options, summary
from deploy.cli.stack_address import stack_address_of
from specwire.client import Completion, SamplingInForce, Stats
from specwire.client.requests import generate_request
from specwire.core.invalid import MOST_REFERENCES, InvalidParameter
from specwire.core.messages import FinishReason, Outcome, TokenLogprobs
from specwire.options import STACK, words_of
from specwire.rpc.channel import MOST_MESSAGE_BYTES
from specwire.rpc.convert import constraint_from_wire, sampling_from_wire, stopping_from_wire
from specwire.v1 import generation_pb2

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "CLI.md").read_text()
STATS = Stats(
    output_tokens=4, duration_us=2_000_000, time_to_first_token_us=1_500, tested_at=(2, 1), accepted_at=(1, 1)
)


def test_every_figure_is_told() -> None:
    sampling = SamplingInForce(0.0, 0, 1.0, 0, "greedy")
    outcomes = (Outcome.DIRECT,) * 4
    done = Completion("s", 1, sampling, "text", (1, 2, 3, 4), outcomes, FinishReason.LENGTH, "", STATS)
    told = json.loads(json.dumps(as_object(done)))["stats"]
    known = {each.name.replace("_us", "_ms") for each in fields(Stats)}
    assert told.keys() == known | {"tokens_per_second"}
    assert (told["tokens_per_second"], told["duration_ms"], told["time_to_first_token_ms"]) == (2.0, 2000.0, 1.5)
    assert (told["tested_at"], told["accepted_at"]) == ([2, 1], [1, 1])
    rows = PAGE.partition("| figure in `stats` |")[2].partition("\n\n")[0]
    named = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert len(named) == 6
    assert named <= told.keys()


def test_what_json_cannot_say_is_as_openai_says_it() -> None:
    """Under a lossy rule a token may be decided that what is drawn from leaves out."""
    sampling = SamplingInForce(1.0, 0, 1.0, 0, "threshold(0.1)", logprobs=1)
    told = (TokenLogprobs(-math.inf, ((3, -0.5),)),)
    done = Completion("s", 1, sampling, "x", (4,), (Outcome.ACCEPTED,), FinishReason.LENGTH, "", STATS, logprobs=told)
    assert as_object(done)["logprobs"] == [{"logprob": -9999.0, "top": [[3, -0.5]]}]


def test_a_head_has_its_figures_in_the_summary() -> None:
    own = Stats(proposed_head=9, tested_head=7, accepted_head=5, tested_ngram=3, accepted_ngram=2)
    assert by_source(own) == " (head 5 of 7, n-grams 2 of 3)"
    assert by_source(Stats(proposed_head=4)) == ""
    stats = replace(STATS, proposed=12, tested=10, accepted=7, tested_head=7, accepted_head=5)
    sampling = SamplingInForce(0.0, 0, 1.0, 0, "greedy")
    done = Completion("s", 1, sampling, "text", (1,), (Outcome.ACCEPTED,), FinishReason.LENGTH, "", stats)
    assert "7 of 10 tested draft tokens accepted (head 5 of 7), end: length" in summary(done)


# ----------------------------------------------------------------------------------------------------------------------
# What form an output must have, and what is proposed for it, from the command line to the request.


def request_of(*words: str) -> generation_pb2.GenerateRequest:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_sampling_arguments(parser)
    parser.set_defaults(json=False, prompt="x", prompt_file=None)
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


LARGE = b"1" * (MOST_MESSAGE_BYTES // 2 + 1)


def test_texts_to_propose_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder every text is a document; empty ones, which a service refuses, are left out."""
    lines = '{"text": "3"}\n\n{"text": "4\\n"}\n'
    for name, text in (("a.txt", "1 2"), ("b.py", ""), ("c.jsonl", lines), ("d.unknown", "5")):
        (tmp_path / name).write_text(text)
    request = request_of("--reference", str(tmp_path / "d.unknown"), "--reference", str(tmp_path), "--private")
    assert [part.text for part in request.references] == ["5", "1 2", "3", "4\n"]
    assert request.private
    assert request.WhichOneof("prediction") is None
    none = request_of("--prediction", str(tmp_path / "a.txt"))
    assert (none.prediction_text, list(none.references), none.private) == ("1 2", [], False)
    monkeypatch.setattr("sys.stdin", io.StringIO("6 7\n"))
    assert request_of("--prediction", "-").prediction_text == "6 7\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--reference", "no/such"), "references: there is no no/such"),
        (("--reference", "odd"), "references: odd: cannot be read: UnicodeDecodeError: .* in position 1"),
        (("--reference", "bad.jsonl"), "references: bad.jsonl: cannot be read: KeyError"),
        (("--reference", "empty"), "references: there is nothing to read in empty"),
        (("--reference", "full") * (MOST_REFERENCES + 1), f"references: at most {MOST_REFERENCES} are allowed, not 65"),
        (
            ("--reference", "large") * 2,
            f"references: {MOST_MESSAGE_BYTES + 2} bytes of text are more than a request may",
        ),
        (("--prediction", "no/such"), "prediction: no/such cannot be read: No such file or directory"),
        (("--prediction", "odd"), "prediction: odd is not UTF-8 at byte 1"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(
    words: Sequence[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in (("odd", b"1\xff"), ("bad.jsonl", b"{}"), ("empty", b""), ("full", b"1"), ("large", LARGE)):
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidParameter, match=f"^{message}"):
        request_of(*words)


@pytest.mark.parametrize("words", [[], ["--prompt-file", "-"], ["a conversation"]], ids=["piped", "named", "chat"])
def test_stdin_is_read_once(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("both?"))
    parser = argparse.ArgumentParser()
    command, given = (chat, []) if words == ["a conversation"] else (generate, words)
    command.add_arguments(parser)
    with pytest.raises(InvalidParameter, match="^prediction: must be a file, not -: stdin has the prompt$"):
        sampling_options(parser.parse_args([*given, "--prediction", "-"]))
    assert sys.stdin.read() == "both?"


@pytest.mark.parametrize("command", [generate, chat], ids=["generate", "chat"])
def test_a_stack_of_its_own_has_no_references_but_those_of_the_request(command: Any, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--draft=a", "--draft=b", "--no-ngram", "--slots=3", "--target=m"]
    args = parser.parse_args([*words, "--reference", str(tmp_path)])
    assert stack_address_of(args).own.references == ()
    assert sorted(words_of(STACK, vars(args))) == words
