"""One session as its client sees it, through the client library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from bench.soak.jobs import Job, Manner
from specwire.client import AsyncClient, Chunk, Event, Finished, SessionState, SpecwireError, Started
from specwire.client.requests import RequestOptions
from specwire.core.messages import FinishReason

PATIENCE_S = 60.0
LIMIT_S = 240.0
# Of sessions that are left: a deadline that passes soon behind the soak's end.
LEAVE_LIMIT_S = 90.0
SLACK_S = 30.0


@dataclass(slots=True)
class Told:
    """What came of a job.

    Attributes:
        end: why it ended, by Finished; None if it did not come.
        error: what the client library raised, "" if nothing.
        lost, repeated: tokens, by the positions of the chunks.
        waits: seconds until each chunk but the first came, without the reader's own pauses.
        second: what another reader was told, None if there was none, or it came to nothing (`second_error`).
        log: the session in the log, behind its end.
        orphan: reader and orchestrator had gone for good; it was asked for at last, to see it end.
    """

    job: Job
    session_id: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: FinishReason | None = None
    error: str = ""
    lost: int = 0
    repeated: int = 0
    waits: list[float] = field(default_factory=list)
    second: list[int] | None = None
    second_error: str = ""
    log: SessionState | None = None
    log_error: str = ""
    orphan: bool = False

    def add(self, event: Event, waited: float) -> None:
        match event:
            case Started():
                self.session_id = event.session_id
            case Chunk():
                due = len(self.job.prompt) + len(self.tokens)
                self.lost += max(0, event.position - due)
                self.repeated += max(0, due - event.position)
                if self.tokens:
                    self.waits.append(waited)
                self.tokens += event.tokens
                self.text += event.text
            case Finished():
                self.text += event.text
                self.end = event.reason


class SoakReader:
    """Carries out one job.

    Args:
        client: of the session. other: of a second reader.
        hurry: once set, no more pauses of reading.
    """

    def __init__(self, job: Job, client: AsyncClient, other: AsyncClient, hurry: asyncio.Event) -> None:
        self.told = Told(job)
        self._job = job
        self._client = client
        self._other = other
        self._hurry = hurry
        self._pauses = sorted(job.pauses)
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> Told:
        """Never raises but CancelledError: what goes wrong is told."""
        try:
            async with asyncio.timeout(LIMIT_S + SLACK_S):
                await self._read()
                await self._look_up()
        except TimeoutError:
            self.told.error = self.told.error or "hung: no end, and no error either"
        return self.told

    async def _read(self) -> None:
        limit = LEAVE_LIMIT_S if self._job.manner is Manner.LEAVE else LIMIT_S
        try:
            async with aclosing(self._client.generate(self._job.prompt, timeout=limit, **self._options())) as events:
                await self._follow(events)
        except SpecwireError as error:
            self.told.error = str(error)
        finally:
            await asyncio.gather(*self._tasks)

    def _options(self) -> RequestOptions:
        job, sampling = self._job, self._job.sampling
        return {
            "max_tokens": job.length,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop": job.stop,
            "ignore_eos": job.ignore_eos,
            "request_id": job.request_id,
        }

    async def _follow(self, events: AsyncGenerator[Event, None]) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        async for event in events:
            self.told.add(event, now() - began)
            if isinstance(event, Started):
                self._accompany()
            if len(self.told.tokens) >= self._job.at and not isinstance(event, Finished):
                if self._job.manner is Manner.LEAVE:
                    return
                self._cancel_once()
            await self._pause()
            began = now()

    def _accompany(self) -> None:
        """By a second reader; not of a session that is left, which would then be read after all."""
        if self._job.second and self._job.manner is not Manner.LEAVE:
            self._tasks.append(asyncio.create_task(self._watch()))

    def _cancel_once(self) -> None:
        if self._job.manner is Manner.CANCEL and not any(task.get_name() == "cancel" for task in self._tasks):
            self._tasks.append(asyncio.create_task(self._cancel(), name="cancel"))

    async def _cancel(self) -> None:
        try:
            await self._client.cancel(self.told.session_id, timeout=LIMIT_S)
        except SpecwireError as error:
            self.told.error = self.told.error or f"Cancel: {error}"

    async def _watch(self) -> None:
        tokens: list[int] = []
        try:
            async with aclosing(self._other.watch(self.told.session_id, timeout=LIMIT_S)) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        tokens += event.tokens
            self.told.second = tokens
        except SpecwireError as error:
            self.told.second_error = str(error)

    async def _pause(self) -> None:
        while self._pauses and len(self.told.tokens) >= self._pauses[0][0]:
            _, seconds = self._pauses.pop(0)
            if not self._hurry.is_set():
                await asyncio.sleep(seconds)

    async def _look_up(self) -> None:
        """The log, which is what counts."""
        if not self.told.session_id:
            return
        try:
            self.told.log = await self._client.get_session(self.told.session_id, timeout=LIMIT_S)
        except SpecwireError as error:
            self.told.log_error = str(error)
