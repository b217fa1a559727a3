"""Tenants: who may call, whose a session is, and how much each tenant may have."""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from orchestrator.store import SessionRecord
from orchestrator.store.encoding import encode_record
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import GUESSING_RULES, Rule, Sampling
from specwire.rpc.errors import RETRY_AFTER, StatusError
from specwire.rpc.keys import Keys, read_keys, read_secret
from specwire.rpc.server_options import size_of

# ----------------------------------------------------------------------------------------------------------------------
# Tenants: whose a session is, and how much each tenant may have.
#
# A session's id tells its tenant to those who know the tenant's name: its last characters are a hash of that name and
# of the random rest. So the id of another tenant's session is refused like one that never existed, without a look-up
# whose time could tell them apart.

# The tenant of all callers of a service without keys.
ANONYMOUS = ""
RANDOM_BYTES = 24
RANDOM_CHARACTERS = 32
TAG_BYTES = 9
SHOWN_CHARACTERS = 64
MINUTE_S = 60.0
# Tokens of references that a tenant's running sessions may have together, of 4 bytes each.
MOST_TENANT_REFERENCES = 1 << 24


def new_session_id(tenant: str) -> str:
    """A new id: 44 characters, the first 32 random."""
    random = secrets.token_urlsafe(RANDOM_BYTES)
    return random + _tag(random, tenant)


def check_owner(session_id: str, tenant: str, field: str = "session_id") -> None:
    """StatusError (NOT_FOUND) unless `session_id` is one of the tenant's; whether the session exists is not told."""
    random, tag = session_id[:RANDOM_CHARACTERS], session_id[RANDOM_CHARACTERS:]
    if not hmac.compare_digest(tag.encode(), _tag(random, tenant).encode()):
        raise no_session(session_id, field)


def no_session(session_id: str, field: str = "session_id") -> StatusError:
    return StatusError(grpc.StatusCode.NOT_FOUND, f"{field}: no session {session_id[:SHOWN_CHARACTERS]!r}")


def _tag(random: str, tenant: str) -> str:
    digest = hashlib.blake2b(f"{tenant}/{random}".encode(), digest_size=TAG_BYTES).digest()
    return base64.urlsafe_b64encode(digest).decode()


# Bytes of the log that a session takes beside its record, for each token of its text, and for what is reported of one:
# by itself, and for each of the most probable ids.
SESSION_BYTES, LOGGED_TOKEN_BYTES, REPORT_BYTES, REPORTED_BYTES = 1024, 8, 64, 8
# Where no --tenant-log says otherwise: what tokens a minute come to while they are kept, and room for conversations.
KEPT_TOKEN_BYTES, LEAST_KEPT = 64, 64 << 20


def most_tokens(record: SessionRecord) -> int:
    """That a session's text may come to."""
    return len(record.prompt) + record.stopping.max_tokens


def record_bytes(record: SessionRecord) -> int:
    """Of what the log has of a session beside its text."""
    return SESSION_BYTES + len(encode_record(record))


def text_bytes(record: SessionRecord, tokens: int) -> int:
    """Of what the log has of a session's text of so many tokens, prompt included."""
    top, decided = record.sampling.logprobs, max(0, tokens - len(record.prompt))
    reported = 0 if top is None else decided * (REPORT_BYTES + REPORTED_BYTES * top)
    return LOGGED_TOKEN_BYTES * tokens + reported


class KeptLogs:
    """What one tenant has in the log, running and ended: the bytes of each session until its retention is over.

    Those of its record are known once it is admitted, and counted with those of its text.

    Invariant: `total` is the sum over `_sizes`.
    """

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[str, tuple[int, int]] = {}
        self._leaving: deque[tuple[float, str]] = deque()

    def put(self, session_id: str, record: int, text: int) -> None:
        self.drop(session_id)
        self._sizes[session_id] = record, text
        self.total += record + text

    def drop(self, session_id: str) -> None:
        """Idempotent."""
        self.total -= sum(self._sizes.pop(session_id, (0, 0)))

    def ended(self, session_id: str, text: int, until: float) -> None:
        if session_id in self._sizes:
            record, _ = self._sizes[session_id]
            self.put(session_id, record, text)
            self._leaving.append((until, session_id))

    def forget(self, now: float) -> None:
        """Those whose retention is over."""
        while self._leaving and self._leaving[0][0] <= now:
            self.drop(self._leaving.popleft()[1])

    def next_s(self, now: float) -> float:
        """Until the next one leaves, if any has ended."""
        return self._leaving[0][0] - now if self._leaving else 0.0


@dataclass(slots=True)
class _Account:
    """What a tenant has left: `tokens` at the time `since`, and the sessions that run with the tokens set aside.

    references: of those that have some, tokens of all. kept: what is in the log of all its sessions.
    """

    tokens: float
    since: float
    running: dict[str, int]
    references: dict[str, int] = field(default_factory=dict)
    kept: KeptLogs = field(default_factory=KeptLogs)


class Allowances:
    """How much each tenant has running and has used up. Each orchestrator counts, and grants, for itself.

    A session is charged its prompt and max_tokens when it begins, and gets back at its end what it did not use. So no
    tenant gets more than a minute's tokens at once, or more than its share in the long run. What the log keeps of it
    counts until the session's retention is over.

    Args:
        clock: seconds. retention: seconds that the log keeps a session after its end.
    """

    def __init__(self, access: Access, clock: Callable[[], float], retention: float = 0.0) -> None:
        self._retention = retention
        self._most_kept = access.most_kept(retention)
        self._sessions = access.sessions
        self._per_minute = access.tokens_per_minute
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, record: SessionRecord) -> None:
        """Charge a new session.

        Raises:
            StatusError: RESOURCE_EXHAUSTED, with the time after which there is room.
            InvalidParameter: max_tokens is more than there can ever be room for.
        """
        account = self._account(record.tenant)
        if self._sessions is not None and len(account.running) >= self._sessions:
            message = f"this tenant has {len(account.running)} sessions running, of at most {self._sessions}"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        references = sum(map(len, record.references))
        if references and sum(account.references.values()) + references > MOST_TENANT_REFERENCES:
            message = (
                f"references: this tenant's running sessions have {sum(account.references.values())} tokens of them"
            )
            message += f", and {references} more exceed {MOST_TENANT_REFERENCES}"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        cost = most_tokens(record)
        logged = record_bytes(record), text_bytes(record, cost)
        self._check_kept(account, sum(logged))
        if self._per_minute is not None:
            self._charge(account, cost, self._per_minute)
        account.running[record.session_id] = cost
        account.kept.put(record.session_id, *logged)
        if references:
            account.references[record.session_id] = references

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge work that begins without a session. StatusError: RESOURCE_EXHAUSTED, there is no room for it now."""
        if self._per_minute is not None:
            self._charge(self._account(tenant), min(tokens, self._per_minute), self._per_minute)

    def _check_kept(self, account: _Account, size: int) -> None:
        if self._most_kept is None:
            return
        now = self._clock()
        account.kept.forget(now)
        if account.kept.total + size > self._most_kept:
            message = f"the log keeps {account.kept.total} bytes of this tenant's sessions, and {size} more exceed"
            message += f" {self._most_kept}: delete some, or wait until they are not kept any longer"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, max(RETRY_AFTER, account.kept.next_s(now)))

    def _charge(self, account: _Account, cost: int, per_minute: int) -> None:
        if cost > per_minute:
            message = f"prompt and output may come to {cost} tokens, and a tenant has {per_minute} a minute"
            raise InvalidParameter("max_tokens", message)
        if cost > account.tokens:
            wait_s = (cost - account.tokens) * MINUTE_S / per_minute
            message = f"this tenant's {per_minute} tokens a minute are used up"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, max(RETRY_AFTER, wait_s))
        account.tokens -= cost

    def may_adopt(self, record: SessionRecord) -> bool:
        """Whether a session may be taken over. Those from other orchestrators may double a tenant's sessions."""
        return self._sessions is None or len(self._account(record.tenant).running) < 2 * self._sessions

    def adopt(self, record: SessionRecord) -> None:
        """Count a session that is driven here from now on, wherever it was admitted; it is charged only once."""
        account = self._account(record.tenant)
        account.running.setdefault(record.session_id, 0)
        account.kept.put(record.session_id, record_bytes(record), text_bytes(record, most_tokens(record)))

    def leave(self, record: SessionRecord) -> None:
        """Stop counting a session that another orchestrator has taken over. Nothing is given back."""
        account = self._account(record.tenant)
        account.references.pop(record.session_id, None)
        if account.running.pop(record.session_id, None) is not None:
            text = text_bytes(record, most_tokens(record))
            account.kept.ended(record.session_id, text, self._clock() + self._retention)

    def settle(self, record: SessionRecord, used: int, logged: bool = True) -> None:
        """Note that the session has ended, `used` tokens long, prompt included. Idempotent.

        logged: the log keeps it for a while.
        """
        account = self._account(record.tenant)
        cost = account.running.pop(record.session_id, None)
        account.references.pop(record.session_id, None)
        if not logged:
            account.kept.drop(record.session_id)
        elif cost is not None:
            account.kept.ended(record.session_id, text_bytes(record, used), self._clock() + self._retention)
        if cost is not None and self._per_minute is not None:
            account.tokens = min(self._per_minute, account.tokens + max(0, cost - used))

    def deleted(self, session_id: str) -> None:
        """The log has nothing of it any more."""
        for account in self._accounts.values():
            account.kept.drop(session_id)

    def _account(self, tenant: str) -> _Account:
        """The tenant's share, with the tokens that time has brought it."""
        now, most = self._clock(), self._per_minute or 0
        account = self._accounts.setdefault(tenant, _Account(most, now, {}))
        account.tokens = min(most, account.tokens + (now - account.since) * most / MINUTE_S)
        account.since = now
        return account


# ----------------------------------------------------------------------------------------------------------------------
# Who may call an orchestrator, and how much of it each tenant may use; validated when built.

SALT_BYTES = 32
SCOPE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Access:
    """keys: clients' tokens, each of one tenant; None serves everybody as one tenant without a name.

    drafter_keys: tokens of the drafters that dial in. operator_keys: of those who may see what all tenants do.
    sessions: how many a tenant may have running at once; None for no limit.
    tokens_per_minute: prompt and output together, for each tenant; None for no limit.
    log_bytes: that the log may keep of each tenant's sessions; None: see `most_kept`.
    rules: what a session's draft tokens may be judged by; None for the default, see `allowed_rules`.
    cache_salt: of `cache_scope`. Between orchestrators with equal ones a tenant's sessions share verifiers' caches.
    """

    keys: Keys | None = None
    drafter_keys: Keys | None = None
    operator_keys: Keys | None = None
    sessions: int | None = None
    tokens_per_minute: int | None = None
    log_bytes: int | None = None
    rules: frozenset[Rule] | None = None
    cache_salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES), repr=False, compare=False)

    def __post_init__(self) -> None:
        for flag, value in (("sessions", self.sessions), ("tokens", self.tokens_per_minute), ("log", self.log_bytes)):
            if value is not None and value < 1:
                raise InvalidParameter(f"--tenant-{flag}", f"must be at least 1, not {value}")

    def most_kept(self, retention: float) -> int | None:
        """Bytes that the log may keep of a tenant for so many seconds.

        By default what its tokens a minute may come to, so that nobody who is held to few tokens fills the log with
        what takes none; None, for no limit, where its tokens have none either.
        """
        if self.log_bytes is not None or self.tokens_per_minute is None:
            return self.log_bytes
        return max(LEAST_KEPT, round(KEPT_TOKEN_BYTES * self.tokens_per_minute * (1 + retention / MINUTE_S)))

    def cache_scope(self, tenant: str) -> bytes:
        """A tenant's name for verifiers. Without the salt it cannot be traced back or forged."""
        return hashlib.blake2b(tenant.encode(), key=self.cache_salt, digest_size=SCOPE_BYTES).digest()


def allowed_rules(named: frozenset[Rule] | None, outside: bool) -> frozenset[Rule]:
    """The rules `named`; else all, but with drafters from `outside` only those that they cannot bend."""
    if named is not None:
        return named
    return GUESSING_RULES if outside else frozenset(Rule)


def check_rule(sampling: Sampling, allowed: frozenset[Rule]) -> None:
    """Raises InvalidParameter."""
    if sampling.rule not in allowed:
        names = ", ".join(rule for rule in Rule if rule in allowed)
        raise InvalidParameter("rule", f"{sampling.rule_name} is not allowed here, by --rules or its default: {names}")


def rules_of(given: str | None) -> frozenset[Rule] | None:
    """The rules that --rules names; raises InvalidParameter."""
    if given is None:
        return None
    try:
        return frozenset(Rule(name.strip()) for name in given.split(","))
    except ValueError:
        message = f"must be names of {', '.join(Rule)} with commas between them, not {given!r:.80}"
        raise InvalidParameter("--rules", message) from None


def access_of(args: argparse.Namespace, drafter_keys: str | None = None) -> Access:
    """Who may call, and draft with a key in the file `drafter_keys`. InvalidParameter names the flag that is wrong."""
    salt = read_secret("--cache-salt", args.cache_salt)
    return Access(
        keys=read_keys("--api-keys", args.api_keys),
        drafter_keys=read_keys("--drafter-keys", drafter_keys),
        operator_keys=read_keys("--operator-keys", args.operator_keys),
        sessions=args.tenant_sessions,
        tokens_per_minute=args.tenant_tokens,
        log_bytes=size_of("--tenant-log", args.tenant_log),
        rules=rules_of(args.rules),
        cache_salt=hashlib.sha256(salt.encode()).digest() if salt else secrets.token_bytes(SALT_BYTES),
    )
