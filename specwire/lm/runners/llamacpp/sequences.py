"""Where the rows of each slot lie in llama.cpp's sequences: a text, and behind it the branches of a tree.

In llama.cpp a token sees the cells of its sequence at earlier positions, and a cell may belong to several sequences. So
a sequence is a path: a text and one branch behind it.

    a node behind the last one of a sequence    joins that sequence
    a node beside another                       takes a sequence of its own, which shares the cells up to its parent
    rows that are dropped                       leave their sequences; a cell in no sequence is free
    a branch that is decided                    its sequence is the text's from then on: no cell is copied or moved

Sequences are few. Where there is none the branch that was extended longest ago gives its own up; its rows are fed again
where something is to stand behind them. Rows of a tree that is copied to another slot are fed again, too. No llama.cpp
here: `SequenceMemory` is what is asked of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from specwire.core.model import Feed, TreeFeed


class SequenceMemory(Protocol):
    """What llama.cpp can do to the sequences of its cells."""

    def remove(self, sequence: int, start: int) -> None:
        """Take the positions from `start` on out of a sequence."""
        ...

    def share(self, source: int, target: int, stop: int) -> None:
        """Let the cells of positions [0, stop) of one sequence belong to another, which is empty, too."""
        ...


@dataclass(slots=True, eq=False)
class TreeRow:
    """A row behind a slot's line.

    parent: the row that it stands behind; None for the line's at the position before. sequence: one that holds it, and
    so all that it descends from; None where its cell was given up.
    """

    token: int
    position: int
    parent: TreeRow | None
    sequence: int | None = None


@dataclass(slots=True)
class SlotRows:
    """The rows of a slot: `line` of them in `sequence`, each at the position of its number, then the others."""

    sequence: int
    line: int = 0
    rows: list[TreeRow] = field(default_factory=list)


class SequenceRun(NamedTuple):
    """Tokens to feed to a sequence, one behind another. wanted: how many of the last want logits. row: of a tree's."""

    slot: int
    sequence: int
    position: int
    tokens: Sequence[int]
    wanted: int
    row: TreeRow | None = None


class SequenceTable:
    """Invariant: sequence i has the positions [0, ends[i]), once what is planned is fed. Each is the line's of one
    slot, a branch of one slot, or free. What a row that is held descends from is held, too.
    """

    def __init__(self, memory: SequenceMemory, slots: int, sequences: int) -> None:
        """sequences: all there are, one for each slot among them; for trees at least two more."""
        self._memory = memory
        self._slots = [SlotRows(slot) for slot in range(slots)]
        self._ends = [0] * sequences
        self._free = list(range(slots, sequences))
        # The slot of each branch's sequence, the one that was extended longest ago first.
        self._branches: dict[int, int] = {}
        self._planned: list[SequenceRun] = []
        # Rows that are planned, and the sequences that those belong to.
        self._fresh: set[TreeRow] = set()
        self._touched: set[int] = set()

    @property
    def lines(self) -> list[int]:
        """Sequences of the slots' lines that hold anything."""
        return [held.sequence for held in self._slots if held.line]

    @property
    def rows(self) -> int:
        """Rows of all slots."""
        return sum(held.line + len(held.rows) for held in self._slots)

    def runs(self, feeds: Sequence[Feed]) -> Iterator[list[SequenceRun]]:
        """What to feed in one forward, mostly; in one after another where a branch begins at what is fed itself.

        Each must be fed before the next is asked for, or `lost` told.
        """
        self._taken()
        for feed in feeds:
            if feed.tree is None:
                yield from self._line(feed)
            else:
                yield from self._nodes(feed, feed.tree)
        yield self._taken()

    def _line(self, feed: Feed) -> Iterator[list[SequenceRun]]:
        held = self._slots[feed.slot]
        self.cut(feed.slot, feed.start)
        self._settle(feed.slot, feed.start)
        if held.line < feed.start:  # the text's last rows were given up; they take no sequence but the text's
            self._hold(feed.slot, held.rows[-1], wanted=0)
            yield self._taken()
            self._settle(feed.slot, feed.start)
        self._plan(SequenceRun(feed.slot, held.sequence, feed.start, feed.tokens, max(feed.wanted, 1)))
        held.line = feed.stop

    def _nodes(self, feed: Feed, tree: TreeFeed) -> Iterator[list[SequenceRun]]:
        held = self._slots[feed.slot]
        self.cut(feed.slot, feed.start)
        self._settle(feed.slot, tree.trunk)
        silent = len(feed.tokens) - max(feed.wanted, 1)
        for at, (token, ancestors) in enumerate(zip(feed.tokens, tree.ancestors, strict=True)):
            above = ancestors[-1] if ancestors else tree.trunk - 1
            parent = held.rows[above - held.line] if above >= held.line else None
            row = TreeRow(token, tree.trunk + len(ancestors), parent)
            held.rows.append(row)
            while not self._hold(feed.slot, row, wanted=int(at >= silent)):
                yield self._taken()

    def _hold(self, slot: int, row: TreeRow, wanted: int) -> bool:
        """Plan a row, and those that it descends from and were given up; False if what is planned must be fed first."""
        missing, above = [row], row.parent
        while above is not None and above.sequence is None:
            missing.append(above)
            above = above.parent
        sequence = self._behind(slot, above, missing[-1].position)
        if sequence is None:
            return False
        for each in reversed(missing):
            each.sequence = sequence
            self._plan(SequenceRun(slot, sequence, each.position, [each.token], wanted if each is row else 0, each))
        if sequence in self._branches:
            self._branches[sequence] = self._branches.pop(sequence)
        return True

    def _behind(self, slot: int, above: TreeRow | None, position: int) -> int | None:
        """The sequence for what stands behind a row that is held, or the line; None: not before the planned is fed."""
        source = self._slots[slot].sequence
        if above is not None and above.sequence is not None:
            source = above.sequence
        if self._ends[source] == position:
            return source
        found = None if above in self._fresh else self._spare(source)
        if found is not None:
            self._memory.share(source, found, position)
            self._ends[found], self._branches[found] = position, slot
        return found

    def _plan(self, run: SequenceRun) -> None:
        self._planned.append(run)
        self._ends[run.sequence] = run.position + len(run.tokens)
        self._touched.add(run.sequence)
        if run.row is not None:
            self._fresh.add(run.row)

    def _taken(self) -> list[SequenceRun]:
        planned, self._planned, self._fresh, self._touched = self._planned, [], set(), set()
        return planned

    def _spare(self, source: int) -> int | None:
        """An empty sequence, of a branch that gives it up if none is free; None if all are planned for."""
        if self._free:
            return self._free.pop()
        found = next((each for each in self._branches if each != source and each not in self._touched), None)
        if found is not None:
            self._give_up(found)
        return found

    def _give_up(self, sequence: int) -> None:
        """Empty a branch's sequence. Its rows that other branches stand behind stay held: by those branches."""
        rows = self._slots[self._branches.pop(sequence)].rows
        for row in rows:
            above = row.parent
            while row.sequence not in (None, sequence) and above is not None and above.sequence == sequence:
                above.sequence, above = row.sequence, above.parent
        for row in rows:
            if row.sequence == sequence:
                row.sequence = None
        self._memory.remove(sequence, 0)
        self._ends[sequence] = 0

    def _settle(self, slot: int, text: int) -> None:
        """Let the line take the rows below `text`, as far as they are held: all others descend from them."""
        held = self._slots[slot]
        count = max(0, text - held.line)
        while count and held.rows[count - 1].sequence is None:
            count -= 1
        if count == 0:
            return
        last = held.rows[count - 1]
        if last.sequence is not None and last.sequence != held.sequence:
            del self._branches[last.sequence]
            self._branches[held.sequence] = slot
            held.sequence = last.sequence
        held.line += count
        del held.rows[:count]
        for row in held.rows:
            if row.parent is last:
                row.parent = None
        self._trim(slot)

    def cut(self, slot: int, start: int) -> None:
        """Drop the rows from `start` on."""
        held = self._slots[slot]
        if start < held.line:
            held.line, held.rows = start, []
        elif start < held.line + len(held.rows):
            del held.rows[start - held.line :]
        else:
            return
        self._trim(slot)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """See `specwire.lm.kv_cache.Runner.keep`. The rows descend from those before `start`, and from each other."""
        held = self._slots[slot]
        if rows and rows[0] < held.line:
            raise ValueError(f"rows: row {rows[0]} of slot {slot} descends from a row that is dropped")
        kept = [held.rows[row - held.line] for row in rows]
        held.rows = [*held.rows[: max(0, start - held.line)], *kept]
        held.line = min(held.line, start)
        self._trim(slot)

    def copy(self, source: int, target: int, stop: int) -> None:
        """Let `target` have the first `stop` rows of `source`, and nothing else."""
        self.cut(target, 0)
        held, copied = self._slots[source], self._slots[target]
        line = min(stop, held.line)
        if line:
            self._memory.share(held.sequence, copied.sequence, line)
        copied.line = self._ends[copied.sequence] = line
        places: dict[TreeRow | None, TreeRow | None] = {None: None}
        for row in held.rows[: stop - copied.line]:
            places[row] = again = TreeRow(row.token, row.position, places[row.parent])
            copied.rows.append(again)

    def lost(self, runs: Sequence[SequenceRun]) -> None:
        """Note that these were not fed, or not all of them."""
        for run in runs:
            held = self._slots[run.slot]
            if run.row is None:
                held.line = min(held.line, run.position)
            else:
                run.row.sequence = None
        for slot in {run.slot for run in runs}:
            self._trim(slot)

    def give_trees_up(self) -> None:
        """Let the lines alone be held."""
        for slot, held in enumerate(self._slots):
            for row in held.rows:
                row.sequence = None
            self._trim(slot)

    def _trim(self, slot: int) -> None:
        """Take out of the slot's sequences what belongs to no row, and free those that no row needs."""
        held = self._slots[slot]
        ends = {sequence: 0 for sequence, of in self._branches.items() if of == slot}
        ends[held.sequence] = held.line
        for row in held.rows:
            if row.sequence is not None:
                ends[row.sequence] = max(ends[row.sequence], row.position + 1)
        for sequence, end in ends.items():
            if end < self._ends[sequence]:
                self._memory.remove(sequence, end)
                self._ends[sequence] = end
            if end == 0 and sequence != held.sequence:
                del self._branches[sequence]
                self._free.append(sequence)
