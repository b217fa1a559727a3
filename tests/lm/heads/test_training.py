"""Training: what a place learns, that it learns, and that one that was killed goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specwire.lm.heads import training
from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config
from specwire.lm.heads.training import Schedule, acceptance, draft_ids, lesson, train, unrolled

VOCABULARY, HIDDEN = 48, 32
CONFIG = Eagle3Config(HIDDEN, 48, 4, 2, 8, VOCABULARY, 40, (1, 2, 3))
SCHEDULE = Schedule(5e-3, 5, 40, 20)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
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


def windows(seed: int = 1) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(VOCABULARY, (4, 24), generator=generator)


def test_a_place_learns_what_the_target_says_behind_what_it_has_read(target: LlamaForCausalLM) -> None:
    head, tokens = head_of(target), next(windows())
    given = lesson(target, tokens, CONFIG.taps)
    ids = torch.arange(CONFIG.draft_vocabulary) + head.d2t
    for step, (own, wanted) in enumerate(unrolled(head, given, 3)):
        assert own.shape == wanted.shape == (4, 20, CONFIG.draft_vocabulary)
        # Place t reads tokens up to t + 1 + step: the target's answer to the last of them.
        assert torch.equal(wanted, given.logits[:, step + 1 : step + 21][..., ids])


def test_the_ids_that_occur_most_are_said() -> None:
    offsets = draft_ids(torch.tensor([5, 0, 9, 1, 7, 7]), 3)
    assert (torch.arange(3) + offsets).tolist() == [2, 4, 5]


def test_it_learns_and_goes_on_where_it_was_killed(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same curve of held-out acceptance, whole and in two parts."""
    monkeypatch.setattr(training, "EVALUATE_EVERY", 10)
    monkeypatch.setattr(training, "SAVE_EVERY", 10)
    held_out, said = next(windows(9)), list[str]()

    def run(work: Path, stop: int | None = None) -> list[tuple[int, list[float]]]:
        work.mkdir(exist_ok=True)
        some = (tokens for tokens, _ in zip(windows(), range(stop or 1 << 30), strict=False))
        return train(head_of(target), target, some, held_out, SCHEDULE, work, depth=2, tell=said.append)

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "parts", stop=25) == whole[:2]
    assert run(tmp_path / "parts") == whole
    untaught = acceptance(head_of(target), iter([lesson(target, held_out, CONFIG.taps)]), 2)
    assert whole[-1][1][0] > untaught[0]
    assert any("held-out acceptance by position" in line for line in said)
