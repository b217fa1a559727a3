"""The rules that look at proposals: `rejection` and `block`, exact in law, and the lossy `threshold` and `typical`.

They are told of the target by a `TargetWeights`, which also holds all randomness, so that the proofs can run these very
functions over exact fractions and every outcome of every coin (tests/core/test_judging.py).

Exactness needs more than these functions: whether, when and from which source a draft token is tested must not depend
on its value nor on anything drafted after it (ARCHITECTURE.md section 4), and no random number may be used twice
(`specwire.core.epoch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Protocol

from specwire.core.acceptance import Decision, Outcome
from specwire.core.rules import Acceptance, Rule
from specwire.core.weights import Draft, Number, Weights


class TargetWeights(Protocol):
    """The target's distributions over a window, and the draws that belong to them.

    Row i stands behind the window's first i draft tokens: p(. | text, x_1 .. x_i). Every draw and every coin is
    independent of all others, but for `own`, which has the noise in common with the drafter's draw at that place.
    """

    def probabilities(self, row: int, ids: Sequence[int]) -> Sequence[Number]:
        """P of each id."""
        ...

    def entropy(self, row: int) -> float:
        """Of p, in nats."""
        ...

    def coin(self, row: int, chance: Number) -> bool:
        """True with probability `chance`; asked at most once a row."""
        ...

    def own(self, row: int) -> int:
        """Drawn from p."""
        ...

    def residual(self, row: int, scale: Number, weights: Weights) -> int:
        """Drawn from norm((scale * p - q)+), q being what the weights stand for; asked at most once a row."""
        ...


def judge(
    acceptance: Acceptance, target: TargetWeights, window: Sequence[Draft], late: Draft | None = None
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


def by_rejection(target: TargetWeights, window: Sequence[Draft], late: Draft | None = None) -> Decision:
    """Leviathan, Kalman, Matias 2023, algorithm 1, and the same for a token that came during the forward.

    x_i is accepted with min(1, p(x_i) / q(x_i)); the first refused one is replaced by a draw from norm((p - q)+).
    """
    tested = _tested(window, late)
    for row, draft in enumerate(tested):
        token = _replacement(target, row, draft)
        if token is not None:
            return _replaced(tested[:row], token)
    return _whole(target, window, late)


def _replacement(target: TargetWeights, row: int, draft: Draft) -> int | None:
    """What is decided instead of `draft`; None where it is accepted."""
    weights = _weights(draft)
    (p,) = target.probabilities(row, (draft.token,))
    if target.coin(row, _at_most_one(p * weights.total / weights.of(draft.token))):
        return None
    return target.residual(row, 1, weights)


def by_block(target: TargetWeights, window: Sequence[Draft], late: Draft | None = None) -> Decision:
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


def _block_chance(target: TargetWeights, row: int, carried: Number, window: Sequence[Draft]) -> Number:
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
    acceptance: Acceptance, target: TargetWeights, window: Sequence[Draft], late: Draft | None = None
) -> Decision:
    """Lossy: accept what the target finds likely enough, and of course its own token; else that one."""
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


def _tested(window: Sequence[Draft], late: Draft | None) -> Sequence[Draft]:
    return window if late is None else (*window, late)


def _weights(draft: Draft) -> Weights:
    """Chains hold no token without, under the rules that need them."""
    if draft.weights is None:
        raise AssertionError(f"draft token {draft.token} has no weights")
    return draft.weights


def _at_most_one(ratio: Number) -> Number:
    return min(ratio, 1)


def _replaced(accepted: Sequence[Draft], token: int) -> Decision:
    tokens = (*(draft.token for draft in accepted), token)
    return Decision(tokens, (Outcome.ACCEPTED,) * len(accepted) + (Outcome.RECOVERED,))


def _whole(target: TargetWeights, window: Sequence[Draft], late: Draft | None) -> Decision:
    """All that was tested is accepted. Where nothing stood at the last row, the target's own token does."""
    tokens = tuple(draft.token for draft in _tested(window, late))
    outcomes = (Outcome.ACCEPTED,) * len(tokens)
    if late is not None:
        return Decision(tokens, outcomes)
    own = Outcome.BONUS if window else Outcome.DIRECT
    return Decision((*tokens, target.own(len(window))), (*outcomes, own))
