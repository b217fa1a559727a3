"""How a service is told to register, and where to look: --registry, --advertise, --region, --cloud."""

from __future__ import annotations

import argparse
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from specwire.core.invalid import InvalidParameter
from specwire.redis import InvalidUrl, connection_of
from specwire.registry.directory import FIELD, TIMEOUT_S, Directory, Registrar, new_id
from specwire.registry.entry import (
    MOST_CHARACTERS,
    MOST_MODELS,
    InvalidEntry,
    Load,
    Role,
    ServedModel,
    ServiceEntry,
    check_region,
    checked_address,
)
from specwire.rpc.channel import host_of
from specwire.rpc.model_info import Identity
from specwire.rpc.server_options import check_listen
from specwire.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """url: of Redis, as in `specwire.redis`; "" registers nowhere.

    advertise: HOST or HOST:PORT where others dial the service; "" takes the address that it listens on.
    region: where the service is, by a name of the operator's choice; "" says nothing.
    """

    url: str = ""
    advertise: str = ""
    region: str = ""

    def __post_init__(self) -> None:
        check_region(self.region)
        if self.advertise and not self.url:
            raise InvalidParameter("advertise", "needs --registry")
        if self.url:
            _check_url(self.url)
            advertised(self.advertise, "localhost:1")

    def check_listen(self, listen: str) -> None:
        """InvalidParameter if other services could not dial this address."""
        host = host_of(listen)
        if self.url and not self.advertise and _is_wildcard(host):
            raise InvalidParameter("advertise", f"is needed: {listen} does not say where others dial this service")


NOWHERE = RegistryOptions()


@dataclass(frozen=True, slots=True)
class CloudOptions:
    """Where services are asked for over gRPC (`specwire registry`), by who must not reach Redis.

    address: HOST:PORT; "" for nowhere. models: names of those to ask for; empty for all.
    """

    address: str = ""
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.address:
            check_listen(self.address, "cloud")
        if self.models and not self.address:
            raise InvalidParameter("cloud-model", "needs --cloud")
        if len(self.models) > MOST_MODELS or any(len(each) > MOST_CHARACTERS for each in self.models):
            message = f"must be at most {MOST_MODELS} names of at most {MOST_CHARACTERS} characters"
            raise InvalidParameter("cloud-model", message)


NO_CLOUD = CloudOptions()


def cloud_of(args: argparse.Namespace) -> CloudOptions:
    """Raises InvalidParameter."""
    return CloudOptions(args.cloud, tuple(args.cloud_model))


def registry_of(args: argparse.Namespace) -> RegistryOptions:
    """Raises InvalidParameter."""
    return RegistryOptions(args.registry, args.advertise, args.region)


def advertised(advertise: str, listening: str) -> str:
    """Where others dial a service that listens at `listening`, HOST:PORT. Raises InvalidParameter."""
    address = advertise or listening
    if advertise and (":" not in advertise or advertise.endswith("]")):
        address = f"{advertise}:{listening.rpartition(':')[2]}"
    try:
        return checked_address("advertise", address)
    except InvalidEntry as error:
        raise InvalidParameter("advertise", str(error).partition(": ")[2]) from None


def register_model(
    options: RegistryOptions,
    role: Role,
    info: Callable[[], common_pb2.GetModelInfoResponse],
    address: str,
    load: Callable[[], Load],
) -> Registrar:
    """Register a service of one model, which answers at `address`. The caller closes what this returns.

    info: of the model as it is then: a drafter's may change.
    """

    def describe(entry: ServiceEntry) -> ServiceEntry:
        now = info()
        identity = Identity.of(now).digest if role is Role.VERIFIER else ""
        model = ServedModel(now.model, now.weights_fingerprint, now.vocabulary_fingerprint, identity)
        return replace(entry, models=(model,), slots=now.slots, kv_bytes=now.kv_bytes, load=load())

    return register(options, role, address, describe)


def register(
    options: RegistryOptions, role: Role, address: str, describe: Callable[[ServiceEntry], ServiceEntry]
) -> Registrar:
    """Register a service. describe: adds to its entry what changes. As `register_model`."""
    at = advertised(options.advertise, address)
    entry = ServiceEntry(new_id(), role, at, region=options.region, started=time.time())
    registrar = Registrar(Directory.at(options.url) if options.url else None, lambda: describe(entry))
    registrar.start()
    return registrar


def _check_url(url: str) -> None:
    try:
        connection_of(url, TIMEOUT_S, FIELD)
    except InvalidUrl as error:
        message = str(error).removeprefix(f"{FIELD}: ")
        raise InvalidParameter(FIELD, message) from None


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
