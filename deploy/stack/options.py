"""The options of a stack (`specwire up`, `generate` and `demo`), validated when built."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import demo_pair
from orchestrator.options import (
    HttpAccess,
    OutputLengths,
    check_drafters_per_session,
    check_http,
    check_sse_keep_alive,
)
from orchestrator.tenants import Access
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import parse_plan
from specwire.core.model import AUTO, AUTO_KV, ModelError, is_gguf
from specwire.named_models import NAMED, located
from specwire.options import RETENTION_S, SSE_KEEP_ALIVE_S, cores
from specwire.redis import MEMORY
from specwire.rpc.channel import exposure
from specwire.rpc.server_options import (
    ANY_PORT,
    MOST_THREADS,
    TEXT_MEMORY,
    ModelServiceOptions,
    check_exposure,
    check_listen,
    filled,
    text_memory_of,
)
from specwire.rpc.tls import ServerTls

DRAIN_GRACE = 1.0
VERIFIER, DRAFTER = "verifier", "drafter"


class StackError(RuntimeError):
    """The stack could not start, or cannot go on; one sentence for its user."""


# What the services behind the front doors do not take from a stack, and what only a verifier does.
NOT_OF_SERVICES = ("listen", "insecure", "tls", "metrics")
NOT_OF_DRAFTERS = ("deterministic", "ngram", "text_memory", "references", "heads")


@dataclass(frozen=True, slots=True)
class StackOptions:
    """A whole stack on one machine: options of `specwire up` (`specwire.options`), and what they stand for.

    Attributes:
        draft: None runs without a drafter. more_drafts: of further drafters.
        also: further targets, which requests name; without heads and references, which are of one model.
        redis_url: None starts a private Redis; with one_process the log is in memory.
        listen: of the orchestrator; the other services take free ports on loopback.
        heads: "" for none.
        insecure, tls, access, http and what goes with it: of the orchestrator; only that is reached remotely.
        metrics: of the orchestrator, encrypted as `tls` says; the others' at the ports behind it, plain.
        start_timeout: seconds until everything must be healthy, downloads included.
    """

    target: str
    draft: str | None
    redis_url: str | None = None
    durability: str = ""
    retention: float = RETENTION_S
    listen: str = ANY_PORT
    dtype: str = "float32"
    device: str = "cpu"
    draft_device: str = ""
    compiled: bool = False
    runtime: str = "torch"
    quantization: str = "none"
    kv_type: str = AUTO_KV
    deterministic: bool = False
    target_threads: int = 1
    draft_threads: int = 1
    slots: int = 16
    ngram: bool = True
    text_memory: int = TEXT_MEMORY
    references: tuple[str, ...] = ()
    heads: str = ""
    insecure: bool = False
    tls: ServerTls | None = None
    access: Access = Access()
    grace: float = DRAIN_GRACE
    start_timeout: float = 600.0
    more_drafts: tuple[str, ...] = ()
    drafters_per_session: int = 1
    http: str = ""
    chat_template: str = ""
    tool_format: str = ""
    http_access: HttpAccess = HttpAccess()
    sse_keep_alive: float = SSE_KEEP_ALIVE_S
    max_tokens_default: int = 0
    max_tokens_limit: int = 0
    metrics: str = ""
    log_prompts: bool = False
    plan: str = "auto"
    also: tuple[str, ...] = ()
    one_process: bool = False

    def __post_init__(self) -> None:
        check_exposure(self.listen, self.tls, self.insecure)
        check_http(self.http, self.tls, self.insecure)
        check_sse_keep_alive(self.sse_keep_alive)
        OutputLengths(self.max_tokens_default, self.max_tokens_limit).check_options()
        self.services()  # validates what they are given
        twice = [model for model in self.also if (self.target, *self.also).count(model) > 1]
        if twice:
            raise InvalidParameter("also", f"{twice[0]} is named twice; requests tell models by their names")
        check_drafters_per_session(self.drafters_per_session)
        parse_plan(self.plan)
        if not self.start_timeout > 0:
            raise InvalidParameter("start_timeout", f"must be positive, not {self.start_timeout}")

    @property
    def log_url(self) -> str | None:
        """Where the session log is; None: in a private Redis."""
        return MEMORY if self.one_process and self.redis_url is None else self.redis_url

    def verifiers(self) -> dict[str, ModelServiceOptions]:
        """Return each verifier by its role: verifier, verifier-2, ..."""
        first = self._service(self.target, NOT_OF_SERVICES, threads=self.target_threads)
        others = [
            replace(first, model=model, kv_type=self._kv_type(model), references=(), heads="") for model in self.also
        ]
        return _by_role(VERIFIER, [first, *others])

    def drafters(self) -> dict[str, ModelServiceOptions]:
        """Return each drafter by its role: drafter, drafter-2, ..."""
        models = [self.draft, *self.more_drafts] if self.draft is not None else []
        own = {"device": self.draft_device or self.device, "threads": self.draft_threads}
        return _by_role(DRAFTER, [self._service(each, NOT_OF_SERVICES + NOT_OF_DRAFTERS, **own) for each in models])

    def _service(self, model: str, without: tuple[str, ...], **own: Any) -> ModelServiceOptions:
        kv_type = self._kv_type(model)
        return filled(ModelServiceOptions, self, without=without, model=model, kv_type=kv_type, **own)

    def _kv_type(self, model: str) -> str:
        return self.kv_type if model in NAMED or is_gguf(model) else AUTO_KV

    def addresses(self) -> list[tuple[str, str]]:
        """Where the stack will listen, each with its option's name; what takes free ports on loopback is left out."""
        own = [("listen", self.listen), ("http", self.http), ("metrics", self.metrics)]
        others = [("metrics", each.metrics) for each in self.services().values()]
        return [(name, address) for name, address in [*own, *others] if address]

    def services(self) -> dict[str, ModelServiceOptions]:
        """Return each service to host by its role, each with its figures at a port behind the orchestrator's.

        In one process they are told with the orchestrator's own.
        """
        services = {**self.verifiers(), **self.drafters()}
        if not self.metrics or self.one_process:
            return services
        self._check_figures()
        host, _, first = self.metrics.rpartition(":")
        if int(first) == 0:
            raise InvalidParameter("metrics", f"{self.metrics}: name the first port, services take those behind it")
        return {
            role: replace(options, metrics=f"{host}:{int(first) + number}", insecure=self.insecure)
            for number, (role, options) in enumerate(services.items(), 1)
        }

    def _check_figures(self) -> None:
        """InvalidParameter if others would read along: what stands behind the front doors does not encrypt."""
        check_listen(self.metrics, "metrics")
        if exposure(self.metrics, encrypted=False, insecure=self.insecure) is not None:
            why = "can be reached from other machines, and verifier and drafter do not encrypt here"
            raise InvalidParameter("metrics", f"{self.metrics} {why}; use a loopback address, or --insecure")


def _by_role(kind: str, services: list[ModelServiceOptions]) -> dict[str, ModelServiceOptions]:
    return {kind if number == 1 else f"{kind}-{number}": each for number, each in enumerate(services, 1)}


def kind_of(role: str) -> str:
    """Return what a role's service is: a verifier or a drafter, of which there may be several."""
    return role.partition("-")[0]


def stack_options(args: argparse.Namespace, **given: Any) -> StackOptions:
    """Return the stack that the command line asks for, with what is `given`; InvalidParameter names what is wrong."""
    # The demo drafter has the vocabulary of the demo target only: another target runs alone unless a drafter is named.
    default_draft = str(demo_pair.DRAFT) if args.target is None and not args.no_draft else None
    draft, *more = args.draft or [default_draft]
    for option, model in (("target", args.target), *(("draft", each) for each in (draft, *more))):
        _check_named(option, model)
    return filled(
        StackOptions,
        args,
        without=("http", "tls", "chat_template"),  # texts, which commands make something of
        target=args.target or str(demo_pair.TARGET),
        draft=draft,
        more_drafts=tuple(more),
        target_threads=target_threads(args.target) if args.target_threads is None else args.target_threads,
        ngram=not args.no_ngram,
        text_memory=text_memory_of(args.text_memory),
        references=tuple(args.reference),
        heads=_heads(args),
        **given,
    )


def _heads(args: argparse.Namespace) -> str:
    """See StackOptions."""
    if args.heads is not None:
        return str(args.heads)
    return "" if args.no_heads else AUTO


def included_head(args: argparse.Namespace) -> str:
    """The demo target's head; what `up` takes where another target is named; "" where the user wants none, or how the
    target is served rules heads out.

    It is not for everything: where text is copied a good deal, n-grams on the fastest runtime gain more.
    """
    if args.target is not None:
        return _heads(args)
    headless = args.no_heads or args.compiled or args.deterministic or args.device != "cpu"
    return "" if headless or not demo_pair.HEAD.is_dir() else str(demo_pair.HEAD)


def _check_named(option: str, model: str | None) -> None:
    """InvalidParameter for a named model that is not on this machine."""
    try:
        located(model or "")
    except ModelError as error:
        raise InvalidParameter(option, str(error)) from None


def target_threads(target: str | None) -> int:
    """Threads of a target of which nothing is said. A forward of the included one is too short to be shared (LOG)."""
    return max(1, min(cores(), MOST_THREADS) // (2 if target is None else 1))
