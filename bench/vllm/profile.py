"""Where the time of a step goes, in a streamed vLLM server and in our service on vLLM's worker: --help.

Of our verifier's thread the parts of a step are its own figures (`--metrics`): the forward, which is vLLM's; choosing
the tokens; what lies between forwards; waiting for guesses. The rest of a step nobody could be served: text was on its
way to the log, the client, or back. Beside them stands what each process computed meanwhile, by the kernel's count:
where all of that together is as long as the step times the cores, a step waits for a core.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import RESULTS, record
from bench.harness.child import cpu_seconds
from bench.harness.entry import terminable
from bench.harness.report import table
from bench.harness.runs import BenchError
from bench.harness.services import free_port
from bench.relay.link import RelayLink
from bench.vllm.run import LEVELS, OFF, write
from bench.vllm.server import VLLM, Front, VllmServer
from bench.vllm.service import (
    ENGINE,
    ENGINE_OFF,
    LOG,
    ORCHESTRATOR,
    VERIFIER,
    EngineService,
    drafter_of,
    engine_service,
)
from demo_pair import TARGET
from deploy.stack.processes import descendants
from specwire.rpc.process import say

OUT = RESULTS / "vllm_profile.json"
# Figures of the verifier's thread, in seconds, and what they are called here.
PARTS = {
    "forward_seconds_sum": "vLLM's forward",
    "choose_seconds_sum": "choosing",
    "step_gap_seconds_total": "between forwards",
    "step_waited_seconds_total": "waiting for guesses",
}
STEPS, REST = "forward_seconds_count", "nobody to serve"
# Of vLLM's server: its steps.
ITERATIONS = "vllm:iteration_tokens_total_count"
WIRE, CLIENTS, DRAFTER = "verifier's wire", "clients", "drafter"
MS = 1e3
LIMIT_S = 10.0

Counts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Account:
    """What a step of a row took, with so many sessions at once.

    tokens: of a step. step_ms: from one to the next. parts_ms: of it, by what was done; empty of a server that does not
    tell. cpu_ms: computed meanwhile, by process.
    """

    row: str
    level: int
    tokens: float
    step_ms: float
    parts_ms: Counts
    cpu_ms: Counts


@dataclass(frozen=True, slots=True)
class Profiled:
    """A row. steps: the name of its counter. figures, cpu: what they are by now."""

    server: VllmServer | Front
    steps: str
    figures: Callable[[], Counts]
    cpu: Callable[[], Counts]


def account(name: str, row: Profiled, level: int, run: Callable[[], int]) -> Account:
    """run: writes texts; how many tokens they have."""
    figures, cpu, began = row.figures(), row.cpu(), time.monotonic()
    tokens = run()
    seconds = time.monotonic() - began
    used = {part: now - cpu.get(part, 0.0) for part, now in row.cpu().items()}
    after = row.figures()
    done = {figure: after[figure] - figures[figure] for figure in after}
    steps = done[row.steps]
    if not steps:
        raise BenchError(f"{name}: no step was counted")
    per_step = MS / steps
    parts = {told: done[figure] * per_step for figure, told in PARTS.items() if figure in done}
    if parts:
        parts[REST] = seconds * per_step - sum(parts.values())
    cpu_ms = {part: each * per_step for part, each in used.items()}
    return Account(name, level, tokens / steps, seconds * per_step, parts, cpu_ms)


def of_the_server(server: VllmServer) -> Profiled:
    pid = server.process.process.pid

    def cpu() -> Counts:
        below = {child: cpu_seconds(child) for child in descendants(pid)}
        parts = {"vLLM's front door": cpu_seconds(pid), "vLLM's engine": sum(below.values())}
        return {**parts, CLIENTS: time.process_time()}

    return Profiled(server, ITERATIONS, lambda: figures_of(server.address, (ITERATIONS,)), cpu)


def of_ours(row: str, service: EngineService, drafter: int) -> Profiled:
    pids = {name: part.process.pid for name, part in service.parts.items()}

    def cpu() -> Counts:
        wire = wire_seconds(pids[VERIFIER])
        return {
            "verifier's engine": cpu_seconds(pids[VERIFIER]) - wire,
            WIRE: wire,
            **{name: cpu_seconds(pids[name]) for name in (ORCHESTRATOR, LOG)},
            DRAFTER: cpu_seconds(drafter),
            CLIENTS: time.process_time(),
        }

    return Profiled(service.fronts[row], STEPS, lambda: figures_of(service.metrics, (STEPS, *PARTS)), cpu)


def wire_seconds(pid: int) -> float:
    """Of a process whose main thread has the event loop: that one, and gRPC's own."""
    found = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = ""
        with suppress(OSError):  # a thread that has ended meanwhile
            name = (task / "comm").read_text(errors="replace").strip()
        if int(task.name) == pid or name.startswith(("grpc", "event_engine", "timer", "resolver")):
            found += cpu_seconds(pid, int(task.name))
    return found


def figures_of(address: str, names: Sequence[str]) -> Counts:
    """Prometheus' samples of these names at HOST:PORT, summed over their labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
        lines = answer.read().decode().splitlines()
    found = dict.fromkeys(names, 0.0)
    for line in lines:
        whole = line.partition("{")[0].partition(" ")[0]
        for name in {whole, whole.partition(":")[2]} & found.keys():
            found[name] += float(line.rsplit(" ", 1)[1])
    return found


def accounts(args: argparse.Namespace) -> Iterator[Account]:
    """Of each row at each level; one row's processes at a time, so that nothing else is in memory."""
    prompts = record.prompts_of(TARGET)[: args.prompts]
    with ExitStack() as owned:
        folder = Path(owned.enter_context(TemporaryDirectory(prefix="specwire-profile-vllm-")))
        clients = owned.enter_context(ThreadPoolExecutor(max(LEVELS)))

        def row(name: str, profiled: Profiled) -> Iterator[Account]:
            for level in args.sessions:

                def run(level: int = level) -> int:
                    groups = [prompts[at : at + level] for at in range(0, len(prompts) - level + 1, level)]
                    texts = [write(clients, name, profiled.server, group, args.tokens, 0.0)[1] for group in groups]
                    return sum(len(text) for each in texts for text in each)

                run()  # what is compiled or learnt for so many is by then
                yield account(name, profiled, level, run)

        with ExitStack() as present:
            server = VllmServer(TARGET, folder, f"127.0.0.1:{free_port()}", None, sessions=max(LEVELS))
            present.callback(server.end)
            server.ready()
            yield from row(OFF, of_the_server(server))
        with ExitStack() as present:
            drafter = drafter_of(present, folder)
            links = {rtt: present.enter_context(RelayLink(drafter.address)) for rtt in ENGINE}
            for rtt, link in links.items():
                link.shape(rtt)
            service = engine_service(present, folder, links, max(LEVELS))
            for name in (ENGINE_OFF, ENGINE[0]):
                yield from row(name, of_ours(name, service, drafter.process.pid))


def report(found: Sequence[Account]) -> str:
    lines = []
    for each in found:
        told = [(part, value, "") for part, value in each.parts_ms.items()]
        told += [(part, value, "computed") for part, value in each.cpu_ms.items()]
        head = (each.row, str(each.level), f"{each.tokens:.2f}", "a step", f"{each.step_ms:.2f}", "")
        lines += [head, *(("", "", "", part, f"{value:.2f}", how) for part, value, how in told)]
    return "\n".join(table(("row", "at once", "tokens a step", "", "ms", ""), lines))


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.vllm.profile", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--prompts", type=int, default=16, metavar="N", help="(default: %(default)s)")
    line.add_argument("--tokens", type=int, default=128, metavar="N", help="new ones for each (default: %(default)s)")
    line.add_argument("--sessions", type=int, nargs="+", default=list(LEVELS), choices=LEVELS, help="at once")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, ("prompts", "tokens")):
        return 2
    if not VLLM.exists():
        say("bench: error: vLLM is not there: make setup-vllm")
        return 2
    try:
        with terminable():
            found = list(accounts(args))
    except (BenchError, OSError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(report(found))
    record.write(args.out, {"accounts": [asdict(each) for each in found]}, args, ("prompts", "tokens", "sessions"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
