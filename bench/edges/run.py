"""Measure a pool of verifiers that many edges share: python -m bench.edges.run --help.

Forwards are emulated (the scripted model's are sleeps), sockets and processes are real. *Fair*: four tenants of one
verifier whose step grows with its sessions, once with four sessions each, once with one of them flooding: ten times as
many, each left behind after a few tokens. *Certificate*: the verifier's certificate is exchanged under load. *Loss*:
one of two verifiers is killed, and comes back; then both are ended and replaced, one after the other. *Storm*: the
same with hundreds of edges. *Cost*: what an edge takes in the verifier, and on the wire, idle and busy.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import RESULTS
from bench.harness.certificates import Authority
from bench.harness.child import BenchChild
from bench.harness.interleave import tracked
from bench.harness.interval import Estimate, estimate
from bench.harness.record import write
from bench.harness.report import Bar, at_least, at_most, bar_lines, table
from bench.harness.runs import BenchError
from bench.harness.services import ANY_PORT, ServiceProcess, free_port
from deploy.stack.processes import environment
from specwire.rpc.process import say

OUT = RESULTS / "edges.json"
ARGUMENTS = ("edges", "repeats", "seconds")
TENANTS = ("amsterdam", "berlin", "copenhagen", "dublin")
FLOODING = TENANTS[-1]
# Sessions of a tenant, and of one that floods; tokens of a text.
SESSIONS, FLOOD, TOKENS = 4, 40, 400
# A step of 16 sessions takes 50 ms, one of all that want to be in it twice as long.
SHARED = "scripted:7:delay_ms=20:session_cost=0.1"
# Many sessions, each of which is slow: two cores play hundreds.
CALM = "scripted:7:delay_ms=500"
PER_EDGE = 2
LEAST_JAIN, LEAST_KEPT = 0.98, 0.9
# Seconds: until a load has settled; for all to be back; between two looks; for one answer of a host.
SETTLED_S, BACK_S, LOOK_S, LIMIT_S = 5.0, 300.0, 0.05, 600.0
# Edges of one process.
PER_HOST = 100
METRIC = re.compile(r"^specwire:(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness (Jain, Chiu, Hawe 1984): 1 where all are equal, 1/n where one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


class Hosts:
    """Edges in as many processes as they take, as one."""

    def __init__(
        self, owned: ExitStack, verifiers: Sequence[str], tokens: Sequence[str], authority: Authority | None = None
    ) -> None:
        ca = authority.pem.decode() if authority else ""
        parts = [tokens[at : at + PER_HOST] for at in range(0, len(tokens), PER_HOST)]
        self._hosts: list[tuple[BenchChild, int]] = []
        for part in parts:
            child = owned.enter_context(BenchChild("edges", [sys.executable, "-m", "bench.edges.host"]))
            child.ask({"do": "start", "verifiers": list(verifiers), "tokens": list(part), "ca": ca}, LIMIT_S)
            self._hosts.append((child, len(part)))

    def load(self, sessions: Sequence[int], tokens: int = TOKENS, flooding: Sequence[bool] | None = None) -> None:
        """Sessions of each edge from now on."""
        floods, at = list(flooding or [False] * len(sessions)), 0
        for host, edges in self._hosts:
            part = slice(at, at + edges)
            host.ask(
                {"do": "load", "sessions": list(sessions[part]), "floods": floods[part], "tokens": tokens}, LIMIT_S
            )
            at += edges

    def read(self, since_ns: int = 0) -> dict[str, Any]:
        """What `bench.edges.host.figures` tells, of all. BenchError for a text that is wrong."""
        told = [host.ask({"do": "read", "since_ns": since_ns}, LIMIT_S) for host, _ in self._hosts]
        whole = {name: [each for one in told for each in one[name]] for name in ("tokens", "pause_s", "failures")}
        return {**whole, **{name: sum(one[name] for one in told) for name in ("silent", "ended", "wrong", "failed")}}


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Tokens per second of some seconds, and the longest pause of a session in them."""

    tokens_per_second: float
    pause_s: float


def window(hosts: Hosts, seconds: float) -> TimeWindow:
    hosts.read()
    began = time.monotonic()
    time.sleep(seconds)
    told = hosts.read()
    return TimeWindow(sum(told["tokens"]) / (time.monotonic() - began), max(told["pause_s"]))


def started(owned: ExitStack, folder: Path, name: str, model: str, *words: str) -> ServiceProcess:
    """A verifier that answers. `http`: where its figures are read."""
    figures = f"127.0.0.1:{free_port()}"
    settings = {**environment(), "OMP_NUM_THREADS": "1"}
    arguments = ("verify", model, "--context", "512", "--metrics", figures, *words)
    service = ServiceProcess(arguments, settings, folder / f"{name}.stderr", ANY_PORT)
    owned.callback(service.kill)
    service.ready()
    service.http = figures
    return service


def by_label(service: ServiceProcess, name: str, label: str) -> dict[str, float]:
    """A figure of a verifier, by the values of one of its labels."""
    try:
        with urllib.request.urlopen(f"http://{service.http}/metrics", timeout=LIMIT_S) as page:
            text = page.read().decode()
    except OSError as error:
        raise BenchError(f"metrics: {error}") from error
    return {
        told[label]: float(value)
        for found, labels, value in METRIC.findall(text)
        if found == name and label in (told := dict(re.findall(r'(\w+)="([^"]*)"', labels)))
    }


# Fair


@dataclass(frozen=True, slots=True)
class Fair:
    """Tokens per second by tenant, of repeats that alternate: all ordinary, and one flooding."""

    ordinary: list[dict[str, float]] = field(default_factory=list)
    flooded: list[dict[str, float]] = field(default_factory=list)

    @property
    def jain(self) -> Estimate:
        return estimate([jain(list(one.values())) for one in self.flooded])

    @property
    def kept(self) -> Estimate:
        """Speed of the others beside one that floods, over their speed beside an ordinary one."""
        pairs = zip(self.ordinary, self.flooded, strict=True)
        return estimate([_others(flooded) / _others(ordinary) for ordinary, flooded in pairs])


def _others(one: Mapping[str, float]) -> float:
    return sum(speed for tenant, speed in one.items() if tenant != FLOODING)


def fair(folder: Path, repeats: int, seconds: float) -> Fair:
    found = Fair()
    tokens = {tenant: f"token-of-{tenant}-0123456789abcdef" for tenant in TENANTS}
    keys, tenants = folder / "keys", folder / "tenants.yaml"
    keys.write_text("".join(f"{tenant} {token}\n" for tenant, token in tokens.items()))
    keys.chmod(0o600)
    tenants.write_text("".join(f"{tenant}: {{}}\n" for tenant in TENANTS))
    with ExitStack() as owned:
        words = ("--slots", "64", "--api-keys", str(keys), "--tenants", str(tenants))
        service = started(owned, folder, "shared", SHARED, *words)
        hosts = Hosts(owned, [service.address], list(tokens.values()))
        for _ in tracked(range(repeats), repeats, "fair"):
            for floods, into in ((False, found.ordinary), (True, found.flooded)):
                flooding = [floods and tenant == FLOODING for tenant in TENANTS]
                hosts.load([FLOOD if each else SESSIONS for each in flooding], TOKENS, flooding)
                time.sleep(SETTLED_S)
                before, began = by_label(service, "tenant_decided_tokens_total", "tenant"), time.monotonic()
                time.sleep(seconds)
                after, took = by_label(service, "tenant_decided_tokens_total", "tenant"), time.monotonic() - began
                into.append({tenant: (after[tenant] - before.get(tenant, 0.0)) / took for tenant in TENANTS})
        _check(hosts.read())
    return found


# Certificate


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Windows under load, before and while the verifier's certificate is exchanged."""

    before: list[TimeWindow] = field(default_factory=list)
    during: list[TimeWindow] = field(default_factory=list)

    @property
    def kept(self) -> Estimate:
        pairs = zip(self.before, self.during, strict=True)
        return estimate([during.tokens_per_second / before.tokens_per_second for before, during in pairs])


def exchanged(folder: Path, repeats: int, seconds: float) -> Exchanged:
    found, authority = Exchanged(), Authority()
    certificate, key = authority.sign().save(folder, "verifier")
    with ExitStack() as owned:
        words = ("--slots", "32", "--tls-cert", certificate, "--tls-key", key)
        service = started(owned, folder, "certified", SHARED, *words)
        hosts = Hosts(owned, [service.address], [""] * len(TENANTS), authority)
        hosts.load([SESSIONS] * len(TENANTS))
        time.sleep(SETTLED_S)
        for _ in tracked(range(repeats), repeats, "certificate"):
            found.before.append(window(hosts, seconds))
            authority.sign().save(folder, "verifier")
            found.during.append(window(hosts, seconds))
        _check(hosts.read())
    return found


# Loss and storm


@dataclass(frozen=True, slots=True)
class Storm:
    """One of two verifiers is killed and started anew; then both are ended in order and replaced.

    back_s: until each session has a token that came behind the kill. memory: MiB of the verifier that stayed, before,
    and when all had been with it for as long as the first window. rolling_pause_s: of any session, meanwhile.
    """

    edges: int
    sessions: int
    before: TimeWindow
    after: TimeWindow
    back_s: float
    pause_s: float
    memory_before: float
    memory_after: float
    rolling_pause_s: float
    ended: int
    wrong: int
    failed: int


def storm(folder: Path, edges: int, seconds: float, model: str, per_edge: int) -> Storm:
    with ExitStack() as owned:
        slots = str(edges * per_edge + 8)
        names = ("first", "second")
        first, second = (started(owned, folder, name, model, "--slots", slots, "--queue-wait", "300") for name in names)
        hosts = Hosts(owned, [first.address, second.address], [""] * edges)
        hosts.load([per_edge] * edges)
        _all_have(hosts, time.monotonic_ns())
        before, memory_before = window(hosts, seconds), resident_mib(second)
        killed_ns = time.monotonic_ns()
        first.kill()
        pause_s = _all_have(hosts, killed_ns)
        back_s = (time.monotonic_ns() - killed_ns) / 1e9
        after, memory_after = window(hosts, seconds), resident_mib(second)
        first.restart()
        first.ready()
        hosts.read()
        for service in (second, first):
            # A rolling update: the other one takes the sessions over before this one ends.
            wrong = service.end()
            if wrong:
                raise BenchError(f"a verifier: {wrong}")
            service.restart()
            service.ready()
        rolling_s = _all_have(hosts, time.monotonic_ns())
        told = hosts.read()
        _check(told)
        counts = {name: told[name] for name in ("ended", "wrong", "failed")}
        return Storm(
            edges, edges * per_edge, before, after, back_s, pause_s, memory_before, memory_after, rolling_s, **counts
        )


def _all_have(hosts: Hosts, since_ns: int) -> float:
    """Wait until every session has had a token since then; the longest pause since edges were last read."""
    end, pause_s = time.monotonic() + BACK_S, 0.0
    while True:
        told = hosts.read(since_ns)
        pause_s = max([pause_s, *map(float, told["pause_s"])])
        if not told["silent"]:
            return pause_s
        if time.monotonic() > end:
            raise BenchError(f"{told['silent']} sessions have had no token for {BACK_S:g} s: {told['failures']}")
        time.sleep(LOOK_S)


# Cost


@dataclass(frozen=True, slots=True)
class Cost:
    """Of an edge at its verifier: KiB of memory, and bytes a second over loopback, both ways together."""

    edges: int
    idle_kib: float
    busy_kib: float
    idle_bytes: float
    busy_bytes: float


def cost(folder: Path, edges: int, seconds: float, model: str, per_edge: int) -> Cost:
    with ExitStack() as owned:
        service = started(owned, folder, "weighed", model, "--slots", str(edges * per_edge))
        alone = resident_mib(service)
        hosts = Hosts(owned, [service.address], [""] * edges)
        time.sleep(SETTLED_S)
        idle_bytes = bytes_a_second(seconds) / edges
        idle = resident_mib(service)
        hosts.load([per_edge] * edges)
        _all_have(hosts, time.monotonic_ns())
        busy_bytes = bytes_a_second(seconds) / edges
        busy = resident_mib(service)
        return Cost(edges, (idle - alone) * 1024 / edges, (busy - alone) * 1024 / edges, idle_bytes, busy_bytes)


def resident_mib(service: ServiceProcess) -> float:
    """Of the verifier itself, which the process that ends with us has started."""
    pid = service.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = max(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in (str(pid), *children))
    return pages / 256


def bytes_a_second(seconds: float) -> float:
    """Over loopback, while that time passes."""
    before = loopback_bytes()
    time.sleep(seconds)
    return (loopback_bytes() - before) / seconds


def loopback_bytes() -> int:
    """Since the system began; other programs' are among them."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (loopback,) = (line for line in lines if line.split(":")[0].strip() == "lo")
    return int(loopback.split()[1])


def _check(told: Mapping[str, Any]) -> None:
    if told["wrong"] or told["failed"]:
        raise BenchError(f"{told['wrong']} texts differ, {told['failed']} failed: {told['failures']}")


# All of it


@dataclass(frozen=True, slots=True)
class EdgesFound:
    fair: Fair
    exchanged: Exchanged
    loss: Storm
    storm: Storm
    cost: Cost


def measure(edges: int, repeats: int, seconds: float) -> EdgesFound:
    with tempfile.TemporaryDirectory(prefix="specwire-edges-") as name:
        folder = Path(name)
        say("bench: fair shares")
        shares = fair(folder, repeats, seconds)
        say("bench: a certificate is exchanged")
        certificates = exchanged(folder, repeats, seconds)
        say("bench: a verifier is lost")
        loss = storm(folder, len(TENANTS), seconds, SHARED, SESSIONS)
        say(f"bench: a storm of {edges} edges")
        many = storm(folder, edges, seconds, CALM, PER_EDGE)
        say("bench: what an edge costs")
        return EdgesFound(shares, certificates, loss, many, cost(folder, min(edges, PER_HOST), seconds, CALM, PER_EDGE))


def bars(found: EdgesFound) -> list[Bar]:
    wrong = float(found.loss.wrong + found.storm.wrong + found.loss.failed + found.storm.failed)
    return [
        at_least("Jain's index of tokens of equal tenants, one flooding", found.fair.jain, LEAST_JAIN),
        at_least("speed of the others beside one that floods / beside an ordinary one", found.fair.kept, LEAST_KEPT),
        at_most("texts lost or changed by killed and replaced verifiers", Estimate(wrong, wrong, wrong, 1.0), 0),
    ]


def report(found: EdgesFound, held: Sequence[Bar]) -> str:
    lost = (
        "a verifier is killed",
        "sessions",
        "tokens/s",
        "behind it",
        "all back, s",
        "longest pause, s",
        "rolling, s",
    )
    fair_rows = [_speeds("ordinary", found.fair.ordinary), _speeds("one floods", found.fair.flooded)]
    windows = [_windows("before", found.exchanged.before), _windows("while it is exchanged", found.exchanged.during)]
    costs = [
        ["KiB at its verifier", f"{found.cost.idle_kib:.0f}", f"{found.cost.busy_kib:.0f}"],
        ["bytes/s on the wire", f"{found.cost.idle_bytes:.0f}", f"{found.cost.busy_bytes:.0f}"],
    ]
    sections = (
        table(("tokens/s", *TENANTS), fair_rows),
        table(("a certificate", "tokens/s", "longest pause, s"), windows),
        table(lost, [_lost(found.loss), _lost(found.storm)]),
        table(("an edge", "idle", "busy"), costs),
        bar_lines(held),
    )
    return "\n\n".join("\n".join(lines) for lines in sections)


def _speeds(name: str, some: Sequence[Mapping[str, float]]) -> list[str]:
    return [name, *(f"{statistics.median(one[tenant] for one in some):.1f}" for tenant in TENANTS)]


def _lost(one: Storm) -> list[str]:
    speeds = (f"{window.tokens_per_second:.0f}" for window in (one.before, one.after))
    seconds = (f"{each:.2f}" for each in (one.back_s, one.pause_s, one.rolling_pause_s))
    return [f"{one.edges} edges", str(one.sessions), *speeds, *seconds]


def _windows(name: str, some: Sequence[TimeWindow]) -> list[str]:
    speed = statistics.median(one.tokens_per_second for one in some)
    return [name, f"{speed:.1f}", f"{max(one.pause_s for one in some):.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(prog="python -m bench.edges.run", description="Measure verifiers that edges share.")
    line.add_argument("--edges", type=int, default=200, metavar="N", help="of the storm (default: %(default)s)")
    line.add_argument("--repeats", type=int, default=7, metavar="N", help="of the fair shares (default: %(default)s)")
    line.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of a window (default: %(default)g)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    args = line.parse_args(argv)
    for name in ARGUMENTS:
        if not getattr(args, name) >= 1:
            say(f"bench: error: {name}: must be at least 1, not {getattr(args, name)}")
            return 2
    try:
        found = measure(args.edges, args.repeats, args.seconds)
    except BenchError as error:
        say(f"bench: error: {error}")
        return 1
    held = bars(found)
    write(args.out, {**asdict(found), "bars": [asdict(bar) for bar in held]}, args, ARGUMENTS)
    print(report(found, held))
    return 0 if all(bar.holds for bar in held) else 1


if __name__ == "__main__":
    sys.exit(main())
