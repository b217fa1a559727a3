"""A session's output from its log: the same text, whoever appended it and in whatever portions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from orchestrator.output import Output
from specwire.core.acceptance import Outcome
from specwire.core.effects import Emit, EmitEnd, End
from specwire.core.limits import FinishReason
from specwire.core.logprobs import TokenLogprobs
from specwire.core.scanning import PeekingScanner

# Tokens that are made text of at a time: a few ms, for which other sessions wait.
PORTION = 512


class OtherText(Exception):
    """The log holds another text than readers have been shown, or less of it."""


class Replay:
    """Brings `output` to the log's end, again and again as the log grows.

    Token by token: so to each position belongs the text that was released with it, and a reader that comes back in the
    middle of an append goes on exactly there.

    Args:
        output: of which some may have been shown already, by a driver or by another replay.
        scanner: fresh. It has seen the log's tokens up to `seen`, counted behind the prompt.
    """

    def __init__(self, output: Output, scanner: PeekingScanner) -> None:
        self.output = output
        self.scanner = scanner
        self.seen = 0

    async def extend(
        self,
        tokens: Sequence[int],
        outcomes: Sequence[Outcome],
        logprobs: Sequence[TokenLogprobs] = (),
        skipped: int = 0,
    ) -> None:
        """The log's decided tokens are these by now, behind the first `skipped`, which were seen. Raises OtherText."""
        shown, end = self.output.tokens, skipped + len(tokens)
        if end < len(shown) or shown[skipped:] != list(tokens[: len(shown) - skipped]):
            position = self.output.prompt_length + self.seen
            raise OtherText(f"the log holds another text behind {position} than was shown, or less")
        for index in range(self.seen, end):
            place = index - skipped
            self._see(index, tokens[place], outcomes[place], tuple(logprobs[place : place + 1]))
            if self.seen % PORTION == 0:
                await asyncio.sleep(0)

    def _see(self, index: int, token: int, outcome: Outcome, logprobs: tuple[TokenLogprobs, ...]) -> None:
        release = self.scanner.push([token])
        self.seen = index + 1
        if index == len(self.output.tokens):
            position = self.output.prompt_length + index
            shown = release.text, release.text_ends, release.released
            self.output.add(Emit(position, (token,), (outcome,), *shown, logprobs))

    def end(self, reason: FinishReason, text_length: int) -> EmitEnd:
        """The output's end as the log has it; what failed, if the reason is ERROR, it does not say."""
        message = "the log does not say how" if reason is FinishReason.ERROR else ""
        return EmitEnd(End(reason, message, text_length), self.scanner.finish())
