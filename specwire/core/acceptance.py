"""The exact acceptance rules `greedy` and `coupled`.

Both draw the target's token at a position without looking at any proposal, then ask whether the proposal guessed it.
That is why proposals change how fast tokens come and, with equal logits, never which:

    greedy    argmax of the target's logits, ties to the lowest id
    coupled   argmax(log p + G), G keyed by (seed, choice, position, id): Gumbel coupling, arXiv 2408.07978
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specwire.core.constraint import Mask
from specwire.core.history import Seen
from specwire.core.noise import gumbel
from specwire.core.sampling import Sampling, adjusted, log_probabilities


class Outcome(IntEnum):
    """How a token came to be decided (the numbers are those of the wire)."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
    DIRECT = 4


DIRECT = (Outcome.DIRECT,)
# Those of tokens at whose position a draft token was tested.
JUDGED = (Outcome.ACCEPTED, Outcome.RECOVERED)


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens of one source, or of all.

    proposed: put to the target, in a window or, where they came during the forward, at its last row.
    tested: of these, the ones that were judged: all before them in the window had been accepted.
    accepted: of these, the ones that passed. accepted / tested is the acceptance.

    Invariant: accepted <= tested <= proposed.
    """

    proposed: int = 0
    tested: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self._check()

    def add(self, more: DraftCounts) -> None:
        self.proposed += more.proposed
        self.tested += more.tested
        self.accepted += more.accepted
        self._check()

    def _check(self) -> None:
        assert 0 <= self.accepted <= self.tested <= self.proposed, self


def window_counts(outcomes: Sequence[Outcome], width: int) -> DraftCounts:
    """Of the window that a step's outcomes are about. What stands behind the text's end was not tested."""
    return _judged(outcomes[:width], width)


def late_counts(outcomes: Sequence[Outcome], width: int) -> DraftCounts:
    """Of the draft token that came during the forward and met the row behind the window, if one did."""
    last = outcomes[width : width + 1]
    return _judged(last, int(any(outcome in JUDGED for outcome in last)))


def _judged(outcomes: Sequence[Outcome], proposed: int) -> DraftCounts:
    accepted = sum(outcome is Outcome.ACCEPTED for outcome in outcomes)
    return DraftCounts(proposed, sum(outcome in JUDGED for outcome in outcomes), accepted)


class Decision(NamedTuple):
    """What one forward decides for one session: `tokens` in order, and the outcome of each.

    Invariant: 1 <= len(tokens) == len(outcomes) <= len(window) + 1.
    """

    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def accepted(self) -> int:
        return self.outcomes.count(Outcome.ACCEPTED)

    def clipped(self, length: int) -> Decision:
        return Decision(self.tokens[:length], self.outcomes[:length])


def choose(
    logits: npt.ArrayLike,
    position: int,
    sampling: Sampling,
    seen: Seen | None = None,
    banned: Sequence[int] = (),
    allowed: Mask | None = None,
) -> int:
    """The target's token at `position` from its logits (vocabulary,): reference for `specwire.lm.choose`.

    seen, banned, allowed: see `specwire.core.sampling.adjusted`.
    """
    if sampling.temperature == 0.0:
        return int(np.argmax(adjusted(logits, sampling, seen, banned, allowed)))
    log_p = log_probabilities(logits, sampling, seen, banned, allowed)
    survivors = np.flatnonzero(log_p > -np.inf)
    noise = gumbel(sampling.seed, sampling.choice, position, survivors)
    return int(survivors[np.argmax(log_p[survivors] + noise)])


def decide(chosen: Sequence[int], window: Sequence[int], late: int | None = None) -> Decision:
    """Decide a window of draft tokens against the target's choices.

    Args:
        chosen: the target's token for each position of the window and for the one behind it; entry i is only
            meaningful while the window's first i tokens are equal to chosen's.
        window: draft tokens under test, len(chosen) - 1 of them.
        late: the live chain's token behind the window if it arrived during the forward, else None.
    """
    if len(chosen) != len(window) + 1:
        raise ValueError(f"chosen: {len(chosen)} rows for a window of {len(window)}, expected one more than the window")
    if not window and late is None:
        return Decision(tuple(chosen), DIRECT)
    for index, (token, guess) in enumerate(zip(chosen, window, strict=False)):
        if token != guess:
            outcomes = (Outcome.ACCEPTED,) * index + (Outcome.RECOVERED,)
            return Decision(tuple(chosen[: index + 1]), outcomes)
    if late == chosen[-1]:
        last = Outcome.ACCEPTED
    elif late is not None:
        last = Outcome.RECOVERED
    else:
        last = Outcome.BONUS if window else Outcome.DIRECT
    return Decision(tuple(chosen), (Outcome.ACCEPTED,) * len(window) + (last,))
