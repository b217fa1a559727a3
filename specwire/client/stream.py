"""A stream of the service: how it survives the loss of its service, without I/O, and its messages as values."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from specwire.client.events import (
    ChatDelta,
    Chunk,
    DrafterStats,
    Event,
    Finished,
    PartScore,
    PromptEcho,
    SamplingInForce,
    SessionState,
    SpecwireError,
    Started,
    Stats,
    Step,
    TextScore,
    Timings,
    ToolCallDelta,
)
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import TokenLogprobs
from specwire.core.text import extend_hash
from specwire.rpc.channel import Backoff
from specwire.rpc.convert import logprobs_from_wire, outcomes_from_wire, reason_from_wire
from specwire.telemetry.logs import SHOWN_CHARACTERS
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# What to ask next, whom, and when.
#
# A stream that broke after it had begun goes on with Watch, at the next address: from the position behind its last
# token, with the hash of the text before it, so that nothing is lost, repeated or contradicted (PROTOCOL.md, section
# 12). One that had not begun is asked for again under its request id, and so begins at most once.

logger = logging.getLogger(__name__)

# Seconds for which a client retries while nobody serves it.
PATIENCE_S = 30.0
FIRST_WAIT_S = 0.1
MOST_WAIT_S = 2.0

# The connection broke, the service is leaving, or has no room now.
TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED)
# What gRPC says of a stream that something between the two ends has reset.
RESET = ("Received RST_STREAM", "Stream removed")


def is_transient(error: SpecwireError) -> bool:
    """Whether asking again, or elsewhere, may help."""
    return error.code in TRANSIENT or error.message.startswith(RESET)


@dataclass(slots=True)
class Attempts:
    """One call's attempts; times are seconds on one clock.

    Args:
        addresses: how many there are; `current` is the one to ask.
        deadline: when the call ends.
        patience: how long it is tried again after it began to fail; 0 tries each address once.
        answered: a service has answered, if only with a refusal. Without any answer there is one round only: perhaps
        nothing listens there.
    """

    addresses: int
    current: int
    deadline: float
    patience: float
    answered: bool
    _failed: int = 0
    _failing_since: float = 0.0
    _heard_since: float | None = None
    _backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_WAIT_S, MOST_WAIT_S))

    def heard(self, now: Callable[[], float], news: bool) -> None:
        """Note a message of the service, the first one's time; `news`: it was not known from an earlier attempt."""
        self.answered = True
        if self._heard_since is None:
            self._heard_since = now()
        if news and self._failed:
            self._succeeded()

    def _succeeded(self) -> None:
        self._failed = 0
        self._backoff.reset()

    def left(self, now: float) -> float:
        """Seconds that the next attempt may take. Raises SpecwireError (DEADLINE_EXCEEDED)."""
        if now >= self.deadline:
            raise SpecwireError(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed")
        return self.deadline - now

    def after(self, error: SpecwireError, now: float) -> float:
        """Seconds to wait before `current`, which moves on, is asked.

        Raises:
            SpecwireError: the `error`, where there is no more time or no hope.
        """
        if not is_transient(error):
            raise error
        self.answered = self.answered or (error.reached and error.code is grpc.StatusCode.UNAVAILABLE)
        if self._heard_since is not None and now - self._heard_since > MOST_WAIT_S:
            self._succeeded()  # the service had nothing to send, but it answered
        self._heard_since = None
        if self._failed == 0:
            self._failing_since = now
        self._failed += 1
        self.current = (self.current + 1) % self.addresses
        if self._failed % self.addresses:
            return 0.0  # another service may be there
        wait = max(self._backoff.next(), error.retry_after or 0.0)
        if not self.answered or now + wait > min(self._failing_since + self.patience, self.deadline):
            raise error
        return wait


Request = pb.GenerateRequest | pb.WatchRequest


class Resumption:
    """What one stream has brought.

    `request`: the next one to send. `session_id`: empty until the session has begun; a drafter's texts have none, and
    end with their stream.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.session_id = ""
        self._begun = False
        self._position = 0
        self._hash: int | None = None
        self._cause: SpecwireError | None = None

    def take(self, event: Event) -> Event | None:
        """The event for the client, None for one that it has had already.

        Raises:
            SpecwireError: DATA_LOSS, the service went on at another place than the text's end.
        """
        if isinstance(event, Started):
            return self._begin(event)
        self._cause = None
        if isinstance(event, Chunk):
            self._extend(event)
        return event

    def _begin(self, started: Started) -> Event | None:
        if self._begun:
            return None
        self._begun, self.session_id = True, started.session_id
        self._position, self._hash = started.prompt_tokens, started.prompt_hash
        if isinstance(self.request, pb.WatchRequest) and self.request.from_position > self._position:
            self._position = self.request.from_position
            self._hash = self.request.prefix_hash if self.request.HasField("prefix_hash") else None
        return started

    def _extend(self, chunk: Chunk) -> None:
        if chunk.position != self._position:
            message = f"the service went on at {chunk.position}, where {self._position} was due"
            raise SpecwireError(grpc.StatusCode.DATA_LOSS, message)
        self._position += len(chunk.tokens)
        if self._hash is not None:
            for token in chunk.tokens:
                self._hash = extend_hash(self._hash, token)

    def broke(self, error: SpecwireError, patience: float) -> None:
        """Prepare to resume a lost stream.

        Raises: SpecwireError: it cannot go on; the `error`, or its first cause.
        """
        logger.info("session %s: the stream broke: %s", self.session_id[:SHOWN_CHARACTERS] or "not begun", error)
        # A session that has begun, and finds no room, has ended.
        full = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        if not is_transient(error) or (self._begun and (full or not (patience and self.session_id))):
            raise self._explained(error)
        self._cause = self._cause or error
        if self.session_id:
            self.request = pb.WatchRequest(
                session_id=self.session_id, from_position=self._position, prefix_hash=self._hash, take_over=True
            )
        elif isinstance(self.request, pb.GenerateRequest) and self.request.request_id:
            # The session may have begun at a service that is gone.
            self.request.take_over |= error.reached and not full

    def _explained(self, error: SpecwireError) -> SpecwireError:
        cause = self._cause
        if cause is None or error.code is grpc.StatusCode.DATA_LOSS:
            return error
        return SpecwireError(cause.code, f"{cause.message}; then {error}", cause.retry_after)


# ----------------------------------------------------------------------------------------------------------------------
# The service's messages as the values of `specwire.client.events`.

Response = pb.GenerateResponse | pb.WatchResponse


def event_from_wire(message: Response) -> Event:
    """Raises SpecwireError (INTERNAL) for a message that the protocol does not allow."""
    received_ns = time.monotonic_ns()
    kind = message.WhichOneof("event")
    try:
        if kind == "started":
            return _started(message.started, received_ns)
        if kind == "chunk":
            return _chunk(message.chunk, received_ns)
        if kind == "finished":
            return _finished(message.finished, received_ns)
    except InvalidParameter as error:
        raise SpecwireError(grpc.StatusCode.INTERNAL, f"the service answered with {error}") from error
    raise SpecwireError(grpc.StatusCode.INTERNAL, "the service answered with an event of no known kind")


def _started(message: pb.Started, received_ns: int) -> Started:
    prompt_hash = message.prompt_hash if message.HasField("prompt_hash") else None
    prompt = PromptEcho(tuple(message.prompt.tokens), message.prompt.text) if message.HasField("prompt") else None
    sampling = _sampling(message.sampling)
    return Started(message.session_id, message.prompt_tokens, sampling, received_ns, prompt_hash, prompt, message.lossy)


def _sampling(message: common_pb2.Sampling) -> SamplingInForce:
    return _alike(
        SamplingInForce,
        message,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def _chunk(message: pb.Chunk, received_ns: int) -> Chunk:
    return Chunk(
        position=message.position,
        tokens=tuple(message.tokens),
        outcomes=outcomes_from_wire(message.outcomes),
        text=message.text,
        text_ends=tuple(message.text_ends),
        timings=_timings(message.timings) if message.HasField("timings") else None,
        received_ns=received_ns,
        logprobs=_logprobs(message),
        delta=_delta(message),
    )


# By how a call ends on the wire.
WHOLE = {
    pb.TOOL_CALL_END_UNSPECIFIED: None,
    pb.TOOL_CALL_END_WHOLE: True,
    pb.TOOL_CALL_END_BROKEN: False,
}


def _delta(message: pb.Chunk | pb.Finished) -> ChatDelta | None:
    if not message.HasField("delta"):
        return None
    delta = message.delta
    return ChatDelta(delta.content, delta.reasoning, tuple(map(_call_delta, delta.tool_calls)))


def _call_delta(message: pb.ToolCallDelta) -> ToolCallDelta:
    if message.end not in WHOLE:
        raise InvalidParameter("end", f"{message.end} is not a known value")
    return ToolCallDelta(message.index, message.id, message.name, message.arguments, WHOLE[message.end])


def _logprobs(message: pb.Chunk) -> tuple[TokenLogprobs, ...]:
    if len(message.logprobs) not in (0, len(message.tokens)):
        raise InvalidParameter("logprobs", f"{len(message.logprobs)} for {len(message.tokens)} tokens")
    return logprobs_from_wire(message.logprobs)


def _timings(message: pb.ChunkTimings) -> Timings:
    """Field by field: one comes with each chunk, and by `_alike` it takes three times as long."""
    step = message.step
    return Timings(
        message.forward_ended_ns,
        message.verdict_received_ns,
        message.durable_ns,
        message.emitted_ns,
        Step(
            step.step,
            step.sessions,
            step.rows,
            step.forward_us,
            step.choose_us,
            step.gap_us,
            step.waited_us,
            step.drafted_us,
        ),
    )


def _finished(message: pb.Finished, received_ns: int) -> Finished:
    reason = reason_from_wire(message.reason)
    if reason is None:
        raise InvalidParameter("finish_reason", "is missing")
    drafters = tuple(_alike(DrafterStats, each) for each in message.stats.drafters)
    return Finished(
        reason=reason,
        message=message.message,
        text=message.text,
        text_length=message.text_length,
        stats=_alike(Stats, message.stats, drafters=drafters),
        received_ns=received_ns,
        lossy=message.lossy,
        delta=_delta(message),
    )


V = TypeVar("V", DrafterStats, SamplingInForce, Stats)


def _alike(kind: type[V], message: Message, **others: Any) -> V:
    """A value with what the message has in fields of the same names; others: fields that are not told so."""
    told = (each.name for each in fields(kind) if each.name not in others)
    return kind(**{name: _immutable(getattr(message, name)) for name in told}, **others)


def _immutable(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else tuple(value)


def session_from_wire(message: pb.GetSessionResponse) -> SessionState:
    """Raises SpecwireError (INTERNAL) for a reason that the protocol does not have."""
    try:
        reason = reason_from_wire(message.finish_reason)
    except InvalidParameter as error:
        raise SpecwireError(grpc.StatusCode.INTERNAL, f"the service answered with {error}") from error
    return SessionState(
        message.prompt_tokens,
        tuple(message.tokens),
        reason,
        message.fence,
        message.durability,
        message.created_ms / 1000,
        message.ended_ms / 1000 if message.ended_ms else None,
        message.lossy,
    )


def scores_from_wire(message: pb.ScoreTextResponse, wanted: int) -> list[TextScore]:
    """Raises SpecwireError (INTERNAL) for another number of scores than were asked for."""
    parts = [part for score in message.scores for part in score.parts]
    if len(message.scores) != wanted or any(len(part.tokens) != len(part.log_probabilities) for part in parts):
        raise SpecwireError(grpc.StatusCode.INTERNAL, "the service answered with another number of scores")
    return [
        TextScore(tuple(PartScore(tuple(part.tokens), tuple(part.log_probabilities)) for part in score.parts))
        for score in message.scores
    ]
