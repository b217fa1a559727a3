"""Measure vLLM's own speculation beside specwire's on vLLM: python -m bench.vllm.run --help.

Rows are vLLM servers, each of its own: without speculation, with its own n-grams or draft model, and with
`specwire.vllm.Proposer`, whose drafter is one process behind relays of ours; and a verifier of ours on vLLM's worker,
behind orchestrators that log to Redis. They write the same held-out prompts in turns, through OpenAI's API, streamed,
so many at once. Beside them stands `LLM.generate`, which has no server and streams nothing. A few rows are there at a
time, always with the server that has no speculation: with all of them in memory the machine took from each what it had
not used for some seconds, and gave it back during its turn. vLLM's processes are stopped while it is another row's
turn: they spin for a second behind their last message.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import RESULTS
from bench.harness.entry import terminable
from bench.harness.interleave import schedule, tracked
from bench.harness.interval import Estimate, estimate
from bench.harness.record import prompts_of, refused, save
from bench.harness.report import Bar, at_least, bar_lines
from bench.harness.runs import BenchError
from bench.harness.services import ANY_PORT, RedisLog, ServiceProcess, free_port
from bench.relay.link import RelayLink
from bench.vllm.server import (
    CONTEXT,
    EAGER,
    MISSING,
    PROPOSER,
    PYTHON,
    VLLM,
    Front,
    Speculation,
    VllmLibrary,
    VllmServer,
    awake,
    versions,
)
from demo_pair import DRAFT, TARGET
from deploy.stack.processes import environment
from scripts.figures.speed import vllm_table
from specwire.rpc.process import say

# What may propose.
ENGINE_OFF, ENGINE_BOTH = "engine vllm, off", "engine vllm, drafter and n-grams"
ENGINE = {0: "engine vllm, drafter at 0 ms", 20: "engine vllm, drafter at 20 ms"}
ENGINES = (ENGINE_OFF, *ENGINE.values(), ENGINE_BOTH)
# As vLLM's own rows are.
COMPUTED = ("--dtype", "float32", "--threads", "1")


def drafter_of(owned: ExitStack, folder: Path) -> ServiceProcess:
    """Start the demo pair's drafter. Raises BenchError."""
    words = ("draft", str(DRAFT), *COMPUTED, "--slots", "64")
    drafter = ServiceProcess(words, environment(), folder / "draft.stderr", ANY_PORT)
    owned.callback(drafter.kill)
    drafter.ready()
    return drafter


def engine_service(owned: ExitStack, folder: Path, links: Mapping[int, RelayLink], sessions: int) -> dict[str, Front]:
    """Start it; where its rows are asked for. links: to the drafter, by their delay in ms. Raises BenchError."""
    log = RedisLog(folder)
    owned.callback(log.kill)
    told = {**environment(), "OMP_NUM_THREADS": "1"}
    engine = ("--engine", "vllm", "--engine-options", EAGER)
    words = ("verify", str(TARGET), *COMPUTED, "--slots", str(sessions), "--context", str(CONTEXT), *engine)
    verifier = ServiceProcess(words, told, folder / "verify.stderr", ANY_PORT, python=PYTHON)
    owned.callback(verifier.kill)
    logged = ("--redis-url", f"redis://{log.ready()}", "--http", ANY_PORT)
    verifier.ready()
    orchestrators = {}
    for rtt in ENGINE:
        line = ("orchestrate", "--verifier", verifier.address, "--drafter", links[rtt].address, *logged)
        orchestrators[rtt] = one = ServiceProcess(line, environment(), folder / f"orchestrate-{rtt}.stderr", ANY_PORT)
        owned.callback(one.kill)
        one.ready()
    nearest = orchestrators[min(orchestrators)]
    return {
        ENGINE_OFF: Front(nearest.http, "off"),
        **{row: Front(orchestrators[rtt].http, "drafters") for rtt, row in ENGINE.items()},
        ENGINE_BOTH: Front(nearest.http, "auto"),
    }


OUT = RESULTS / "vllm.json"
OFF, NGRAM, MODEL, IDLE, BOTH = "off", "its ngram", "its draft model", "nothing proposed", "drafter and n-grams"
# Plain decoding without a server; `off` is plain decoding streamed.
LIBRARY = "LLM.generate"
DISTANCES = {0: "drafter at 0 ms", 20: "drafter at 20 ms", 80: "drafter at 80 ms"}
OWN: Mapping[str, Speculation | None] = {
    OFF: None,
    NGRAM: {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    MODEL: {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 3},
}
TEMPERATURES = (0.0, 0.8)
LEVELS = (1, 4, 16)
# Of each row at a level: with fewer no interval is one of 95 % (`bench.harness.interval`).
LEAST_TURNS = 6
# Of off: greedily with one session; everywhere else; where nothing is proposed.
GAINS = {DISTANCES[0]: 1.4, DISTANCES[20]: 1.25, ENGINE[0]: 1.4, ENGINE[20]: 1.25}
NEVER_SLOWER = 0.97
# What our service may cost beside a vLLM server, the log included.
TAX = 0.93

Writer = VllmServer | VllmLibrary | Front


@dataclass(frozen=True, slots=True)
class VllmTurn:
    """A group of prompts that one row wrote at once."""

    level: int
    temperature: float
    turn: int
    row: str
    seconds: float
    texts: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class VllmLine:
    """A row at one level and temperature. to_off: of the same server without drafts. different: texts unlike its."""

    level: int
    temperature: float
    row: str
    tokens_per_second: Estimate
    to_off: Estimate
    different: int


@dataclass(frozen=True, slots=True)
class VllmGroup:
    """Rows that take turns with each other: vLLM's, and those of a verifier of ours, if it is beside them."""

    rows: tuple[str, ...]
    engine: tuple[str, ...] = ()


GROUPS = (
    VllmGroup((OFF, NGRAM, MODEL), ENGINES),
    VllmGroup((OFF, NGRAM, MODEL, BOTH)),
    VllmGroup((OFF, LIBRARY, IDLE, DISTANCES[0])),
    VllmGroup((OFF, DISTANCES[20], DISTANCES[80])),
)
# What may be asked for: the server without speculation is always there.
ROWS = tuple(dict.fromkeys(row for group in GROUPS for row in (*group.rows, *group.engine) if row != OFF))
REPEATS = f"more where that gives a row no {LEAST_TURNS} turns (default: %(default)s)"
ONLY = f"rows beside {OFF!r}, of {', '.join(map(repr, ROWS))} (default: all)"


def groups_of(only: Sequence[str]) -> Iterator[VllmGroup]:
    """The groups with these rows, and what they are compared with; none that an earlier one has all rows of."""
    told = {OFF}
    for group in GROUPS:
        rows, engine = ([row for row in each if row in only] for each in (group.rows, group.engine))
        if {*rows, *engine} - told:
            told |= {*rows, *engine}
            off = [ENGINE_OFF] if engine else []
            yield VllmGroup((OFF, *rows), tuple(dict.fromkeys([*off, *engine])))


def servers(
    present: ExitStack, folder: Path, group: VllmGroup, drafter: str, links: Mapping[int, RelayLink]
) -> dict[str, VllmServer | VllmLibrary]:
    """Start what a group has of vLLM's; `present` ends it. drafter: for the row that has n-grams as well."""
    proposers = {
        IDLE: "--no-ngram",
        **{DISTANCES[rtt]: f"--drafter {link.address} --no-ngram" for rtt, link in links.items()},
        BOTH: f"--drafter {drafter}",
    }
    started: dict[str, VllmServer | VllmLibrary] = {}
    for number, row in enumerate(group.rows):
        own = folder / str(number)
        own.mkdir(parents=True)
        if row == LIBRARY:
            started[row] = VllmLibrary(TARGET, own, max(LEVELS))
        else:
            address = f"127.0.0.1:{free_port()}"
            speculation, proposer = OWN.get(row, PROPOSER), proposers.get(row, "")
            started[row] = VllmServer(TARGET, own, address, speculation, proposer, sessions=max(LEVELS))
        present.callback(started[row].end)
    return started


def measure(args: argparse.Namespace) -> list[VllmTurn]:
    """Start everything, warm up, and let the rows take turns."""
    prompts = prompts_of(TARGET)[: args.prompts]
    turns: list[VllmTurn] = []
    with ExitStack() as owned:
        folder = Path(owned.enter_context(TemporaryDirectory(prefix="specwire-bench-vllm-")))
        drafter = drafter_of(owned, folder)
        links = {rtt: owned.enter_context(RelayLink(drafter.address)) for rtt in DISTANCES}
        for rtt, link in links.items():
            link.shape(rtt)
        for number, group in enumerate(groups_of(args.only)):
            with ExitStack() as present:
                rows = beside(present, folder / str(number), group, drafter.address, links)
                clients = present.enter_context(ThreadPoolExecutor(max(LEVELS)))
                for level in args.sessions:
                    turns += at_level(clients, rows, prompts, level, len(turns), args)
    return turns


def beside(
    present: ExitStack, folder: Path, group: VllmGroup, drafter: str, links: Mapping[int, RelayLink]
) -> dict[str, Writer]:
    """All rows of a group, ready."""
    folder.mkdir()
    theirs = servers(present, folder, group, drafter, links)
    for row, server in theirs.items():
        server.ready()
        server.stop()
        say(f"bench: {row} is ready")
    ours = engine_service(present, folder, links, max(LEVELS)) if group.engine else {}
    return {**theirs, **{row: ours[row] for row in group.engine}}


def at_level(
    clients: ThreadPoolExecutor,
    rows: Mapping[str, Writer],
    prompts: Sequence[Sequence[int]],
    level: int,
    first: int,
    args: argparse.Namespace,
) -> Iterator[VllmTurn]:
    """The turns are counted from `first` on."""
    groups = [prompts[first : first + level] for first in range(0, len(prompts) - level + 1, level)]
    for temperature in TEMPERATURES:
        for row, server in rows.items():  # what is compiled for so many is compiled then
            with awake(server):
                write(clients, row, server, groups[0], args.tokens, temperature)
        repeats = max(args.repeats, -(-LEAST_TURNS // len(groups)))
        turns = schedule(repeats, len(groups), len(rows))
        for repeat, group, index in tracked(turns, repeats * len(groups) * len(rows), f"{level} at once"):
            row = list(rows)[index]
            with awake(rows[row]):
                seconds, texts = write(clients, row, rows[row], groups[group], args.tokens, temperature)
            yield VllmTurn(level, temperature, first + repeat * len(groups) + group, row, seconds, texts)


def write(
    clients: ThreadPoolExecutor,
    row: str,
    server: Writer,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    temperature: float,
) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Seconds until all texts are whole, and the texts."""
    began = time.monotonic()
    try:
        if isinstance(server, VllmLibrary):
            texts = server.generate(prompts, tokens, temperature)
        else:
            texts = list(clients.map(lambda prompt: server.complete(prompt, tokens, temperature), prompts))
    except OSError as error:
        raise BenchError(f"{row}: {error}") from error
    if any(len(text) != tokens for text in texts):
        raise BenchError(f"{row}: a text has not the {tokens} tokens that were asked for")
    return time.monotonic() - began, tuple(map(tuple, texts))


def lines_of(turns: Sequence[VllmTurn]) -> list[VllmLine]:
    places = dict.fromkeys((turn.level, turn.temperature, turn.row) for turn in turns)
    return [_line(turns, *place) for place in places]


def _line(turns: Sequence[VllmTurn], level: int, temperature: float, row: str) -> VllmLine:
    at = [turn for turn in turns if (turn.level, turn.temperature) == (level, temperature)]
    own = {turn.turn: turn for turn in at if turn.row == row}
    off = {turn.turn: turn for turn in at if turn.row == off_of(row)}
    pairs = [(own[turn], off[turn]) for turn in own]
    return VllmLine(
        level,
        temperature,
        row,
        estimate([turn.tokens / turn.seconds for turn in own.values()]),
        ratio(turns, level, temperature, row, off_of(row)),
        sum(mine != theirs for one, other in pairs for mine, theirs in zip(one.texts, other.texts, strict=True)),
    )


def off_of(row: str) -> str:
    """The row of the same server where nothing is drafted."""
    return ENGINE_OFF if row in ENGINES else OFF


def ratio(turns: Sequence[VllmTurn], level: int, temperature: float, faster: str, slower: str) -> Estimate:
    """How many times as fast one row is, turn by turn."""
    at = [turn for turn in turns if (turn.level, turn.temperature) == (level, temperature)]
    fast, slow = ({turn.turn: turn.seconds for turn in at if turn.row == row} for row in (faster, slower))
    return estimate([slow[turn] / fast[turn] for turn in fast if turn in slow])


def bars_of(turns: Sequence[VllmTurn], lines: Sequence[VllmLine]) -> Iterator[Bar]:
    """What is needed of the rows that are ours."""
    for line in lines:
        if line.row in (OFF, ENGINE_OFF, NGRAM, MODEL, LIBRARY):
            continue
        drawn = f", temperature {line.temperature:g}" if line.temperature else ""
        needed = NEVER_SLOWER
        if line.level == 1 and not line.temperature:
            needed = GAINS.get(line.row, NEVER_SLOWER)
        yield at_least(f"{line.level} at once{drawn}, {line.row} / {off_of(line.row)}", line.to_off, needed)
    for level, temperature in dict.fromkeys((line.level, line.temperature) for line in lines):
        own = {line.row: line for line in lines if (line.level, line.temperature) == (level, temperature)}
        drawn = f", temperature {temperature:g}" if temperature else ""
        if {NGRAM, MODEL} <= own.keys():
            best = max((NGRAM, MODEL), key=lambda row: own[row].tokens_per_second.value)
            for both in [row for row in (BOTH, ENGINE_BOTH) if row in own]:
                found = ratio(turns, level, temperature, both, best)
                yield at_least(f"{level} at once{drawn}, {both} / {best}", found, 1.0)
        if ENGINE_OFF in own:
            tax = ratio(turns, level, temperature, ENGINE_OFF, OFF)
            yield at_least(f"{level} at once{drawn}, {ENGINE_OFF} / {OFF}", tax, TAX)


def write_results(
    args: argparse.Namespace, turns: Sequence[VllmTurn], lines: Sequence[VllmLine], bars: Sequence[Bar]
) -> dict[str, Any]:
    """Returns the record."""
    found = {
        "bars": [asdict(bar) for bar in bars],
        "lines": [asdict(line) for line in lines],
        "vllm": versions(),
        "seconds_of_turns": [[turn.level, turn.temperature, turn.turn, turn.row, turn.seconds] for turn in turns],
    }
    asked = {name: getattr(args, name) for name in ("prompts", "tokens", "repeats", "sessions", "only")}
    return save(args.out, found, asked)


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.vllm.run", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--prompts", type=int, default=16, metavar="N", help="(default: %(default)s)")
    line.add_argument("--tokens", type=int, default=128, metavar="N", help="new ones for each (default: %(default)s)")
    line.add_argument("--repeats", type=int, default=2, metavar="N", help=REPEATS)
    line.add_argument("--sessions", type=int, nargs="+", default=list(LEVELS), choices=LEVELS, help="at once")
    line.add_argument("--only", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=ONLY)
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def unfit(args: argparse.Namespace, recorded: Path, rows: Sequence[str]) -> bool:
    """Whether the record would lose rows, or sessions lack prompts, which is then said."""
    if args.out == recorded and not {*args.only} >= {*rows}:
        say("bench: error: only: would leave rows out of the record, so --out must name another file")
        return True
    if args.prompts < max(args.sessions):
        say(f"bench: error: prompts: must be at least {max(args.sessions)}, one for each session, not {args.prompts}")
        return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if refused(args, ("prompts", "tokens", "repeats")) or unfit(args, OUT, ROWS):
        return 2
    if not VLLM.exists():
        say(f"bench: error: {MISSING}")
        return 2
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with terminable():
            turns = measure(args)
    except (BenchError, OSError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    lines = lines_of(turns)
    bars = list(bars_of(turns, lines))
    print(vllm_table(write_results(args, turns, lines, bars)))
    print("\n".join([*bar_lines(bars), f"texts unlike those of {OFF!r}: {sum(line.different for line in lines)}"]))
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
