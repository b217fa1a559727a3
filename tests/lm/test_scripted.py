"""ScriptedLM: a pure function of the text a slot holds, with an agreement that can be set."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import TreeFeed
from specwire.lm import Feed, LanguageModel, ModelError, load_model
from specwire.lm.scripted import HeadedScript
from tests.verify_service.rig import COUPLED, GREEDY, Rig, oracle


def _load(spec: str, slots: int = 2) -> LanguageModel:
    return load_model(spec, slots=slots)


def _told(right: list[int | None], scores: list[list[float]], prompt: int = 1) -> str:
    """Ranks, as their file has them."""
    return json.dumps({"prompt": prompt, "right": right, "scores": scores})


def _with_file(folder: Path, option: str, content: str) -> str:
    """A script that reads a file of this content."""
    path = folder / option
    path.write_text(content)
    return f"scripted:3:{option}={path}"


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
    assert (target.device, _load("scripted:3:device=cloud").info.device) == ("cpu", "cloud")
    assert load_model("scripted:3", slots=1, context=64).info.context == 64
    with pytest.raises(ModelError, match="context: a scripted model has from 2 to 4096 positions, not 5000"):
        load_model("scripted:1", slots=1, context=5000)


def test_text_and_ids_convert() -> None:
    tokenizer = Tokenizer.from_str(_load("scripted:3").info.tokenizer_json.decode())
    assert tokenizer.encode("3 17 63").ids == [3, 17, 63]
    assert tokenizer.decode([3, 17, 63], skip_special_tokens=True) == "3 17 63"
    assert tokenizer.encode("def 5").ids == [1, 5]


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
        ("scripted:1:ranks=x:trace=x", "expected scripted:SEED"),
        ("scripted:1:ranks=/no/such/file", "ranks: cannot read /no/such/file: FileNotFoundError"),
        ("scripted:1:speed=9", "expected scripted:SEED"),
        ("scripted:1:agree=1:agree=0", "expected scripted:SEED"),
    ],
)
def test_a_bad_script_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _load(spec)


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("trace", "", "trace: .* is empty"),
        ("trace", "01x0", "trace: must hold 0 and 1 only"),
        ("ranks", "0110", "is no object of prompt, right and scores"),
        ("ranks", _told([], []), "must hold a place"),
        ("ranks", _told([0, 1], [[0.0, -1.0]]), "must hold a place"),
        ("ranks", _told([0], [[]]), "must hold a place"),
        ("ranks", _told([2], [[0.0, -1.0]]), "a place is beyond its scores"),
        ("ranks", _told([0], [[-1.0, 0.0]]), "scores must fall"),
        ("ranks", _told([0], [[0.0] * 63]), "vocab: 64 ids are too few for 63 with scores"),
    ],
)
def test_a_file_that_is_no_trace_and_no_ranks_is_refused(
    option: str, content: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        _load(_with_file(tmp_path, option, content))


def test_a_trace_decides_where_a_drafter_agrees(tmp_path: Path) -> None:
    text = [index * 7 % 64 for index in range(20)]
    target = _load("scripted:3").forward([Feed(0, 0, text, 20)])
    draft = _load(_with_file(tmp_path, "trace", "0110\n1001\n")).forward([Feed(0, 0, text, 20)])
    agreed = (target.argmax(1) == draft.argmax(1)).tolist()
    # Row i chooses the token at position i + 1.
    assert agreed == ["01101001"[(index + 1) % 8] == "1" for index in range(20)]


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


# ----------------------------------------------------------------------------------------------------------------------
# Feeds that branch.

TEXT = [5, 9, 1, 33]
# Node: its parent, its token; siblings and cousins among them, two of the same token.
NODES = [(-1, 7), (-1, 8), (0, 2), (1, 2), (0, 3), (2, 7), (3, 7)]


def _ancestors(node: int) -> list[int]:
    parent = NODES[node][0]
    return [] if parent < 0 else [*_ancestors(parent), parent]


def _line(node: int) -> list[int]:
    return [*TEXT, *(NODES[each][1] for each in (*_ancestors(node), node))]


def _tree(nodes: range, wanted: int) -> Feed:
    """These of NODES, the first of which occupies the row behind TEXT."""
    trunk = len(TEXT)
    ancestors = tuple(tuple(trunk + each for each in _ancestors(node)) for node in nodes)
    tokens = [NODES[node][1] for node in nodes]
    return Feed(0, trunk + nodes.start, tokens, wanted, TreeFeed(trunk, ancestors))


def test_nodes_say_what_their_paths_say_as_lines(tmp_path: Path) -> None:
    scores = [[0.0, -0.5, -1.0 - index] for index in range(5)]
    for spec in (
        "scripted:7",
        _with_file(tmp_path, "trace", "0110100"),
        _with_file(tmp_path, "ranks", _told([0, 1, None], scores[:3])),
    ):
        lm = _load(spec)
        lm.forward([Feed(0, 0, TEXT, 1)])
        rows = torch.cat([lm.forward([_tree(range(3), 3)]), lm.forward([_tree(range(3, 7), 4)])])
        assert lm.cached(0) == len(TEXT) + len(NODES)
        for node in range(len(NODES)):
            line = _line(node)
            assert torch.equal(rows[node], lm.forward([Feed(1, 0, line, 1)])[0])


def test_rows_that_are_kept_go_on_as_their_path() -> None:
    lm = _load("scripted:7")
    lm.forward([Feed(0, 0, TEXT, 0), Feed(1, 0, _line(5), 0)])
    lm.forward([_tree(range(len(NODES)), 0)])
    lm.keep(0, len(TEXT), [len(TEXT) + node for node in (0, 2, 5)])
    assert lm.cached(0) == len(TEXT) + 3
    one, other = lm.forward([Feed(slot, len(TEXT) + 3, [40, 41], 2) for slot in range(2)]).chunk(2)
    assert torch.equal(one, other)


def test_what_was_kept_wrongly_spoils_what_stands_behind_it() -> None:
    """Node 3 descends from 1: behind 0 its keys and values are wrong ones, though its token is node 2's."""
    lm = _load("scripted:7")
    lm.forward([Feed(0, 0, TEXT, 0), Feed(1, 0, _line(2), 0)])
    lm.forward([_tree(range(len(NODES)), 0)])
    lm.keep(0, len(TEXT), [len(TEXT), len(TEXT) + 3])
    trunk = len(TEXT)
    feeds = [Feed(slot, trunk + 2, [40], 1, TreeFeed(trunk, ((trunk, trunk + 1),))) for slot in range(2)]
    one, other = lm.forward(feeds)
    assert not torch.equal(one, other)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks.

RIGHT: list[int | None] = [0, 2, None, 1]
SCORES = [[0.0, -1.0, -2.0, -3.0], [0.0, -0.1, -0.2, -0.3], [0.0, 0.0, -5.0, -5.0], [0.0, -2.5, -2.5, -9.0]]


def _greedy(prompt: list[int], tokens: int) -> list[int]:
    lm, text = _load("scripted:3"), list(prompt)
    for position in range(tokens):
        start = 0 if position == 0 else len(text) - 1
        text.append(int(lm.forward([Feed(0, start, text[start:], 1)]).argmax()))
    return text


def test_the_targets_token_has_its_recorded_place_and_the_others_their_scores(tmp_path: Path) -> None:
    prompt = [9, 5, 7]
    text = _greedy(prompt, 12)
    drafter = _load(_with_file(tmp_path, "ranks", _told(RIGHT, SCORES, prompt=3)))
    assert drafter.info.weights_fingerprint != _load("scripted:3").info.weights_fingerprint
    rows = drafter.forward([Feed(0, 0, text[:-1], 12)])
    for index, (row, token) in enumerate(zip(rows, text[3:], strict=True)):
        values, ids = row.topk(4)
        assert (values - values[0]).tolist() == pytest.approx(SCORES[index % 4], abs=0.01)
        place = RIGHT[index % 4]
        assert (ids.tolist().index(token) if token in ids.tolist() else None) == place
        assert len(set(ids.tolist())) == 4
        assert 0 not in ids.tolist()
        assert int((row > -60).sum()) == 4


def test_behind_a_wrong_text_the_scores_are_those_of_another_place_whatever_the_position(tmp_path: Path) -> None:
    """It stays wrong, whatever follows; and which place it is depends on the text."""
    text = _greedy([9], 30)
    drafter = _load(_with_file(tmp_path, "ranks", _told([0] * 4, SCORES)), slots=1)
    wrong = [*text[:3], 60 if text[3] != 60 else 61, *text[4:]]
    rows = drafter.forward([Feed(0, 0, wrong, 27)])
    said = [[round(value, 1) for value in (row.topk(4).values - row.max()).tolist()] for row in rows]
    recorded = [[round(value, 1) for value in scores] for scores in SCORES]
    assert all(each in recorded for each in said)
    assert len({recorded.index(each) for each in said}) == 4
    assert said != [recorded[(3 + index) % 4] for index in range(27)]


# ----------------------------------------------------------------------------------------------------------------------
# A scripted head: right as often as it says, behind the text that its slot holds.

TARGET = "scripted:5:vocab=24"
PROMPT = [3, 1, 4, 1, 5]
DEPTH = 8


def always_right(context: int | None = None) -> HeadedScript:
    lm = load_model(TARGET, slots=3, heads=TARGET, context=context)
    assert isinstance(lm, HeadedScript)
    assert isinstance(lm, DraftingModel)
    return lm


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_one_that_always_agrees_says_the_target_s_own_text(sampling: Sampling) -> None:
    lm, plain = always_right(), load_model(TARGET, slots=1)
    lm.forward([Feed(1, 0, PROMPT[:-1], 1), Feed(2, 0, PROMPT[1:-1], 1)])
    requests = [HeadRequest(1, PROMPT, sampling, DEPTH), HeadRequest(2, PROMPT[1:], sampling, 2)]
    assert lm.draft(requests) == [oracle(plain, PROMPT, DEPTH, sampling), oracle(plain, PROMPT[1:], 2, sampling)]
    assert [lm.cached(slot) for slot in range(3)] == [0, 4, 3], "what it drafted is not held"
    short = always_right(context=7)
    short.forward([Feed(0, 0, PROMPT[:-1], 1)])
    assert len(short.draft([HeadRequest(0, PROMPT, sampling, DEPTH)])[0]) == 2, "its context ends there"


def test_it_reads_what_the_slot_holds_before_it_drafts() -> None:
    lm = always_right()
    assert lm.unread(0) == 0
    lm.forward([Feed(0, 0, PROMPT[:-1], 1)])
    assert lm.unread(0) == 4
    lm.draft([HeadRequest(0, PROMPT, GREEDY, 1)])
    assert lm.unread(0) == 0
    lm.rollback(0, 2)
    lm.forward([Feed(0, 2, [7, 7], 1)])
    lm.copy(0, 1, 3)
    assert (lm.unread(0), lm.unread(1)) == (2, 1)
    lm.catch_up([HeadRequest(0, [3, 1, 7, 7, 2], GREEDY, 1)])
    assert lm.unread(0) == 0
    with pytest.raises(ValueError, match="slot 0 holds 4 positions of 2"):
        lm.draft([HeadRequest(0, PROMPT[:2], GREEDY, 1)])
    lm.discard(0)
    assert lm.unread(0) == 0
    lm.stop()
    assert lm.unread(1) is None


def test_its_forward_takes_its_time() -> None:
    lm = load_model(TARGET, slots=1, heads=f"{TARGET}:delay_ms=20")
    assert isinstance(lm, HeadedScript)
    lm.forward([Feed(0, 0, PROMPT[:-1], 1)])
    began = time.perf_counter()
    lm.draft([HeadRequest(0, PROMPT, GREEDY, 3)])
    assert time.perf_counter() - began > 0.055


@pytest.mark.parametrize("agree", [0.0, 0.7, 1.0])
def test_a_verifier_that_has_one_writes_the_target_s_text(agree: float) -> None:
    rig = Rig(TARGET, ngram=False, heads=f"{TARGET}:agree={agree}")
    rig.open(0, PROMPT, max_tokens=200)
    rig.run()
    assert rig.tokens[0] == oracle(load_model(TARGET, slots=1), PROMPT, 200)
    accepted = 1 - rig.engine.steps / 200
    assert accepted < 0.02 if agree == 0.0 else accepted > 0.3


@pytest.mark.parametrize(
    ("head", "wrong"),
    [
        ("scripted:5:vocab=9", "heads: of 9 ids, beside a target of 24"),
        ("scripted:5:frob=1", "expected scripted:SEED"),
        ("nowhere", "a scripted model has no features for them"),
        ("self:skip=1", "a scripted model has no layers to skip"),
    ],
)
def test_what_does_not_fit_is_refused(head: str, wrong: str) -> None:
    with pytest.raises(ModelError, match=wrong):
        load_model(TARGET, slots=1, heads=head)
