"""From SNAPSHOT's reply to a log. Whoever can write to Redis can write anything there, so nothing is taken on trust."""

from __future__ import annotations

from typing import cast

from orchestrator.store.base import DamagedLog, StoredSession
from orchestrator.store.encoding import (
    MOST_WHOLE,
    bounded,
    decode_record,
    unpack_logprobs,
    unpack_outcomes,
    unpack_tokens,
)
from orchestrator.store.lanes import Reply
from specwire.core.limits import FinishReason

US = 1e6
# Fences and instants in microseconds: what a Lua number holds exactly.
MOST_FENCE = 1 << 53
# Of the fields, those that every log has.
NEEDED = 6


def stored_session(session_id: str, reply: Reply) -> StoredSession:
    """Raises DamagedLog, which says what of it cannot be read."""
    try:
        return _decoded(session_id, reply)
    except (ValueError, OverflowError, RecursionError) as error:
        raise DamagedLog(f"session {session_id}: its log cannot be read: {error}") from None


def _decoded(session_id: str, reply: Reply) -> StoredSession:
    fields, left_ms, packed_tokens, packed_outcomes, packed_logprobs = cast(
        "tuple[list[bytes], int, bytes, bytes, list[bytes]]", reply[1:]
    )
    if None in fields[:NEEDED]:
        raise ValueError("some of its fields are missing")
    record_json, fence, owner, kept_ms, claimed_us, cancelled, reason, text_length, ended_us = fields
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
    )
