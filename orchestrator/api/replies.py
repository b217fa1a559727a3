"""From a session's output to the events of a client's stream."""

from __future__ import annotations

import time

from orchestrator.session.output import OutputTimings, SessionView
from orchestrator.session.stats import DrafterCounts, SessionStats
from specwire.core.messages import Emit, End, Outcome, SourceKind
from specwire.core.provisional import ProvisionalDraft
from specwire.rpc import convert
from specwire.v1 import generation_pb2 as pb


def started(view: SessionView, prompt: pb.Prompt | None = None) -> pb.Started:
    record = view.record
    return pb.Started(
        session_id=record.session_id,
        prompt_tokens=len(record.prompt),
        sampling=convert.sampling_to_wire(record.sampling),
        prompt_hash=view.prompt_hash,
        prompt=prompt,
        lossy=record.sampling.lossy,
    )


Part = pb.Started | pb.Chunk | pb.Provisional | pb.Finished


def generate_response(part: Part, choice: int = 0) -> pb.GenerateResponse:
    match part:
        case pb.Started():
            return pb.GenerateResponse(started=part, choice=choice)
        case pb.Chunk():
            return pb.GenerateResponse(chunk=part, choice=choice)
        case pb.Provisional():
            return pb.GenerateResponse(provisional=part, choice=choice)
        case pb.Finished():
            return pb.GenerateResponse(finished=part, choice=choice)


def watch_response(part: Part) -> pb.WatchResponse:
    """Refuse provisional events for `Watch`: asking for them is a programming error."""
    match part:
        case pb.Started():
            return pb.WatchResponse(started=part)
        case pb.Chunk():
            return pb.WatchResponse(chunk=part)
        case pb.Finished():
            return pb.WatchResponse(finished=part)
        case pb.Provisional():
            raise TypeError("Watch has no provisional text")


def provisional(known: ProvisionalDraft) -> pb.Provisional:
    return pb.Provisional(position=known.position, tokens=known.tokens, text=known.text)


def chunk(piece: Emit, way: OutputTimings | None, delta: pb.ChatDelta | None = None) -> pb.Chunk:
    count = piece.outcomes.count
    return pb.Chunk(
        position=piece.position,
        tokens=piece.tokens,
        outcomes=convert.outcomes_to_wire(piece.outcomes),
        text=piece.text,
        text_ends=piece.text_ends,
        accepted=count(Outcome.ACCEPTED),
        recovered=count(Outcome.RECOVERED),
        bonus=count(Outcome.BONUS),
        direct=count(Outcome.DIRECT),
        timings=None if way is None else timings(way),
        logprobs=convert.logprobs_to_wire(piece.logprobs),
        delta=delta,
    )


def timings(known: OutputTimings) -> pb.ChunkTimings:
    return pb.ChunkTimings(
        forward_ended_ns=known.step.forward_ended_ns,
        verdict_received_ns=known.verdict_received_ns,
        durable_ns=known.durable_ns,
        emitted_ns=time.monotonic_ns(),
        step=known.step,
    )


def finished(view: SessionView, end: End, text: str, delta: pb.ChatDelta | None = None) -> pb.Finished:
    return pb.Finished(
        reason=convert.reason_to_wire(end.reason),
        message=end.message,
        text=text,
        text_length=end.text_length,
        stats=stats(view.stats, len(view.record.prompt)),
        lossy=view.record.sampling.lossy,
        delta=delta,
    )


def stats(known: SessionStats, prompt_tokens: int) -> pb.Stats:
    outcomes, shown = known.outcomes, known.shown
    ngram, prediction, head = (
        known.drafts[kind] for kind in (SourceKind.NGRAM, SourceKind.PREDICTION, SourceKind.HEAD)
    )
    ended = known.started if known.ended is None else known.ended
    first = known.first_token if known.first_token is not None and known.is_first else known.started
    positions = max((i + 1 for i, n in enumerate(known.tested_at) if n), default=0)
    return pb.Stats(
        prompt_tokens=prompt_tokens,
        output_tokens=outcomes.total(),
        target_forwards=known.target_forwards + known.forwards_elsewhere,
        forwards_saved=known.forwards_saved,
        proposed=shown.proposed,
        tested=shown.tested,
        accepted=shown.accepted,
        recovered=outcomes[Outcome.RECOVERED],
        bonus=outcomes[Outcome.BONUS],
        direct=outcomes[Outcome.DIRECT],
        time_to_first_token_us=int((first - known.started) * 1e6),
        duration_us=int((ended - known.started) * 1e6),
        tested_at=known.tested_at[:positions],
        accepted_at=known.accepted_at[:positions],
        proposed_ngram=ngram.proposed,
        tested_ngram=ngram.tested,
        accepted_ngram=ngram.accepted,
        proposed_prediction=prediction.proposed,
        tested_prediction=prediction.tested,
        accepted_prediction=prediction.accepted,
        proposed_head=head.proposed,
        tested_head=head.tested,
        accepted_head=head.accepted,
        plan=known.plan,
        drafters=[_drafter(each) for each in known.drafters],
        cached_tokens=known.cached_tokens,
    )


def _drafter(known: DrafterCounts) -> pb.DrafterStats:
    drafts = known.drafts
    return pb.DrafterStats(
        source=known.source,
        model=known.model,
        proposed=drafts.proposed,
        tested=drafts.tested,
        accepted=drafts.accepted,
        plan=known.plan,
    )
