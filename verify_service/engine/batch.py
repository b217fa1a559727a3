"""A step's batch: each session's part of it, and what the target says at its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from specwire.core.messages import Draft, SourceKind, TokenLogprobs
from specwire.core.policy.scheduler import Share
from specwire.core.verify.session import Judge
from verify_service.engine.messages import TokenScore
from verify_service.engine.sessions import Held


class Part(NamedTuple):
    """A session's `share` of a step.

    tokens: of the window. source: of the chain that they come from, if any. wanted: rows of logits: one more than the
    window, none before the prompt's end.
    """

    share: Share
    held: Held
    window: tuple[Draft, ...]
    tokens: tuple[int, ...]
    source: int | None
    wanted: int

    @classmethod
    def of(cls, share: Share, held: Held) -> Part:
        session = held.session
        if not share.window:
            return cls(share, held, (), (), None, 1 if share.decides else 0)
        if share.kind is SourceKind.DRAFTER:
            window = session.drafts(share.window)
        else:
            window = tuple(map(Draft, session.window(share.window, share.kind)))
        window = session.foreseen(window)
        tokens = tuple([draft.token for draft in window])
        wanted = len(window) + 1 if share.decides else 0
        return cls(share, held, window, tokens, session.source if window else None, wanted)

    def ask(self) -> None:
        """Ask, before the forward, for the masks that its rows need."""
        if self.wanted:
            self.held.session.ask(self.tokens)


class RowChoice(NamedTuple):
    """The target's token for each row of a part.

    report: gives the log-probabilities of decided tokens. judge: decides the window under rules that look at it.
    """

    tokens: Sequence[int]
    report: Callable[[Sequence[int]], tuple[TokenLogprobs, ...]] | None
    judge: Judge | None


class RowSampler(Protocol):
    """Reads the rows of one runtime's forwards; of tensors: `verify_service.engine.sampler.LogitsSampler`."""

    def choose(self, rows: Any, parts: Sequence[Part], heard: Callable[[Part], bool]) -> list[RowChoice]:
        """The target's choices for each part; the parts' rows stand one behind the other.

        heard: whether a part's constraint has answered; a part whose constraint has not gets no choices.
        """
        ...

    def score(self, rows: Any, tokens: Sequence[int], top: int) -> list[TokenScore]:
        """Each token in its row, with the `top` most probable ids there."""
        ...
