"""Recurrent layers: states are kept by row, and whatever was fed, rolled back or copied, logits are the plain ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from deploy.cli.diagnosis.doctor_models import check_models, facts_of
from specwire.core.messages import MOST_WINDOW
from specwire.lm import Feed, LanguageModel, ModelError, load_model
from specwire.lm.kv_cache import ROWS, STATES, CachedLM, position_bytes, readable, rows_of
from specwire.lm.runners import hybrid
from specwire.lm.runners.hybrid import HybridRunner, KeptStates, slot_state_bytes, state_bytes
from tests.lm.families import HYBRID
from tests.lm.models import CONTEXT, TOLERANCE, VOCABULARY, build, plain, save
from tests.lm.walk import Texts

LONG = 160
FAMILIES = {family.name: family for family in HYBRID}
# Qwen3-Next's own rows, one by one, are up to 2.4e-4 off its own chunks.
DELTA = 1e-3
DELTA_RULE = {"Qwen3-Next": DELTA, "Kimi-Linear": DELTA}
# One of each kind of scan, and one with convolutions alone.
KINDS = ["Jamba", "Mamba-2", "Qwen3-Next", "LFM2"]
# States of a slot where memory gets shorter and shorter.
FEWER = [STATES, 8, 2, 1]


def built(name: str, folder: Path, slots: int = 3, **options: Any) -> tuple[PreTrainedModel, LanguageModel]:
    made = FAMILIES[name].config()
    made.max_position_embeddings = LONG
    model = build(made)
    return model, load_model(save(model, folder), slots=slots, context=LONG, **options)


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def same(rows: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(rows, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", KINDS)
def test_prompts_windows_and_far_rollbacks_of_several_texts_give_the_plain_forward(name: str, tmp_path: Path) -> None:
    model, lm = built(name, tmp_path)
    assert not lm.branches
    chance = random.Random(len(name))
    held: list[list[int]] = [[], [], []]
    for _ in range(15):
        if chance.random() < 0.3:
            source, target = chance.sample(range(3), 2)
            length = chance.randint(0, len(held[source]))
            lm.copy(source, target, length)
            held[target] = held[source][:length]
        feeds = []
        for slot in chance.sample(range(3), chance.randint(1, 3)):
            back = chance.choice([0, 3, MOST_WINDOW, 60])
            start = min(max(0, len(held[slot]) - chance.randint(0, back)), LONG - 50)
            fresh = tokens(chance, chance.choice([1, 4, MOST_WINDOW + 1, 32, 50]))
            held[slot][start:] = fresh
            feeds.append(Feed(slot, start, fresh, len(fresh)))
        expected = [plain(model, held[feed.slot])[feed.start :] for feed in feeds]
        same(lm.forward(feeds), torch.cat(expected), DELTA_RULE.get(name, TOLERANCE))


@pytest.mark.parametrize("name", KINDS)
def test_a_text_that_is_not_finite_harms_no_other(name: str, tmp_path: Path) -> None:
    made = FAMILIES[name].config()
    made.tie_word_embeddings = False
    model = build(made)
    with torch.no_grad():
        model.get_parameter(next(name for name, _ in model.named_parameters() if "embed" in name))[7] = float("nan")
    lm = load_model(save(model, tmp_path), slots=2, context=48)
    lm.forward([Feed(0, 0, [1, 3, 9], 1), Feed(1, 0, [1, 3, 9, 4], 1)])
    rows = lm.forward([Feed(0, 3, [7, 3], 1), Feed(1, 4, [6], 1)])
    assert lm.failed == {0}
    same(rows[1:], plain(model, [1, 3, 9, 4, 6])[-1:])
    same(lm.forward([Feed(0, 0, [1, 3, 9], 3)]), plain(model, [1, 3, 9]))
    same(lm.forward([Feed(1, 5, [5], 1)]), plain(model, [1, 3, 9, 4, 6, 5])[-1:])


def test_a_forward_that_fails_leaves_no_state_that_was_not_filed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lm = built("Bamba", tmp_path)
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, HybridRunner)
    text = tokens(random.Random(1), 60)
    lm.forward([Feed(0, 0, text, 1)])
    lm.rollback(0, 30)  # between states: what follows feeds tokens again
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(hybrid.HybridCache, "file", _raise)
        lm.forward([Feed(0, 30, [1, 2, 3], 1)])
    assert lm.cached(0) == 30
    same(lm.forward([Feed(0, 30, text[30:], 30)]), plain(model, text)[30:])


@pytest.mark.parametrize("name", KINDS)
def test_what_is_fed_again_may_take_several_forwards(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of them fails: then all that was fed before is there still."""
    monkeypatch.setattr(hybrid, "MOST_AGAIN", 8)
    model, lm = built(name, tmp_path)
    text, end = tokens(random.Random(1), 100), tokens(random.Random(2), 20)
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, HybridRunner)
    lm.forward([Feed(0, 0, text, 1)])
    lm.rollback(0, 60)
    rows, fed = lm.runner._rows, list[int]()

    def broken(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        fed.append(feeds[0].start)
        if len(fed) == 3:
            raise MemoryError
        return rows(feeds)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(lm.runner, "_rows", broken)
        lm.forward([Feed(0, 60, end, 20)])
    assert fed == [0, 8, 16]
    expected = plain(model, [*text[:60], *end])[60:]
    same(lm.forward([Feed(0, 60, end, 20)]), expected, DELTA_RULE.get(name, TOLERANCE))


def _raise(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("states", FEWER)
def test_states_of_a_window_are_kept_and_others_are_spread(states: int) -> None:
    kept, chance, rows = KeptStates(states), random.Random(3), rows_of(states)
    position = 0
    for _ in range(300):
        start = kept.nearest(chance.randint(max(0, position - MOST_WINDOW), position))
        fed = tokens(chance, chance.choice([1, 5, ROWS, 100]))
        kept.feed(start, fed)
        position = start + len(fed)
        least = {*range(max(start, position - rows) + 1, position + 1), *([start] if states > 1 and start else [])}
        assert least <= kept.places.keys()
        assert len({*kept.places.values()}) == len(kept.places) <= states
        assert len(kept.tokens) == position
    assert states < STATES or any(0 < each < position - ROWS for each in kept.places)


def test_of_a_text_that_grows_token_by_token_the_last_states_are_kept() -> None:
    """As a drafter's does, which goes back by a few tokens where it was wrong."""
    kept = KeptStates()
    for position in range(400):
        kept.feed(position, [3])
    assert {*range(400 - ROWS + 1, 401)} <= kept.places.keys()
    far = sorted(each for each in kept.places if each <= 400 - ROWS)
    assert max(far) - min(far) > 200


def memory_for(made: PreTrainedConfig, model: PreTrainedModel, states: int, context: int = CONTEXT) -> int:
    """Of one text with so many states."""
    return context * position_bytes(made, torch.float32) + states * state_bytes(model)


@pytest.mark.parametrize("states", FEWER)
@pytest.mark.parametrize("name", [*KINDS, "Kimi-Linear"])
def test_where_memory_is_short_windows_are_and_rows_are_the_plain_ones(name: str, states: int, tmp_path: Path) -> None:
    made = FAMILIES[name].config()
    model = build(made)
    folder = save(model, tmp_path)
    lm = load_model(folder, slots=9, context=CONTEXT, kv_memory=memory_for(made, model, states))
    assert isinstance(lm, CachedLM)
    assert (lm.slots, lm.most_window) == (1, min(MOST_WINDOW, max(0, states - 2)))
    assert lm.state_bytes == states * state_bytes(model)
    several = CachedLM(HybridRunner(model, 3, CONTEXT, states), lm.info, 3)
    for each in (lm, several):
        texts = Texts(model, each, states, DELTA_RULE.get(name, TOLERANCE))
        for _ in range(15):
            texts.step()


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_counted_with_the_states(name: str, tmp_path: Path) -> None:
    made = FAMILIES[name].config()
    made.max_position_embeddings = CONTEXT
    model = build(made)
    one, folder = state_bytes(model), save(model, tmp_path)
    assert slot_state_bytes(made, torch.float32) == STATES * one > 0
    slot = memory_for(made, model, STATES)
    lm = load_model(folder, slots=9, context=CONTEXT, kv_memory=3 * slot - 1)
    assert (lm.slots, lm.kv_bytes, lm.state_bytes) == (2, 2 * slot, 2 * STATES * one)
    facts = facts_of(folder, "float32")
    assert (facts.kv_bytes, facts.state_bytes) == (slot, STATES * one)
    told = [finding.text for finding in check_models(folder, [], "float32", 2, None)]
    assert any(f"in each {readable(STATES * one)} for states of recurrent layers" in text for text in told)
    with pytest.raises(ModelError, match="of them for its recurrent layers; give more"):
        load_model(folder, slots=9, context=CONTEXT, kv_memory=memory_for(made, model, 1) - 1)


def test_keys_of_one_layer_of_two_are_counted() -> None:
    assert position_bytes(FAMILIES["Granite 4"].config(), torch.float32) == 2 * 1 * 2 * 8 * 4
    assert position_bytes(FAMILIES["Kimi-Linear"].config(), torch.float32) == (16 + 8) * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, "deterministic: is not served with the recurrent layers of lfm2 models"),
        ({"quantization": "int8"}, "quantization: is not served"),
        ({"compiled": True}, "compile: is not served"),
        ({"runtime": "openvino"}, "runtime: openvino is not served"),
        ({"heads": "self:skip=1"}, "heads: is not served"),
    ],
)
def test_what_is_not_served_beside_them_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save(build(FAMILIES["LFM2"].config()), tmp_path)
    with pytest.raises(ModelError, match=message):
        load_model(folder, slots=1, **options)


def test_bfloat16_stays_within_its_tolerance(tmp_path: Path) -> None:
    model, lm = built("Mamba-2", tmp_path, slots=1, dtype="bfloat16")
    text = tokens(random.Random(2), 30)
    lm.forward([Feed(0, 0, text[:20], 0)])
    rows, expected = lm.forward([Feed(0, 15, text[15:], 15)]), plain(model.bfloat16(), text)[15:]
    assert float((rows - expected).abs().max()) <= float(expected.abs().max().clamp(min=1.0)) / 16
