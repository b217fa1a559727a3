"""The bench of heads: its settings, figures, bars and table from made samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench import heads
from bench.batch.figures import BatchSample
from bench.batch.rows import Together
from bench.harness.runs import Arrival
from bench.harness.texts import Judged, Mismatch, TextScores
from bench.heads import (
    AUTOMATIC,
    EAGLE3,
    FAR,
    LABELS,
    NGRAM,
    OFF,
    TABLE,
    TRANSFORMERS,
    HeadsResults,
    HeadsSettings,
    accepted_at,
    head_share,
    key_of,
    lines_of,
    parser,
    report,
    settings_of,
    sources,
    speed_bars,
    text_bars,
    write,
)
from demo_pair import held_out_prompts
from scripts.figures.speed import heads_table
from specwire.client import Timings
from specwire.client.events import Stats
from tests.bench.batch.made import step, timed_run

# Seconds of a session's 10 tokens, by row; ten times as long in the last turn of every row.
SECONDS = {OFF: 0.12, FAR: 0.11, NGRAM: 0.14, TABLE: 0.13, EAGLE3: 0.08, AUTOMATIC: 0.1}
SINGLES = "the best single source (eagle3 of far, ngram, table, eagle3)"
PLACES = [(level, temperature) for level in (1, 16) for temperature in (0.0, 0.8)]
STATS = Stats(tested_at=(4, 2), accepted_at=(2, 1), tested=6, accepted=3, tested_head=4, accepted_head=2)


def made() -> Iterator[BatchSample]:
    for level, temperature in PLACES:
        for turn in range(9):
            for row, seconds in SECONDS.items():
                took = seconds * (10 if turn == 8 else 1)
                stats = STATS if row in (EAGLE3, AUTOMATIC) else Stats()
                run = replace(timed_run(took, [step(number, level) for number in range(5)]), stats=stats)
                yield BatchSample(level, turn, turn * level, key_of(row, temperature), Together(took, (run,) * level))


SAMPLES = list(made())


def test_figures_of_a_row() -> None:
    found = {(line.level, line.temperature, line.row): line for line in lines_of(SAMPLES, {EAGLE3: "torch"})}
    assert list(found) == [(*place, row) for place in PLACES for row in SECONDS]
    line = found[16, 0.8, EAGLE3]
    assert line.tokens_per_second.value == pytest.approx(16 * 10 / 0.08)
    assert [line.to_off.value, line.to_off.low, line.of_all] == pytest.approx([1.5] * 3)
    assert (line.tokens_per_forward, line.label, line.runtime) == (2.0, LABELS[EAGLE3], "torch")
    assert line.accepted_at == (0.5, 0.5)
    assert line.sources == {"drafter": (2 * 16 * 9, 16 * 9), "head": (4 * 16 * 9, 2 * 16 * 9)}
    assert line.different == 0
    assert found[1, 0.0, OFF].sources == {}
    assert found[1, 0.0, OFF].accepted_at == ()


def arriving(every_ms: int, tokens: int) -> tuple[Arrival, ...]:
    return tuple(Arrival(1, at * every_ms * 10**6) for at in range(1, tokens + 1))


def test_what_counts_apart_is_the_time_while_all_decode() -> None:
    """With a head the tokens of one of two texts come twice as fast, and it ends first."""
    plain, fast = (replace(timed_run(0.08, []), forwards=4, arrivals=arriving(*each)) for each in ((20, 4), (10, 6)))
    rows = {OFF: (plain, plain), EAGLE3: (plain, fast)}
    found = lines_of([BatchSample(2, 0, 0, row, Together(0.08, runs)) for row, runs in rows.items()], {})
    ratios = {line.row: line.full_to_off.value for line in found if line.full_to_off is not None}
    assert ratios == pytest.approx({OFF: 1.0, EAGLE3: (6 / 0.04) / (6 / 0.06)})


def test_a_peer_is_held_against_greedy_texts() -> None:
    peer = [
        BatchSample(1, turn, turn, TRANSFORMERS, Together(0.24, (timed_run(0.24, [step(1, 1)]),))) for turn in (0, 1)
    ]
    (line,) = [one for one in lines_of([*SAMPLES, *peer], {}) if one.row == TRANSFORMERS]
    assert (line.temperature, line.runtime) == (0.0, "")
    assert line.to_off.value == pytest.approx(0.5)


def test_acceptance_is_of_what_was_tested_at_a_position() -> None:
    each = [replace(STATS, tested_at=(4,), accepted_at=(3,)), STATS]
    assert accepted_at(each) == (0.625, 0.5)
    assert accepted_at([]) == ()
    assert sources([replace(STATS, tested=6, tested_ngram=2, accepted_ngram=1)]) == {"ngram": (2, 1), "head": (4, 2)}


def test_the_heads_share_counts_each_step_once() -> None:
    timings = [Timings(1, 2, 3, 4, replace(step(number, 1), drafted_us=800)) for number in (1, 2)]
    run = replace(timed_run(1.0, []), arrivals=tuple(Arrival(1, 1, each) for each in timings))
    assert head_share([BatchSample(2, 0, 0, EAGLE3, Together(1.0, (run, run)))]) == pytest.approx(800 / 3000)
    assert head_share(SAMPLES) is None


def test_bars() -> None:
    found = [
        (bar.name, round(bar.value, 3), bar.needed, bar.holds) for bar in speed_bars(SAMPLES, lines_of(SAMPLES, {}))
    ]
    assert found == [
        ("1 at once, eagle3 / off", 1.5, 1.25, True),
        ("1 at once, automatic / off", 1.2, 0.97, True),
        (f"1 at once, automatic / {SINGLES}", 0.8, 0.97, False),
        ("1 at once, temperature 0.8, eagle3 / off", 1.5, 1.15, True),
        ("1 at once, temperature 0.8, automatic / off", 1.2, 0.97, True),
        (f"1 at once, temperature 0.8, automatic / {SINGLES}", 0.8, 0.97, False),
        ("16 at once, eagle3 / off", 1.5, 1.05, True),
        ("16 at once, automatic / off", 1.2, 0.97, True),
        (f"16 at once, automatic / {SINGLES}", 0.8, 0.97, False),
        ("16 at once, temperature 0.8, eagle3 / off", 1.5, 1.05, True),
        ("16 at once, temperature 0.8, automatic / off", 1.2, 0.97, True),
        (f"16 at once, temperature 0.8, automatic / {SINGLES}", 0.8, 0.97, False),
    ]
    assert list(speed_bars(SAMPLES, [line for line in lines_of(SAMPLES, {}) if line.row == OFF])) == []


@pytest.mark.parametrize(
    ("singles", "said"),
    [
        ((NGRAM, EAGLE3), "eagle3 of ngram, eagle3"),
        ((FAR, NGRAM, TABLE), "far of far, ngram, table"),
        ((EAGLE3,), None),
        ((), None),
    ],
)
def test_all_together_are_held_against_the_best_of_the_rows_that_are_there(
    singles: tuple[str, ...], said: str | None
) -> None:
    lines = [line for line in lines_of(SAMPLES, {}) if line.row in (OFF, AUTOMATIC, *singles)]
    names = [bar.name for bar in speed_bars(SAMPLES, lines) if "best" in bar.name]
    wanted = f"1 at once, {AUTOMATIC} / the best single source ({said})"
    assert (names[0], len(names)) == (wanted, len(PLACES)) if said else names == []


def judged(near_tie: bool) -> Judged:
    return Judged(Mismatch(EAGLE3, 3, 1, 2, 9), 0.0, TextScores((2, 9), (4.0, 4.0), (4.0, 4.0)), near_tie)


def test_a_text_may_differ_at_a_near_tie_only() -> None:
    held, missed = text_bars({1: [judged(True)], 16: [judged(False)]})
    assert (held.value, held.holds) == (0, True)
    assert (missed.name.partition(",")[0], missed.value, missed.holds) == ("texts", 1, False)


def test_the_table_and_the_file_say_all(tmp_path: Path) -> None:
    lines = lines_of(SAMPLES, {})
    bars = [*speed_bars(SAMPLES, lines), *text_bars({1: [judged(True)]})]
    arguments = {"prompts": 32, "tokens": 128, "dtype": "bfloat16"}
    found = HeadsResults(arguments, lines, bars, {1: [judged(True)]}, {}, SAMPLES, ["a note"])
    printed = report(found)
    for words in (*(LABELS[row] for row in SECONDS), "MISSED", "head 288/576", "cover 96.1%", "a note"):
        assert words in printed
    write(found, tmp_path / "heads.json")
    written = json.loads((tmp_path / "heads.json").read_text())
    assert written["name"] == "heads"
    assert written["mismatches"][0]["mismatch"]["row"] == EAGLE3
    assert len(written["raw"]) == len(SAMPLES)
    shown = heads_table(written)
    assert "| 16 | 0.8 | EAGLE-3 head | 2000 | 1.50 (1.50 to 1.50) | 1.00 (1.00 to 1.00) | 2.00 | 0.50 0.50 |" in shown
    assert "a note" in shown


def test_a_level_has_turns_enough() -> None:
    asked = HeadsSettings("a", "b", Path("c"), Path("d"), "self:skip=3")
    groups = {level: len(asked.groups(level)) * asked.rounds_of(level) for level in asked.sessions}
    assert groups == {1: 32, 4: 16, 16: 10, 32: 9}
    assert [replace(asked, rounds=2).rounds_of(level) for level in asked.sessions] == [2] * 4
    assert asked.wants(FAR)
    only = replace(asked, only=(EAGLE3,))
    assert [row for row in LABELS if only.wants(row)] == [OFF, EAGLE3]


def test_no_path_of_this_machine_is_recorded(tmp_path: Path) -> None:
    words = ["--dtype", "float32", "--head", str(tmp_path / "head"), "--sessions", "2,1", "--only", "far,self"]
    words += ["--corpus", str(tmp_path / "texts")]
    asked = settings_of(parser().parse_args(words))
    assert (asked.sessions, asked.only) == ((1, 2), (FAR, "self"))
    shown = asked.shown()
    assert (shown["target"], shown["head"], shown["trained"]) == ("demo_pair/target", "head", "build/heads")
    assert shown["corpus"] == ["texts"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompts", "0"], f"prompts: must be from 1 to {len(held_out_prompts())}, not 0"),
        (["--prompts", "4", "--sessions", "1,8"], "sessions: must each be from 1 to the 4 prompts"),
        (["--sessions", "x"], "sessions: must be numbers with commas between them, not 'x'"),
        (["--tokens", "0"], "tokens: must be at least 1, not 0"),
        (["--rounds", "0"], "rounds: must be at least 1, not 0"),
        (["--target-threads", "0"], "target-threads: must be at least 1, not 0"),
        (["--only", "all"], f"only: there is no row 'all', only {', '.join(LABELS)}"),
    ],
)
def test_wrong_settings_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert heads.main([*words, "--dtype", "float32"]) == 2
    assert capsys.readouterr().err == f"bench: error: {said}\n"
