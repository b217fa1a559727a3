"""The judges of a soak see what is wrong, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.soak import run
from bench.soak.checks import CheckKind, check, mismatches
from bench.soak.jobs import Job, Manner, SoakPair, draw, scripted
from bench.soak.neighbour import KINDS, Neighbour, dead_end, ends_of_ranges, long_note, many_numbers, many_parts
from bench.soak.reader import Told
from bench.soak.report import SoakReport, Tally
from specwire.client import Chunk, Finished, SessionState, Stats
from specwire.core.invalid import InvalidParameter
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason, Outcome
from specwire.lm import Feed
from tests.orchestrator.stack import TARGET, plain, stack

SAMPLING = Sampling(temperature=0.9, top_k=20, seed=5)
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def pair() -> SoakPair:
    return scripted()


def a_job(**changes: object) -> Job:
    plain = Job(0, PROMPT, 40, Sampling(), True, (), "", Manner.READ, 0, (), False)
    return replace(plain, **changes)  # type: ignore[arg-type]  # any field, by name


def text_of(pair: SoakPair, length: int, sampling: Sampling) -> list[int]:
    """By the target, token after token."""
    text = list(PROMPT)
    pair.model.rollback(0, 0)
    for _ in range(length):
        cached = pair.model.cached(0)
        row = pair.model.forward([Feed(0, cached, text[cached:], 1)])[0].numpy()
        text.append(choose(row, len(text), sampling))
    return text[len(PROMPT) :]


def told(job: Job, tokens: list[int], end: FinishReason | None = FinishReason.LENGTH, text: str = "") -> Told:
    it = Told(job, "id", list(tokens), text or " ".join(map(str, tokens)), end)
    it.log = SessionState(len(PROMPT), (*PROMPT, *tokens), end, 1)
    return it


def kinds(pair: SoakPair, it: Told) -> list[CheckKind]:
    return [one.kind for one in check(pair, it)]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING])
def test_a_right_text_is_right_and_one_wrong_token_is_found(pair: SoakPair, sampling: Sampling) -> None:
    tokens = text_of(pair, 40, sampling)
    assert kinds(pair, told(a_job(sampling=sampling), tokens)) == []
    wrong = [*tokens[:-1], tokens[-1] % 63 + 1]
    (found,) = mismatches(pair, a_job(sampling=sampling), wrong)
    assert (found.at, found.expected, found.got) == (39, tokens[-1], wrong[-1])
    assert found.gap > 0


def test_a_near_tie_is_no_mismatch(pair: SoakPair) -> None:
    tokens = text_of(pair, 40, Sampling())
    wrong = [*tokens[:-1], tokens[-1] % 63 + 1]
    assert kinds(replace(pair, tie=100.0), told(a_job(), wrong)) == [CheckKind.NEAR_TIE]
    assert kinds(pair, told(a_job(), wrong)) == [CheckKind.MISMATCH]


def test_the_end(pair: SoakPair) -> None:
    tokens = text_of(pair, 40, Sampling())
    text = " ".join(map(str, tokens))
    assert kinds(pair, told(a_job(), tokens[:30])) == [CheckKind.END]
    assert kinds(pair, told(a_job(length=30), tokens)) == [CheckKind.END, CheckKind.TEXT]
    assert kinds(pair, told(a_job(), tokens[:30], None)) == [CheckKind.END]
    assert kinds(pair, told(a_job(), tokens[:30], FinishReason.CANCELLED)) == [CheckKind.END]
    assert kinds(pair, told(a_job(manner=Manner.CANCEL), tokens[:30], FinishReason.CANCELLED)) == []
    assert kinds(pair, told(a_job(manner=Manner.LEAVE), tokens[:30], None)) == []
    late = told(a_job(manner=Manner.LEAVE), tokens[:30], FinishReason.DEADLINE)
    assert kinds(pair, late) == [CheckKind.END]
    assert kinds(pair, replace(late, orphan=True)) == []
    assert kinds(pair, told(a_job(manner=Manner.CANCEL), tokens[:30], FinishReason.DEADLINE)) == [CheckKind.END]
    stop = " ".join(map(str, tokens[10:12]))
    stopped = told(a_job(stop=(stop,)), tokens[:12], FinishReason.STOP_STRING, text[: text.index(stop)])
    assert kinds(pair, stopped) == []
    assert kinds(pair, told(a_job(stop=(stop,)), tokens)) == [CheckKind.END, CheckKind.TEXT]


def test_what_the_log_and_another_reader_say(pair: SoakPair) -> None:
    tokens = text_of(pair, 40, Sampling())
    it = told(a_job(), tokens)
    it.second = tokens[:-1]
    it.log = SessionState(len(PROMPT), (*PROMPT, *tokens, 1), FinishReason.EOS, 1)
    assert kinds(pair, it) == [CheckKind.LOG, CheckKind.LOG, CheckKind.READER]


def test_positions_are_counted() -> None:
    it = Told(a_job())
    for position in (3, 5, 4):
        it.add(Chunk(position, (1, 2), (Outcome.DIRECT,) * 2, "", (), None, 0), 0.5)
    it.add(Finished(FinishReason.LENGTH, "", "", 0, Stats(), 0), 0.0)
    assert (it.lost, it.repeated, it.waits) == (0, 3, [0.5, 0.5])
    it.add(Chunk(12, (1,), (Outcome.DIRECT,), "", (), None, 0), 0.0)
    assert it.lost == 3


def test_sessions_are_a_function_of_the_seed(pair: SoakPair) -> None:
    jobs = [draw(pair, 1, number) for number in range(200)]
    assert jobs == [draw(pair, 1, number) for number in range(200)]
    assert jobs != [draw(pair, 2, number) for number in range(200)]
    assert {job.manner for job in jobs} == set(Manner)
    for part in ("stop", "request_id", "pauses", "second", "ignore_eos"):
        assert {bool(getattr(job, part)) for job in jobs} == {True, False}
    assert {job.sampling.temperature == 0.0 for job in jobs} == {True, False}


def test_the_report(pair: SoakPair, tmp_path: Path) -> None:
    tally = Tally()
    right = told(a_job(), text_of(pair, 40, Sampling()))
    right.waits = [0.1, 0.2]
    tally.add(right, [])
    report = a_report(tally)
    assert report.holds
    wrong = told(a_job(), [1] * 40)
    tally.add(wrong, check(pair, wrong))
    assert not report.holds
    assert [bar.name for bar in report.bars if not bar.holds] == ["mismatches"]
    assert "session 0: mismatch" in report.shown()
    tally.add(replace(right, orphan=True), [])
    tally.orphans = 1
    assert [bar.name for bar in report.bars if not bar.holds][-1] == "sessions that were left and that nobody ended"
    report.write(tmp_path / "soak.json")
    written = json.loads((tmp_path / "soak.json").read_text())
    assert (written["sessions"], written["tokens"], written["name"]) == (2, 80, "soak")
    assert written["longest_pause_of_a_session_s"] == {"p50": 0.2, "p99": 0.2, "max": 0.2}


FILED = {"greedy RESOURCE_EXHAUSTED": 1, "cut": 1}


def a_report(tally: Tally) -> SoakReport:
    """Of a minute."""
    faults = Counter({"redis killed": 1})
    return SoakReport({}, {}, 1.0, 60.0, 65.0, tally, faults, 2, {}, len(KINDS), FILED, [], 0, False)


async def test_a_neighbour_is_answered_and_hurts_nobody() -> None:
    async with stack() as parts:
        neighbour = Neighbour((parts.orchestrator.address,), 1)
        for kind in KINDS:
            await neighbour.ask(kind, parts.orchestrator.address)
        done = await parts.client.complete(PROMPT, max_tokens=5, ignore_eos=True)
        assert list(done.tokens) == plain(TARGET, PROMPT, 5)
    assert neighbour.kinds == len(KINDS)
    refused = [f"{kind.__name__} INVALID_ARGUMENT" for kind in (dead_end, ends_of_ranges, many_parts, many_numbers)]
    left = {"left_scores DEADLINE_EXCEEDED", "left_scores OK"}
    assert neighbour.answers.keys() - left == {*refused, f"{long_note.__name__} OK"}


def test_what_shows_little_does_not_hold() -> None:
    report = a_report(Tally())
    long = replace(report, asked_minutes=10.0, lasted_s=600.0)
    for wrong, bar in (
        (replace(report, lasted_s=59.0), "minutes"),
        (replace(report, faults={}), "kinds of faults"),
        (long, "kinds of faults"),
        (replace(report, asked_kinds=0), "kinds of a neighbour's requests"),
        (replace(report, filed={"cut": 1}), "notes refused by a full part of a log"),
        (replace(report, filed={**FILED, "cut": 0}), "cuts of a log in a file"),
        (replace(long, kinds=1, asked_kinds=len(KINDS) - 1), "kinds of a neighbour's requests"),
        (replace(report, interrupted=True), "interruptions"),
    ):
        assert [one.name for one in wrong.bars if not one.holds] == [bar]
        assert not wrong.whole
    assert report.holds
    assert not report.whole
    assert replace(long, kinds=1).whole


@pytest.mark.parametrize("words", [["--minutes", "-1"], ["--sessions", "0"], ["--every", "nan"]])
def test_settings_are_checked(words: list[str]) -> None:
    with pytest.raises(InvalidParameter, match=words[0].removeprefix("--")):
        run.settings_of(run.parser().parse_args(words))
