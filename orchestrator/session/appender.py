"""One session's part in the log: appends, leases, what is said when the store fails."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import grpc

from orchestrator.options import OrchestratorOptions
from orchestrator.session.output import ELSEWHERE, OutputTimings, SessionListener, SessionView
from orchestrator.store import (
    LEASE_S,
    AppendReply,
    DeletedSession,
    Fenced,
    Gap,
    LoggedTokens,
    MissingSession,
    SessionExists,
    SessionRecord,
    SessionStore,
    StaleLog,
    StoreError,
    StoreUnavailable,
)
from orchestrator.store.base import BEGINNING_S, RENEW_S, awake_or_asleep_s
from specwire.core import messages
from specwire.core.messages import Append, FinishReason
from specwire.core.session import Session, State
from specwire.rpc.errors import RETRY_AFTER, StatusError
from specwire.telemetry.logs import tell
from specwire.telemetry.tally import OrchestratorTally

# ----------------------------------------------------------------------------------------------------------------------
# What a client is told when the session log fails.


def status_of_store(error: StoreError) -> grpc.StatusCode:
    """Status of a call that begins a session, or names one."""
    if isinstance(error, StoreUnavailable | SessionExists):  # the other call's session is joined the next time
        return grpc.StatusCode.UNAVAILABLE
    if isinstance(error, MissingSession):
        return grpc.StatusCode.NOT_FOUND
    if isinstance(error, Fenced):
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.DATA_LOSS


def retry_of_store(error: StoreError) -> float | None:
    """Seconds after which the call may be repeated; None where repeating does not help."""
    return RETRY_AFTER if isinstance(error, StoreUnavailable) else None


def status_of_append(error: StoreError) -> grpc.StatusCode:
    """Status of a running session, which had a log: a missing one was lost, unless it was deleted."""
    lost = isinstance(error, MissingSession) and not isinstance(error, DeletedSession)
    return grpc.StatusCode.DATA_LOSS if lost else status_of_store(error)


def message_of_append(error: StoreError) -> str:
    """What readers of a running session are told."""
    return str(error) if isinstance(error, StoreUnavailable) else f"session log: {error}"


@contextmanager
def store_statuses() -> Iterator[None]:
    """Turns a StoreError raised within it into the StatusError that the caller is told."""
    try:
        yield
    except StoreError as error:
        raise StatusError(status_of_store(error), str(error), retry_of_store(error)) from error


# ----------------------------------------------------------------------------------------------------------------------
# Signs of life: while an orchestrator lives, the log knows whose its sessions are, and does not let them expire.

logger = logging.getLogger(__name__)


async def keep_leases(logs: Callable[[], Iterable[SessionLog]]) -> None:
    """Have sessions renew their leases, until cancelled. All renewals go out in one round trip of the log."""
    while True:
        await asyncio.sleep(RENEW_S / 2)
        done = await asyncio.gather(*(log.renew() for log in logs()), return_exceptions=True)
        for error in done:
            if isinstance(error, Exception):
                logger.error("a session's lease could not be renewed", exc_info=error)


# ----------------------------------------------------------------------------------------------------------------------
# Writes one session's appends into the log, and writes again what the store has lost of it.

RETRY_S = 0.1
# Seconds after which a log is given up that refuses a session's first tokens until somebody mends it.
REFUSED_S = 2.0
# How often a log is written again before one append is given up.
MOST_MENDS = 4
# A request id is bound again after this share of the time that a running session's log is kept without its owner.
REBIND_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Seconds. running: after the owner's last sign of life. ended: after the session's end."""

    running: float
    ended: float


class Appender:
    """Writes for one owner. It never guesses what became of a write.

    - Outcome unknown (no answer): the append is repeated. The script compares it with what the log holds there, so this
      reads the log and adds what is missing in one step.
    - The log is gone, ends too early, or stands under an older fence (the store was restarted empty or behind): it is
      written again from `held`, under our fence, and the append is repeated. An owner leaves a missing log alone if the
      session may have been claimed, ended and forgotten meanwhile: the owner slept for longer than a lease, or nothing
      was acknowledged for as long as the log keeps an ended session.
    - The log holds other tokens (ContentMismatch) or a newer fence (Fenced): it wins, and the caller reopens from it or
      stops.

    Args:
        fence: of the session's present owner.
        held: must not change while `write` is under way; its tokens are the log's, except where the store lost them.
        timeout: seconds after which a log that does not answer is given up.
        clock: in seconds, which goes on while the machine sleeps (None: one that nobody sets). Of this clock and the
        loop's own, the larger difference counts.
    """

    def __init__(
        self,
        store: SessionStore,
        record: SessionRecord,
        fence: int,
        held: LoggedTokens,
        owner: str,
        lifetimes: Lifetimes,
        timeout: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._store = store
        self._record = record
        self._fence = fence
        self._held = held
        self._owner = owner
        self._lifetimes = lifetimes
        self._timeout = timeout
        self._now = asyncio.get_running_loop().time
        self._acknowledged = self._now()
        self._clock = clock or awake_or_asleep_s
        self._attempted = self._owned = self._moment()
        self._slept = False
        self._cancelled = False
        self._ended = False
        self._read: float | None = None
        self._writing = asyncio.Lock()
        self._bound: float | None = None

    async def write(self, effect: Append, repeatable: bool = False) -> bool:
        """Return, once the log has acknowledged it, whether somebody has asked in the log for the session's end.

        repeatable: after this end, a repeated call begins a new session.

        Raises:
            StoreError: the log refused, or did not answer in time.
        """
        if effect.end is not None:
            with suppress(StoreUnavailable):
                await (self._release() if repeatable else self._confirm_bound())
        async with self._writing:
            give_up, told = self._now() + self._timeout, False
            while True:
                try:
                    return await self._attempt(effect)
                except StoreUnavailable as error:
                    if self._now() > give_up - self._impatience(error):
                        raise
                    if not told:
                        why = f"{error} ({error.detail})" if error.detail else str(error)
                        tell(logger, self._record.session_id, "an append is repeated: %s", why)
                    told = True
                await asyncio.sleep(RETRY_S)

    def _impatience(self, error: StoreUnavailable) -> float:
        """Seconds by which it is given up earlier: a full log stays full for long, and nothing is shown yet."""
        return max(0.0, self._timeout - REFUSED_S) if error.refused and not self._held.tokens else 0.0

    async def renew(self) -> bool:
        """Give a sign of life, unless a write has just given one; return whether somebody asked for the session's end.

        Raises:
            StoreError: as `write`, but a log that does not answer is not waited for.
        """
        with suppress(StoreUnavailable):
            await self._keep_bound()
        if self._writing.locked() or self._now() - self._acknowledged < RENEW_S:
            return False
        return await self.look()

    async def look(self) -> bool:
        """Like `renew`, but also right after a write. A session that has ended is left alone."""
        async with self._writing:
            return not self._ended and await self._attempt(Append(self._length, (), ()))

    @property
    def read_s(self) -> float:
        """Seconds since the session was last known to be read at another orchestrator.

        Time without an answer of the log does not count, because it alone tells of readers elsewhere.
        """
        return math.inf if self._read is None else self._now() - self._read

    async def _keep_bound(self) -> None:
        """Keep the request id bound to the session as long as it runs."""
        if self._bound is None or self._now() - self._bound > self._lifetimes.running * REBIND_SHARE:
            await self._bind()

    async def _confirm_bound(self) -> None:
        """Bind again if the log is forgotten soon: else its session would look like one that is about to begin."""
        if self._bound is None and self._lifetimes.ended < BEGINNING_S:
            await self._bind()

    async def _release(self) -> None:
        """Unbind the request id: a repeated call begins a new session."""
        record = self._record
        if record.request_id:
            await self._store.release_request(record.tenant, record.request_id, record.session_id)
            self._bound = math.inf

    @property
    def _length(self) -> int:
        return len(self._record.prompt) + len(self._held.tokens)

    async def _attempt(self, effect: Append) -> bool:
        began = self._moment()
        # An owner that is awake attempts a write several times in a lease, whether or not the log answers.
        self._slept = self._slept or self._since(self._attempted) > LEASE_S
        self._attempted = began
        try:
            done = await self._write_and_mend(effect)
        except StoreUnavailable:
            self._read = None if self._read is None else self._now()
            raise
        self._acknowledged, self._owned = self._now(), began
        self._slept = False
        self._cancelled |= done.cancelled
        self._ended = effect.end is not None
        if done.read_s < self.read_s:
            self._read = self._now() - done.read_s
        return done.cancelled and effect.end is None

    async def _write_and_mend(self, effect: Append) -> AppendReply:
        """Write, and write a lost log again, at most MOST_MENDS times: the store may lose it again meanwhile."""
        session_id, fence = self._record.session_id, self._fence
        for _ in range(MOST_MENDS):
            try:
                return await self._store.append(session_id, fence, effect)
            except MissingSession:
                if self._slept or self._may_be_forgotten:
                    raise
            except (StaleLog, Gap):
                pass
            await self._restore()
        return await self._store.append(session_id, fence, effect)

    @property
    def _may_be_forgotten(self) -> bool:
        """Whether others have had time, since the log was last ours, to claim, end and forget the session.

        The same holds for a deleted session: the log knows of it for as long as it keeps a running one.
        """
        return self._since(self._owned) >= min(self._lifetimes.ended, self._lifetimes.running)

    def _moment(self) -> tuple[float, float]:
        return self._now(), self._clock()

    def _since(self, moment: tuple[float, float]) -> float:
        now, wall = moment
        return max(self._now() - now, self._clock() - wall)

    async def _restore(self) -> None:
        """Write the lost log again, and bind its request id again."""
        record, lifetimes = self._record, self._lifetimes
        tell(logger, record.session_id, "the log has lost of it; it is written again")
        times = lifetimes.running, self._owner, lifetimes.ended
        await self._store.recreate(record, self._held, self._fence, *times, self._cancelled)
        if self._bound != math.inf:
            await self._bind()

    async def _bind(self) -> None:
        record, lifetimes = self._record, self._lifetimes
        if record.request_id:
            kept = lifetimes.running + lifetimes.ended
            name, digest = (record.tenant, record.request_id), record.request_digest
            await self._store.bind_request(*name, record.session_id, kept, digest)
        self._bound = self._now()


# ----------------------------------------------------------------------------------------------------------------------
# The log of one session that is driven here: takes its appends, and tells what others have asked for in the log.


class Tasks:
    """A session's tasks, which end with it. on_failure: is called with the error of a task that failed."""

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._on_failure(error)

    async def cancel_all(self) -> None:
        """Returns when they have ended."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SessionLog:
    """Owns the writes to the log that are under way, in `tasks`.

    `timings`: of the verdict that the latest append began with.

    Args:
        owner: the orchestrator's name in the log.
        driver: hears of acknowledgements, refusals, and ends that were asked for in the log.
    """

    def __init__(
        self,
        view: SessionView,
        store: SessionStore,
        options: OrchestratorOptions,
        owner: str,
        tally: OrchestratorTally,
        tasks: Tasks,
        driver: SessionListener,
    ) -> None:
        self.timings: OutputTimings | None = None
        self._view = view
        self._store = store
        self._options = options
        self._owner = owner
        self._tally = tally
        self._tasks = tasks
        self._driver = driver
        self._session: Session
        self._appender: Appender

    def drive(self, session: Session, retention: float) -> None:
        """Write what `session` decides from now on, under its fence. retention: the log's, in seconds."""
        self._session = session
        view, options = self._view, self._options
        lifetimes = Lifetimes(options.session_ttl, retention)
        self._appender = Appender(
            self._store, view.record, session.fence, view.output, self._owner, lifetimes, options.store_timeout
        )

    @property
    def is_kept(self) -> bool:
        """A reader that comes back with the session's request id finds it: leaving does not end it."""
        return bool(self._view.record.request_id) and self._store.durability != "memory"

    def write(self, effect: Append, timings: OutputTimings, repeatable: bool) -> None:
        """Start an append. timings: of the verdict that it begins with. repeatable: as of `Appender.write`."""
        self.timings = timings
        self._tasks.start(self._write(effect, timings, repeatable))

    async def _write(self, effect: Append, timings: OutputTimings, repeatable: bool) -> None:
        session, began = self._session, time.monotonic()
        try:
            cancelled = await self._appender.write(effect, repeatable)
        except StoreError as error:
            self._tally.append_failures += 1
            self._refuse(session, error)
            return
        self._tally.append_s.observe(time.monotonic() - began)
        if session is not self._session:
            return  # the session was lost and came back meanwhile, with all that the log holds
        timings.durable_ns = time.monotonic_ns()
        self._driver.apply(messages.Appended())
        self._heard(cancelled)

    async def renew(self) -> None:
        """Give the log a sign of life, and learn whether somebody asked there for the session's end."""
        session = self._session
        if not self._runs(session):
            return
        try:
            cancelled = await self._appender.renew()
        except StoreUnavailable:
            return  # the next append waits for it, and says so
        except StoreError as error:
            self._refuse(session, error)
            return
        if session is self._session:
            self._heard(cancelled)

    def _heard(self, cancelled: bool) -> None:
        """Readers elsewhere raise no credit here: what is durable counts as taken, or the text would stand still."""
        if self._appender.read_s < ELSEWHERE:
            self._driver.apply(messages.ClientTook(self._session.durable))
        if cancelled:
            self._driver.apply(messages.EndRequested(FinishReason.CANCELLED))

    def look_for_readers(self) -> None:
        """Nobody came back here. The log knows of readers elsewhere; if there are none, ask for the end."""
        self._tasks.start(self._look_for_readers())

    async def _look_for_readers(self) -> None:
        session = self._session
        if not self._runs(session):
            return
        try:
            await self._appender.look()
        except StoreUnavailable:
            pass  # what was known of them before counts
        except StoreError as error:
            self._refuse(session, error)
            return
        if self._runs(session) and not self._view.readers.elsewhere(self._appender.read_s):
            self._driver.apply(messages.EndRequested(FinishReason.CANCELLED))

    def _runs(self, session: Session) -> bool:
        """Whether this session is still driven here."""
        return session is self._session and session.state is not State.FENCED and self._view.output.end is None

    def _refuse(self, session: Session, error: StoreError) -> None:
        """An append and a sign of life may both be refused; the first one counts."""
        if self._runs(session):
            self._driver.on_log_refused(error)
