"""The measurement of a large target, with tiny shapes on the CPU: texts, acceptance, floors, bars, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from bench.gpu import run, shapes
from bench.gpu.decoding import Decoding, ModelDrafter, Oracle, Source
from bench.gpu.run import GpuResults
from bench.gpu.shapes import SHAPES, CountedHead, agreeing, build, forward_bytes, planted, successors, walk
from bench.gpu.steps import Floor, StepLine, bandwidth, weight_bytes
from bench.harness.interval import estimate
from scripts.figures.speed import gpu_table
from specwire.core.draft import HeadRequest
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import Sampling
from specwire.lm import Feed
from specwire.lm.runners import compiled
from specwire.lm.runners.compiled import Buckets

CPU = torch.device("cpu")
AFTER = successors(128, 1)
QUICK = run.settings_of(run.parser().parse_args(["--quick"]))


def model(name: str, after: Sequence[int], seed: int = 1) -> PreTrainedModel:
    return build(SHAPES[name], after, QUICK.context, torch.float32, CPU, seed)


def test_what_follows_is_one_cycle_and_a_drafter_agrees_with_a_share_of_it() -> None:
    assert sorted(walk(AFTER, 5, 128)) == list(range(128))
    many = successors(20_000, 2)
    drafted = agreeing(many, 0.8, 3)
    assert sorted(drafted) == list(range(20_000))
    assert sum(a == b for a, b in zip(many, drafted, strict=True)) / 20_000 == pytest.approx(0.8, abs=0.01)
    assert agreeing(many, 1.0, 3) == many


def test_the_target_says_the_walk() -> None:
    text = walk(AFTER, 7, 30)
    logits = model("tiny", AFTER)(torch.tensor([text])).logits[0]
    assert logits.argmax(dim=-1).tolist() == [*text[1:], AFTER[text[-1]]]
    best, second = logits.topk(2).values.unbind(-1)
    assert float((best - second).min()) > 1.0


@pytest.mark.parametrize("kind", ["none", "oracle", "drafter", "head"])
def test_the_engine_says_the_walk_whoever_drafts(kind: str) -> None:
    tiny = model("tiny", AFTER)
    head = planted(SHAPES["tiny"], tiny, agreeing(AFTER, 0.8, 1), [], 3) if kind == "head" else None
    target = run.language_model(tiny, QUICK, QUICK.drafts + 1, head)
    draft = run.language_model(model("tiny-draft", agreeing(AFTER, 0.8, 1)), QUICK, 2)
    sources: dict[str, Source | None] = {
        "none": None,
        "oracle": Oracle(AFTER, 1.0, QUICK.drafts, seed=1),
        "drafter": ModelDrafter(draft, QUICK.drafts),
        "head": None,
    }
    engine = Decoding(target, QUICK.drafts)
    prompts = [walk(AFTER, start, QUICK.prompt) for start in (0, 1)]
    for _ in range(2):
        found = engine.run(prompts, QUICK.tokens, sources[kind])
        assert [list(text) for text in found.texts] == [walk(AFTER, AFTER[each[-1]], QUICK.tokens) for each in prompts]
        assert found.tokens >= 2 * (QUICK.tokens - 1 - QUICK.drafts)
        assert found.tested >= found.accepted
        assert found.forwards >= QUICK.tokens / (QUICK.drafts + 1) - 1
        if kind == "oracle":
            assert found.tested == found.accepted
        if kind == "none":
            assert found.tested == found.drafts == 0
        if kind == "drafter":
            assert found.drafts >= found.forwards


def test_a_head_says_what_it_was_planted_with_at_each_depth() -> None:
    target, says = model("tiny", AFTER), agreeing(AFTER, 0.8, 1)
    head = planted(SHAPES["tiny"], target, says, [], 3)
    lm = run.language_model(target, QUICK, QUICK.drafts + 1, head)
    assert isinstance(lm, CountedHead)
    text, drafted, expected = walk(AFTER, 7, 40), list[list[int]](), list[list[int]]()
    lm.forward([Feed(0, 0, text[:10], 1)])
    for length in range(11, 41):
        drafted += lm.draft([HeadRequest(0, text[:length], Sampling(), 4)])
        expected.append(walk(says, says[text[length - 1]], 4))
        lm.forward([Feed(0, length - 1, [text[length - 1]], 1)])
    assert drafted == expected
    assert lm.forwards == 4 * 30
    assert forward_bytes(head) == 4 * sum(
        each.numel() for name, each in head.named_parameters() if name not in ("embed_tokens.weight", "fc.weight")
    )


def test_a_head_that_cannot_say_all_ids_says_those_that_are_asked() -> None:
    target = model("tiny", AFTER)
    with patch.object(shapes, "DRAFT_VOCABULARY", 32):
        ids = [planted(SHAPES["tiny"], target, AFTER, said, 3).d2t + torch.arange(32) for said in ([100, 101], [])]
    assert ids[0].tolist() == [*range(30), 100, 101]
    assert ids[1].tolist() == [*range(32)]


def test_a_floor_is_bytes_by_bandwidth() -> None:
    made = model("tiny", AFTER)
    weights = weight_bytes(made)
    assert weights == sum(each.nbytes for each in made.parameters()) - 128 * 64 * 4
    assert Floor(1000, 10, 100.0).seconds(rows=3, positions=20) == pytest.approx(16.0)
    assert bandwidth(CPU, 1 << 16) > 0
    assert SHAPES["llama-8b"].kv_bytes_per_position == 131_072


def test_bars_are_for_compiled_steps() -> None:
    steps = [StepLine(rows, window, estimate([9.0]), 6.0, estimate([1.5])) for rows, window in ((1, 1), (8, 4), (8, 1))]
    found = GpuResults("a device", True, {}, Floor(1, 1, 1.0), steps, [], [], [])
    assert [(bar.name, bar.needed, bar.holds) for bar in found.bars] == [
        ("step of 1 sessions x 1 / its floor", 1.35, False),
        ("step of 8 sessions x 4 / its floor", 1.6, True),
    ]
    assert GpuResults("a device", False, {}, Floor(1, 1, 1.0), steps, [], [], []).bars == []


def test_a_quick_measurement_ends_with_tables_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    assert run.main(["--quick", "--out", str(out), "--tokens", "8", "--sessions", "1"]) == 0
    printed = capsys.readouterr().out
    for words in ("x floor", "by the oracle", "an EAGLE-3 head", "transformers assisted", "Weights are random"):
        assert words in printed
    written = json.loads(out.read_text())
    assert [(step["rows"], step["window"]) for step in written["steps"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert len(written["raw"]) == 6
    assert [line["to_floor"] is None for line in written["speeds"]] == [False] * 4 + [True] * 2
    assert "cpu, not compiled: tiny" in gpu_table(written)


def test_a_compiled_measurement_runs_in_those_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a service compiles. Through PyTorch's capture alone; its code generator takes minutes."""
    whole = run.settings_of(run.parser().parse_args([]))
    usual = Buckets.usual(whole.slots, whole.context)
    assert run.buckets_of(whole, 8) == usual._replace(columns=(1, 4, 8))
    assert ({*whole.rows} <= {*usual.rows}, {*whole.windows} <= {*usual.columns}) == (True, True)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    words = ["--quick", "--compile", "--out", str(tmp_path / "gpu.json"), "--tokens", "8", "--sessions", "1"]
    assert run.main([*words, "--rows", "1", "--windows", "1,4"]) == 0
    assert "step of 1 sessions x 1 / its floor" in capsys.readouterr().out


def test_what_cannot_be_measured_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "gpu.json")
    assert run.main(["--quick", "--device", "nowhere", "--out", out]) == 1
    assert run.main(["--quick", "--rows", "0", "--out", out]) == 2
    assert run.main(["--quick", "--draft", "llama-1b", "--out", out]) == 2
    assert run.main(["--quick", "--tokens", "5", "--out", out]) == 2
    errors = capsys.readouterr().err
    for words in ("nowhere", "rows: must each be at least 1", "another vocabulary", "tokens: must be at least 6"):
        assert words in errors
    with pytest.raises(InvalidParameter):
        run.GpuSettings(acceptance=1.5)
