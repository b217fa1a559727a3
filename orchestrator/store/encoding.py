"""From SNAPSHOT's reply to a log. Whoever can write to Redis can write anything there, so nothing is taken on trust."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TypeAlias, TypeVar, cast

from orchestrator.store.base import DamagedLog, LogTail, SessionRecord, StoredSession
from orchestrator.store.lanes import Reply
from orchestrator.store.scripts import LIFETIME_MS
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.core.law.sampling import (
    LEAST_REPETITION_PENALTY,
    LEAST_TEMPERATURE,
    LogprobsOf,
    Sampling,
    check_numbers,
    with_rule,
)
from specwire.core.limits import Stopping
from specwire.core.messages import FinishReason, Outcome, TokenLogprobs
from specwire.core.placement import check_priority

# ----------------------------------------------------------------------------------------------------------------------
# The log's bytes: explicit, so that another program can read them.
#
# record      JSON, without the prompt (its tokens begin the token string)
# tokens      4 bytes each, unsigned, little-endian
# outcomes    1 byte each, the numbers of the wire's Outcome
# logprobs    of each token the decided one's as float32, then 4 bytes for each of the top ids and theirs as float32

_Value = TypeVar("_Value")

VERSION = 1
MOST_WHOLE = (1 << 32) - 1
MOST_SEED = (1 << 64) - 1
# Instants in seconds: beyond the year 5000.
MOST_INSTANT = 1e11
TOKEN_BYTES = 4
LOGPROB_BYTES = 4


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


def encode_record(record: SessionRecord) -> bytes:
    sampling, stopping = record.sampling, record.stopping
    fields = {
        "version": VERSION,
        "session_id": record.session_id,
        "tenant": record.tenant,
        "request_id": record.request_id,
        "prompt_length": len(record.prompt),
        "sampling": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "choice": sampling.choice,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": [list(pair) for pair in sampling.logit_bias],
            "logprobs": sampling.logprobs,
            "logprobs_of": int(sampling.logprobs_of),
            "rule": sampling.rule_name,
            "constraint": _constraint_fields(sampling.constraint),
        },
        "stopping": {
            "max_tokens": stopping.max_tokens,
            "stop_ids": sorted(stopping.stop_ids),
            "ignore_eos": stopping.ignore_eos,
            "min_tokens": stopping.min_tokens,
        },
        "stop": list(record.stop),
        "drafting": record.drafting,
        "ngram": record.ngram,
        "echo": record.echo,
        "weights_fingerprint": record.weights_fingerprint,
        "vocabulary_fingerprint": record.vocabulary_fingerprint,
        "tokenizer_fingerprint": record.tokenizer_fingerprint,
        "eos_ids": record.eos_ids,
        "model": record.model,
        "dtype": record.dtype,
        "created": record.created,
        "deadline": record.deadline,
        "priority": record.priority,
        "parent": record.parent,
        "request_digest": record.request_digest,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_record(data: bytes, tokens: tuple[int, ...]) -> SessionRecord:
    """The record, its prompt taken from the beginning of the log's `tokens`.

    Raises:
        ValueError: names the field and what it holds.
    """
    fields = _RecordFields.parse(data)
    if fields.whole("version") != VERSION:
        raise ValueError(f"version: this log has {fields.whole('version')}, this program reads {VERSION}")
    length, drafting = fields.whole("prompt_length"), fields.flag("drafting")
    if length > len(tokens):
        raise ValueError(f"prompt_length: {length} where the log holds {len(tokens)} tokens")
    return SessionRecord(
        session_id=fields.text("session_id"),
        prompt=tokens[:length],
        sampling=_sampling(fields.inner("sampling")),
        stopping=_stopping(fields.inner("stopping")),
        tenant=fields.text("tenant"),
        request_id=fields.text("request_id"),
        stop=tuple(_text("stop", each) for each in fields.several("stop")),
        drafting=drafting,
        ngram=fields.flag("ngram", drafting),
        echo=fields.flag("echo", False),
        weights_fingerprint=fields.text("weights_fingerprint"),
        vocabulary_fingerprint=fields.text("vocabulary_fingerprint"),
        tokenizer_fingerprint=fields.text("tokenizer_fingerprint", ""),
        eos_ids=_ids("eos_ids", fields.several("eos_ids")) if fields.has("eos_ids") else None,
        model=fields.text("model", ""),
        dtype=fields.text("dtype", ""),
        created=fields.instant("created"),
        deadline=fields.instant("deadline", 0.0),
        priority=check_priority(fields.integer("priority", 0)),
        parent=fields.text("parent", ""),
        request_digest=fields.text("request_digest", ""),
    )


def request_of(data: bytes) -> tuple[str, str]:
    """Tenant and request id of a record; empty where it cannot be read."""
    try:
        fields = _RecordFields.parse(data)
        return fields.text("tenant"), fields.text("request_id")
    except (ValueError, RecursionError):
        return "", ""


def _sampling(fields: _RecordFields) -> Sampling:
    sampling = Sampling(
        temperature=_at_least(LEAST_TEMPERATURE, fields.number("temperature")),
        top_k=fields.whole("top_k"),
        top_p=fields.number("top_p"),
        seed=fields.whole("seed", MOST_SEED),
        choice=fields.whole("choice"),
        min_p=fields.number("min_p", 0.0),
        repetition_penalty=_at_least(LEAST_REPETITION_PENALTY, fields.number("repetition_penalty", 1.0)),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        logit_bias=tuple(_bias(pair) for pair in fields.several("logit_bias", [])),
        logprobs=fields.whole("logprobs") if fields.has("logprobs") else None,
        logprobs_of=LogprobsOf(fields.whole("logprobs_of", default=LogprobsOf.MODEL)),
        constraint=_constraint(fields.inner("constraint")) if fields.has("constraint") else None,
    )
    return with_rule(sampling, fields.text("rule", ""))


def _at_least(least: float, number: float) -> float:
    """Any number above 0 was legal once, and a log that holds one is none that is damaged."""
    return least if 0.0 < number < least else number


def _constraint_fields(constraint: Constraint | None) -> dict[str, object] | None:
    return None if constraint is None else {"kind": constraint.kind, "texts": constraint.texts}


def _constraint(fields: _RecordFields) -> Constraint:
    return Constraint(
        ConstraintKind(fields.text("kind")), tuple(_text("texts", each) for each in fields.several("texts"))
    )


def _bias(pair: object) -> tuple[int, float]:
    token, bias = _typed("logit_bias", pair, list)
    return bounded("logit_bias", _typed("logit_bias", token, int), MOST_WHOLE), _typed("logit_bias", bias, float)


def _stopping(fields: _RecordFields) -> Stopping:
    stop_ids = frozenset(_ids("stop_ids", fields.several("stop_ids")))
    least = fields.whole("min_tokens", default=0)
    return Stopping(fields.whole("max_tokens"), stop_ids, fields.flag("ignore_eos"), least)


def _ids(name: str, values: list[object]) -> tuple[int, ...]:
    return tuple(bounded(name, _typed(name, value, int), MOST_WHOLE) for value in values)


class _RecordFields:
    """A JSON object whose fields have the types that they are asked for with; else ValueError."""

    def __init__(self, fields: dict[str, object]) -> None:
        self._fields = fields

    @classmethod
    def parse(cls, data: bytes) -> _RecordFields:
        return cls(_typed("record", json.loads(data), dict))

    def text(self, name: str, default: str | None = None) -> str:
        return _text(name, self._fields.get(name, default))

    def flag(self, name: str, default: bool | None = None) -> bool:
        return _typed(name, self._fields.get(name, default), bool)

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def whole(self, name: str, most: int = MOST_WHOLE, default: int | None = None) -> int:
        value = self._fields.get(name, None if default is None else int(default))
        return bounded(name, _typed(name, value, int), most)

    def integer(self, name: str, default: int | None = None) -> int:
        return _typed(name, self._fields.get(name, default), int)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._fields.get(name, default)
        return float(value) if type(value) is int else _typed(name, value, float)

    def instant(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if not 0 <= value <= MOST_INSTANT:  # nor NaN
            raise ValueError(f"{name}: must be from 0 to {MOST_INSTANT:g}, not {value}")
        return value

    def several(self, name: str, default: list[object] | None = None) -> list[object]:
        return _typed(name, self._fields.get(name, default), list)

    def inner(self, name: str) -> _RecordFields:
        return _RecordFields(_typed(name, self._fields.get(name), dict))


def bounded(name: str, value: int, most: int) -> int:
    """Raises ValueError."""
    if not 0 <= value <= most:
        raise ValueError(f"{name}: must be from 0 to {most}, not {value!r:.80}")
    return value


def _text(name: str, value: object) -> str:
    text = _typed(name, value, str)
    text.encode()  # JSON can hold what is no text
    return text


def _typed(name: str, value: object, kind: type[_Value]) -> _Value:
    if type(value) is not kind:
        raise ValueError(f"{name}: must be of type {kind.__name__}, not {value!r:.80}")
    return value


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
