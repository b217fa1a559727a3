"""Wire <-> core. What the wire may hold and the core may not is refused here, with the field's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from specwire.core.acceptance import Outcome
from specwire.core.chain import Proposal, SourceKind
from specwire.core.limits import FinishReason, Stopping
from specwire.core.sampling import InvalidParameter, Rule, Sampling, resolve_rule
from specwire.v1 import common_pb2

SAMPLING_TO_COME = frozenset(
    {
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "logprobs_of",
    }
)
STOPPING_TO_COME = frozenset({"min_tokens"})


def _refuse_missing(message: common_pb2.Sampling | common_pb2.Stopping, fields: frozenset[str]) -> None:
    for field, value in message.ListFields():
        if field.name in fields:
            raise InvalidParameter(field.name, f"is not served yet, so it cannot be {value}")


def sampling_to_wire(sampling: Sampling, rule: Rule | None = None) -> common_pb2.Sampling:
    """Complete: the seed, top_p and the rule (the temperature's own unless given) are always set."""
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        choice=sampling.choice,
        rule=rule or sampling.rule,
    )


def sampling_from_wire(message: common_pb2.Sampling, default_seed: int | None = None) -> tuple[Sampling, Rule]:
    """The sampling and its rule.

    Args:
        default_seed: taken where the message has none; None where a seed is required.

    Raises:
        InvalidParameter: a value out of range, a rule that contradicts the temperature, or no seed.
    """
    _refuse_missing(message, SAMPLING_TO_COME)
    seed = message.seed if message.HasField("seed") else default_seed
    if seed is None:
        raise InvalidParameter("seed", "is required")
    sampling = Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        seed=seed,
        choice=message.choice,
    )
    return sampling, resolve_rule(message.rule, sampling)


def stopping_to_wire(stopping: Stopping) -> common_pb2.Stopping:
    return common_pb2.Stopping(
        max_tokens=stopping.max_tokens, stop_ids=sorted(stopping.stop_ids), ignore_eos=stopping.ignore_eos
    )


def stopping_from_wire(
    message: common_pb2.Stopping, *, default_max_tokens: int = 0, vocabulary: int | None = None
) -> Stopping:
    """What ends the session.

    Args:
        default_max_tokens: taken where the message says 0; 0 leaves 0 invalid.
        vocabulary: stop ids must be below it; None leaves them unchecked.
    """
    _refuse_missing(message, STOPPING_TO_COME)
    for token in message.stop_ids:
        if vocabulary is not None and token >= vocabulary:
            raise InvalidParameter("stop_ids", f"token id {token} is outside 0..{vocabulary - 1}")
    return Stopping(message.max_tokens or default_max_tokens, frozenset(message.stop_ids), message.ignore_eos)


def proposal_to_wire(proposal: Proposal, handle: int, draft_us: int = 0) -> common_pb2.Proposal:
    return common_pb2.Proposal(
        handle=handle,
        source=proposal.source,
        chain=proposal.chain,
        base=proposal.base,
        offset=proposal.offset,
        tokens=proposal.tokens,
        prefix_hash=proposal.prefix_hash,
        draft_us=draft_us,
        expected=proposal.expected,
    )


def proposal_from_wire(message: common_pb2.Proposal) -> Proposal:
    """A hint: nothing is refused here; `Chains.offer` judges it. An impossible estimate (NaN included) is none."""
    possible = 0.0 <= message.expected <= len(message.tokens)
    return Proposal(
        source=message.source,
        chain=message.chain,
        base=message.base,
        offset=message.offset,
        tokens=tuple(message.tokens),
        prefix_hash=message.prefix_hash if message.HasField("prefix_hash") else None,
        expected=message.expected if possible else 0.0,
    )


def outcomes_to_wire(outcomes: Iterable[Outcome]) -> list[common_pb2.Outcome]:
    return cast(list[common_pb2.Outcome], list(outcomes))  # the numbers are those of the wire


def outcomes_from_wire(values: Sequence[int]) -> tuple[Outcome, ...]:
    """Raises InvalidParameter for a number that is no outcome."""
    try:
        return tuple(map(Outcome, values))
    except ValueError as error:
        raise InvalidParameter("outcomes", str(error)) from None


def kind_to_wire(kind: SourceKind) -> common_pb2.SourceKind:
    return cast("common_pb2.SourceKind", int(kind))


def kind_from_wire(value: int) -> SourceKind:
    """Unknown ones count as drafters, so that a newer verifier's do no harm."""
    return SourceKind.NGRAM if value == common_pb2.SOURCE_KIND_NGRAM else SourceKind.DRAFTER


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
