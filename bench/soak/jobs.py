"""What each session asks for, drawn from a seed: the same seed and number, the same session."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from bench.soak.pairs import SoakPair
from specwire.core.law.sampling import Sampling


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
