"""The log's bytes: explicit, so that another program can read them.

record      JSON, without the prompt (its tokens begin the token string)
tokens      4 bytes each, unsigned, little-endian
outcomes    1 byte each, the numbers of the wire's Outcome
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from orchestrator.store.base import SessionRecord
from specwire.core.acceptance import Outcome
from specwire.core.limits import Stopping
from specwire.core.sampling import Sampling

VERSION = 1
TOKEN_BYTES = 4


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // TOKEN_BYTES}I", data)


def pack_outcomes(outcomes: Sequence[Outcome]) -> bytes:
    return bytes(outcomes)


def unpack_outcomes(data: bytes) -> tuple[Outcome, ...]:
    return tuple(map(Outcome, data))


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
        },
        "stopping": {
            "max_tokens": stopping.max_tokens,
            "stop_ids": sorted(stopping.stop_ids),
            "ignore_eos": stopping.ignore_eos,
        },
        "stop": list(record.stop),
        "drafting": record.drafting,
        "ngram": record.ngram,
        "weights_fingerprint": record.weights_fingerprint,
        "vocabulary_fingerprint": record.vocabulary_fingerprint,
        "created": record.created,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_record(data: bytes, tokens: tuple[int, ...]) -> SessionRecord:
    """The record, its prompt taken from the beginning of the log's `tokens`."""
    fields = json.loads(data)
    if fields["version"] != VERSION:
        raise ValueError(f"version: this log has {fields['version']}, this program reads {VERSION}")
    stopping = fields["stopping"]
    return SessionRecord(
        session_id=fields["session_id"],
        prompt=tokens[: fields["prompt_length"]],
        sampling=Sampling(**fields["sampling"]),
        stopping=Stopping(stopping["max_tokens"], frozenset(stopping["stop_ids"]), stopping["ignore_eos"]),
        tenant=fields["tenant"],
        request_id=fields["request_id"],
        stop=tuple(fields["stop"]),
        drafting=fields["drafting"],
        ngram=fields.get("ngram", fields["drafting"]),
        weights_fingerprint=fields["weights_fingerprint"],
        vocabulary_fingerprint=fields["vocabulary_fingerprint"],
        created=fields["created"],
    )
