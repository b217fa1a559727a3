"""A step as it is planned: the sessions that may take part, and what each gets of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from specwire.core.chain import SourceKind
from specwire.core.ngram import Guess
from specwire.core.speed import AcceptanceByPosition

MOST_WINDOW = 16

# V(m): expected microseconds of a step of m rows.
V = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Awaited:
    """Draft tokens that should arrive around `expected_us`; waiting beyond `latest_us` is pointless."""

    tokens: int
    expected_us: float
    latest_us: float
    chance: float


class StepCandidate(NamedTuple):
    """A session with room, as the scheduler sees it.

    Attributes:
        slot: where its cache lies; names the session in the plan.
        room: tokens that it may decide now, at least 1.
        uncached: decided tokens that the slot does not hold; at least 1.
        drafted: draft tokens of the longest live chain behind the decided text, and `acceptance` of such.
        spare_us: what its ledger lets it lose in this step, by waiting and by a window that is all wrong, what that
            costs others included.
        missing: draft tokens that are due and not at hand.
        guess: what the verifier itself proposes.
        guess_untested_us: time spent since such a guess was last tested.
        chain_untested_us: the same of a token of a chain.
        whole: the only widths that a window of the chain may have; None where it may have any.
    """

    slot: int
    room: int
    uncached: int
    drafted: int
    spare_us: float
    acceptance: AcceptanceByPosition
    awaited: Awaited | None = None
    missing: int = 0
    guess: Guess | None = None
    guess_untested_us: float = 0.0
    chain_untested_us: float = 0.0
    whole: tuple[int, ...] | None = None


class Share(NamedTuple):
    """A session's part of a forward: `fresh` decided tokens, then `window` draft tokens of a source of `kind`.

    `decides`: the last decided token is among them, so the step decides window + 1 rows.
    """

    slot: int
    fresh: int
    window: int
    decides: bool
    kind: SourceKind = SourceKind.DRAFTER

    @property
    def rows(self) -> int:
        return self.fresh + self.window


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Run `shares` now, or first wait until `wait_until_us` for proposals that are due."""

    shares: tuple[Share, ...]
    wait_until_us: float | None = None
