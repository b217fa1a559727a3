"""Wire <-> core. Values that the core does not allow are refused here, with the field's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isnan
from typing import Any, cast

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.core.law.sampling import LogprobsOf, Sampling, check_bias_ids, check_numbers, with_rule
from specwire.core.messages import (
    FENCE_LIMIT,
    MOST_RUN_AHEAD,
    MOST_SOURCES,
    MOST_TESTED,
    AssignedDrafter,
    FinishReason,
    Outcome,
    Pace,
    Proposal,
    SourceKind,
    SourcePace,
    TokenLogprobs,
    Verdict,
    Weights,
    parse_plan,
)
from specwire.core.text import Stopping, check_min_tokens, check_stop_ids
from specwire.v1 import common_pb2, draft_pb2, verify_pb2

# ----------------------------------------------------------------------------------------------------------------------
# Numbers on the wire. PROTOCOL.md, section 16, has the range of each, and what becomes of one beyond it.

MOST_UINT32, MOST_UINT64 = (1 << 32) - 1, (1 << 64) - 1
# Microseconds of a ledger's balance, either way: 12 days.
MOST_LEDGER_US = 1 << 40
# Log-probabilities are at most 0, but for rounding.
GREATEST_LOGPROB = 1e-3


def saturated(value: float, most: int = MOST_UINT32, least: int = 0) -> int:
    """What was measured, as it is told: a whole number in its range. What is no number counts as 0."""
    return 0 if isnan(value) else round(min(max(value, least), most))


def bounded_ledger_us(balance_us: float) -> int:
    return saturated(balance_us, MOST_LEDGER_US, -MOST_LEDGER_US)


def bounded_fence(fence: int) -> int:
    """Raises InvalidParameter."""
    if fence >= FENCE_LIMIT:
        raise InvalidParameter("fence", f"must be below {FENCE_LIMIT}, not {fence}")
    return fence


# ----------------------------------------------------------------------------------------------------------------------
# A constraint on the wire: one member of Sampling's oneof.


def constraint_to_wire(constraint: Constraint | None) -> common_pb2.Sampling:
    """A Sampling that says nothing else."""
    if constraint is None:
        return common_pb2.Sampling()
    listed = constraint.kind is ConstraintKind.CHOICES
    form: Any = common_pb2.Choices(texts=constraint.texts) if listed else constraint.text
    return common_pb2.Sampling(constraint_behind=constraint.behind, **{constraint.kind.value: form})


def constraint_from_wire(message: common_pb2.Sampling) -> Constraint | None:
    """Raises InvalidParameter."""
    name, behind = message.WhichOneof("constraint"), message.constraint_behind
    if name is None:
        if behind:
            raise InvalidParameter("constraint_behind", "needs a constraint")
        return None
    form, listed = getattr(message, name), name == ConstraintKind.CHOICES
    return Constraint(ConstraintKind(name), tuple(form.texts) if listed else (form,), behind)


def check_known(message: Message, name: str) -> None:
    """Refuse fields that this program does not know: ignoring an option would give another text than asked for."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidParameter(name, f"holds field number {unknown[0].field_number}, which this service does not know")


def sampling_to_wire(sampling: Sampling) -> common_pb2.Sampling:
    """Complete: the seed, top_p and the rule are always set."""
    message = common_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        choice=sampling.choice,
        rule=sampling.rule_name,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.repetition_penalty != 1.0 else None,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        logprobs_of=_logprobs_of_to_wire(sampling),
    )
    message.MergeFrom(constraint_to_wire(sampling.constraint))
    return message


def _logprobs_of_to_wire(sampling: Sampling) -> common_pb2.LogprobsOf:
    if sampling.logprobs is None:
        return common_pb2.LOGPROBS_OF_UNSPECIFIED
    return cast("common_pb2.LogprobsOf", int(sampling.logprobs_of))


def _logprobs_of(message: common_pb2.Sampling) -> LogprobsOf:
    if message.logprobs_of == common_pb2.LOGPROBS_OF_UNSPECIFIED:
        return LogprobsOf.MODEL
    if not message.HasField("logprobs"):
        raise InvalidParameter("logprobs_of", "says what logprobs are of, which are not asked for")
    try:
        return LogprobsOf(message.logprobs_of)
    except ValueError:
        raise InvalidParameter("logprobs_of", f"{message.logprobs_of} is not a known value") from None


def sampling_from_wire(
    message: common_pb2.Sampling, default_seed: int | None = None, vocabulary: int | None = None
) -> Sampling:
    """With its rule.

    Args:
        default_seed: taken where the message has none; None where a seed is required.
        vocabulary: ids of logit_bias must be below it; None leaves them unchecked.

    Raises:
        InvalidParameter: a value out of range, a rule that contradicts the temperature, or no seed.
    """
    check_known(message, "sampling")
    seed = message.seed if message.HasField("seed") else default_seed
    if seed is None:
        raise InvalidParameter("seed", "is required")
    sampling = Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        seed=seed,
        choice=message.choice,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        logprobs_of=_logprobs_of(message),
        constraint=constraint_from_wire(message),
    )
    if vocabulary is not None:
        check_bias_ids(sampling, vocabulary)
    return with_rule(sampling, message.rule)


def stopping_to_wire(stopping: Stopping) -> common_pb2.Stopping:
    return common_pb2.Stopping(
        max_tokens=stopping.max_tokens,
        stop_ids=sorted(stopping.stop_ids),
        ignore_eos=stopping.ignore_eos,
        min_tokens=stopping.min_tokens,
    )


def stopping_from_wire(
    message: common_pb2.Stopping, *, vocabulary: int | None = None, eos_ids: Iterable[int] = ()
) -> Stopping:
    """What ends the session.

    Args:
        vocabulary: stop ids must be below it; None leaves them unchecked.
        eos_ids: the model's.
    """
    check_known(message, "stopping")
    check_stop_ids(message.stop_ids)
    for token in message.stop_ids:
        if vocabulary is not None and token >= vocabulary:
            raise InvalidParameter("stop_ids", f"token id {token} is outside 0..{vocabulary - 1}")
    stopping = Stopping(message.max_tokens, frozenset(message.stop_ids), message.ignore_eos, message.min_tokens)
    if vocabulary is not None:
        check_min_tokens(stopping, frozenset(eos_ids), vocabulary)
    return stopping


def logprobs_to_wire(reported: Iterable[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    return [
        common_pb2.TokenLogprobs(
            logprob=each.logprob,
            top_ids=[token for token, _ in each.top],
            top_logprobs=[value for _, value in each.top],
        )
        for each in reported
    ]


def logprobs_from_wire(messages: Iterable[common_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Raises InvalidParameter where ids and values do not match, or a value is not a number."""
    return tuple(_logprobs(message) for message in messages)


def _logprobs(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    if len(message.top_ids) != len(message.top_logprobs):
        raise InvalidParameter("logprobs", f"{len(message.top_logprobs)} values for {len(message.top_ids)} ids")
    reported = TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))
    try:
        return check_numbers(reported)
    except ValueError as error:
        raise InvalidParameter("logprobs", str(error).removeprefix("logprobs: ")) from None


def proposal_to_wire(proposal: Proposal, handle: int) -> common_pb2.Proposal:
    return common_pb2.Proposal(
        handle=handle,
        source=proposal.source,
        chain=proposal.chain,
        base=proposal.base,
        offset=proposal.offset,
        tokens=proposal.tokens,
        prefix_hash=proposal.prefix_hash,
        draft_us=saturated(proposal.draft_us),
        weights=[common_pb2.DraftWeights(ids=each.ids, weights=each.weights) for each in proposal.weights],
        epoch=proposal.epoch,
        parents=[number - parent for number, parent in enumerate(proposal.parents, proposal.offset)],
    )


def proposal_from_wire(message: common_pb2.Proposal) -> Proposal:
    """A hint: nothing is refused here; `Chains.offer` judges it."""
    return Proposal(
        source=message.source,
        chain=message.chain,
        base=message.base,
        offset=message.offset,
        tokens=tuple(message.tokens),
        prefix_hash=message.prefix_hash if message.HasField("prefix_hash") else None,
        weights=tuple(Weights(tuple(each.ids), tuple(each.weights)) for each in message.weights),
        epoch=message.epoch,
        parents=tuple(number - distance for number, distance in enumerate(message.parents, message.offset)),
        draft_us=message.draft_us,
    )


def pace_to_wire(pace: Pace) -> draft_pb2.Pace:
    branches = pace.branches if pace.branches > 1 else 0
    return draft_pb2.Pace(chunk=pace.chunk, run_ahead=pace.run_ahead, branches=branches)


def pace_from_wire(message: draft_pb2.Pace) -> Pace:
    """Raises InvalidParameter, with the field's path."""
    try:
        return Pace(message.chunk, message.run_ahead, max(1, message.branches))
    except InvalidParameter as error:
        raise InvalidParameter(f"pace.{error.field}", str(error).partition(": ")[2]) from None


# Drafters of a session; characters of what one is known by, of its plan, and of why it drafts as it does, of which no
# more are kept.
MOST_DRAFTERS, MOST_KNOWN_BY, MOST_PLAN, MOST_REASON = MOST_SOURCES, 256, 32, 64


def paces_to_wire(paces: Sequence[SourcePace]) -> list[verify_pb2.SourcePace]:
    return [
        verify_pb2.SourcePace(source=each.source, pace=pace_to_wire(each.pace), reason=each.reason) for each in paces
    ]


def paces_from_wire(messages: Sequence[verify_pb2.SourcePace]) -> tuple[SourcePace, ...]:
    """Raises InvalidParameter."""
    if len(messages) > MOST_DRAFTERS:
        raise InvalidParameter("paces", f"must be at most {MOST_DRAFTERS}, not {len(messages)}")
    paces = [SourcePace(each.source, pace_from_wire(each.pace), each.reason[:MOST_REASON]) for each in messages]
    for each in paces:
        if each.pace.run_ahead > MOST_RUN_AHEAD:
            raise InvalidParameter("pace.run_ahead", f"must be at most {MOST_RUN_AHEAD}, not {each.pace.run_ahead}")
    return tuple(paces)


def drafters_to_wire(drafters: Sequence[AssignedDrafter]) -> list[verify_pb2.Drafter]:
    return [
        verify_pb2.Drafter(source=each.source, known_by=each.known_by, shares_cores=each.shares_cores, plan=each.plan)
        for each in drafters
    ]


def drafters_from_wire(messages: Sequence[verify_pb2.Drafter]) -> tuple[AssignedDrafter, ...]:
    """Raises InvalidParameter."""
    if len(messages) > MOST_DRAFTERS:
        raise InvalidParameter("drafters", f"must be at most {MOST_DRAFTERS}, not {len(messages)}")
    return tuple(map(_drafter, messages))


def _drafter(message: verify_pb2.Drafter) -> AssignedDrafter:
    if len(message.known_by) > MOST_KNOWN_BY:
        told = f"must have at most {MOST_KNOWN_BY} characters, not {len(message.known_by)}"
        raise InvalidParameter("known_by", told)
    if len(message.plan) > MOST_PLAN:
        raise InvalidParameter("plan", f"must have at most {MOST_PLAN} characters, not {len(message.plan)}")
    plan = message.plan or "auto"
    parse_plan(plan)
    return AssignedDrafter(message.source, message.known_by, message.shares_cores, plan)


def verdict_to_wire(verdict: Verdict, handle: int, attach: int) -> verify_pb2.Verdict:
    return verify_pb2.Verdict(
        handle=handle,
        attach=attach,
        position=verdict.position,
        tokens=verdict.tokens,
        outcomes=outcomes_to_wire(verdict.outcomes),
        tested=verdict.width,
        finish_reason=reason_to_wire(verdict.finish),
        ledger_us=bounded_ledger_us(verdict.ledger_us),
        kind=cast("common_pb2.SourceKind", int(verdict.kind) if verdict.width else 0),
        source=verdict.source if verdict.width else 0,
        met=verdict.met,
        logprobs=logprobs_to_wire(verdict.logprobs),
        paces=paces_to_wire(verdict.paces),
    )


def verdict_from_wire(
    message: verify_pb2.Verdict, wanted: int | None = None, vocabulary: int = MOST_UINT32 + 1
) -> Verdict:
    """Raises InvalidParameter where a number is out of range, or outcomes, log-probabilities or reason are invalid.

    wanted: Sampling.logprobs of the session. vocabulary: ids are below it.
    """
    _check_ids("tokens", message.tokens, vocabulary)
    if message.tested > MOST_TESTED:
        raise InvalidParameter("tested", f"must be at most {MOST_TESTED}, not {message.tested}")
    if len(message.outcomes) != len(message.tokens):
        raise InvalidParameter("outcomes", f"{len(message.outcomes)} for {len(message.tokens)} tokens")
    outcomes = outcomes_from_wire(message.outcomes)
    if len(message.logprobs) != (0 if wanted is None else len(message.tokens)):
        told = f"{len(message.logprobs)} for {len(message.tokens)} tokens, {wanted} asked for"
        raise InvalidParameter("logprobs", told)
    return Verdict(
        message.position,
        tuple(message.tokens),
        outcomes,
        message.tested,
        reason_from_wire(message.finish_reason),
        kind_from_wire(message.kind),
        message.source,
        () if wanted is None else _reported(message, wanted, vocabulary),
        message.met,
        bounded_ledger_us(message.ledger_us),
        paces_from_wire(message.paces) if message.paces else (),
    )


def _reported(message: verify_pb2.Verdict, wanted: int, vocabulary: int) -> tuple[TokenLogprobs, ...]:
    for each in message.logprobs:
        _check_ids("logprobs", each.top_ids, vocabulary)
        greatest = max(each.logprob, *each.top_logprobs, -inf)
        if greatest > GREATEST_LOGPROB:
            raise InvalidParameter("logprobs", f"must be at most 0, not {greatest}")
    logprobs = logprobs_from_wire(message.logprobs)
    if any(len(each.top) > wanted for each in logprobs):
        raise InvalidParameter("logprobs", f"more than the {wanted} ids that were asked for")
    return logprobs


def _check_ids(field: str, ids: Sequence[int], vocabulary: int) -> None:
    if ids and max(ids) >= vocabulary:
        raise InvalidParameter(field, f"token id {max(ids)} is outside 0..{vocabulary - 1}")


def outcomes_to_wire(outcomes: Iterable[Outcome]) -> list[common_pb2.Outcome]:
    return cast(list[common_pb2.Outcome], list(outcomes))  # the numbers are those of the wire


def outcomes_from_wire(values: Sequence[int]) -> tuple[Outcome, ...]:
    """Raises InvalidParameter for a number that is no outcome."""
    try:
        return tuple(map(Outcome, values))
    except ValueError as error:
        raise InvalidParameter("outcomes", str(error)) from None


_KINDS = frozenset(SourceKind)


def kind_from_wire(value: int) -> SourceKind:
    """Unknown ones count as drafters, so that a newer verifier's do no harm."""
    return SourceKind(value) if value in _KINDS else SourceKind.DRAFTER


def reason_to_wire(reason: FinishReason | None) -> common_pb2.FinishReason:
    """None is FINISH_REASON_UNSPECIFIED: not finished."""
    return cast(common_pb2.FinishReason, int(reason or 0))


def reason_from_wire(value: int) -> FinishReason | None:
    """Raises InvalidParameter for a number that is no reason."""
    if value == 0:
        return None
    try:
        return FinishReason(value)
    except ValueError as error:
        raise InvalidParameter("finish_reason", str(error)) from None
