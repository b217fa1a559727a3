"""The service's messages as the values of `specwire.client.events`."""

from __future__ import annotations

import time

import grpc

from specwire.client.errors import SpecwireError
from specwire.client.events import (
    ChatDelta,
    Chunk,
    DrafterStats,
    Event,
    Finished,
    PartScore,
    PromptEcho,
    Provisional,
    SamplingInForce,
    SessionState,
    Started,
    Stats,
    Step,
    TextScore,
    Timings,
    ToolCallDelta,
)
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import TokenLogprobs
from specwire.rpc.convert import logprobs_from_wire, outcomes_from_wire, reason_from_wire
from specwire.v1 import common_pb2, generation_pb2, verify_pb2

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
        delta=_delta(message),
    )


# By how a call ends on the wire.
WHOLE = {
    generation_pb2.TOOL_CALL_END_UNSPECIFIED: None,
    generation_pb2.TOOL_CALL_END_WHOLE: True,
    generation_pb2.TOOL_CALL_END_BROKEN: False,
}


def _delta(message: generation_pb2.Chunk | generation_pb2.Finished) -> ChatDelta | None:
    if not message.HasField("delta"):
        return None
    delta = message.delta
    return ChatDelta(delta.content, delta.reasoning, tuple(map(_call_delta, delta.tool_calls)))


def _call_delta(message: generation_pb2.ToolCallDelta) -> ToolCallDelta:
    if message.end not in WHOLE:
        raise InvalidParameter("end", f"{message.end} is not a known value")
    return ToolCallDelta(message.index, message.id, message.name, message.arguments, WHOLE[message.end])


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
        drafted_us=message.drafted_us,
    )


def _finished(message: generation_pb2.Finished, received_ns: int) -> Finished:
    reason = reason_from_wire(message.reason)
    if reason is None:
        raise InvalidParameter("finish_reason", "is missing")
    stats = _stats(message.stats)
    return Finished(
        reason=reason,
        message=message.message,
        text=message.text,
        text_length=message.text_length,
        stats=stats,
        received_ns=received_ns,
        lossy=message.lossy,
        delta=_delta(message),
    )


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
        drafters=tuple(map(_drafter, message.drafters)),
        cached_tokens=message.cached_tokens,
        tested=message.tested,
        tested_ngram=message.tested_ngram,
        tested_prediction=message.tested_prediction,
        forwards_saved=message.forwards_saved,
        proposed_head=message.proposed_head,
        tested_head=message.tested_head,
        accepted_head=message.accepted_head,
    )


def _drafter(message: generation_pb2.DrafterStats) -> DrafterStats:
    counts = message.proposed, message.accepted
    return DrafterStats(message.source, message.model, *counts, message.plan, message.tested)


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


def scores_from_wire(message: generation_pb2.ScoreTextResponse, wanted: int) -> list[TextScore]:
    """Raises SpecwireError (INTERNAL) for another number of scores than were asked for."""
    parts = [part for score in message.scores for part in score.parts]
    if len(message.scores) != wanted or any(len(part.tokens) != len(part.log_probabilities) for part in parts):
        raise SpecwireError(grpc.StatusCode.INTERNAL, "the service answered with another number of scores")
    return [
        TextScore(tuple(PartScore(tuple(part.tokens), tuple(part.log_probabilities)) for part in score.parts))
        for score in message.scores
    ]
