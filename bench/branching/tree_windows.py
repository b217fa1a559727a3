"""What a verifier would gain that tests several paths in one forward: python -m bench.branching.tree_windows.

The engine's window is one path. Here a small verifier stands in its place that can also test the likeliest nodes of the
whole tree, as many of them as it likes; drafters, their trees, lines and traces are the simulator's. It chooses by
the same estimates. Nothing of what a tree's mask, its sampling or its compaction costs is counted, so the
gains are upper references. `head_windows` asks the same of runners-up of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from math import ceil

from bench.harness.interleave import tracked
from bench.harness.processes import in_processes
from bench.harness.report import table
from bench.wan.cells import LIGHT_CELLS, TOKENS, WanCell
from bench.wan.traces import GREEDY, nearest
from bench.wan.virtual import Software, as_simulated
from draft_service.sessions import AdvanceSession, DraftedProposal, OpenSession, Reply
from specwire import sim
from specwire.core.law.sampling import Sampling
from specwire.core.messages import MOST_BRANCHES, MOST_WINDOW, Pace, Proposal
from specwire.core.policy.tunables import PRIOR_RATES
from specwire.core.text import Node, Text, Tree
from specwire.core.verify.chains import Chains
from specwire.sim.clock import Clock, Machine
from specwire.sim.drafter import SimDrafter, SimLink
from specwire.sim.guesses import VOCABULARY

TRACES = 3
# Nodes of a tree window; 0: the best path, of at most MOST_WINDOW nodes.
WIDTHS = (0, 8, MOST_WINDOW, 32, 64)
HANDLE = SOURCE = 1
# Tokens that a step decides at best, for how far a drafter runs ahead.
BEST_STEP = 4
GREEDY_TEXT = Sampling()


class TreeSession:
    """One text: a drafter, a line, and a verifier whose windows are the `width` likeliest nodes (0: the best path)."""

    def __init__(self, cell: sim.Cell, width: int) -> None:
        self.cell = cell
        self.width = width
        self.clock = Clock()
        self.guesses = self.cell.guesses()
        self.chains = Chains(VOCABULARY)
        self.text = Text([self.guesses.target(0)])
        ahead = MOST_WINDOW + BEST_STEP * ceil(1 + self.cell.rtt_us / self.cell.V_us)
        self.pace = Pace(1, ahead, branches=MOST_BRANCHES)
        machine = Machine(self.clock)
        self.drafter = SimDrafter(self.clock, machine, self.cell.draft_us, row_slope=self.cell.row_slope)
        self.link = SimLink(self.guesses, self._replied)

    def tokens_per_second(self) -> float:
        self._to_drafter(OpenSession(self.link, HANDLE, tuple(self.text.tokens), GREEDY_TEXT, self.pace))
        self._step()
        self.clock.run()
        return self.cell.tokens / self.clock.now_us * 1e6

    def _to_drafter(self, command: OpenSession | AdvanceSession) -> None:
        self.clock.after(self.cell.rtt_us / 2, partial(self.drafter.send, command))

    def _replied(self, reply: Reply) -> None:
        if isinstance(reply, DraftedProposal):
            self.clock.after(self.cell.rtt_us / 2, partial(self._arrived, reply.proposal))

    def _arrived(self, proposal: Proposal) -> None:
        self.chains.offer(replace(proposal, source=SOURCE), self.text)

    def _step(self) -> None:
        tested = self._window()
        took_us = self.cell.V_us * (1 + self.cell.slope * len(tested))
        self.clock.after(took_us, partial(self._decide, {node.number for node in tested}))

    def _window(self) -> Sequence[Node]:
        tree = self.chains._trees.get(SOURCE)
        if tree is None or tree.position != len(self.text):
            return ()
        return likeliest(tree, PRIOR_RATES, self.width) if self.width else tree.path(PRIOR_RATES)[:MOST_WINDOW]

    def _decide(self, tested: set[int]) -> None:
        """The tested nodes that the target says too, and one token of its own."""
        tree = self.chains._trees.get(SOURCE)
        node = None if tree is None else tree.node(tree.root)
        decided: list[int] = []
        while node is not None and tree is not None:
            number = node.children.get(self.guesses.target(len(self.text) + len(decided)))
            node = tree.nodes[number] if number in tested and number is not None else None
            decided += [node.token] if node is not None else []
        decided.append(self.guesses.target(len(self.text) + len(decided)))
        position = len(self.text)
        self.chains.learn(decided)
        self.text.extend(decided)
        self.chains.advance(self.text)
        self._to_drafter(AdvanceSession(self.link, HANDLE, position, tuple(decided), self.pace))
        if len(self.text) > self.cell.tokens:
            self.clock.stop()
        else:
            self._step()


def likeliest(tree: Tree, rates: Sequence[float], most: int) -> list[Node]:
    """The nodes that are likeliest to be decided: parents before their children."""
    found: list[Node] = []
    above, chance, heap = tree.node(tree.root), -1.0, list[tuple[float, int]]()
    while above is not None:
        for rank, child in enumerate(above.children.values()):
            heappush(heap, (chance * rates[min(rank, len(rates) - 1)], child))
        if not heap or len(found) == most:
            break
        chance, number = heappop(heap)
        above = tree.nodes[number]
        found.append(above)
    return found


def speeds(cell: WanCell) -> list[float]:
    """Tokens per second by width, over several traces."""
    cells = [as_simulated(cell, Software(), TOKENS, trace) for trace in nearest(GREEDY, cell.acceptance)[:TRACES]]
    return [len(cells) / sum(1 / TreeSession(each, width).tokens_per_second() for each in cells) for width in WIDTHS]


def main() -> int:
    head = ("cell", "best path, tokens/s", *(f"tree of {width}" for width in WIDTHS[1:]))
    rows = []
    found = tracked(in_processes(speeds, LIGHT_CELLS), len(LIGHT_CELLS), "cells")
    for cell, (path, *trees) in zip(LIGHT_CELLS, found, strict=True):
        rows.append((cell.name, f"{path:.1f}", *(f"{tree / path:.3f}" for tree in trees)))
    print("\n".join([*table(head, rows), "tree of N: a window of the N likeliest nodes, over the best path"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
