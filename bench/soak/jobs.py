"""Whose texts a soak asks for, and what each session asks, drawn from a seed: the same number, the same session.

A pair has its target in this process, too: the reference that judges the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from random import Random

from tokenizers import Tokenizer

from bench.vllm.server import EAGER, PYTHON
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.core.law.sampling import Sampling
from specwire.lm import LanguageModel, load_model
from specwire.text.tokenizer import load_tokenizer

MOST_PROMPT = 128
SCRIPTED, DEMO, ON_VLLM = "scripted", "demo", "vllm"
VOCABULARY = 64


@dataclass(frozen=True)
class SoakPair:
    """`words`: how verifier and drafter are started. `tie`: scores no farther apart may be decided either way.

    vllm: the Python whose environment the first verifier runs in, and more words for it; none where it is like the
    second.
    """

    name: str
    target: str
    draft: str
    words: tuple[str, ...]
    tie: float
    longest: int
    reference: Callable[[], LanguageModel]
    vllm: tuple[str, ...] = ()

    @cached_property
    def model(self) -> LanguageModel:
        """The target in this process."""
        return self.reference()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.model.info.tokenizer_json)

    def prompt(self, random: Random) -> tuple[int, ...]:
        if self.name == SCRIPTED:
            return tuple(random.randrange(2, VOCABULARY) for _ in range(random.randint(1, 24)))
        text = random.choice(held_out_prompts()).text
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids[-MOST_PROMPT:])

    def stops(self, random: Random) -> tuple[str, ...]:
        """Strings that a text of a few hundred tokens holds now and then, across the borders of tokens."""
        if self.name == SCRIPTED:
            return tuple(f"{random.randrange(10)} {random.randrange(2, VOCABULARY)} {digit}" for digit in range(1, 6))
        return tuple(random.sample(CODE_STOPS, 2))


CODE_STOPS: Sequence[str] = ("\n\n", "return ", "):\n", "self.", " == ", "raise ")


def scripted(delay_ms: float = 8.0, slots: int = 64, row_cost: float = 0.0) -> SoakPair:
    """Known logits, bit for bit the same whatever the batch. The delay, of `specwire.lm.scripted`, emulates a slower
    target.
    """
    plain = f"scripted:7:vocab={VOCABULARY}:eos=0.001"
    return SoakPair(
        SCRIPTED,
        f"{plain}:delay_ms={delay_ms:g}:row_cost={row_cost:g}",
        f"scripted:7:vocab={VOCABULARY}:agree=0.8",
        ("--slots", str(slots)),
        tie=0.0,
        longest=400,
        reference=lambda: load_model(plain, slots=1),
    )


def demo() -> SoakPair:
    """The demo pair in float32: batches round differently, so scores within 1e-4 of each other are a near-tie."""
    return SoakPair(
        DEMO,
        str(TARGET),
        str(DRAFT),
        ("--dtype", "float32", "--threads", "1", "--slots", "40", "--context", "512"),
        tie=1e-4,
        longest=160,
        reference=lambda: load_model(str(TARGET), slots=1, dtype="float32", context=512),
    )


def on_vllm() -> SoakPair:
    """The demo pair, the first verifier on vLLM's worker."""
    return replace(demo(), name=ON_VLLM, vllm=(PYTHON, "--engine", "vllm", "--engine-options", EAGER))


PAIRS = {SCRIPTED: scripted, DEMO: demo, ON_VLLM: on_vllm}


class Manner(StrEnum):
    """What becomes of the session."""

    READ = "read"
    CANCEL = "cancel"  # told to end while it is read on
    LEAVE = "leave"  # the reader goes, and does not come back


@dataclass(frozen=True, slots=True)
class Job:
    """One session.

    Attributes:
        stop: strings that end it; empty for none.
        request_id: the caller's own; empty leaves it to the client library.
        at: tokens received when it is cancelled or left.
        pauses: the reader stops reading: (tokens received, seconds).
        second: a second reader, at another orchestrator, follows the same session.
    """

    number: int
    prompt: tuple[int, ...]
    length: int
    sampling: Sampling
    ignore_eos: bool
    stop: tuple[str, ...]
    request_id: str
    manner: Manner
    at: int
    pauses: tuple[tuple[int, float], ...]
    second: bool


def draw(pair: SoakPair, seed: int, number: int) -> Job:
    random = Random(f"{seed}/{number}")
    length = random.choice((1, 7, random.randint(10, 100), random.randint(100, pair.longest), pair.longest))
    manner = random.choices(list(Manner), (8, 1, 1))[0]
    return Job(
        number=number,
        prompt=pair.prompt(random),
        length=length,
        sampling=_sampling(random),
        ignore_eos=random.random() < 0.5,
        stop=pair.stops(random) if random.random() < 0.3 else (),
        request_id=f"soak-{seed}-{number}" if random.random() < 0.5 else "",
        manner=manner,
        at=random.randint(0, length),
        pauses=tuple(
            (random.randint(0, length), random.uniform(0.1, 4.0)) for _ in range(random.choice((0, 0, 0, 1, 2)))
        ),
        second=random.random() < 0.15,
    )


def _sampling(random: Random) -> Sampling:
    """Half of them greedy."""
    if random.random() < 0.5:
        return Sampling()
    return Sampling(
        temperature=random.choice((0.7, 1.0, 1.3)),
        top_k=random.choice((0, 20)),
        top_p=random.choice((1.0, 0.9)),
        seed=random.getrandbits(64),
    )
