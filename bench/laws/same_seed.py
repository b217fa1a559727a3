"""Under `coupled` a seed's text is the same whoever drafts for it, and in whatever portions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.laws.sampling import DRAFTING, DraftSetup, LawSample, deployment, sample

GOOD, RANDOM = DRAFTING["good"].model, DRAFTING["random"].model
OFF, NGRAM = "nobody", "the text itself"
# Right and wrong drafters, chunks of 1 to 5, in turns with the target and beside it, trees, and a head.
WAYS = {
    "good, chunks of 1": DraftSetup(GOOD, "stream:1,4,1"),
    "good, chunks of 3, in turns": DraftSetup(GOOD, "lockstep:3"),
    "good, chunks of 5": DraftSetup(GOOD, "stream:5,8,5"),
    "random, chunks of 1, in turns": DraftSetup(RANDOM, "lockstep:1"),
    "random, chunks of 4": DraftSetup(RANDOM, "stream:4,8,4"),
    "intermittent": DRAFTING["intermittent"],
    "good, trees": DRAFTING["branching"],
    "random, trees": DraftSetup(RANDOM, "stream:2,8,2,4"),
    "a head": DRAFTING["head"],
}


@dataclass(frozen=True, slots=True)
class SeedWay:
    """Sessions drafted for in one way. differing: of their texts, those that nobody's drafting writes otherwise."""

    name: str
    sessions: int
    accepted: int
    differing: int

    @classmethod
    def of(cls, name: str, found: LawSample, known: LawSample) -> SeedWay:
        differing = sum(found.texts[seed] != text for seed, text in known.texts.items())
        return cls(name, len(found.texts), found.figures["accepted"], differing)


async def same_seed(ways: Mapping[str, DraftSetup], sessions: int) -> list[SeedWay]:
    """So many seeds each: with drafting off, with guesses from the text alone, and in each of these ways."""
    found: dict[str, LawSample] = {}
    for name, drafting in ways.items():
        async with deployment(drafting) as client:
            if not found:
                found[OFF] = await sample(client, "coupled", iter(range(sessions)), drafting=False)
                found[NGRAM] = await sample(client, "coupled", iter(range(sessions)), drafting=False, ngram=True)
            found[name] = await sample(client, "coupled", iter(range(sessions)), ngram=bool(drafting.heads))
    return [SeedWay.of(name, each, found[OFF]) for name, each in found.items()]
