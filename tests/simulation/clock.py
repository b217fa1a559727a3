"""Puts the project's code under virtual time and seeded chance, and in front of the simulated network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

from tests.simulation.calls import Channel
from tests.simulation.loop import SimLoop
from tests.simulation.network import Network

# Where code asks for the time, for chance, or for a channel.
CLOCKED = (
    "orchestrator.driver.time",
    "orchestrator.link.time",
    "orchestrator.peers.time",
    "orchestrator.replies.time",
    "orchestrator.requests.time",
    "draft_service.sessions.time",
    "verify_service.clock.time",
    "specwire.lm.scripted.time",
)
CHANNELS = ("orchestrator.link.open_channel", "draft_service.dialling.open_channel")


class VirtualTime:
    """The loop's clock in the shape of the module `time`; `elapse` is for work that takes time within a callback."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._elapsed = 0.0

    def elapse(self, seconds: float) -> None:
        self._elapsed += seconds

    def monotonic(self) -> float:
        return self._loop.time()

    def time(self) -> float:
        return 1.0 + self._loop.time()

    def monotonic_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def perf_counter(self) -> float:
        return self._loop.time() + self._elapsed

    def perf_counter_ns(self) -> int:
        return round(self.perf_counter() * 1e9)


def seeded_secrets(random: Random) -> SimpleNamespace:
    return SimpleNamespace(
        token_urlsafe=lambda size=32: f"session-{random.getrandbits(32):08x}", randbits=random.getrandbits
    )


@contextmanager
def simulated(loop: SimLoop, network: Network, random: Random) -> Iterator[VirtualTime]:
    """While it lasts, the patched modules belong to one simulation."""
    clock = VirtualTime(loop)
    replaced: dict[str, object] = dict.fromkeys(CLOCKED, clock)
    replaced |= {name: lambda address, *_: Channel(network, address) for name in CHANNELS}
    replaced["orchestrator.requests.secrets"] = seeded_secrets(random)
    replaced["draft_service.dialling.say"] = lambda _: None
    replaced["specwire.rpc.backoff.random"] = SimpleNamespace(Random=lambda: Random(random.getrandbits(32)))
    hooks = sys.get_asyncgen_hooks()
    with ExitStack() as patches:
        for name, value in replaced.items():
            patches.enter_context(patch(name, value))
        sys.set_asyncgen_hooks(finalizer=loop.close_generator)
        try:
            yield clock
        finally:
            sys.set_asyncgen_hooks(*hooks)
