"""ScriptedLM: a pure function of the text a slot holds, with an agreement that can be set."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specwire.lm import Feed, LanguageModel, ModelError, load_model
from specwire.lm.scripted import Script


def _load(spec: str, slots: int = 2) -> LanguageModel:
    return load_model(spec, slots=slots)


def test_logits_depend_on_the_text_alone() -> None:
    text = [5, 9, 1, 33, 2, 8]
    whole = _load("scripted:7").forward([Feed(0, 0, text, 6)])
    lm = _load("scripted:7")
    lm.forward([Feed(1, 0, [5, 9, 40, 41], 2)])
    lm.rollback(1, 2)
    parts = [
        lm.forward([Feed(1, 2, [1], 1)]),
        lm.forward([Feed(1, 3, [33, 2, 60], 3)]),
        lm.forward([Feed(1, 5, [8], 1)]),
    ]
    assert torch.equal(torch.cat([parts[0], parts[1][:2], parts[2]]), whole[2:])
    assert whole.dtype == torch.float32
    assert bool(whole.isfinite().all())


def test_a_wrong_rollback_changes_every_later_row() -> None:
    right, wrong = _load("scripted:7"), _load("scripted:7")
    for lm in (right, wrong):
        lm.forward([Feed(0, 0, [5, 9, 1], 1)])
    right.rollback(0, 2)
    expected = right.forward([Feed(0, 2, [4, 6], 2)])
    got = wrong.forward([Feed(0, 3, [4, 6], 2)])
    assert not any(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_a_discarded_slot_is_empty() -> None:
    lm = _load("scripted:7")
    first = lm.forward([Feed(0, 0, [5], 1)])
    lm.discard(0)
    assert lm.cached(0) == 0
    assert torch.equal(lm.forward([Feed(0, 0, [5], 1)]), first)


@pytest.mark.parametrize("agree", [0.0, 0.7, 1.0])
def test_a_drafter_agrees_as_often_as_it_is_told(agree: float) -> None:
    text = [index * 7 % 64 for index in range(2000)]
    target = _load("scripted:3").forward([Feed(0, 0, text, 2000)])
    draft = _load(f"scripted:3:agree={agree}").forward([Feed(0, 0, text, 2000)])
    rate = float((target.argmax(1) == draft.argmax(1)).float().mean())
    assert abs(rate - agree) < 0.04


@pytest.mark.parametrize(("eos", "low", "high"), [(0.0, 0.0, 0.0), (0.1, 0.07, 0.13), (1.0, 1.0, 1.0)])
def test_the_end_comes_as_often_as_told(eos: float, low: float, high: float) -> None:
    logits = _load(f"scripted:3:eos={eos}").forward([Feed(0, 0, [1] * 2000, 2000)])
    assert low <= float((logits.argmax(1) == 0).float().mean()) <= high


def test_a_short_memory_makes_loops() -> None:
    lm = _load("scripted:3:memory=2")
    one, other = lm.forward([Feed(0, 0, [5, 9, 1, 33], 1), Feed(1, 0, [1, 33], 1)])
    assert torch.equal(one, other)
    lm.discard(0)
    text = [5]
    for position in range(400):
        text.append(int(lm.forward([Feed(0, position, text[-1:], 1)]).argmax()))
    assert len(set(pairwise(text))) < 200


def test_info() -> None:
    target, draft = _load("scripted:3").info, _load("scripted:9:agree=0.5:delay_ms=1").info
    assert (target.vocabulary, target.context, target.eos_ids) == (64, 4096, (0,))
    assert target.vocabulary_fingerprint == draft.vocabulary_fingerprint
    assert target.vocabulary_fingerprint != _load("scripted:3:vocab=65").info.vocabulary_fingerprint
    assert target.weights_fingerprint != draft.weights_fingerprint
    assert target == _load("scripted:3").info
    assert load_model("scripted:3", slots=1, context=64).info.context == 64


def test_text_and_ids_convert() -> None:
    tokenizer = Tokenizer.from_str(_load("scripted:3").info.tokenizer_json.decode())
    assert tokenizer.encode("3 17 63").ids == [3, 17, 63]
    assert tokenizer.decode([3, 17, 63], skip_special_tokens=True) == "3 17 63"
    assert tokenizer.encode("def 5").ids == [1, 5]


def test_no_rows_wanted() -> None:
    assert _load("scripted:3").forward([Feed(0, 0, [1, 2], 0)]).shape == (0, 64)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("scripted:", "not a number"),
        ("scripted:x", "not a number"),
        ("scripted:1:vocab=many", "not a number"),
        ("scripted:1:vocab=1", "vocab: must be from 2"),
        ("scripted:1:agree=1.5", "agree: must be from 0 to 1, not 1.5"),
        ("scripted:1:agree=nan", "agree: must be from 0 to 1, not nan"),
        ("scripted:1:delay_ms=inf", "delay_ms: must be from 0 to 60000, not inf"),
        ("scripted:1:row_cost=-1", "row_cost: must be from 0 to 1, not -1.0"),
        ("scripted:1:memory=4", "memory: must be from 0 to 3, not 4"),
        ("scripted:1:device=", "device: must not be empty"),
        ("scripted:1:trace=/no/such/file", "trace: cannot read /no/such/file: FileNotFoundError"),
        ("scripted:1:agree=1:trace=x", "expected scripted:SEED"),
        ("scripted:1:speed=9", "expected scripted:SEED"),
        ("scripted:1:agree=1:agree=0", "expected scripted:SEED"),
    ],
)
def test_a_bad_script_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _load(spec)


def _trace(folder: Path, bits: str) -> str:
    path = folder / "trace"
    path.write_text(bits)
    return f"scripted:3:trace={path}"


def test_a_trace_decides_where_a_drafter_agrees(tmp_path: Path) -> None:
    text = [index * 7 % 64 for index in range(20)]
    target = _load("scripted:3").forward([Feed(0, 0, text, 20)])
    draft = _load(_trace(tmp_path, "0110\n1001\n")).forward([Feed(0, 0, text, 20)])
    agreed = (target.argmax(1) == draft.argmax(1)).tolist()
    # Row i chooses the token at position i + 1.
    assert agreed == ["01101001"[(index + 1) % 8] == "1" for index in range(20)]


def test_a_trace_counts_positions_not_rows(tmp_path: Path) -> None:
    spec, text = _trace(tmp_path, "0110100111"), [4, 8, 15, 16, 23, 42]
    whole = _load(spec).forward([Feed(0, 0, text, 6)])
    lm = _load(spec)
    lm.forward([Feed(0, 0, [4, 8, 15, 9], 0)])
    lm.rollback(0, 3)
    assert torch.equal(lm.forward([Feed(0, 3, [16, 23, 42], 2)]), whole[4:])


@pytest.mark.parametrize("bits", ["", "01x0"])
def test_a_trace_that_is_none_is_refused(tmp_path: Path, bits: str) -> None:
    with pytest.raises(ModelError, match="trace: "):
        _load(_trace(tmp_path, bits))


def test_every_further_row_adds_its_cost() -> None:
    script = Script.parse("scripted:3:delay_ms=30:row_cost=0.05")
    assert script.duration(1) == pytest.approx(0.030)
    assert script.duration(9) == pytest.approx(0.042)
    assert Script.parse("scripted:3:delay_ms=30").duration(9) == pytest.approx(0.030)


def test_a_forward_takes_at_least_its_time() -> None:
    lm = _load("scripted:3:delay_ms=4:row_cost=0.5")
    began = time.perf_counter()
    lm.forward([Feed(0, 0, [1, 2], 1), Feed(1, 0, [3, 4, 5], 1)])
    assert time.perf_counter() - began >= 0.012


def test_forwards_take_their_time_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sleeps is woken late: later sleeps are shorter by that."""
    now = 0.0

    def late(seconds: float) -> None:
        nonlocal now
        now += seconds + 6e-5

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", late)
    lm = _load("scripted:3:delay_ms=1")
    for position in range(400):
        lm.forward([Feed(0, position, [1], 1)])
    assert now == pytest.approx(0.4, abs=1e-3)


def test_a_device_of_its_own_has_a_name() -> None:
    assert _load("scripted:3").info.device == "cpu"
    assert _load("scripted:3:device=cloud").info.device == "cloud"


def test_a_context_out_of_range_is_refused() -> None:
    with pytest.raises(ModelError, match="context: a scripted model has from 2 to 4096 positions, not 5000"):
        load_model("scripted:1", slots=1, context=5000)
