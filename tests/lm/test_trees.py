"""A token in a tree gets the logits that the line of its ancestors gives it, whatever was fed, kept and dropped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specwire.core.model import TreeFeed
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.kv_cache import CachedLM, Sizes
from specwire.lm.runners.decoder import MOST_COLUMNS, leading
from specwire.lm.runners.hugging_face import HuggingFaceRunner
from specwire.lm.runners.llama import LlamaRunner
from specwire.lm.runners.select import trial_of
from tests.lm.families import ALONE, CHUNKED, SERVED, SLIDING, WINDOW, Family
from tests.lm.models import CONTEXT, TOLERANCE, VOCABULARY, build, config, plain, save
from tests.lm.walk import Trees, last_rows

SLOTS = 3
STEPS = 60
# What rows hold that nobody may see. Rows behind the text of another slot are read with a mask, through which a NaN
# would show.
HUGE, NAN = 1e30, float("nan")
# A tree behind any text: the parent of each node.
PARENTS = (-1, -1, 0, 1, 1, 3, 2, 5)
TEXT = [(7 * at + 3) % VOCABULARY for at in range(11)]


def loaded(kind: str, folder: Path, dtype: str = "float32") -> tuple[PreTrainedModel, LanguageModel]:
    model = build(config(kind))
    return model, load_model(save(model, folder), slots=SLOTS, dtype=dtype)


def stores(lm: LanguageModel) -> list[torch.Tensor]:
    """Keys and values of all layers, (slots, heads, context, head_dim)."""
    assert isinstance(lm, CachedLM)
    if isinstance(lm.runner, LlamaRunner):
        return list(lm.runner.decoder.cache)
    assert isinstance(lm.runner, HuggingFaceRunner)
    return lm.runner.cache.stores()


@torch.inference_mode()
def fill(lm: LanguageModel, slot: int, rows: Sequence[int], value: float = HUGE) -> None:
    for store in stores(lm):
        store[slot, :, list(rows)] = value


def paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The nodes from the text to each node, itself left out."""
    found: list[tuple[int, ...]] = []
    for parent in parents:
        found.append(() if parent < 0 else (*found[parent], parent))
    return found


def tokens_of(count: int) -> list[int]:
    return [(5 * at + 1) % VOCABULARY for at in range(count)]


def branching(slot: int, trunk: int, parents: Sequence[int] = PARENTS) -> Feed:
    """All nodes in one feed."""
    ancestors = tuple(tuple(trunk + node for node in path) for path in paths(parents))
    return Feed(slot, trunk, tokens_of(len(parents)), len(parents), TreeFeed(trunk, ancestors))


def lines(text: Sequence[int], parents: Sequence[int] = PARENTS) -> list[list[int]]:
    """The text behind which each node's logits stand."""
    tokens = tokens_of(len(parents))
    return [[*text, *(tokens[at] for at in (*path, node))] for node, path in enumerate(paths(parents))]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2", "olmo", "gpt2"])
def test_any_growing_and_pruning_gives_each_node_the_logits_of_its_line(kind: str, tmp_path: Path) -> None:
    """Beside other texts and trees, after rows were kept, rolled back and copied; what was dropped is spoilt."""
    model, lm = loaded(kind, tmp_path)
    assert lm.branches
    walk = Trees(model, lm, seed=sum(map(ord, kind)), spoil=fill)
    for _ in range(STEPS):
        walk.step()
    assert walk.aside > STEPS
    assert walk.moved > STEPS / 2


@pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in (*SLIDING, *CHUNKED)])
def test_a_window_slides_along_a_branch(family: Family, tmp_path: Path) -> None:
    model = build(family.config())
    lm = load_model(save(model, tmp_path), slots=SLOTS, context=CONTEXT, threads=1)
    assert lm.branches
    walk = Trees(model, lm, seed=5)
    longest = 0
    for _ in range(STEPS // 2):
        walk.step()
        longest = max(longest, *(len(tree.text) for tree in walk.trees))
    assert longest > WINDOW
    # A branch that the window slides past, beside the rows of another.
    deep = [at - 2 if at > 1 else -1 for at in range(2 * (WINDOW + 2))]
    lm.rollback(0, 0)
    lm.forward([Feed(0, 0, TEXT[:2], 0)])
    got = lm.forward([branching(0, 2, deep)])
    torch.testing.assert_close(got, last_rows(model, lines(TEXT[:2], deep)), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "olmo"])
@pytest.mark.parametrize("others", [0, 1])
def test_a_node_does_not_see_those_beside_it(kind: str, others: int, tmp_path: Path) -> None:
    """Whatever the rows hold that are no ancestors, they change no bit, alone and in a batch."""
    model, lm = loaded(kind, tmp_path)
    lm.forward([Feed(0, 0, TEXT, 0)])
    trunk = len(TEXT)
    lm.forward([branching(0, trunk)])
    # Behind node 5, whose ancestors are 3 and 1; and behind the text.
    path = tuple(trunk + node for node in (1, 3, 5))
    fed = [Feed(0, trunk + len(PARENTS), [9, 4], 2, TreeFeed(trunk, (path, ()))), Feed(1, 0, TEXT, 1)][: 1 + others]
    clean = lm.forward(fed)
    fill(lm, 0, [row for row in range(trunk, trunk + len(PARENTS)) if row not in path])
    assert torch.equal(lm.forward(fed), clean)
    expected = last_rows(model, [[*lines(TEXT)[5], 9], [*TEXT, 4]])
    torch.testing.assert_close(clean[:2], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_trees_stand_beside_long_feeds(tmp_path: Path) -> None:
    """In the shared attention, and behind it: a tree of many nodes, a prompt's chunk, and a single node."""
    model, lm = loaded("llama", tmp_path)
    wide = [-1, *(max(-1, at - 3) for at in range(MOST_COLUMNS))]
    feeds = [branching(0, 2), Feed(1, 0, TEXT[:3], 1), branching(2, 2, wide)]
    for slot in (0, 2):
        lm.forward([Feed(slot, 0, TEXT[:2], 0)])
    assert leading(feeds) == 2
    expected = last_rows(model, [*lines(TEXT[:2]), TEXT[:3], *lines(TEXT[:2], wide)])
    torch.testing.assert_close(lm.forward(feeds), expected, atol=TOLERANCE, rtol=TOLERANCE)
    prompt = [(3 * at) % VOCABULARY for at in range(MOST_COLUMNS + 4)]
    feeds = [Feed(1, 0, prompt, 1), Feed(0, 3, [9], 1, TreeFeed(2, ((),)))]
    assert leading(feeds) == 0
    expected = last_rows(model, [prompt, [*TEXT[:2], 9]])
    torch.testing.assert_close(lm.forward(feeds), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_line_is_fed_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind everything before it needs no mask of its own."""
    model, lm = loaded("llama", tmp_path)
    assert isinstance(lm, CachedLM)
    fed: list[bool] = []
    run = lm.runner.run

    def watched(feeds: Sequence[Feed]) -> torch.Tensor:
        fed.extend(feed.tree is None for feed in feeds)
        return run(feeds)

    monkeypatch.setattr(lm.runner, "run", watched)
    lm.forward([Feed(0, 0, TEXT[:3], 0)])
    lm.forward([branching(0, 3, [-1, 0])])
    lm.forward([Feed(0, 5, [8, 9], 2, TreeFeed(3, ((3, 4), (3, 4, 5))))])
    assert fed == [True, True, True]
    got = lm.forward([Feed(0, 7, [4, 4], 2, TreeFeed(3, ((3, 4, 5, 6), (3, 4, 5))))])
    assert fed[3:] == [False]
    text = [*TEXT[:3], *tokens_of(2), 8]
    expected = last_rows(model, [[*text, 9, 4], [*text, 4]])
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "olmo"])
def test_a_tree_may_stand_behind_no_text_and_fill_the_context(kind: str, tmp_path: Path) -> None:
    model, lm = loaded(kind, tmp_path)
    got = lm.forward([branching(0, 0)])
    torch.testing.assert_close(got, last_rows(model, lines([])), atol=TOLERANCE, rtol=TOLERANCE)
    text = [(3 * at) % VOCABULARY for at in range(CONTEXT - len(PARENTS))]
    lm.forward([Feed(0, 0, text, 0)])
    got = lm.forward([branching(0, len(text))])
    torch.testing.assert_close(got, last_rows(model, lines(text)), atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(ValueError, match=f"tokens: slot 0 would hold {CONTEXT + 1} positions"):
        lm.forward([Feed(0, CONTEXT, [1], 1, TreeFeed(len(text), ((),)))])


# ----------------------------------------------------------------------------------------------------------------------
# Models that take lines only.

MPT = next(family for family in SERVED if family.name == "MPT")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (MPT, {}),
        (ALONE[0], {}),
        (SERVED[0], {"deterministic": True}),
        (SERVED[-1], {"deterministic": True}),
    ],
)
def test_a_model_that_takes_no_trees_says_so(family: Family, options: dict[str, object], tmp_path: Path) -> None:
    """MPT counts its own positions, BLOOM takes no mask; `deterministic` knows one shape for each position."""
    model = build(family.config())
    lm = load_model(save(model, tmp_path), slots=1, context=CONTEXT, **options)  # type: ignore[arg-type]  # by name
    assert not lm.branches
    lm.forward([Feed(0, 0, TEXT, 0)])
    with pytest.raises(ValueError, match="tree: this model takes none, slot 0 was fed one"):
        lm.forward([branching(0, len(TEXT))])
    with pytest.raises(ValueError, match="rows: this model takes no trees"):
        lm.keep(0, 3, [4])
    lm.keep(0, 3, [3, 4])
    got = lm.forward([Feed(0, 5, TEXT[5:], 1)])
    torch.testing.assert_close(got[0], plain(model, TEXT)[-1], atol=TOLERANCE, rtol=TOLERANCE)


class ByRow(LlamaRunner):
    """Takes a row for a position."""

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        return super().run([feed._replace(tree=None) for feed in feeds])


class InPlace(LlamaRunner):
    """Moves no row."""

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        del slot, start, rows


@pytest.mark.parametrize(("runner", "right"), [(LlamaRunner, True), (ByRow, False), (InPlace, False)])
def test_the_trial_at_load_tells_runners_apart(runner: type[LlamaRunner], right: bool) -> None:
    model, sizes = build(config("llama")), Sizes(1, CONTEXT, VOCABULARY)
    tried = runner(model, *sizes)
    assert trial_of(model, sizes).held(tried, 1) <= 1
    assert tried.branches is right


@pytest.mark.parametrize(("context", "branches"), [(7, False), (8, True)])
def test_a_context_too_short_for_a_trial_has_no_trees(context: int, branches: bool, tmp_path: Path) -> None:
    lm = load_model(save(build(config("gpt2")), tmp_path), slots=1, context=context)
    assert lm.branches is branches
