"""A model over two processes: its logits and caches, what cannot be split, and what ends when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bench.deterministic import Case, alone, differing, samplings, together
from deploy.stack.processes import descendants
from specwire.core.model import TreeFeed
from specwire.lm import Feed, LanguageModel, ModelError, ModelLost, load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.runners.llama import LlamaRunner
from specwire.lm.runners.tensor_parallel import LeadingRunner, obey, to_copy, to_keep, to_run, to_zero
from tests.lm.models import build, config, plain, save
from tests.lm.walk import Texts, Trees
from tests.wait import eventually
from verify_service.ranks import Ranks

SLOTS, LONG = 4, 700


@contextmanager
def over_two(folder: str, **options: object) -> Iterator[LanguageModel]:
    arguments = {"spec": folder, "slots": SLOTS, "threads": 1, **options}
    ranks = Ranks(2, arguments)
    try:
        yield load_model(**arguments, ranks=ranks)  # type: ignore[arg-type]  # by name
    finally:
        ranks.close()


def gone(pid: int) -> bool:
    """Whether a process ends in time."""
    return eventually(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize(("kind", "lean"), [("llama-biased-tied", True), ("qwen2", False)])
def test_texts_over_two_ranks_are_those_of_one(kind: str, lean: bool, tmp_path: Path) -> None:
    """Greedy and coupled, alone and in mixes that share steps, are drafted for, and move between one and two ranks."""
    torch.set_num_threads(1)
    made = config(kind)
    made.max_position_embeddings, made.eos_token_id = LONG, None
    model = build(made)
    folder = save(model, tmp_path)
    one = load_model(folder, slots=SLOTS, threads=1)
    # The longest is fed in chunks.
    prompts = [tuple((7 * at + length) % 49 for at in range(length)) for length in (2, 5, 9, 14, 30, 600)]
    cases = [Case(prompt, sampling, 30) for prompt, sampling in zip(prompts, samplings(len(prompts)), strict=True)]
    expected = alone(one, cases)
    assert [len(text) for text in expected] == [30] * len(cases)
    with over_two(folder, lean=lean) as two:
        assert two.info == one.info
        assert two.kv_bytes == one.kv_bytes
        assert isinstance(two, CachedLM)
        assert isinstance(two.runner, LeadingRunner)
        assert isinstance(two.runner.runner, LlamaRunner) is lean
        assert 2 * two.runner.runner.kv_bytes == one.kv_bytes
        walk = Texts(model, two, seed=1)
        for _ in range(20):
            walk.step()
        for slot in range(SLOTS):
            two.discard(slot)
        trees = Trees(model, two, seed=2)
        for _ in range(10):
            trees.step()
        for slot in range(SLOTS):
            two.discard(slot)
        assert [differing(expected, together([two, one], cases, expected, seed).texts)[0] for seed in (1, 2)] == [0, 0]


def test_a_poisoned_text_leaves_the_others_alone_on_every_rank(tmp_path: Path) -> None:
    model = build(config("llama"))
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[40] = float("nan")
    before = set(descendants(os.getpid()))
    with over_two(save(model, tmp_path)) as lm:
        lm.forward([Feed(0, 0, [3, 40, 5], 1), Feed(1, 0, [3, 4], 1)])
        assert lm.failed == {0}
        # The slot's next text would be poisoned by whatever is left in it.
        got = lm.forward([Feed(0, 0, [3, 4, 6], 3), Feed(1, 2, [6], 1)])
        expected = plain(model, [3, 4, 6])
        torch.testing.assert_close(got, torch.cat([expected, expected[2:]]), atol=1e-4, rtol=1e-4)
        assert lm.failed == frozenset()
        (other,) = set(descendants(os.getpid())) - before
        os.kill(other, signal.SIGTERM)  # what is meant for the whole verifier is rank 0's to heed
        lm.forward([Feed(1, 3, [7], 1)])
        os.kill(other, signal.SIGKILL)
        with pytest.raises(ModelLost, match=r"^rank 1 of 2 ended by SIGKILL$"):
            lm.forward([Feed(1, 4, [7], 1)])
    assert gone(other)


@pytest.mark.parametrize(
    ("kind", "size", "options", "reason"),
    [
        ("llama", 3, {}, "3 ranks cannot share the 4 attention heads of this model equally"),
        ("llama", 4, {}, "4 ranks cannot share the 2 key heads of this model equally"),
        ("llama", 2, {"quantization": "int8"}, "2 ranks need quantization to be none, not int8"),
        ("llama", 2, {"runtime": "openvino"}, "2 ranks need runtime to be torch, not openvino"),
        ("llama", 2, {"deterministic": True}, "2 ranks need deterministic to be False, not True"),
        ("llama", 2, {"compiled": True}, "2 ranks need compile to be False, not True"),
        ("gpt2", 2, {}, "gpt2 models have no plan by which to split them over 2 ranks"),
        ("scripted", 2, {}, "a scripted model cannot be split over 2 ranks"),
    ],
)
def test_what_cannot_be_split_is_refused(
    kind: str, size: int, options: dict[str, object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any process is started."""
    spec = "scripted:3" if kind == "scripted" else save(build(config(kind)), tmp_path)
    started: list[str] = []
    monkeypatch.setattr(Ranks, "_start", lambda _, name, told: started.append(name))
    ranks = Ranks(size, {})
    try:
        with pytest.raises(ModelError, match=rf"^tensor-parallel-size: {reason}$"):
            load_model(spec, slots=1, ranks=ranks, **options)  # type: ignore[arg-type]  # by name
        assert not started
    finally:
        ranks.close()


def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    folder = save(build(config("llama")), tmp_path)
    ranks = Ranks(2, {"spec": folder, "slots": 0})
    try:
        with pytest.raises(ModelError, match=r"rank 1 of 2: slots: must be at least 1, not 0"):
            load_model(folder, slots=1, ranks=ranks)
    finally:
        ranks.close()


class Noting:
    """A runner that does nothing."""

    kv_bytes = 0
    branches = True

    def __init__(self) -> None:
        self.done: list[object] = []

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self.done.append([feed._replace(tokens=tuple(feed.tokens)) for feed in feeds])
        return torch.empty(0)

    def zero(self, slot: int, stop: int) -> None:
        self.done.append((slot, stop))

    def copy(self, source: int, target: int, stop: int) -> None:
        self.done.append((source, target, stop))

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self.done.append((slot, start, rows))


def test_orders_say_all_that_a_runner_is_called_with() -> None:
    runner = Noting()
    tree = TreeFeed(15, ((), (16, 17), (15, 16, 18)))
    feeds = [Feed(3, 17, (5, 6, 7), 2, tree), Feed(0, 0, (1 << 40,), 0), Feed(2, 0, (1,), 1, TreeFeed(0, ((),)))]
    for order in (to_run(feeds), to_zero(2, 9), to_copy(1, 0, 4), to_keep(1, 5, (6, 8)), to_keep(1, 5, ())):
        obey(runner, order)
    assert runner.done == [feeds, (2, 9), (1, 0, 4), (1, 5, [6, 8]), (1, 5, [])]
