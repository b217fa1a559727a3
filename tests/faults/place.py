"""Where the failover matrix is played: two of everything that can have a successor, and a relay on every kind of link.

`apart` reaches verifier and log through relays and knows one verifier; `first` and `second` reach everything directly
and know both, `second` from a registry that it and they reach through a relay. Two are for what happens to drafters:
`drafting` reaches the drafter through a relay, `hub` is dialled by a drafter of its own through another. All share one
log. Every process is there before a cell begins (`mend`).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from calendar import timegm
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench.harness.services import ANY_PORT
from bench.relay.link import RelayLink
from orchestrator.store import StoredSession
from tests.faults.matrix import LINKS
from tests.faults.parts import Parts, ServiceProcess, parts
from tests.faults.stack import read_log
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_port

# Seconds that sessions have after SIGTERM: text lasts longer, so that it must be handed over.
GRACE_S = "0.3"
# Every line with its time.
LOGGED = ("--log-format", "json", "--log-level", "info")
HTTP = ("--http", ANY_PORT)


class Place:
    """All processes; owned by `place`. `over_http`: where `apart` (through its relay) and `second` are called so.

    `lines`: the relays, by the places of the matrix: of clients to `apart`, of `apart` to verifier and log, of
    `drafting` to the drafter, of the drafter that dials `hub`, of verifiers, drafter and `second` to the registry.
    """

    def __init__(
        self,
        owned: Parts,
        stack: ExitStack,
        target: str,
        draft: str,
        words: tuple[str, ...],
        vllm: tuple[str, ...],
        plan: str,
    ) -> None:
        self._owned = owned
        self.redis = stack.enter_context(RedisServer(port=free_port()))
        registry = stack.enter_context(RelayLink(stack.enter_context(RedisServer(port=free_port())).tcp))
        found = ("--registry", f"redis://{registry.address}")
        self.verifiers = [
            owned.start("verify", target, "--grace", GRACE_S, *found, *words, *more, python=python)
            for python, *more in (vllm or (sys.executable,), (sys.executable,))
        ]
        self.drafter = owned.start("draft", draft, "--grace", GRACE_S, *found, *words)
        for service in (*self.verifiers, self.drafter):
            service.ready()
        verifier, drafter, redis = (
            stack.enter_context(RelayLink(to))
            for to in (self.verifiers[0].address, self.drafter.address, self.redis.tcp)
        )
        known = [each.address for each in self.verifiers]
        self.apart = self._orchestrate([verifier.address], redis.address, "--drafter", self.drafter.address, *HTTP)
        self.first = self._orchestrate(known, self.redis.tcp, "--drafter", self.drafter.address)
        self.second = self._orchestrate([], self.redis.tcp, *found, *HTTP)
        planned = ("--plan", plan)
        self.drafting = self._orchestrate(known, self.redis.tcp, "--drafter", drafter.address, *planned)
        self.hub = self._orchestrate(known[:1], self.redis.tcp, "--accept-drafters", *planned)
        for service in self.orchestrators:
            service.ready()
        client, http, joined = (
            stack.enter_context(RelayLink(to)) for to in (self.apart.address, self.apart.http, self.hub.address)
        )
        self.joined = owned.start("draft", draft, "--connect", joined.address, "--grace", GRACE_S, *words)
        self.joined.ready()
        relays = client, http, verifier, drafter, joined, redis, registry
        self.lines = dict(zip(LINKS, relays, strict=True))
        self.over_http = [http.address, self.second.http]

    def _orchestrate(self, verifiers: list[str], redis: str, *more: str) -> ServiceProcess:
        named = [word for address in verifiers for word in ("--verifier", address)]
        log = ("--redis-url", f"redis://{redis}", "--grace", GRACE_S, *LOGGED)
        return self._owned.start("orchestrate", *named, *more, *log)

    @property
    def orchestrators(self) -> list[ServiceProcess]:
        return [self.apart, self.first, self.second, self.drafting, self.hub]

    @property
    def services(self) -> list[ServiceProcess]:
        """Peers before those that need them."""
        return [*self.verifiers, self.drafter, *self.orchestrators, self.joined]

    def mend(self) -> None:
        """Start again what has ended, wake what was stopped; no link is cut or held any more."""
        self.redis.mend()
        for link in self.lines.values():
            link.stall(0.0)
        ended = [service for service in self.services if not service.lives]
        for service in ended:
            service.restart()
        for service in ended:
            service.ready()
        for service in self.services:
            service.send(signal.SIGCONT)

    def log(self, session_id: str) -> StoredSession:
        """What Redis holds of a session."""
        log = read_log(f"redis://{self.redis.tcp}", session_id)
        assert log is not None
        return log


def said_since(service: ServiceProcess, moment: float) -> Iterator[tuple[float, str]]:
    """What an orchestrator of a place has logged since `moment`: when, by the wall's clock, and what."""
    for line in service.said().splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue  # such as the lines of gRPC's own library
        whole, _, milliseconds = told["time"].removesuffix("Z").partition(".")
        at = timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + int(milliseconds) / 1000
        if at >= moment - 0.001:
            yield at, str(told["message"])


@contextmanager
def place(target: str, draft: str, *words: str, vllm: tuple[str, ...] = (), plan: str = "auto") -> Iterator[Place]:
    """Targets and drafters as on the command line; `words`: more for both.

    vllm: the Python whose environment the first verifier runs in, and more words for it. plan: of `drafting` and `hub`.
    """
    with parts() as owned, ExitStack() as stack:
        yield Place(owned, stack, target, draft, words, vllm, plan)
