"""Who may call an orchestrator, and how much of it each tenant may use; validated when built."""

from __future__ import annotations

import argparse
import hashlib
import secrets
from dataclasses import dataclass, field

from specwire.core.rules import GUESSING_RULES, Rule
from specwire.core.sampling import InvalidParameter, Sampling
from specwire.rpc.keys import Keys, read_keys, read_secret

SALT_BYTES = 32
SCOPE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Access:
    """keys: clients' tokens, each of one tenant; None serves everybody as one tenant without a name.

    drafter_keys: tokens of the drafters that dial in. operator_keys: of those who may see what all tenants do.
    sessions: how many a tenant may have running at once; None for no limit.
    tokens_per_minute: prompt and output together, for each tenant; None for no limit.
    rules: what a session's draft tokens may be judged by; None for the default, see `allowed_rules`.
    cache_salt: of `cache_scope`. Between orchestrators with equal ones a tenant's sessions share verifiers' caches.
    """

    keys: Keys | None = None
    drafter_keys: Keys | None = None
    operator_keys: Keys | None = None
    sessions: int | None = None
    tokens_per_minute: int | None = None
    rules: frozenset[Rule] | None = None
    cache_salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES), repr=False, compare=False)

    def __post_init__(self) -> None:
        for flag, value in (("sessions", self.sessions), ("tokens", self.tokens_per_minute)):
            if value is not None and value < 1:
                raise InvalidParameter(f"--tenant-{flag}", f"must be at least 1, not {value}")

    def cache_scope(self, tenant: str) -> bytes:
        """What names a tenant to verifiers: who does not know the salt can neither tell who it is nor make it up."""
        return hashlib.blake2b(tenant.encode(), key=self.cache_salt, digest_size=SCOPE_BYTES).digest()


def allowed_rules(named: frozenset[Rule] | None, outside: bool) -> frozenset[Rule]:
    """Those that are `named`. Else all, but with drafters from `outside` those under which none can change a text."""
    if named is not None:
        return named
    return GUESSING_RULES if outside else frozenset(Rule)


def check_rule(sampling: Sampling, allowed: frozenset[Rule]) -> None:
    """Raises InvalidParameter."""
    if sampling.rule not in allowed:
        names = ", ".join(rule for rule in Rule if rule in allowed)
        raise InvalidParameter("rule", f"{sampling.rule_name} is not allowed here, by --rules or its default: {names}")


def rules_of(given: str | None) -> frozenset[Rule] | None:
    """Of --rules; raises InvalidParameter."""
    if given is None:
        return None
    try:
        return frozenset(Rule(name.strip()) for name in given.split(","))
    except ValueError:
        message = f"must be names of {', '.join(Rule)} with commas between them, not {given!r:.80}"
        raise InvalidParameter("--rules", message) from None


def add_tenant_arguments(parser: argparse.ArgumentParser) -> None:
    """What `access_of` reads, --api-keys apart, which every server has."""
    group = parser.add_argument_group("tenants: one for each name in --api-keys, else all callers together")
    group.add_argument("--tenant-sessions", type=int, metavar="N", help="sessions that a tenant may have at once")
    group.add_argument(
        "--tenant-tokens", type=int, metavar="N", help="tokens that a tenant may have a minute, prompts included"
    )
    group.add_argument(
        "--operator-keys", metavar="FILE", help="who shows a token of FILE may see what all tenants do: specwire top"
    )
    group.add_argument(
        "--rules",
        metavar="RULE,...",
        help="acceptance rules that requests may have (default: all; with --accept-drafters greedy,coupled, under which"
        " no drafter can change a text)",
    )
    group.add_argument(
        "--cache-salt",
        metavar="FILE",
        help="holds a secret, like a token; a tenant's cache is shared between orchestrators with the same one",
    )


def access_of(args: argparse.Namespace, drafter_keys: str | None = None) -> Access:
    """Who may call, and draft with a key in the file `drafter_keys`. InvalidParameter names the flag that is wrong."""
    salt = read_secret("--cache-salt", args.cache_salt)
    return Access(
        keys=read_keys("--api-keys", args.api_keys),
        drafter_keys=read_keys("--drafter-keys", drafter_keys),
        operator_keys=read_keys("--operator-keys", args.operator_keys),
        sessions=args.tenant_sessions,
        tokens_per_minute=args.tenant_tokens,
        rules=rules_of(args.rules),
        cache_salt=hashlib.sha256(salt.encode()).digest() if salt else secrets.token_bytes(SALT_BYTES),
    )
