"""The registry over gRPC, for those who must not reach Redis: the service that tells it, and who follows one.

The service reads the registry once for all callers, and writes nothing. It tells each of them a few services of a large
pool: many edges then spread over it, and no verifier has a link to every edge.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio
import msgspec

from specwire.core.invalid import InvalidParameter
from specwire.registry.directory import SCATTER, Directory, Listing, RegistryUnavailable
from specwire.registry.entry import (
    MOST_CHARACTERS,
    MOST_MODELS,
    InvalidEntry,
    Role,
    ServiceEntry,
    ServiceState,
    check_region,
    checked,
)
from specwire.registry.options import CloudOptions
from specwire.rpc.channel import Backoff, distrust, open_peer_channel, unreachable
from specwire.rpc.errors import Context, ReadableStream, StatusError, retry_after
from specwire.rpc.keys import Token
from specwire.rpc.tls import ClientTls
from specwire.v1 import registry_pb2, registry_pb2_grpc

logger = logging.getLogger(__name__)

ROLES = {registry_pb2.SERVICE_ROLE_VERIFIER: Role.VERIFIER, registry_pb2.SERVICE_ROLE_ORCHESTRATOR: Role.ORCHESTRATOR}
WIRE_ROLES = {role: wire for wire, role in ROLES.items()}
MOST_UINT32 = (1 << 32) - 1


def service_to_wire(entry: ServiceEntry) -> registry_pb2.RegisteredService:
    """Heartbeats are left out: they would make each of them worth telling."""
    return registry_pb2.RegisteredService(
        id=entry.id,
        address=entry.address,
        region=entry.region,
        models=[registry_pb2.RegisteredModel(**asdict(each)) for each in entry.models],
        slots=min(entry.slots, MOST_UINT32),
        kv_bytes=entry.kv_bytes,
        running=min(entry.load.running, MOST_UINT32),
        waiting=min(entry.load.waiting, MOST_UINT32),
        free=min(entry.load.free, MOST_UINT32),
        draining=entry.state is ServiceState.DRAINING,
        started=entry.started,
    )


def service_from_wire(service: registry_pb2.RegisteredService, role: Role, beat: int) -> ServiceEntry:
    """Raises InvalidEntry, as for an entry that was read from Redis."""
    fields = {
        "id": service.id,
        "role": role,
        "address": service.address,
        "region": service.region,
        "models": service.models[: MOST_MODELS + 1],  # one too many is refused as well
        "slots": service.slots,
        "kv_bytes": service.kv_bytes,
        "load": {"running": service.running, "waiting": service.waiting, "free": service.free},
        "state": ServiceState.DRAINING if service.draining else ServiceState.SERVING,
        "started": service.started,
        "beat": beat,
    }
    try:
        entry = msgspec.convert(fields, ServiceEntry, from_attributes=True)
    except ValueError as error:
        raise InvalidEntry("invalid", str(error)) from None
    return checked(service.id, entry)


# ----------------------------------------------------------------------------------------------------------------------
# Who is told what.

# Services that a caller is told, unless it wants another number.
TOLD, MOST_TOLD = 8, 256
MOST_CALLER = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller asked for; fields as in FollowRequest."""

    role: Role
    region: str = ""
    models: frozenset[str] = frozenset()
    most: int = TOLD
    caller: str = ""

    @classmethod
    def of(cls, request: registry_pb2.FollowRequest) -> Wanted:
        """Raises InvalidParameter."""
        role = ROLES.get(request.role)
        if role is None:
            raise InvalidParameter("role", f"must be of verifiers or of orchestrators, not {request.role}")
        if len(request.models) > MOST_MODELS or any(len(each) > MOST_CHARACTERS for each in request.models):
            message = f"must be at most {MOST_MODELS}, of at most {MOST_CHARACTERS} characters each"
            raise InvalidParameter("models", message)
        if request.most > MOST_TOLD:
            raise InvalidParameter("most", f"must be at most {MOST_TOLD}, not {request.most}")
        if len(request.caller) > MOST_CALLER:
            raise InvalidParameter("caller", f"must have at most {MOST_CALLER} characters, not {len(request.caller)}")
        region, models = check_region(request.region), frozenset(request.models)
        return cls(role, region, models, request.most or TOLD, request.caller)

    def chosen(self, entries: Iterable[ServiceEntry]) -> list[ServiceEntry]:
        """Those of the caller's region first, and of equal ones those that it drew: as long as they are there.

        Each service has its lot for each caller (rendezvous hashing), so one that comes or goes moves few callers.
        """
        fit = [each for each in entries if each.role is self.role and self._serves(each)]
        draining = [each for each in fit if each.state is ServiceState.DRAINING]
        serving = [each for each in fit if each.state is ServiceState.SERVING]
        serving.sort(key=lambda each: (each.region != self.region, self._lot(each)))
        return [*serving[: self.most], *draining]

    def _serves(self, entry: ServiceEntry) -> bool:
        return not self.models or any(each.name in self.models for each in entry.models)

    def _lot(self, entry: ServiceEntry) -> bytes:
        return hashlib.blake2b(f"{self.caller}\0{entry.id}".encode(), digest_size=8).digest()


# ----------------------------------------------------------------------------------------------------------------------
# The service.

# Seconds between two looks at the registry, and after which a load that changed is told.
LOOK_S = 1.0
LOAD_EVERY_S = 3.0
MOST_FOLLOWERS = 4096
UNREAD = "the registry has not answered yet"


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Owns `directory` and the task that reads it, from `start` to `stop`.

    `followers`: calls that run. `trouble`: why the registry could not be read; "" if it could.
    """

    def __init__(self, directory: Directory) -> None:
        self.followers = 0
        self.trouble = UNREAD
        self.listing: Listing | None = None
        self._directory = directory
        self._looked = asyncio.Event()
        self._random = random.Random()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="registry")

    async def stop(self) -> None:
        """End all calls with UNAVAILABLE. Idempotent."""
        self._stopping = True
        self._tick()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._directory.close()

    async def Follow(
        self, request: registry_pb2.FollowRequest, context: Context
    ) -> AsyncIterator[registry_pb2.FollowResponse]:
        wanted = Wanted.of(request)
        if self.followers >= MOST_FOLLOWERS:
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_FOLLOWERS} callers follow the registry")
        self.followers += 1
        try:
            async for services in self._told(wanted):
                yield registry_pb2.FollowResponse(services=services)
        finally:
            self.followers -= 1

    async def _told(self, wanted: Wanted) -> AsyncIterator[list[registry_pb2.RegisteredService]]:
        loop, told, told_at = asyncio.get_running_loop(), None, 0.0
        if self.trouble == UNREAD:  # a server that has just started; a look ends within its directory's timeout
            await self._looked.wait()
        while not self._stopping:
            looked = self._looked
            if self.listing is None:
                raise StatusError(grpc.StatusCode.UNAVAILABLE, self.trouble, LOOK_S)
            services = [service_to_wire(each) for each in wanted.chosen(self.listing.entries)]
            services.sort(key=lambda each: each.id)
            if told is None or _urgent(services) != _urgent(told):
                due = True
            else:
                due = services != told and loop.time() - told_at >= LOAD_EVERY_S
            if due:
                told, told_at = services, loop.time()
                yield services
            await looked.wait()
        raise StatusError(grpc.StatusCode.UNAVAILABLE, "the server stops", LOOK_S)

    async def _run(self) -> None:
        while True:
            try:
                self.listing, trouble = await self._directory.listing(), ""
            except RegistryUnavailable as error:
                trouble = str(error)
            except Exception:  # a bug of ours: what is known stays true
                logger.exception("a look at the registry failed")
                trouble = "the registry could not be read"
            if trouble and self.trouble in ("", UNREAD):
                logger.warning("%s; callers keep what they were told", trouble)
            elif self.trouble and not trouble:
                logger.info("the registry answers")
            self.trouble = trouble
            self._tick()
            await asyncio.sleep(LOOK_S * self._random.uniform(1 - SCATTER, 1))

    def _tick(self) -> None:
        """Wake every call."""
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()


def _urgent(services: Sequence[registry_pb2.RegisteredService]) -> list[tuple[Any, ...]]:
    """What is told at once; the rest is load."""
    return [(each.id, each.address, each.region, each.draining, tuple(map(str, each.models))) for each in services]


# ----------------------------------------------------------------------------------------------------------------------
# Who follows it.

# Seconds that a look waits for the first answer; between attempts to connect, growing.
ANSWER_S = 5.0
FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.2, 10.0
MOST_HEARD = MOST_TOLD + 1024


class RemoteDirectory:
    """What a RegistryService tells, read like a `Directory`: services of one role that it chose for us.

    tls, token: of the calls; taken anew, as their files have become, at each connection.

    Invariant: `_task` runs from the first `listing` to `close`.
    """

    def __init__(
        self, cloud: CloudOptions, role: Role, tls: ClientTls | None = None, token: Token | str = "", region: str = ""
    ) -> None:
        self._address = cloud.address
        self._role = role
        self._tls = tls
        self._token = token
        self._request = registry_pb2.FollowRequest(
            role=WIRE_ROLES[role], region=region, models=cloud.models, caller=secrets.token_hex(16)
        )
        self._services: Sequence[registry_pb2.RegisteredService] = ()
        self._trouble = f"{self._address} has not answered yet"
        self._heard = asyncio.Event()
        self._looks = 0
        self._task: asyncio.Task[None] | None = None

    async def listing(self) -> Listing:
        """The services told last, each with a new heartbeat: as long as the stream is up they are registered.

        Raises RegistryUnavailable.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="cloud")
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._heard.wait()
            except TimeoutError:
                pass
        if self._trouble:
            raise RegistryUnavailable(self._trouble)
        self._looks += 1
        ignored: Counter[str] = Counter()
        entries = []
        for service in self._services:
            try:
                entries.append(service_from_wire(service, self._role, self._looks))
            except InvalidEntry as error:
                ignored[error.reason] += 1
        return Listing(tuple(entries), ignored)

    async def note_affinity(self, affinity: dict[str, str]) -> None:
        """Nobody else has the sessions of an edge."""

    async def affinity_of(self, session_id: str) -> str | None:
        return None

    async def close(self) -> None:
        """Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff(FIRST_BACKOFF_S, MOST_BACKOFF_S)
        while True:
            began, wait = loop.time(), 0.0
            try:
                async with open_peer_channel(self._address, self._tls, self._token) as channel:
                    told = registry_pb2_grpc.RegistryServiceStub(channel).Follow(self._request)
                    async for response in ReadableStream(aiter(told)):
                        self._services, self._trouble = response.services[:MOST_HEARD], ""
                        self._heard.set()
                self._trouble = f"{self._address} closed the stream"
            except grpc.aio.AioRpcError as error:
                self._trouble, wait = self._why(error), retry_after(error) or 0.0
            except InvalidParameter as error:
                self._trouble = f"what {self._address} sent cannot be taken: {error}"
            except Exception as error:  # a bug of ours, or a file of keys that cannot be read just now
                logger.exception("following %s failed", self._address)
                self._trouble = f"{self._address}: {error}"
            self._heard.set()
            await asyncio.sleep(max(wait, backoff.next(loop.time() - began)))

    def _why(self, error: grpc.aio.AioRpcError) -> str:
        details, code = error.details() or "", error.code()
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return f"{self._address} is no registry (specwire registry)"
        if code is grpc.StatusCode.UNAVAILABLE:
            known = distrust(details, self._address)
            known = known or unreachable(details, self._address, tls=self._tls is not None)
            return known or f"{self._address}: {details}"
        return f"{self._address}: {code.name}: {details}"
