"""Training: what a place learns, that it learns, and that one that was killed goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specwire.core.model import ModelError
from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config
from specwire.lm.training import distillation
from specwire.lm.training.distillation import (
    Learnt,
    Lesson,
    Schedule,
    draft_ids,
    lesson,
    loss_of,
    repeat,
    unrolled,
)

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


def head_of(target: LlamaForCausalLM, config: Eagle3Config = CONFIG) -> Eagle3:
    torch.manual_seed(5)
    head = Eagle3(config, target.get_parameter("model.embed_tokens.weight").detach().clone())
    head.d2t.copy_(draft_ids(torch.arange(VOCABULARY), CONFIG.draft_vocabulary))
    return head


def lesson_of(target: LlamaForCausalLM, tokens: torch.Tensor, scored: torch.Tensor | None = None) -> Lesson:
    """Of all tokens, unless it is said which are scored."""
    every = torch.ones_like(tokens, dtype=torch.bool)
    return lesson(target, tokens, CONFIG.taps, every if scored is None else scored, in_bfloat16=False)


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
    given = lesson_of(target, tokens)
    ids = torch.arange(CONFIG.draft_vocabulary) + head.d2t
    for step, (own, wanted) in enumerate(unrolled(head, given, 3)):
        assert own.shape == wanted.shape == (4, 20, CONFIG.draft_vocabulary)
        # Place t reads tokens up to t + 1 + step: the target's answer to the last of them.
        assert torch.equal(wanted, given.logits[:, step + 1 : step + 21][..., ids])


def test_the_ids_that_occur_most_are_said() -> None:
    offsets = draft_ids(torch.tensor([5, 0, 9, 1, 7, 7]), 3)
    assert (torch.arange(3) + offsets).tolist() == [2, 4, 5]


def train(
    head: Eagle3,
    target: LlamaForCausalLM,
    batches: Iterator[torch.Tensor],
    schedule: Schedule,
    work: Path,
    tell: Callable[[str], None] = print,
    course: Mapping[str, int | str] = MappingProxyType({}),
) -> list[tuple[int, list[float]]]:
    """As it went; what is measured is the loss of a window that is not learnt."""

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(head, lesson_of(target, tokens), 2, 0.8)

    held_out = next(windows(9))
    return repeat(
        head,
        batches,
        lambda tokens: Learnt(loss(tokens), tokens.numel()),
        lambda: [loss(held_out).item()],
        schedule,
        work,
        course=course,
        tell=tell,
    ).curve


def test_it_learns_and_goes_on_where_it_was_killed(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same curve, whole and in two parts."""
    monkeypatch.setattr(distillation, "EVALUATE_EVERY", 10)
    monkeypatch.setattr(distillation, "SAVE_EVERY", 10)
    said = list[str]()

    def run(work: Path, stop: int = 1 << 30) -> list[tuple[int, list[float]]]:
        work.mkdir(exist_ok=True)
        some = (tokens for tokens, _ in zip(windows(), range(stop), strict=False))
        return train(head_of(target), target, some, SCHEDULE, work, said.append)

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "parts", stop=25) == whole[:2]
    assert run(tmp_path / "parts") == whole
    assert whole[-1][1][0] < loss_of(head_of(target), lesson_of(target, next(windows(9))), 2, 0.8).item() - 0.2
    assert any("held-out acceptance by position" in line for line in said)


def test_a_checkpoint_of_another_head_is_refused_in_a_sentence(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "SAVE_EVERY", 2)
    short = Schedule(5e-3, 1, 2, 1)
    train(head_of(target), target, windows(), short, tmp_path)
    with pytest.raises(ModelError, match="training.checkpoint: is of another head"):
        train(head_of(target, replace(CONFIG, inner=40)), target, windows(), short, tmp_path)


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
    train(head_of(target), target, some, schedule, work, course=COURSE | course)


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
    head, tokens = head_of(target), next(windows())
    one = torch.zeros_like(tokens, dtype=torch.bool)
    one[0, 7] = True  # step 0 predicts it at place 5, step 1 at place 4
    given = lesson_of(target, tokens, one)
    expected = torch.zeros(())
    for step, (own, said) in enumerate(unrolled(head, given, 2)):
        log_q, wanted = own[0, 5 - step].log_softmax(-1), said[0, 5 - step]
        expected = expected + 0.8**step * (-(wanted.softmax(-1) * log_q).sum() - 0.5 * log_q[wanted.argmax()])
    assert torch.allclose(loss_of(head, given, 2, 0.8), expected)
    assert not loss_of(head, lesson_of(target, tokens, one & ~one), 2, 0.8).requires_grad
