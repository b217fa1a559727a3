"""How a stream survives the loss of its service, without I/O: what to ask next, whom, and when.

A stream that broke after it had begun goes on with Watch, at the next address: from the position behind its last token,
with the hash of the text before it, so that nothing is lost, repeated or contradicted (PROTOCOL.md, section 12). One
that had not begun is asked for again under its request id, and so begins at most once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from specwire.client.errors import SpecwireError
from specwire.client.events import Chunk, Event, Started
from specwire.core.text import extend_hash
from specwire.rpc.channel import Backoff
from specwire.telemetry.logs import SHOWN_CHARACTERS
from specwire.v1 import generation_pb2

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


def ends(error: SpecwireError, begun: bool) -> bool:
    """Nothing comes after it. A session that has begun, and finds no room, has ended."""
    return not is_transient(error) or (begun and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED)


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


Request = generation_pb2.GenerateRequest | generation_pb2.WatchRequest


class Resumption:
    """What one stream has brought.

    `request`: the next one to send. `session_id`: empty until the session has begun.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.session_id = ""
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
        if self.session_id:
            return None
        self.session_id = started.session_id
        self._position, self._hash = started.prompt_tokens, started.prompt_hash
        if isinstance(self.request, generation_pb2.WatchRequest) and self.request.from_position > self._position:
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
        begun = bool(self.session_id)
        if ends(error, begun) or (begun and not patience):
            raise self._explained(error)
        self._cause = self._cause or error
        if self.session_id:
            self.request = generation_pb2.WatchRequest(
                session_id=self.session_id, from_position=self._position, prefix_hash=self._hash, take_over=True
            )
        elif isinstance(self.request, generation_pb2.GenerateRequest) and self.request.request_id:
            # The session may have begun at a service that is gone.
            self.request.take_over |= error.reached and error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED

    def _explained(self, error: SpecwireError) -> SpecwireError:
        cause = self._cause
        if cause is None or error.code is grpc.StatusCode.DATA_LOSS:
            return error
        return SpecwireError(cause.code, f"{cause.message}; then {error}", cause.retry_after)
