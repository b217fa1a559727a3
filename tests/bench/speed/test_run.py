"""The command line, the pieces' turns, and the journal by which a run goes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import demo_pair
from bench.harness import machine
from bench.harness.child import BenchChild
from bench.harness.runs import Arrival, BenchError, Run
from bench.harness.sessions import Together
from bench.speed import prompts, rows, run
from bench.speed.rows import FAR_20, LLAMACPP, OFF, SpeedRow
from bench.speed.run import DEMO, MODELS, PIECES, Journal, Piece, SpeedTurn, parser, settings_of, turns_of
from specwire.client import Timings
from specwire.client.events import Stats, Step
from specwire.core.invalid import InvalidParameter

MAIN = Piece("main", (OFF, LLAMACPP))
MS = 1_000_000


def asked(*words: str) -> argparse.Namespace:
    return parser().parse_args([*words])


def test_usual_settings_are_both_models_and_all_pieces() -> None:
    first, second = settings_of(asked())
    assert (first.name, second.name) == MODELS
    assert first.pieces == PIECES
    assert (first.models.target, first.models.draft) == ("smollm2-135m", None)
    assert second.models.draft == "smollm2-135m"
    assert str(second.models.peer_draft).endswith("build/models/smollm2-135m.gguf")
    assert all(piece.rows[0] == OFF for piece in PIECES)
    (short,) = settings_of(asked("smollm2-135m", "--short"))
    assert short.prompts == run.SHORT_PROMPTS
    assert "long" not in [piece.name for piece in short.pieces]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tokens", "0"], "tokens"),
        (["--sessions", "4,x"], "sessions"),
        (["--pieces", "main,best"], "pieces.*'best'"),
        (["llama"], "models.*'llama'"),
        (["--target", "here"], "target"),
        (["main", "box", "--record", "one"], "record"),
        (["main", "--pieces", "many"], "pieces.*'many', only main, openvino"),
    ],
)
def test_what_is_wrong_is_named(words: Sequence[str], told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        settings_of(asked(*words))


def test_a_turn_is_a_prompt_at_both_temperatures() -> None:
    (settings,) = settings_of(asked(DEMO))
    turns = turns_of(MAIN, settings, 3)
    assert turns[:2] == [SpeedTurn("main", 1, 0.0, 96, (0,)), SpeedTurn("main", 1, 0.8, 96, (0,))]
    assert len(turns) == 6
    long = turns_of(Piece("long", (OFF,), tokens=256, prompts=2), settings, 3)
    assert [(turn.tokens, turn.prompts) for turn in long] == [(256, (0,)), (256, (0,)), (256, (1,)), (256, (1,))]
    many = turns_of(Piece("many", (OFF,), levels=(4, 16)), settings, 12)
    assert {turn.level for turn in many} == {4}


def test_a_suite_is_of_the_included_pair_at_its_own_levels() -> None:
    (batch,) = settings_of(asked("batch", "--dtype", "float32"))
    assert batch.record == "batch"
    assert str(demo_pair.TARGET) == batch.models.target == batch.models.peer_target
    assert batch.models.words == ("--dtype", "float32")
    assert {turn.level for turn in turns_of(batch.pieces[0], batch, 40)} == set(run.LEVELS)
    (heads,) = settings_of(asked("heads", "--dtype", "float32", "--record", "heads_ordinary", "--sessions", "1,4"))
    assert (heads.record, heads.models.one_tenant) == ("heads_ordinary", True)
    assert {turn.level for turn in turns_of(heads.pieces[0], heads, 40)} == {1, 4}
    assert all(piece.rows[0] == OFF for pieces in run.SUITES.values() for piece in pieces)
    assert all(
        key in (*rows.OURS, *rows.LIBRARIES) for pieces in run.SUITES.values() for one in pieces for key in one.rows
    )


def test_pauses_and_the_way_to_the_client_are_medians() -> None:
    """Chunks 10 ms apart, but for one; the way of each took 1, 2, 3 and 4 ms."""
    arrivals = [arrival(ended) for ended in (10, 20, 30, 40, 80)]
    found = Run((1,) * 5, 1.0, 0.1, 5, arrivals=tuple(arrivals))
    assert run.pauses_ms(found) == [10.0, 35.5]
    assert run.delivery_ms(found) == dict(zip(run.WAY, (1.0, 2.0, 3.0, 4.0, 10.0), strict=True))
    assert run.pauses_ms(Run((1,), 1.0, 0.1, 1)) == []
    assert run.delivery_ms(Run((1,), 1.0, 0.1, 1)) == {}


def arrival(ended_ms: int) -> Arrival:
    step = Step(1, sessions=1, rows=1, forward_us=0, choose_us=0, gap_us=0, waited_us=0)
    ended, received, durable, emitted = ((ended_ms + later) * MS for later in (0, 1, 3, 6))
    return Arrival(1, (ended_ms + 10) * MS, Timings(ended, received, durable, emitted, step))


def test_draft_tokens_are_counted_by_who_proposed_them() -> None:
    stats = Stats(tested=9, accepted=6, tested_ngram=3, accepted_ngram=1, tested_head=0, accepted_head=0)
    assert run.sources(stats) == {"ngram": (3, 1), "drafter": (6, 5)}
    assert run.sources(Stats()) == {}


def test_a_journal_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"commit": "c0ffee", "machine": {"cores": 2}})
    journal.add({"note": "one"})
    path.write_text(path.read_text() + '{"turn": {"piece": "ma')
    again = Journal(path, {"commit": "c0ffee", "machine": {"cores": 2}})
    assert [line["note"] for line in again.of("note")] == ["one"]
    again.add({"note": "two"})
    assert len(Journal(path, {"commit": "c0ffee", "machine": {"cores": 2}}).lines) == 3
    with pytest.raises(BenchError, match="is of another machine"):
        Journal(path, {"commit": "c0ffee", "machine": {"cores": 4}})


class MadeField:
    """Two rows that answer at once; the library fails at its second text, and one at a distance is not there."""

    def __init__(self, *_: object) -> None:
        self.rows: dict[str, SpeedRow] = {}
        self.failed: dict[str, str] = {}
        self.runtimes: dict[str, str] = {}
        self.asked = 0

    def start(self, keys: Sequence[str], sessions: int, longest: int) -> None:
        for key in keys:
            if key == FAR_20:
                self.failed[key] = "it needs two cores"
            else:
                self.rows[key] = SpeedRow(key, (), 1.0, self.library if key == LLAMACPP else self.ours)

    def encoded(self, prompts: Sequence[object]) -> list[list[int]]:
        return [[1, 2, 3] for _ in prompts]

    def ours(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> Together:
        return Together(1.0, tuple(Run((5,) * tokens, 1.0, 0.1, tokens) for _ in prompts))

    def library(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> Together:
        self.asked += 1
        if self.asked > 2 + 1:  # two texts warm it up
            raise BenchError("it ended")
        return self.ours(prompts, tokens, temperature)

    def drop(self, key: str, reason: str) -> None:
        del self.rows[key]
        self.failed[key] = reason


def test_a_row_that_fails_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "SpeedField", MadeField)
    monkeypatch.setattr(SpeedRow, "memory", lambda self: rows.Memory(1.0, 2.0))
    monkeypatch.setattr(run, "JOURNALS", tmp_path)
    monkeypatch.setattr(machine, "commit", lambda: "c0ffee")
    monkeypatch.setattr(run, "PIECES", (Piece("main", (OFF, LLAMACPP, FAR_20)),))
    words = [DEMO, "--prompts", "2", "--tokens", "8", "--out", str(tmp_path)]

    assert run.main(words) == 0

    found = json.loads((tmp_path / "real_demo.json").read_text())
    assert [sorted(turn["rows"]) for turn in found["raw"]] == [[LLAMACPP, OFF], [OFF]] * 2
    assert {each["row"]: each["why"] for each in found["failed"]} == {
        LLAMACPP: "it ended",
        FAR_20: "it needs two cores",
    }
    # What is whole is not measured again.
    with monkeypatch.context() as context:
        context.setattr(MadeField, "start", lambda *_: pytest.fail("nothing is left to measure"))
        assert run.main(words) == 0
    # More of the sample is added to it.
    words[words.index("--prompts") + 1] = "3"
    assert run.main(words) == 0
    assert len(json.loads((tmp_path / "real_demo.json").read_text())["raw"]) == 6


def test_a_piece_that_was_started_late_has_its_first_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "SpeedField", MadeField)
    monkeypatch.setattr(SpeedRow, "memory", lambda self: rows.Memory(1.0, 2.0))
    (settings,) = settings_of(asked(DEMO))
    journal = Journal(tmp_path / "journal.jsonl", {})
    run._piece(Piece("main", (OFF,)), settings, journal, [prompts.SpeedPrompt("chat", "?")] * 3, until=0.0)
    assert [line["turn"]["prompts"] for line in journal.of("turn")] == [(0,), (0,)]


def test_what_was_measured_before_it_was_interrupted_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(MadeField):
        def ours(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> Together:
            self.asked += 1
            if self.asked > 2 + 3:  # two texts warm it up
                raise KeyboardInterrupt
            return super().ours(prompts, tokens, temperature)

    monkeypatch.setattr(run, "SpeedField", Interrupted)
    monkeypatch.setattr(run, "JOURNALS", tmp_path)
    monkeypatch.setattr(machine, "commit", lambda: "c0ffee")
    monkeypatch.setattr(run, "PIECES", (Piece("main", (OFF,)),))
    assert run.main([DEMO, "--prompts", "4", "--out", str(tmp_path)]) == 130
    assert "the same command goes on with it" in capsys.readouterr().err
    (journal,) = tmp_path.glob("*.jsonl")
    asked = [json.loads(line).get("turn", {}).get("prompts") for line in journal.read_text().splitlines()]
    assert asked[-3:] == [[0], [0], [2]]  # every other prompt is asked once the rows have started a second time


class MadeChild(BenchChild):
    """Runs nothing."""

    def __init__(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


def row_of(key: str, *children: BenchChild) -> SpeedRow:
    return SpeedRow(key, children, 0.0, MadeField().ours)


def test_a_row_that_ends_by_itself_does_not_end_what_it_shares(tmp_path: Path) -> None:
    shared, own = MadeChild(), MadeChild()
    with ExitStack() as cleanup:
        field = rows.SpeedField(rows.SpeedModels("target"), tmp_path, cleanup)
        field.rows = {"one": row_of("one", shared, own), "other": row_of("other", shared)}
        field.drop("one", "it ended")
        assert (shared.stopped, own.stopped) == (False, True)
        assert (list(field.rows), field.failed) == (["other"], {"one": "it ended"})


def test_a_service_that_ends_is_told_by_its_last_words(tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        models = rows.SpeedModels(str(tmp_path / "nothing"), options=("--runtime", "torch"))
        field = rows.SpeedField(models, tmp_path, cleanup)
        field.start((OFF, FAR_20, LLAMACPP, rows.VLLM), 1, 100)
        assert field.rows == {}
    assert str(tmp_path / "nothing") in field.failed[OFF]
    assert field.failed[LLAMACPP] == "it is measured on GGUF files, and the target is none"
    assert field.failed.keys() == {OFF, FAR_20, LLAMACPP, rows.VLLM}
