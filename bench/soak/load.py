"""Many sessions at once on the scripted model: python -m bench.soak.load --help.

One verifier, one orchestrator and one Redis, each a process; all clients in this one. What is measured: tokens per
second, resident memory per session, whether memory grows while sessions come and go, and how far the verifier decides
for clients that do not read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import machine
from bench.run import terminable
from bench.runs import BenchError
from bench.soak.crowd import READ_FIRST, UNREAD, Crowd
from bench.soak.failures import first_failure
from bench.soak.jobs import Job, Manner
from bench.soak.judge import mismatches
from bench.soak.load_report import LEAST_RUNNING, LoadReport, Sample
from bench.soak.pairs import Pair, scripted
from bench.soak.redis_log import RedisLog
from bench.soak.service import ANY_PORT, Process, Service
from deploy.processes import environment
from specwire.client import AsyncClient
from specwire.core.sampling import InvalidParameter, Sampling
from specwire.rpc.process import say

OUT = Path(__file__).resolve().parents[1] / "results" / "load.json"
LOOK_S = 2.0
START_S = 300.0
SPARE_SLOTS, MOST_SLOTS = 4, 1024
# Ended sessions are remembered for as long, a minute by itself: at some thousand a minute their number, and with it
# memory, would follow every change of the machine's speed.
FORGETTING = ("--retention", "5")
# Each has a prompt of its own.
MOST_IDLE = 60


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """`idle`: sessions, on top of the others, whose clients stop reading."""

    minutes: float = 10.0
    sessions: int = 1000
    idle: int = 20
    seed: int = 1

    def __post_init__(self) -> None:
        most = MOST_SLOTS - SPARE_SLOTS - self.idle
        for name, value, limit in (("minutes", self.minutes, 1440.0), ("sessions", self.sessions, most)):
            if not 0 < value <= limit:
                raise InvalidParameter(name, f"must be above 0 and at most {limit:g}, not {value}")
        if not 0 <= self.idle <= MOST_IDLE:
            raise InvalidParameter("idle", f"must be from 0 to {MOST_IDLE}, not {self.idle}")


@dataclass(slots=True)
class Watched:
    """What is noted while the crowd runs."""

    samples: list[Sample] = field(default_factory=list)


def load(settings: LoadSettings, tell: Callable[[str], None]) -> LoadReport:
    """Raises BenchError if the services do not start, or the sessions do not begin."""
    pair = scripted(delay_ms=0.0, slots=settings.sessions + settings.idle + SPARE_SLOTS)
    tell(f"load: starting the services for {settings.sessions} sessions")
    with _services(pair) as (address, parts), first_failure():
        return asyncio.run(_measure(settings, pair, parts, address, tell))


@contextmanager
def _services(pair: Pair) -> Iterator[tuple[str, dict[str, Process]]]:
    """The orchestrator's address, and all processes by name."""
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-load-")))
        settings = {**environment(), "OMP_NUM_THREADS": "1"}
        redis = RedisLog(folder)
        owned.callback(redis.kill)
        verifier = Service(("verify", pair.target, *pair.words), settings, folder / "verifier.stderr", ANY_PORT)
        owned.callback(verifier.kill)
        words = (
            "orchestrate",
            "--verifier",
            verifier.ready(),
            "--redis-url",
            f"redis://{redis.ready()}/0",
            *FORGETTING,
        )
        orchestrator = Service(words, settings, folder / "orchestrator.stderr", ANY_PORT)
        owned.callback(orchestrator.kill)
        address = orchestrator.ready()
        yield address, {"orchestrator": orchestrator, "verifier": verifier, "redis": redis}


async def _measure(
    settings: LoadSettings, pair: Pair, parts: Mapping[str, Process], address: str, tell: Callable[[str], None]
) -> LoadReport:
    over = asyncio.Event()
    async with AsyncClient(address) as client:
        crowd = Crowd(client, settings.seed, 60 * settings.minutes + 2 * START_S)
        await client.complete([5, 6, 7], max_tokens=64, ignore_eos=True)  # everything is imported and compiled
        before = memory_mib(parts)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(settings.idle):
                tasks.create_task(crowd.hold(over))
            try:
                still = await _until_still(settings, crowd)
                for _ in range(settings.sessions):
                    tasks.create_task(crowd.go_on(over))
                await _until_all_run(settings, crowd)
                watched = await _watch(settings, crowd, parts, tell)
                lengths = list(zip(still, await crowd.lengths(), strict=True))
            finally:
                over.set()
    wrong = sum(len(mismatches(pair, _job(prompt), tokens)) for prompt, tokens in crowd.texts)
    return LoadReport(
        arguments=asdict(settings),
        machine=machine.describe(),
        commit=machine.commit(),
        before=before,
        samples=watched.samples,
        sessions=settings.sessions + settings.idle,
        ended=crowd.ended,
        errors=crowd.errors,
        judged=sum(len(tokens) for _, tokens in crowd.texts),
        mismatches=wrong,
        idle=lengths,
        unread=UNREAD,
    )


def _job(prompt: tuple[int, ...]) -> Job:
    return Job(0, prompt, UNREAD, Sampling(), True, (), "", Manner.READ, 0, (), False)


async def _until_still(settings: LoadSettings, crowd: Crowd) -> list[int]:
    """How far the idle sessions are decided once they get no further."""
    deadline = time.monotonic() + START_S
    before: list[int] = []
    while not _is_still(settings, before, now := await crowd.lengths()):
        if time.monotonic() > deadline or crowd.errors:
            said = crowd.errors[0] if crowd.errors else f"still being decided after {START_S:g} s: {now}"
            raise BenchError(f"idle sessions: {said}")
        before = now
        await asyncio.sleep(LOOK_S)
    return now


def _is_still(settings: LoadSettings, before: Sequence[int], now: Sequence[int]) -> bool:
    return len(now) == settings.idle and now == before and all(length >= READ_FIRST for length in now)


async def _until_all_run(settings: LoadSettings, crowd: Crowd) -> None:
    deadline = time.monotonic() + START_S
    while crowd.running < LEAST_RUNNING * settings.sessions or not crowd.tokens:
        if time.monotonic() > deadline or crowd.errors:
            said = crowd.errors[0] if crowd.errors else f"only {crowd.running} sessions began within {START_S:g} s"
            raise BenchError(f"the crowd did not begin: {said}")
        await asyncio.sleep(0.1)


async def _watch(
    settings: LoadSettings, crowd: Crowd, parts: Mapping[str, Process], tell: Callable[[str], None]
) -> Watched:
    watched, began = Watched(), time.monotonic()
    while (now := time.monotonic() - began) < 60 * settings.minutes:
        memory = memory_mib(parts)
        watched.samples.append((round(now, 1), crowd.tokens, crowd.running, crowd.ended, memory))
        shown = ", ".join(f"{name} {size:.0f} MiB" for name, size in memory.items())
        done = f"{crowd.tokens} tokens, {crowd.ended} sessions ended, {len(crowd.errors)} failed"
        tell(f"load: {now:6.1f} s {done}, {shown}")
        await asyncio.sleep(LOOK_S)
    return watched


def memory_mib(parts: Mapping[str, Process]) -> dict[str, float]:
    """Resident memory of each process."""
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    return {
        name: round(int(Path(f"/proc/{part.process.pid}/statm").read_text().split()[1]) * page, 1)
        for name, part in parts.items()
    }


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.soak.load",
        description="Stream to many clients at once on the scripted model; measure speed and memory.",
        epilog="Exit code 1: it could not be measured, or a bar is missed.",
    )
    line.add_argument("--minutes", type=float, default=10.0, metavar="N", help="default: 10")
    line.add_argument("--sessions", type=int, default=1000, metavar="N", help="at a time (default: 1000)")
    line.add_argument(
        "--idle", type=int, default=20, metavar="N", help="more, whose clients stop reading (default: 20)"
    )
    line.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts (default: 1)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        settings = LoadSettings(args.minutes, args.sessions, args.idle, args.seed)
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except (InvalidParameter, OSError) as error:
        say(f"load: error: {error}")
        return 2
    try:
        with terminable():
            found = load(settings, say)
    except BenchError as error:
        say(f"load: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    found.write(args.out)
    print(found.shown())
    return 0 if found.holds else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
