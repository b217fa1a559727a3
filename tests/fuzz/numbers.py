"""Every number that a message can hold, at the ends of its type and where programs go wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from specwire.core.law.sampling import Sampling
from specwire.core.text import hash_of
from specwire.rpc.convert import sampling_to_wire
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, verify_pb2
from tests.faults.streams import PROMPT

M = TypeVar("M", bound=Message)
Path = tuple[str, ...]

UNSIGNED = (0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
LONG = (*UNSIGNED, 1 << 52, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
SIGNED = (0, -1, (1 << 31) - 1, -(1 << 31))
LONG_SIGNED = (*SIGNED, 1 << 52, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -1.0, 1e-45, 2.0**31, 2.0**63, 3e38, math.inf, -math.inf, math.nan)
EXTREMES: dict[int, tuple[float, ...]] = {
    FieldDescriptor.TYPE_UINT32: UNSIGNED,
    FieldDescriptor.TYPE_FIXED32: UNSIGNED,
    FieldDescriptor.TYPE_UINT64: LONG,
    FieldDescriptor.TYPE_FIXED64: LONG,
    FieldDescriptor.TYPE_INT32: SIGNED,
    FieldDescriptor.TYPE_SINT32: SIGNED,
    FieldDescriptor.TYPE_ENUM: SIGNED,
    FieldDescriptor.TYPE_INT64: LONG_SIGNED,
    FieldDescriptor.TYPE_SINT64: LONG_SIGNED,
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_DOUBLE: (*FLOATS, 5e-324, 1.7e308),
}


class NumberField(NamedTuple):
    """Where a number stands in a kind of message, and what is tried there."""

    path: Path
    values: tuple[float, ...]

    def __str__(self) -> str:
        return ".".join(self.path)


def numbers(kind: Any, path: Path = ()) -> Iterator[NumberField]:
    """All of a kind's, by its descriptor, those of its parts among them; a kind within itself once."""
    for field in kind.fields:
        place = (*path, field.name)
        if field.message_type is not None:
            if path.count(field.name) == 0:
                yield from numbers(field.message_type, place)
        elif field.type in EXTREMES:
            yield NumberField(place, EXTREMES[field.type])


def put(message: M, path: Path, value: float) -> M:
    """A copy with `value` there, in the last of repeated parts; parts that are missing are added."""
    changed = type(message)()
    changed.CopyFrom(message)
    put_into(changed, path, value)
    return changed


def put_into(message: Message, path: Path, value: Any) -> None:
    name, *rest = path
    field, part = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, bias = (value, 1.0) if rest == ["key"] else (5, value)
        part[key] = bias
    elif field.message_type is not None:
        put_into((part[-1] if len(part) else part.add()) if field.is_repeated else part, tuple(rest), value)
    elif field.is_repeated:
        if len(part):
            part[-1] = value
        else:
            part.append(value)
    else:
        setattr(message, name, value)


# ----------------------------------------------------------------------------------------------------------------------
# Messages that are valid, to change one number of.

LENGTH = 6
STOPPING = common_pb2.Stopping(max_tokens=LENGTH, ignore_eos=True)


def proposal(handle: int = 1) -> common_pb2.Proposal:
    return common_pb2.Proposal(
        handle=handle, source=1, chain=1, base=len(PROMPT), tokens=[1, 2], prefix_hash=hash_of(PROMPT)
    )


def deciding(fingerprint: str, handle: int, name: str, sampling: Sampling) -> verify_pb2.ConnectVerifyRequest:
    """To a verifier."""
    opened = verify_pb2.Open(
        handle=handle,
        session_id=name,
        fence=1,
        attach=1,
        tokens=PROMPT,
        prompt_length=len(PROMPT),
        sampling=sampling_to_wire(sampling),
        stopping=STOPPING,
        progress=verify_pb2.Progress(durable=len(PROMPT), credit=len(PROMPT) + LENGTH),
        deadline_ms=60_000,
        vocabulary_fingerprint=fingerprint,
        prediction=[1, 2],
        reference_lengths=[2],
        cache_scope=b"a",
        drafters=[verify_pb2.Drafter(source=1, known_by="a", plan="stream:1,4,2")],
    )
    return verify_pb2.ConnectVerifyRequest(
        opens=[opened],
        proposals=[proposal(handle)],
        progress=[verify_pb2.Progress(handle=handle, durable=len(PROMPT), credit=len(PROMPT) + LENGTH)],
        references=[verify_pb2.ReferencePart(handle=handle, tokens=[1, 2])],
    )


def drafting(fingerprint: str, handle: int) -> draft_pb2.ConnectDraftRequest:
    """To a drafter."""
    pace = draft_pb2.Pace(chunk=2, run_ahead=4, branches=2)
    opened = draft_pb2.OpenDraft(
        handle=handle,
        tokens=PROMPT,
        sampling=sampling_to_wire(Sampling()),
        vocabulary_fingerprint=fingerprint,
        pace=pace,
        prompt_length=len(PROMPT),
    )
    advance = draft_pb2.Advance(handle=handle, position=len(PROMPT), tokens=[1], pace=pace)
    return draft_pb2.ConnectDraftRequest(opens=[opened], advances=[advance])


def asking() -> generation_pb2.GenerateRequest:
    """Of an orchestrator."""
    return generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenIds(ids=PROMPT),
        sampling=common_pb2.Sampling(temperature=0.7, seed=3, logprobs=1),
        stopping=STOPPING,
        prediction_tokens=generation_pb2.TokenIds(ids=[1, 2]),
    )
