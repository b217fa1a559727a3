"""A head in the step: texts are the target's whatever it drafts, and one that fails ends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig

from specwire.core.law.sampling import Sampling, with_rule
from specwire.core.messages import Outcome, SourceKind
from specwire.core.policy.heads import HeadDepth, HeadedText
from specwire.core.policy.tunables import LEAST_BEHIND
from specwire.lm import Feed, ModelError, load_model
from specwire.lm.heads.slots import HeadedModel
from specwire.rpc.server_options import ModelServiceOptions
from tests.lm import models
from tests.lm.heads import test_mtp as mtp
from tests.lm.heads.medusa_by_hand import FORMATS, HEADS, written
from tests.verify_service.rig import COUPLED, GREEDY, Rig, oracle
from tests.verify_service.scripted_heads import (
    LENGTH,
    MODEL,
    PROMPT,
    SayingHead,
    ScriptedHeads,
    TappedScript,
    first_right,
    kinds,
    none,
    rig_with,
    right,
    takes,
    wrong,
)
from verify_service.engine import calibration
from verify_service.engine.calibration import calibrate_head
from verify_service.engine.heads import HeadDrafting
from verify_service.metrics import families
from verify_service.server import start
from verify_service.service import report_to_wire

REPEATING = "scripted:5:memory=1:vocab=60"


class StoppedClock:
    """In place of the module `time`."""

    now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def perf_counter(self) -> float:
        return self.now_ns / 1e9


class CountedDepth(HeadDepth):
    """How often a depth was chosen."""

    chosen = 0

    def choose(
        self, texts: Sequence[HeadedText], decoding: int, V: Callable[[int], float]
    ) -> tuple[Sequence[int], int]:
        self.chosen += 1
        return super().choose(texts, decoding, V)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("tokens", [right, wrong, first_right, none])
def test_the_text_is_the_target_s_whatever_the_head_says(
    tokens: Callable[[list[int]], list[int]], sampling: Sampling
) -> None:
    heads = ScriptedHeads(tokens)
    rig = rig_with(heads)
    prompts = {handle: (*PROMPT, handle) for handle in range(3)}
    for handle, prompt in prompts.items():
        rig.open(handle, prompt, sampling=sampling)
    rig.run()
    for handle, prompt in prompts.items():
        whole = oracle(rig.lm, prompt, LENGTH, sampling)
        assert rig.tokens[handle] == whole[: len(rig.tokens[handle])]
        assert handle in rig.finished
    assert heads.asked
    assert kinds(rig) == (set() if tokens is none else {SourceKind.HEAD})


def of_files(form: str, folder: Path) -> str:
    """A target, beside which there are such heads in `folder`."""
    made = models.config("llama")
    made.eos_token_id = None
    written(folder / "head", *FORMATS[form]())
    return models.save(models.build(made), folder / "target")


@pytest.mark.parametrize(
    ("form", "runtime"),
    [
        *product([*FORMATS, *("mtp-qwen3", "mtp-llama", "mtp-mimo", "mtp-recurrent")], ["torch"]),
        *product(["medusa", "hydra"], ["openvino"]),
    ],
)
def test_texts_are_the_same_beside_heads_of_files(form: str, runtime: str, tmp_path: Path) -> None:
    """Two greedy sessions and two that are drawn, at once."""
    if form == "mtp-recurrent":
        *_, where = mtp.beside_recurrent(Qwen3_5TextConfig, tmp_path)
    elif form.startswith("mtp-"):
        *_, where = mtp.built(mtp.FORMATS[form.removeprefix("mtp-")], tmp_path)
    else:
        where = of_files(form, tmp_path)
    texts: list[dict[int, list[int]]] = []
    for heads in (None, where if form.startswith("mtp-") else str(tmp_path / "head")):
        rig = Rig(where, context=models.CONTEXT, ngram=False, heads=heads, runtime=runtime)
        for handle in range(4):
            rig.open(handle, (*PROMPT, handle), sampling=COUPLED if handle % 2 else GREEDY, max_tokens=30)
        rig.run()
        assert kinds(rig) == ({SourceKind.HEAD} if heads else set())
        texts.append(rig.tokens)
    assert texts[0] == texts[1]


def test_plain_steps_are_measured_without_features_and_what_these_take_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load_model(of_files("medusa", tmp_path), slots=4, heads=str(tmp_path / "head"))
    assert isinstance(lm, HeadedModel)
    clock = StoppedClock()
    forward, target = lm.forward, lm.runner

    def timed(feeds: Sequence[Feed]) -> torch.Tensor:
        rows = forward(feeds)
        clock.now_ns += 1_000_000 + 250_000 * target.tapping
        return rows

    monkeypatch.setattr(lm, "forward", timed)
    monkeypatch.setattr(calibration, "time", clock)
    assert calibration.step_costs(lm).forward.points[1] == pytest.approx(1000.0)
    depth = calibrate_head(lm, lm)
    assert [depth.tapped_us(sessions) for sessions in (1, 4)] == pytest.approx([250.0, 250.0])


@pytest.mark.parametrize("form", ["medusa", "hydra"])
def test_what_is_measured_of_a_head_is_no_deeper_than_it_drafts(form: str, tmp_path: Path) -> None:
    lm = load_model(of_files(form, tmp_path), slots=4, heads=str(tmp_path / "head"))
    assert isinstance(lm, HeadedModel)
    assert calibrate_head(lm, lm).most == HEADS
    assert [lm.cached(slot) for slot in range(4)] == [0] * 4


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
async def test_a_verifier_does_not_start_beside_heads_that_cannot_work(runtime: str, tmp_path: Path) -> None:
    """Each weight is finite; their products are not."""
    where = models.save(models.build(models.config("llama")), tmp_path / "target")
    config, tensors, name = FORMATS["medusa"]()
    written(tmp_path / "head", config, {**tensors, "0.2.weight": torch.full((50, 32), 3e38)}, name)
    options = ModelServiceOptions(where, heads=str(tmp_path / "head"), runtime=runtime, slots=1)
    with pytest.raises(ModelError, match=f"heads: {tmp_path / 'head'}: its logits are not finite"):
        await start(options)


@pytest.mark.parametrize("mistaken", [False, True])
def test_verdicts_leave_before_a_head_reads_or_drafts(mistaken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """mistaken: nothing is told before, and this test must see it."""
    if mistaken:
        draft = HeadDrafting.draft
        monkeypatch.setattr(
            HeadDrafting, "draft", lambda self, step, now_us, _tell: draft(self, step, now_us, lambda: None)
        )
    heads, waiting = ScriptedHeads(right), list[bool]()
    rig = rig_with(heads)
    heads.reading = heads.slowed = lambda: waiting.append(len(rig.engine.sessions.reports) > 0)
    rig.open(1, PROMPT)
    while rig.engine.step() is None:
        assert rig.engine.steps <= LENGTH
    assert len(rig.tokens[1]) == LENGTH
    assert len(waiting) == len(heads.caught_up) + len(heads.together)
    assert len(waiting) > 4
    assert any(waiting) is mistaken


def test_a_head_drafts_for_the_next_step_and_never_past_the_room() -> None:
    heads = ScriptedHeads(right)
    rig = rig_with(heads)
    rig.open(1, PROMPT, max_tokens=6)
    rig.run()
    assert [request.tokens[: len(PROMPT)] for request in heads.asked] == [list(PROMPT)] * len(heads.asked)
    assert all(request.depth >= 1 for request in heads.asked)
    assert len(rig.tokens[1]) == 6
    assert Outcome.ACCEPTED in rig.outcomes[1]


@pytest.mark.parametrize("rule", ["rejection", "block", "threshold(0.3)", "typical(0.3,0.3)", None])
def test_rules_that_look_at_draft_tokens_and_sessions_without_get_none_of_a_head(rule: str | None) -> None:
    heads = ScriptedHeads(right)
    rig = rig_with(heads)
    rig.open(1, PROMPT, sampling=with_rule(COUPLED, rule or "coupled"), head=rule is not None)
    rig.run()
    assert not heads.asked
    assert heads.heeded
    assert not any(heads.heeded), "nothing is kept for it"


def test_features_are_kept_of_the_sessions_with_a_head_alone() -> None:
    heads = ScriptedHeads(right)
    rig = rig_with(heads)
    rig.open(2, (*PROMPT, 2))
    rig.open(3, PROMPT, head=False)
    rig.run()
    (slot,) = {request.slot for request in heads.asked}
    assert {*map(tuple, heads.heeded)} == {(), (slot,)}


@pytest.mark.parametrize("more", [(2,) * 9, ()], ids=["a prompt", "one that its slot holds"])
def test_a_text_that_begins_while_nothing_is_kept_is_thought_of_at_once(more: tuple[int, ...]) -> None:
    """Its prompt is kept where the head is expected to pay: so it need not begin in the middle."""
    heads = ScriptedHeads(right)
    rig = rig_with(heads, context=1024, growth=0.02)
    rig.open(1, PROMPT * 4, max_tokens=195, ledger_us=10**6, scope=b"a")
    rig.run()
    assert not heads.asked
    assert not heads.heeded[-1], "in debt for so long that it is let be"
    before = len(heads.heeded)
    rig.open(2, (*PROMPT * 4, *more), max_tokens=30, scope=b"a")
    rig.run()
    assert all(heads.heeded[before:])
    assert heads.asked


def let_features_take(rig: Rig, us: float, heads: ScriptedHeads) -> None:
    """Of each forward in which some are kept."""
    forward = rig.lm.forward

    def tapped(feeds: Sequence[Feed]) -> torch.Tensor:
        rig.now += us if heads.heeded and heads.heeded[-1] else 0.0
        return forward(feeds)

    rig.lm.forward = tapped  # type: ignore[method-assign]  # as the rig's own


def test_what_features_take_is_the_head_s_and_not_plain_decoding_s() -> None:
    """Each step with features takes a fifth longer; plain steps are known as they are without."""
    heads = ScriptedHeads(none)
    rig = rig_with(heads, HeadDepth({1: 20.0}, tapped_us={1: 200.0}), context=1024, growth=0.02)
    let_features_take(rig, 200.0, heads)
    rig.open(1, PROMPT, max_tokens=400)
    rig.run()
    assert heads.asked
    assert 900.0 < rig.engine.costs.forward.at(1) < 1100.0


def test_a_text_that_is_guessed_wrong_pays_for_its_features_too() -> None:
    """Where a head pays for other texts. Kept for all steps, features alone would take a fifth of the time."""
    heads = ScriptedHeads(right)
    rig = rig_with(heads, HeadDepth({1: 200.0}, tapped_us={1: 200.0}), context=1024, growth=0.02)
    let_features_take(rig, 200.0, heads)
    heads.slowed = takes(rig, 200.0, heads)
    rig.open(1, PROMPT, max_tokens=200)
    rig.run()
    assert len(heads.asked) > 20
    heads.tokens_at = lambda _length: wrong
    began, kept, asked = rig.now, len(heads.heeded), len(heads.asked)
    rig.open(2, (*PROMPT, 2), max_tokens=256)
    rig.run()
    assert len(heads.asked) > asked
    assert sum(map(bool, heads.heeded[kept:])) < 60
    assert rig.now - began < 256 * 1000.0 * 1.02 + 2 * 1000.0 + 5000.0


def test_features_are_charged_for_forwards_and_not_for_plans() -> None:
    """A step that waits is planned again and again; nothing is computed meanwhile."""
    drafting = HeadDrafting(ScriptedHeads(right), HeadDepth({1: 200.0}, tapped_us={1: 200.0}))
    rig = Rig(MODEL, ngram=False, context=1024, growth=0.02, drafting=drafting)
    rig.open(1, PROMPT, max_tokens=200)
    for _ in range(20):
        rig.engine.step()
    (held,) = rig.engine.roster
    rig.engine._draft(drafting, {held.slot: held})
    assert drafting._takers == [held]
    spare_us = held.session.ledger.spare_us(1000.0)
    for _ in range(5):
        rig.engine._draft(drafting, {held.slot: held})
    assert held.session.ledger.spare_us(1000.0) == spare_us
    taken_us = 200.0 * rig.engine.costs.seen(1).pace
    drafting.charge_features(1)
    assert held.session.ledger.spare_us(1000.0) == pytest.approx(spare_us - taken_us)


def test_what_a_head_takes_is_told_apart_from_the_gap() -> None:
    heads = ScriptedHeads(right)
    rig = rig_with(heads)
    heads.slowed = takes(rig, 700.0)
    for handle in range(2):
        rig.open(handle, (*PROMPT, handle))
    rig.run()
    told = [report_to_wire(report).timings for report in rig.reports if report.timings is not None]
    assert {step.drafted_us // 700 for step in told} == {0, 1}
    assert all(step.gap_us < 700 for step in told)
    drafted_us = sum({step.step: step.drafted_us for step in told}.values())
    assert 700 * len(heads.together) <= drafted_us < 700 * (len(heads.together) + 1)
    counted = {each.name: each.samples[0].value for each in families(rig.engine) if each.samples}
    assert counted["step_drafted_seconds"] == pytest.approx(drafted_us / 1e6)


@pytest.mark.parametrize("growth", [0.02, 0.1])
@pytest.mark.parametrize("head_us", [150.0, 300.0, 500.0])
def test_a_head_that_is_dear_and_wrong_keeps_no_look_up_quiet(head_us: float, growth: float) -> None:
    """It was right for another text, so it drafts at once. Then the text repeats itself, and is copied all the same."""
    prompt, steps = (5, 6, 7), {}
    for asked in (False, True):
        heads = ScriptedHeads(right, model=REPEATING)
        rig = Rig(REPEATING, context=1024, growth=growth, drafting=HeadDrafting(heads, HeadDepth({1: head_us})))
        heads.slowed = takes(rig, head_us, heads)
        rig.open(1, (1, 2, 3), max_tokens=200, ngram=False)
        rig.run()
        heads.tokens_at = lambda _length: wrong
        before, began, drafts = rig.engine.steps, rig.now, len(heads.asked)
        rig.open(2, prompt, max_tokens=128, head=asked)
        rig.run()
        steps[asked] = rig.engine.steps - before
        assert (len(heads.asked) > drafts) == asked
        assert rig.tokens[2] == oracle(rig.lm, prompt, 128)
        assert rig.now - began < 0.5 * 128 * 1000.0
    assert steps[True] <= steps[False] + 1


@pytest.mark.parametrize("sessions", [1, 3])
def test_a_slow_head_that_is_never_right_costs_next_to_nothing(sessions: int) -> None:
    """Each time as much as two forwards, which nobody expects of it."""
    took = {}
    for tokens in (wrong, None):
        heads = ScriptedHeads(tokens or none)
        more: dict[str, Any] = {} if tokens else {"drafting": None}
        rig = rig_with(heads, context=1024, growth=0.0, **more)
        heads.slowed = takes(rig, 2000.0)
        for handle in range(sessions):
            rig.open(handle, (*PROMPT, handle), max_tokens=600)
        rig.run()
        took[tokens] = rig.now
    assert took[wrong] < 1.05 * took[None]


def test_a_head_whose_first_forward_is_dear_drafts_as_deep_as_pays_and_bears_a_hiccup() -> None:
    """One token in five is wrong. A shallow draft gains nothing, and a text that begins with such ones is in debt."""
    heads = ScriptedHeads(right)
    heads.tokens_at = lambda length: (
        lambda tokens: [token if at % 5 else (token + 1) % 60 for at, token in enumerate(tokens, length)]
    )
    rig = rig_with(heads, HeadDepth({1: 100.0}, first_us={1: 900.0}), context=512, growth=0.02)

    def slow() -> None:
        took_us = 900.0 + 100.0 * (heads.asked[-1].depth - 1)
        rig.now += 2.9 * took_us if len(heads.together) == 3 else took_us

    heads.slowed = slow
    rig.open(1, PROMPT, max_tokens=120)
    rig.run()
    assert rig.engine.steps < 30


def test_a_head_that_fails_is_switched_off_with_a_sentence_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_tokens: list[int]) -> list[int]:
        raise RuntimeError("a kernel is missing")

    heads = ScriptedHeads(fails)
    rig = rig_with(heads)
    for handle in (1, 2):
        rig.open(handle, (*PROMPT, handle))
    rig.run()
    for handle in (1, 2):
        assert rig.tokens[handle] == oracle(rig.lm, (*PROMPT, handle), LENGTH)[: len(rig.tokens[handle])]
        assert handle in rig.finished
    assert len(heads.asked) == 2, "it is asked once"
    assert heads.stopped
    assert [record.message for record in caplog.records if "head" in record.message] == [
        "the head failed, and is switched off: RuntimeError: a kernel is missing"
    ]


def test_a_head_that_is_short_of_memory_is_asked_again_later(caplog: pytest.LogCaptureFixture) -> None:
    """First it cannot read, then it cannot draft. Each try takes little of the time, and both are told of once."""
    heads, decided = ScriptedHeads(right), list[int]()
    rig = rig_with(heads, growth=0.0)

    def short() -> None:
        decided.append(len(rig.tokens[1]))
        rig.now += 10.0
        if len(decided) <= 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")

    heads.reading = heads.slowed = short
    rig.open(1, PROMPT)
    rig.run()
    assert rig.tokens[1] == oracle(rig.lm, PROMPT, LENGTH)
    assert Outcome.ACCEPTED in rig.outcomes[1]
    assert not heads.stopped
    # Ten microseconds are EXPLORED_SHARE of two steps.
    assert all(later >= sooner + 2 for sooner, later in pairwise(decided[:3]))
    assert [record.message for record in caplog.records if "head" in record.message] == [
        "the head is short of memory, and drafts nothing until there is some: "
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes"
    ]


def test_while_a_head_is_short_of_memory_no_features_are_kept() -> None:
    heads = ScriptedHeads(right)
    rig = rig_with(heads, context=1024, growth=0.0)

    def short() -> None:
        rig.now += 1000.0  # a step: it is left alone for two hundred
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")

    heads.reading = heads.slowed = short
    rig.open(1, PROMPT, max_tokens=150)
    rig.run()
    kept = [len(slots) > 0 for slots in heads.heeded]
    assert len(kept) >= 148
    assert 0 < sum(kept) <= 2


def test_a_prompt_is_read_once_and_its_own_text_is_not_charged() -> None:
    """It takes as long as twenty forwards: with that in its ledger no session could bear a window for long."""
    heads = ScriptedHeads(right)
    rig = rig_with(heads, context=1024, growth=0.0)
    heads.reading = takes(rig, 20_000.0)
    rig.open(1, PROMPT, max_tokens=200)
    rig.run()
    assert heads.caught_up == [0]
    assert rig.engine.steps < 40


def test_of_a_batch_s_prompts_as_much_is_read_as_its_ledgers_can_bear() -> None:
    """A prompt takes twelve plain steps to read; charged for all of it, none of eight texts could bear a draft."""
    heads = ScriptedHeads(right)
    heads.unread = lambda slot: 1 if any(each.slot == slot for each in heads.asked) else 600  # type: ignore[method-assign]  # of this one
    depth = HeadDepth({1: 20.0}, row_us=10.0)
    rig = rig_with(heads, depth, slots=8, context=1024, growth=0.0)
    heads.reading = takes(rig, 640.0)
    for handle in range(8):
        rig.open(handle, (*PROMPT, handle), max_tokens=100)
    rig.run()
    assert {each.slot for each in heads.asked} == set(range(8))
    assert len(heads.skipped) >= 7
    assert all(LEAST_BEHIND <= left < 600 for _, left in heads.skipped)
    assert rig.engine.steps < 60


def test_features_of_a_text_in_debt_are_not_kept_for_tries() -> None:
    heads = ScriptedHeads(wrong)
    depth = HeadDepth({1: 2000.0}, tapped_us={1: 1.0})
    rig = rig_with(heads, depth, context=1024, growth=1.0)
    for handle in range(2):
        rig.open(handle, (*PROMPT, handle), max_tokens=900, ledger_us=10**8 if handle else 0)
    rig.run()
    drafted = {request.slot for request in heads.asked}
    assert len(drafted) == 1
    assert {slot for slots in heads.heeded for slot in slots} == drafted


def test_where_it_does_not_pay_it_is_tried_with_all_texts() -> None:
    heads = ScriptedHeads(wrong)
    rig = rig_with(heads, 2000.0, context=1024, growth=1.0)
    for handle in range(4):
        rig.open(handle, (*PROMPT, handle), max_tokens=900)
    rig.run()
    assert set(heads.together) == {4}
    assert len(heads.together) < 6


def test_a_try_drafts_for_as_long_as_features_were_kept_for_it() -> None:
    """A draft takes one step, and the features before it as long as more than three drafts."""
    heads, depth = ScriptedHeads(wrong), HeadDepth({1: 500.0}, tapped_us={1: 100.0})
    rig = rig_with(heads, depth, context=4096, growth=1.0)
    plain_unread, drafted_at = heads.unread, list[int]()

    def unread(slot: int) -> int | None:
        """As of a text whose features were not kept before."""
        kept = [slot in slots for slots in heads.heeded[:-LEAST_BEHIND:-1]]
        return plain_unread(slot) if all(kept) else None

    def slow() -> None:
        drafted_at.append(len(heads.heeded))
        rig.now += 1000.0

    heads.unread, heads.slowed = unread, slow  # type: ignore[method-assign]  # of this one
    rig.open(1, PROMPT, max_tokens=3400)
    rig.run(most=4000)
    assert drafted_at[3] - drafted_at[0] < LEAST_BEHIND
    assert drafted_at[4] - drafted_at[3] > 10 * LEAST_BEHIND
    assert drafted_at[7] - drafted_at[4] < LEAST_BEHIND
    assert len(drafted_at) in (8, 12), "whole tries, of four drafts each"
    assert sum(map(bool, heads.heeded)) < len(heads.heeded) / 10, "else steps are as if there were no head"


def beside_script(tokens: Callable[[list[int]], list[int]], **more: Any) -> tuple[Rig, SayingHead, TappedScript]:
    """A scripted target with a head in `HeadedModel`."""
    head, targets = SayingHead(tokens), list[TappedScript]()

    def beside(lm: Any) -> HeadedModel:
        targets.append(TappedScript(lm))
        return HeadedModel(targets[0], lm.info, lm.slots, (), head)

    return Rig(MODEL, ngram=False, context=4096, growth=0.0, beside=beside, **more), head, targets[0]


def long_prompt(begin: int = 0) -> list[int]:
    return [2 + (7 * at + begin) % 58 for at in range(2000)]


def test_behind_a_long_prompt_that_is_a_service_s_first_text_the_head_drafts() -> None:
    """The prompt is read while it is fed, in four parts, and its features are not kept for nothing."""
    rig, head, target = beside_script(right)
    rig.open(1, long_prompt(), max_tokens=300)
    rig.run()
    assert rig.tokens[1] == oracle(target.lm, long_prompt(), 300)
    assert head.drafts > 30
    assert len(target.forwards) < 300 / 4
    assert sum(target.forwards) <= head.drafts + 6


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_long_prompt_that_comes_while_the_head_does_not_pay_is_drafted_for_when_it_is_tried(taken_over: bool) -> None:
    """It is thought to take two forwards of the target, so the prompt is not read: more of it waits than is kept."""
    rig, head, _ = beside_script(right)
    assert isinstance(rig.lm, HeadedModel)
    rig.engine._drafting = HeadDrafting(rig.lm, HeadDepth({1: 2000.0}))
    text = long_prompt(3)
    rig.open(2, text[:1900] if taken_over else text, decided=text[1900:] if taken_over else (), max_tokens=2000)
    rig.run(most=3000)
    assert len(rig.tokens[2]) == (1900 if taken_over else 2000)
    assert head.drafts > 0


# A target that drafts by some of its own layers


def with_idle_layer(folder: Path, layer: int = 2) -> str:
    """A target of which a layer adds next to nothing: without it drafts are right most of the time."""
    made = models.config("llama")
    made.num_hidden_layers, made.eos_token_id = 4, None
    target = models.build(made, seed=3)
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            target.get_parameter(f"model.layers.{layer}.{name}.weight").mul_(0.05)
    return models.save(target, folder)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(("spec", "good"), [("self:skip=2", True), ("self:skip=0,1", False), ("self:exit=1", False)])
def test_texts_are_the_target_s_whatever_layers_it_leaves_out(
    spec: str, good: bool, sampling: Sampling, tmp_path: Path
) -> None:
    where, rigs = with_idle_layer(tmp_path), {}
    for heads in (None, spec):
        rig = rigs[heads] = Rig(where, slots=5, context=models.CONTEXT, ngram=False, heads=heads, growth=0.0)
        for handle in range(5):
            rig.open(handle, (*PROMPT, *PROMPT, 6 + handle), sampling=sampling, max_tokens=24)
        rig.run()
        assert len(rig.finished) == 5
    plain, drafting = rigs[None], rigs[spec]
    assert drafting.tokens == plain.tokens
    assert len({tuple(tokens) for tokens in plain.tokens.values()}) == 5
    assert kinds(drafting) == {SourceKind.HEAD}
    assert drafting.engine.steps < (0.6 if good else 1.01) * plain.engine.steps


def test_a_session_in_debt_is_drafted_for_as_soon_as_it_can_bear_the_window_as_well() -> None:
    """A call is a quarter of a step. Begun with less in hand, it used up what its own window needs, again and again."""
    heads = ScriptedHeads(right)
    rig = rig_with(heads, 250.0, context=2048, growth=0.02)
    heads.slowed = takes(rig, 250.0)
    rig.open(1, PROMPT, max_tokens=800, ledger_us=2000)
    rig.run()
    assert rig.engine.steps < 200


def test_what_a_head_let_lie_is_charged_where_its_first_reading_is_not() -> None:
    """It has 40 positions to read before each draft, which takes five forwards, and is right once a time."""
    heads = ScriptedHeads(first_right)
    heads.forgets = True
    rig = rig_with(heads, context=2048, growth=0.0)
    heads.reading = takes(rig, 5000.0)
    rig.open(1, PROMPT, max_tokens=400)
    rig.run()
    assert 2 <= len(heads.caught_up) <= 8
    assert rig.now < 1.1 * 400 * 1000.0


def test_a_head_that_does_not_pay_is_not_thought_of_at_every_step() -> None:
    depth = CountedDepth({1: 2000.0})
    rig = rig_with(ScriptedHeads(wrong), depth, context=1024, growth=1.0)
    rig.open(1, PROMPT, max_tokens=900)
    rig.run()
    assert 900 / 17 - 1 <= depth.chosen < 900 / 10
