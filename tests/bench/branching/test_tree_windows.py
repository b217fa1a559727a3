"""The small verifier of tree windows: with a path it is as fast as the engine, and it tests the likeliest nodes."""

from __future__ import annotations

import pytest

from bench.branching.tree_windows import TreeSession, likeliest
from bench.wan.cells import AWAY
from bench.wan.virtual import Software, as_simulated
from specwire import sim
from specwire.core.text import Tree


def test_with_the_best_path_it_is_as_fast_as_the_engine() -> None:
    cell = as_simulated(AWAY, Software(), 128)
    assert TreeSession(cell, 0).tokens_per_second() == pytest.approx(sim.simulate(cell).tokens_per_second, rel=0.06)


def test_where_rows_cost_nothing_more_of_the_tree_is_not_slower() -> None:
    cell = as_simulated(AWAY, Software(), 128)
    path, tree = (TreeSession(cell, width).tokens_per_second() for width in (0, 64))
    assert tree >= 0.98 * path


def test_the_likeliest_nodes_come_behind_their_parents() -> None:
    tree = Tree(0, 0)
    # 0 and 3 are siblings; 1 is behind 0, 2 behind 1, 4 behind 3.
    tree.extend((10, 11, 12, 20, 21), (-1, 0, 1, -1, 3))
    assert [node.number for node in likeliest(tree, (0.6, 0.3), 5)] == [0, 1, 3, 2, 4]
    assert [node.number for node in likeliest(tree, (0.6, 0.3), 2)] == [0, 1]
    assert likeliest(Tree(0, 0), (0.6, 0.3), 5) == []
