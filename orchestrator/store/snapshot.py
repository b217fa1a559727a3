"""From SNAPSHOT's reply to a log. Whoever can write to Redis can write anything there, so nothing is taken on trust."""

from __future__ import annotations

from typing import TypeAlias, cast

from orchestrator.store.base import LogTail, StoredSession
from orchestrator.store.encoding import (
    MOST_WHOLE,
    TOKEN_BYTES,
    bounded,
    decode_record,
    unpack_logprobs,
    unpack_outcomes,
    unpack_tokens,
)
from orchestrator.store.errors import DamagedLog
from orchestrator.store.lanes import Reply
from orchestrator.store.scripts import LIFETIME_MS
from specwire.core.limits import FinishReason

US = 1e6
# Fences and instants in microseconds: what a Lua number holds exactly.
MOST_FENCE = 1 << 53
# Of the fields, those that every log has.
NEEDED = 6
# Of the reply: fields, what is left of the time to live in ms, tokens, outcomes, logprobs, bytes of all tokens.
Parts: TypeAlias = tuple[list[bytes], int, bytes, bytes, list[bytes], int]


def stored_session(session_id: str, reply: Reply) -> StoredSession:
    """Raises DamagedLog, which says what of it cannot be read."""
    try:
        return _decoded(session_id, reply)
    except (ValueError, OverflowError, RecursionError) as error:
        raise DamagedLog(f"session {session_id}: its log cannot be read: {error}") from None


def stored_tail(session_id: str, reply: Reply, skipped: int) -> LogTail:
    """Of a snapshot without the first `skipped` tokens of the output. Raises DamagedLog."""
    try:
        return _tail(reply, skipped)
    except (ValueError, OverflowError) as error:
        raise DamagedLog(f"session {session_id}: its log cannot be read: {error}") from None


def _tail(reply: Reply, skipped: int) -> LogTail:
    fields, left_ms, packed_tokens, packed_outcomes, packed_logprobs, size = cast(Parts, reply[1:])
    if None in fields[:NEEDED] or None in packed_logprobs:
        raise ValueError("some of its fields are missing")
    _, fence, owner, kept_ms, _, cancelled, reason, text_length, _, _ = fields
    tokens, outcomes = unpack_tokens(packed_tokens), unpack_outcomes(packed_outcomes)
    if len(tokens) != len(outcomes):
        raise ValueError(f"outcomes: {len(outcomes)} for {len(tokens)} tokens")
    logprobs = tuple(map(unpack_logprobs, packed_logprobs))
    if len(logprobs) not in (0, len(tokens)):
        raise ValueError(f"logprobs: {len(logprobs)} for {len(tokens)} tokens")
    return LogTail(
        fence=bounded("fence", int(fence), MOST_FENCE),
        owner=owner.decode(),
        skipped=skipped,
        length=size // TOKEN_BYTES,
        tokens=tokens,
        outcomes=outcomes,
        logprobs=logprobs,
        reason=FinishReason(int(reason)) if reason else None,
        text_length=bounded("text_length", int(text_length or 0), MOST_WHOLE),
        cancelled=cancelled == b"1",
        silent_s=max(0.0, (int(kept_ms) - left_ms) / 1000),
    )


def _decoded(session_id: str, reply: Reply) -> StoredSession:
    fields, left_ms, packed_tokens, packed_outcomes, packed_logprobs, _ = cast(Parts, reply[1:])
    if None in fields[:NEEDED]:
        raise ValueError("some of its fields are missing")
    record_json, fence, owner, kept_ms, claimed_us, cancelled, reason, text_length, ended_us, retention_ms = fields
    text, outcomes = unpack_tokens(packed_tokens), unpack_outcomes(packed_outcomes)
    record = decode_record(record_json, text)
    if record.session_id != session_id:
        raise ValueError(f"session_id: it is that of {record.session_id!r}")
    if len(text) - len(record.prompt) != len(outcomes):
        raise ValueError(f"outcomes: {len(outcomes)} for {len(text) - len(record.prompt)} tokens")
    if None in packed_logprobs:
        raise ValueError("logprobs: some are missing")
    logprobs = tuple(map(unpack_logprobs, packed_logprobs))
    if len(logprobs) != (0 if record.sampling.logprobs is None else len(outcomes)):
        raise ValueError(f"logprobs: {len(logprobs)} for {len(outcomes)} tokens, {record.sampling.logprobs} asked for")
    return StoredSession(
        record=record,
        fence=bounded("fence", int(fence), MOST_FENCE),
        owner=owner.decode(),
        tokens=text[len(record.prompt) :],
        outcomes=outcomes,
        reason=FinishReason(int(reason)) if reason else None,
        text_length=bounded("text_length", int(text_length or 0), MOST_WHOLE),
        cancelled=cancelled == b"1",
        silent_s=max(0.0, (int(kept_ms) - left_ms) / 1000),
        claimed=bounded("claimed_us", int(claimed_us), MOST_FENCE) / US,
        ended=bounded("ended_us", int(ended_us), MOST_FENCE) / US if ended_us else None,
        logprobs=logprobs,
        retention_s=_lifetime_s(retention_ms),
    )


def _lifetime_s(milliseconds: bytes | None) -> float:
    """As scripts read it: what is damaged counts as LIFETIME_MS."""
    whole = (milliseconds or b"").isdigit() and int(milliseconds or b"")
    return (whole or LIFETIME_MS) / 1000
