"""The tree of draft tokens: what stays of it, whatever comes in whichever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specwire.core.text import BEFORE, Text, Tree

RATES = (0.7, 0.1, 0.05)


def tree(*nodes: tuple[int, int], base: int = 0) -> Tree:
    """Of (parent, token)."""
    made = Tree(0, base)
    for parent, token in nodes:
        made.add(parent, token)
    return made


def test_a_decided_token_keeps_the_subtree_of_the_child_that_equals_it() -> None:
    #  0:5 - 1:6 - 2:7     3:8 is a sibling of 1, with 4:9 behind it
    found = tree((BEFORE, 5), (0, 6), (1, 7), (0, 8), (3, 9))
    found.follow(Text([5]))
    assert (found.root, found.position, sorted(found.nodes)) == (0, 1, [1, 2, 3, 4])
    found.follow(Text([5, 8]))
    assert (found.root, found.position, sorted(found.nodes)) == (3, 2, [4])
    assert found.add(1, 7) is None, "its parent is pruned"
    node = found.add(4, 1)
    assert node is not None
    assert (node.number, node.position) == (6, 3)


def test_where_no_child_equals_it_a_late_sibling_may() -> None:
    found = tree((BEFORE, 5), (0, 6))
    text = Text([7, 8])
    found.follow(text)
    assert (found.root, found.position, found.nodes) == (BEFORE, 0, {})
    assert found.add(1, 1) is None
    found.add(BEFORE, 9)
    found.follow(text)
    assert (found.position, found.nodes) == (0, {})
    found.add(BEFORE, 7)
    found.follow(text)
    assert (found.root, found.position) == (4, 1)


def test_siblings_differ_and_what_is_behind_a_second_one_is_dropped() -> None:
    found = tree((BEFORE, 5))
    assert found.add(BEFORE, 5) is None
    assert found.add(1, 6) is None
    assert list(found.nodes) == [0]


def test_the_path_goes_where_most_is_expected() -> None:
    found = tree((BEFORE, 5), (BEFORE, 6), (1, 7), (2, 7))
    assert [node.token for node in found.path(RATES)] == [5]
    found = tree((BEFORE, 5), (BEFORE, 6), *((at, 7) for at in range(1, 9)))
    assert next(node.token for node in found.path((0.5, 0.4))) == 6
    found = tree((BEFORE, 5), (BEFORE, 6), *((at, 7) for at in range(1, 9)))
    assert [node.token for node in found.path(RATES)] == [5]
    assert [node.token for node in tree((BEFORE, 5), (BEFORE, 6), (1, 7)).path((0.5, 0.4))] == [6, 7]


def test_tokens_lead_to_a_node() -> None:
    found = tree((BEFORE, 5), (0, 6), (0, 7))
    leaf = found.behind((5, 7))
    assert leaf is not None
    assert leaf.number == 2
    assert found.behind((5, 8)) is None
    assert found.behind(()) is not None


@given(st.lists(st.tuples(st.integers(-1, 12), st.integers(0, 2)) | st.integers(0, 2), max_size=40), st.booleans())
def test_it_holds_what_descends_from_the_decided_text(events: list[tuple[int, int] | int], at_once: bool) -> None:
    """Against all paths ever drafted, kept as a set: nodes and decided tokens in any order."""
    found, text = Tree(0, 0), Text()
    paths: dict[int, tuple[int, ...]] = {BEFORE: ()}
    for event in events:
        if isinstance(event, int):
            text.extend((event,))
        else:
            parent = min(event[0], found.size - 1)
            number = found.size
            found.add(parent, event[1])
            path = (*paths[parent], event[1]) if parent in paths else None
            if path is not None and path not in paths.values():
                paths[number] = path
        if at_once or event == 0:
            found.follow(text)
        assert found.path(RATES) == found._best_path(RATES)
    found.follow(text)
    decided = tuple(text.tokens)
    alive = {path for path in paths.values() if path[: len(decided)] == decided and len(path) > len(decided)}
    held = set()
    for number in found.nodes:
        tokens, at = [], number
        while at != found.root:
            tokens.append(found.nodes[at].token)
            at = found.nodes[at].parent
        held.add((*decided, *reversed(tokens)))
    assert held == (alive if decided in paths.values() else set())
