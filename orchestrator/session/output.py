"""A session's durable output, and what its readers are shown of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import grpc

from orchestrator.session.stats import Trace
from orchestrator.store.base import LEASE_S, LoggedTokens, SessionRecord, StoreError
from specwire.core.messages import Emit, EmitEnd, End, Event, FinishReason, Outcome, TokenLogprobs
from specwire.core.session import OutputScanner
from specwire.telemetry.logs import tell
from specwire.telemetry.tally import OrchestratorTally, SessionStats
from specwire.telemetry.tracing import Span
from specwire.v1 import verify_pb2

# ----------------------------------------------------------------------------------------------------------------------
# Readers: a session goes on as long as somebody reads it, and for a grace after that.

# Seconds for a session that nobody has begun to read: its caller left before it existed.
UNREAD = 5.0
# Seconds for which a reader at another orchestrator counts as present: one of its signs may be lost.
ELSEWHERE = LEASE_S


class Timers:
    """A session's timers, which end with it. Named: setting one again replaces it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self.cancel(name)
        self._running[name] = self._loop.call_later(seconds, self._fire, name, action)

    def left(self, name: str) -> float | None:
        """Seconds until the timer fires; None if there is none of that name."""
        timer = self._running.get(name)
        return None if timer is None else timer.when() - self._loop.time()

    def _fire(self, name: str, action: Callable[[], None]) -> None:
        del self._running[name]
        action()

    def cancel(self, name: str) -> None:
        timer = self._running.pop(name, None)
        if timer is not None:
            timer.cancel()

    def cancel_all(self) -> None:
        for name in list(self._running):
            self.cancel(name)


class Readers:
    """grace: seconds for which a session without a reader goes on. goes_on: whether the session still runs.

    on_left: is called where nobody came back here in time.
    """

    def __init__(self, timers: Timers, grace: float, goes_on: Callable[[], bool], on_left: Callable[[], None]) -> None:
        self.count = 0
        self._timers = timers
        self._grace = grace
        self._goes_on = goes_on
        self._on_left = on_left

    def expect(self) -> None:
        """Start the grace: the caller may be gone already."""
        self._wait(max(UNREAD, self._grace))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader for as long as the context lasts."""
        self.count += 1
        self._timers.cancel("detached")
        try:
            yield
        finally:
            self.count -= 1
            if self.count == 0 and self._goes_on():
                self._wait(self._grace)

    def elsewhere(self, ago: float) -> bool:
        """Whether somebody reads here, or did so elsewhere recently. Else `on_left` follows."""
        if self.count:
            return True
        left = max(self._grace, ELSEWHERE) - ago
        if left > 0:
            self._wait(left)
        return left > 0

    def _wait(self, seconds: float) -> None:
        self._timers.set("detached", seconds, self._on_left)


# ----------------------------------------------------------------------------------------------------------------------
# A session's durable output, followed by any number of readers at their own pace.

# Tokens of one piece, where each comes with log-probabilities: some hundred bytes, of which a message holds 16 MiB.
MOST_REPORTED = 4096


@dataclass(slots=True)
class OutputTimings:
    """Instants of the newest token in monotonic nanoseconds; 0 where unknown. `step`: the verifier's own timings."""

    step: verify_pb2.StepTimings
    verdict_received_ns: int = 0
    durable_ns: int = 0


@dataclass(slots=True)
class Cursor:
    """Where a reader stands: output tokens and code points that it has."""

    tokens: int = 0
    characters: int = 0


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
        # Per token, the part of the text released with it; the rest is withheld as a stop string's possible start. The
        # text of tokens that came with it is not included: another orchestrator may have had other portions, and
        # readers come from there.
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
        self._wake()

    def finish(self, end: EmitEnd) -> None:
        self.text += end.text
        self.end = end.end
        self._wake()

    def since(self, cursor: Cursor) -> Emit:
        """What lies beyond `cursor`; `cursor` moves behind it. With log-probabilities at most MOST_REPORTED tokens.

        The text that the end releases is for a reader that has all tokens: a piece with tokens brings only the text
        that was released with them, because a reader that comes back behind it gets what follows (`cursor_at`).
        """
        stop = len(self.tokens)
        if self.logprobs:
            stop = min(stop, cursor.tokens + MOST_REPORTED)
        characters = self._released[stop - 1] if stop > cursor.tokens else len(self.text)
        start = cursor.tokens
        piece = Emit(
            self.prompt_length + start,
            tuple(self.tokens[start:stop]),
            tuple(self.outcomes[start:stop]),
            self.text[cursor.characters : characters],
            tuple(self.text_ends[start:stop]),
            tuple(self._released[start:stop]),
            tuple(self.logprobs[start:stop]),
        )
        cursor.tokens, cursor.characters = stop, characters
        return piece

    def cursor_at(self, position: int) -> Cursor:
        """The cursor of a reader that has the tokens before `position` and the text that was released with them."""
        tokens = min(max(0, position - self.prompt_length), len(self.tokens))
        return Cursor(tokens, self._released[tokens - 1] if tokens else 0)

    async def follow(self, cursor: Cursor) -> AsyncIterator[Emit]:
        """Pieces as they come, until the end; the text that the end releases is the caller's to take with `since`."""
        while True:
            if len(self.tokens) > cursor.tokens:
                yield self.since(cursor)
            elif self.end is not None:
                return
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

    def _wake(self) -> None:
        """Wake the readers."""
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None


# ----------------------------------------------------------------------------------------------------------------------
# A session's output from its log: the same text, whoever appended it and in whatever portions.

# Tokens detokenised at a time: a few ms, for which other sessions wait.
PORTION = 512


class OtherText(Exception):
    """The log holds another text than readers have been shown, or a shorter one."""


class Replay:
    """Extends `output` to the log's end, repeatedly as the log grows.

    It goes token by token, so that each position has the text that was released with it: a reader that comes back in
    the middle of an append goes on exactly there.

    Args:
        output: some of it may have been shown already, by a driver or by another replay.
        scanner: fresh. It has seen the log's tokens up to `seen`, counted behind the prompt.
    """

    def __init__(self, output: Output, scanner: OutputScanner) -> None:
        self.output = output
        self.scanner = scanner
        self.seen = 0

    async def extend(self, logged: LoggedTokens, skipped: int = 0) -> None:
        """Take the log's decided tokens behind the first `skipped`, which were seen already. Raises OtherText."""
        shown, tokens, end = self.output.tokens, logged.tokens, skipped + len(logged.tokens)
        if end < len(shown) or shown[skipped:] != list(tokens[: len(shown) - skipped]):
            position = self.output.prompt_length + self.seen
            raise OtherText(f"the log holds another text behind {position} than was shown, or less")
        for index in range(self.seen, end):
            place = index - skipped
            self._see(index, tokens[place], logged.outcomes[place], tuple(logged.logprobs[place : place + 1]))
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
        """The output's end as the log has it; the log does not keep what failed (reason ERROR)."""
        message = "the log does not say how" if reason is FinishReason.ERROR else ""
        return EmitEnd(End(reason, message, text_length), self.scanner.finish())


# ----------------------------------------------------------------------------------------------------------------------
# A session as its readers see it, whoever drives it.

logger = logging.getLogger(__name__)


class SessionFailure(NamedTuple):
    """The status that a session ended with. retry_after: seconds after which it may be asked for again, if known."""

    code: grpc.StatusCode
    message: str
    retry_after: float | None = None


class SessionListener(Protocol):
    """Hears what a session's verifier, drafters and log have to say."""

    def apply(self, event: Event) -> None: ...

    def on_unplaced(self) -> None:
        """It lacks a verifier or drafters."""

    def on_unserved(self, seconds: float) -> None:
        """No verifier has opened it within so many seconds."""

    def on_verifier_failed(self, failure: SessionFailure, final: bool = False) -> None:
        """A verifier refused or failed it. final: another one would, too."""

    def on_newer_fence(self, fence: int) -> None:
        """A verifier has seen another owner with this fence, which is not below ours."""

    def on_log_refused(self, error: StoreError) -> None:
        """The log refused an append or a sign of life."""

    def on_broken(self, error: Exception) -> None:
        """A bug of ours."""


class SessionView:
    """Filled by the driver here, or from the log where another orchestrator drives the session.

    `trace`: where somebody has asked for it.
    `failure` is the status that a session ended with, if it ended with FINISH_REASON_ERROR. `abandoned`: it ended for
    readers here, but not in the log.
    `ended_at`: when it was seen to end here, in Unix time in seconds; 0 while it runs.
    `newest_fence`: of the session, as far as is known here.
    `patience_with_others`: seconds without a token after which it is taken from another orchestrator that drives it.
    `prompt_hash`: of the prompt alone; set when the session is first driven.

    Args:
        grace: seconds for which the session goes on without a reader. on_left: nobody came back here in time.
        tell: whoever drives the session hears what readers have taken.
    """

    def __init__(
        self,
        record: SessionRecord,
        span: Span,
        grace: float,
        on_left: Callable[[], None],
        tell: Callable[[Event], None],
    ) -> None:
        self.record = record
        self.span = span
        self.output = Output(len(record.prompt))
        self.timers = Timers()
        self.readers = Readers(self.timers, grace, lambda: self.output.end is None, on_left)
        self.trace: Trace | None = None
        self.stats = SessionStats(asyncio.get_running_loop().time())
        self.failure: SessionFailure | None = None
        self.abandoned = False
        self.ended_at = 0.0
        self.newest_fence = 0
        self.patience_with_others = LEASE_S
        self.prompt_hash = 0
        self.tell = tell

    def emit(self, effect: Emit, timings: OutputTimings | None, tally: OrchestratorTally) -> None:
        """Show what has become durable, and count it."""
        now = asyncio.get_running_loop().time()
        first = not self.output.tokens
        tally.emitted(self.stats, len(effect.tokens), now, first)
        if first:
            self.span.event("first token")
        self.stats.count_emit(effect, now, first)
        self.output.add(effect, timings)

    def finish(self, effect: EmitEnd) -> None:
        """The session has ended, for readers here at least."""
        self.stats.count_all(self.output.outcomes)
        self.stats.ended, self.ended_at = asyncio.get_running_loop().time(), time.time()
        self.output.finish(effect)
        end, drafted = effect.end, self.stats.drafted
        self.span.end(
            end.message if end.reason is FinishReason.ERROR else "",
            reason=end.reason.name.lower(),
            output_tokens=len(self.output.tokens),
            proposed=drafted.proposed,
            tested=drafted.tested,
            accepted=drafted.accepted,
            target_forwards=self.stats.target_forwards,
        )

    async def ended(self, timeout: float) -> None:
        """Wait until the session has ended, but not for longer than `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self.output.ended()
        except TimeoutError:
            tell(logger, self.record.session_id, "it did not end within %g s", timeout, level=logging.WARNING)
