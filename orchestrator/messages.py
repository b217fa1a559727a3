"""One session's effects as messages for its verifier and its drafter, and their verdicts as events."""

from __future__ import annotations

from orchestrator.store import SessionRecord
from specwire.core.acceptance import window_counts
from specwire.core.chain import SourceKind
from specwire.core.contention import Forward
from specwire.core.drafting import Pace
from specwire.core.effects import AdvanceDrafter, OpenDrafter, OpenVerifier, SendProgress
from specwire.core.epoch import epoch_of
from specwire.core.events import VerdictArrived
from specwire.core.planner import PlannedVerdict
from specwire.core.sampling import InvalidParameter
from specwire.rpc import convert
from specwire.v1 import draft_pb2, verify_pb2


def open_verifier(
    effect: OpenVerifier,
    record: SessionRecord,
    handle: int,
    fence: int,
    ledger_us: int,
    deadline: float | None,
    scope: bytes,
) -> verify_pb2.Open:
    """`deadline`: seconds left, None for none. `scope`: of the cache."""
    return verify_pb2.Open(
        handle=handle,
        session_id=record.session_id,
        fence=fence,
        attach=effect.attach,
        tokens=effect.tokens,
        prompt_length=len(record.prompt),
        sampling=convert.sampling_to_wire(record.sampling),
        stopping=convert.stopping_to_wire(record.stopping),
        progress=progress(effect, handle),
        deadline_ms=0 if deadline is None else max(1, int(deadline * 1000)),
        vocabulary_fingerprint=record.vocabulary_fingerprint,
        ledger_us=ledger_us,
        no_ngram=not record.ngram,
        prediction=record.prediction,
        epoch=epoch(record, fence, effect.attach),
        cache_scope=scope,
        priority=record.priority,
    )


def progress(effect: OpenVerifier | SendProgress, handle: int) -> verify_pb2.Progress:
    return verify_pb2.Progress(handle=handle, durable=effect.durable, credit=effect.credit, due=effect.due)


def epoch(record: SessionRecord, fence: int, attach: int) -> int:
    """What names the randomness of this connection generation, under rules that need one; else 0."""
    return epoch_of(fence, attach) if record.sampling.weighed else 0


def open_drafter(effect: OpenDrafter, record: SessionRecord, handle: int, epoch: int) -> draft_pb2.OpenDraft:
    return draft_pb2.OpenDraft(
        handle=handle,
        tokens=effect.tokens,
        sampling=convert.sampling_to_wire(record.sampling),
        vocabulary_fingerprint=record.vocabulary_fingerprint,
        pace=_pace(effect.pace),
        epoch=epoch,
        prompt_length=len(record.prompt),
    )


def advance(effect: AdvanceDrafter, handle: int, epoch: int) -> draft_pb2.Advance:
    pace = _pace(effect.pace)
    return draft_pb2.Advance(handle=handle, position=effect.position, tokens=effect.tokens, pace=pace, epoch=epoch)


def _pace(pace: Pace) -> draft_pb2.Pace:
    return draft_pb2.Pace(chunk=pace.chunk, run_ahead=pace.run_ahead, confidence_floor=pace.confidence_floor)


def verdict_event(verdict: verify_pb2.Verdict, wanted: int | None = None) -> VerdictArrived:
    """Raises InvalidParameter where outcomes, log-probabilities or reason are none, or do not match the tokens.

    wanted: Sampling.logprobs of the session.
    """
    outcomes = convert.outcomes_from_wire(verdict.outcomes)
    if len(outcomes) != len(verdict.tokens):
        raise InvalidParameter("outcomes", f"{len(outcomes)} for {len(verdict.tokens)} tokens")
    logprobs = convert.logprobs_from_wire(verdict.logprobs)
    if len(logprobs) != (0 if wanted is None else len(verdict.tokens)):
        raise InvalidParameter("logprobs", f"{len(logprobs)} for {len(verdict.tokens)} tokens, {wanted} asked for")
    if any(len(each.top) > (wanted or 0) for each in logprobs):
        raise InvalidParameter("logprobs", f"more than the {wanted} ids that were asked for")
    reason = convert.reason_from_wire(verdict.finish_reason)
    kind = convert.kind_from_wire(verdict.kind)
    return VerdictArrived(verdict.attach, verdict.position, tuple(verdict.tokens), outcomes, reason, kind, logprobs)


def forward_of(step: verify_pb2.StepTimings, received_ns: int) -> Forward | None:
    """The forward that a verdict came from; None if it was not of one session alone."""
    took_us = step.forward_us + step.choose_us
    return Forward(step.rows, received_ns / 1000, took_us) if step.sessions == 1 and took_us else None


def decided(event: VerdictArrived, verdict: verify_pb2.Verdict, source: int, forward: Forward | None) -> PlannedVerdict:
    """A verdict as the planner of `source` is told of it: what was tested of others is not its drafter's doing."""
    drafted = event.kind is SourceKind.DRAFTER and verdict.source == source
    # Behind the text's end nothing was tested, nor refused.
    width = min(verdict.tested, len(event.tokens)) if drafted else 0
    accepted = window_counts(event.outcomes, width).accepted
    delay_us = verdict.proposal_delay_us if verdict.answered == source else 0
    return PlannedVerdict(event.position, event.tokens, width, accepted, delay_us, forward)
