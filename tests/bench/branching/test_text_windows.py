"""What runners-up of texts' guesses would gain: trees by counts, windows over them, and what is learnt elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.branching import text_windows
from bench.branching.text_windows import (
    BOTH,
    COUNTS,
    LINE,
    Branch,
    Key,
    Node,
    in_hindsight,
    lines,
    place_of,
    rates,
    speed_of,
    told,
    window,
    written,
)
from bench.suffix.run import STEPS
from bench.suffix.sources import COLD, KINDS, WARM, Said
from demo_pair import held_out_prompts

KEYS: list[Key] = [(0, 0, 0, rank, 0, 0) for rank in range(3)]


def tree() -> list[Node]:
    """Lines 5 6 and 5 8, and 7 9."""
    first, second, third = KEYS
    tokens = ((-1, 5, first), (0, 6, first), (0, 8, second), (-1, 7, second), (3, 9, third))
    return [Node(*each) for each in tokens]


def test_the_line_comes_first_and_its_runners_up_by_their_counts() -> None:
    branch = Branch()
    branch.add((5, 6), 0)
    for tokens in ((7, 1), (9, 1), (7, 2), (7, 2), (5, 6)):
        branch.add(tokens)
    nodes = branch.nodes((1, 4))
    assert [(node.parent, node.token) for node in nodes[:3]] == [(-1, 5), (0, 6), (-1, 7)]
    assert [(node.parent, node.token) for node in nodes[3:]] == [(2, 1), (2, 2), (-1, 9), (5, 1)]
    # Source, class, depth, rank, the share of 1, 1, 3, 1, 2, 1 and 1 in quarters, runners-up before it.
    keys = [node.key[2:] for node in nodes]
    assert keys == [(0, 0, 0, 0), (1, 0, 3, 0), (0, 1, 2, 0), (1, 0, 1, 1), (1, 1, 2, 1), (0, 2, 0, 0), (1, 0, 3, 1)]


@pytest.mark.parametrize(
    ("rest", "right"),
    [((5, 8, 1), [0, 2]), ((7, 9), [3, 4]), ((7,), [3]), ((6,), []), ((), [])],
)
def test_a_node_is_right_behind_right_ones(rest: tuple[int, ...], right: list[int]) -> None:
    place = place_of(tree(), rest)
    assert [number for number, is_right in enumerate(place.right) if is_right] == right
    assert in_hindsight(place, 0.0) == right


def test_a_window_takes_the_likeliest_nodes_as_far_as_they_pay() -> None:
    known = dict(zip(KEYS, (0.6, 0.3, 0.5), strict=True))
    # 0.6, 0.36 behind it, 0.3, 0.18 and 0.15.
    assert window(tree(), known, 0.0) == [0, 1, 3, 2, 4]
    assert window(tree(), known, 0.25) == [0, 1]
    assert window(tree(), known, 0.7) == []
    assert window([], known, 0.0) == []
    assert window(tree(), {}, 0.1) == [0, 1], "0.7, 0.49, 0.08 and less, as of a drafter"


def test_each_window_begins_where_the_one_before_ended() -> None:
    """Of four places the tree decides three and one; the line, with 0.5 of a forward a row, as many one by one."""
    output = (7, 9, 1, 2)
    places = [place_of(tree(), output[at:]) for at in range(len(output))]
    whole = speed_of([(places, lambda place: range(len(place.nodes)))], 0.0)
    assert whole == (2.0, 2.0, 5.0)
    assert speed_of([(places, lambda _: (0, 1))], 0.5) == (4 / (4 + 0.5 * 8), 1.0, 2.0)
    assert speed_of([(places, lambda place: in_hindsight(place, 0.0))], 0.0).rows == 1.0


def sessions() -> list[Said]:
    """A tenant's text, which goes on in two ways as often, and now in the one that was said first."""
    chance = random.Random(1)
    prompt, ways = chance.sample(range(1000), 30), [tuple(chance.sample(range(1000, 2000), 20)) for _ in range(2)]
    found = [Said("0.0", (number, *prompt), ways[number % 2]) for number in range(4)]
    return [*found, Said("0.0", (8, 9, *prompt), ways[0], steps=WARM)]


def test_another_continuation_is_a_runner_up_and_what_was_learnt_of_it_is_the_others() -> None:
    found = told(sessions())
    assert [len(each.places[name]) for each in found for name in (LINE, COUNTS, BOTH)] == [20] * 15
    last = found[-1]
    assert not any(last.places[LINE][0].right)
    assert sum(last.places[COUNTS][0].right) == 16
    assert {node.token for node in last.places[COUNTS][0].nodes} == {
        *sessions()[0].output[:16],
        *sessions()[1].output[:16],
    }
    # Of one try each, with what four others count for by rank.
    known = rates([last], COUNTS)
    assert known[last.places[LINE][0].nodes[0].key] == pytest.approx((0 + 4 * 0.7) / 5)
    aside = last.places[COUNTS][0].nodes[16]
    assert aside.parent == -1
    assert known[aside.key] == pytest.approx((1 + 4 * 0.08) / 5)
    other = [replace(said, tenant="other") for said in sessions()]
    table = lines(told([*sessions(), *other, *(replace(said, temperature=0.8) for said in sessions())]))
    assert len(table) == 1 + 4 * len(text_windows.SLOPES)


def test_the_trace_is_the_one_of_bench_suffix() -> None:
    codes = [prompt.text for prompt in held_out_prompts()[:2]]
    said = written(codes, 4, 0.8)
    assert [each.steps for each in said] == 2 * [COLD, *KINDS[1:2] * 3, KINDS[2]]
    assert [each.tenant for each in said] == len(STEPS) * ["0.8.0"] + len(STEPS) * ["0.8.1"]
    assert all(len(each.output) == 4 for each in said)
    first, again = said[0], said[len(STEPS) - 1]
    assert (first.prompt, first.output) == (again.prompt, again.output)


def test_a_table_is_printed_and_mistakes_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert text_windows.main(["--prompts", "2", "--tokens", "8"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + 2 * len(KINDS) * len(text_windows.SLOPES)
    assert "x, runners-up" in printed[0]
    for words, said in (
        (["--prompts", "0"], "prompts: must be at least 1"),
        (["--tokens", "0"], "tokens: must be at least 1"),
        (["--prompts", "1"], "prompts: must be at least 2, not 1"),
    ):
        assert text_windows.main(words) == 2
        assert said in capsys.readouterr().err
