"""Trees in llama.cpp's sequences, without llama.cpp: what a token would see there is what it descends from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from specwire.core.model import Feed, ModelInfo, TreeFeed
from specwire.lm.kv_cache import CachedLM, Runner
from specwire.lm.runners.llamacpp.sequences import SequenceRun, SequenceTable
from tests.lm.models import CONTEXT, VOCABULARY, build, config
from tests.lm.walk import Trees, last_rows

SLOTS, STEPS = 3, 60
TEXT = [3, 10, 17, 24, 31]
INFO = ModelInfo("simulated", "llama", VOCABULARY, CONTEXT, (), "float32", "cpu", "", "")


@dataclass
class SimulatedCell:
    token: int
    position: int
    sequences: set[int]


class SimulatedMemory:
    """Cells as llama.cpp has them, and what it refuses: a sequence with a gap, more cells than there are."""

    def __init__(self, room: int) -> None:
        self.room, self.cells = room, list[SimulatedCell]()

    def remove(self, sequence: int, start: int) -> None:
        for cell in self.cells:
            if cell.position >= start:
                cell.sequences.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.sequences]

    def share(self, source: int, target: int, stop: int) -> None:
        assert self.line(target) == []
        assert [cell.position for cell in self.line(source, stop - 1)] == [*range(stop)]
        for cell in self.line(source, stop - 1):
            cell.sequences.add(target)

    def feed(self, run: SequenceRun) -> None:
        assert len(self.line(run.sequence)) == run.position
        for position, token in enumerate(run.tokens, run.position):
            self.cells.append(SimulatedCell(token, position, {run.sequence}))
        assert len(self.cells) <= self.room

    def line(self, sequence: int, last: int = CONTEXT) -> list[SimulatedCell]:
        """What a token of the sequence at position `last` sees."""
        seen = [cell for cell in self.cells if sequence in cell.sequences and cell.position <= last]
        return sorted(seen, key=lambda cell: cell.position)


class SimulatedRunner(Runner):
    """The model's own forward of what each token sees. fed: how many tokens of each forward."""

    branches, kv_bytes = True, 0

    def __init__(self, model: PreTrainedModel, for_branches: int) -> None:
        self.memory, self.fed, self.failing = SimulatedMemory(SLOTS * CONTEXT), list[int](), False
        self.table = SequenceTable(self.memory, SLOTS, SLOTS + for_branches)
        self._model = model

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        lines = [line for runs in self.table.runs(feeds) for line in self._seen(runs)]
        return last_rows(self._model, lines)

    def _seen(self, runs: Sequence[SequenceRun]) -> list[list[int]]:
        """What each token sees of which a row is wanted. All are in their cells before any is computed."""
        for run in runs[: len(runs) // 2 if self.failing else None]:
            self.memory.feed(run)
        if self.failing:
            self.failing = False
            self.table.lost(runs)
            raise RuntimeError("computed nothing")
        self.fed.append(sum(len(run.tokens) for run in runs))
        ends = [(run, run.position + len(run.tokens)) for run in runs]
        wanted = [(run.sequence, last) for run, end in ends for last in range(end - run.wanted, end)]
        return [[cell.token for cell in self.memory.line(sequence, last)] for sequence, last in wanted]

    def zero(self, slot: int, stop: int) -> None:
        del stop
        self.table.cut(slot, 0)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self.table.keep(slot, start, rows)

    def copy(self, source: int, target: int, stop: int) -> None:
        self.table.copy(source, target, stop)


class UnsteadyLM(CachedLM):
    """Of its forwards every third fails at first, and of its trees every fifth is given up by then."""

    forwards = 0

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self.forwards += 1
        assert isinstance(self.runner, SimulatedRunner)
        if self.forwards % 5 == 0:
            self.runner.table.give_trees_up()
        if self.forwards % 3:
            return super().forward(feeds)
        self.runner.failing = True
        with pytest.raises(RuntimeError, match="computed nothing"):
            super().forward(feeds)
        return super().forward(feeds)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(config("llama"))


@pytest.mark.parametrize("kind", [CachedLM, UnsteadyLM])
@pytest.mark.parametrize("for_branches", [2, 3, 64])
def test_any_growing_and_pruning_lets_each_token_see_its_line(
    kind: type[CachedLM], for_branches: int, model: PreTrainedModel
) -> None:
    """With few sequences branches give theirs up to others."""
    runner = SimulatedRunner(model, for_branches)
    lm = kind(runner, INFO, SLOTS)
    walk = Trees(model, lm, seed=for_branches)
    for _ in range(STEPS):
        walk.step()
    assert walk.aside > STEPS
    assert walk.moved > STEPS / 2
    for slot in range(SLOTS):
        lm.discard(slot)
    assert runner.memory.cells == []


def grown(lm: CachedLM, *parents: int) -> list[int]:
    """Feed nodes behind TEXT in slot 0, a forward each level; the tokens of each forward."""
    lm.forward([Feed(0, 0, TEXT, 1)])
    paths: list[tuple[int, ...]] = []
    for parent in parents:
        paths.append(() if parent < 0 else (*paths[parent], parent))
    assert isinstance(lm.runner, SimulatedRunner)
    lm.runner.fed.clear()
    for depth in range(max(map(len, paths)) + 1):
        level = [node for node, path in enumerate(paths) if len(path) == depth]
        assert level == [*range(level[0], level[-1] + 1)]
        ancestors = tuple(tuple(len(TEXT) + node for node in paths[at]) for at in level)
        lm.forward([Feed(0, len(TEXT) + level[0], level, len(level), TreeFeed(len(TEXT), ancestors))])
    return lm.runner.fed


def test_no_row_is_fed_again_while_there_are_sequences(model: PreTrainedModel) -> None:
    """And a branch that is decided is the text from then on, in the cells that it has."""
    runner = SimulatedRunner(model, 64)
    lm = CachedLM(runner, INFO, SLOTS)
    assert grown(lm, -1, -1, 0, 0, 1, 1, 3, 4, 5, 5) == [2, 4, 4]
    lm.keep(0, 5, [6, 10, 13, 14])  # node 1, of its children the second, and that one's
    lm.forward([Feed(0, 9, [40], 1, TreeFeed(7, ((8,),)))])
    assert runner.fed == [2, 4, 4, 1]
    assert len(runner.memory.cells) == lm.cached(0) == 10
    lm.keep(0, 7, [8, 9])
    lm.forward([Feed(0, 9, [41], 1)])
    assert runner.fed == [2, 4, 4, 1, 1]
    assert len(runner.memory.cells) == lm.cached(0) == 10


def test_the_branch_that_was_extended_longest_ago_gives_its_sequence_up(model: PreTrainedModel) -> None:
    runner = SimulatedRunner(model, 2)
    lm = CachedLM(runner, INFO, SLOTS)
    assert grown(lm, -1, -1, -1, 0, 1) == [3, 2]
    # A fourth branch takes the third one's sequence, whose row is fed again with the next that stands behind it.
    lm.forward([Feed(0, 10, [20], 1, TreeFeed(5, ((),)))])
    lm.forward([Feed(0, 11, [21], 1, TreeFeed(5, ((7,),)))])
    assert runner.fed == [3, 2, 1, 2]


def test_rows_that_moved_without_what_they_descend_from_are_refused(model: PreTrainedModel) -> None:
    runner = SimulatedRunner(model, 2)
    runner.run([Feed(0, 0, TEXT, 1)])
    with pytest.raises(ValueError, match="rows: row 3 of slot 0 descends from a row that is dropped"):
        runner.keep(0, 2, [3])


def test_texts_that_are_copied_share_cells(model: PreTrainedModel) -> None:
    runner = SimulatedRunner(model, 2)
    lm = CachedLM(runner, INFO, SLOTS)
    lm.forward([Feed(0, 0, TEXT, 1)])
    lm.copy(0, 2, 4)
    assert len(runner.memory.cells) == len(TEXT)
    lm.discard(0)
    assert len(runner.memory.cells) == 4
