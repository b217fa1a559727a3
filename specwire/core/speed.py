"""Expected-speed formulas: what a window is worth, and when waiting for a proposal pays."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import ceil, prod
from statistics import median
from typing import Any

DECAY = 0.98
PRIOR_RATE = 0.7
PRIOR_WEIGHT = 4.0
# Of the position before in the estimate of the next: later ones are tested less often, and differ little.
LATER_WEIGHT = 6.0


def interpolated(points: Mapping[Any, float], at: float) -> float:
    """Linear between `points`, whose keys are ascending numbers; before the first and behind the last as there."""
    known: float | None = points.get(at)
    if known is not None:
        return known
    places = list(points)
    index = bisect_left(places, at)
    if index in (0, len(places)):
        return points[places[max(0, index - 1)]]
    low, high = places[index - 1], places[index]
    share: float = (at - low) / (high - low)
    return points[low] * (1 - share) + points[high] * share


class ForwardTimes:
    """V(m): time of one session's forward of m positions, in microseconds; measured at start, refined while running.

    Between measured widths V is linear; beyond the last it grows by the last slope (at least zero).
    """

    SMOOTHING = 0.05

    def __init__(self, measured: Mapping[int, float]) -> None:
        if not measured or min(measured) < 1:
            raise ValueError(f"measured: needs times of at least one width, from 1 on, not {dict(measured)}")
        self._times = dict(sorted(measured.items()))

    @property
    def points(self) -> dict[int, float]:
        """Microseconds by measured width, as they are known by now."""
        return dict(self._times)

    def at(self, rows: int) -> float:
        """V(rows), in microseconds."""
        widths = list(self._times)
        return self._beyond(rows, widths) if rows > widths[-1] else interpolated(self._times, rows)

    def _beyond(self, rows: int, widths: Sequence[int]) -> float:
        last = self._times[widths[-1]]
        if len(widths) == 1:
            return last
        slope = (last - self._times[widths[-2]]) / (widths[-1] - widths[-2])
        return last + max(0.0, slope) * (rows - widths[-1])

    def observe(self, rows: int, microseconds: float) -> None:
        """Refine a width that was measured at start. A single slow step (a scheduler's hiccup) moves it little."""
        known = self._times.get(rows)
        if known is not None:
            bounded = min(microseconds, 3.0 * known)
            self._times[rows] = known + self.SMOOTHING * (bounded - known)


class AcceptanceByPosition:
    """P(accept | tested) for each position of the window: decayed counts with a weak prior."""

    def __init__(self, most: int = 32, prior: float = PRIOR_RATE) -> None:
        self._prior = prior
        self._tested = [0.0] * most
        self._accepted = [0.0] * most
        # By number of positions, until something is observed.
        self._rates: dict[int, list[float]] = {}

    def observe(self, tested: int, accepted: int) -> None:
        """A window of `tested` draft tokens had its first `accepted` accepted; later ones were not tested in the sense
        of `a`, because their context was already wrong.
        """
        for index in range(min(tested, accepted + 1, len(self._tested))):
            self._tested[index] = self._tested[index] * DECAY + 1.0
            self._accepted[index] = self._accepted[index] * DECAY + (1.0 if index < accepted else 0.0)
        # Beyond the window nothing is learnt: what a few tests said there fades, or it kept windows short for ever.
        self._rates.clear()
        self._tested[tested:] = [each * DECAY for each in self._tested[tested:]]
        self._accepted[tested:] = [each * DECAY for each in self._accepted[tested:]]

    def faded(self, weight: float) -> AcceptanceByPosition:
        """A copy that counts for at most `weight` tests a position: what was learnt elsewhere, to be overruled soon."""
        copy = AcceptanceByPosition(len(self._tested), self._prior)
        shares = [min(1.0, weight / tested) if tested else 0.0 for tested in self._tested]
        copy._tested = [tested * share for tested, share in zip(self._tested, shares, strict=True)]
        copy._accepted = [accepted * share for accepted, share in zip(self._accepted, shares, strict=True)]
        return copy

    def rates(self, most: int, prior: float | None = None) -> list[float]:
        """Of the first `most` positions; each shrunk towards that of the position before: later ones are seldom tested.

        prior: what the first is expected to be, where more is known.
        """
        if prior is not None:
            return self._shrunk(most, prior)
        known = self._rates.get(most)
        if known is None:
            known = self._rates[most] = self._shrunk(most, self._prior)
        return known.copy()

    def _shrunk(self, most: int, prior: float) -> list[float]:
        rates: list[float] = []
        for index in range(most):
            bounded = min(index, len(self._tested) - 1)
            weight = LATER_WEIGHT if index else PRIOR_WEIGHT
            prior = (self._accepted[bounded] + weight * prior) / (self._tested[bounded] + weight)
            rates.append(prior)
        return rates


def expected_tokens(rates: Sequence[float], window: int) -> float:
    """Tokens that a window is expected to decide: 1 + a_1 + a_1 a_2 + ... (Leviathan et al. 2023, equation 1)."""
    total = product = 1.0
    for rate in rates[:window]:
        product *= rate
        total += product
    return total


def lockstep_rate(
    rates: Sequence[float], window: int, draft_us: float, forward: ForwardTimes, overhead_us: float
) -> float:
    """Tokens per microsecond when the drafter drafts `window` tokens while the verifier waits, then the reverse."""
    if window == 0:
        return 1.0 / forward.at(1)
    cycle = window * draft_us + overhead_us + forward.at(window + 1)
    return expected_tokens(rates, window) / cycle


def stream_rate(
    rates: Sequence[float], agreement: float, draft_us: float, forward: ForwardTimes, delay_us: float, chunk: int
) -> float:
    """Tokens per microsecond when the drafter streams, on hardware of its own, and the verifier never waits.

    A renewal argument. After a contradiction the verifier goes on alone. A new chain catches up with it `delay_us` and
    a chunk later, if it guessed each of the n tokens decided meanwhile; every wrong one begins a chain anew, so the
    steps alone are those until the first run of n right guesses. While a chain lives, a step tests what was drafted
    during the last one, at most len(rates) tokens.

    agreement: P(a draft token is the decided one), tested or not.
    """
    plain_us = forward.at(1)
    lead_us = plain_us - draft_us
    if lead_us <= 0:
        return 1.0 / plain_us
    run = agreement ** ceil((delay_us + chunk * draft_us) / lead_us)
    alone = (1.0 - run) / (1.0 - agreement) if agreement < 1.0 else 1.0
    tokens, time_us = _live(rates, agreement, draft_us, forward)
    return (alone + run * tokens) / (alone * plain_us + run * time_us)


def waiting_rate(
    rates: Sequence[float], agreement: float, draft_us: float, forward: ForwardTimes, delay_us: float, chunk: int
) -> float:
    """The same when the verifier waits for the new chain's first chunk instead of going on alone."""
    tokens, time_us = _live(rates, agreement, draft_us, forward)
    survives = prod(rates[:chunk]) * agreement
    first_us = delay_us + chunk * draft_us + forward.at(chunk + 1)
    return (expected_tokens(rates, chunk) + survives * tokens) / (first_us + survives * time_us)


def _live(rates: Sequence[float], agreement: float, draft_us: float, forward: ForwardTimes) -> tuple[float, float]:
    """Tokens, and microseconds, of the steps that a live chain feeds until it is contradicted."""
    window = _best_window(rates, max(1, min(len(rates), int(forward.at(1) / draft_us))), forward)
    steps = 1.0 / (1.0 - min(prod(rates[:window]) * agreement, 0.999))
    return steps * expected_tokens(rates, window), steps * forward.at(window + 1)


def _best_window(rates: Sequence[float], most: int, forward: ForwardTimes) -> int:
    return max(range(1, most + 1), key=lambda window: expected_tokens(rates, window) / forward.at(window + 1))


def worth_waiting(
    decided_now: float, gained: float, forward_now_us: float, forward_then_us: float, wait_us: float
) -> bool:
    """Whether to wait `wait_us` for proposals that raise the step's expected tokens by `gained`.

    (B + g) / (V(m + n) + w) > B / V(m), ARCHITECTURE.md section 3.
    """
    return (decided_now + gained) * forward_now_us > decided_now * (forward_then_us + wait_us)


def smoothed(known: float | None, value: float, weight: float = 0.2, least: float = 0.0) -> float:
    """Exponentially weighted mean, with single outliers bounded to three times what is known, or `least` if more.

    What can be near zero and yet grow needs a `least`, or it stays near zero.
    """
    if known is None:
        return value
    return known + weight * (min(value, 3.0 * max(known, least)) - known)


def typical(values: Sequence[float]) -> float:
    """Median: what a timing is, on a machine whose scheduler sometimes is not."""
    return float(median(values))
