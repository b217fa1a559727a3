"""Constraints by llguidance: what may stand, what is gone back on, what is refused, and that nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import specwire.text.constraints
from demo_pair import TARGET
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind, Mask
from specwire.text.constraint_process import Grammars, Matching
from specwire.text.constraints import LEAST, LIBRARY, Beginnings, Compiler, Found, NotInstalled, RemoteMatching
from specwire.text.sandbox import Busy, packed
from tests.text.schemas import constraints, fits
from tests.text.tokenizers_for_tests import byte_level, id_of, sentencepiece_like, word_level
from tests.wait import until

ROOT = Path(specwire.text.constraints.__file__).parents[2]
VOCABULARY, END = 4096, 0
LIMIT_S = 120.0


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@cache
def demo() -> Grammars:
    return Grammars((TARGET / "tokenizer.json").read_bytes(), VOCABULARY, (END,))


def of(kind: ConstraintKind, *texts: str) -> Constraint:
    return Constraint(kind, texts)


def regex(text: str) -> Constraint:
    return of(ConstraintKind.REGEX, text)


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def only(matcher: Matching) -> Mask:
    (mask,) = matcher.masks(())
    assert mask is not None
    return mask


def written(matcher: Matching, source: random.Random, most: int = 200) -> list[int]:
    """A text of ids that may stand where they do, each as likely as another, until it ends."""
    tokens: list[int] = []
    while len(tokens) < most and (not tokens or tokens[-1] != END):
        tokens.append(int(source.choice(np.flatnonzero(only(matcher)))))
        assert matcher.take(tokens[-1:]) == 1
    return tokens


@settings(deadline=None, max_examples=60, derandomize=True)
@given(constraints, st.integers(0, 1 << 32))
def test_what_is_written_within_the_masks_fits(constraint: Constraint, seed: int) -> None:
    tokens = written(demo().begin(constraint), random.Random(seed))
    if tokens[-1] == END:
        assert fits(constraint, tokenizer().decode(tokens[:-1]))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(constraints, st.integers(0, 1 << 32))
def test_going_back_is_as_never_having_been_there(constraint: Constraint, seed: int) -> None:
    """By the masks behind every prefix; walked forth and back at random, and looked ahead from."""
    source = random.Random(seed)
    tokens = written(demo().begin(constraint), source, 24)
    known = [
        np.flatnonzero(mask).tolist() if mask is not None else None for mask in demo().begin(constraint).masks(tokens)
    ]
    assert (None in known) == (tokens[-1] == END)
    matcher = demo().begin(constraint)
    for _ in range(20):
        matcher.rollback(source.randrange(matcher.length + 1))
        start = matcher.length
        ahead = source.randrange(len(tokens) - start + 1)
        seen = matcher.masks(tokens[start : start + ahead])
        assert [np.flatnonzero(m).tolist() if m is not None else None for m in seen] == known[start : start + ahead + 1]
        assert matcher.length == start
        assert matcher.take(tokens[start : start + ahead]) == ahead
    matcher.rollback(0)
    assert written(matcher, random.Random(seed), 24) == tokens


def test_nothing_follows_what_may_not_stand_or_what_ends_the_text() -> None:
    matcher = demo().begin(regex("ab?"))
    a, b, c = (ids(letter)[0] for letter in "abc")
    assert [mask is None for mask in matcher.masks([a, c, a])] == [False, False, True, True]
    assert [mask is None for mask in matcher.masks([a, END, a])] == [False, False, True, True]
    assert [mask is None for mask in matcher.masks([END])] == [False, True]
    assert matcher.take([a, c, b]) == 1
    assert np.flatnonzero(only(matcher)).tolist() == [END, b]
    assert matcher.take([b, END, b]) == 2
    assert (matcher.masks([]), matcher.take([b]), matcher.take([END]), matcher.length) == ([None], 0, 0, 3)
    matcher.rollback(2)
    assert np.flatnonzero(only(matcher)).tolist() == [END]


def test_an_end_of_sequence_that_reads_like_text_is_none_before_the_text_may_end() -> None:
    """Tokenizers there are that call theirs no special token."""
    plain = byte_level()
    brackets = id_of(plain, "<tool>")
    json_bytes = plain.to_str().encode()
    matcher = Grammars(json_bytes, plain.get_vocab_size(), [brackets, 1]).begin(
        of(ConstraintKind.JSON_SCHEMA, '{"type": "string"}')
    )
    assert matcher.take([id_of(plain, '"')]) == 1
    assert not only(matcher)[[brackets, 1]].any()
    assert matcher.take([id_of(plain, '"')]) == 1
    assert only(matcher)[[brackets, 1]].all()


def test_a_mark_that_is_written_out_is_a_token_like_another() -> None:
    """As `</think>` and `<tool_call>` of many models: beside other texts, in the middle of a text, behind a thought."""
    known = json.loads(tokenizer().to_str())
    end, hidden = VOCABULARY, VOCABULARY + 1
    for token, name, special in ((end, "</think>", False), (hidden, "<hidden>", True)):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        known["added_tokens"].append({"id": token, "content": name, "special": special, **flags})
    grammars = Grammars(json.dumps(known).encode(), VOCABULARY + 2, (END,))
    behind = grammars.begin(Constraint(ConstraintKind.CHOICES, ("ab",), "</think>"))
    assert behind.take([*ids("why"), end]) == len(ids("why")) + 1
    told = [tokenizer().decode([int(token)]) for token in np.flatnonzero(only(behind))]
    assert {"a", "ab", "\n"} <= set(told)
    assert all(re.fullmatch(r"[ \n]{0,4}(ab?)?", text) for text in told)
    free = grammars.begin(regex("(?s:.*)"))
    assert only(free)[[end, hidden]].tolist() == [True, False]
    assert free.take([end, *ids("a"), END]) == 3
    forced = grammars.begin(of(ConstraintKind.GRAMMAR, 'start: "</think>" /a?/'))
    assert np.flatnonzero(only(forced)).tolist() == [end]


def test_ids_that_the_tokenizer_does_not_have_never_stand() -> None:
    plain = sentencepiece_like()
    size = plain.get_vocab_size()
    matcher = Grammars(plain.to_str().encode(), size + 40, [2]).begin(regex("(?s:.*)"))
    assert only(matcher).shape == (size + 40,)
    assert not only(matcher)[size:].any()
    assert only(matcher).sum() > 150


KINDS = [
    of(ConstraintKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'),
    regex("(ab|cd){1,9}x?"),
    of(ConstraintKind.CHOICES, "yes", "no", "yes and no"),
    of(ConstraintKind.GRAMMAR, 'start: "(" start ")" | /[a-z]{1,3}/'),
]

INVALID = [
    (regex("a("), "regex: at 1(8): invalid regex"),
    (regex("(?=a)b"), "look-ahead and look-behind, is not supported"),
    (of(ConstraintKind.GRAMMAR, "start: nobody"), 'grammar: at 1(8): unknown name: "nobody"'),
    (of(ConstraintKind.GRAMMAR, "no grammar"), "grammar: "),
    (of(ConstraintKind.JSON_SCHEMA, '{"type": "frob"}'), "json_schema: Invalid type: frob"),
    (of(ConstraintKind.JSON_SCHEMA, '{"not": {"type": "string"}}'), 'json_schema: Unimplemented keys: ["not"]'),
    (of(ConstraintKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}'), "json_schema: "),
    (of(ConstraintKind.JSON_SCHEMA, '{"$ref": "https://example.org/schema"}'), "json_schema: "),
    (of(ConstraintKind.JSON_SCHEMA, '{"x-guidance": {"whitespace_pattern": "("}}'), "json_schema: "),
]


@pytest.mark.parametrize(("constraint", "message"), INVALID, ids=[message[:24] for _, message in INVALID])
def test_what_is_none_is_refused_with_the_librarys_words(constraint: Constraint, message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)) as caught:
        demo().begin(constraint)
    assert caught.value.field == constraint.kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("json_bytes", [b"", word_level().to_str().encode(), b"{}"])
def test_a_tokenizer_that_cannot_be_constrained_is_refused(json_bytes: bytes) -> None:
    with pytest.raises(InvalidParameter, match="^regex: "):
        Grammars(json_bytes, 12, (1,)).begin(regex("a"))


# What callers may send


def nested(depth: int) -> str:
    return '{"items": ' * depth + "{}" + "}" * depth


# Some are within the library's limits and compute for hours all the same.
HOSTILE = {
    "many alternatives": regex("|".join(f"{number:05}x*y{{0,9}}" for number in range(3500))),
    "counted counts": regex("((a{0,999}){0,999}){0,999}"),
    "what must be remembered": regex("(.*a){20}.{300}"),
    "a wide repetition": regex("[\\w\\p{L}]{1,60000}"),
    "a long text": regex("a" * 65000),
    "deep": of(ConstraintKind.JSON_SCHEMA, nested(900)),
    "wide": of(
        ConstraintKind.JSON_SCHEMA, json.dumps({"properties": {f"p{n}": {"type": "integer"} for n in range(2000)}})
    ),
    "alternatives of alternatives": of(
        ConstraintKind.JSON_SCHEMA,
        json.dumps(
            {
                "anyOf": [
                    {"anyOf": [{"type": "object", "properties": {f"p{n}": {"minLength": n}}} for n in range(30)]}
                    for _ in range(25)
                ]
            }
        ),
    ),
    "itself": of(
        ConstraintKind.JSON_SCHEMA, '{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}'
    ),
    "all of many": of(
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}"} for n in range(60)]}),
    ),
    "ambiguous": of(ConstraintKind.GRAMMAR, 'start: start start | "a" | start "a" | "a" start\n'),
    "left and right": of(ConstraintKind.GRAMMAR, "start: " + " ".join(['("a" | "aa" | "aaa")?'] * 2800)),
    "many choices": of(ConstraintKind.CHOICES, *(f"{n}" * 12 for n in range(1000, 2024))),
}


@pytest.fixture
async def compiler() -> AsyncIterator[Compiler]:
    compiling = Compiler((TARGET / "tokenizer.json").read_bytes(), VOCABULARY, (END,))
    yield compiling
    compiling.stop()


async def test_another_process_answers_as_this_one_would(compiler: Compiler) -> None:
    """Taken, gone back on, looked ahead, asked beforehand, in any order."""
    source = random.Random(5)
    for constraint in KINDS:
        near, far = demo().begin(constraint), await compiler.begin(constraint, ())
        for _ in range(40):
            mask = near.masks(())[0]
            likely = np.flatnonzero(mask).tolist() if mask is not None else [END]
            tokens = [source.choice(likely), *source.choices(range(VOCABULARY), k=source.randrange(3))]
            if source.random() < 0.5:
                far.ask(tokens)
            if source.random() < 0.7:
                assert shown(far.masks(tokens)) == shown(near.masks(tokens))
            assert far.take(tokens) == near.take(tokens)
            assert far.length == near.length
            if source.random() < 0.4:
                back = source.randrange(near.length + 1)
                near.rollback(back)
                far.rollback(back)
        assert far.trouble == ""


def shown(masks: Sequence[Mask | None]) -> list[list[int] | None]:
    return [np.flatnonzero(mask).tolist() if mask is not None else None for mask in masks]


async def test_a_constraint_stands_behind_the_output_that_there_is(compiler: Compiler) -> None:
    matcher = await compiler.begin(regex("abc"), ids("ab"))
    assert (matcher.length, matcher.take(ids("c"))) == (len(ids("ab")), 1)
    with pytest.raises(InvalidParameter, match="regex: does not allow the output as it is, at its token 0"):
        await compiler.begin(regex("abc"), ids("x"))
    ended = await compiler.begin(regex("abc"), [*ids("abc"), END])
    assert ended.masks(()) == [None]


async def test_what_is_none_is_refused_from_there_too(compiler: Compiler) -> None:
    for constraint, message in INVALID[:3]:
        with pytest.raises(InvalidParameter, match=re.escape(message)) as caught:
            await compiler.begin(constraint, ())
        assert caught.value.field == constraint.kind


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_asks_for_too_much_costs_nobody_else_anything(name: str, compiler: Compiler) -> None:
    """It compiles or not, it goes on or gets stuck; another session's constraint answers all the while."""
    other = await compiler.begin(regex("[0-9]*"), ())
    source = random.Random(1)
    (found,) = await asyncio.gather(compiler.begin(HOSTILE[name], ()), return_exceptions=True)
    if isinstance(found, BaseException):
        assert isinstance(found, InvalidParameter | Busy)
    else:
        for _ in range(6):
            (mask,) = found.masks(())
            if mask is None or not mask.any():
                assert mask is None or found.trouble
                break
            found.take([int(source.choice(np.flatnonzero(mask)))])
            assert other.take(ids("7")) == 1
    assert other.take(ids("7")) == 1


async def test_the_loop_goes_on_meanwhile(compiler: Compiler) -> None:
    jobs = [asyncio.ensure_future(compiler.begin(regex(f"(x{n}){{0,400}}"), ())) for n in range(8)]
    turns = 0
    while not all(job.done() for job in jobs):
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 8
    assert {(await job).length for job in jobs} == {0}


async def test_what_takes_too_long_is_given_up_and_too_many_are_refused(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specwire.text.constraints, "MOST_WAITING", 2)
    jobs = [asyncio.ensure_future(compiler.begin(HOSTILE["all of many"], (), limit_s=0.2)) for _ in range(3)]
    found = await asyncio.gather(*jobs, return_exceptions=True)
    assert sorted(map(str, found)) == [
        "json_schema: 2 constraints wait to be compiled",
        "json_schema: was not compiled within 0.2 s",
        "json_schema: was not compiled within 0.2 s",
    ]
    assert (await compiler.begin(regex("a"), ())).length == 0


async def test_a_flood_of_constraints_keeps_no_other_caller_waiting(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of Bob's are compiled at a time, and take for ever: Ada's goes next once one of them is given up."""
    begun: list[str] = []
    ending = asyncio.Event()

    async def slow(constraint: Constraint, output: Sequence[int]) -> str:
        begun.append(constraint.texts[0])
        if constraint.texts[0] == "his":
            await ending.wait()
        return constraint.texts[0]

    monkeypatch.setattr(compiler, "_begun", slow)
    monkeypatch.setattr(specwire.text.constraints, "MOST_WAITING", 20)
    his = [asyncio.ensure_future(compiler.begin(regex("his"), (), whose="bob")) for _ in range(25)]
    await asyncio.sleep(0)
    hers = asyncio.ensure_future(compiler.begin(regex("hers"), (), whose="ada"))
    await until(lambda: begun == ["his"] * 4 and sum(job.done() for job in his) == 5)
    his[0].cancel()
    assert str(await hers) == "hers"
    assert begun[4] == "hers"
    his[5].cancel()  # one that waits
    ending.set()
    found = await asyncio.gather(*his, return_exceptions=True)
    kinds = Counter(type(each).__name__ for each in found)
    assert kinds == {"str": 18, "CancelledError": 2, "Busy": 5}


async def test_nothing_is_left_of_it_and_it_can_begin_again() -> None:
    compiling = Compiler((TARGET / "tokenizer.json").read_bytes(), VOCABULARY, (END,))
    held = await compiling.begin(regex("ab"), ())
    compiling.stop()
    compiling.stop()
    (mask,) = held.masks(())
    assert mask is not None
    assert not mask.any()
    assert held.trouble
    assert held.take(ids("ab")) == 0
    again = await compiling.begin(regex("ab"), ())
    assert again.take(ids("ab")) == 1
    compiling.stop()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("", "regex: needs llguidance here (pip install 'specwire[constrained]')"),
        ("1.7.6", "regex: needs llguidance 1.9 here, not 1.7.6 (pip install 'llguidance>=1.9')"),
    ],
)
async def test_without_the_library_it_says_what_to_install(
    found: str, message: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specwire.text.constraints.installed_version", lambda: found)
    with pytest.raises(NotInstalled, match=re.escape(message)):
        await compiler.begin(regex("a"), ())


def test_what_is_asked_of_the_library_is_what_the_extra_installs() -> None:
    [named] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["constrained"]
    assert named == f"{LIBRARY}>={'.'.join(map(str, LEAST))}"


async def test_nobody_is_told_of_a_lost_links_constraints(compiler: Compiler) -> None:
    told: asyncio.Queue[tuple[str, Found]] = asyncio.Queue()

    def tell(link: str) -> Callable[[Found], None]:
        return lambda found: told.put_nowait((link, found))

    beginnings = Beginnings(compiler)
    for link in ("lost", "kept"):
        beginnings.begin(link, regex("a(" if link == "lost" else "ab"), (), tell(link))
        beginnings.begin(link, regex("b("), (), tell(link))
    beginnings.begin("kept", regex("c("), (), tell("over"), handle=7)
    beginnings.lost("lost")
    beginnings.over("kept", [7, 8])
    async with asyncio.timeout(LIMIT_S):
        found = [await told.get() for _ in range(2)]
    assert [link for link, _ in found] == ["kept", "kept"]
    assert sorted(type(each).__name__ for _, each in found) == ["InvalidParameter", "RemoteMatching"]
    await beginnings.stop()
    assert not compiler.started


async def test_a_session_that_is_over_leaves_no_process(compiler: Compiler) -> None:
    held = [await compiler.begin(regex("a+"), ()) for _ in range(3)]
    process = compiler._forks.process
    assert process is not None
    assert len(children_of(process.pid)) == 3
    held.clear()
    await until(lambda: not children_of(process.pid))
    compiler.stop()
    assert process.returncode is not None


@pytest.mark.parametrize("waited_for", [False, True])
async def test_a_process_that_stands_still_is_given_up_at_a_limit(
    waited_for: bool, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who only looks whether it has answered, as a step does, waits for nothing; who needs the answer, that long."""
    monkeypatch.setattr(specwire.text.constraints, "PATIENCE_S", 0.3)
    matcher = await compiler.begin(regex("a+"), ())
    process = compiler._forks.process
    assert process is not None
    (child,) = children_of(process.pid)
    os.kill(int(child), signal.SIGSTOP)
    began = time.monotonic()
    matcher.ask(())
    if not waited_for:
        assert not matcher.heard(0.0)
        assert time.monotonic() - began < 0.3
        await until(lambda: matcher.heard(0.0))
    assert not any(mask.any() for mask in matcher.masks(()) if mask is not None)
    assert (matcher.trouble, matcher.broken) == ("did not answer within 0.3 s", True)
    assert 0.3 <= time.monotonic() - began < 10 * LIMIT_S
    os.kill(int(child), signal.SIGCONT)


async def test_an_answer_that_comes_in_parts_is_taken_in_as_it_comes() -> None:
    ours, theirs = socket.socketpair()
    matcher = RemoteMatching(ours.detach(), (), 8, (0,))
    matcher.ask((3,))
    answer = packed({"taken": 0, "rows": 2, "trouble": ""}, bytes([0b00010000, 0b10000000]))
    with theirs:
        for byte in answer[:-1]:
            theirs.send(bytes([byte]))
            assert not matcher.heard(0.0)
        theirs.send(answer[-1:])
        assert matcher.heard(LIMIT_S)
    assert matcher.known == (3,)
    assert [list(np.flatnonzero(mask)) for mask in matcher.masks((3,)) if mask is not None] == [[3], [0]]
    matcher.ask((4,))  # nobody is there any more
    assert (matcher.trouble, matcher.broken) == ("the process that holds it is gone: Broken pipe", True)


def children_of(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.mark.parametrize("seed", range(4))
def test_tokens_of_the_sentencepiece_kind_spell_what_fits(seed: int) -> None:
    """Behind a prompt, where their spaces are none at the start of a text."""
    spelling, source = sentencepiece_like(), random.Random(seed)
    grammars = Grammars(spelling.to_str().encode(), spelling.get_vocab_size(), [2])
    prompt = spelling.encode("the a", add_special_tokens=False).ids
    for constraint in (of(ConstraintKind.CHOICES, " the the", "a b日é", "the.\n"), regex("( ?[abth]){3,9}é?")):
        matcher, output = grammars.begin(constraint), [-1]
        while output[-1] != 2:
            output.append(int(source.choice(np.flatnonzero(only(matcher)))))
            assert matcher.take(output[-1:]) == 1
        written_text = spelling.decode([*prompt, *output[1:-1]])
        assert fits(constraint, written_text.removeprefix(spelling.decode(prompt)))
