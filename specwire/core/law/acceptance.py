"""The rules: which token stands at a position, exact or weighed by probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import exp
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specwire.core.law.constraint import Mask
from specwire.core.law.noise import NOISE_BITS, Key, NoiseStream, gumbel, uniform_integers
from specwire.core.law.sampling import (
    Acceptance,
    Rule,
    Sampling,
    Seen,
    adjusted,
    log_probabilities,
)
from specwire.core.messages import (
    DIRECT,
    Decision,
    DraftToken,
    Number,
    Outcome,
    TokenLogprobs,
    Weights,
)

Floats = npt.NDArray[np.float64]

# ----------------------------------------------------------------------------------------------------------------------
# The exact acceptance rules `greedy` and `coupled`.
#
# Both draw the target's token at a position without looking at any proposal, then ask whether the proposal guessed it.
# That is why proposals change how fast tokens come and, with equal logits, never which:
#
#     greedy    argmax of the target's logits, ties to the lowest id
#     coupled   argmax(log p + G), G keyed by (seed, choice, position, id): Gumbel coupling, arXiv 2408.07978


def choose(
    logits: npt.ArrayLike,
    position: int,
    sampling: Sampling,
    seen: Seen | None = None,
    banned: Sequence[int] = (),
    allowed: Mask | None = None,
) -> int:
    """The target's token at `position` from its logits (vocabulary,): reference for `specwire.lm.law.sampler`.

    seen, banned, allowed: see `specwire.core.law.sampling.adjusted`.
    """
    if sampling.temperature == 0.0:
        return int(np.argmax(adjusted(logits, sampling, seen, banned, allowed)))
    log_p = log_probabilities(logits, sampling, seen, banned, allowed)
    survivors = np.flatnonzero(log_p > -np.inf)
    noise = gumbel(sampling.seed, sampling.choice, position, survivors)
    return int(survivors[np.argmax(log_p[survivors] + noise)])


class RowSampling(NamedTuple):
    """How to choose the token at `position`, whose logits are one row.

    seen, banned, allowed: see `specwire.core.law.sampling.adjusted`.
    """

    position: int
    sampling: Sampling
    seen: Seen | None = None
    banned: tuple[int, ...] = ()
    allowed: Mask | None = None

    @property
    def key(self) -> Key:
        return Key(self.sampling.seed, self.sampling.choice, self.position)

    @property
    def adjusted(self) -> bool:
        """The logits are changed before anything is drawn from them."""
        changed = self.seen is not None or self.allowed is not None
        return changed or bool(self.banned) or bool(self.sampling.logit_bias)

    @property
    def filtered(self) -> bool:
        return self.sampling.top_k > 0 or self.sampling.top_p < 1.0 or self.sampling.min_p > 0.0


def decide(chosen: Sequence[int], window: Sequence[int], late: int | None = None) -> Decision:
    """Decide a window of draft tokens against the target's choices.

    Args:
        chosen: the target's token for each position of the window and for the one behind it, at least up to the first
            that is not the window's: entry i is only meaningful while the window's first i tokens are equal to it.
        window: draft tokens under test.
        late: the live chain's token behind the window if it arrived during the forward, else None.
    """
    if not 0 < len(chosen) <= len(window) + 1:
        raise ValueError(f"chosen: {len(chosen)} rows for a window of {len(window)}, expected one more than the window")
    if not window and late is None:
        return Decision(tuple(chosen), DIRECT)
    for index, (token, guess) in enumerate(zip(chosen, window, strict=False)):
        if token != guess:
            outcomes = (Outcome.ACCEPTED,) * index + (Outcome.RECOVERED,)
            return Decision(tuple(chosen[: index + 1]), outcomes)
    if len(chosen) <= len(window):
        raise ValueError(f"chosen: {len(chosen)} rows, all as the window has them, expected one more than the window")
    if late == chosen[-1]:
        last = Outcome.ACCEPTED
    elif late is not None:
        last = Outcome.RECOVERED
    else:
        last = Outcome.BONUS if window else Outcome.DIRECT
    return Decision(tuple(chosen), (Outcome.ACCEPTED,) * len(window) + (last,))


# Decides a window under rules that look at it: from the window's width, and the token behind it if there is one.
Judge = Callable[[int, DraftToken | None], Decision]


class RowChoice(NamedTuple):
    """The target's token for each row of a text's part of a forward; see `decide` for where they may end.

    report: gives the log-probabilities of decided tokens. judge: decides the window under rules that look at it.
    failure: what choosing raised for this text alone, which then has no tokens.
    """

    tokens: Sequence[int]
    report: Callable[[Sequence[int]], tuple[TokenLogprobs, ...]] | None = None
    judge: Judge | None = None
    failure: Exception | None = None


# ----------------------------------------------------------------------------------------------------------------------
# The rules that look at proposals: `rejection` and `block`, exact in law, and the lossy `threshold` and `typical`.
#
# A `TargetWeights` gives them the target's distributions and all randomness, so that the proofs can run these very
# functions over exact fractions and every outcome of every coin (tests/core/test_judging.py).
#
# Exactness needs more than these functions: whether, when and from which source a draft token is tested must not depend
# on its value nor on anything drafted after it (PROTOCOL.md section 7), and no random number may be used twice
# (`specwire.core.law.noise`).


class TargetWeights(Protocol):
    """The target's distributions over a window, and the draws that belong to them.

    Row i stands behind the window's first i draft tokens: p(. | text, x_1 .. x_i). Every draw and every coin is
    independent of all others, but for `own`, which has the noise in common with the drafter's draw at that place.
    """

    def probabilities(self, row: int, ids: Sequence[int]) -> Sequence[Number]:
        """P of each id."""
        ...

    def entropy(self, row: int) -> float:
        """Entropy of p, in nats."""
        ...

    def coin(self, row: int, chance: Number) -> bool:
        """True with probability `chance`; asked at most once a row."""
        ...

    def own(self, row: int) -> int:
        """A token drawn from p."""
        ...

    def residual(self, row: int, scale: Number, weights: Weights) -> int:
        """A token drawn from norm((scale * p - q)+), q being the weights' distribution; asked at most once a row."""
        ...


def judge(
    acceptance: Acceptance, target: TargetWeights, window: Sequence[DraftToken], late: DraftToken | None = None
) -> Decision:
    """Decide a window by the rule.

    Args:
        target: has rows 0 .. len(window).
        late: the live chain's token behind the window, if it is there by the time of the call.
    """
    match acceptance.rule:
        case Rule.REJECTION:
            return by_rejection(target, window, late)
        case Rule.BLOCK:
            return by_block(target, window, late)
        case _:
            return by_relaxing(acceptance, target, window, late)


def by_rejection(target: TargetWeights, window: Sequence[DraftToken], late: DraftToken | None = None) -> Decision:
    """Leviathan, Kalman, Matias 2023, algorithm 1, and the same for a token that came during the forward.

    x_i is accepted with min(1, p(x_i) / q(x_i)); the first refused one is replaced by a draw from norm((p - q)+).
    """
    tested = _tested(window, late)
    for row, draft in enumerate(tested):
        token = _replacement(target, row, draft)
        if token is not None:
            return _replaced(tested[:row], token)
    return _whole(target, window, late)


def _replacement(target: TargetWeights, row: int, draft: DraftToken) -> int | None:
    """The token that is decided instead of `draft`; None where `draft` is accepted."""
    weights = _weights(draft)
    (p,) = target.probabilities(row, (draft.token,))
    if target.coin(row, _at_most_one(p * weights.total / weights.of(draft.token))):
        return None
    return target.residual(row, 1, weights)


def by_block(target: TargetWeights, window: Sequence[DraftToken], late: DraftToken | None = None) -> Decision:
    """Sun et al., *Block Verification Accelerates Speculative Decoding* (arXiv 2403.10444), algorithm 2.

    carried[i] is the paper's p_i: min(1, carried[i-1] p(x_i) / q(x_i)). A coin of

        h_i = S_i / (S_i + 1 - carried[i]), S_i = sum over x of (carried[i] p(x | x_1..x_i) - q(x | x_1..x_i))+,

    h_k = carried[k] for the last, is tossed for each i; the longest i that came up is accepted, and one more token
    comes from norm((carried[i] p - q)+), or from p behind the whole block. A late token is a block of its own.

    The window must be whole chunks: its length may not depend on what is in it.
    """
    carried: list[Number] = [1]
    accepted = 0
    for row, draft in enumerate(window):
        weights = _weights(draft)
        (p,) = target.probabilities(row, (draft.token,))
        carried.append(_at_most_one(carried[row] * p * weights.total / weights.of(draft.token)))
        if target.coin(row, _block_chance(target, row + 1, carried[-1], window)):
            accepted = row + 1
    if accepted < len(window):
        token = target.residual(accepted, carried[accepted], _weights(window[accepted]))
        return _replaced(window[:accepted], token)
    replacement = None if late is None else _replacement(target, len(window), late)
    return _whole(target, window, late) if replacement is None else _replaced(window, replacement)


def _block_chance(target: TargetWeights, row: int, carried: Number, window: Sequence[DraftToken]) -> Number:
    """H of the first `row` draft tokens."""
    if row == len(window):
        return carried
    left = excess(target, row, carried, _weights(window[row]))
    return left / (left + 1 - carried) if left + 1 - carried > 0 else 1


def excess(target: TargetWeights, row: int, scale: Number, weights: Weights) -> Number:
    """Sum over x of (scale p(x) - q(x))+. Beyond the weights' ids q is 0."""
    shares = target.probabilities(row, weights.ids)
    total = weights.total
    scaled: Number = max(scale * (1 - sum(shares)) * total, 0)
    for p, weight in zip(shares, weights.weights, strict=True):
        scaled += max(scale * p * total - weight, 0)
    return scaled / total


def by_relaxing(
    acceptance: Acceptance, target: TargetWeights, window: Sequence[DraftToken], late: DraftToken | None = None
) -> Decision:
    """Lossy: accept what the target finds likely enough, or its own token; else decide its own token."""
    tested = _tested(window, late)
    for row, draft in enumerate(tested):
        own = target.own(row)
        if draft.token != own and not _likely_tokens(acceptance, target, row, draft.token):
            return _replaced(tested[:row], own)
    return _whole(target, window, late)


def _likely_tokens(acceptance: Acceptance, target: TargetWeights, row: int, token: int) -> bool:
    (p,) = target.probabilities(row, (token,))
    if acceptance.rule is Rule.THRESHOLD:
        return p >= acceptance.numbers[0]
    epsilon, delta = acceptance.numbers
    return p > min(epsilon, delta * exp(-target.entropy(row)))


def _tested(window: Sequence[DraftToken], late: DraftToken | None) -> Sequence[DraftToken]:
    return window if late is None else (*window, late)


def _weights(draft: DraftToken) -> Weights:
    """A draft token's weights. Under the rules that need them chains hold no token without."""
    if draft.weights is None:
        raise AssertionError(f"draft token {draft.token} has no weights")
    return draft.weights


def _at_most_one(ratio: Number) -> Number:
    return min(ratio, 1)


def _replaced(accepted: Sequence[DraftToken], token: int) -> Decision:
    tokens = (*(draft.token for draft in accepted), token)
    return Decision(tokens, (Outcome.ACCEPTED,) * len(accepted) + (Outcome.RECOVERED,))


def _whole(target: TargetWeights, window: Sequence[DraftToken], late: DraftToken | None) -> Decision:
    """Accept all that was tested; at a last row without a draft token, take the target's own token."""
    tokens = tuple(draft.token for draft in _tested(window, late))
    outcomes = (Outcome.ACCEPTED,) * len(tokens)
    if late is not None:
        return Decision(tokens, outcomes)
    own = Outcome.BONUS if window else Outcome.DIRECT
    return Decision((*tokens, target.own(len(window))), (*outcomes, own))


# ----------------------------------------------------------------------------------------------------------------------
# `TargetWeights` made of log-probabilities: what a verifier judges draft tokens with.

ONE_ID = np.zeros(1, dtype=np.int64)


class TargetRows:
    """The rows of one session in one forward.

    Args:
        log_p: gives the processed log-probabilities (rows, vocabulary); asked for once, when they are first needed.
        samplings: of each row, with the seed of its place (`specwire.core.law.noise`) where the rule weighs.
        position: where the token of row 0 stands.
        own: the target's token at each row.
    """

    def __init__(
        self, log_p: Callable[[], Floats], samplings: Sequence[Sampling], position: int, own: Sequence[int]
    ) -> None:
        self._log_p = log_p
        self._samplings = samplings
        self._position = position
        self._own = own

    @cached_property
    def _p(self) -> Floats:
        probabilities: Floats = np.exp(self._log_p())
        return probabilities

    def probabilities(self, row: int, ids: Sequence[int]) -> Sequence[Number]:
        shares: list[float] = self._p[row, list(ids)].tolist()
        return shares

    def entropy(self, row: int) -> float:
        p = self._p[row]
        positive = p[p > 0.0]
        return float(-(positive * np.log(positive)).sum())

    def coin(self, row: int, chance: Number) -> bool:
        return self._uniform(row, NoiseStream.ACCEPT) < chance

    def own(self, row: int) -> int:
        return self._own[row]

    def residual(self, row: int, scale: Number, weights: Weights) -> int:
        """By inversion of the cumulated rest: one random number, because noise for every id would take milliseconds.

        Where rounding leaves no rest, p and q are equal, and refusing was as unlikely as rounding is small.
        """
        rest = float(scale) * self._p[row]
        rest[list(weights.ids)] -= np.array(weights.weights, dtype=np.float64) / weights.total
        sums = np.maximum(rest, 0.0).cumsum()
        if not sums[-1] > 0.0:
            return self.own(row)
        # Rounding may carry the product to the sum itself, behind the last id of the rest.
        place = int(np.searchsorted(sums, self._uniform(row, NoiseStream.RESIDUAL) * sums[-1], side="right"))
        return min(place, int(np.searchsorted(sums, sums[-1], side="left")))

    def _uniform(self, row: int, stream: NoiseStream) -> float:
        """Strictly between 0 and 1."""
        sampling = self._samplings[row]
        integer = uniform_integers(sampling.seed, sampling.choice, self._position + row, ONE_ID, stream)[0]
        return (float(integer) + 0.5) * 2.0**-NOISE_BITS
