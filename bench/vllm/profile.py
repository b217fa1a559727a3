"""Where the time of a step goes, in a streamed vLLM server and in our service on vLLM's worker: --help.

What a class that proposes nothing costs a vLLM server is told by rows that differ in one thing each: vLLM's default;
without the scheduling ahead that vLLM gives up with any custom class; with such a class that does nothing; with ours,
which has nobody to draft. Of the last one the time that vLLM waits for our class is measured, too.

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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import RESULTS, record
from bench.harness.child import cpu_seconds
from bench.harness.entry import terminable
from bench.harness.interleave import schedule, tracked
from bench.harness.interval import Estimate, estimate
from bench.harness.report import table
from bench.harness.runs import BenchError
from bench.harness.services import ServiceProcess, free_port
from bench.relay.link import RelayLink
from bench.vllm import classes
from bench.vllm.run import DISTANCES, IDLE, LEAST_TURNS, LEVELS, OFF, unfit, write
from bench.vllm.server import MISSING, PROPOSER, VLLM, Front, VllmServer, awake, versions
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
# Of vLLM's server: its steps; and where the class has a clock, what vLLM waits for it, and all else.
ITERATIONS = "vllm:iteration_tokens_total_count"
OURS, THEIRS = "our class", "vLLM"
WIRE, CLIENTS, DRAFTER = "verifier's wire", "clients", "drafter"
STEPPED, EMPTY, NEAR = "not scheduled ahead", "a class that does nothing", DISTANCES[0]
TIMED = {**PROPOSER, "model": f"{classes.__name__}.{classes.TimedProposer.__name__}"}
# The rows of each comparison, of which the first one has no drafts.
SERVER, SERVICE = (OFF, STEPPED, EMPTY, IDLE, NEAR), (OFF, ENGINE_OFF, ENGINE[0])
ROWS = tuple(dict.fromkeys((*SERVER, *SERVICE)))
MS = 1e3
LIMIT_S = 10.0

Counts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Account:
    """What a step of a row took, with so many sessions at once.

    tokens: of a step. step_ms: from one to the next. parts_ms: of it, by what was done; empty of a server that does not
    tell. cpu_ms: computed meanwhile, by process. to_off: how many times as fast as `off`, turn by turn.
    """

    row: str
    level: int
    tokens: float
    step_ms: float
    parts_ms: Counts
    cpu_ms: Counts
    to_off: Estimate


@dataclass(frozen=True, slots=True)
class Profiled:
    """A row. steps: the name of its counter. figures, cpu: what they are by now.

    parts: of the figures, seconds of a step, and what they are called; the others' name is `rest`.
    """

    server: VllmServer | Front
    steps: str
    figures: Callable[[], Counts]
    cpu: Callable[[], Counts]
    parts: Mapping[str, str]
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Spent:
    """A turn: what was written and took so many seconds, and by what the figures and the kernel's counts grew."""

    tokens: int
    seconds: float
    figures: Counts
    cpu: Counts


def spent(row: Profiled, run: Callable[[], int]) -> Spent:
    """run: writes texts; how many tokens they have."""
    figures, cpu, began = row.figures(), row.cpu(), time.monotonic()
    tokens = run()
    seconds = time.monotonic() - began
    return Spent(tokens, seconds, growth(figures, row.figures()), growth(cpu, row.cpu()))


def growth(before: Counts, after: Counts) -> Counts:
    return {name: now - before.get(name, 0.0) for name, now in after.items()}


def total(each: Sequence[Counts]) -> Counts:
    return {name: sum(one[name] for one in each) for name in each[0]}


def account(name: str, row: Profiled, level: int, turns: Sequence[Spent], off: Sequence[Spent]) -> Account:
    """off: the same turns of the row that has no drafts."""
    seconds, tokens = sum(turn.seconds for turn in turns), sum(turn.tokens for turn in turns)
    done, used = total([turn.figures for turn in turns]), total([turn.cpu for turn in turns])
    steps = done[row.steps]
    if not steps:
        raise BenchError(f"{name}: no step was counted")
    per_step = MS / steps
    parts = {told: done[figure] * per_step for figure, told in row.parts.items()}
    if parts:
        parts[row.rest] = seconds * per_step - sum(parts.values())
    cpu_ms = {part: each * per_step for part, each in used.items()}
    to_off = estimate([other.seconds / turn.seconds for turn, other in zip(turns, off, strict=True)])
    return Account(name, level, tokens / steps, seconds * per_step, parts, cpu_ms, to_off)


def of_the_server(server: VllmServer, home: Path, timed: bool) -> Profiled:
    """home: its HOME. timed: whether it has a `TimedProposer`."""
    pid = server.process.process.pid

    def cpu() -> Counts:
        below = {child: cpu_seconds(child) for child in descendants(pid)}
        parts = {"vLLM's front door": cpu_seconds(pid), "vLLM's engine": sum(below.values())}
        return {**parts, CLIENTS: time.process_time()}

    def figures() -> Counts:
        waited = {OURS: classes.seconds_spent(home)} if timed else {}
        return {**figures_of(server.address, (ITERATIONS,)), **waited}

    return Profiled(server, ITERATIONS, figures, cpu, {OURS: OURS} if timed else {}, THEIRS)


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

    return Profiled(service.fronts[row], STEPS, lambda: figures_of(service.metrics, (STEPS, *PARTS)), cpu, PARTS, REST)


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


def compared(args: argparse.Namespace) -> Iterator[list[Account]]:
    """Of each comparison and level the rows, which take turns."""
    prompts = record.prompts_of(TARGET)[: args.prompts]
    for names in (SERVER, SERVICE):
        chosen = [name for name in names if name in args.only or name == OFF]
        if len(chosen) == 1:
            continue
        with ExitStack() as present:
            folder = Path(present.enter_context(TemporaryDirectory(prefix="specwire-profile-vllm-")))
            clients = present.enter_context(ThreadPoolExecutor(max(LEVELS)))
            drafter = drafter_of(present, folder)
            rows = {**servers(present, folder, chosen, drafter.address), **services(present, folder, chosen, drafter)}
            for level in args.sessions:
                yield list(at_level(clients, rows, prompts, level, args))


def servers(present: ExitStack, folder: Path, chosen: Sequence[str], drafter: str) -> dict[str, Profiled]:
    """vLLM's, ready. drafter: HOST:PORT."""
    told = {
        OFF: (None, "", ()),
        STEPPED: (None, "", ("--no-async-scheduling",)),
        EMPTY: ({**PROPOSER, "model": f"{classes.__name__}.{classes.EmptyProposer.__name__}"}, "", ()),
        IDLE: (TIMED, "--no-ngram", ()),
        NEAR: (TIMED, f"--drafter {drafter} --no-ngram", ()),
    }
    started: dict[str, VllmServer] = {}
    profiled = {}
    for number, (row, (speculation, proposer, more)) in enumerate(told.items()):
        if row not in chosen:
            continue
        home = folder / str(number)
        home.mkdir()
        address = f"127.0.0.1:{free_port()}"
        server = VllmServer(TARGET, home, address, speculation, proposer, sessions=max(LEVELS), more=more)
        present.callback(server.end)
        started[row], profiled[row] = server, of_the_server(server, home, speculation is TIMED)
    for row, server in started.items():
        server.ready()
        server.stop()
        say(f"bench: {row} is ready")
    return profiled


def services(present: ExitStack, folder: Path, chosen: Sequence[str], drafter: ServiceProcess) -> dict[str, Profiled]:
    """Ours, ready."""
    names = [row for row in (ENGINE_OFF, ENGINE[0]) if row in chosen]
    if not names:
        return {}
    links = {rtt: present.enter_context(RelayLink(drafter.address)) for rtt in ENGINE}
    for rtt, link in links.items():
        link.shape(rtt)
    service = engine_service(present, folder, links, max(LEVELS))
    return {name: of_ours(name, service, drafter.process.pid) for name in names}


def at_level(
    clients: ThreadPoolExecutor,
    rows: Mapping[str, Profiled],
    prompts: Sequence[Sequence[int]],
    level: int,
    args: argparse.Namespace,
) -> Iterator[Account]:
    groups = [prompts[at : at + level] for at in range(0, len(prompts) - level + 1, level)]
    found: defaultdict[str, list[Spent]] = defaultdict(list)

    def turn(name: str, group: int) -> Spent:
        def run() -> int:
            _, texts = write(clients, name, rows[name].server, groups[group], args.tokens, 0.0)
            return sum(map(len, texts))

        with awake(rows[name].server):
            return spent(rows[name], run)

    for name in rows:  # what is compiled or learnt for so many is by then
        with awake(rows[name].server):
            write(clients, name, rows[name].server, groups[0], args.tokens, 0.0)
    repeats = -(-LEAST_TURNS // len(groups))
    turns = schedule(repeats, len(groups), len(rows))
    for _, group, index in tracked(turns, repeats * len(groups) * len(rows), f"{level} at once"):
        name = list(rows)[index]
        found[name].append(turn(name, group))
    for name, row in rows.items():
        yield account(name, row, level, found[name], found[OFF])


def report(found: Sequence[Account]) -> str:
    lines = []
    for each in found:
        told = [(part, value, "") for part, value in each.parts_ms.items()]
        told += [(part, value, "computed") for part, value in each.cpu_ms.items()]
        to_off = f"{each.to_off:.2f} of off"
        head = (each.row, str(each.level), f"{each.tokens:.2f}", "a step", f"{each.step_ms:.2f}", to_off)
        lines += [head, *(("", "", "", part, f"{value:.2f}", how) for part, value, how in told)]
    return "\n".join(table(("row", "at once", "tokens a step", "", "ms", ""), lines))


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.vllm.profile", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--prompts", type=int, default=16, metavar="N", help="(default: %(default)s)")
    line.add_argument("--tokens", type=int, default=128, metavar="N", help="new ones for each (default: %(default)s)")
    line.add_argument("--sessions", type=int, nargs="+", default=list(LEVELS), choices=LEVELS, help="at once")
    line.add_argument(
        "--only", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=f"of {', '.join(map(repr, ROWS))}"
    )
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, ("prompts", "tokens")) or unfit(args, OUT, ROWS):
        return 2
    if not VLLM.exists():
        say(f"bench: error: {MISSING}")
        return 2
    found: list[Account] = []
    try:
        with terminable():
            for each in compared(args):
                print(report(each), flush=True)
                found += each
    except (BenchError, OSError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(report(found))
    told = {"accounts": [asdict(each) for each in found], "vllm": versions()}
    record.write(args.out, told, args, ("prompts", "tokens", "sessions", "only"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
