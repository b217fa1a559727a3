"""A verifier as a service: load, measure, listen, stop. Used by the command line and by actors alike."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from specwire.core.draft import DraftingModel
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import MOST_WINDOW
from specwire.core.model import ModelError, ModelInfo, SlotModel
from specwire.core.policy.costs import StepCosts
from specwire.core.verify.shared_texts import TOKEN_BYTES, ScopeTexts, SharedIndex
from specwire.corpus import texts_of
from specwire.options import DETACH_GRACE_S, QUEUE, QUEUE_WAIT_S, add_options
from specwire.registry.directory import LoadReader, Registrar
from specwire.registry.entry import Role
from specwire.registry.options import NOWHERE, RegistryOptions, register_model, registry_of
from specwire.rpc.errors import Context
from specwire.rpc.keys import Keys
from specwire.rpc.model_info import model_info_to_wire
from specwire.rpc.process import say, share_machine
from specwire.rpc.renewal import Origin, Renewal
from specwire.rpc.server import RunningServer, Service, certified_names, check_free, common_name, serve
from specwire.rpc.server_options import (
    ModelServiceOptions,
    drain_grace,
    model_options,
    run_model_service,
    size_of,
)
from specwire.rpc.service_thread import GoOn, Runnable, ServiceThread
from specwire.telemetry.metrics import (
    Families,
    MetricsListener,
    Registry,
    by_label,
    counter,
    gauge,
    listen,
    process_families,
)
from specwire.telemetry.options import telemetry_of
from specwire.text.vocabulary_map import convention_of
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.engine.engine import Engine
from verify_service.engine.heads import HeadDrafting
from verify_service.engine.messages import Command, QueuePatience, Reports
from verify_service.engine.shares import NO_LIMITS, TenantLimits, TenantShares
from verify_service.metrics import families, load_of
from verify_service.ranks import Ranks
from verify_service.service import EngineThread, VerifyServicer
from verify_service.usage import UsageLog, check_usage

# ----------------------------------------------------------------------------------------------------------------------
# Tenants of a verifier: who they are, by token or certificate, and what each may have (`--tenants FILE`).
#
# The file is YAML: limits by name, `"*"` for each tenant that is not named. All limits are optional:
#
#     berlin: {weight: 2, sessions: 200, slots: 16, kv_memory: 8G, tokens: 800, rows: 32, prefill: 4000}
#     "*": {sessions: 20}
#
# A tenant's name is the holder of the token that its link shows (`--api-keys`); without tokens a name in its
# certificate, one that the file has if there is one, else the common name. Links without either are one tenant
# together.

FLAG = "--tenants"
EVERYBODY_ELSE = "*"
# What the file calls the limit of bytes: it may be written as a size.
MEMORY = "kv_memory"
COUNTS = tuple(each.name for each in fields(TenantLimits) if each.name not in ("weight", "kv_bytes"))
LIMITS = ("weight", MEMORY, *COUNTS)
# Limits by name, and those of everybody else.
TenantTable = tuple[dict[str, TenantLimits], TenantLimits]


def tenants_of(file: str | None) -> Origin[TenantTable] | None:
    """None without a file. InvalidParameter names the tenant and the limit that is wrong."""
    return None if file is None else Origin((file,), partial(_table, file))


def _table(file: str) -> TenantTable:
    try:
        told = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameter(FLAG, f"{file} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidParameter(FLAG, f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(told, dict) or not all(isinstance(name, str) for name in told):
        raise InvalidParameter(FLAG, f"{file} must map names of tenants to their limits")
    named = {name: _limits(f"{file}, {name}", limits) for name, limits in told.items()}
    other = named.pop(EVERYBODY_ELSE, NO_LIMITS)
    return named, other


def _limits(place: str, told: Any) -> TenantLimits:
    told = {} if told is None else told
    if not isinstance(told, dict):
        raise InvalidParameter(FLAG, f"{place}: must be limits by name, not {told!r:.80}")
    for name, value in told.items():
        if name not in LIMITS:
            raise InvalidParameter(FLAG, f"{place}: {name!r:.40} is none of {', '.join(LIMITS)}")
        kinds = int | float if name == "weight" else int | str if name == MEMORY else int
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InvalidParameter(FLAG, f"{place}: {name} must be a number, not {value!r:.40}")
    try:
        kv_bytes = size_of(FLAG, str(told[MEMORY])) if MEMORY in told else None
        counts = {name: told[name] for name in COUNTS if name in told}
        return TenantLimits(weight=float(told.get("weight", 1.0)), kv_bytes=kv_bytes, **counts)
    except InvalidParameter as error:
        message = str(error).removeprefix(f"{error.field}: ")
        raise InvalidParameter(FLAG, f"{place}: {message}") from None


def tenant_of(context: Context, keys: Keys | None, shares: TenantShares) -> str:
    """Whose link it is; "" where nothing tells. Raises StatusError (UNAUTHENTICATED) for an unknown token."""
    if keys is not None:
        return keys.holder(context.invocation_metadata() or ())
    known = sorted(name for name in certified_names(context) if name in shares.named)
    return known[0] if known else common_name(context)


# ----------------------------------------------------------------------------------------------------------------------
# The service.

# Seconds for calls that are not links, such as a health watch.
LAST_CALLS_S = 0.2
# An orchestrator looks into the registry every second.
KNOWN_S = 2.5
PAUSE_S = 0.1
MOST_DETACH_GRACE_S = 3600.0
# Whose figures they are.
VERIFIER = "verifier"
MOST_QUEUE, MOST_QUEUE_WAIT_S = 4096, 3600.0
PATIENCE = QueuePatience(sessions=QUEUE, wait_us=QUEUE_WAIT_S * 1e6)
MIB = 1 << 20
SERVICE = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name


@dataclass(slots=True, eq=False)
class RunningVerifier:
    """A verifier that answers at `address`. meter: where its load is read."""

    _thread: EngineThread
    _servicer: VerifyServicer
    _server: RunningServer
    info: common_pb2.GetModelInfoResponse
    metrics: MetricsListener | None
    _registrar: Registrar
    _renewal: Renewal
    _meter: LoadReader = field(default_factory=LoadReader)
    _usage: UsageLog | None = None

    @property
    def address(self) -> str:
        return self._server.address

    async def failed(self) -> str:
        """Return, with the reason, once the verifier cannot go on."""
        return await self._thread.failed()

    async def stop(self, grace: float = 0.0) -> None:
        """Refuse new links, let the present ones go on for up to `grace` seconds, then end. Idempotent."""
        await self._server.set_serving(False)
        await self._registrar.drain()
        began = asyncio.get_running_loop().time()
        await self._let_it_be_known(grace / 2)
        await self._servicer.drain(max(0.0, began + grace - asyncio.get_running_loop().time()))
        await self._server.stop(LAST_CALLS_S)
        await self._renewal.stop()
        await self._registrar.close()
        await self._thread.stop()
        if self._usage is not None:
            await self._usage.stop()
        if self.metrics is not None:
            await self.metrics.stop()

    async def _let_it_be_known(self, seconds: float) -> None:
        """Say in the registry that it drains, and wait until orchestrators have read it: then none is refused."""
        loop = asyncio.get_running_loop()
        known, last = loop.time() + KNOWN_S, loop.time() + seconds
        while self._registrar.registers and loop.time() < last:
            load = self._meter.read()
            if not (load.running or load.waiting) or (loop.time() >= known and not load.waiting):
                return
            await asyncio.sleep(PAUSE_S)


async def start(
    options: ModelServiceOptions,
    patient: bool = False,
    detach_grace: float = DETACH_GRACE_S,
    patience: QueuePatience = PATIENCE,
    registration: RegistryOptions = NOWHERE,
    shares: TenantShares | None = None,
    usage_log: Path | None = None,
    tenants: Origin[TenantTable] | None = None,
) -> RunningVerifier:
    """Load and measure the model, then listen; health says SERVING from the first answer on.

    Args:
        patient: wait for all draft tokens that are due, as textbook speculation does; for measurements only.
        detach_grace: seconds for which a session without its link is kept; 0 drops it at once.
        patience: with sessions that find no slot.
        registration: where the verifier registers.
        shares: what tenants may have; None where there are none.
        usage_log: where it is written what sessions used.
        tenants: where `shares` come from, which change when it does.

    Raises:
        InvalidParameter: what cannot be served.
        ListenError: the address cannot be listened on.
        ModelError: the model cannot be served.
    """
    check_grace(detach_grace)
    check_patience(patience)
    check_usage(usage_log)
    registration.check_listen(options.listen)
    check_free(options.listened)
    registry, meter = Registry(), LoadReader()
    thread, info = await load(options, registry, meter, patient, detach_grace, patience, shares)
    info.region = registration.region
    whose = None if shares is None else partial(tenant_of, keys=options.keys, shares=shares)
    position_bytes = info.kv_bytes // (info.slots * info.context)
    usage = None if usage_log is None else UsageLog(usage_log, info.model, position_bytes)
    servicer = VerifyServicer(thread, info, whose, usage)
    registry.add(VERIFIER, lambda: _of_links(servicer, usage))
    registry.add(VERIFIER, process_families)
    async with AsyncExitStack() as started:
        started.push_async_callback(thread.stop)
        metrics = await listen(registry, options.metrics, options.tls) if options.metrics else None
        if metrics is not None:
            started.push_async_callback(metrics.stop)
        server = await _serve(servicer, options)
        registrar = register_model(registration, Role.VERIFIER, lambda: info, server.address, lambda: meter.read())
        started.pop_all()
    if usage is not None:
        usage.start()
    renewal = _renewal(options, server, shares, tenants)
    return RunningVerifier(thread, servicer, server, info, metrics, registrar, renewal, meter, usage)


async def _serve(servicer: VerifyServicer, options: ModelServiceOptions) -> RunningServer:
    service = Service(
        SERVICE,
        lambda server: verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server),
        options.keys,
    )
    return await serve([service], options.listen, tls=options.tls, allow_insecure=options.insecure)


def _renewal(
    options: ModelServiceOptions,
    server: RunningServer,
    shares: TenantShares | None,
    tenants: Origin[TenantTable] | None,
) -> Renewal:
    """Of who may call, and of what tenants may have."""

    def renewed() -> None:
        server.recheck()
        if shares is not None and tenants is not None:
            shares.renew(*tenants.latest)

    return Renewal((*options.origins, tenants), renewed)


async def load(
    options: ModelServiceOptions,
    registry: Registry,
    meter: LoadReader | None = None,
    patient: bool = False,
    detach_grace: float = DETACH_GRACE_S,
    patience: QueuePatience = PATIENCE,
    shares: TenantShares | None = None,
    cores: frozenset[int] = frozenset(),
) -> tuple[EngineThread, common_pb2.GetModelInfoResponse]:
    """A verifier's thread, which runs and is to be stopped by the caller, and what is told of its model.

    Raises ModelError. registry: where its metrics are read. meter: where its load is read. cores: see ServiceThread.
    For the rest see `start`.
    """
    share_machine()
    ranks = Ranks(options.ranks, {"spec": options.model, **options.loading()}) if options.ranks > 1 else None
    # Who waits for all that is due tests no guesses of its own.
    text_memory = options.text_memory if options.ngram and not patient else 0
    reader = meter or LoadReader()

    def loaded(
        deliver: Callable[[Reports], None], go_on: GoOn
    ) -> tuple[Runnable[Command], common_pb2.GetModelInfoResponse]:
        from specwire.lm.law.sampler import LogitsSampler  # imports torch, as below

        lm, costs = _measured(options, ranks, go_on)
        engine = Engine(
            lm,
            LogitsSampler(),
            costs,
            deliver,
            patient=patient,
            ngram=options.ngram,
            detach_grace_us=detach_grace * 1e6,
            patience=patience,
            drafting=None if patient else _head_of(lm, options.heads),
            shares=shares,
            text_memory=text_memory,
            known=_known(lm, options),
        )
        registry.add(VERIFIER, lambda: families(engine))
        reader.read = lambda: load_of(engine)
        return engine, _described(lm, costs, text_memory)

    thread = ServiceThread(VERIFIER, loaded, helpers=ranks, cores=cores)
    return thread, await thread.start()


# ----------------------------------------------------------------------------------------------------------------------
# What `load` does in the engine's thread. torch is imported here, which who only parses arguments does not need.


def _measured(options: ModelServiceOptions, ranks: Ranks | None, go_on: GoOn) -> tuple[SlotModel, StepCosts]:
    """The target, and what its steps cost."""
    from specwire.lm import load_model
    from verify_service.engine.calibration import step_costs

    over = "" if ranks is None else f" over {ranks.size} processes"
    say(f"specwire verify: loading {options.model}{over}")
    asked = options.loading()
    asked["ranks"] = ranks
    lm = load_model(options.model, **asked)
    go_on()
    say(f"specwire verify: {lm.slots} slots of {lm.info.context} positions{_kept(lm)}")
    say("specwire verify: measuring forward times")
    return lm, step_costs(lm, go_on)


def _head_of(lm: SlotModel, heads: str) -> HeadDrafting | None:
    """What drafts beside the target, if anything does. ModelError if it cannot."""
    from specwire.lm.heads.slots import HeadFailed
    from verify_service.engine.calibration import calibrate_head

    try:
        return HeadDrafting(lm, calibrate_head(lm, lm)) if isinstance(lm, DraftingModel) else None
    except HeadFailed as error:
        raise ModelError(f"heads: {heads}: {error}") from error


def _known(lm: SlotModel, options: ModelServiceOptions) -> ScopeTexts | None:
    known = known_texts(lm.info, options.references)
    if known is not None:
        say(f"specwire verify: {known.tokens} tokens of {len(known)} documents to propose from")
    return known


def _described(lm: SlotModel, costs: StepCosts, text_memory: int) -> common_pb2.GetModelInfoResponse:
    """What is told of the target."""
    info = model_info_to_wire(lm.info, lm.slots, lm.kv_bytes, convention_of(lm.info.tokenizer_json))
    info.text_room = text_memory // TOKEN_BYTES
    for rows, microseconds in costs.forward.points.items():
        info.forward_times.add(rows=rows, microseconds=round(microseconds))
    return info


def _kept(lm: SlotModel) -> str:
    """What the slots keep, for people."""
    keys, states = (size / MIB for size in (lm.kv_bytes - lm.state_bytes, lm.state_bytes))
    told = f", {keys:.1f} MiB of keys and values" if keys else ""
    if states:
        told += f", {states:.1f} MiB of recurrent layers' states ({states / lm.slots:.2g} MiB a slot)"
    if lm.most_window < MOST_WINDOW:
        told += f"; they have room for windows of {lm.most_window} draft tokens, not {MOST_WINDOW}"
    return told


def _of_links(servicer: VerifyServicer, usage: UsageLog | None) -> Families:
    yield gauge("links_up", "Connections that are up.", servicer.links)
    refused = dict(servicer.refused)
    yield by_label(counter, "sessions_refused_total", "Sessions that were not served, by status.", "status", refused)
    if usage is not None:
        yield counter("usage_records_lost_total", "Records of usage that the file did not take.", usage.lost)


def check_grace(seconds: float) -> None:
    """InvalidParameter unless it is a valid detach grace."""
    if not 0 <= seconds <= MOST_DETACH_GRACE_S:  # nor NaN
        raise InvalidParameter("detach_grace", f"must be from 0 to {MOST_DETACH_GRACE_S:g} seconds, not {seconds:g}")


def check_patience(patience: QueuePatience) -> None:
    """InvalidParameter unless the queue's length and wait are valid."""
    if not 0 <= patience.sessions <= MOST_QUEUE:
        raise InvalidParameter("queue", f"must be from 0 to {MOST_QUEUE} sessions, not {patience.sessions}")
    if not 0 < patience.wait_us <= MOST_QUEUE_WAIT_S * 1e6:  # nor NaN
        seconds = patience.wait_us / 1e6
        raise InvalidParameter("queue-wait", f"must be above 0 and at most {MOST_QUEUE_WAIT_S:g} s, not {seconds:g}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "verify")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        check_grace(args.detach_grace)
        patience = QueuePatience(args.queue, args.queue_wait * 1e6)
        check_patience(patience)
        options, telemetry, registration = model_options(args), telemetry_of(args), registry_of(args)
        registration.check_listen(args.listen)
        tenants = tenants_of(args.tenants)
        shares = None if tenants is None else TenantShares(*tenants.latest)
        check_usage(args.usage_log)
        grace = drain_grace(args)
    except InvalidParameter as error:
        say(f"specwire verify: error: {error}")
        return 2
    telemetry.start(VERIFIER)

    def serving() -> Coroutine[Any, Any, RunningVerifier]:
        return start(options, args.patient, args.detach_grace, patience, registration, shares, args.usage_log, tenants)

    return run_model_service(args, "verify", options, grace, serving)


# ----------------------------------------------------------------------------------------------------------------------
# Documents of the operator's, that a verifier proposes from beside its sessions' texts.
#
# They are the same for all callers, and only read: indexed as texts of sessions are, in memory of their own which no
# other text may take.


def known_texts(info: ModelInfo, references: Sequence[str]) -> ScopeTexts | None:
    """Read the files and folders that the operator named; None where there are none.

    Raises:
        ModelError: names the option and what is wrong with it.
    """
    if not references:
        return None
    if not info.tokenizer_json:
        raise ModelError("reference: this target has no tokenizer to read texts with")
    missing = next((path for path in references if not Path(path).exists()), None)
    if missing is not None:
        raise ModelError(f"reference: there is no {missing}")
    tokenizer = Tokenizer.from_str(info.tokenizer_json.decode())
    texts = ScopeTexts(lambda _: True)
    for number, document in enumerate(texts_of([Path(path) for path in references])):
        ids = tokenizer.encode(document, add_special_tokens=False).ids
        index = SharedIndex(texts, ids, f"document {number}", grows=False)
        while not index.complete:
            index.read()
    if not texts.tokens:
        raise ModelError(f"reference: nothing to read in {', '.join(references)}")
    return texts
