"""What an acknowledged append survives: named levels.

memory          nothing: the log is gone with the process
redis           the orchestrator's loss; Redis's own as far as it is configured to keep what it was told
redis-fsync     Redis's loss too: it runs with appendonly yes and appendfsync always, which is checked
redis-wait:N    the loss of Redis's primary: N replicas have acknowledged every append (WAIT). Should fewer answer,
                nothing is taken for durable: generation pauses, as when Redis is lost
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from specwire.core.sampling import InvalidParameter

FIELD = "durability"
MOST_REPLICAS = 16


class Level(StrEnum):
    MEMORY = "memory"
    REDIS = "redis"
    FSYNC = "redis-fsync"
    WAIT = "redis-wait"


@dataclass(frozen=True, slots=True)
class Durability:
    """`replicas`: how many must have acknowledged an append; 0 unless the level is WAIT."""

    level: Level
    replicas: int = 0

    def __str__(self) -> str:
        return f"{self.level}:{self.replicas}" if self.replicas else str(self.level)

    @property
    def in_memory(self) -> bool:
        return self.level is Level.MEMORY


def parse_durability(name: str) -> Durability:
    """Raises InvalidParameter."""
    level, colon, replicas = name.partition(":")
    if level not in Level.__members__.values() or bool(colon) != (level == Level.WAIT):
        raise InvalidParameter(FIELD, f"must be memory, redis, redis-fsync or redis-wait:N, not {name!r}")
    if not colon:
        return Durability(Level(level))
    if not (replicas.isascii() and replicas.isdecimal() and 1 <= int(replicas) <= MOST_REPLICAS):
        raise InvalidParameter(FIELD, f"the N of redis-wait:N must be from 1 to {MOST_REPLICAS}, not {replicas!r}")
    return Durability(Level.WAIT, int(replicas))


def durability_of(name: str, in_memory: bool) -> Durability:
    """The level asked for, or with "" the plain one of where the log is. Raises InvalidParameter if it is not there."""
    if not name:
        return Durability(Level.MEMORY if in_memory else Level.REDIS)
    asked = parse_durability(name)
    if asked.in_memory != in_memory:
        needed = "memory:" if asked.in_memory else "a Redis"
        raise InvalidParameter(FIELD, f"{asked} needs {needed} as redis-url")
    return asked


# Settings of Redis under which an acknowledged write is on the disk.
FSYNC_SETTINGS = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}


def unmet_settings(settings: dict[str, str]) -> str:
    """How a Redis's settings differ from those that redis-fsync needs; empty if they do not."""
    wrong = [f"{name} {settings.get(name)}" for name, value in FSYNC_SETTINGS.items() if settings.get(name) != value]
    needed = ", ".join(f"{name} {value}" for name, value in FSYNC_SETTINGS.items())
    return f"redis-fsync needs {needed}; Redis has {', '.join(wrong)}" if wrong else ""
