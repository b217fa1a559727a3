"""`make statistics`: the law of many short texts through a whole stack, by rule and drafter; with biased controls.

Prints tables, writes them as JSON, and fails where an exact rule's law is refused, where a biased drafter's is not, or
where a seed's text depends on who drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness import RESULTS, record
from bench.harness.interleave import tracked
from bench.harness.report import Bar, at_least, bar_lines, exactly, none_of
from bench.laws.biased import BIASED, BIASED_VERIFIERS, biased
from bench.laws.exact import p_of_firsts, p_of_steps
from bench.laws.sampling import (
    DRAFTING,
    PROMPT,
    RULES,
    SCRIPT,
    TARGET,
    WAYS,
    DraftSetup,
    LawSample,
    SeedWay,
    all_of,
    deployment,
    same_seed,
    sample,
)
from scripts.figures.exact import laws_table
from specwire.rpc.process import say

OUT = RESULTS / "laws.json"
# What is wanted of each rule, and of each that may use a head.
WANTED, WANTED_HEADED = 50_000, 10_000
# Seeds of one kind of drafter, at most. No two kinds share one: a coupled text is a function of it.
APART = 1 << 24
# Tokens whose joint law is tested; those behind them are tested one by one.
FIRSTS = 3
# Below this a law is refused. Of a dozen tests of an exact engine one in 8,000 runs has one.
ALPHA = 1e-5
# One token a chunk, and a verifier that waits for it.
ONE_BY_ONE = DraftSetup(TARGET, "stream:1,2,1")
ALL = "all of them"
NUMBERS = ("sessions", "headed")


@dataclass(frozen=True, slots=True)
class LawTest:
    """What the tests say of a sample; `exact`: whether its law should be the target's.

    tested, bonus, direct: tokens by how they came to be decided. p_firsts: of the joint law of the first FIRSTS tokens;
    p_steps: of those behind them.
    """

    drafter: str
    rule: str
    exact: bool
    sessions: int
    tested: int
    bonus: int
    direct: int
    p_firsts: float
    p_steps: float

    @classmethod
    def of(cls, drafter: str, rule: str, exact: bool, found: LawSample, p_firsts: float, p_steps: float) -> LawTest:
        """The counts are the sample's own."""
        figures = found.figures
        tested = figures["accepted"] + figures["recovered"]
        counts = len(found.listed), tested, figures["bonus"], figures["direct"]
        return cls(drafter, rule, exact, *counts, p_firsts, p_steps)

    @property
    def refused(self) -> bool:
        return min(self.p_firsts, self.p_steps) < ALPHA

    @property
    def right(self) -> bool:
        return self.refused is not self.exact


def judged(drafter: str, rule: str, found: LawSample, exact: bool = True) -> LawTest:
    """Hold a sample to the law of the scripted target."""
    p_firsts = p_of_firsts(SCRIPT, PROMPT, found.listed, FIRSTS)
    return LawTest.of(drafter, rule, exact, found, p_firsts, p_of_steps(SCRIPT, PROMPT, found.listed, FIRSTS))


async def exact(name: str, sessions: int) -> dict[str, LawSample]:
    """Each rule's texts with one kind of drafter."""
    first, drafting = list(DRAFTING).index(name) * APART, DRAFTING[name]
    async with deployment(drafting) as client:
        seeds = range(first, first + sessions)
        return {
            rule: await sample(client, rule, tracked(seeds, sessions, f"{name}, {rule}"), ngram=bool(drafting.heads))
            for rule in drafting.rules
        }


async def broken(name: str, sessions: int) -> LawTest:
    """A biased drafter, under rejection; or a verifier that takes a head's tokens on trust, under coupled."""
    drafting, rule = (DRAFTING["head"], "coupled") if name in BIASED_VERIFIERS else (ONE_BY_ONE, "rejection")
    with biased(name):
        async with deployment(drafting) as client:
            seeds = tracked(range(sessions), sessions, name)
            found = await sample(client, rule, seeds, ngram=bool(drafting.heads))
    return judged(name, rule, found, exact=False)


async def laws(sessions: int, headed: int) -> list[LawTest]:
    """`sessions` for each rule, over all drafters: by drafter, and all together; then the biased ones, a fiftieth.

    headed: with a head, for each rule that may use one, above those.
    """
    samples, drafters = {}, sum(not each.heads for each in DRAFTING.values())
    for name, drafting in DRAFTING.items():
        samples[name] = await exact(name, headed if drafting.heads else -(-sessions // drafters))
        say(f"bench: the texts of the {name} drafter are there")
    verdicts = [judged(name, rule, found[rule]) for name, found in samples.items() for rule in found]
    pooled = {rule: all_of([found[rule] for found in samples.values() if rule in found]) for rule in RULES}
    verdicts += [judged(ALL, rule, pooled[rule]) for rule in RULES]
    return verdicts + [await broken(name, _part_of(sessions)) for name in (*BIASED, *BIASED_VERIFIERS)]


def _part_of(sessions: int) -> int:
    """Enough to refuse what is biased, and to compare texts."""
    return max(300, sessions // 50)


def bars(verdicts: Sequence[LawTest], ways: Sequence[SeedWay]) -> list[Bar]:
    least = min(verdict.sessions for verdict in verdicts if verdict.drafter == ALL)
    heads = [name for name, drafting in DRAFTING.items() if drafting.heads]
    headed = min((verdict.sessions for verdict in verdicts if verdict.drafter in heads), default=0)
    return [
        none_of("exact laws that are refused", sum(v.exact and v.refused for v in verdicts)),
        none_of("biased drafters that are not refused", sum(not v.exact and not v.right for v in verdicts)),
        none_of("coupled texts that depend on who drafts", sum(way.differing for way in ways)),
        at_least("sessions of each exact rule", exactly(least), WANTED),
        at_least("sessions with a head of each rule that may use one", exactly(headed), WANTED_HEADED),
    ]


def tell(
    out: Path,
    verdicts: Sequence[LawTest],
    ways: Sequence[SeedWay],
    held: Sequence[Bar],
    arguments: Mapping[str, object],
    **more: object,
) -> None:
    """Keep the record, and print it."""
    found = {
        "bars": [asdict(bar) for bar in held],
        "laws": [{**asdict(verdict), "refused": verdict.refused} for verdict in verdicts],
        "same_seed": [asdict(way) for way in ways],
        "alpha": ALPHA,
        **more,
    }
    print(laws_table(record.save(out, found, arguments)))
    print("\n".join(bar_lines(held)))


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.laws.run", description=(__doc__ or "").partition("\n")[0])
    line.add_argument("--sessions", type=int, default=WANTED, metavar="N", help="for each rule (default: %(default)s)")
    more = "with a head besides, for each rule that may use one (default: %(default)s)"
    line.add_argument("--headed", type=int, default=WANTED_HEADED, metavar="N", help=more)
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, NUMBERS):
        return 2
    verdicts = asyncio.run(laws(args.sessions, args.headed))
    ways = asyncio.run(same_seed(WAYS, _part_of(args.sessions)))
    held = bars(verdicts, ways)
    tell(args.out, verdicts, ways, held, {name: getattr(args, name) for name in NUMBERS})
    # Fewer sessions than are wanted are no failure.
    return 0 if all(bar.holds for bar in held if bar.sense == "<=") else 1


if __name__ == "__main__":
    sys.exit(main())
