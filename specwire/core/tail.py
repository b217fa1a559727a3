"""Verdicts that a session's owner may not have: what a connection that is lost leaves to the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from specwire.core.acceptance import Outcome
from specwire.core.chain import SourceKind
from specwire.core.limits import FinishReason
from specwire.core.logprobs import TokenLogprobs


class Verdict(NamedTuple):
    """What a step decided for a session: `tokens` stand at position, position + 1, ...

    width: draft tokens in the window, which came from a source of `kind`; of several drafters, from `source`.
    met: the drafter whose token came during the forward and met the row behind the window; 0 for none.
    logprobs: one per token where the session reports them, else none.
    """

    position: int
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    width: int
    finish: FinishReason | None = None
    kind: SourceKind = SourceKind.DRAFTER
    source: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    met: int = 0

    @property
    def accepted(self) -> int:
        return self.outcomes.count(Outcome.ACCEPTED)

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)

    def behind(self, position: int) -> Verdict:
        """What of it stands at `position` and later. All tokens before a verdict's last one were draft tokens."""
        cut = max(0, position - self.position)
        if cut == 0:
            return self
        return self._replace(
            position=position,
            tokens=self.tokens[cut:],
            outcomes=self.outcomes[cut:],
            logprobs=self.logprobs[cut:],
            width=max(0, self.width - cut),
        )


class Tail:
    """The latest verdicts of a session. Invariant: each begins where the one before it ends."""

    def __init__(self) -> None:
        self._verdicts: deque[Verdict] = deque()

    def add(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)

    def forget(self, durable: int) -> None:
        """The log holds the tokens before `durable`. The end is kept: no log's length tells that it is known."""
        while self._verdicts and self._verdicts[0].end <= durable and self._verdicts[0].finish is None:
            self._verdicts.popleft()

    def behind(self, position: int, end: int) -> Sequence[Verdict] | None:
        """Everything from `position` to `end`, where the text ends; None where a part of it is forgotten."""
        start = self._verdicts[0].position if self._verdicts else end
        if position < start:
            return None
        later = [each for each in self._verdicts if each.end > position or each.finish is not None]
        return [each.behind(position) for each in later]
