"""Messages of VerifyService <-> commands and reports. What is invalid is refused here, with the field's name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc

from specwire.core.invalid import Code, InvalidParameter, check_prediction
from specwire.core.placement import check_priority
from specwire.core.stop_conditions import Stopping, check_constraint
from specwire.core.verify.session import Allowance
from specwire.rpc.convert import (
    proposal_from_wire,
    sampling_from_wire,
    stopping_from_wire,
    verdict_to_wire,
)
from specwire.rpc.errors import StatusError
from specwire.v1 import common_pb2, verify_pb2
from verify_service.engine.messages import Admitted, EarlierText, Opening, Proposed, Refusal, Report, StepTimings, Tick

MOST_SESSION_ID = 256
MOST_SCOPE = 64
SHOWN_HEX = 12


def tick_from_wire(
    link: int,
    message: verify_pb2.ConnectVerifyRequest,
    info: common_pb2.GetModelInfoResponse,
    now_us: float,
    tenant: str = "",
) -> tuple[Tick, list[Refusal]]:
    """One message of a link as a command; refused opens count as closed, so that nothing stays under their handles.

    tenant: whose link it is. Sessions and cached prefixes of other tenants are as if they were not there, whatever ids
    and scopes it names.
    """
    opens: list[Opening] = []
    refusals: list[Refusal] = []
    for opening in message.opens:
        try:
            opens.append(opening_from_wire(opening, info, now_us, tenant))
        except InvalidParameter as error:
            refusals.append(Refusal(opening.handle, Code.INVALID_ARGUMENT, str(error)))
        except StatusError as error:
            refusals.append(Refusal(opening.handle, Code.FAILED_PRECONDITION, error.message))
    tick = Tick(
        link,
        now_us,
        tuple(opens),
        tuple(Proposed(proposal.handle, proposal_from_wire(proposal)) for proposal in message.proposals),
        tuple((progress.handle, allowance_from_wire(progress)) for progress in message.progress),
        (*(close.handle for close in message.closes), *(refusal.handle for refusal in refusals)),
        tuple(own_id(tenant, session_id) for session_id in message.forgotten),
        tuple(_texts_from_wire(message.texts, info, tenant)),
    )
    return tick, refusals


def _texts_from_wire(
    texts: Sequence[verify_pb2.EarlierText], info: common_pb2.GetModelInfoResponse, tenant: str
) -> Iterator[EarlierText]:
    """Those that are valid: they are hints, and nobody waits for an answer."""
    for text in texts:
        identified = 1 <= len(text.session_id) <= MOST_SESSION_ID and 1 <= len(text.cache_scope) <= MOST_SCOPE
        ours = text.vocabulary_fingerprint == info.vocabulary_fingerprint
        if identified and ours and 1 <= len(text.tokens) <= info.context and max(text.tokens) < info.vocabulary:
            scope = own_scope(tenant, text.cache_scope)
            yield EarlierText(own_id(tenant, text.session_id), scope, tuple(text.tokens))


def opening_from_wire(
    message: verify_pb2.Open, info: common_pb2.GetModelInfoResponse, now_us: float = 0.0, tenant: str = ""
) -> Opening:
    """Raises InvalidParameter, or StatusError (FAILED_PRECONDITION) for another vocabulary."""
    check_vocabulary(message.vocabulary_fingerprint, info.vocabulary_fingerprint)
    if not 1 <= len(message.session_id) <= MOST_SESSION_ID:
        raise InvalidParameter(
            "session_id", f"must have 1 to {MOST_SESSION_ID} characters, not {len(message.session_id)}"
        )
    check_tokens(message.tokens, info.vocabulary, 1, info.context - 1)
    if not 1 <= message.prompt_length <= len(message.tokens):
        raise InvalidParameter(
            "prompt_length", f"must be from 1 to the {len(message.tokens)} tokens, not {message.prompt_length}"
        )
    sampling, stopping = sampling_from_wire(message.sampling, vocabulary=info.vocabulary)[0], _stopping(message, info)
    check_constraint(sampling.constraint, stopping, info.eos_ids)
    return Opening(
        message.handle,
        own_id(tenant, message.session_id),
        message.fence,
        message.attach,
        tuple(message.tokens),
        message.prompt_length,
        sampling,
        stopping,
        allowance_from_wire(message.progress),
        now_us + message.deadline_ms * 1000.0 if message.deadline_ms else None,
        message.ledger_us,
        not message.no_ngram,
        message.epoch,
        own_scope(tenant, _scope(message.cache_scope)),
        check_priority(message.priority),
        check_prediction(message.prediction, info.vocabulary, info.context),
        # An older orchestrator knows of n-grams only, and who turns these off means any guess of the verifier's.
        not message.no_head and (message.head_alone or not message.no_ngram),
        tenant,
        message.share_text,
    )


def own_id(tenant: str, session_id: str) -> str:
    """The engine's id of a tenant's session."""
    return f"{tenant}\n{session_id}" if tenant else session_id


def own_scope(tenant: str, scope: bytes) -> bytes:
    return b"%b\n%b" % (tenant.encode(), scope) if tenant and scope else scope


def _scope(scope: bytes) -> bytes:
    if len(scope) > MOST_SCOPE:
        raise InvalidParameter("cache_scope", f"must have at most {MOST_SCOPE} bytes, not {len(scope)}")
    return scope


def _stopping(message: verify_pb2.Open, info: common_pb2.GetModelInfoResponse) -> Stopping:
    if not message.HasField("progress"):
        raise InvalidParameter("progress", "is required")
    return stopping_from_wire(message.stopping, vocabulary=info.vocabulary, eos_ids=info.eos_ids)


def check_vocabulary(theirs: str, ours: str) -> None:
    if theirs != ours:
        raise StatusError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"vocabulary_fingerprint: the session's vocabulary is {theirs[:SHOWN_HEX] or '(none)'}, "
            f"this target's is {ours[:SHOWN_HEX]}",
        )


def check_tokens(tokens: Sequence[int], vocabulary: int, least: int, most: int) -> None:
    if not least <= len(tokens) <= most:
        raise InvalidParameter("tokens", f"must be from {least} to {most} tokens, not {len(tokens)}")
    if max(tokens) >= vocabulary:
        raise InvalidParameter("tokens", f"token id {max(tokens)} is outside 0..{vocabulary - 1}")


def allowance_from_wire(message: verify_pb2.Progress) -> Allowance:
    return Allowance(message.durable, message.credit, message.due)


def report_to_wire(report: Report) -> verify_pb2.ConnectVerifyResponse:
    return verify_pb2.ConnectVerifyResponse(
        opened=[_opened(each) for each in report.admitted],
        verdicts=[verdict_to_wire(each.verdict, each.handle, each.attach) for each in report.decided],
        refused=[refusal_to_wire(each) for each in report.refused],
        timings=_timings(report.timings) if report.timings else None,
    )


def refusal_to_wire(refusal: Refusal) -> common_pb2.Refused:
    return common_pb2.Refused(
        handle=refusal.handle,
        code=int(refusal.code),
        message=refusal.message,
        fence=refusal.fence,
        retry_after_ms=refusal.retry_ms,
    )


def _opened(admitted: Admitted) -> verify_pb2.Opened:
    return verify_pb2.Opened(
        handle=admitted.handle,
        attach=admitted.attach,
        position=admitted.position,
        resumed=admitted.resumed,
        tail=[verdict_to_wire(each.verdict, each.handle, each.attach) for each in admitted.tail],
        cached=admitted.cached,
    )


def _timings(timings: StepTimings) -> verify_pb2.StepTimings:
    return verify_pb2.StepTimings(
        step=timings.step,
        sessions=timings.sessions,
        rows=timings.rows,
        forward_us=timings.forward_us,
        choose_us=timings.choose_us,
        gap_us=timings.gap_us,
        waited_us=timings.waited_us,
        forward_ended_ns=timings.forward_ended_ns,
        plain_us=timings.plain_us,
        drafts_us=timings.drafts_us,
        drafted_us=timings.drafted_us,
    )
