"""The drafter's session: a chain of guesses ahead of the decided text, cut where the text differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from specwire.core.law.sampling import Sampling
from specwire.core.messages import MOST_WINDOW, Pace, Proposal, Weights
from specwire.core.text import Text


class Desynchronised(ValueError):
    """An advance starts behind the decided text that the drafter knows: messages were lost; open the session again."""


def fitting(pace: Pace, sampling: Sampling) -> Pace:
    """The pace as the session's rule allows it: no stop that depends on drafted values, chunks that fit a window."""
    return pace if sampling.guessed else Pace(min(pace.chunk, MOST_WINDOW), pace.run_ahead)


class DraftSession:
    """Invariant: base <= sent <= len(text), decided <= len(text); text[:decided] is what the last advance said.

    Args:
        chain: number of the first chain; above those of a session that this one replaces.
        context: most tokens that the drafter's model can hold; a text that has reached it is not drafted for.
        weighed: its rule weighs draft tokens by what they were drawn from. Then no stop may depend on them: a chunk's
        length is fixed before its first token is drawn, and the pace's floor is ignored. epoch: names the randomness to
        draw with; a new one voids what is not decided.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        pace: Pace,
        chain: int = 0,
        context: int | None = None,
        weighed: bool = False,
        epoch: int = 0,
    ) -> None:
        self.text = Text(tokens)
        self.decided = len(self.text)
        self.pace = pace
        self.chain = chain
        self.context = context
        self.base = self.sent = self.decided
        self.weighed = weighed
        self.epoch = epoch
        self._chunk = pace.chunk
        self._confidences: list[float] = []
        self._weights: list[Weights] = []

    @property
    def in_flight(self) -> int:
        """Drafted tokens beyond the decided position."""
        return len(self.text) - self.decided

    def lateness(self, end: int) -> tuple[int, int]:
        """How many of the positions that an advance to `end` decides the run-ahead allowed, and how many of these are
        not proposed yet.
        """
        allowed = min(end, self.decided + self.pace.run_ahead)
        return max(0, allowed - self.decided), max(0, allowed - max(self.decided, self.sent))

    @property
    def doubtful(self) -> bool:
        """The chain's probability, by the drafter's own estimate, is below the pace's floor."""
        if self.pace.confidence_floor == 0.0 or self.weighed:
            return False
        return self._confidence(self.decided, len(self.text)) < self.pace.confidence_floor

    def _confidence(self, start: int, stop: int) -> float:
        """Product of the drafter's probabilities of its tokens at positions start .. stop - 1."""
        first = len(self.text) - len(self._confidences)
        return prod(self._confidences[max(0, start - first) : max(0, stop - first)])

    @property
    def wants_token(self) -> bool:
        has_room = self.context is None or len(self.text) < self.context
        return has_room and self.in_flight < self.pace.run_ahead and not self.doubtful

    def advance(self, position: int, tokens: Sequence[int], pace: Pace, epoch: int = 0) -> int:
        """Take in decided tokens; returns the length of unchanged text, to which caches roll back.

        Raises:
            Desynchronised: `position` lies behind the decided text known here.
        """
        if position > self.decided:
            raise Desynchronised(f"advance at {position}, but only {self.decided} positions are known as decided")
        self.pace = pace
        end = position + len(tokens)
        agreed = position + self.text.common_prefix(position, tokens)
        same_epoch, self.epoch = epoch == self.epoch, epoch
        if agreed == end and end >= self.decided and same_epoch:
            self.decided = end
            if self.sent < end:
                # Decided tokens need not be proposed: the same line goes on as a new chain.
                self.base = self.sent = end
                self.chain += 1
            return len(self.text)
        self.text.truncate(agreed)
        self.text.extend(tokens[agreed - position :])
        self.text.truncate(end)
        self.decided = self.base = self.sent = end
        self.chain += 1
        self._confidences.clear()
        self._weights.clear()
        return min(agreed, end)

    def drafted(self, token: int, confidence: float, weights: Weights | None = None) -> None:
        """Append the drafter's guess for the next position; weights: what it was drawn from, where the rule weighs."""
        if self.sent == len(self.text):
            self._chunk = self.pace.chunk
        self.text.extend((token,))
        self._confidences.append(confidence)
        if weights is not None:
            self._weights.append(weights)

    def take_proposal(self) -> Proposal | None:
        """The next chunk if one is due: full, or all that the run-ahead and the floor allow."""
        unsent = len(self.text) - self.sent
        chunk = self._chunk if self.weighed else self.pace.chunk
        if unsent == 0 or (unsent < chunk and self.wants_token):
            return None
        end = min(len(self.text), self.sent + chunk)
        offset = self.sent - self.base
        tokens = tuple(self.text.tokens[self.sent : end])
        weights = self._taken(self.sent, end)
        self.sent = end
        prefix_hash = self.text.hash_at(self.base) if offset == 0 else None
        expected = self._expected(end - len(tokens), end)
        return Proposal(0, self.chain, self.base, offset, tokens, prefix_hash, expected, weights, self.epoch)

    @property
    def unsent_weights(self) -> tuple[Weights, ...]:
        """Weights that the tokens which are not proposed yet were drawn from."""
        unsent = len(self.text) - self.sent
        return tuple(self._weights[-unsent:]) if unsent else ()

    def _taken(self, start: int, stop: int) -> tuple[Weights, ...]:
        """Weights that the tokens at start .. stop - 1 were drawn from; those sent or decided are not needed again."""
        if not self._weights:
            return ()
        first = len(self.text) - len(self._weights)
        taken = tuple(self._weights[start - first : stop - first])
        del self._weights[: stop - first]
        return taken

    def _expected(self, start: int, stop: int) -> float:
        """Tokens of start .. stop - 1 expected to be accepted; known only while probabilities are asked for."""
        if self.pace.confidence_floor == 0.0 or self.weighed:
            return 0.0
        return sum(self._confidence(self.decided, position + 1) for position in range(start, stop))
