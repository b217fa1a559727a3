"""Many short texts through a whole stack: real gRPC between client, orchestrator, verifier and drafter.

Under `coupled` a seed's text is the same whoever drafts for it, and in whatever portions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import draft_service.server
import verify_service.server
from orchestrator import server
from orchestrator.options import OrchestratorOptions
from specwire.client import AsyncClient
from specwire.lm.scripted import Script
from specwire.rpc.server_options import ModelServiceOptions

# Few tokens, each with a chance, one of them the end of the text; what follows depends on the last token only.
MODEL = "vocab=5:eos=0.3:spread=2:memory=1"
TARGET = f"scripted:7:{MODEL}"
SCRIPT = Script.parse(TARGET)
RULES = ("coupled", "rejection", "block")
PROMPT = (1, 2)
LENGTH = 8
AT_ONCE = 8
# Of each session: on a machine that is busy with other things a minute may pass without a token.
TIMEOUT = 900.0
FIGURES = ("proposed", "accepted", "recovered", "bonus", "direct", "target_forwards")


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """A drafter, and how it is told to draft.

    delay_ms: of the target's forwards, an emulation of a slower one: a short text must not be over before the drafter
        has heard of it.
    patient: the verifier waits for what is due, so that how much is tested depends little on how busy the machine is.
    heads: in place of a drafter, what drafts beside the target. A patient verifier would make no use of it.
    """

    model: str
    plan: str
    delay_ms: float = 5.0
    patient: bool = True
    heads: str = ""

    @property
    def rules(self) -> tuple[str, ...]:
        """The exact rules that may use it: a head's tokens come without what they were drawn from."""
        return RULES[:1] if self.heads else RULES


# Right more often than not; right by chance only; one whose tokens come before, during or after a forward, or not; one
# that branches, where the rule allows it; and a head beside the target.
DRAFTING = {
    "good": DraftSetup(f"scripted:7:{MODEL}:agree=0.6", "lockstep:2"),
    "random": DraftSetup(f"scripted:8:{MODEL}", "stream:1,5,3"),
    "intermittent": DraftSetup(f"scripted:9:{MODEL}:delay_ms=2", "stream:2,8", patient=False),
    "branching": DraftSetup(f"scripted:7:{MODEL}:agree=0.6", "stream:1,6,3,4"),
    "head": DraftSetup("", "off", patient=False, heads=f"scripted:7:{MODEL}:agree=0.6"),
}


@dataclass(slots=True)
class LawSample:
    """Texts in the order of their seeds, and what became of draft tokens."""

    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    figures: Counter[str] = field(default_factory=Counter)

    @property
    def listed(self) -> list[tuple[int, ...]]:
        return [self.texts[seed] for seed in sorted(self.texts)]


def all_of(samples: Sequence[LawSample]) -> LawSample:
    """Several, of different seeds, as one."""
    texts = {seed: text for each in samples for seed, text in each.texts.items()}
    return LawSample(texts, sum((each.figures for each in samples), Counter()))


@asynccontextmanager
async def deployment(*drafts: DraftSetup) -> AsyncIterator[AsyncClient]:
    """A stack in this process; without a drafter the target decodes alone."""
    async with AsyncExitStack() as parts:
        slow = f"{TARGET}:delay_ms={max((draft.delay_ms for draft in drafts), default=0.0)}"
        patient = any(draft.patient for draft in drafts)
        heads = next((draft.heads for draft in drafts), "")
        # What a head drafts is not to be crowded out by what stands in the text.
        served = ModelServiceOptions(slow, slots=AT_ONCE, heads=heads, ngram=not heads)
        verifier = await verify_service.server.start(served, patient=patient)
        parts.push_async_callback(verifier.stop, 0.0)
        addresses = []
        for draft in drafts:
            if draft.heads:
                continue
            drafter = await draft_service.server.start(ModelServiceOptions(draft.model, slots=AT_ONCE))
            parts.push_async_callback(drafter.stop, 0.0)
            addresses.append(drafter.address)
        plan = drafts[0].plan if drafts else "off"
        options = OrchestratorOptions(
            (verifier.address,),
            tuple(addresses),
            "memory:",
            plan=plan,
            drafters_per_session=max(1, len(addresses)),
        )
        orchestrator = await server.start(options)
        parts.push_async_callback(orchestrator.stop, 0.0)
        yield await parts.enter_async_context(AsyncClient(orchestrator.address))


async def sample(
    client: AsyncClient, rule: str, seeds: Iterator[int], drafting: bool = True, ngram: bool = False
) -> LawSample:
    """One session for each seed, some at a time."""
    found = LawSample()

    async def work() -> None:
        for seed in seeds:
            completion = await client.complete(
                PROMPT,
                max_tokens=LENGTH,
                temperature=1.0,
                seed=seed,
                rule=rule,
                drafting=drafting,
                ngram=ngram,
                timeout=TIMEOUT,
            )
            found.texts[seed] = completion.tokens
            for name in FIGURES:
                found.figures[name] += getattr(completion.stats, name)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    return found


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
