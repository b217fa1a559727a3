"""Sampling parameters, and the one path from logits to log-probabilities (numpy reference).

`specwire.lm.choose` holds the vectorised version that the verifier runs; tests hold the two equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

# Below it, logits divided by the temperature leave what single precision can tell apart.
LEAST_TEMPERATURE = 1e-4

Floats = npt.NDArray[np.float64]


class InvalidParameter(ValueError):
    """A request's parameter is invalid. `field` is its name on the wire."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Rule(StrEnum):
    """Registered acceptance rules (ARCHITECTURE.md section 4)."""

    GREEDY = "greedy"
    COUPLED = "coupled"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's next token is drawn. With equal logits, a text is a function of these and the prompt alone.

    temperature 0 is greedy. top_k 0 and top_p 1 switch the filters off. top_k keeps ties with the k-th largest;
    top_p keeps the smallest set of most probable tokens (ties: lower id first) whose mass reaches top_p, as computed
    after temperature and top_k.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise InvalidParameter("temperature", f"must be a finite number from 0 to 100, not {self.temperature}")
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise InvalidParameter(
                "temperature", f"must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, not {self.temperature}"
            )
        if self.top_k < 0:
            raise InvalidParameter("top_k", f"must be 0 (off) or positive, not {self.top_k}")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidParameter("top_p", f"must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidParameter("seed", f"must fit in 64 unsigned bits, not {self.seed}")
        if not 0 <= self.choice < 1 << 32:
            raise InvalidParameter("choice", f"must fit in 32 unsigned bits, not {self.choice}")

    @property
    def rule(self) -> Rule:
        """The exact rule of this temperature."""
        return Rule.GREEDY if self.temperature == 0.0 else Rule.COUPLED


def resolve_rule(name: str, sampling: Sampling) -> Rule:
    """The rule a request asks for by `name` ("" = the default), refused where it contradicts the temperature."""
    if name and name not in Rule.__members__.values():
        raise InvalidParameter("rule", f"must be one of {', '.join(Rule)}, not {name!r}")
    if name and name != sampling.rule:
        raise InvalidParameter(
            "rule", f"{name} contradicts temperature {sampling.temperature}, which needs {sampling.rule}"
        )
    return sampling.rule


def kept_by_top_p(probabilities: Floats, top_p: float) -> npt.NDArray[np.bool_]:
    """Mask of the smallest most-probable set with mass >= top_p, for one distribution (vocabulary,)."""
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.zeros(len(probabilities), dtype=np.bool_)
    kept[order[before < top_p]] = True
    return kept


def log_probabilities(logits: npt.ArrayLike, sampling: Sampling) -> Floats:
    """Processed log-probabilities (vocabulary,) of one position's logits; removed tokens get -inf.

    Order: temperature, top_k, top_p (as in transformers and vLLM). For temperature 0 the raw log-softmax.
    """
    scores = np.asarray(logits, dtype=np.float64)
    if sampling.temperature > 0.0:
        scores = scores / sampling.temperature
        if 0 < sampling.top_k < len(scores):
            threshold = np.partition(scores, -sampling.top_k)[-sampling.top_k]
            scores = np.where(scores >= threshold, scores, -np.inf)
        if sampling.top_p < 1.0:
            scores = np.where(kept_by_top_p(_softmax(scores), sampling.top_p), scores, -np.inf)
    shifted = scores - scores.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    result: Floats = weights / weights.sum()
    return result
