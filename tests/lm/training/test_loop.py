"""Training: what a place learns, that it learns, and that one that was killed goes on where it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from specwire.core.model import ModelError
from specwire.lm.training import loop
from specwire.lm.training.loop import Learnt, Schedule, draft_ids, repeat

VOCABULARY, HIDDEN = 48, 32
SCHEDULE = Schedule(5e-3, 5, 40, 20)


def model_of(hidden: int = HIDDEN) -> nn.Module:
    """It says the next token from the last one; its output layer's rate is another one."""
    torch.manual_seed(5)
    parts = {
        "embed_tokens": nn.Embedding(VOCABULARY, hidden),
        "layer": nn.Linear(hidden, hidden, bias=False),
        "lm_head": nn.Linear(hidden, VOCABULARY, bias=False),
    }
    return nn.Sequential(OrderedDict(parts))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def windows(seed: int = 1) -> Iterator[torch.Tensor]:
    """Each token follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = [torch.randint(VOCABULARY, (4,), generator=generator)]
        for _ in range(23):
            tokens.append((5 * tokens[-1] + 7) % VOCABULARY)
        yield torch.stack(tokens, dim=1)


def test_the_ids_that_occur_most_are_said() -> None:
    assert draft_ids(torch.tensor([5, 0, 9, 1, 7, 7]), 3).tolist() == [2, 4, 5]


def train(
    model: nn.Module,
    batches: Iterator[torch.Tensor],
    schedule: Schedule,
    work: Path,
    tell: Callable[[str], None] = print,
    course: Mapping[str, int | str] = MappingProxyType({}),
) -> list[tuple[int, list[float]]]:
    """As it went; what is measured is the loss of a window that is not learnt."""
    held_out = next(windows(9))
    return repeat(
        model,
        batches,
        lambda tokens: Learnt(loss_of(model, tokens), tokens.numel()),
        lambda: [loss_of(model, held_out).item()],
        schedule,
        work,
        course=course,
        tell=tell,
    ).curve


def test_it_learns_and_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same curve, whole and in two parts."""
    monkeypatch.setattr(loop, "EVALUATE_EVERY", 10)
    monkeypatch.setattr(loop, "SAVE_EVERY", 10)
    said = list[str]()

    def run(work: Path, stop: int = 1 << 30) -> list[tuple[int, list[float]]]:
        work.mkdir(exist_ok=True)
        some = (tokens for tokens, _ in zip(windows(), range(stop), strict=False))
        return train(model_of(), some, SCHEDULE, work, said.append)

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "parts", stop=25) == whole[:2]
    assert run(tmp_path / "parts") == whole
    assert whole[-1][1][0] < loss_of(model_of(), next(windows(9))).item() - 0.2
    assert any("held-out acceptance by position" in line for line in said)


def test_a_checkpoint_of_another_head_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 2)
    short = Schedule(5e-3, 1, 2, 1)
    train(model_of(), windows(), short, tmp_path)
    with pytest.raises(ModelError, match="training.checkpoint: is of another head"):
        train(model_of(40), windows(), short, tmp_path)


COURSE: dict[str, int | str] = {"rows": 4, "data": "abc"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a training of 10 steps of 20 has left its checkpoint; the rate falls from step 16 on."""
    monkeypatch.setattr(loop, "SAVE_EVERY", 2)
    gone_on(tmp_path, 10)
    return tmp_path


def gone_on(work: Path, until: int, steps: int = 20) -> None:
    some = (tokens for tokens, _ in zip(windows(), range(until), strict=False))
    schedule = Schedule(5e-3, 2, steps, 4)
    train(model_of(), some, schedule, work, course=COURSE)


def test_more_steps_may_follow_while_the_rate_is_constant(kept: Path) -> None:
    gone_on(kept, 18, steps=22)
    gone_on(kept, 20, steps=22)
    with pytest.raises(ModelError, match="training.checkpoint: steps: its rate falls to the end of 22 already"):
        gone_on(kept, 22, steps=30)


@pytest.mark.parametrize("held", [0, 5, 1000, -20, [1], {"step": 3}, {"step": "x", "curve": [], "course": COURSE}])
def test_a_checkpoint_that_was_cut_short_or_is_of_something_else_is_refused(held: Any, kept: Path) -> None:
    """An int: bytes that are left of it."""
    path = kept / loop.CHECKPOINT
    if isinstance(held, int):
        path.write_bytes(path.read_bytes()[:held])
    else:
        torch.save(held, path)
    with pytest.raises(ModelError, match="training.checkpoint: is no checkpoint that can be read"):
        gone_on(kept, 20)
