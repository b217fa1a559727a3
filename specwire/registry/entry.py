"""What a service says of itself in the registry, and how that is checked.

On the wire an entry is a JSON object, at most MOST_BYTES long. `v` is its version: one that is newer is ignored, a
field that is not known is, too. Anybody may have written it, so every value is checked, and the connection to the
service has the last word.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from specwire.core.invalid import InvalidParameter
from specwire.redis import decoded

VERSION = 1
MOST_BYTES = 16 * 1024
MOST_MODELS = 64
MOST_CHARACTERS = 255
MOST_COUNT = 1 << 53

ID = re.compile(r"^[0-9a-f]{32}\Z")
REGION = re.compile(r"^[A-Za-z0-9._-]{0,64}\Z")

Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{0,128}\Z")]
Count = Annotated[int, Meta(ge=0, lt=MOST_COUNT)]


class Role(StrEnum):
    VERIFIER = "verifier"
    DRAFTER = "drafter"
    ORCHESTRATOR = "orchestrator"


class ServiceState(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"


class InvalidEntry(ValueError):
    """A value in the registry is not an entry. reason: one of a few words, for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Fingerprints as in GetModelInfoResponse; "" where the service has none to tell.

    identity: of a target (`specwire.rpc.model_info.Identity`), "" of a drafter's model.
    """

    name: Annotated[str, Meta(max_length=MOST_CHARACTERS)]
    weights: Fingerprint
    vocabulary: Fingerprint
    identity: Fingerprint = ""


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that have a place, sessions that wait for one, places that are free.

    queue_s: of a verifier, the longest that a session waits for a place, or has waited in the last few seconds.
    """

    running: Count
    waiting: Count
    free: Count
    queue_s: Annotated[float, Meta(ge=0.0, le=MOST_COUNT)] = 0.0


NO_LOAD = Load(0, 0, 0)


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """A service, as its JSON has it, too.

    id: random, of one process. address: HOST:PORT where others dial it. region: services of one region are near each
    other. slots: sessions that it can hold, kv_bytes what their keys and values take; 0 of an orchestrator.
    started: Unix time in seconds, by its own clock. beat: rises with every heartbeat.
    """

    id: Annotated[str, Meta(pattern=ID.pattern)]
    role: Role
    address: str
    region: Annotated[str, Meta(pattern=REGION.pattern)] = ""
    models: Annotated[tuple[ServedModel, ...], Meta(max_length=MOST_MODELS)] = ()
    slots: Count = 0
    kv_bytes: Count = 0
    load: Load = NO_LOAD
    state: ServiceState = ServiceState.SERVING
    started: Annotated[float, Meta(ge=-MOST_COUNT, le=MOST_COUNT)] = 0.0
    beat: Count = 0


class EntryHead(Struct):
    """What entries of every version begin with."""

    v: Annotated[int, Meta(ge=1)]


def encode(entry: ServiceEntry) -> bytes:
    return msgspec.json.encode({"v": VERSION, **asdict(entry)})


def decode(entry_id: str, data: bytes) -> ServiceEntry:
    """The entry of this id. Raises InvalidEntry."""
    if len(data) > MOST_BYTES:
        raise InvalidEntry("invalid", f"has more than {MOST_BYTES} bytes")
    try:
        version = decoded(data, EntryHead).v
        if version > VERSION:
            raise InvalidEntry("newer", f"v: {version} is newer than {VERSION}")
        given = decoded(data, dict[str, msgspec.Raw])
        for each in fields(ServiceEntry):
            if each.name not in given:  # a default would say what its service did not
                raise InvalidEntry("invalid", f"{each.name}: is missing")
        return checked(entry_id, decoded(data, ServiceEntry))
    except InvalidEntry:
        raise
    except ValueError as error:
        raise InvalidEntry("invalid", str(error)) from None


def checked(entry_id: str, entry: ServiceEntry) -> ServiceEntry:
    """The entry of this id, in which a type cannot say all. Raises InvalidEntry."""
    checked_address("address", entry.address)
    if entry.id != entry_id:
        raise InvalidEntry("invalid", "id: is another one than the key's")
    for model in entry.models:
        if not model.name.isprintable():
            raise InvalidEntry("invalid", f"models: {model.name!r:.80} is not printable")
    return entry


def check_region(region: str) -> str:
    """`region`; InvalidParameter if it is no name of one."""
    if not REGION.fullmatch(region):
        raise InvalidParameter("region", f"must be at most 64 of A-Z a-z 0-9 . _ -, not {region[:80]!r}")
    return region


def checked_address(field: str, address: str) -> str:
    """HOST:PORT that can be dialled. Raises InvalidEntry."""
    host, _, port = address.rpartition(":")
    plain = address.isascii() and address.isprintable() and not set(address) & set(" /,@")
    numbered = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if not (plain and numbered and host and len(address) <= MOST_CHARACTERS):
        raise InvalidEntry("invalid", f"{field}: {address[:80]!r} is not HOST:PORT")
    return address
