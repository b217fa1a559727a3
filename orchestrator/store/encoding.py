"""From SNAPSHOT's reply to a log. Anybody who can write to Redis can write anything, so everything is checked."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from msgspec import Meta, Struct, convert
from msgspec.structs import asdict

from orchestrator.store.base import DamagedLog, LogTail, SessionRecord, StoredSession
from orchestrator.store.scripts import LIFETIME_MS, Reply
from specwire.core.law.constraint import Constraint
from specwire.core.law.sampling import LogprobsOf, Sampling, check_numbers, with_rule
from specwire.core.messages import FinishReason, Outcome, TokenLogprobs
from specwire.core.placement import check_priority
from specwire.core.text import Stopping
from specwire.redis import decoded

# ----------------------------------------------------------------------------------------------------------------------
# The log's bytes: explicit, so that another program can read them.
#
# record      JSON, without the prompt (its tokens begin the token string)
# tokens      4 bytes each, unsigned, little-endian
# outcomes    1 byte each, the numbers of the wire's Outcome
# logprobs    of each token the decided one's as float32, then 4 bytes for each of the top ids and theirs as float32

VERSION = 1
MOST_WHOLE = (1 << 32) - 1
# Instants in seconds: beyond the year 5000.
MOST_INSTANT = 1e11
TOKEN_BYTES = 4
LOGPROB_BYTES = 4

Whole = Annotated[int, Meta(ge=0, le=MOST_WHOLE)]
Instant = Annotated[float, Meta(ge=0.0, le=MOST_INSTANT)]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    if len(data) % TOKEN_BYTES:
        raise ValueError(f"tokens: {len(data)} bytes are no whole number of tokens")
    return struct.unpack(f"<{len(data) // TOKEN_BYTES}I", data)


def pack_outcomes(outcomes: Sequence[Outcome]) -> bytes:
    return bytes(outcomes)


def unpack_outcomes(data: bytes) -> tuple[Outcome, ...]:
    return tuple(map(Outcome, data))


def pack_logprobs(reported: TokenLogprobs) -> bytes:
    flat = [part for pair in reported.top for part in pair]
    return struct.pack("<f" + "If" * len(reported.top), reported.logprob, *flat)


def unpack_logprobs(data: bytes) -> TokenLogprobs:
    count, rest = divmod(len(data) - LOGPROB_BYTES, TOKEN_BYTES + LOGPROB_BYTES)
    if count < 0 or rest:
        raise ValueError(f"logprobs: {len(data)} bytes are no whole number of them")
    own, *flat = struct.unpack("<f" + "If" * count, data)
    return check_numbers(TokenLogprobs(own, tuple(zip(flat[::2], flat[1::2], strict=True))))


class SamplingFields(Struct, rename={"rule_name": "rule"}):
    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[Whole, float], ...] = ()
    logprobs: int | None = None
    logprobs_of: LogprobsOf = LogprobsOf.MODEL
    rule_name: str = ""
    constraint: Constraint | None = None


class RecordFields(Struct, kw_only=True):
    """A record's JSON: by the names of SessionRecord and Sampling."""

    version: int = VERSION
    session_id: str
    tenant: str
    request_id: str
    prompt_length: Whole
    sampling: SamplingFields
    stopping: Stopping
    stop: tuple[str, ...]
    drafting: bool
    ngram: bool
    heads: bool
    echo: bool = False
    weights_fingerprint: str
    vocabulary_fingerprint: str
    tokenizer_fingerprint: str = ""
    eos_ids: tuple[Whole, ...]
    model: str = ""
    dtype: str = ""
    created: Instant
    deadline: Instant = 0.0
    priority: int = 0
    parent: str = ""
    request_digest: str = ""
    private: bool = False
    note: str = ""
    chat: str = ""


class RecordHead(Struct):
    """What records of every version have."""

    version: int
    tenant: str
    request_id: str


ENCODER = msgspec.json.Encoder(order="deterministic")  # of ids that are a set
# The same in both, by name.
SHARED = [each.name for each in fields(SessionRecord) if each.name in RecordFields.__struct_fields__]


def encode_record(record: SessionRecord) -> bytes:
    return ENCODER.encode(convert(record, RecordFields, from_attributes=True))


def decode_record(data: bytes, tokens: tuple[int, ...]) -> SessionRecord:
    """The record, its prompt taken from the beginning of the log's `tokens`.

    Raises:
        ValueError: names the field and what it holds.
    """
    version = decoded(data, RecordHead).version
    if version != VERSION:
        raise ValueError(f"version: this log has {version}, this program reads {VERSION}")
    found = decoded(data, RecordFields)
    if found.prompt_length > len(tokens):
        raise ValueError(f"prompt_length: {found.prompt_length} where the log holds {len(tokens)} tokens")
    check_priority(found.priority)
    values = asdict(found.sampling)
    rule = values.pop("rule_name")
    values = {**{name: getattr(found, name) for name in SHARED}, "sampling": with_rule(Sampling(**values), rule)}
    return SessionRecord(prompt=tokens[: found.prompt_length], **values)


def request_of(data: bytes) -> tuple[str, str]:
    """Tenant and request id of a record; empty where it cannot be read."""
    try:
        head = decoded(data, RecordHead)
    except ValueError:
        return "", ""
    return head.tenant, head.request_id


def bounded(name: str, value: int, most: int) -> int:
    """Raises ValueError."""
    if not 0 <= value <= most:
        raise ValueError(f"{name}: must be from 0 to {most}, not {value!r:.80}")
    return value


US = 1e6
# Fences and instants in microseconds: what a Lua number holds exactly.
MOST_FENCE = 1 << 53
# Number of fields that every log has.
NEEDED = 6
# Parts of the reply: fields, time to live left in ms, tokens, outcomes, logprobs, bytes of all tokens.
Parts: TypeAlias = tuple[list[bytes], int, bytes, bytes, list[bytes], int]


def stored_session(session_id: str, reply: Reply) -> StoredSession:
    """Raises DamagedLog, which names the part that cannot be read."""
    with _read_or_damaged(session_id):
        return _session(session_id, _parts(reply))


def stored_tail(session_id: str, reply: Reply, skipped: int) -> LogTail:
    """The log's tail in a snapshot without the first `skipped` tokens of the output. Raises DamagedLog."""
    with _read_or_damaged(session_id):
        parts = _parts(reply)
        return LogTail(skipped=skipped, length=parts[-1] // TOKEN_BYTES, **_state(parts, unpack_tokens(parts[2])))


@contextmanager
def _read_or_damaged(session_id: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise DamagedLog(f"session {session_id}: its log cannot be read: {error}") from None


def _parts(reply: Reply) -> Parts:
    parts = cast(Parts, reply[1:])
    for name, values in (("fields", parts[0][:NEEDED]), ("logprobs", parts[4])):
        if None in values:
            raise ValueError(f"{name}: some are missing")
    return parts


def _state(parts: Parts, tokens: tuple[int, ...]) -> dict[str, Any]:
    """What a tail and a whole log have in common. tokens: of the output."""
    fields, left_ms, _, packed_outcomes, packed_logprobs, _ = parts
    _, fence, owner, kept_ms, _, cancelled, reason, text_length, _, _ = fields
    return {
        "fence": bounded("fence", int(fence), MOST_FENCE),
        "owner": owner.decode(),
        "tokens": tokens,
        "outcomes": unpack_outcomes(packed_outcomes),
        "logprobs": tuple(map(unpack_logprobs, packed_logprobs)),
        "reason": FinishReason(int(reason)) if reason else None,
        "text_length": bounded("text_length", int(text_length or 0), MOST_WHOLE),
        "cancelled": cancelled == b"1",
        "silent_s": max(0.0, (int(kept_ms) - left_ms) / 1000),
    }


def _session(session_id: str, parts: Parts) -> StoredSession:
    record_json, _, _, _, claimed_us, _, _, _, ended_us, retention_ms = parts[0]
    text = unpack_tokens(parts[2])
    record = decode_record(record_json, text)
    if record.session_id != session_id:
        raise ValueError(f"session_id: it is that of {record.session_id!r}")
    stored = StoredSession(
        record=record,
        length=len(text),
        claimed=bounded("claimed_us", int(claimed_us), MOST_FENCE) / US,
        ended=bounded("ended_us", int(ended_us), MOST_FENCE) / US if ended_us else None,
        retention_s=_lifetime_s(retention_ms),
        **_state(parts, text[record.prompt_length :]),
    )
    told, asked = len(stored.logprobs), record.sampling.logprobs
    if told != (0 if asked is None else len(stored.tokens)):
        raise ValueError(f"logprobs: {told} for {len(stored.tokens)} tokens, {asked} asked for")
    return stored


def _lifetime_s(milliseconds: bytes | None) -> float:
    """Seconds, as the scripts read them: a damaged value counts as LIFETIME_MS."""
    whole = (milliseconds or b"").isdigit() and int(milliseconds or b"")
    return (whole or LIFETIME_MS) / 1000
