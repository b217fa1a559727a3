"""Traces: those recorded, and how they are brought to a stated acceptance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.wan.traces import (
    GREEDY,
    PROMPTS,
    TOKENS,
    Ranked,
    acceptance,
    compare,
    decode,
    from_position,
    nearest,
    ranked,
    recorded,
    with_acceptance,
    with_ranks,
    write,
)
from specwire.core.law.sampling import Sampling
from specwire.lm import load_model
from tests.faults.streams import plain


def test_the_recorded_traces_are_whole() -> None:
    traces = recorded()
    assert len(traces) == PROMPTS
    assert {len(trace) for trace in traces} == {TOKENS}
    assert set("".join(traces)) == {"0", "1"}
    assert 0.3 < acceptance("".join(traces)) < 0.95


@pytest.mark.parametrize("wanted", [0.0, 0.4, 0.9, 1.0])
def test_a_trace_is_thinned_or_boosted_by_as_little_as_it_takes(wanted: float) -> None:
    for trace in recorded()[:4]:
        made = with_acceptance(trace, wanted, seed=3)
        assert made.count("1") == round(wanted * TOKENS)
        turned = [(old, new) for old, new in zip(trace, made, strict=True) if old != new]
        assert len(turned) == abs(trace.count("1") - made.count("1"))
        assert len(set(turned)) <= 1
        assert made == with_acceptance(trace, wanted, seed=3)


@pytest.mark.parametrize("wanted", [0.4, 0.6, 0.8, 0.9])
def test_misses_keep_their_ranks_when_a_trace_is_thinned_or_boosted(wanted: float) -> None:
    """The first guesses are those of the trace without ranks; a place that is turned is one that was recorded."""
    expected: Counter[int | None] = Counter()
    found: Counter[int | None] = Counter()
    for seed, trace in enumerate(ranked(GREEDY)):
        made = with_ranks(trace, wanted, seed)
        assert made.bits == with_acceptance(trace.bits, wanted, seed)
        recorded_places = set(zip(trace.right, trace.scores, strict=True))
        assert set(zip(made.right, made.scores, strict=True)) <= recorded_places
        before, after = (Counter(rank for rank in each.right if rank != 0) for each in (trace, made))
        found.update(after)
        for rank, times in before.items():
            expected[rank] += times * after.total() / before.total()  # type: ignore[assignment]  # a share
    for rank in (1, 2, 3, None):
        assert found[rank] / found.total() == pytest.approx(expected[rank] / found.total(), abs=0.05)


def test_those_come_first_in_which_least_is_turned() -> None:
    found = nearest(GREEDY, 0.8)
    assert len(found) == PROMPTS
    assert all(each.bits.count("1") == round(0.8 * TOKENS) for each in found)
    assert nearest(GREEDY, 0.8)[0] == found[0]


def test_a_scripted_drafter_plays_ranks(tmp_path: Path) -> None:
    prompt, trace = (5, 6, 7), with_ranks(ranked(GREEDY)[0], 0.6)
    (output,) = decode(load_model("scripted:7", slots=1), [prompt], 60, Sampling())
    (tmp_path / "ranks").write_text(trace.played(len(prompt)))
    drafter = load_model(f"scripted:7:ranks={tmp_path / 'ranks'}", slots=1)
    played = compare(drafter, prompt, output, Sampling())
    assert played.right == trace.right[:60]
    for said, told in zip(played.scores, trace.scores, strict=False):
        assert said == pytest.approx(told, abs=0.01)


def test_a_trace_begins_at_a_position() -> None:
    trace = "11010"
    for position in range(12):
        turned = from_position(trace, position)
        assert [turned[(position + index) % 5] for index in range(10)] == list(trace * 2)


def test_a_trace_is_what_a_scripted_drafter_was_told_to_do(tmp_path: Path) -> None:
    """Recorded from a drafter that plays a known trace, behind prompts of different lengths."""
    prompts = [(5, 6, 7), tuple(range(1, 41))]
    greedy = Sampling()
    outputs = decode(load_model("scripted:7", slots=2), prompts, 60, greedy)
    assert outputs == [plain("scripted:7", 60, prompt) for prompt in prompts]
    known = "1101001110" * 6
    for prompt, output in zip(prompts, outputs, strict=True):
        (tmp_path / "trace").write_text(from_position(known, len(prompt)))
        drafter = load_model(f"scripted:7:trace={tmp_path / 'trace'}", slots=1)
        assert compare(drafter, prompt, output, greedy).bits == known


def test_what_is_written_is_read(tmp_path: Path) -> None:
    scores = (0.0, *(-0.05 * gap for gap in (1, 2, 40, 80, 100, 120, 255)))
    written = [Ranked((0, 1, None), (scores,) * 3), Ranked((7, 0, 0), (scores,) * 3)]
    write({GREEDY: written}, tmp_path / "traces.json")
    read = ranked(GREEDY, tmp_path / "traces.json")
    assert [each.right for each in read] == [each.right for each in written]
    assert read[0].scores[0] == pytest.approx(scores)
    assert recorded(tmp_path / "traces.json") == ["100", "011"]
