"""A request's acceptance rule and sampling parameters, and what they do to logits."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from math import isnan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specwire.core.invalid import InvalidParameter as InvalidParameter
from specwire.core.law.constraint import Constraint, Mask
from specwire.core.messages import Floats, TokenLogprobs

# ----------------------------------------------------------------------------------------------------------------------
# The acceptance rules by name, and what tells them apart (docs/EXACTNESS.md, PROTOCOL.md section 7).


class Rule(StrEnum):
    """How a draft token is judged."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"
    THRESHOLD = "threshold"
    TYPICAL = "typical"


# Rules under which a text does not depend on proposals at all.
GUESSING_RULES = frozenset({Rule.GREEDY, Rule.COUPLED})
# Weigh a draft token by the probability that it was drawn with; exact in law if that is what it was drawn with.
WEIGHING_RULES = frozenset({Rule.REJECTION, Rule.BLOCK})
LOSSY_RULES = frozenset({Rule.THRESHOLD, Rule.TYPICAL})

PARAMETERS = {Rule.THRESHOLD: ("t",), Rule.TYPICAL: ("epsilon", "delta")}
KNOWN = ", ".join(f"{rule}({','.join(PARAMETERS[rule])})" if rule in PARAMETERS else str(rule) for rule in Rule)

_CALL = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A rule that is not one of the defaults, with its numbers, each above 0 and at most 1.

    threshold(t)             accept a draft token of probability t or more
    typical(epsilon, delta)  accept one of more than min(epsilon, delta * exp(-entropy)): arXiv 2401.10774, section 3.3
    """

    rule: Rule
    numbers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        names = PARAMETERS.get(self.rule, ())
        if len(self.numbers) != len(names):
            wanted = f"takes {' and '.join(names)}" if names else "takes no number"
            raise ValueError(f"{self.rule} {wanted}, not {len(self.numbers)} numbers")
        for name, number in zip(names, self.numbers, strict=True):
            if not (math.isfinite(number) and 0.0 < number <= 1.0):
                raise ValueError(f"{name} of {self.rule} must be above 0 and at most 1, not {number}")

    @classmethod
    def parse(cls, name: str) -> Acceptance:
        """Read "rejection" or "typical(0.3,0.09)"; ValueError says what is wrong with another."""
        call = _CALL.fullmatch(name)
        if call is None or call[1] not in Rule.__members__.values():
            raise ValueError(f"must be one of {KNOWN}, not {name!r:.80}")
        try:
            numbers = tuple(float(number) for number in call[2].split(",")) if call[2] else ()
        except ValueError:
            raise ValueError(f"{name!r:.80} holds what is no number") from None
        return cls(Rule(call[1]), numbers)

    def __str__(self) -> str:
        return f"{self.rule}({','.join(map(repr, self.numbers))})" if self.numbers else str(self.rule)


# ----------------------------------------------------------------------------------------------------------------------
# Which ids a text holds, and how often its output holds them: the input of penalties, position by position.

FIRST_ROOM = 256

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


class Seen(NamedTuple):
    """The text before a position: its distinct ids, and how often each stands in the output, of one length."""

    ids: Ids
    counts: Counts


class History:
    """Grows with the decided text; `seen` adds the part of a window that stands before one of its positions.

    Invariant: ids[:n] are distinct, n = len(_places), and counts[_places[id]] says how often id stands in the output.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.zeros(FIRST_ROOM, dtype=np.int64)
        self._counts = np.zeros(FIRST_ROOM, dtype=np.int64)
        for token in prompt:
            self._place(token)
        self.extend(output)

    def extend(self, tokens: Sequence[int]) -> None:
        """The output goes on with `tokens`."""
        for token in tokens:
            place = self._place(token)  # which may move the arrays
            self._counts[place] += 1

    def seen(self, window: Sequence[int] = ()) -> Seen:
        """The text as it would stand if the output went on with `window`."""
        size = len(self._places)
        fresh = [token for token in dict.fromkeys(window) if token not in self._places]
        ids = np.concatenate([self._ids[:size], np.array(fresh, dtype=np.int64)])
        counts = np.concatenate([self._counts[:size], np.zeros(len(fresh), dtype=np.int64)])
        places = {token: size + index for index, token in enumerate(fresh)}
        for token in window:
            counts[places[token] if token in places else self._places[token]] += 1
        return Seen(ids, counts)

    def _place(self, token: int) -> int:
        """Where `token` is; a new one comes last."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place


def seen_in(tokens: Sequence[int], prompt_length: int) -> Seen:
    """A text counted at once, where no History is kept because the text goes back, as a drafter's does."""
    text = np.array(tokens, dtype=np.int64)
    ids, places = np.unique(text, return_inverse=True)
    return Seen(ids, np.bincount(places[prompt_length:], minlength=len(ids)))


# ----------------------------------------------------------------------------------------------------------------------
# Sampling parameters, and the one path from logits to log-probabilities (numpy reference).
#
# Its order is that of transformers: bias, penalties, banned ids and what a constraint forbids, temperature, top_k,
# top_p, min_p.
#
# `specwire.lm.law.logits` holds the vectorised version that the verifier runs; tests hold the two equal.

# Below it, logits divided by the temperature exceed what single precision can tell apart.
LEAST_TEMPERATURE = 1e-4

GREATEST_BIAS = 100.0
GREATEST_PENALTY = 2.0
# It divides and multiplies logits: far from 1 they would overflow.
LEAST_REPETITION_PENALTY = 0.01
GREATEST_REPETITION_PENALTY = 100.0
SEED_BITS = 64
# Of a seed that a service draws: what a JSON number holds in every language, so that a reported one can be sent again.
DRAWN_SEED_BITS = 53
MOST_BIASES = 1024
MOST_LOGPROBS = 20


class LogprobsOf(IntEnum):
    """Which distribution log-probabilities are reported of (the numbers are those of the wire)."""

    MODEL = 1
    PROCESSED = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's next token is drawn. With equal logits, under `greedy` and `coupled`, nothing else has a say.

    temperature 0 is greedy. top_k 0 and top_p 1 switch the filters off. top_k keeps ties with the k-th largest;
    top_p keeps the smallest set of most probable tokens (ties: lower id first) whose mass reaches top_p, as computed
    after temperature and top_k; min_p keeps what is at least min_p times as probable as the most probable id.

    repetition_penalty (1: off) looks at prompt and output, as transformers' does; presence_penalty and
    frequency_penalty (0: off) at the output only, as OpenAI's. logit_bias: (id, added to its logit), ids rising.
    logprobs: how many of the most probable ids are reported with each token, None for no report.
    acceptance: a rule that was asked for by name instead of the temperature's own; None for that.
    constraint: what form the output must have; None for any.

    What is asked with every token is told once. guessed: anything may be proposed, because no proposal can change the
    text while logits are equal. weighed: draft tokens are tested against the probability that they were drawn with.
    penalised: what may be drawn depends on the tokens before, not only on the logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    logprobs_of: LogprobsOf = LogprobsOf.MODEL
    acceptance: Acceptance | None = None
    constraint: Constraint | None = None
    guessed: bool = field(init=False, repr=False, compare=False)
    weighed: bool = field(init=False, repr=False, compare=False)
    penalised: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise InvalidParameter("temperature", f"must be a finite number from 0 to 100, not {self.temperature}")
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise InvalidParameter(
                "temperature", f"must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, not {self.temperature}"
            )
        if not 0 <= self.top_k < 1 << 32:
            raise InvalidParameter("top_k", f"must be 0 (off) or a positive number of 32 bits, not {self.top_k}")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidParameter("top_p", f"must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 1 << SEED_BITS:
            raise InvalidParameter("seed", f"must fit in 64 unsigned bits, not {self.seed}")
        if not 0 <= self.choice < 1 << 32:
            raise InvalidParameter("choice", f"must fit in 32 unsigned bits, not {self.choice}")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -GREATEST_PENALTY, GREATEST_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -GREATEST_PENALTY, GREATEST_PENALTY)
        _check_range(
            "repetition_penalty", self.repetition_penalty, LEAST_REPETITION_PENALTY, GREATEST_REPETITION_PENALTY
        )
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise InvalidParameter("logprobs", f"must be from 0 to {MOST_LOGPROBS}, not {self.logprobs}")
        if self.logprobs is None and self.logprobs_of is not LogprobsOf.MODEL:
            raise InvalidParameter("logprobs_of", "says what logprobs are of, which are not asked for")
        _check_bias(self.logit_bias)
        if self.acceptance is not None:
            _check_acceptance(self.acceptance.rule, self.temperature)
        rule, penalties = self.rule, (self.repetition_penalty - 1.0, self.presence_penalty, self.frequency_penalty)
        object.__setattr__(self, "guessed", rule in GUESSING_RULES)
        object.__setattr__(self, "weighed", rule in WEIGHING_RULES)
        object.__setattr__(self, "penalised", any(penalties))

    @property
    def rule(self) -> Rule:
        """What judges draft tokens."""
        return self.acceptance.rule if self.acceptance is not None else _own_rule(self.temperature)

    @property
    def rule_name(self) -> str:
        """The rule with its numbers, as it is asked for."""
        return str(self.acceptance or self.rule)

    @property
    def lossy(self) -> bool:
        """The text need not be what the target alone would draw."""
        return self.rule in LOSSY_RULES


def seed_of(number: int) -> int:
    """The seed that a client means by a number: callers whose integers are signed write the same 64 bits below 0."""
    if not -(1 << SEED_BITS - 1) <= number < 1 << SEED_BITS:
        raise InvalidParameter("seed", f"must be a whole number of {SEED_BITS} bits, not {number}")
    return number % (1 << SEED_BITS)


def _own_rule(temperature: float) -> Rule:
    return Rule.GREEDY if temperature == 0.0 else Rule.COUPLED


def _check_acceptance(rule: Rule, temperature: float) -> None:
    if rule in GUESSING_RULES:
        raise InvalidParameter("rule", f"{rule} is a temperature's own rule and needs no name")
    if rule in WEIGHING_RULES and temperature == 0.0:
        raise InvalidParameter("rule", f"{rule} contradicts temperature 0.0, which needs greedy")


def _check_range(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # nor NaN
        raise InvalidParameter(field, f"must be from {least:g} to {most:g}, not {value}")


def _check_bias(biases: tuple[tuple[int, float], ...]) -> None:
    if len(biases) > MOST_BIASES:
        raise InvalidParameter("logit_bias", f"at most {MOST_BIASES} ids are allowed, not {len(biases)}")
    before = -1
    for token, bias in biases:
        if token >= 1 << 32:
            raise InvalidParameter("logit_bias", f"must be of ids from 0 to {(1 << 32) - 1}, not {token}")
        if token <= before:
            raise InvalidParameter("logit_bias", f"ids must rise from 0 and be distinct, not {before}, {token}")
        if not -GREATEST_BIAS <= bias <= GREATEST_BIAS:  # nor NaN
            raise InvalidParameter(
                "logit_bias", f"must be from -{GREATEST_BIAS:g} to {GREATEST_BIAS:g}, not {bias} (of id {token})"
            )
        before = token


def check_bias_ids(sampling: Sampling, vocabulary: int) -> None:
    """Refuse a bias of an id that the model does not have."""
    if sampling.logit_bias and sampling.logit_bias[-1][0] >= vocabulary:
        token = sampling.logit_bias[-1][0]
        raise InvalidParameter("logit_bias", f"token id {token} is outside 0..{vocabulary - 1}")


def with_rule(sampling: Sampling, name: str) -> Sampling:
    """`sampling` under the rule that a request asks for by `name`; "" is the temperature's own.

    Raises:
        InvalidParameter: no such rule, a number out of range, or a contradiction to the temperature.
    """
    if not name:
        return replace(sampling, acceptance=None)
    try:
        asked = Acceptance.parse(name)
    except ValueError as error:
        raise InvalidParameter("rule", str(error)) from None
    own = _own_rule(sampling.temperature)
    if asked.rule not in GUESSING_RULES:
        return replace(sampling, acceptance=asked)
    if asked.rule is not own:
        raise InvalidParameter("rule", f"{name} contradicts temperature {sampling.temperature}, which needs {own}")
    return replace(sampling, acceptance=None)


def resolve_rule(name: str, sampling: Sampling) -> Rule:
    """The rule that a request asks for by `name`; raises as `with_rule`."""
    return with_rule(sampling, name).rule


def kept_by_top_p(probabilities: Floats, top_p: float) -> npt.NDArray[np.bool_]:
    """Mask of the smallest most-probable set with mass >= top_p, for one distribution (vocabulary,)."""
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.zeros(len(probabilities), dtype=np.bool_)
    kept[order[before < top_p]] = True
    return kept


def adjusted(
    logits: npt.ArrayLike,
    sampling: Sampling,
    seen: Seen | None = None,
    banned: Sequence[int] = (),
    allowed: Mask | None = None,
) -> Floats:
    """Logits (vocabulary,) of one position after bias, penalties and bans, in float64.

    Args:
        seen: the text before the position; None where nothing is penalised.
        banned: ids that may not be drawn there.
        allowed: the ids that a constraint lets stand there; None for all.
    """
    scores = np.array(logits, dtype=np.float64)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    if seen is not None:
        scores[seen.ids] = penalised(scores[seen.ids], seen.counts, sampling)
    scores[list(banned)] = -np.inf
    if allowed is not None:
        scores[~allowed] = -np.inf
    return scores


def penalised(scores: Floats, counts: Counts, sampling: Sampling) -> Floats:
    """Scores of ids that stand in the text, `counts` times in the output.

    repetition as in transformers' RepetitionPenaltyLogitsProcessor, then presence and frequency as OpenAI defines them.
    """
    repeated = np.where(scores < 0.0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty)
    result: Floats = (
        repeated - counts * sampling.frequency_penalty - np.where(counts > 0, sampling.presence_penalty, 0.0)
    )
    return result


def log_probabilities(
    logits: npt.ArrayLike,
    sampling: Sampling,
    seen: Seen | None = None,
    banned: Sequence[int] = (),
    allowed: Mask | None = None,
) -> Floats:
    """Processed log-probabilities (vocabulary,) of one position's logits; removed tokens get -inf.

    For temperature 0 the log-softmax of the adjusted logits: filters do not apply. Arguments as for `adjusted`.
    """
    scores = adjusted(logits, sampling, seen, banned, allowed)
    if sampling.temperature > 0.0:
        scores = scores / sampling.temperature
        if 0 < sampling.top_k < len(scores):
            threshold = np.partition(scores, -sampling.top_k)[-sampling.top_k]
            scores = np.where(scores >= threshold, scores, -np.inf)
        if sampling.top_p < 1.0:
            scores = np.where(kept_by_top_p(_softmax(scores), sampling.top_p), scores, -np.inf)
        if sampling.min_p > 0.0:
            scores = np.where(scores >= scores.max() + math.log(sampling.min_p), scores, -np.inf)
    shifted = scores - scores.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    result: Floats = weights / weights.sum()
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Log-probabilities that are reported with a decided token (numpy reference of `specwire.lm.law.logits`).


class TokenScore(NamedTuple):
    """A given token at its position. rank: how many ids are at least as probable, itself included."""

    logprobs: TokenLogprobs
    rank: int


def report(log_p: Floats, token: int, count: int) -> TokenLogprobs:
    """What is reported of `token`, drawn where log-probabilities are `log_p` (vocabulary,); `count`: of the top ids."""
    best = np.argsort(-log_p, kind="stable")[:count]
    top = tuple((int(index), rounded(log_p[index])) for index in best if log_p[index] > -np.inf)
    return TokenLogprobs(rounded(log_p[token]), top)


def finite(logprob: float) -> float:
    """For JSON, which has no infinity: OpenAI writes -9999 for an all but impossible token."""
    return max(logprob, -9999.0)


def check_numbers(reported: TokenLogprobs) -> TokenLogprobs:
    """`reported`; ValueError where it holds what is no number: it came from elsewhere."""
    if isnan(reported.logprob) or any(isnan(value) for _, value in reported.top):
        raise ValueError("logprobs: NaN is no number")
    return reported


def rounded(value: float) -> float:
    """`value` rounded to float32."""
    return float(np.float32(value))
