"""What a service says of itself in the registry, and what is believed of it.

On the wire an entry is a JSON object, at most MOST_BYTES long. `v` is its version: one that is newer is ignored, a
field that is not known is, too. Whoever reads it has only Redis's word for it, so every value is checked, and the
connection to the service has the last word on all of them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from specwire.core.invalid import InvalidParameter

VERSION = 1
MOST_BYTES = 16 * 1024
MOST_MODELS = 64
MOST_CHARACTERS = 255
MOST_COUNT = 1 << 53
# Of a load: added later, so a service that is older says nothing of them.
UNTOLD = {"queue_s": 0.0, "misses": 0.0}

ID = re.compile(r"[0-9a-f]{32}")
REGION = re.compile(r"[A-Za-z0-9._-]{0,64}")
FINGERPRINT = re.compile(r"[0-9a-f]{0,128}")


class Role(StrEnum):
    VERIFIER = "verifier"
    DRAFTER = "drafter"
    ORCHESTRATOR = "orchestrator"


class ServiceState(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"


class InvalidEntry(ValueError):
    """What is there is no entry. reason: one of few words, for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Fingerprints as in GetModelInfoResponse; "" where the service has none to tell.

    identity: of a target (`specwire.rpc.model_service.Identity`); "" of one that is older than this field.
    """

    name: str
    weights: str = ""
    vocabulary: str = ""
    identity: str = ""

    def equals(self, other: ServedModel) -> bool:
        """The same version of a target, as far as both tell."""
        told = self.identity and other.identity
        return self.weights == other.weights and (not told or self.identity == other.identity)


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that have a place, sessions that wait for one, places that are free.

    queue_s: of a verifier, the longest that a session waits for a place, or has waited in the last few seconds.
    misses: of a drafter, the share of the latest decided positions within its run-ahead for which it had proposed
        nothing yet.
    """

    running: int = 0
    waiting: int = 0
    free: int = 0
    queue_s: float = 0.0
    misses: float = 0.0


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """A service.

    id: random, of one process. address: HOST:PORT where others dial it. region: services of one region are near each
    other. slots: sessions that it can hold, kv_bytes what their keys and values take; 0 of an orchestrator.
    started: Unix time in seconds, by its own clock. beat: rises with every heartbeat.
    """

    id: str
    role: Role
    address: str
    region: str = ""
    models: tuple[ServedModel, ...] = ()
    slots: int = 0
    kv_bytes: int = 0
    load: Load = Load()
    state: ServiceState = ServiceState.SERVING
    started: float = 0.0
    beat: int = 0


def encode(entry: ServiceEntry) -> bytes:
    return json.dumps({"v": VERSION, **asdict(entry)}, separators=(",", ":")).encode()


def decode(entry_id: str, data: bytes) -> ServiceEntry:
    """The entry of this id. Raises InvalidEntry."""
    found = _EntryFields(_parsed(data))
    version = found.count("v", least=1)
    if version > VERSION:
        raise InvalidEntry("newer", f"v: {version} is newer than {VERSION}")
    if found.text("id") != entry_id:
        raise InvalidEntry("invalid", "id: is another one than the key's")
    return ServiceEntry(
        id=entry_id,
        role=Role(found.choice("role", Role)),
        address=checked_address("address", found.text("address")),
        region=found.matching("region", REGION),
        models=tuple(_model(each) for each in found.objects("models", MOST_MODELS)),
        slots=found.count("slots"),
        kv_bytes=found.count("kv_bytes"),
        load=_load(found.inner("load")),
        state=ServiceState(found.choice("state", ServiceState)),
        started=found.number("started"),
        beat=found.count("beat"),
    )


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


def _parsed(data: bytes) -> dict[str, Any]:
    if len(data) > MOST_BYTES:
        raise InvalidEntry("invalid", f"has more than {MOST_BYTES} bytes")
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise InvalidEntry("invalid", "is no JSON") from None
    return _object("entry", value)


def _object(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidEntry("invalid", f"{name}: must be an object")
    return value


def _model(value: dict[str, Any]) -> ServedModel:
    found = _EntryFields({"identity": "", **value})
    told = (found.matching(each, FINGERPRINT) for each in ("weights", "vocabulary", "identity"))
    return ServedModel(found.text("name"), *told)


def _load(value: dict[str, Any]) -> Load:
    found = _EntryFields({**UNTOLD, **value})
    return Load(
        found.count("running"),
        found.count("waiting"),
        found.count("free"),
        found.number("queue_s", least=0.0),
        found.number("misses", least=0.0, most=1.0),
    )


class _EntryFields:
    """Each is taken by name and type. Raises InvalidEntry."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def _take(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self._values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidEntry("invalid", f"{name}: is missing, or of another type")
        return value

    def text(self, name: str) -> str:
        value = str(self._take(name, str))
        if len(value) > MOST_CHARACTERS or not value.isprintable():
            raise InvalidEntry("invalid", f"{name}: must be printable and have at most {MOST_CHARACTERS} characters")
        return value

    def matching(self, name: str, form: re.Pattern[str]) -> str:
        value = self.text(name)
        if not form.fullmatch(value):
            raise InvalidEntry("invalid", f"{name}: must be of {form.pattern}")
        return value

    def choice(self, name: str, choices: type[StrEnum]) -> str:
        value = self.text(name)
        if value not in list(choices):
            raise InvalidEntry("invalid", f"{name}: is not known")
        return value

    def count(self, name: str, least: int = 0) -> int:
        value = int(self._take(name, int))
        if not least <= value < MOST_COUNT:
            raise InvalidEntry("invalid", f"{name}: must be from {least} to {MOST_COUNT - 1}")
        return value

    def number(self, name: str, least: float = -MOST_COUNT, most: float = MOST_COUNT) -> float:
        value = self._take(name, (int, float))
        if not (math.isfinite(value) and least <= value <= most):
            raise InvalidEntry("invalid", f"{name}: must be a number of ordinary size")
        return float(value)

    def inner(self, name: str) -> dict[str, Any]:
        return _object(name, self._values.get(name))

    def objects(self, name: str, most: int) -> list[dict[str, Any]]:
        values = list(self._take(name, list))
        if len(values) > most:
            raise InvalidEntry("invalid", f"{name}: has more than {most}")
        return [_object(name, each) for each in values]
