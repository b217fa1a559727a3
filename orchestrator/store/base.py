"""The session log's contract, its errors, and what an acknowledged append survives."""

from __future__ import annotations

import math
import re
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from redis.exceptions import ResponseError

from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, FinishReason, Outcome, TokenLogprobs
from specwire.core.text import Stopping
from specwire.options import LEVELS
from specwire.redis import place_of

# ----------------------------------------------------------------------------------------------------------------------
# What a store raises.


class StoreError(Exception):
    """Base of what a store raises."""


class SessionExists(StoreError):
    """`create` of a session that has a log."""


class MissingSession(StoreError):
    """There is no log of that session: it never existed, expired, or was lost by the store."""


class DeletedSession(MissingSession):
    """There is no log of that session because it was deleted."""


class Fenced(StoreError):
    """Another owner has a newer fence, or the session was deleted; this owner must stop writing and emitting."""


class StaleLog(StoreError):
    """The log stands under an older fence than the caller's, whose claim it has lost. `recreate` it."""


class ContentMismatch(StoreError):
    """The log holds other tokens there, or is finished: read it and reopen from it."""


class Gap(StoreError):
    """The append starts beyond the log's end, because the log lost its tail. `recreate` supplies it."""


class DamagedLog(StoreError):
    """What the store holds of the session cannot be read as a log."""


class StoreUnavailable(StoreError):
    """The store did not answer, or refused. What was written is unknown: read the log, do not guess.

    The message is a sentence that callers may see. refused: the store answers, and will refuse until somebody mends it
    (a failover passes by itself). detail: the store's own words, for operators: they name addresses and scripts.
    """

    def __init__(self, message: str, detail: str = "", refused: bool = False) -> None:
        super().__init__(message)
        self.detail = detail
        self.refused = refused


class UnfitStore(StoreUnavailable):
    """The store answers, but would not keep what its level of durability promises."""


def missing(session_id: str) -> MissingSession:
    return MissingSession(f"session {session_id} has no log")


def deleted(session_id: str) -> DeletedSession:
    return DeletedSession(f"session {session_id} was deleted")


def fenced(session_id: str, fence: int) -> Fenced:
    return Fenced(f"session {session_id}: fence {fence} is not the newest")


def other_fence(session_id: str, fence: int, held: int) -> Fenced | StaleLog:
    """What is wrong with `fence` where the log holds another one."""
    if held > fence:
        return fenced(session_id, fence)
    return StaleLog(f"session {session_id}: the log stands under the older fence {held}, not {fence}")


def mismatch(session_id: str, position: int) -> ContentMismatch:
    return ContentMismatch(f"session {session_id}: the log holds other tokens at {position}, or has ended")


def gap(session_id: str, position: int, length: int) -> Gap:
    return Gap(f"session {session_id}: the log ends at {length}, before {position}")


# A sentence for each error of a server, by the code that the error begins with (before 7.0 it is inside a script's
# error) or by redis-py's class; and whether the error lasts until somebody mends it.
SAYINGS = (
    (r"MISCONF", True, "takes no writes: Redis cannot save to its disk, which may be full"),
    (r"OOM|OutOfMemory", True, "takes no writes: Redis has no memory left"),
    (r"READONLY|ReadOnly", False, "takes no writes: the server is a read-only replica"),
    (r"NOREPLICAS", False, "takes no writes: too few of its replicas are there"),
    (r"LOADING|BusyLoading", False, "does not answer yet: Redis is reading its data"),
    (r"BUSY", False, "does not answer: Redis is busy with a script"),
    (r"NOAUTH|WRONGPASS|NOPERM|Authentication|Authorization|NoPermission", True, "does not let this orchestrator in"),
    (r"CLUSTERDOWN|MASTERDOWN|ClusterDown|MasterDown", False, "does not answer: no server has its part of the keys"),
)


def unavailable(reply: object) -> StoreUnavailable:
    """StoreUnavailable for an error that a server answered with, or that came in place of an answer."""
    said = f"{type(reply).__name__}: {reply}" if isinstance(reply, Exception) else f"unexpected reply {reply!r}"
    for codes, lasts, meaning in SAYINGS:
        if isinstance(reply, Exception) and re.search(rf"\b({codes})", said):
            return StoreUnavailable(f"the session log {meaning}", str(reply), refused=lasts)
    answered = isinstance(reply, ResponseError) or not isinstance(reply, Exception)
    meaning = "refused the call" if answered else "does not answer"
    return StoreUnavailable(f"the session log {meaning}", str(reply) if isinstance(reply, Exception) else said)


def no_answer(detail: str) -> StoreUnavailable:
    return StoreUnavailable("the session log does not answer", detail)


# ----------------------------------------------------------------------------------------------------------------------
# What an acknowledged append survives: named levels.
#
# memory          nothing: the log is gone with the process
# file            the process's loss: the system has it. After a power cut what the system had not yet written is gone
# file-fsync      a power cut, too: it is on the disk
# redis           the orchestrator's loss; Redis's own as far as it is configured to keep what it was told
# redis-fsync     Redis's loss too: it runs with appendonly yes and appendfsync always, which is checked
# redis-wait:N    the loss of Redis's primary: N replicas have acknowledged every append (WAIT). Should fewer answer,
#                 nothing is taken for durable: generation pauses, as when Redis is lost

FIELD = "durability"
# What the URL of the log says for each place.
NEEDED = {"memory": "memory:", "file": "file:PATH", "redis": "a Redis"}
MOST_REPLICAS = 16


class Level(StrEnum):
    """Each begins with where the log is: see `specwire.redis.place_of`."""

    MEMORY = "memory"
    FILE = "file"
    FILE_FSYNC = "file-fsync"
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
    def place(self) -> str:
        """Where the log must be."""
        return self.level.partition("-")[0]


def parse_durability(name: str) -> Durability:
    """Raises InvalidParameter."""
    level, colon, replicas = name.partition(":")
    if level not in Level.__members__.values() or bool(colon) != (level == Level.WAIT):
        raise InvalidParameter(FIELD, f"must be one of {LEVELS}, not {name!r}")
    if not colon:
        return Durability(Level(level))
    if not (replicas.isascii() and replicas.isdecimal() and 1 <= int(replicas) <= MOST_REPLICAS):
        raise InvalidParameter(FIELD, f"the N of redis-wait:N must be from 1 to {MOST_REPLICAS}, not {replicas!r}")
    return Durability(Level.WAIT, int(replicas))


def durability_of(name: str, url: str) -> Durability:
    """The level asked for, or with "" the plain one of where `url` has the log.

    Raises InvalidParameter if the level is not to be had there.
    """
    place = place_of(url)
    asked = parse_durability(name) if name else Durability(Level(place))
    if asked.place != place:
        raise InvalidParameter(FIELD, f"{asked} needs {NEEDED[asked.place]} as redis-url")
    return asked


# Settings of Redis under which an acknowledged write is on the disk.
FSYNC_SETTINGS = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}


def unmet_settings(settings: dict[str, str]) -> str:
    """How a Redis server's settings differ from those that redis-fsync needs; empty if they do not."""
    wrong = [f"{name} {settings.get(name)}" for name, value in FSYNC_SETTINGS.items() if settings.get(name) != value]
    needed = ", ".join(f"{name} {value}" for name, value in FSYNC_SETTINGS.items())
    return f"redis-fsync needs {needed}; Redis has {', '.join(wrong)}" if wrong else ""


# ----------------------------------------------------------------------------------------------------------------------
# The session log's contract. `redis.py` and `sqlite.py` keep it; one test-suite holds all to it.
#
# A log holds a session's prompt and decided tokens by absolute position. Rules:
#
# - Only the holder of the newest fence writes. A fence comes from `create`, `claim` or `recreate`, and only rises.
# - An append is compare-content: what the log holds already must be equal, what lies behind its end is added. So an
#   append whose outcome is unknown may be repeated, and where content differs the log wins.
# - A text that the log holds only grows: what was acknowledged may have been shown. A log that came back as it was some
#   seconds ago may be claimed again before the owner of a claim that it lost writes there: whichever of the two has the
#   higher fence, it goes on from what the other one wrote.
# - A missing log is never claimed: its tokens may have been shown to a client, so only someone who still has them all
#   may write it again (`recreate`).
# - A running log expires `ttl_s` seconds after its owner's last write; an ended one `retention_s` seconds after its
#   end. An append of no tokens is such a write: the owner's sign of life, its lease.
# - Running sessions are entered in a *roll*, one for each model (its weights' fingerprint), by their owners, again and
#   again. A session that is not entered in time is missed, and looked after by the orchestrator that asks first. A roll
#   is a hint and never the truth: it is kept apart from the logs, and only a log's fence says who owns a session.
# - A request id is *bound* to the session that its first call began, and to that call's content.

# Microseconds: a claim's fence is a time. Where that is not above the newest fence, it is higher than that one by a
# random step below this: a log whose clock is behind may have lost a claim, whose fence the next one must not get.
MOST_STEP_US = 1 << 20
# Seconds of silence after which a running session's owner is taken to be gone. A wrong guess costs a pause, never text:
# who claims gets a newer fence.
LEASE_S = 10.0
# Seconds between two signs of life, of an owner or of a reader elsewhere; two of them may be lost.
RENEW_S = LEASE_S / 3
# Seconds within which a session must be entered again, or is missed: three entries, two of which may be lost.
CALLED_WITHIN_S = 15.0
# More tokens than any output has: skips all of them where only the rest of a log is wanted.
NONE_OF_IT = 1 << 31
# Seconds for which a request id stays bound before its session's log is written.
BEGINNING_S = 60.0


def awake_or_asleep_s() -> float:
    """Seconds by the machine's clock that nobody sets, and that goes on while it sleeps: what durations are taken by.

    The wall clock may step by hours, where a machine without a battery hears of the time.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LoggedTokens(Protocol):
    """Decided tokens in order, each with its outcome, and what was reported of each where the sampling asks for it."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def outcomes(self) -> Sequence[Outcome]: ...

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]: ...


def random_step() -> int:
    """The random step in one claim's fence, microseconds."""
    return secrets.randbelow(MOST_STEP_US)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What a session was asked for; never changes.

    drafting: whether drafters may take part. ngram: whether the verifier may guess from the text itself. heads: whether
    its heads may.
    prediction, references: what else it may guess from; not in the log, for no text depends on it. `references` are
    here until the session begins.
    echo: readers are shown the prompt.
    created: Unix time in seconds, by the clock of who created it.
    deadline: likewise, when the session ends at the latest; 0 for none.
    priority, parent, private, note: as in the request that began it.
    request_digest: of that request, where it had an id.
    chat: how the text is read as a chat's answer (`orchestrator.chat.models.AnswerForm`); empty of any other prompt.
    The fingerprints and eos_ids pin the session to a model (`orchestrator.peers.models.identity_of`):
    weights_fingerprint covers weights, configuration, dtype and quantisation. `model` and `dtype` are names for people.
    """

    session_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    tenant: str = ""
    request_id: str = ""
    stop: tuple[str, ...] = ()
    drafting: bool = True
    ngram: bool = True
    heads: bool = True
    prediction: tuple[int, ...] = ()
    references: tuple[array[int], ...] = ()
    echo: bool = False
    weights_fingerprint: str = ""
    vocabulary_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    eos_ids: tuple[int, ...] = ()
    model: str = ""
    dtype: str = ""
    created: float = 0.0
    deadline: float = 0.0
    priority: int = 0
    parent: str = ""
    request_digest: str = ""
    private: bool = False
    note: str = ""
    chat: str = ""

    @property
    def prompt_length(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt)

    @property
    def end(self) -> int:
        """The greatest length in tokens, prompt included: it is the same wherever the session runs."""
        return self.prompt_length + self.stopping.max_tokens


@dataclass(frozen=True, slots=True)
class Bound:
    """What a request id stands for. digest: of the request that it came with first; empty if that is unknown."""

    session_id: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    """A log's end as it was at one instant: what was decided behind the first `skipped` tokens of the output.

    length: of the log in tokens, prompt included: the position of the next one.
    tokens: with one outcome each, and what was reported of each where the sampling asks for it.
    reason: None while the session runs. text_length: once it has ended, the length of the output in code points, cut at
    the stop string.
    silent_s: since its owner last wrote (or its claim), in seconds by the store's clock; what `claim` returns has 0.
    """

    fence: int
    owner: str
    length: int
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    skipped: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    reason: FinishReason | None = None
    text_length: int = 0
    cancelled: bool = False
    silent_s: float = 0.0

    def __post_init__(self) -> None:
        check_logged(self)

    @property
    def abandoned(self) -> bool:
        """Whether it runs and its owner was silent for LEASE_S: then it may be claimed at once."""
        return self.reason is None and self.silent_s > LEASE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession(LogTail):
    """A whole log as it was at one instant.

    claimed, ended: Unix time in seconds by the store's clock; ended is None while the session runs.
    retention_s: how long the log stays after the session's end.
    """

    record: SessionRecord
    claimed: float = 0.0
    ended: float | None = None
    retention_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AppendReply:
    """length: of the log in tokens, prompt included. cancelled: somebody asked for the session's end.

    read_s: seconds since another orchestrator last noted a reader (`note_reader`).
    """

    length: int
    cancelled: bool
    read_s: float = math.inf


class SessionStore(Protocol):
    """See the module's text. Every method raises StoreUnavailable, within the store's timeout, if it cannot tell."""

    @property
    def durability(self) -> str:
        """What an acknowledged append survives, by name: see `Level`."""
        ...

    async def create(
        self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None
    ) -> int:
        """Start a log that holds the prompt, and enter it into its model's roll; the fence. Raises SessionExists.

        retention_s: how long the log stays after the session's end; None: as long as `ttl_s`.
        """
        ...

    async def claim(self, session_id: str, owner: str, known: int = 0, now_us: int = 0) -> StoredSession:
        """Become the owner, with a new fence, which no other claim gets; the log as it now stands.

        known: the newest fence that the claimer knows; the new one is above it. now_us: Unix time by its clock: the
        log's own may be behind, and have lost a claim.

        Raises MissingSession.

        It is right at any time, also while the former owner runs: that one's appends are refused from now on (Fenced).
        A session that has ended can be claimed, but takes no more tokens: look at `reason` first, with `read`. A log
        that cannot be read (DamagedLog) is left to its owner, which writes it again with its next append, if it lives.
        """
        ...

    async def recreate(
        self,
        record: SessionRecord,
        logged: LoggedTokens,
        fence: int,
        ttl_s: float,
        owner: str = "",
        retention_s: float | None = None,
        cancelled: bool = False,
    ) -> None:
        """Write a lost log again from its owner's memory, under the owner's fence.

        The highest fence wins. The log that is there is compared, and what it lacks at its end is added; it never
        becomes shorter. Raises Fenced, ContentMismatch.
        cancelled: the owner knows that somebody asked for the end. The flag is kept then, also if the log has lost it.
        """
        ...

    async def append(self, session_id: str, fence: int, append: Append) -> AppendReply:
        """Add tokens, or give a sign of life with none, at the absolute `append.position`.

        With an end they are the last ones, and the session ends with them; both or neither.
        Raises MissingSession, Fenced, StaleLog, ContentMismatch, Gap; what raises these has changed nothing.
        """
        ...

    async def read(self, session_id: str) -> StoredSession | None:
        """The log as it stands; None if there is none. It changes nothing, not even the log's expiry.

        Raises DeletedSession, for as long as the store knows of it, and DamagedLog.
        """
        ...

    async def tail(self, session_id: str, skipped: int) -> LogTail | None:
        """Like `read`, but only what was decided behind `skipped` tokens of the output."""
        ...

    async def cancel(self, session_id: str) -> None:
        """Ask for the session's end; its owner learns of it with its next append. Raises MissingSession."""
        ...

    async def note_reader(self, session_id: str) -> None:
        """Note that a running session is read at another orchestrator; its owner learns it with its next append."""
        ...

    async def delete(self, session_id: str) -> None:
        """Remove prompt and text at once, and the request id's binding; a session that runs is taken from its owner.

        The fence stays for `ttl_s`, so that no former owner writes the log again; until then the session may be deleted
        again. Raises MissingSession.
        """
        ...

    async def bind_request(
        self, tenant: str, request_id: str, session_id: str, ttl_s: float, digest: str = "", gone: str = ""
    ) -> Bound:
        """Bind a request id, or keep it bound for another `ttl_s`; returns what it stands for: the first binding wins.

        gone: a session that has no log: an id that is bound to it may be bound anew. Within BEGINNING_S of the first
        binding that is so only if its owner has bound it a second time, which it does once the session has begun:
        until then the log may just not be written yet.
        """
        ...

    async def bound_request(self, tenant: str, request_id: str) -> Bound | None:
        """What a request id stands for."""
        ...

    async def release_request(self, tenant: str, request_id: str, session_id: str) -> None:
        """Remove a request id's binding, if it is to that session."""
        ...

    async def shared_secret(self, proposed: bytes, ttl_s: float) -> bytes:
        """The secret of this log's users: the first one proposed, kept for at least `ttl_s` from now."""
        ...

    async def call_roll(self, roll: str, session_ids: Sequence[str], within_s: float, ttl_s: float) -> None:
        """Enter these sessions, or say that their owner lives: they are missed unless entered again within `within_s`.

        The roll itself is kept for `ttl_s`.
        """
        ...

    async def strike(self, roll: str, session_ids: Sequence[str]) -> None:
        """Take sessions that have ended, or are gone, out of the roll."""
        ...

    async def missed(self, roll: str, again_s: float, most: int) -> list[str]:
        """At most this many sessions of the roll that were not entered in time.

        Each is told to one caller, and after `again_s` to another: the first may be lost, too.
        """
        ...

    async def ping(self) -> None:
        """Write something small. Raises StoreUnavailable if the store does not answer, or takes no writes."""
        ...

    async def close(self) -> None:
        """Release connections and end tasks; idempotent."""
        ...


def check_logged(logged: LoggedTokens) -> None:
    """Raises ValueError for what no log could hold. An `Append` checks itself."""
    count = len(logged.tokens)
    if count != len(logged.outcomes):
        raise ValueError(f"outcomes: {len(logged.outcomes)} for {count} tokens")
    if len(logged.logprobs) not in (0, count):
        raise ValueError(f"logprobs: {len(logged.logprobs)} for {count} tokens")
