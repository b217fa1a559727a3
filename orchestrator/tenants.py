"""Tenants: whose a session is, and how much each tenant may have.

A session's id says whose it is, to those who know the tenant: its last characters are a hash of the tenant's name and
of the random rest. So an id of somebody else's session is as unknown here as one that was never given out, and nothing
is looked up that could take its time and tell them apart.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from orchestrator.access import Access
from orchestrator.store import SessionRecord
from specwire.core.sampling import InvalidParameter
from specwire.rpc.errors import RETRY_AFTER, StatusError

# Who calls a service that asks nobody for a token.
ANONYMOUS = ""
RANDOM_BYTES = 24
RANDOM_CHARACTERS = 32
TAG_BYTES = 9
SHOWN_CHARACTERS = 64
MINUTE_S = 60.0


def new_session_id(tenant: str) -> str:
    """44 characters, of which nobody can guess the first 32."""
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


@dataclass(slots=True)
class _Account:
    """What a tenant has left: `tokens` at the time `since`, and the sessions that run with the tokens set aside."""

    tokens: float
    since: float
    running: dict[str, int]


class Allowances:
    """How much each tenant has running and has used up. Kept by this process: each orchestrator grants as much anew.

    A session is charged when it begins with all that it may take, prompt and max_tokens; what it did not take is given
    back at its end. So no tenant gets more than a minute's tokens at once, or more than its share in the long run.

    Args:
        clock: seconds.
    """

    def __init__(self, access: Access, clock: Callable[[], float]) -> None:
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
        cost = len(record.prompt) + record.stopping.max_tokens
        if self._per_minute is not None:
            self._charge(account, cost, self._per_minute)
        account.running[record.session_id] = cost

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
        """What comes from other orchestrators may double a tenant's sessions: its own, and those of one that died."""
        return self._sessions is None or len(self._account(record.tenant).running) < 2 * self._sessions

    def adopt(self, record: SessionRecord) -> None:
        """A session is driven here from now on, admitted here or elsewhere: it counts, and is charged only once."""
        self._account(record.tenant).running.setdefault(record.session_id, 0)

    def leave(self, record: SessionRecord) -> None:
        """Another orchestrator has taken the session over. It charges nothing, so nothing is given back here."""
        self._account(record.tenant).running.pop(record.session_id, None)

    def settle(self, record: SessionRecord, used: int) -> None:
        """The session has ended, `used` tokens long, prompt included. Idempotent."""
        account = self._account(record.tenant)
        cost = account.running.pop(record.session_id, None)
        if cost is not None and self._per_minute is not None:
            account.tokens = min(self._per_minute, account.tokens + max(0, cost - used))

    def _account(self, tenant: str) -> _Account:
        """The tenant's, with what time has brought it."""
        now, most = self._clock(), self._per_minute or 0
        account = self._accounts.setdefault(tenant, _Account(most, now, {}))
        account.tokens = min(most, account.tokens + (now - account.since) * most / MINUTE_S)
        account.since = now
        return account
