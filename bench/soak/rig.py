"""The processes of a soak: two of each service, one log, and a line of its own between any two that talk."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.services import ANY_PORT, Process, RedisLog, ServiceProcess
from bench.relay.link import RelayLink
from bench.soak.jobs import SoakPair
from deploy.stack.processes import environment

TWO = ("1", "2")
# Tokens of two tenants, and what the log may keep of each.
GREEDY, OTHER, KEPT_BYTES = "the-token-of-the-greedy-tenant", "the-token-of-the-other-tenant", 2 << 20
VERIFIER, DRAFTER, ORCHESTRATOR, REDIS, LINE = "verifier", "drafter", "orchestrator", "redis", "line"


@dataclass(frozen=True, slots=True)
class Rig:
    """Parts by name ("verifier 1", "redis"); lines too ("orchestrator 1 to redis"). `addresses`: where clients call.

    filed: an orchestrator that no fault of a monkey meets, with its log in the file `filed_log`.
    """

    parts: dict[str, Process]
    lines: dict[str, RelayLink]
    addresses: tuple[str, ...]
    log: RedisLog
    filed: ServiceProcess
    filed_log: Path


def ready(part: Process) -> None:
    if isinstance(part, ServiceProcess | RedisLog):
        part.ready()


@contextmanager
def rig(pair: SoakPair) -> Iterator[Rig]:
    """Start everything. Whatever becomes of it, no process is left."""
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-soak-")))
        parts: dict[str, Process] = {}
        lines: dict[str, RelayLink] = {}
        log = RedisLog(folder)
        owned.callback(log.kill)
        parts[REDIS] = log

        def start(name: str, *words: str, python: str = sys.executable) -> ServiceProcess:
            service = ServiceProcess(words, _environment(), folder / f"{name}.stderr", ANY_PORT, python=python)
            owned.callback(service.kill)
            parts[name] = service
            return service

        def line(of: str, to: str, address: str) -> str:
            lines[f"{of} to {to}"] = link = owned.enter_context(RelayLink(address))
            return link.address

        verifiers = [
            start(f"{VERIFIER} {n}", "verify", pair.target, *pair.words, *more, python=python)
            for n, (python, *more) in zip(TWO, (pair.vllm or (sys.executable,), (sys.executable,)), strict=True)
        ]
        drafters = [start(f"{DRAFTER} {n}", "draft", pair.draft, *pair.words) for n in TWO]
        log.ready()
        peers = [("--verifier", f"{VERIFIER} {n}", service.ready()) for n, service in zip(TWO, verifiers, strict=True)]
        peers += [("--drafter", f"{DRAFTER} {n}", service.ready()) for n, service in zip(TWO, drafters, strict=True)]
        orchestrators = {}
        for name in (f"{ORCHESTRATOR} {n}" for n in TWO):
            words = [word for option, peer, address in peers for word in (option, line(name, peer, address))]
            url = f"redis://{line(name, REDIS, log.address)}/0"
            orchestrators[name] = start(name, "orchestrate", *words, "--redis-url", url)
        addresses = tuple(line("clients", name, service.ready()) for name, service in orchestrators.items())
        reached = [word for option, _, address in peers if option == "--verifier" for word in (option, address)]
        kept = folder / "filed"
        kept.mkdir()
        told = ("orchestrate", *reached, *_filed(kept))
        filed = ServiceProcess(told, _environment(), folder / "filed.stderr", ANY_PORT)
        owned.callback(filed.kill)
        filed.ready()
        yield Rig(parts, lines, addresses, log, filed, kept / "log")


def _filed(folder: Path) -> tuple[str, ...]:
    """Of an orchestrator with two tenants, whose log is `folder / "log"`."""
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text(f"greedy {GREEDY}\nother {OTHER}\n")
    return "--redis-url", f"file:{folder / 'log'}", "--api-keys", str(keys), "--tenant-log", str(KEPT_BYTES)


def _environment() -> dict[str, str]:
    return {**environment(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
