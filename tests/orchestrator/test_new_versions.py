"""A drafter takes another version of its model while sessions run: texts stay, and no place is drawn by two of them."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import draft_service.server
import specwire.lm.guesses
from draft_service.server import RunningDrafter
from specwire.client import Chunk, Completion
from specwire.client.events import PartialCompletion
from specwire.client.requests import RequestOptions
from specwire.core.draft import DraftRow
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Weights
from specwire.rpc import versions
from specwire.rpc.server_options import ModelServiceOptions
from specwire.versions import Current, HistoryEntry, VersionFolder
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TARGET, TURNS, Stack, plain, stack
from tests.orchestrator.tiny import tiny
from tests.wait import LIMIT_S, asked, until

OTHER = f"{TARGET}:agree=0.5"
LENGTH = 240
# When the drafter takes which version.
CHANGES = ((60, OTHER), (140, DRAFT))


async def replaced(drafter: RunningDrafter, model: str) -> None:
    former = drafter.replace(await draft_service.server.load(ModelServiceOptions(model)))
    await former.stop()


async def told(running: Stack, wish: RequestOptions, others: int = 0) -> Completion:
    """A text in whose middle the drafter takes two versions, beside some more."""
    beside = [asyncio.create_task(running.client.complete(PROMPT, timeout=LIMIT_S, **wish)) for _ in range(others)]
    gathered = PartialCompletion()
    async for event in running.client.generate(PROMPT, timeout=LIMIT_S, **wish):
        before = len(gathered.tokens)
        gathered.add(event)
        for at, model in CHANGES:
            if isinstance(event, Chunk) and before < at <= len(gathered.tokens):
                await replaced(running.drafters[0], model)
    for each in beside:
        assert (await each).tokens == gathered.completion().tokens
    return gathered.completion()


def all_drafted(done: Completion) -> bool:
    """Each of the versions had a part in it."""
    return sum(drafter.accepted > 0 for drafter in done.stats.drafters) > len(CHANGES)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)], ids=["greedy", "coupled"])
async def test_texts_stay_the_target_s(sampling: Sampling) -> None:
    wish = RequestOptions(max_tokens=LENGTH, ignore_eos=True, temperature=sampling.temperature, seed=sampling.seed)
    async with stack(SLOW_TARGET, DRAFT, plan=TURNS, patient=True) as running:
        done = await asked(lambda: told(running, wish, others=2), all_drafted)
    assert list(done.tokens) == plain(TARGET, PROMPT, LENGTH, sampling)


@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_two_versions_never_draw_one_place_with_the_same_noise(rule: str) -> None:
    """A place's noise is its epoch's: in each epoch one version draws, and all of them do draw."""
    drawers: dict[int, set[threading.Thread]] = defaultdict(set)
    draw = specwire.lm.guesses.draw_weighed

    def noted(logits: torch.Tensor, places: Sequence[DraftRow]) -> list[tuple[int, Weights]]:
        for place in places:
            drawers[place.epoch].add(threading.current_thread())
        return draw(logits, places)

    wish = RequestOptions(max_tokens=LENGTH, ignore_eos=True, temperature=1.0, rule=rule)
    async with stack(SLOW_TARGET, DRAFT, plan="stream:1,4,1", patient=True) as running:
        with patch.object(specwire.lm.guesses, "draw_weighed", noted):
            done = await asked(lambda: told(running, wish), all_drafted)
    assert len(done.tokens) == LENGTH
    assert all(len(threads) == 1 for threads in drawers.values())
    assert len({thread for threads in drawers.values() for thread in threads}) > len(CHANGES)


async def test_a_drafter_that_comes_back_as_it_was_needs_no_epoch_of_its_own() -> None:
    epochs: set[int] = set()
    draw = specwire.lm.guesses.draw_weighed

    def noted(logits: torch.Tensor, places: Sequence[DraftRow]) -> list[tuple[int, Weights]]:
        epochs.update(place.epoch for place in places)
        return draw(logits, places)

    async def same(running: Stack) -> Completion:
        epochs.clear()
        gathered = PartialCompletion()
        wish = RequestOptions(max_tokens=120, ignore_eos=True, temperature=1.0, rule="rejection")
        async for event in running.client.generate(PROMPT, timeout=LIMIT_S, **wish):
            before = len(gathered.tokens)
            gathered.add(event)
            if isinstance(event, Chunk) and before < 40 <= len(gathered.tokens):
                await replaced(running.drafters[0], DRAFT)
        return gathered.completion()

    async with stack(SLOW_TARGET, DRAFT, plan="stream:1,4,1", patient=True) as running:
        with patch.object(specwire.lm.guesses, "draw_weighed", noted):
            await asked(lambda: same(running), lambda done: sum(each.accepted > 0 for each in done.stats.drafters) > 1)
    assert len(epochs) == 1


async def test_one_that_dials_in_joins_again_with_the_version_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "WATCH_S", 3600.0)
    target = tiny(tmp_path / "target", seed=1)
    folder = VersionFolder(tmp_path / "out")
    folder.claim(("*",), "f")

    def publish(number: int, noise: float) -> None:
        draft = tiny(tmp_path / f"draft{number}", seed=number, like=target, noise=noise)
        entry = HistoryEntry(number, 0, 0, ())
        folder.add(lambda path: shutil.copytree(draft, path, dirs_exist_ok=True), entry)
        folder.use(Current(number, "draft", ("*",), "learnt"))

    publish(0, 0.05)
    async with stack(target, accept_drafters=True, plan=TURNS, patient=True) as running:
        address = running.orchestrator.address
        drafter = await draft_service.server.dial_in(ModelServiceOptions(target), address, None, follow=folder.path)
        try:

            def names() -> list[str]:
                known = running.orchestrator.orchestrator.pool.drafters
                return [each.info.model for each in known if each.up and each.info is not None]

            assert names() == ["draft@0"]
            publish(1, 0.0)
            assert drafter.follower is not None
            text = asyncio.create_task(running.client.complete(PROMPT, max_tokens=60, ignore_eos=True))
            await drafter.follower.look()
            await until(lambda: names() == ["draft@1"])
            done = await text
            again = await running.client.complete(PROMPT, max_tokens=60, ignore_eos=True)
        finally:
            await drafter.stop()
    assert list(done.tokens) == list(again.tokens) == plain(target, PROMPT, 60)
