"""Messages of any kind for a service: most fields plausible, some at the edge of their type, some plain nonsense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specwire.v1 import draft_pb2, generation_pb2, registry_pb2, status_pb2, verify_pb2

# Of all services, by SERVICE.METHOD.
SERVICES = [
    service
    for module in (generation_pb2, verify_pb2, draft_pb2, status_pb2, registry_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
METHODS: dict[str, MethodDescriptor] = {
    f"{service.name}.{method.name}": method for service in SERVICES for method in service.methods
}
M = TypeVar("M", bound=Message)
Values = st.SearchStrategy[Any]
Pools = Mapping[str, Values]

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
MOST_PARTS = 4


def edges(low: int, high: int) -> Values:
    return st.one_of(st.sampled_from([low, high, max(low, 0), 1, min(high, 1 << 31)]), st.integers(low, high))


def of_type(field: FieldDescriptor) -> Values:
    """Whatever the wire can carry in a field that is no message."""
    kind = FieldDescriptor
    if field.type in (kind.TYPE_UINT32, kind.TYPE_FIXED32):
        return edges(0, U32)
    if field.type in (kind.TYPE_UINT64, kind.TYPE_FIXED64):
        return edges(0, U64)
    if field.type in (kind.TYPE_INT32, kind.TYPE_SINT32, kind.TYPE_SFIXED32, kind.TYPE_ENUM):
        return edges(-(1 << 31), (1 << 31) - 1)
    if field.type in (kind.TYPE_INT64, kind.TYPE_SINT64, kind.TYPE_SFIXED64):
        return edges(-(1 << 63), (1 << 63) - 1)
    if field.type == kind.TYPE_FLOAT:
        return st.floats(width=32)
    if field.type == kind.TYPE_DOUBLE:
        return st.floats()
    if field.type == kind.TYPE_BOOL:
        return st.booleans()
    if field.type == kind.TYPE_STRING:
        return st.one_of(st.text(max_size=20), st.sampled_from(["", "\0", "é" * 5000, "{}", "../x"]))
    return st.binary(max_size=20)


def try_examples(strategy: Values, call: Callable[[Any], object], examples: int) -> None:
    """Call it with so many of what `strategy` makes."""

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(strategy)
    def try_one(value: Any) -> None:
        call(value)

    try_one()


def path_of(method: str) -> str:
    """As gRPC calls it."""
    return f"/{METHODS[method].containing_service.full_name}/{METHODS[method].name}"


# Of 32 fields, how many are nonsense or left out: a message that is all plausible gets farthest.
WILD = st.sampled_from([0, 0, 1, 2, 12])


@st.composite
def messages(draw: st.DrawFn, kind: type[M], pools: Pools, wild: int | None = None) -> M:
    """A message of this kind. `pools` has plausible values by field name, and plausible messages by their kind's."""
    wildness = draw(WILD) if wild is None else wild
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        odd = wildness > 0 and draw(st.integers(0, 31)) < wildness
        if odd and draw(st.booleans()):
            continue
        choice = field.containing_oneof  # an optional field is a choice of one
        if choice is not None and draw(st.integers(0, 3)) < len(choice.fields) - 1:
            continue
        _fill(draw, message, field, {} if odd else pools, pools, wildness)
    return message


def _pool(kind: type[Message], field: str) -> str:
    """A field's name; in a map's entry, where all have the same names, with the entry's."""
    entry = kind.DESCRIPTOR.GetOptions().map_entry
    return f"{kind.DESCRIPTOR.name}.{field}" if entry else field


def _fill(draw: st.DrawFn, message: Message, field: Any, own: Pools, pools: Pools, wild: int) -> None:
    """own: where this field's value is looked for; what is found nowhere is of any kind."""
    if field.message_type is not None:
        anything = messages(GetMessageClass(field.message_type), pools, wild)
        part = own.get(field.message_type.name, anything)
        if field.message_type.GetOptions().map_entry:
            getattr(message, field.name).update(draw(st.lists(part.map(_pair), max_size=MOST_PARTS)))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(part, max_size=MOST_PARTS)))
        else:
            getattr(message, field.name).CopyFrom(draw(part))
        return
    plausible = own.get(_pool(type(message), field.name))
    values = of_type(field) if plausible is None else plausible
    if plausible is None and field.is_repeated:
        values = st.lists(values, max_size=MOST_PARTS)
    if field.is_repeated:
        getattr(message, field.name).extend(draw(values))
    else:
        setattr(message, field.name, draw(values))


def _pair(entry: Any) -> tuple[Any, Any]:
    """A map's entry."""
    return entry.key, entry.value


@st.composite
def encoded(draw: st.DrawFn, kind: type[Message], pools: Pools) -> bytes:
    """A message's bytes, one time of eight cut, overwritten or put together from nothing."""
    data = draw(messages(kind, pools)).SerializeToString()
    way = draw(st.integers(0, 15))
    if way == 0:
        return draw(st.binary(max_size=50))
    if way == 1 and data:
        at = draw(st.integers(0, len(data) - 1))
        return data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    return data
