"""Of a peer's variants the fastest takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.harness.runs import Run
from bench.main.measure import PROMPTS, fastest
from tests.bench.harness.made_rows import run


@dataclass
class Variant:
    label: str
    seconds: float
    key: str = "b"
    asked: list[Sequence[int]] = field(default_factory=list)

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        self.asked.append(prompt)
        return run(self.seconds, range(tokens))


def test_the_fastest_is_taken_and_all_are_told_of() -> None:
    rows = [Variant("slow", 2.0), Variant("fast", 0.5), Variant("middle", 1.0)]
    prompts = [[number] for number in range(PROMPTS + 4)]
    found, best = fastest(rows, prompts, 4)
    assert best is rows[1]
    assert [(one.name, one.tokens_per_second, one.tokens_per_forward) for one in found] == [
        ("slow", 2.0, 2.0),
        ("fast", 8.0, 2.0),
        ("middle", 4.0, 2.0),
    ]
    assert [one.chosen for one in found] == [False, True, False]
    # One to warm up, then the pass.
    assert all(row.asked == [prompts[0], *prompts[:PROMPTS]] for row in rows)
