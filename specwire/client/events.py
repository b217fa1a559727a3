"""What the service says, as values. `received_ns` is this process's monotonic clock when the message was read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import grpc

from specwire.client.errors import SpecwireError
from specwire.core.acceptance import Outcome
from specwire.core.limits import FinishReason
from specwire.core.logprobs import TokenLogprobs
from specwire.core.sampling import InvalidParameter
from specwire.rpc.convert import logprobs_from_wire, outcomes_from_wire, reason_from_wire
from specwire.v1 import common_pb2, generation_pb2, verify_pb2


@dataclass(frozen=True, slots=True)
class SamplingInForce:
    """How tokens are drawn, with the seed and the rule filled in by the service."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    rule: str
    choice: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """What the output goes on behind."""

    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Started:
    """The session exists; whoever knows `session_id` may watch and cancel it.

    prompt_hash: `specwire.core.text.hash_of` the prompt's tokens; None from a service that does not say.
    prompt: only where it was asked for (`echo`). lossy: the rule, asked for by name, may change the text.
    """

    session_id: str
    prompt_tokens: int
    sampling: SamplingInForce
    received_ns: int
    prompt_hash: int | None = None
    prompt: PromptEcho | None = None
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the verifier, `number` since its start; times in microseconds. See StepTimings in verify.proto."""

    number: int
    sessions: int
    rows: int
    forward_us: int
    choose_us: int
    gap_us: int
    waited_us: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Nanoseconds on the hosts' monotonic clocks; comparable only between processes of one machine.

    step: the one that decided the chunk's newest token.
    """

    forward_ended_ns: int
    verdict_received_ns: int
    durable_ns: int
    emitted_ns: int
    step: Step


@dataclass(frozen=True, slots=True)
class Chunk:
    """Durable tokens at absolute positions position, position + 1, ... and the text that they release.

    text_ends: for each token, where its text ends in the whole output, in code points.
    logprobs: one per token where they were asked for, else none.
    """

    position: int
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    text: str
    text_ends: tuple[int, ...]
    timings: Timings | None
    received_ns: int
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Provisional:
    """A drafter's guess at what follows the Chunks until now, which end at `position`, and their released text.

    Not part of the completion. It replaces the one before and holds until the next Chunk or Finished.
    No tokens: nothing is provisional any more.
    """

    position: int
    tokens: tuple[int, ...]
    text: str
    received_ns: int


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """What one drafter did for a session; see DrafterStats in generation.proto."""

    source: int
    model: str
    proposed: int
    accepted: int
    plan: str


@dataclass(frozen=True, slots=True)
class Stats:
    """A session's figures; see Stats in generation.proto. Times in microseconds."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    target_forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    direct: int = 0
    time_to_first_token_us: int = 0
    duration_us: int = 0
    tested_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    proposed_ngram: int = 0
    accepted_ngram: int = 0
    proposed_prediction: int = 0
    accepted_prediction: int = 0
    plan: str = ""
    drafters: tuple[DrafterStats, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The session is over; `text` is what was withheld until now, `message` says what failed with reason ERROR."""

    reason: FinishReason
    message: str
    text: str
    text_length: int
    stats: Stats
    received_ns: int
    lossy: bool = False


Event = Started | Chunk | Provisional | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation. lossy: its rule, asked for by name, may have changed the text."""

    session_id: str
    prompt_tokens: int
    sampling: SamplingInForce
    text: str
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    finish_reason: FinishReason
    message: str
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: PromptEcho | None = None
    lossy: bool = False

    @property
    def seed(self) -> int:
        return self.sampling.seed


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session as the log has it: `tokens` begin with the prompt; finish_reason None while it runs.

    durability: what the log survives, by name. created, ended: Unix time in seconds; ended is None while it runs.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    fence: int
    durability: str = ""
    created: float = 0.0
    ended: float | None = None
    lossy: bool = False


@dataclass(slots=True)
class Gathering:
    """Events of one stream on their way to a Completion; provisional ones are no part of it."""

    started: Started | None = None
    finished: Finished | None = None
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case Chunk():
                self.texts.append(event.text)
                self.tokens += event.tokens
                self.outcomes += event.outcomes
                self.logprobs += event.logprobs
            case Finished():
                self.texts.append(event.text)
                self.finished = event

    def completion(self) -> Completion:
        if self.started is None or self.finished is None:
            raise SpecwireError(grpc.StatusCode.DATA_LOSS, "the stream ended before the session was finished")
        return Completion(
            session_id=self.started.session_id,
            prompt_tokens=self.started.prompt_tokens,
            sampling=self.started.sampling,
            text="".join(self.texts),
            tokens=tuple(self.tokens),
            outcomes=tuple(self.outcomes),
            finish_reason=self.finished.reason,
            message=self.finished.message,
            stats=self.finished.stats,
            logprobs=tuple(self.logprobs),
            prompt=self.started.prompt,
            lossy=self.started.lossy or self.finished.lossy,
        )


Response = generation_pb2.GenerateResponse | generation_pb2.WatchResponse


def event_from_wire(message: Response) -> Event:
    """Raises SpecwireError (INTERNAL) for a message that the protocol does not allow."""
    received_ns = time.monotonic_ns()
    kind = message.WhichOneof("event")
    if kind == "provisional" and isinstance(message, generation_pb2.GenerateResponse):
        return _provisional(message.provisional, received_ns)
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


def _started(message: generation_pb2.Started, received_ns: int) -> Started:
    prompt_hash = message.prompt_hash if message.HasField("prompt_hash") else None
    prompt = PromptEcho(tuple(message.prompt.tokens), message.prompt.text) if message.HasField("prompt") else None
    sampling = _sampling(message.sampling)
    return Started(message.session_id, message.prompt_tokens, sampling, received_ns, prompt_hash, prompt, message.lossy)


def _sampling(message: common_pb2.Sampling) -> SamplingInForce:
    top_p = message.top_p if message.HasField("top_p") else 1.0
    return SamplingInForce(
        message.temperature,
        message.top_k,
        top_p,
        message.seed,
        message.rule,
        choice=message.choice,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def _chunk(message: generation_pb2.Chunk, received_ns: int) -> Chunk:
    return Chunk(
        position=message.position,
        tokens=tuple(message.tokens),
        outcomes=outcomes_from_wire(message.outcomes),
        text=message.text,
        text_ends=tuple(message.text_ends),
        timings=_timings(message.timings) if message.HasField("timings") else None,
        received_ns=received_ns,
        logprobs=_logprobs(message),
    )


def _logprobs(message: generation_pb2.Chunk) -> tuple[TokenLogprobs, ...]:
    if len(message.logprobs) not in (0, len(message.tokens)):
        raise InvalidParameter("logprobs", f"{len(message.logprobs)} for {len(message.tokens)} tokens")
    return logprobs_from_wire(message.logprobs)


def _provisional(message: generation_pb2.Provisional, received_ns: int) -> Provisional:
    return Provisional(message.position, tuple(message.tokens), message.text, received_ns)


def _timings(message: generation_pb2.ChunkTimings) -> Timings:
    return Timings(
        message.forward_ended_ns,
        message.verdict_received_ns,
        message.durable_ns,
        message.emitted_ns,
        _step(message.step),
    )


def _step(message: verify_pb2.StepTimings) -> Step:
    return Step(
        number=message.step,
        sessions=message.sessions,
        rows=message.rows,
        forward_us=message.forward_us,
        choose_us=message.choose_us,
        gap_us=message.gap_us,
        waited_us=message.waited_us,
    )


def _finished(message: generation_pb2.Finished, received_ns: int) -> Finished:
    reason = reason_from_wire(message.reason)
    if reason is None:
        raise InvalidParameter("finish_reason", "is missing")
    stats = _stats(message.stats)
    return Finished(reason, message.message, message.text, message.text_length, stats, received_ns, message.lossy)


def _stats(message: generation_pb2.Stats) -> Stats:
    return Stats(
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        target_forwards=message.target_forwards,
        proposed=message.proposed,
        accepted=message.accepted,
        recovered=message.recovered,
        bonus=message.bonus,
        direct=message.direct,
        time_to_first_token_us=message.time_to_first_token_us,
        duration_us=message.duration_us,
        tested_at=tuple(message.tested_at),
        accepted_at=tuple(message.accepted_at),
        proposed_ngram=message.proposed_ngram,
        accepted_ngram=message.accepted_ngram,
        proposed_prediction=message.proposed_prediction,
        accepted_prediction=message.accepted_prediction,
        plan=message.plan,
        drafters=tuple(DrafterStats(d.source, d.model, d.proposed, d.accepted, d.plan) for d in message.drafters),
        cached_tokens=message.cached_tokens,
    )


def session_from_wire(message: generation_pb2.GetSessionResponse) -> SessionState:
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
