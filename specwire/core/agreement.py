"""How often a drafter's tokens are the decided ones, tested or not.

Far from the verifier most chains are contradicted before a token of theirs can be tested, and then acceptance by
position learns next to nothing. Under greedy and coupled a draft token is right exactly if it equals the decided one,
so chains are compared with the text, whoever decided it and whenever they arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specwire.core.chain import Proposal

AGREEMENT_PRIOR = 0.7
AGREEMENT_PRIOR_WEIGHT = 4.0
# Rates are raised to the power of what is decided in a round trip: they must be known well.
AGREEMENT_DECAY = 0.99
# Decided tokens that are kept for chains still on their way.
REMEMBERED_CHAINS = 1024


@dataclass(slots=True)
class Agreement:
    """P(equal | all before it in its chain were equal), as decayed counts with a weak prior."""

    compared: float = 0.0
    equal: float = 0.0
    _decided: dict[int, int] = field(default_factory=dict)
    _source: int = -1
    _chain: int = -1
    _base: int = 0
    _ahead: dict[int, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return (self.equal + AGREEMENT_PRIOR_WEIGHT * AGREEMENT_PRIOR) / (self.compared + AGREEMENT_PRIOR_WEIGHT)

    def faded(self, weight: float) -> Agreement:
        """A copy without the chain that counts for at most `weight` comparisons."""
        share = min(1.0, weight / self.compared) if self.compared else 0.0
        return Agreement(share * self.compared, share * self.equal)

    def proposal(self, proposal: Proposal) -> None:
        """A chunk; one of a chain that is over, or of no chain that is known, is ignored."""
        if proposal.source != self._source:
            # Another drafter, or the same one connected again: its chains are numbered anew.
            self._source, self._chain = proposal.source, -1
        if proposal.chain > self._chain and proposal.offset == 0:
            self._chain, self._base = proposal.chain, proposal.base
            self._ahead.clear()
        elif proposal.chain != self._chain or proposal.base != self._base:
            return  # `_base` is -1 once the chain is contradicted
        start = proposal.base + proposal.offset
        for position, token in enumerate(proposal.tokens, start):
            if position not in self._decided:
                if len(self._ahead) < REMEMBERED_CHAINS:
                    self._ahead[position] = token
            elif not self._compare(token, self._decided[position]):
                return

    def decided(self, position: int, tokens: Sequence[int]) -> None:
        """Tokens were decided at position, position + 1, ..."""
        for at, token in enumerate(tokens, position):
            self._decided[at] = token
            guess = self._ahead.pop(at, None)
            if guess is not None:
                self._compare(guess, token)
        while len(self._decided) > REMEMBERED_CHAINS:
            del self._decided[next(iter(self._decided))]

    def _compare(self, guess: int, token: int) -> bool:
        """Count; a chain that is contradicted is over."""
        equal = guess == token
        self.compared = AGREEMENT_DECAY * self.compared + 1.0
        self.equal = AGREEMENT_DECAY * self.equal + equal
        if not equal:
            self._ahead.clear()
            self._base = -1
        return equal
