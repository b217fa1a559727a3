"""A session's durable output, followed by any number of readers at their own pace; beside it what is provisional."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from specwire.core.acceptance import Outcome
from specwire.core.effects import Emit, EmitEnd, End
from specwire.core.logprobs import TokenLogprobs
from specwire.core.preview import ProvisionalDraft
from specwire.v1 import verify_pb2

# Tokens of one piece, where each comes with log-probabilities: some hundred bytes, of which a message holds 16 MiB.
MOST_REPORTED = 4096


@dataclass(slots=True)
class OutputTimings:
    """Monotonic nanoseconds of the newest token's way; 0 where unknown. `step` is the verifier's own account."""

    step: verify_pb2.StepTimings
    verdict_received_ns: int = 0
    durable_ns: int = 0


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """What a reader has not seen yet. `position` is absolute; `text` is what was released since the reader's last."""

    position: int
    tokens: list[int]
    outcomes: list[Outcome]
    text: str
    text_ends: list[int]
    timings: OutputTimings | None
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class Cursor:
    """Where a reader stands: output tokens and code points that it has."""

    tokens: int = 0
    characters: int = 0


class ProvisionalGuess(Protocol):
    """Says what is provisional behind the output; whoever changes that calls `Output.wake`."""

    def now(self) -> ProvisionalDraft: ...


class Output:
    """Tokens, outcomes and text that may be shown; grows only by what the log has acknowledged.

    logprobs: one per token where the session reports them, else none.

    A reader that falls behind gets one larger piece, not a queue of small ones.
    """

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.tokens: list[int] = []
        self.outcomes: list[Outcome] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text_ends: list[int] = []
        self.text = ""
        self.end: End | None = None
        self.timings: OutputTimings | None = None
        # Per token, what of the text is released once it is there; the rest is withheld as a stop's possible start.
        # Not what was released with those that came with it: elsewhere others may, and readers come from there.
        self._released: list[int] = []
        self._changed: asyncio.Future[None] | None = None

    def add(self, emit: Emit, timings: OutputTimings | None = None) -> None:
        self.tokens.extend(emit.tokens)
        self.outcomes.extend(emit.outcomes)
        self.logprobs.extend(emit.logprobs)
        self.text_ends.extend(emit.text_ends)
        self.text += emit.text
        self._released.extend(emit.released)
        self.timings = timings
        self.wake()

    def finish(self, end: EmitEnd) -> None:
        self.text += end.text
        self.end = end.end
        self.wake()

    def since(self, cursor: Cursor) -> OutputPiece:
        """What lies beyond `cursor`, at most MOST_REPORTED tokens where they are reported on; `cursor` moves behind it.

        The text that the end releases is for a reader that has all tokens: a piece with tokens brings the text that was
        released with them, for whoever comes back behind it is given what follows (`cursor_at`).
        """
        stop = len(self.tokens)
        if self.logprobs:
            stop = min(stop, cursor.tokens + MOST_REPORTED)
        characters = self._released[stop - 1] if stop > cursor.tokens else len(self.text)
        piece = OutputPiece(
            self.prompt_length + cursor.tokens,
            self.tokens[cursor.tokens : stop],
            self.outcomes[cursor.tokens : stop],
            self.text[cursor.characters : characters],
            self.text_ends[cursor.tokens : stop],
            self.timings,
            self.logprobs[cursor.tokens : stop],
        )
        cursor.tokens, cursor.characters = stop, characters
        return piece

    def cursor_at(self, position: int) -> Cursor:
        """A reader that has the tokens before `position` and the text that was released with them."""
        tokens = min(max(0, position - self.prompt_length), len(self.tokens))
        return Cursor(tokens, self._released[tokens - 1] if tokens else 0)

    async def follow(
        self, cursor: Cursor, guess: ProvisionalGuess | None = None
    ) -> AsyncIterator[OutputPiece | ProvisionalDraft]:
        """Pieces as they come, until the end; the text that the end releases is the caller's to take with `since`.

        With `guess`, what is provisional too, whenever it has changed and no piece waits. A slow reader gets the last.
        """
        shown = ProvisionalDraft(0, (), "")
        while True:
            if len(self.tokens) > cursor.tokens:
                yield self.since(cursor)
            elif self.end is not None:
                return
            elif guess is not None and guess.now().replaces(shown):
                shown = guess.now()
                yield shown
            else:
                await self._wait()

    async def reached(self, position: int) -> None:
        """Wait until the tokens before `position` are here, or the end."""
        while self.prompt_length + len(self.tokens) < position and self.end is None:
            await self._wait()

    async def ended(self) -> None:
        while self.end is None:
            await self._wait()

    async def _wait(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def wake(self) -> None:
        """Have the readers look again."""
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None
