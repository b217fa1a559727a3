"""The options of a stack (`specwire up`, `generate` and `demo`), validated when built."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

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
from specwire.core.messages import InvalidPlan, parse_plan
from specwire.core.model import AUTO, AUTO_KV, ModelError, is_gguf
from specwire.named_models import NAMED, located
from specwire.options import RETENTION_S, SSE_KEEP_ALIVE_S, cores
from specwire.redis.urls import MEMORY
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

# ----------------------------------------------------------------------------------------------------------------------
# The hosts of verifier and drafter, and their contract.


class ServiceHost(Protocol):
    """Starts services, keeps them on the addresses they were first given, restarts those that die."""

    async def start(self) -> dict[str, str]:
        """Return each role's address once its service is healthy; StackError with one sentence if one cannot be."""
        ...

    async def failed(self) -> str:
        """Return the reason once the services cannot be kept up; otherwise never."""
        ...

    async def stop(self) -> None:
        """End every process. Idempotent, and right at any time, also while start() runs or after it failed."""
        ...


# ----------------------------------------------------------------------------------------------------------------------
# --speculative-config: how to propose, in the words of other servers, where they mean the same here.
#
#     method                        draft_model: a draft model proposes;
#                                   ngram: the verifier, from the text itself (vLLM)
#     model                         of the drafter (vLLM)
#     num_speculative_tokens        a drafter drafts so many at a time: the plan lockstep:K (vLLM)
#     num_assistant_tokens          the same (transformers with a constant schedule, OpenVINO GenAI)
#     assistant_confidence_threshold  0 only: no stop (transformers, OpenVINO GenAI)
#
# Without a number the verifier chooses it. The verifier may test fewer of the drafted tokens, or none, while they do
# not pay; its n-grams are not bound by the number. Other fields are refused by name.

SPECULATIVE = "speculative-config"
DRAFT_MODEL, NGRAM = "draft_model", "ngram"
KNOWN = ("method", "model", "num_speculative_tokens", "num_assistant_tokens", "assistant_confidence_threshold")
# Fields of other servers that have another option here, and its name.
ELSEWHERE = {
    "acceptance_method": "the rule is each request's own (rule)",
    "draft_tensor_parallel_size": "a drafter is one process on one device; 1 needs no saying",
    "disable_by_batch_size": "whether drafting pays is measured for each session, in batches too",
    "num_assistant_tokens_schedule": "without a number of tokens the verifier chooses it anew all the time",
    "posterior_alpha": "give a request the rule typical(epsilon,delta)",
    "posterior_threshold": "give a request the rule typical(epsilon,delta)",
    "prompt_lookup_max": "what is looked up, and how far, follows from what was accepted before",
    "prompt_lookup_min": "what is looked up, and how far, follows from what was accepted before",
    "prompt_lookup_num_tokens": "give the method ngram; how many are proposed follows from what was accepted before",
    "quantization": "give --quantization",
}


@dataclass(frozen=True, slots=True)
class Speculative:
    """drafter, ngram: whether these propose; None where nothing is said of it.

    draft: the draft model, None for whichever the target has. plan: see `specwire.core.messages.parse_plan`.
    """

    drafter: bool | None = None
    ngram: bool | None = None
    draft: str | None = None
    plan: str = "auto"

    def with_flags(self, draft: bool, no_draft: bool, no_ngram: bool) -> Speculative:
        """Apply this to what --draft, --no-draft and --no-ngram leave open. Raises InvalidParameter."""
        if draft and self.draft is not None:
            _refuse("model", "says what --draft says, too: leave one of them out")
        if draft and self.drafter is False:
            _refuse("method", f"{NGRAM} is without the drafter that --draft names: leave one of them out")
        if no_draft and (self.drafter or self.plan != "auto"):
            _refuse("draft model", "contradicts --no-draft: leave one of them out")
        if no_ngram and self.ngram:
            _refuse("method", f"{NGRAM} contradicts --no-ngram: leave one of them out")
        return replace(
            self, drafter=not no_draft and self.drafter is not False, ngram=not no_ngram and self.ngram is not False
        )


def speculative_of(text: str) -> Speculative:
    """Raises InvalidParameter, which names the field and its value."""
    fields = _fields(text)
    method = fields.get("method", DRAFT_MODEL if "model" in fields else None)
    if method not in (None, DRAFT_MODEL, NGRAM):
        _refuse("method", f"must be {DRAFT_MODEL} or {NGRAM}, not {json.dumps(method)}")
    model = fields.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        _refuse("model", f"must be a path or hub id, not {json.dumps(model)}")
    count = _count(fields)
    if fields.get("assistant_confidence_threshold", 0) != 0:
        reason = "must be 0: no chain ends by its drafter's confidence"
        _refuse("assistant_confidence_threshold", reason)
    if method == NGRAM:
        for name in ("model", "num_speculative_tokens", "num_assistant_tokens"):
            if name in fields:
                _refuse(name, "is a draft model's: with the method ngram the verifier chooses what to propose")
        return Speculative(drafter=False, ngram=True)
    plan = "auto" if count is None else f"lockstep:{count}"
    if method is None:
        return Speculative(plan=plan)
    return Speculative(drafter=True, ngram=False, draft=model, plan=plan)


def _fields(text: str) -> dict[str, Any]:
    """The fields that are not null. Raises InvalidParameter for an unknown name."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise InvalidParameter(SPECULATIVE, f"must be a JSON object, not {text!r}: {error}") from None
    except RecursionError:
        raise InvalidParameter(SPECULATIVE, "is nested too deeply") from None
    if not isinstance(fields, dict):
        raise InvalidParameter(SPECULATIVE, f"must be a JSON object, not {text!r}")
    for name in fields:
        if name in ELSEWHERE:
            _refuse(name, f"is not taken: {ELSEWHERE[name]}")
        if name not in KNOWN:
            _refuse(name, f"is not known; there are {', '.join(KNOWN)}")
    return {name: value for name, value in fields.items() if value is not None}


def _count(fields: dict[str, Any]) -> int | None:
    """Tokens of a window; None where nobody says."""
    given = [name for name in ("num_speculative_tokens", "num_assistant_tokens") if name in fields]
    for name in given:
        value = fields[name]
        if type(value) is not int or value < 1:
            _refuse(name, f"must be a whole number from 1 on, not {json.dumps(value)}")
        try:
            parse_plan(f"lockstep:{value}")
        except InvalidPlan as error:
            _refuse(name, str(error))
    if len({fields[name] for name in given}) > 1:
        _refuse(given[1], f"contradicts {given[0]}, which means the same")
    return fields[given[0]] if given else None


def _refuse(name: str, why: str) -> NoReturn:
    raise InvalidParameter(SPECULATIVE, f"{name} {why}")


DRAIN_GRACE = 1.0
VERIFIER, DRAFTER = "verifier", "drafter"


class StackError(RuntimeError):
    """The stack could not start, or cannot go on; one sentence for its user."""


# What the services behind the front doors do not take from a stack, and what only a verifier does.
NOT_OF_SERVICES = ("listen", "insecure", "tls", "metrics")
NOT_OF_DRAFTERS = ("deterministic", "ngram", "text_memory", "references", "table", "heads")


@dataclass(frozen=True, slots=True)
class StackOptions:
    """A whole stack on one machine: options of `specwire up` (`specwire.options`), and what they stand for.

    Attributes:
        draft: None runs without a drafter. more_drafts: of further drafters.
        also: further targets, which requests name; without heads, references and table, which are of one model.
        redis_url: None starts a private Redis; with one_process the log is in memory.
        listen: of the orchestrator; the other services take free ports on loopback.
        heads: "" for none.
        insecure, tls, access, http and what goes with it: of the orchestrator; only that is reached remotely.
        metrics: of the orchestrator, encrypted as `tls` says; the others' at the ports behind it, plain.
        ray: host the services in Ray actors; otherwise in plain child processes.
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
    table: str = ""
    heads: str = ""
    insecure: bool = False
    tls: ServerTls | None = None
    access: Access = Access()
    grace: float = DRAIN_GRACE
    ray: bool = True
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
        if not self.start_timeout > 0:
            raise InvalidParameter("start_timeout", f"must be positive, not {self.start_timeout}")

    @property
    def log_url(self) -> str | None:
        """Where the session log is; None: in a private Redis."""
        return MEMORY if self.one_process and self.redis_url is None else self.redis_url

    def verifier(self) -> ModelServiceOptions:
        return filled(
            ModelServiceOptions,
            self,
            without=NOT_OF_SERVICES,
            model=self.target,
            kv_type=self._kv_type(self.target),
            threads=self.target_threads,
        )

    def verifiers(self) -> dict[str, ModelServiceOptions]:
        """Return each verifier by its role: verifier, verifier-2, ..."""
        first = self.verifier()
        others = [
            replace(first, model=model, kv_type=self._kv_type(model), references=(), table="", heads="")
            for model in self.also
        ]
        return {
            VERIFIER if number == 1 else f"{VERIFIER}-{number}": options
            for number, options in enumerate([first, *others], 1)
        }

    def drafters(self) -> dict[str, ModelServiceOptions]:
        """Return each drafter by its role: drafter, drafter-2, ..."""
        models = [self.draft, *self.more_drafts] if self.draft is not None else []
        return {
            DRAFTER if number == 1 else f"{DRAFTER}-{number}": filled(
                ModelServiceOptions,
                self,
                without=NOT_OF_SERVICES + NOT_OF_DRAFTERS,
                model=model,
                device=self.draft_device or self.device,
                kv_type=self._kv_type(model),
                threads=self.draft_threads,
            )
            for number, model in enumerate(models, 1)
        }

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


def kind_of(role: str) -> str:
    """Return what a role's service is: a verifier or a drafter, of which there may be several."""
    return role.partition("-")[0]


def stack_options(args: argparse.Namespace, **given: Any) -> StackOptions:
    """Return the stack that the command line asks for, with what is `given`; InvalidParameter names what is wrong."""
    # The demo drafter has the vocabulary of the demo target only: another target runs alone unless a drafter is named.
    default_draft = str(demo_pair.DRAFT) if args.target is None else None
    speculative = _speculative(args)
    draft, *more = args.draft or [speculative.draft or default_draft]
    for option, model in (("target", args.target), *(("draft", each) for each in (draft, *more))):
        _check_named(option, model)
    return filled(
        StackOptions,
        args,
        without=("http", "tls", "chat_template"),  # texts, which commands make something of
        target=args.target or str(demo_pair.TARGET),
        draft=draft if speculative.drafter else None,
        more_drafts=tuple(more),
        target_threads=target_threads(args.target) if args.target_threads is None else args.target_threads,
        ngram=bool(speculative.ngram),
        text_memory=text_memory_of(args.text_memory),
        references=tuple(args.reference),
        heads=_heads(args),
        ray=not args.no_ray,
        plan=speculative.plan,
        **given,
    )


def _heads(args: argparse.Namespace) -> str:
    """See StackOptions. Who says what proposes gets nothing else."""
    if args.heads is not None:
        return str(args.heads)
    return "" if args.no_heads or args.speculative_config is not None else AUTO


def included_head(args: argparse.Namespace) -> str:
    """The demo target's head; what `up` takes where another target is named; "" where the user says what proposes, or
    how the target is served rules heads out.

    It is not for everything: where text is copied a good deal, n-grams on the fastest runtime gain more.
    """
    if args.target is not None:
        return _heads(args)
    otherwise = args.no_heads or args.speculative_config is not None
    headless = args.compiled or args.deterministic or args.device != "cpu"
    return "" if otherwise or headless or not demo_pair.HEAD.is_dir() else str(demo_pair.HEAD)


def _speculative(args: argparse.Namespace) -> Speculative:
    """What the flags say together: --speculative-config, --draft, --no-draft and --no-ngram."""
    said = Speculative() if args.speculative_config is None else speculative_of(args.speculative_config)
    wanted = said.with_flags(bool(args.draft), args.no_draft, args.no_ngram)
    needs_draft = said.drafter or said.plan != "auto"
    if needs_draft and not (said.draft or args.draft) and args.target is not None:
        raise InvalidParameter(
            SPECULATIVE, "model is missing: a target that is named needs a draft model that is named"
        )
    return wanted


def _check_named(option: str, model: str | None) -> None:
    """InvalidParameter for a named model that is not on this machine."""
    try:
        located(model or "")
    except ModelError as error:
        raise InvalidParameter(option, str(error)) from None


def target_threads(target: str | None) -> int:
    """Threads of a target of which nothing is said. A forward of the included one is too short to be shared (LOG)."""
    return max(1, min(cores(), MOST_THREADS) // (2 if target is None else 1))
