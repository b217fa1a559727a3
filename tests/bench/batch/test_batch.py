"""Many sessions at once: figures, bars, tables and files from made samples; our row against a made-up client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from bench.batch import settings
from bench.batch.arrivals import ArrivalLoad, LatencyTarget, LoadSample, ServedArrival, due_times, load_lines, serve
from bench.batch.figures import BatchSample, full_steps, lines, pauses_ms, text_ratio, unknown
from bench.batch.judged import JudgedText, bars
from bench.batch.measure import BatchResults
from bench.batch.plot import draw
from bench.batch.report import report, write
from bench.batch.rows import AUTOMATIC, OFF, ON, OURS, PADDED, OurRow, Together
from bench.batch.sessions import Asked
from bench.harness.runs import BenchError
from bench.harness.texts import Judged, Mismatch, TextScores
from scripts.figures.speed import batch_table
from specwire.client import AsyncClient, Chunk, Event, Finished, SpecwireError, Started
from specwire.client.events import SamplingInForce, Stats
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FinishReason, Outcome
from tests.bench.batch.made import made, step, timed_run

SAMPLING = SamplingInForce(0.0, 0, 1.0, 1, "greedy")


def test_speeds_are_of_all_sessions_together_and_ratios_within_a_repeat() -> None:
    found = {(line.level, line.row): line for line in lines(made())}
    assert found[1, OFF].tokens_per_second.value == pytest.approx(10 / (0.10 * 1.3))
    assert found[16, OFF].tokens_per_second.value == pytest.approx(160 / (0.10 * 16 * 1.3))
    assert found[16, AUTOMATIC].to_off.low == pytest.approx(2.0)
    full = found[16, AUTOMATIC].full_to_off
    assert full is not None
    assert full.value == 1.0  # the made arrivals take as long in every row
    assert found[16, PADDED].outside is None
    assert found[16, OFF].pause_p50_ms == pytest.approx(10.0)
    outside = found[16, AUTOMATIC].outside
    assert outside is not None
    assert (outside.step_us.value, outside.session_us, outside.share.value) == (200.0, 12.5, 0.1)


def test_a_full_batch_is_measured_until_its_first_session_ends() -> None:
    short, long = (timed_run(1.0, [step(number, 2) for number in range(steps)]) for steps in (5, 9))
    slow = replace(long, arrivals=tuple(replace(each, received_ns=2 * each.received_ns) for each in long.arrivals))
    made_up = [BatchSample(2, 0, 0, row, Together(1.0, (short, each))) for row, each in ((OFF, long), (ON, slow))]
    found = {line.row: line for line in lines(made_up)}
    assert (found[OFF].to_off.value, found[ON].to_off.value) == (1.0, 1.0)
    # In 40 ms, from 10 ms on, two sessions decode 4 each; in 30 ms, from 20 ms on, they decode 3 and 1.
    full = found[ON].full_to_off
    assert full is not None
    assert full.value == pytest.approx((4 / 30) / (8 / 40))


def test_where_sessions_never_met_in_a_step_it_is_said_that_nothing_is_known() -> None:
    samples = [replace(each, level=3) for each in made(levels=(2,))]
    found = lines([replace(each, together=Together(1.0, each.together.runs[:1])) for each in samples])
    assert [line.outside for line in found] == [None] * 9
    assert [note.partition(":")[0] for note in unknown(found)] == [f"3 at once, {row}" for row in OURS]


def test_a_step_counts_once_where_all_sessions_took_part_and_never_the_first() -> None:
    run = timed_run(1.0, [step(4, 2), step(5, 2), step(6, 1), step(7, 2)])
    other = timed_run(1.0, [step(4, 2), step(5, 2), step(7, 2)])
    assert [each.number for each in full_steps([run, other])] == [5, 7]
    assert pauses_ms(run) == [10.0, 10.0, 10.0]


def test_bars() -> None:
    samples = made()
    wrong = Judged(Mismatch(AUTOMATIC, 3, 1, 2, 9), 0.5, TextScores((2, 9), (4.0, 3.5), (4.0, 3.5)), near_tie=False)
    tie = Judged(Mismatch(OFF, 3, 1, 2, 9), 0.0, TextScores((2, 9), (4.0, 4.0), (4.0, 4.0)), near_tie=True)
    judged = bars(samples, lines(samples), [JudgedText(16, wrong), JudgedText(16, tie)])
    assert [(bar.name, round(bar.value, 3), bar.needed, bar.holds) for bar in judged] == [
        ("1 at once, automatic / off", 2.0, 0.98, True),
        ("1 at once, automatic / off, alone", 2.0, 1.3, True),
        ("1 at once, automatic with a head / off", 2.5, 0.98, True),
        ("1 at once, temperature 0.8, automatic / off", 1.25, 0.98, True),
        ("1 at once, temperature 0.8, automatic with a head / off", 0.8, 0.98, False),
        ("16 at once, automatic / off", 2.0, 0.98, True),
        ("16 at once, automatic with a head / off", 2.5, 0.98, True),
        ("16 at once, temperature 0.8, automatic / off", 1.25, 0.98, True),
        ("16 at once, temperature 0.8, automatic with a head / off", 0.8, 0.98, False),
        ("16 at once, off / the better peer (continuous)", 0.8, 0.9, False),
        ("16 at once, automatic / the better peer (continuous)", 1.6, 1.0, True),
        ("16 at once, off: between forwards / forward, p50", 0.1, 0.2, True),
        ("16 at once, automatic: between forwards / forward, p50", 0.1, 0.2, True),
        ("texts of row off that differ from drafting off", 0.0, 0, True),
        ("texts of row on that differ from drafting off", 0.0, 0, True),
        ("texts of row automatic that differ from drafting off", 1.0, 0, False),
        ("texts of row automatic, head that differ from drafting off", 0.0, 0, True),
    ]


def test_without_level_16_nobody_is_compared_with_a_peer() -> None:
    samples = made(levels=(2,))
    names = [bar.name for bar in bars(samples, lines(samples), [])]
    assert names[0] == "2 at once, automatic / off"
    assert not any("peer" in name for name in names)


def served(first_ms: float, count: int = 3) -> ServedArrival:
    run = timed_run(1.0, [step(number, 1) for number in range(count)])
    return ServedArrival(0.0, 2.0, run, late=first_ms / 1e3 - run.first_token_seconds)


def test_tokens_of_requests_that_were_late_or_refused_are_no_goodput() -> None:
    load = ArrivalLoad(0.5, 3.0, seed=1)
    sample = LoadSample(load, OFF, (served(150.0), served(400.0), ServedArrival(0.0, 0.1, None)))
    target = LatencyTarget(first_ms=200.0, pause_ms=20.0)
    assert sample.tokens_per_second == 10.0
    assert sample.goodput(target) == 5.0
    assert sample.goodput(LatencyTarget(200.0, 5.0)) == 0.0
    (line,) = load_lines([sample], target)
    assert line.refused == 1
    assert line.in_time == pytest.approx(1 / 3)
    assert line.first_p50_ms == pytest.approx(275.0)


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    load = ArrivalLoad(0.5, 4.0, seed=2)
    times = due_times(load, 400)
    assert times == due_times(load, 400)
    assert times != due_times(ArrivalLoad(0.5, 4.0, seed=3), 400)
    assert times[-1] / 400 == pytest.approx(1 / 4, rel=0.2)


def results() -> BatchResults:
    samples = made()
    loads = [LoadSample(ArrivalLoad(0.5, 3.0, 1), row, (served(150.0),)) for row in (OFF, AUTOMATIC)]
    found = lines(samples)
    tie = Judged(Mismatch(AUTOMATIC, 3, 1, 2, 9), 0.0, TextScores((2, 9), (4.0, 4.0), (4.0, 4.0)), near_tie=True)
    texts = [JudgedText(16, tie)]
    return BatchResults(
        arguments={"tokens": 10, "repeats": 7, "dtype": "bfloat16"},
        machine={"cpu": "a cpu", "cores": 2},
        commit=None,
        lines=found,
        loads=load_lines(loads, LatencyTarget(200.0, 20.0)),
        bars=bars(samples, found, texts),
        texts=texts,
        cores={},
        samples=samples,
        load_samples=loads,
        notes=["a note"],
    )


def test_the_table_the_file_and_the_picture_say_all(tmp_path: Path) -> None:
    found = results()
    printed = report(found)
    for words in ("transformers, static batch", "MISSED", "1 first differences, near-ties", "50% of off", "a note"):
        assert words in printed
    assert found.texts_hold
    write(found, tmp_path / "batch.json")
    written = json.loads((tmp_path / "batch.json").read_text())
    assert written["name"] == "batch"
    assert len(written["raw"]) == 2 * 7 * 9
    assert len(written["raw"][-1]["sessions"]) == 16
    assert "specwire, drafting automatic" in batch_table(written)
    draw(found.lines, tmp_path / "batch.png")
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")


def test_a_text_on_average_is_not_the_last_one() -> None:
    """Off has both after 4 s; automatic one after 1 and one after 5, in the second repeat 2 and 6."""
    seconds = {(OFF, 0): (4.0, 4.0), (OFF, 1): (4.0, 4.0), (AUTOMATIC, 0): (1.0, 5.0), (AUTOMATIC, 1): (2.0, 6.0)}
    raw = [
        {"level": 2, "repeat": repeat, "row": row, "sessions": [{"seconds": each} for each in texts]}
        for (row, repeat), texts in seconds.items()
    ]
    others = [{**run, "level": 4, "sessions": [{"seconds": 99.0}]} for run in raw]
    found = text_ratio([*raw, *others], 2, AUTOMATIC)
    assert found.low == 1.0
    assert found.high == pytest.approx(8 / 6)
    assert text_ratio([*raw, *others], 2, OFF).value == 1.0


class MadeClient:
    """A service that says `tokens` tokens to everybody, or refuses."""

    def __init__(self, tokens: int, refuses: bool = False) -> None:
        self.tokens, self.refuses = tokens, refuses
        self.asked: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.running = self.most = 0

    async def generate(self, prompt: Sequence[int], **options: Any) -> AsyncGenerator[Event, None]:
        if self.refuses:
            raise SpecwireError(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot")
        self.asked.append(options)
        self.running += 1
        self.most = max(self.most, self.running)
        yield Started(f"session {prompt[0]}", len(prompt), SAMPLING, 1)
        for token in range(self.tokens):
            await asyncio.sleep(0)
            yield Chunk(token, (token,), (Outcome.DIRECT,), "", (0,), None, token + 2)
        self.running -= 1
        yield Finished(FinishReason.LENGTH, "", "", 0, Stats(target_forwards=self.tokens), 9)

    async def delete_session(self, session_id: str, *, timeout: float) -> None:
        self.deleted.append(session_id)


def asked(client: MadeClient, drafting: bool = True) -> Asked:
    return Asked(cast(AsyncClient, client), "a row", drafting)


def test_sessions_of_a_group_run_at_once_and_leave_nothing_behind() -> None:
    client = MadeClient(tokens=3)
    with asyncio.Runner() as runner:
        together = OurRow(OFF, runner, asked(client, drafting=False)).run([[1], [2], [3]], 3)
    assert client.most == 3
    assert sorted(client.deleted) == ["session 1", "session 2", "session 3"]
    assert all(options["drafting"] is False and options["ignore_eos"] for options in client.asked)
    assert [run.tokens for run in together.runs] == [(0, 1, 2)] * 3
    assert together.seconds > 0


def test_a_session_that_gives_too_few_tokens_fails_the_measurement_in_a_sentence() -> None:
    with asyncio.Runner() as runner, pytest.raises(BenchError, match="a row: gave 2 tokens, not 3"):
        OurRow(OFF, runner, asked(MadeClient(tokens=2))).run([[1], [2]], 3)


def test_a_session_that_is_refused_fails_it_likewise() -> None:
    with asyncio.Runner() as runner, pytest.raises(BenchError, match="a row: RESOURCE_EXHAUSTED: no slot"):
        OurRow(OFF, runner, asked(MadeClient(tokens=2, refuses=True))).run([[1], [2]], 2)


async def test_requests_are_asked_for_when_they_are_due_whatever_became_of_others() -> None:
    client = MadeClient(tokens=2)
    found = await serve(asked(client), [[1], [2]], 2, [0.0, 0.01, 0.02])
    assert [each.due for each in found] == [0.0, 0.01, 0.02]
    assert all(each.run is not None and each.ended >= each.due for each in found)
    assert client.deleted == ["session 1", "session 2", "session 1"]
    refused = await serve(asked(MadeClient(tokens=2, refuses=True)), [[1]], 2, [0.0])
    assert refused[0].run is None


def test_settings() -> None:
    found = settings.settings_of(settings.parser().parse_args(["--quick", "--levels", "4,1", "--no-ray"]))
    assert (found.levels, found.tokens, found.repeats, found.most, found.prompts) == ((1, 4), 8, 1, 4, 16)
    assert (found.groups(1), found.groups(4)) == ([*range(8)], [0, 4, 8, 12])
    full = settings.BatchSettings("t", "d")
    assert (full.groups(32), full.groups(64), full.prompts) == ([0, 32], [0], 64)
    for words in (
        ["--levels", "0"],
        ["--levels", "x"],
        ["--tokens", "1"],
        ["--plan", "lockstep"],
        ["--target-threads", "0"],
    ):
        with pytest.raises(InvalidParameter):
            settings.settings_of(settings.parser().parse_args(words))
