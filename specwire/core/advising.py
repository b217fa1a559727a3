"""What one drafter of a session is told: the decided text, in advances that leave no gap. Pure.

A session may have several drafters. Each is told for itself, at its own pace: one that is paused hears what it missed
when it is to go on, whatever the others were told meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from specwire.core.drafting import Pace
from specwire.core.effects import AdvanceDrafter, Effect, OpenDrafter
from specwire.core.text import Text


@dataclass(slots=True)
class Advised:
    """A drafter, as its session's orchestrator sees it.

    due: draft tokens that the verifier may expect of it after each verdict. missed: where the text begins that a paused
    one was not told; None: it was told all. stale: of its present chain the beginning went to a verifier that is gone.
    """

    source: int
    pace: Pace
    due: int
    missed: int | None = None
    stale: bool = False

    def open(self, text: Text) -> list[Effect]:
        self.missed, self.stale = None, False
        return [OpenDrafter(self.source, tuple(text.tokens), self.pace)]

    def restart(self, text: Text) -> list[Effect]:
        """Have it begin a new chain: the beginning of its present one never reached the verifier that opens now.

        An advance that goes back by a token does it, where there is one to spare; for one that is paused, when it is
        to go on.
        """
        last = len(text) - 1
        if last == 0:
            return self.open(text)
        self.stale = True
        return self.advance(text, last, (text.tokens[last],))

    def plan(self, text: Text, pace: Pace, due: int) -> list[Effect]:
        """A new plan: it hears at once that it is to pause, to go on, or to draft otherwise."""
        changed = pace != self.pace
        self.pace, self.due = pace, due
        if not changed:
            return []
        if pace.run_ahead == 0 and self.missed is None:
            return [AdvanceDrafter(self.source, len(text), (), pace)]
        return self.advance(text, len(text), ())

    def advance(self, text: Text, position: int, tokens: tuple[int, ...]) -> list[Effect]:
        """Tell what was decided at `position`; `text` holds it. One that is paused hears it when it is to go on."""
        if self.pace.run_ahead == 0:
            self.missed = position if self.missed is None else min(position, self.missed)
            return []
        if self.missed is not None:
            position, self.missed = min(position, self.missed), None
            tokens = tuple(text.tokens[position:])
        stale, self.stale = self.stale, False
        back: list[Effect] = [AdvanceDrafter(self.source, position, (), self.pace)] if stale else []
        return [*back, AdvanceDrafter(self.source, position, tokens, self.pace)]
