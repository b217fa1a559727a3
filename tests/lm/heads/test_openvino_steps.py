"""Steps by OpenVINO that choose what is said: they draft what a forward for each token does, drawn in Python."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed
from specwire.lm import load_model
from specwire.lm.heads import openvino_heads
from specwire.lm.heads.eagle3 import Eagle3Runner
from specwire.lm.heads.mtp import MtpRunner
from specwire.lm.heads.openvino_heads import Eagle3Openvino, MtpOpenvino, OpenvinoHead
from specwire.lm.heads.slots import HeadedModel
from tests.lm import models
from tests.lm.heads import test_mtp, test_slots

KINDS = {"eagle3": (Eagle3Openvino, Eagle3Runner), "mtp": (MtpOpenvino, MtpRunner)}
SLOTS = 4
RULES = {
    "greedy": [Sampling()],
    "coupled": [Sampling(temperature=temperature, seed=seed) for temperature in (0.3, 3.0) for seed in range(4)],
    "filtered": [
        Sampling(temperature=3.0, seed=3, top_k=5),
        Sampling(temperature=3.0, seed=4, top_p=0.6),
        Sampling(temperature=3.0, seed=5, top_k=9, top_p=0.7),
    ],
}
RULES["any"] = [sampling for some in list(RULES.values()) for sampling in some]


@pytest.fixture(scope="module", params=KINDS)
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of a target, and of a head of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mtp":
        _, _, both = test_mtp.built(test_mtp.LLAMA, folder)
        return both, both
    _, _, target, head = test_slots.built(folder, seed=6, head_config=replace(test_slots.HEAD, norm_output=True))
    return target, head


def headed(where: tuple[str, str], runtime: str) -> HeadedModel:
    lm = load_model(where[0], slots=SLOTS, runtime=runtime, heads=where[1], threads=1, dtype="float32")
    assert isinstance(lm, HeadedModel)
    assert type(lm._head) in [kind[runtime == "torch"] for kind in KINDS.values()]
    return lm


@pytest.mark.parametrize("rule", RULES)
def test_they_draft_what_a_forward_for_each_token_does(rule: str, where: tuple[str, str]) -> None:
    """Of several texts in one call, as deep as each wants; behind windows, rollbacks, copies and other texts."""
    both, random = [headed(where, runtime) for runtime in ("openvino", "torch")], Random(rule)
    texts: dict[int, list[int]] = {}
    said, calls = set[tuple[int, ...]](), 0

    def some(least: int, most: int) -> list[int]:
        return [random.randrange(3, models.VOCABULARY) for _ in range(random.randint(least, most))]

    for _ in range(60):
        for slot in random.sample(range(SLOTS), random.randint(1, SLOTS)):
            if slot not in texts or len(texts[slot]) > models.CONTEXT - 8 or random.random() < 0.05:
                texts[slot] = some(2, 12)
                for lm in both:
                    lm.discard(slot)
            elif (others := sorted(texts.keys() - {slot})) and random.random() < 0.1:
                source = random.choice(others)
                shared = random.randint(1, len(texts[source]) - 1)
                texts[slot] = [*texts[source][:shared], *some(1, 3)]
                for lm in both:
                    lm.copy(source, slot, shared)
            text, window, kept = texts[slot], some(0, 4), random.randint(0, 4)
            decided = [*window[:kept], *some(1, 1)]
            for lm in both:
                start = lm.cached(slot)
                lm.forward([Feed(slot, start, [*text[start:], *window], 1 + len(window))])
                lm.rollback(slot, len(text) + len(decided) - 1)
            text += decided
        chosen = random.sample(sorted(texts), random.randint(1, len(texts)))
        asked = [HeadRequest(slot, texts[slot], random.choice(RULES[rule]), random.randint(0, 6)) for slot in chosen]
        found, expected = (lm.draft(asked) for lm in both)
        assert found == expected
        said.update(map(tuple, found))
        calls += len(asked) > 1
    assert calls > 30
    assert len(said) > 50, "a head that always says the same would show nothing"


def test_a_large_head_has_one_graph_and_drafts_the_same(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = headed(where, "openvino")
    monkeypatch.setattr(openvino_heads, "MOST_COPIED_BYTES", 0)
    large, text = headed(where, "openvino"), [3 + (7 * index) % 40 for index in range(20)]
    assert isinstance(large._head, OpenvinoHead)
    assert large._head._first is large._head._further
    asked = [HeadRequest(slot, text[: 12 + slot], Sampling(temperature=1.0, seed=slot), 5) for slot in range(3)]
    drafted = []
    for lm in (usual, large):
        lm.forward([Feed(slot, 0, text[: 11 + slot], 1) for slot in range(3)])
        drafted.append([lm.draft(asked), lm.draft(asked[:1])])
    assert drafted[0] == drafted[1]
    assert drafted[0][0][:1] == drafted[0][1]


def test_texts_at_the_end_of_their_slots_leave_others_alone(where: tuple[str, str]) -> None:
    """A deeper draft of another text goes on beside them."""
    lm, plain = headed(where, "openvino"), headed(where, "torch")
    long, short = [3 + index % 40 for index in range(models.CONTEXT - 1)], [3, 17, 8, 29]
    asked = [HeadRequest(1, long, Sampling(), 6), HeadRequest(0, short, Sampling(), 6)]
    for each in (lm, plain):
        each.forward([Feed(slot, 0, text[:-1], 1) for slot, text in enumerate((short, long, short))])
    drafted = lm.draft(asked)
    assert [len(tokens) for tokens in drafted] == [1, 6]
    assert drafted == plain.draft(asked)
    assert lm.draft([asked[1]._replace(slot=2)]) == drafted[1:]


def test_a_text_whose_values_are_not_finite_is_lost_alone(where: tuple[str, str]) -> None:
    lm, text = headed(where, "openvino"), [3, 17, 8, 29, 11]
    lm.forward([Feed(slot, 0, text[:4], 1) for slot in range(2)])
    asked = [HeadRequest(slot, text, Sampling(), 3) for slot in range(2)]
    with torch.inference_mode():
        lm._slots[0].features.between(0, 4).fill_(torch.nan)
    lost, own = lm.draft(asked)
    assert (lost, len(own)) == ([], 3)
    assert (lm.unread(0), lm.unread(1)) == (None, 0)
    assert lm.draft(asked) == [[], own]
    lm.discard(0)
    lm.forward([Feed(0, 0, text[:4], 1)])
    assert lm.draft(asked) == [own, own]
