"""Where the failover matrix is played: two of everything that can have a successor, and a relay on every kind of link.

`apart` reaches everything through relays and knows one verifier; `first` and `second` reach everything directly and
know both. All share one log. Every process is there before a cell begins (`mend`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.wan.link import Link
from orchestrator.store import StoredSession
from tests.faults.parts import Parts, Service, parts
from tests.faults.stack import read_log
from tests.orchestrator.redis_for_tests import RedisServer, free_port

# Seconds that sessions have after SIGTERM: text lasts longer, so that it must be handed over.
GRACE_S = "0.3"


@dataclass(frozen=True, slots=True)
class Lines:
    """The relays: of a client to `apart`, and of `apart` to everybody else."""

    client: Link
    verifier: Link
    drafter: Link
    redis: Link

    def of(self, where: str) -> Link:
        """The one that a cell of the matrix is about."""
        return {
            "client-orchestrator": self.client,
            "orchestrator-verifier": self.verifier,
            "orchestrator-drafter": self.drafter,
            "orchestrator-Redis": self.redis,
        }[where]


class Place:
    """All processes; owned by `place`."""

    def __init__(self, owned: Parts, stack: ExitStack, target: str, draft: str) -> None:
        self.redis = stack.enter_context(RedisServer(port=free_port()))
        self.verifiers = [owned.start("verify", target, "--grace", GRACE_S) for _ in range(2)]
        self.drafter = owned.start("draft", draft, "--grace", GRACE_S)
        for service in (*self.verifiers, self.drafter):
            service.ready()
        verifier, drafter, redis = (
            stack.enter_context(Link(to)) for to in (self.verifiers[0].address, self.drafter.address, self.redis.tcp)
        )
        self.apart = _orchestrate(owned, [verifier.address], drafter.address, redis.address)
        known = [each.address for each in self.verifiers]
        self.first, self.second = (_orchestrate(owned, known, self.drafter.address, self.redis.tcp) for _ in range(2))
        for service in (self.apart, self.first, self.second):
            service.ready()
        self.lines = Lines(stack.enter_context(Link(self.apart.address)), verifier, drafter, redis)

    @property
    def services(self) -> list[Service]:
        """Peers before those that need them."""
        return [*self.verifiers, self.drafter, self.apart, self.first, self.second]

    def mend(self) -> None:
        """Start again what has ended, wake what was stopped; no link is cut or held any more."""
        self.redis.mend()
        for link in (self.lines.client, self.lines.verifier, self.lines.drafter, self.lines.redis):
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


def _orchestrate(owned: Parts, verifiers: list[str], drafter: str, redis: str) -> Service:
    named = [word for address in verifiers for word in ("--verifier", address)]
    log = ("--redis-url", f"redis://{redis}", "--grace", GRACE_S)
    return owned.start("orchestrate", *named, "--drafter", drafter, *log)


@contextmanager
def place(target: str, draft: str) -> Iterator[Place]:
    """Targets and drafters as on the command line."""
    with parts() as owned, ExitStack() as stack:
        yield Place(owned, stack, target, draft)
