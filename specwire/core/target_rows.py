"""A `judging.Target` made of log-probabilities: what a verifier judges draft tokens with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from specwire.core.noise import NOISE_BITS, NoiseStream, uniform_integers
from specwire.core.sampling import Sampling
from specwire.core.weights import Number, Weights

Floats = npt.NDArray[np.float64]
ONE_ID = np.zeros(1, dtype=np.int64)


class TargetRows:
    """The rows of one session in one forward.

    Args:
        log_p: gives the processed log-probabilities (rows, vocabulary); asked for once, when they are first needed.
        samplings: of each row, with the seed of its place (`specwire.core.epoch`) where the rule weighs.
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
        """By inversion of the cumulated rest: one random number, where noise for every id would take milliseconds.

        Where rounding leaves no rest, p and q are equal, and refusing was as unlikely as rounding is small.
        """
        rest = float(scale) * self._p[row]
        rest[list(weights.ids)] -= np.array(weights.weights, dtype=np.float64) / weights.total
        sums = np.maximum(rest, 0.0).cumsum()
        if not sums[-1] > 0.0:
            return self.own(row)
        # Numbers behind the last id of the rest are none of its own: rounding may carry the product to the sum itself.
        place = int(np.searchsorted(sums, self._uniform(row, NoiseStream.RESIDUAL) * sums[-1], side="right"))
        return min(place, int(np.searchsorted(sums, sums[-1], side="left")))

    def _uniform(self, row: int, stream: NoiseStream) -> float:
        """Strictly between 0 and 1."""
        sampling = self._samplings[row]
        integer = uniform_integers(sampling.seed, sampling.choice, self._position + row, ONE_ID, stream)[0]
        return (float(integer) + 0.5) * 2.0**-NOISE_BITS
