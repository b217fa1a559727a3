"""Soak everything in faults: python -m bench.soak.run --help.

Sessions without end beside a monkey, until the time is over; then everything must end well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count

from redis.exceptions import RedisError

from bench.harness import RESULTS, record
from bench.harness.entry import first_failure, terminable
from bench.harness.runs import BenchError
from bench.harness.services import ServiceProcess
from bench.soak.checks import SoakFinding, check
from bench.soak.jobs import DEMO, ON_VLLM, PAIRS, SCRIPTED, SoakPair, draw
from bench.soak.monkey import EVERY_S, Monkey, within
from bench.soak.neighbour import FiledService, Neighbour
from bench.soak.reader import LEAVE_LIMIT_S, PATIENCE_S, SoakReader, Told
from bench.soak.report import SoakReport, Tally
from bench.soak.rig import Rig, rig
from specwire.client import AsyncClient, SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.progress import ProgressBar
from specwire.rpc.process import say

# Where each pair's record is.
RECORDS = {
    SCRIPTED: RESULTS / "soak.json",
    DEMO: RESULTS / "soak_demo.json",
    ON_VLLM: RESULTS / "soak_vllm.json",
}


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """`every`: mean seconds between faults; 0 for none. What has begun when `minutes` are over still ends."""

    minutes: float = 10.0
    seed: int = 1
    sessions: int = 32
    pair: str = SCRIPTED
    every: float = EVERY_S

    def __post_init__(self) -> None:
        for name, value, most in (("minutes", self.minutes, 1440.0), ("every", self.every, 3600.0)):
            if not 0 <= value <= most:
                raise InvalidParameter(name, f"must be from 0 to {most:g}, not {value}")
        if not 1 <= self.sessions <= 256:
            raise InvalidParameter("sessions", f"must be from 1 to 256, not {self.sessions}")
        if self.pair not in PAIRS:
            raise InvalidParameter("pair", f"must be one of {', '.join(PAIRS)}, not {self.pair!r}")


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.soak.run",
        description="Stream to many clients while services are killed, stopped, restarted, and lines cut and stalled.",
        epilog="Exit code 1: something was lost, repeated, wrong, or did not end as asked; or it was ended early "
        "(Ctrl-C), or nothing was broken meanwhile.",
    )
    line.add_argument("--minutes", type=float, default=10.0, metavar="N", help="default: 10")
    line.add_argument("--seed", type=int, default=1, metavar="N", help="of sessions and faults (default: 1)")
    line.add_argument("--sessions", type=int, default=32, metavar="N", help="at a time (default: 32)")
    line.add_argument("--pair", choices=sorted(PAIRS), default=SCRIPTED, help="whose texts (default: scripted)")
    line.add_argument("--every", type=float, default=EVERY_S, metavar="S", help="mean seconds between faults; 0: none")
    line.add_argument("--quiet", action="store_true", help="do not tell each fault")
    record.add_argument(line, *RECORDS.values())
    return line


def settings_of(args: argparse.Namespace) -> SoakSettings:
    """Raises InvalidParameter."""
    return SoakSettings(args.minutes, args.seed, args.sessions, args.pair, args.every)


PROGRESS_S = 10.0
# A session that was left ends by itself: the service waits for a return, and where its orchestrator has gone as well,
# another one ends it soon after its deadline.
LEFT_S = LEAVE_LIMIT_S + 60.0
LOOK_S = 1.0


def soak(settings: SoakSettings, say: Callable[[str], None]) -> SoakReport:
    """Raises BenchError if the services do not start, or do not answer at first.

    SIGINT and SIGTERM end it early, with the report so far. What streams then comes to its end, unless they come again.
    """
    pair, ran_on = PAIRS[settings.pair](), record.provenance()
    say(f"soak: starting the services, {pair.name} pair")
    began = time.monotonic()
    with rig(pair) as running:
        say(f"soak: {settings.sessions} sessions at a time for {settings.minutes:g} minutes, seed {settings.seed}")
        run = _Soak(settings, pair, running, say)
        began = time.monotonic()
        with suppress(asyncio.CancelledError), first_failure():
            asyncio.run(run.run())
        seconds = time.monotonic() - began
        wrong = [*run.monkey.wrong, *run.filed.wrong, *_leave(running), *_said(running)]
    return SoakReport(
        arguments=asdict(settings),
        ran_on=ran_on,
        asked_minutes=settings.minutes,
        lasted_s=run.lasted_s,
        seconds=seconds,
        tally=run.tally,
        faults=run.monkey.faults,
        kinds=len(run.monkey.names),
        neighbour=run.neighbour.answers,
        filed=run.filed.answers,
        asked_kinds=run.neighbour.kinds,
        wrong=wrong,
        unended=run.unended,
        interrupted=run.interrupted,
    )


class _Soak:
    """`stop` ends the faults and the beginning of sessions. `lasted_s`: until then."""

    def __init__(self, settings: SoakSettings, pair: SoakPair, rig: Rig, say: Callable[[str], None]) -> None:
        self.monkey = Monkey(rig, settings.seed, lambda fault: say(f"soak: {self._clock()} {fault}"), settings.every)
        self.neighbour = Neighbour(rig.addresses, settings.seed)
        self.filed = FiledService(rig.filed, rig.filed_log, settings.seed)
        self.tally = Tally()
        self.unended = 0
        self.lasted_s = 0.0
        self.interrupted = False
        self._settings = settings
        self._pair = pair
        self._rig = rig
        self._say = say
        self._began = time.monotonic()
        self._numbers = count()
        self._stop = asyncio.Event()
        self._left: list[Told] = []
        self._judging = asyncio.Lock()
        self._greeted = asyncio.Semaphore(0)

    async def run(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        for signalled in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signalled, self._interrupt, task)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._time())
            tasks.create_task(self.neighbour.run(self._stop))
            tasks.create_task(self.filed.run(self._stop))
            if self._settings.every:
                tasks.create_task(self._interfere())
            for number in range(self._settings.sessions):
                tasks.create_task(self._work(number))
        if not self.interrupted:
            self.unended = await self._still_running()

    def _interrupt(self, task: asyncio.Task[None] | None) -> None:
        if self.interrupted and task is not None:
            task.cancel()
        self.interrupted = True
        self._stop.set()

    async def _time(self) -> None:
        seconds = 60 * self._settings.minutes
        with ProgressBar("soak", round(seconds)) as bar:
            while not self._stop.is_set() and (left := self._began + seconds - time.monotonic()) > 0:
                bar.at(round(seconds - left))
                await within(self._stop, min(left, PROGRESS_S))
                self._progress()
        self._stop.set()
        self.lasted_s = time.monotonic() - self._began

    def _progress(self) -> None:
        tally = self.tally
        faults, found = sum(self.monkey.faults.values()), len(tally.findings)
        self._say(
            f"soak: {self._clock()} {tally.sessions} sessions, {tally.tokens} tokens, {faults} faults, {found} findings"
        )

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:6.1f} s"

    async def _work(self, number: int) -> None:
        """One session after the other; what has begun ends, with everything whole again."""
        first = number % len(self._rig.addresses)
        addresses = self._rig.addresses[first:] + self._rig.addresses[:first]
        async with (
            AsyncClient(addresses, patience=PATIENCE_S) as client,
            AsyncClient(addresses[::-1], patience=PATIENCE_S) as other,
        ):
            for one in (client, other):
                await one.server_info()  # while all is whole: a client gives up at once where nobody ever was
            self._greeted.release()
            while not self._stop.is_set():
                job = draw(self._pair, self._settings.seed, next(self._numbers))
                await self._judge(await SoakReader(job, client, other, self._stop).run())

    async def _interfere(self) -> None:
        """Once every client has met the service."""
        for _ in range(self._settings.sessions):
            await self._greeted.acquire()
        await self.monkey.run(self._stop)

    async def _judge(self, told: Told) -> None:
        async with self._judging:
            findings = await asyncio.to_thread(check, self._pair, told)
        self._add(told, findings)
        if told.session_id and (told.log is None or told.log.finish_reason is None):
            self._left.append(told)

    def _add(self, told: Told, findings: Sequence[SoakFinding]) -> None:
        for one in findings:
            self._say(f"soak: {self._clock()} session {one.session} ({told.session_id[:8]}): {one.kind}: {one.detail}")
        self.tally.add(told, findings)

    async def _still_running(self) -> int:
        """How many of the sessions that were left do not end, though they have time, and then a reader."""
        deadline = time.monotonic() + LEFT_S
        async with AsyncClient(self._rig.addresses, patience=PATIENCE_S) as client:
            left = self._left
            self.tally.left = len(left)
            while left and time.monotonic() < deadline:
                left = [one for one in left if not await _ended(client, one)]
                await asyncio.sleep(LOOK_S if left else 0.0)
            self.tally.orphans = len(left)
            stuck = [one.session_id for one in left if not await self._brought_to_an_end(client, one)]
        for session_id in stuck:
            self._say(f"soak: session {session_id[:8]} does not end")
        return len(stuck)

    async def _brought_to_an_end(self, client: AsyncClient, told: Told) -> bool:
        """An orphan, which no orchestrator has ended: it goes on for whoever asks for it, and is then to end."""
        told = Told(told.job, told.session_id, orphan=True)
        try:
            async for event in client.watch(told.session_id, timeout=LEFT_S):
                told.add(event, 0.0)
        except SpecwireError as error:
            told.error = str(error)
        self._add(told, await asyncio.to_thread(check, self._pair, told))
        return not told.error


async def _ended(client: AsyncClient, told: Told) -> bool:
    try:
        return (await client.get_session(told.session_id, timeout=LOOK_S * 10)).finish_reason is not None
    except SpecwireError:
        return False


def _leave(rig: Rig) -> list[str]:
    """Ask everything to end, who serves clients first; what does not end well. The log is looked at while it lives."""
    services = [(name, part) for name, part in rig.parts.items() if isinstance(part, ServiceProcess)]
    services.append(("orchestrator with a file", rig.filed))
    wrong = [f"{name}: {said}" for name, part in reversed(services) if (said := part.end())]
    return [*wrong, *_left_for_ever(rig)]


def _left_for_ever(rig: Rig) -> list[str]:
    try:
        return [f"redis: {key} has no end" for key in rig.log.eternal_keys()]
    except RedisError as error:
        return [f"redis: cannot be looked at: {error}"]


def _said(rig: Rig) -> list[str]:
    """Crashes that services wrote of."""
    return [
        f"{name}: {line}"
        for name, part in (*rig.parts.items(), ("orchestrator with a file", rig.filed))
        for line in part.said().splitlines()
        if line.startswith("Traceback") or "never retrieved" in line or "was never awaited" in line
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        settings = settings_of(args)
        record.check(args.out)
    except (InvalidParameter, OSError) as error:
        say(f"soak: error: {error}")
        return 2
    try:
        with terminable():
            found = soak(settings, _silent if args.quiet else say)
    except BenchError as error:
        say(f"soak: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    record.keep(found, args.out, RECORDS[settings.pair], say)
    print(found.shown())
    return 0 if found.holds else 1


def _silent(_: str) -> None:
    pass


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only stand in the way of those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
