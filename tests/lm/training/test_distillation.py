"""Training: what a place learns, that it learns, and that one that was killed goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import demo_pair
from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed, ModelError
from specwire.lm import LanguageModel, load_model
from specwire.lm.heads import eagle3, medusa, mtp
from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config
from specwire.lm.heads.medusa import HYDRA, MEDUSA, Medusa, MedusaConfig
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.runners import linear
from specwire.lm.training import distillation
from specwire.lm.training.distillation import (
    Lesson,
    Schedule,
    Taught,
    acceptance,
    draft_ids,
    lesson,
    loss_of,
    train,
    unrolled,
)
from tests.lm import models

VOCABULARY, HIDDEN, LAYERS = 48, 32, 4
CONFIG = Eagle3Config(HIDDEN, 48, 4, 2, 8, VOCABULARY, 40, (1, 2, 3))
SCHEDULE = Schedule(5e-3, 5, 40, 20)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(shape)
    model.eval()
    return model


def head_of(target: LlamaForCausalLM) -> Eagle3:
    torch.manual_seed(5)
    head = Eagle3(CONFIG, target.get_parameter("model.embed_tokens.weight").detach().clone())
    head.d2t.copy_(draft_ids(torch.arange(VOCABULARY), CONFIG.draft_vocabulary))
    return head


def medusa_of(target: LlamaForCausalLM, kind: str) -> Medusa:
    """Two heads."""
    torch.manual_seed(5)
    shape = MedusaConfig(
        kind, 2, 1, HIDDEN, VOCABULARY, VOCABULARY, LAYERS, grounded=kind == HYDRA, output_bias=kind == HYDRA
    )
    head = Medusa(shape, target.get_parameter("model.embed_tokens.weight").detach().clone())
    head.begin(target.get_parameter("lm_head.weight").detach())
    return head


def mtp_of(target: LlamaForCausalLM) -> mtp.MtpHead:
    torch.manual_seed(5)
    eps = target.config.rms_norm_eps
    shape = mtp.MtpConfig(HIDDEN, 48, 4, 2, 8, VOCABULARY, LAYERS, eps, 10_000.0, 8, mtp.DEFAULT_ROPE, False)
    parts = (target.get_parameter(name).detach() for name in ("model.embed_tokens.weight", "lm_head.weight"))
    head = mtp.MtpHead(shape, *parts)
    head.begin()
    return head


def student(target: LlamaForCausalLM, kind: str) -> Taught:
    if kind == mtp.KIND:
        return mtp_of(target)
    return head_of(target) if kind == "eagle3" else medusa_of(target, kind)


def windows(seed: int = 1) -> Iterator[torch.Tensor]:
    """Each token follows from the one before, so that a state tells what comes after the next one, too."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = [torch.randint(VOCABULARY, (4,), generator=generator)]
        for _ in range(23):
            tokens.append((5 * tokens[-1] + 7) % VOCABULARY)
        yield torch.stack(tokens, dim=1)


def test_a_place_learns_what_the_target_says_behind_what_it_has_read(target: LlamaForCausalLM) -> None:
    head, tokens = head_of(target), next(windows())
    given = lesson(target, tokens, CONFIG.taps)
    ids = torch.arange(CONFIG.draft_vocabulary) + head.d2t
    for step, (own, wanted) in enumerate(unrolled(head, given, 3)):
        assert own.shape == wanted.shape == (4, 20, CONFIG.draft_vocabulary)
        # Place t reads tokens up to t + 1 + step: the target's answer to the last of them.
        assert torch.equal(wanted, given.logits[:, step + 1 : step + 21][..., ids])


@pytest.mark.parametrize("kind", [MEDUSA, HYDRA])
@torch.no_grad()
def test_heads_begin_with_what_the_target_says_of_the_state_that_they_read(target: LlamaForCausalLM, kind: str) -> None:
    """Each head's place t reads the state at t, of which the target says what follows at t + 1."""
    head, tokens = medusa_of(target, kind), next(windows())
    said = target(tokens).logits
    given = Lesson(tokens, target.model(tokens).last_hidden_state, said)
    for step, (own, wanted) in enumerate(unrolled(head, given, 2)):
        assert own.shape == wanted.shape == (4, 21, VOCABULARY)
        assert torch.allclose(own, said[:, :21], atol=1e-4)
        assert torch.equal(wanted, said[:, step + 1 : step + 22])


def test_the_ids_that_occur_most_are_said() -> None:
    offsets = draft_ids(torch.tensor([5, 0, 9, 1, 7, 7]), 3)
    assert (torch.arange(3) + offsets).tolist() == [2, 4, 5]


@pytest.mark.parametrize("kind", ["eagle3", MEDUSA, HYDRA, mtp.KIND])
def test_it_learns_and_goes_on_where_it_was_killed(
    kind: str, target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same curve of held-out acceptance, whole and in two parts."""
    monkeypatch.setattr(distillation, "EVALUATE_EVERY", 10)
    monkeypatch.setattr(distillation, "SAVE_EVERY", 10)
    held_out, said = next(windows(9)), list[str]()

    def run(work: Path, stop: int | None = None, head: Taught | None = None) -> list[tuple[int, list[float]]]:
        work.mkdir(exist_ok=True)
        some = (tokens for tokens, _ in zip(windows(), range(stop or 1 << 30), strict=False))
        taught = head or student(target, kind)
        return train(taught, target, some, held_out, SCHEDULE, work, depth=2, tell=said.append).curve

    taught, untaught = student(target, kind), student(target, kind)
    whole = run(tmp_path / "whole", head=taught)
    assert run(tmp_path / "parts", stop=25) == whole[:2]
    assert run(tmp_path / "parts") == whole
    given = lesson(target, held_out, taught.config.taps)
    assert all(new > old for new, old in zip(whole[-1][1], acceptance(untaught, iter([given]), 2), strict=True))
    assert loss_of(taught, given, 2, 0.8) < loss_of(untaught, given, 2, 0.8) - 0.2
    assert any("held-out acceptance by position" in line for line in said)


def test_a_checkpoint_of_another_head_is_refused_in_a_sentence(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "SAVE_EVERY", 2)
    short, held_out = Schedule(5e-3, 1, 2, 1), next(windows(9))
    train(medusa_of(target, MEDUSA), target, windows(), held_out, short, tmp_path, depth=2)
    with pytest.raises(ModelError, match="training.checkpoint: is of another head"):
        train(medusa_of(target, HYDRA), target, windows(), held_out, short, tmp_path, depth=2)


@pytest.mark.parametrize("kind", ["eagle3", MEDUSA, HYDRA, mtp.KIND])
@torch.no_grad()
def test_what_was_taught_is_accepted_as_often_when_it_is_served(
    kind: str, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Over the target's own greedy texts, where a guess that is right is what follows."""
    head, depth = student(target, kind), 2
    with torch.enable_grad():
        train(head, target, windows(), next(windows(9)), SCHEDULE, tmp_path, depth=depth)
    where = models.save(target, tmp_path / "target")
    if isinstance(head, Eagle3):
        eagle3.save(head, tmp_path / "head", where)
    elif isinstance(head, mtp.MtpHead):
        mtp.save(head, tmp_path / "head", where)
    else:
        medusa.save(head, tmp_path / "head", where)
    given = own_texts(target, next(windows(4))[:, :2], 50, head.config.taps)
    lm = load_model(where, slots=len(given.tokens), heads=str(tmp_path / "head"), threads=1)
    found = served_acceptance(lm, given, depth)
    assert found == acceptance(head, iter([given]), depth)
    assert found[0] > 0


@torch.no_grad()
def test_the_demo_pair_s_head_is_accepted_as_often_when_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its weights as they are: a verifier rounds large ones to 8 bits."""
    monkeypatch.setattr(linear, "LEAST_ROUNDED", 1 << 30)
    target = LlamaForCausalLM.from_pretrained(demo_pair.TARGET, dtype=torch.float32).eval()
    embedding = target.get_parameter("model.embed_tokens.weight").detach()
    head = eagle3.load(demo_pair.HEAD, target.config.num_hidden_layers, embedding).float()
    given = own_texts(target, torch.tensor([[300, 400], [500, 600], [700, 800]]), 32, head.config.taps)
    lm = load_model(str(demo_pair.TARGET), slots=3, context=64, heads=str(demo_pair.HEAD), threads=1)
    found = served_acceptance(lm, given, 3)
    assert found == acceptance(head, iter([given]), 3)
    assert found[0] > 0.3


def own_texts(target: LlamaForCausalLM, begun: torch.Tensor, length: int, taps: tuple[int, ...]) -> Lesson:
    """What the target says of its greedy texts behind their first tokens."""
    tokens = begun
    while tokens.shape[1] < length:
        tokens = torch.cat([tokens, target(tokens).logits[:, -1:].argmax(-1)], dim=1)
    told = target(tokens, output_hidden_states=True)
    return Lesson(tokens, torch.cat([told.hidden_states[tap] for tap in taps], -1), told.logits)


def served_acceptance(lm: LanguageModel, given: Lesson, depth: int) -> list[float]:
    """As `acceptance`, of what is drafted for all texts in one batch, each of them two places behind the one before."""
    assert isinstance(lm, HeadedModel)
    texts, best = given.tokens.tolist(), given.logits.argmax(-1).tolist()
    right, tested = [0] * depth, [0] * depth
    places = given.tokens.shape[1] - depth - 1
    for turn in range(places + 2 * (len(texts) - 1)):
        at = {slot: turn - 2 * slot for slot in range(len(texts)) if 0 <= turn - 2 * slot < places}
        seen = {slot: texts[slot][: place + 2] for slot, place in at.items()}
        lm.forward([Feed(slot, lm.cached(slot), text[lm.cached(slot) : -1], 1) for slot, text in seen.items()])
        drafted = lm.draft([HeadRequest(slot, text, Sampling(), depth) for slot, text in seen.items()])
        for (slot, place), guesses in zip(at.items(), drafted, strict=True):
            for step, guess in enumerate(guesses):
                tested[step] += 1
                if guess != best[slot][place + 1 + step]:
                    break
                right[step] += 1
    return [one / max(1, of) for one, of in zip(right, tested, strict=True)]


COURSE: dict[str, int | str] = {"rows": 4, "data": "abc"}


@pytest.fixture
def kept(target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a training of 10 steps of 20 has left its checkpoint; the rate falls from step 16 on."""
    monkeypatch.setattr(distillation, "SAVE_EVERY", 2)
    gone_on(target, tmp_path, 10)
    return tmp_path


def gone_on(target: LlamaForCausalLM, work: Path, until: int, steps: int = 20, **course: int | str) -> None:
    some = (tokens for tokens, _ in zip(windows(), range(until), strict=False))
    schedule = Schedule(5e-3, 2, steps, 4)
    train(head_of(target), target, some, next(windows(9)), schedule, work, depth=2, course=COURSE | course)


@pytest.mark.parametrize(
    ("course", "message"),
    [({"rows": 8}, "rows: is of 4, not of 8"), ({"data": "abd"}, "data: is of abc, not of abd")],
)
def test_a_checkpoint_of_another_course_is_refused(
    course: dict[str, Any], message: str, target: LlamaForCausalLM, kept: Path
) -> None:
    refusal = f"{distillation.CHECKPOINT}: {message}; train in another folder, or remove it"
    with pytest.raises(ModelError, match=refusal):
        gone_on(target, kept, 20, **course)


def test_more_steps_may_follow_while_the_rate_is_constant(target: LlamaForCausalLM, kept: Path) -> None:
    gone_on(target, kept, 18, steps=22)
    gone_on(target, kept, 20, steps=22)
    with pytest.raises(ModelError, match="training.checkpoint: steps: its rate falls to the end of 22 already"):
        gone_on(target, kept, 22, steps=30)


@pytest.mark.parametrize("size", [0, 5, 1000, -20])
def test_a_checkpoint_that_was_cut_short_is_refused(size: int, target: LlamaForCausalLM, kept: Path) -> None:
    path = kept / distillation.CHECKPOINT
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match="training.checkpoint: is no checkpoint that can be read"):
        gone_on(target, kept, 20)


@pytest.mark.parametrize("held", [[1], {"step": 3}, {"step": "x", "curve": [], "course": COURSE}])
def test_a_checkpoint_of_something_else_is_refused(held: Any, target: LlamaForCausalLM, kept: Path) -> None:
    torch.save(held, kept / distillation.CHECKPOINT)
    with pytest.raises(ModelError, match="training.checkpoint: is no checkpoint that can be read"):
        gone_on(target, kept, 20)


def test_only_scored_tokens_are_learnt(target: LlamaForCausalLM) -> None:
    """All tokens scored is as without a mask; of tokens that are not nothing counts."""
    head, tokens = head_of(target), next(windows())
    every = torch.ones_like(tokens, dtype=torch.bool)
    whole = loss_of(head, lesson(target, tokens, CONFIG.taps, in_bfloat16=False), 3, 0.8)
    assert torch.allclose(loss_of(head, lesson(target, tokens, CONFIG.taps, every, in_bfloat16=False), 3, 0.8), whole)
    one = torch.zeros_like(every)
    one[0, 7] = True  # step 0 predicts it at place 5, step 1 at place 4
    given = lesson(target, tokens, CONFIG.taps, one, in_bfloat16=False)
    expected = torch.zeros(())
    for step, (own, said) in enumerate(unrolled(head, given, 2)):
        log_q, wanted = own[0, 5 - step].log_softmax(-1), said[0, 5 - step]
        expected = expected + 0.8**step * (-(wanted.softmax(-1) * log_q).sum() - 0.5 * log_q[wanted.argmax()])
    assert torch.allclose(loss_of(head, given, 2, 0.8), expected)
    assert not loss_of(head, lesson(target, tokens, CONFIG.taps, ~every, in_bfloat16=False), 2, 0.8).requires_grad
