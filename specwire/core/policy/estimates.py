"""Expected speeds, and what they are computed from: forward times, acceptance, agreement, draft times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

from specwire.core.policy.tunables import (
    AGREEMENT_DECAY,
    DECAY,
    EXPLORED_SHARE,
    OUTLIER,
    PRIOR_RATES,
    PRIOR_WEIGHT,
    TIMING_WEIGHT,
)

# V(m): expected microseconds of a step of m rows.
V = Callable[[int], float]

# ----------------------------------------------------------------------------------------------------------------------
# Expected-speed formulas: what a window is worth, and when waiting for a proposal pays.


def interpolated(points: Mapping[Any, float], at: float) -> float:
    """Interpolate linearly between `points`, whose keys ascend; constant before the first and behind the last."""
    places = list(points)
    index = bisect_left(places, at)
    if index in (0, len(places)):
        return points[places[max(0, index - 1)]]
    low, high = places[index - 1], places[index]
    share: float = (at - low) / (high - low)
    return points[low] * (1 - share) + points[high] * share


class ForwardTimes:
    """V(m): microseconds of a forward of m rows, or of so many sessions, as it was measured at start.

    Between known widths it is linear; beyond the last it grows by the last slope (at least zero).
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        if not measured or min(measured) < 1:
            raise ValueError(f"measured: needs times of at least one width, from 1 on, not {dict(measured)}")
        self.points = dict(sorted(measured.items()))

    def at(self, rows: float) -> float:
        widths = list(self.points)
        if rows <= widths[-1] or len(widths) == 1:
            return interpolated(self.points, rows)
        last = self.points[widths[-1]]
        slope = (last - self.points[widths[-2]]) / (widths[-1] - widths[-2])
        return last + max(0.0, slope) * (rows - widths[-1])


class AcceptanceByPosition:
    """P(accept | tested) for each position of the window: decayed counts with a weak prior.

    There is one for each source of a session, which under exact rules also counts untested paths; and one of each
    drafter's tested windows, over sessions, to plan by: planned by the others, batches were slower (LOG).

    Invariant: no position from `_reach` on was ever tested. `_rates`, `_expected`: of the first positions, and by
    number of positions, until something is observed.
    """

    def __init__(self, most: int = 32, prior: float = PRIOR_RATES[0]) -> None:
        self._prior = prior
        self._tested = [0.0] * most
        self._accepted = [0.0] * most
        self._reach = 0
        self._rates: list[float] = []
        self._expected: dict[int, float] = {}

    def observe(self, tested: int, accepted: int) -> None:
        """Note a window of `tested` draft tokens, the first `accepted` of which were accepted.

        Tokens behind a refused one do not count as tested, because their context was wrong.
        """
        judged = min(tested, accepted + 1, len(self._tested))
        for index in range(judged):
            self._tested[index] = self._tested[index] * DECAY + 1.0
            self._accepted[index] = self._accepted[index] * DECAY + (index < accepted)
        # Beyond the window nothing is learnt. What a few tests showed there fades, or windows would stay short.
        self._rates = []
        self._expected.clear()
        for index in range(tested, self._reach):
            self._tested[index] *= DECAY
            self._accepted[index] *= DECAY
        self._reach = max(self._reach, judged)

    def faded(self, weight: float) -> AcceptanceByPosition:
        """A copy that weighs at most `weight` tests a position, so that what was learnt elsewhere is overruled soon."""
        copy = AcceptanceByPosition(len(self._tested), self._prior)
        copy._reach = self._reach
        for index, tested in enumerate(self._tested[: self._reach]):
            share = min(1.0, weight / tested) if tested else 0.0
            copy._tested[index], copy._accepted[index] = tested * share, self._accepted[index] * share
        return copy

    def rates(self, most: int, prior: float | None = None) -> list[float]:
        """Acceptance of the first `most` positions. Each is shrunk towards the one before: later ones are tested less.

        prior: what the first is expected to be, where more is known.
        """
        if prior is None and len(self._rates) >= most:
            return self._rates[:most]
        rates, shrunk = list[float](), self._prior if prior is None else prior
        for index in range(most):
            bounded = min(index, len(self._tested) - 1)
            # Later ones are tested less often, and differ little from the one before.
            weight = 1.5 * PRIOR_WEIGHT if index else PRIOR_WEIGHT
            shrunk = (self._accepted[bounded] + weight * shrunk) / (self._tested[bounded] + weight)
            rates.append(shrunk)
        if prior is None:
            self._rates = rates
        return rates[:]

    def expected(self, window: int) -> float:
        """Tokens that a window is expected to decide: see `expected_tokens`."""
        known = self._expected.get(window)
        if known is None:
            known = self._expected[window] = expected_tokens(self.rates(window), window)
        return known


@dataclass(slots=True)
class Agreement:
    """P(a source had the decided token | it had all before it in this tree), tested or not: decayed counts.

    For a chain: that its next token is the decided one. For a tree that branches: that one of several is. Far from the
    verifier most chains are contradicted before a token of theirs can be tested, and then acceptance by position learns
    next to nothing.
    """

    compared: float = 0.0
    equal: float = 0.0

    @property
    def rate(self) -> float:
        return (self.equal + PRIOR_WEIGHT * PRIOR_RATES[0]) / (self.compared + PRIOR_WEIGHT)

    def observe(self, equal: int, contradicted: bool) -> None:
        """Note that a tree followed the text for so many tokens, and whether it ended there."""
        for right in (*(1.0,) * equal, *(0.0,) * contradicted):
            self.compared = AGREEMENT_DECAY * self.compared + 1.0
            self.equal = AGREEMENT_DECAY * self.equal + right


def expected_tokens(rates: Sequence[float], window: int) -> float:
    """Tokens that a window is expected to decide: 1 + a_1 + a_1 a_2 + ... (Leviathan et al. 2023, equation 1)."""
    total = product = 1.0
    for rate in rates[:window]:
        product *= rate
        total += product
    return total


def lockstep_rate(rates: Sequence[float], window: int, draft_us: float, V: V, overhead_us: float) -> float:
    """Tokens per microsecond when the drafter drafts `window` tokens while the verifier waits, then the reverse."""
    drafting_us = window * draft_us + overhead_us if window else 0.0
    return expected_tokens(rates, window) / (drafting_us + V(window + 1))


class LiveChain(NamedTuple):
    """Of the steps that a live chain feeds until it is contradicted: their tokens, and microseconds."""

    tokens: float
    time_us: float

    @classmethod
    def of(cls, rates: Sequence[float], agreement: float, draft_us: float, V: V) -> LiveChain:
        """agreement: P(a draft token is the decided one), tested or not."""
        most = max(1, min(len(rates), int(V(1) / draft_us)))
        window = max(range(1, most + 1), key=lambda window: expected_tokens(rates, window) / V(window + 1))
        steps = 1.0 / (1.0 - min(prod(rates[:window]) * agreement, 0.999))
        return cls(steps * expected_tokens(rates, window), steps * V(window + 1))


def stream_rate(
    live: LiveChain, agreement: float, draft_us: float, plain_us: float, delay_us: float, chunk: int
) -> float:
    """Tokens per microsecond when the drafter streams, on hardware of its own, and the verifier never waits.

    A renewal argument. After a contradiction the verifier goes on alone. A new chain catches up with it `delay_us` and
    a chunk later, if it guessed each of the n tokens decided meanwhile; every wrong one begins a chain anew, so the
    steps alone are those until the first run of n right guesses. While a chain lives, a step tests what was drafted
    during the last one.

    agreement: P(a draft token is the decided one), tested or not. plain_us: V(1).
    """
    lead_us = plain_us - draft_us
    if lead_us <= 0:
        return 1.0 / plain_us
    run = agreement ** ceil((delay_us + chunk * draft_us) / lead_us)
    alone = (1.0 - run) / (1.0 - agreement) if agreement < 1.0 else 1.0
    return (alone + run * live.tokens) / (alone * plain_us + run * live.time_us)


def waiting_rate(live: LiveChain, rates: Sequence[float], agreement: float, first_us: float, chunk: int) -> float:
    """The same when the verifier, instead of going on alone, waits for a first chunk, tested after `first_us`."""
    survives = prod(rates[:chunk]) * agreement
    return (expected_tokens(rates, chunk) + survives * live.tokens) / (first_us + survives * live.time_us)


def affordable(cost: float, since: float) -> bool:
    """Whether what does not pay may be tried again, so long `since` the last time, to see whether it would by now.

    It is one rule for all that is tried: tries cost at most EXPLORED_SHARE of the time between them. Both are in
    microseconds, or in steps.
    """
    return cost <= EXPLORED_SHARE * since


def smoothed(known: float | None, value: float, weight: float = TIMING_WEIGHT, least: float = 0.0) -> float:
    """Exponentially weighted mean. An outlier counts for at most three times what is known, or `least` if that is more.

    A value that may be near zero and grow needs a `least`, or it stays near zero.
    """
    if known is None:
        return value
    return known + weight * (min(value, OUTLIER * max(known, least)) - known)
