"""Puts the project's code under virtual time and seeded chance, and in front of the simulated network."""

from __future__ import annotations

import random as random_module
import secrets
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from orchestrator.pool import Pool
from orchestrator.store import open_store
from specwire.rpc.channel import open_channel, open_peer_channel
from specwire.rpc.server import Service, serve
from tests.simulation.calls import Channel
from tests.simulation.loop import EPOCH, SimLoop, current_process
from tests.simulation.network import Network, SimRunningServer, SimServer, party_of
from tests.simulation.store import SimStore, StoreView

# Whose modules are patched, and what a simulation must not have from outside.
PATCHED = ("orchestrator", "draft_service", "verify_service", "specwire")
OUTSIDE = {
    "time": time,
    "random": random_module,
    "secrets": secrets,
    "open_channel": open_channel,
    "open_peer_channel": open_peer_channel,
    "open_store": open_store,
    "serve": serve,
}


class VirtualTime:
    """The loop's clock in the shape of the module `time`; `elapse` is for work that takes time within a callback.

    off: seconds by which a host's wall clock is ahead, by its party.
    """

    def __init__(self, loop: SimLoop) -> None:
        self.off: dict[str, float] = {}
        self._loop = loop
        self._elapsed = 0.0

    def elapse(self, seconds: float) -> None:
        self._elapsed += seconds

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def monotonic(self) -> float:
        return self._loop.time()

    def clock_gettime(self, clock: int) -> float:
        """Of the clock that goes on while a machine sleeps, as the loop's does."""
        if clock != self.CLOCK_BOOTTIME:
            raise ValueError(f"clock {clock} is not simulated")
        return self._loop.time()

    def time(self) -> float:
        return EPOCH + self._loop.time() + (self.off.get(party_of(current_process()), 0.0) if self.off else 0.0)

    def monotonic_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def perf_counter(self) -> float:
        return self._loop.time() + self._elapsed

    def perf_counter_ns(self) -> int:
        return round(self.perf_counter() * 1e9)


class SeededSecrets:
    """The module `secrets`, guessable."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def randbits(self, bits: int) -> int:
        return self._random.getrandbits(bits)

    def token_bytes(self, size: int = 32) -> bytes:
        return self._random.randbytes(size)

    def token_hex(self, size: int = 32) -> str:
        return self._random.randbytes(size).hex()

    def token_urlsafe(self, size: int = 32) -> str:
        return urlsafe_b64encode(self._random.randbytes(size)).rstrip(b"=").decode()


@contextmanager
def simulated(
    loop: SimLoop, network: Network, store: SimStore, random: Random, versions: bool
) -> Iterator[VirtualTime]:
    """While it lasts, the project's modules belong to one simulation.

    versions: named verifiers may differ, as those may that are registered.
    """
    clock = VirtualTime(loop)

    async def view(*_: object, **__: object) -> StoreView:
        return store.view(party_of(current_process()))

    async def listen(services: Sequence[Service], *_: object, **__: object) -> SimRunningServer:
        """Where the party is called: by its name."""
        server: Any = SimServer()
        for service in services:
            service.register(server)
        return await network.listen(party_of(current_process()), server)

    inside = {
        "time": clock,
        "random": SimpleNamespace(Random=lambda: Random(random.getrandbits(32)), uniform=random.uniform),
        "secrets": SeededSecrets(random),
        "open_channel": lambda address, tls=None, token="", *_: Channel(network, address, token),
        "open_peer_channel": lambda address, tls=None, token="": Channel(network, address, token),
        "open_store": view,
        "serve": listen,
    }
    hooks = sys.get_asyncgen_hooks()
    with ExitStack() as patches:
        for module, name in _places():
            patches.enter_context(patch.object(module, name, inside[name]))
        patches.enter_context(patch("draft_service.dialler.say"))
        if versions:
            patches.enter_context(patch.object(Pool, "_accept_target", Pool._accept_version))
        sys.set_asyncgen_hooks(finalizer=loop.close_generator)
        try:
            yield clock
        finally:
            sys.set_asyncgen_hooks(*hooks)


def _places() -> list[tuple[ModuleType, str]]:
    """Where the project's code has what comes from outside, under the name that it has at home."""
    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in PATCHED]
    return [(m, name) for m in ours for name, what in OUTSIDE.items() if getattr(m, name, None) is what]
