"""Many sessions at once on the scripted model: python -m bench.soak.load --help.

All clients are in this process. What is measured: tokens per second at full speed; then, paced, so that all wait for
the verifier alone, memory per session, and how far it decides for clients that do not read. The paced crowd comes in
rounds: whether memory grows is told by what the services hold between them, when nothing is under way.

Lengths are drawn from an exponential law, so a session's age does not tell how much of it is left, and the mix of ages
is soon steady. With other lengths sessions that begin together stay in step for minutes, and their memory goes up and
down with their age by tens of MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from math import ceil
from pathlib import Path
from random import Random

from bench.harness import RESULTS, record
from bench.harness.entry import first_failure, terminable
from bench.harness.runs import BenchError
from bench.harness.services import ANY_PORT, RedisLog, ServiceProcess, free_port
from bench.soak import weighing
from bench.soak.checks import mismatches
from bench.soak.jobs import Job, Manner, SoakPair, scripted
from bench.soak.load_report import LoadReport, Memory
from deploy.stack.processes import environment
from specwire.client import AsyncClient, Chunk, Event, SpecwireError, Started
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import Sampling
from specwire.rpc.process import say

LIMIT_S = 60.0
RUNNING = "specwire:num_sessions_running"
# Ended sessions are remembered for as long, a minute by itself: at some thousand a minute their number, and with it
# memory, would follow every change of the machine's speed.
FORGETTING = ("--retention", "5")
# With sessions that wait for a slot: on a slow machine it takes long until one is free.
PATIENT = ("--queue-wait", "300")
DEPLOY = "deploy"


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """address: where clients call. figures: where the orchestrator tells its own. memory: of all processes."""

    address: str
    figures: str
    memory: Memory

    def running(self) -> int:
        """Sessions that have begun and not ended, as the orchestrator counts them. BenchError if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.figures}/metrics", timeout=LIMIT_S) as page:
                lines = page.read().decode().splitlines()
        except OSError as error:
            raise BenchError(f"metrics: {error}") from error
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(RUNNING))


@contextmanager
def served(pair: SoakPair, verifier: str) -> Iterator[ServedLoad]:
    """Start everything. Whatever becomes of it, no process is left.

    verifier: a module in place of deploy's for the verifier's process.
    """
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-load-")))
        surroundings = {**environment(), **weighing.ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        redis = RedisLog(folder)
        owned.callback(redis.kill)

        def start(module: str, *words: str) -> ServiceProcess:
            through = weighing.words(folder / words[0], module)
            service = ServiceProcess(words, surroundings, folder / f"{words[0]}.stderr", ANY_PORT, through)
            owned.callback(service.kill)
            return service

        verify = start(verifier, "verify", pair.target, *pair.words, *PATIENT)
        figures = f"127.0.0.1:{free_port()}"
        words = ("--redis-url", f"redis://{redis.ready()}/0", *FORGETTING, "--metrics", figures)
        orchestrate = start(DEPLOY, "orchestrate", "--verifier", verify.ready(), *words)
        parts = {"orchestrator": orchestrate, "verifier": verify, "redis": redis}
        sockets = {"orchestrator": folder / "orchestrate", "verifier": folder / "verify"}
        yield ServedLoad(orchestrate.ready(), figures, Memory(parts, sockets, redis))


PROMPT_TOKENS = 16
MEAN_LENGTH, LONGEST = 75, 600
VOCABULARY = 64
# Behind so many tokens an idle reader stops reading; its session is long enough never to end.
READ_FIRST, UNREAD = 16, 4000
# Every so many sessions are kept for the judge.
JUDGED = 50
# Sessions at a time that only come and go.
AT_ONCE = 64


def length(random: Random) -> int:
    return min(LONGEST, 1 + int(random.expovariate(1 / MEAN_LENGTH)))


@dataclass(slots=True)
class SessionCrowd:
    """Sessions in motion.

    Attributes:
        tokens: received so far, by all.
        gone: sessions that have ended, by themselves or because they were left.
        texts: (prompt, tokens) of some that have ended.
        idle: ids of the sessions that nobody reads on.
    """

    client: AsyncClient
    seed: int
    limit_s: float
    tokens: int = 0
    ended: int = 0
    gone: int = 0
    errors: list[str] = field(default_factory=list)
    texts: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    async def pass_through(self, sessions: int) -> None:
        """So many sessions of one token: whatever is remembered of the latest ones is full then. They do not count."""
        left = iter(range(sessions))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(AT_ONCE, sessions)):
                tasks.create_task(self._pass(left))
        self.tokens = self.ended = 0

    async def _pass(self, left: Iterator[int]) -> None:
        for _ in left:
            await self._one(1, lambda _: 1, lambda: False)

    async def go_on(self, until: asyncio.Event) -> None:
        """One session after the other; the last one is left where it is."""
        while not until.is_set():
            await self._one(PROMPT_TOKENS, length, until.is_set)

    async def hold(self, until: asyncio.Event) -> None:
        """One session that is read for a little while, and then is not, and does not end."""
        prompt = [2 + len(self.idle)] * PROMPT_TOKENS
        events = self.client.generate(prompt, max_tokens=UNREAD, ignore_eos=True, timeout=self.limit_s)
        seen = 0
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Started):
                        self.idle.append(event.session_id)
                    seen += len(event.tokens) if isinstance(event, Chunk) else 0
                    if seen >= READ_FIRST:
                        await until.wait()
                        return
        except SpecwireError as error:
            self.errors.append(str(error))

    async def lengths(self) -> list[int]:
        """How far each idle session has been decided."""
        states = [await self.client.get_session(session_id) for session_id in self.idle]
        return [len(state.tokens) - state.prompt_tokens for state in states]

    async def _one(self, tokens: int, drawn: Callable[[Random], int], over: Callable[[], bool]) -> None:
        """With a prompt of so many tokens."""
        number = next(self._numbers)
        random = Random(f"{self.seed}/{number}")
        prompt = tuple(random.randrange(2, VOCABULARY) for _ in range(tokens))
        most = drawn(random)
        events = self.client.generate(prompt, max_tokens=most, ignore_eos=True, timeout=self.limit_s)
        output = await self._read(events, over)
        if number % JUDGED == 0:
            self.texts.append((prompt, output))

    async def _read(self, events: AsyncGenerator[Event, None], over: Callable[[], bool]) -> list[int]:
        tokens: list[int] = []
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Chunk):
                        tokens += event.tokens
                        self.tokens += len(event.tokens)
                    if over():
                        return tokens
            self.ended += 1
        except SpecwireError as error:
            self.errors.append(str(error))
        finally:
            self.gone += 1
        return tokens


OUT = RESULTS / "load.json"
LOOK_S = 2.0
# Minutes of a round; and seconds from its end on, in which services forget its last sessions.
ROUND, REST_S = 1.0, 15.0
START_S = 300.0
SPARE_SLOTS, MOST_SLOTS = 4, 1024
# Sessions that come and go before the crowd, for each of its places: services remember the latest 4,096 in some tables,
# which are to be full before growth is looked for.
PASSING = 5
# Each has a prompt of its own.
MOST_IDLE = 60
# For each session that is asked for: some are just beginning one. Those beyond the slots wait for one, fewer than may.
CLIENTS = 1.06
# Positions that a paced verifier computes per second, for each token of full speed: less than can be served. Sessions
# then go on in step, and another begins at once where one has ended.
PACE, FULL_SPEED_S = 0.7, 60.0


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """idle: sessions, on top of the others, whose clients stop reading. rest_s: before the services are weighed."""

    minutes: float = 10.0
    sessions: int = 1000
    idle: int = 20
    seed: int = 1
    rest_s: float = REST_S

    def __post_init__(self) -> None:
        most = MOST_SLOTS - SPARE_SLOTS - self.idle
        for name, value, limit in (("minutes", self.minutes, 1440.0), ("sessions", self.sessions, most)):
            if not 0 < value <= limit:
                raise InvalidParameter(name, f"must be above 0 and at most {limit:g}, not {value}")
        if not 0 <= self.idle <= MOST_IDLE:
            raise InvalidParameter("idle", f"must be from 0 to {MOST_IDLE}, not {self.idle}")

    @property
    def rounds(self) -> int:
        return max(3, round(self.minutes / ROUND))

    @property
    def slots(self) -> int:
        return self.sessions + self.idle + SPARE_SLOTS


def load(settings: LoadSettings, tell: Callable[[str], None], verifier: str = DEPLOY) -> LoadReport:
    """Load everything and look.

    Args:
        verifier: a module in place of deploy's for the verifier's process, which takes the same words.

    Raises:
        BenchError: the services do not start, the sessions do not begin, or this system does not tell what is held.
    """
    if not weighing.supported():
        raise BenchError("memory: this C library does not tell what is allocated (mallinfo2, glibc 2.33 or later)")
    ran_on = record.provenance()
    tell(f"load: starting the services for {settings.sessions} sessions")
    with served(scripted(delay_ms=0.0, slots=settings.slots), verifier) as services, first_failure():
        speed = asyncio.run(_full_speed(settings, services))
    tell(f"load: {speed:.0f} tokens/s; starting them anew, paced")
    pair = scripted(delay_ms=1000 / (PACE * speed), slots=settings.slots, row_cost=1.0)
    with served(pair, verifier) as services, first_failure():
        found = asyncio.run(_measure(settings, pair, services, speed, tell))
    return replace(found, ran_on=ran_on)


async def _full_speed(settings: LoadSettings, services: ServedLoad) -> float:
    """Tokens per second that clients get where nothing holds anybody up."""
    async with AsyncClient(services.address) as client:
        crowd = SessionCrowd(client, settings.seed, 2 * START_S)
        async with _crowded(settings, crowd, services):
            began, tokens = time.monotonic(), crowd.tokens
            await asyncio.sleep(min(FULL_SPEED_S, 60 * settings.minutes))
            speed = (crowd.tokens - tokens) / (time.monotonic() - began)
        if crowd.errors:
            raise BenchError(f"at full speed: {crowd.errors[0]}")
        return speed


@asynccontextmanager
async def _crowded(settings: LoadSettings, crowd: SessionCrowd, services: ServedLoad) -> AsyncIterator[None]:
    """While as many sessions run as were asked for."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(ceil(CLIENTS * settings.sessions)):
            tasks.create_task(crowd.go_on(over))
        try:
            await _until_all_run(settings, crowd, services)
            yield
        finally:
            over.set()


async def _measure(
    settings: LoadSettings, pair: SoakPair, services: ServedLoad, speed: float, tell: Callable[[str], None]
) -> LoadReport:
    over, memory = asyncio.Event(), services.memory
    async with AsyncClient(services.address) as client:
        crowd = SessionCrowd(client, settings.seed, 60 * settings.minutes + 2 * START_S)
        await client.complete([5, 6, 7], max_tokens=8, ignore_eos=True)  # everything is imported
        await crowd.pass_through(PASSING * settings.sessions)
        before = memory.resident_mib()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(settings.idle):
                tasks.create_task(crowd.hold(over))
            try:
                still = await _until_still(settings, crowd)
                await _rest(settings, crowd, services, tell)
                for number in range(settings.rounds):
                    async with _crowded(settings, crowd, services):
                        await _watch(settings, crowd, services, number, tell)
                    await _rest(settings, crowd, services, tell)
                lengths = list(zip(still, await crowd.lengths(), strict=True))
            finally:
                over.set()
    wrong = sum(len(mismatches(pair, _job(prompt), tokens)) for prompt, tokens in crowd.texts)
    return LoadReport(
        arguments=asdict(settings),
        ran_on={},  # read before all this began
        tokens_per_second=speed,
        before=before,
        samples=memory.samples,
        weights=memory.weights,
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


async def _until_still(settings: LoadSettings, crowd: SessionCrowd) -> list[int]:
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


async def _rest(settings: LoadSettings, crowd: SessionCrowd, services: ServedLoad, tell: Callable[[str], None]) -> None:
    """Weigh the services once they have nothing to do, and have forgotten what they did."""
    deadline = time.monotonic() + START_S
    while (running := await asyncio.to_thread(services.running)) > settings.idle:
        if time.monotonic() > deadline:
            raise BenchError(f"{running - settings.idle} sessions do not end that were left")
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(settings.rest_s)
    held = await asyncio.to_thread(services.memory.held_mib)
    services.memory.weights.append((crowd.gone, held, services.memory.resident_mib()))
    shown = ", ".join(f"{name} {size:.2f} MiB" for name, size in held.items())
    tell(f"load: at rest, {crowd.gone} sessions gone; held: {shown}")


async def _until_all_run(settings: LoadSettings, crowd: SessionCrowd, services: ServedLoad) -> None:
    """Those that nobody reads on besides, so that it may be fewer for a moment."""
    deadline, all_of_them = time.monotonic() + START_S, settings.sessions + len(crowd.idle)
    while (running := await asyncio.to_thread(services.running)) < all_of_them or not crowd.tokens:
        if time.monotonic() > deadline or crowd.errors:
            said = crowd.errors[0] if crowd.errors else f"only {running} sessions began within {START_S:g} s"
            raise BenchError(f"the crowd did not begin: {said}")
        await asyncio.sleep(0.1)


async def _watch(
    settings: LoadSettings, crowd: SessionCrowd, services: ServedLoad, number: int, tell: Callable[[str], None]
) -> None:
    """A round. Its looks are told with the time that crowds have been there."""
    memory, seconds = services.memory, 60 * settings.minutes / settings.rounds
    began = time.monotonic() - number * seconds
    while (now := time.monotonic() - began) < (number + 1) * seconds:
        running, resident = await asyncio.to_thread(services.running), memory.resident_mib()
        memory.samples.append((round(now, 1), crowd.tokens, running, crowd.ended, resident))
        shown = ", ".join(f"{name} {size:.0f} MiB" for name, size in resident.items())
        done = f"{crowd.tokens} tokens, {running} sessions run, {crowd.ended} ended, {len(crowd.errors)} failed"
        tell(f"load: {now:6.1f} s {done}, {shown}")
        await asyncio.sleep(LOOK_S)


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
    record.add_argument(line, OUT)
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        settings = LoadSettings(args.minutes, args.sessions, args.idle, args.seed)
        record.check(args.out)
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
    record.keep(found, args.out, OUT, say)
    print(found.shown())
    return 0 if found.holds else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
