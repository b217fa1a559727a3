"""`make statistics`: the law of many short texts through a whole stack, by rule and drafter; and what bias looks like.

Prints a table, and fails where an exact rule's law is refused or a biased drafter's is not.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass

from bench.laws.biased import BIASED, biased
from bench.laws.exact import p_of_firsts, p_of_steps
from bench.laws.sampling import DRAFTING, PROMPT, SCRIPT, TARGET, Drafting, Sample, deployment, sample

RULES = ("coupled", "rejection", "block")
# Tokens whose joint law is tested; those behind them are tested one by one.
FIRSTS = 3
# Below this a law is refused. Of a dozen tests of an exact engine one in 8,000 runs has one.
ALPHA = 1e-5
# One token a chunk, and a verifier that waits for it.
ONE_BY_ONE = Drafting(TARGET, "stream:1,2,1")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests say of a sample; `exact`: whether its law should be the target's."""

    name: str
    rule: str
    exact: bool
    sample: Sample

    @property
    def p_firsts(self) -> float:
        return p_of_firsts(SCRIPT, PROMPT, self.sample.listed, FIRSTS)

    @property
    def p_steps(self) -> float:
        return p_of_steps(SCRIPT, PROMPT, self.sample.listed, FIRSTS)

    @property
    def refused(self) -> bool:
        return min(self.p_firsts, self.p_steps) < ALPHA

    @property
    def right(self) -> bool:
        return self.refused is not self.exact

    def __str__(self) -> str:
        figures = self.sample.figures
        tested = sum(figures[name] for name in ("accepted", "recovered"))
        return (
            f"{self.name:24} {self.rule:10} {len(self.sample.texts):8} {tested:8} {figures['bonus']:7} "
            f"{figures['direct']:8} {self.p_firsts:10.2g} {self.p_steps:10.2g}  "
            f"{'refused' if self.refused else 'accepted'}{'' if self.right else ', WRONGLY'}"
        )


HEAD = (
    f"{'drafter':24} {'rule':10} {'sessions':>8} {'tested':>8} {'bonus':>7} {'direct':>8} {'p, first 3':>10} "
    f"{'p, others':>10}"
)


async def exact(name: str, sessions: int) -> list[Verdict]:
    """All rules with one kind of drafter."""
    async with deployment(DRAFTING[name]) as client:
        return [Verdict(name, rule, True, await sample(client, rule, iter(range(sessions)))) for rule in RULES]


async def broken(name: str, sessions: int) -> Verdict:
    """A biased drafter, under rejection."""
    with biased(name):
        async with deployment(ONE_BY_ONE) as client:
            return Verdict(name, "rejection", False, await sample(client, "rejection", iter(range(sessions))))


async def run(sessions: int) -> bool:
    """`sessions` for each rule, over all drafters; returns whether everything is as it should be."""
    print(HEAD)
    verdicts: list[Verdict] = []
    for name in DRAFTING:
        for verdict in await exact(name, -(-sessions // len(DRAFTING))):
            print(verdict, flush=True)
            verdicts.append(verdict)
    for name in BIASED:
        verdicts.append(await broken(name, max(300, sessions // 50)))
        print(verdicts[-1], flush=True)
    return all(verdict.right for verdict in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.laws.run", description=__doc__)
    parser.add_argument(
        "--sessions", type=int, default=50_000, metavar="N", help="for each rule (default: %(default)s)"
    )
    return 0 if asyncio.run(run(parser.parse_args().sessions)) else 1


if __name__ == "__main__":
    sys.exit(main())
