"""The orchestrator's options, validated when built."""

from __future__ import annotations

import argparse
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.store.base import durability_of
from orchestrator.tenants import Access, allowed_rules
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import Rule
from specwire.core.messages import parse_plan
from specwire.options import NO_HTTP, RETENTION_S, SSE_KEEP_ALIVE_S, VERIFIER_WAIT_S
from specwire.redis import MEMORY
from specwire.registry.options import NO_CLOUD, NOWHERE, CloudOptions, RegistryOptions
from specwire.rpc.channel import check_token_is_safe, host_of, is_loopback
from specwire.rpc.keys import Token
from specwire.rpc.renewal import Origin
from specwire.rpc.server_options import check_exposure, check_metrics
from specwire.rpc.tls import ClientTls, ServerTls

HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
# Any host, any origin.
ANY = "*"
LEAST_BODY_BYTES, MOST_BODY_BYTES = 1024, 1 << 30
# A year: no log is kept, and no text waits, for ever.
LONGEST_S = 365 * 86_400.0
# Drafters of one session: each costs computing time and messages, and helps only where the others are wrong or late.
MOST_DRAFTERS = 8


def check_drafters_per_session(count: int) -> None:
    """Raises InvalidParameter."""
    if not 1 <= count <= MOST_DRAFTERS:
        raise InvalidParameter("drafters-per-session", f"must be from 1 to {MOST_DRAFTERS}, not {count}")


class OutputLengths(NamedTuple):
    """How many tokens an output may have. default: where a request names none; limit: whatever it names.

    0 is what the context has room for.
    """

    default: int = 0
    limit: int = 0

    def check_options(self) -> None:
        """Raises InvalidParameter."""
        for name, value in (("max-tokens-default", self.default), ("max-tokens-limit", self.limit)):
            if not 0 <= value < 1 << 32:
                message = f"must be from 0, which is what the context holds, to {(1 << 32) - 1}, not {value}"
                raise InvalidParameter(name, message)
        if self.limit and self.default > self.limit:
            raise InvalidParameter(
                "max-tokens-default", f"{self.default} is more than --max-tokens-limit, {self.limit}"
            )

    def check(self, asked: int) -> None:
        """Refuse what a request names. Raises InvalidParameter."""
        if self.limit and asked > self.limit:
            raise InvalidParameter("max_tokens", f"{asked} are more than {self.limit}, which this service allows")

    def lowered(self, asked: int, room: int) -> int:
        """What a request gets that may be lowered. asked: 0 for what it gets by default; room: in the context."""
        return min(asked or self.default or room, room, self.limit or room)


UNLIMITED = OutputLengths()


def http_access_of(args: argparse.Namespace) -> HttpAccess:
    """Raises InvalidParameter."""
    return HttpAccess(tuple(args.http_host), tuple(args.http_origin), args.http_body)


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """Who may call by HTTP, and with how much.

    hosts: names that requests may call this server by, beside addresses, localhost and where it listens; * for any.
    origins: pages of which may call it, beside its own; * for any.
    body: longest body in bytes; 0 for what the served contexts may need.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    body: int = 0

    def __post_init__(self) -> None:
        for host in self.hosts:
            if host != ANY and not HOST_NAME.fullmatch(host):
                raise InvalidParameter("http-host", f"must be a host's name without a port, or *, not {host!r}")
        for origin in self.origins:
            if origin != ANY and not ORIGIN.fullmatch(origin):
                raise InvalidParameter("http-origin", f"must be SCHEME://HOST[:PORT] or *, not {origin!r}")
        if self.body and not LEAST_BODY_BYTES <= self.body <= MOST_BODY_BYTES:
            message = f"must be from {LEAST_BODY_BYTES} to {MOST_BODY_BYTES} bytes, not {self.body}"
            raise InvalidParameter("http-body", message)


def http_of(args: argparse.Namespace) -> str:
    """Where to listen for HTTP; "" for nowhere. InvalidParameter where it is no address, or HTTP is not installed."""
    return check_http("" if args.http == NO_HTTP else args.http)


def check_http(address: str, tls: ServerTls | None = None, insecure: bool = True) -> str:
    """`address`; InvalidParameter where it cannot be listened on for HTTP."""
    if address:
        check_exposure(address, tls, insecure, "http")
        if not http_is_installed():
            raise InvalidParameter("http", "needs the extra: pip install 'specwire[http]', or --http none")
    return address


def check_sse_keep_alive(seconds: float) -> None:
    """Raises InvalidParameter."""
    if not 0 < seconds <= LONGEST_S:  # nor NaN
        raise InvalidParameter("sse-keep-alive", f"must be above 0 and at most {LONGEST_S:g} seconds, not {seconds:g}")


def http_is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("jinja2", "starlette", "uvicorn"))


def and_http(url: str | None) -> str:
    """What a ready line says of it."""
    return f" and {url}" if url is not None else ""


def chat_template_of(args: argparse.Namespace) -> str:
    """The template in the file --chat-template; "" without one. InvalidParameter where it cannot be read."""
    if args.chat_template is None:
        return ""
    try:
        return Path(args.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidParameter("--chat-template", f"{args.chat_template} cannot be read: {reason}") from None


@dataclass(frozen=True, slots=True)
class OrchestratorOptions:
    """Options of `specwire orchestrate` (`specwire.options`), and what they stand for. Times are seconds.

    tls: encrypts what is listened on. peer_tls: encrypts the links to verifiers and drafters that are dialled.
    drafter_names: empty lets in everybody who has a certificate.
    access: tokens that callers must show, and what a tenant may have. peer_token: shown to peers that are dialled.
    buffer: tokens that a verifier may decide beyond what is durable and taken by the client; more where it is far.
    start_timeout: for a verifier; for others that are named it waits only a moment longer.
    detach_grace: how long a session with a request id goes on without a reader; without one it is cancelled at once.
    durability: by name (`orchestrator.store.base`); "" takes what redis_url gives.
    session_ttl: how long the log keeps a running session after its owner's last sign of life.
    http, metrics: with the same `tls`; "" for nowhere. Figures are read by whoever can connect, and at `http`, too.
    chat_template: Jinja source. plan: `specwire.core.messages.parse_plan`, fixed for measurements.
    max_tokens_default, max_tokens_limit: see OutputLengths.
    registration: where this orchestrator is registered, and looks for verifiers and drafters beside the named ones.
    cloud: where it asks for verifiers instead, and is not registered.
    """

    verifiers: tuple[str, ...]
    drafters: tuple[str, ...] = ()
    redis_url: str = MEMORY
    durability: str = ""
    listen: str = "127.0.0.1:0"
    insecure: bool = False
    tls: ServerTls | None = None
    peer_tls: ClientTls | None = None
    accept_drafters: bool = False
    drafter_names: tuple[str, ...] = ()
    access: Access = Access()
    peer_token: Token | str = ""
    drafters_per_session: int = 1
    buffer: int = 64
    start_timeout: float = 120.0
    verifier_wait: float = VERIFIER_WAIT_S
    store_timeout: float = 30.0
    detach_grace: float = 30.0
    session_ttl: float = 3600.0
    retention: float = RETENTION_S
    plan: str = "auto"
    http: str = ""
    chat_template: str = ""
    tool_format: str = ""
    http_access: HttpAccess = HttpAccess()
    sse_keep_alive: float = SSE_KEEP_ALIVE_S
    max_tokens_default: int = 0
    max_tokens_limit: int = 0
    metrics: str = ""
    log_prompts: bool = False
    registration: RegistryOptions = NOWHERE
    cloud: CloudOptions = NO_CLOUD

    def __post_init__(self) -> None:
        certified = self.tls is not None and self.tls.client_ca is not None
        if self.drafter_names and not (self.accept_drafters and certified):
            raise InvalidParameter("drafter-name", "is read in certificates: needs --accept-drafters, --tls-client-ca")
        if self.accept_drafters and not (certified or self.access.drafter_keys):
            self._check_drafters_are_near()
        self._check_tokens()
        check_exposure(self.listen, self.tls, self.insecure)
        check_http(self.http, self.tls, self.insecure)
        check_metrics(self.metrics, self.insecure, self.tls)
        check_sse_keep_alive(self.sse_keep_alive)
        if not (self.verifiers or self.registration.url or self.cloud.address):
            raise ValueError("verifiers: at least one address is needed, or --registry")
        if self.registration.url and self.cloud.address:
            raise InvalidParameter("cloud", "and --registry: verifiers are looked for in one of them")
        self.registration.check_listen(self.listen)
        for name in ("start_timeout", "verifier_wait", "store_timeout", "session_ttl", "retention"):
            if not getattr(self, name) > 0:  # nor NaN
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)}")
        for name in ("verifier_wait", "session_ttl", "retention"):
            if getattr(self, name) > LONGEST_S:
                raise ValueError(f"{name}: must be at most {LONGEST_S:g}, not {getattr(self, name)}")
        durability_of(self.durability, self.redis_url)
        parse_plan(self.plan)
        check_drafters_per_session(self.drafters_per_session)
        self.lengths.check_options()
        if self.buffer < 2:
            raise ValueError(f"buffer: must be at least 2, not {self.buffer}")

    @property
    def lengths(self) -> OutputLengths:
        return OutputLengths(self.max_tokens_default, self.max_tokens_limit)

    @property
    def origins(self) -> tuple[Origin[Any] | None, ...]:
        """Of keys, tokens and certificates that may change while it runs; None for those not read of files."""
        access, token = self.access, self.peer_token
        held = (self.tls, self.peer_tls, access.keys, access.drafter_keys, access.operator_keys)
        shown = token.origin if isinstance(token, Token) else None
        return (*(None if each is None else each.origin for each in held), shown)

    @property
    def rules(self) -> frozenset[Rule]:
        """What a session's draft tokens may be judged by here."""
        return allowed_rules(self.access.rules, self.accept_drafters)

    def _check_drafters_are_near(self) -> None:
        """Drafters read along, so an orchestrator that other machines reach must ask for certificates."""
        if not (self.insecure or is_loopback(host_of(self.listen) or "localhost")):
            raise InvalidParameter(
                "accept-drafters",
                f"a drafter is told every prompt, and {self.listen} can be reached from other machines; "
                "ask for tokens with --drafter-keys or for certificates with --tls-client-ca, use a loopback address, "
                "or --insecure",
            )

    def _check_tokens(self) -> None:
        """Drafters read what every tenant writes, so a tenant's token must not be enough to draft."""
        named = self.access.drafter_keys is not None or self.drafter_names
        if self.accept_drafters and self.access.keys is not None and not named:
            raise InvalidParameter("accept-drafters", "with --api-keys it needs --drafter-keys or --drafter-name")
        if self.access.drafter_keys is not None and not self.accept_drafters:
            raise InvalidParameter("--drafter-keys", "needs --accept-drafters")
        for address in (*self.verifiers, *self.drafters, *filter(None, [self.cloud.address])):
            check_token_is_safe(address, self.peer_tls, self.peer_token)
