"""All sessions of one orchestrator: the known ones, their records, their beginning and end."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import grpc

from orchestrator.admission import Admission
from orchestrator.options import OrchestratorOptions
from orchestrator.ownership import Cancellations, Ownership
from orchestrator.pool import Pool
from orchestrator.session.appender import SessionLog, keep_leases, status_of_store, store_statuses
from orchestrator.session.driver import SessionDriver, SessionHost, SessionNotice, hash_beside
from orchestrator.session.output import SessionView
from orchestrator.session.stats import Totals
from orchestrator.store import DeletedSession, SessionExists, SessionRecord, SessionStore, StoredSession, StoreError
from orchestrator.store.base import NONE_OF_IT
from orchestrator.store.health import LogHealth
from orchestrator.sweeper import Rolls, Sweeper
from orchestrator.tenants import Allowances, check_rule, no_session
from specwire.core.messages import End, FinishReason
from specwire.rpc.errors import StatusError
from specwire.rpc.link import ALL_ELSEWHERE, LocalPeer
from specwire.telemetry.logs import SHOWN_CHARACTERS, tell
from specwire.telemetry.metrics import Registry
from specwire.telemetry.tally import OrchestratorTally
from specwire.telemetry.tracing import NO_SPAN, Side, Span, begin
from specwire.text.output import OutputText

# ----------------------------------------------------------------------------------------------------------------------
# The sessions that are known here: being opened, driven, followed, or ended recently.

# How many ended sessions are remembered here, beside the log, and for how many seconds.
FINISHED_KEPT = 256
REMEMBERED_S = 60.0
# Seconds for the last append of a session that is cancelled at shutdown.
LEAVE_LIMIT = 2.0


class KnownSessions:
    """`sessions`: those whose opening is done, by id.

    Args:
        patience: seconds that a caller waits for a session to be opened.
    """

    def __init__(self, patience: float) -> None:
        self.sessions: dict[str, SessionDriver] = {}
        self._patience = patience
        self._opening: dict[str, asyncio.Task[SessionDriver]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def find(self, session_id: str) -> SessionDriver | None:
        """The session's driver, also where another call is just opening it. Raises as `open`."""
        opening = self._opening.get(session_id)
        if opening is not None:
            return await self._opened(opening)
        driver = self.sessions.get(session_id)
        return None if driver is None or driver.view.abandoned else driver

    def knows(self, session_id: str) -> bool:
        """It is driven or shown here, or is just being opened."""
        driver = self.sessions.get(session_id)
        return session_id in self._opening or (driver is not None and not driver.view.abandoned)

    # Opening

    async def open(self, session_id: str, coroutine: Coroutine[None, None, SessionDriver]) -> SessionDriver:
        """Let `coroutine` open the session; other callers that look for it wait for the same.

        It goes on if its caller leaves, because the log would hold a session that nobody drives.

        Raises:
            StatusError: `coroutine`'s; UNAVAILABLE, the log does not answer in time.
        """
        task = asyncio.create_task(coroutine)
        self._opening[session_id] = task
        task.add_done_callback(lambda done: self._begun(session_id, done))
        return await self._opened(task)

    def _begun(self, session_id: str, done: asyncio.Task[SessionDriver]) -> None:
        """Waiting callers are told how it went; without any, a failure is dropped."""
        del self._opening[session_id]
        if not done.cancelled():
            done.exception()

    async def _opened(self, opening: asyncio.Task[SessionDriver]) -> SessionDriver:
        try:
            async with asyncio.timeout(self._patience):
                return await asyncio.shield(opening)
        except TimeoutError:
            message = f"the session log did not take the session within {self._patience:g} s"
            raise StatusError(grpc.StatusCode.UNAVAILABLE, message) from None

    # Which there are

    def driven(self, models: Iterable[str]) -> Rolls:
        """The running sessions that are driven here, by model; `models`, those served, are named in any case."""
        rolls: Rolls = {model: set() for model in models}
        for session_id, driver in self.sessions.items():
            if driver.view.output.end is None and not driver.following:
                rolls.setdefault(driver.view.record.weights_fingerprint, set()).add(session_id)
        return rolls

    def over_for(self, seconds: float) -> list[SessionDriver]:
        """Sessions that ended more than `seconds` ago, or longer than ended ones are remembered."""
        now, kept = asyncio.get_running_loop().time(), min(REMEMBERED_S, seconds)
        instants = [(driver, driver.view.stats.ended) for driver in self.sessions.values()]
        return [driver for driver, ended in instants if ended is not None and now - ended > kept]

    def forget(self, driver: SessionDriver) -> None:
        """Unless the session has another driver by now. What it still waits for, such as the log, is given up."""
        if self.sessions.get(driver.view.record.session_id) is driver:
            del self.sessions[driver.view.record.session_id]
            self._close(driver)

    def _close(self, driver: SessionDriver) -> None:
        task = asyncio.create_task(driver.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def forget_oldest(self) -> None:
        """Forget the sessions that ended first, beyond FINISHED_KEPT."""
        ended = [session_id for session_id, driver in self.sessions.items() if driver.view.output.end is not None]
        for session_id in ended[: max(0, len(ended) - FINISHED_KEPT)]:
            self.forget(self.sessions[session_id])

    # Leaving them

    async def drain(self, grace: float) -> None:
        """Give sessions that are driven or opened here `grace` seconds to end; then leave the rest to others."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._all_ended()
        await self._leave()

    async def _all_ended(self) -> None:
        opening = list(self._opening.values())
        if opening:
            await asyncio.wait(opening)
        for driver in list(self.sessions.values()):
            if not driver.following:
                await driver.view.output.ended()

    async def leave(self) -> list[SessionDriver]:
        """Open nothing more, and leave what runs to others; all that were known, to be closed."""
        opening = list(self._opening.values())
        for each in opening:
            each.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await self._leave()
        return list(self.sessions.values())

    async def close(self, drivers: Iterable[SessionDriver]) -> None:
        """Returns when no task of theirs, or of those that were forgotten, is left."""
        for driver in drivers:
            self._close(driver)
        await asyncio.gather(*self._closing)

    async def _leave(self) -> None:
        drivers = list(self.sessions.values())
        for driver in drivers:
            driver.leave()
        await asyncio.gather(*(driver.view.ended(timeout=LEAVE_LIMIT) for driver in drivers))


# ----------------------------------------------------------------------------------------------------------------------
# All sessions of one orchestrator.

logger = logging.getLogger(__name__)

# Seconds that a session which is to be deleted, or that nobody drives, has for its end to reach the log.
END_LIMIT_S = 5.0
# Random bytes of an orchestrator's name in the log. The name is new at each start: a successor is another owner.
OWNER_BYTES = 8
# Whose figures they are.
ORCHESTRATOR = "orchestrator"


class Orchestrator:
    """Begins sessions, joins those of others, keeps them while they run, leaves them.

    `admission`: what callers may have done. `pool`: the peers they get. `roster`: those that are known here. `tally`,
    `totals`: for metrics. `registry`: where this process's figures are read (`orchestrator.metrics`). `log`: whether
    the log takes writes. `on_readiness`: is awaited when that has changed.

    Args:
        local: see Pool.
    """

    def __init__(
        self, options: OrchestratorOptions, store: SessionStore, local: Mapping[str, LocalPeer] = ALL_ELSEWHERE
    ) -> None:
        self.options = options
        self.store = store
        self.roster = KnownSessions(options.store_timeout)
        self.sessions = self.roster.sessions
        self.pool = Pool(options, lambda: list(self.sessions.values()), local)
        self.owner = secrets.token_hex(OWNER_BYTES)
        self._allowances = Allowances(options.access, asyncio.get_running_loop().time, options.retention)
        self.admission = Admission(self._allowances.charge)
        self.totals, self.tally = Totals(), OrchestratorTally()
        self._host = SessionHost(store, options, self._notice, self.owner, self.tally, self.pool.missing_for)
        self._ownership = Ownership(self._host, self._scanner_of, self._unfit)
        self.registry = Registry()
        waits = options.store_timeout, options.detach_grace
        self._sweeper = Sweeper(store, self._driven, self.end_orphan, *waits, options.session_ttl)
        self.cancellations = Cancellations(store, options.store_timeout)
        self.log = LogHealth(store, self._readiness_changed)
        self.on_readiness: Callable[[], Awaitable[None]] | None = None
        self._keeping: list[asyncio.Task[None]] = []
        self._draining = False

    async def start(self) -> None:
        """Raises StartError: see Pool.start."""
        self._keeping.append(asyncio.create_task(keep_leases(self._logs)))
        self._keeping.append(asyncio.create_task(self.log.run()))
        await self.pool.start()
        self._keeping.append(asyncio.create_task(self._sweeper.run()))
        self._keeping.append(asyncio.create_task(self.cancellations.run()))

    @property
    def unready(self) -> str | None:
        """Why new sessions are not wanted here now, or None."""
        if self._draining:
            return "the orchestrator is stopping"
        return self.log.trouble or (None if self.pool.decides else "no verifier is there")

    async def _readiness_changed(self) -> None:
        if self.on_readiness is not None:
            await self.on_readiness()

    def _check_welcome(self) -> None:
        if self._draining:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping")

    async def drain(self, grace: float) -> None:
        """Take no new sessions; give those that are driven here `grace` seconds to end, then leave the rest to others.

        Readers of the others are told.
        """
        self._draining = True
        await self.roster.drain(grace)

    async def stop(self) -> None:
        """Leave what still runs, then close links and log; every task has ended when this returns."""
        self._draining = True
        drivers = await self.roster.leave()
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self.pool.stop()
        await self.roster.close(drivers)
        self.admission.stop()
        await self.store.close()

    async def open(self, record: SessionRecord, deadline: float | None, span: Span = NO_SPAN) -> SessionDriver:
        """Create the session in the log and start it; a call for one that has begun joins it.

        deadline: seconds from now. span: the session's, if it begins here.

        Its caller's leaving does not interrupt this: the log would hold a session that nobody drives.

        Raises:
            StatusError: the log does not answer; or as `admit`.
            InvalidParameter: as `admit`.
        """
        known = await self.roster.find(record.session_id)
        if known is not None:
            return known
        await self.admit(record)
        known = await self.roster.find(record.session_id)  # another call for it may have been admitted meanwhile
        if known is not None:
            self.dismiss(record)
            return known
        return await self.begin(record, deadline, span)

    async def admit(self, record: SessionRecord) -> None:
        """Admit a new session, and charge its tenant: the caller must then `begin` or dismiss it.

        Raises:
            StatusError: UNAVAILABLE, none is welcome, or the log takes no writes; RESOURCE_EXHAUSTED, the tenant has
                no room.
            InvalidParameter: the tenant can never have room for it, or its rule is not allowed here.
        """
        check_rule(record.sampling, self.options.rules)
        try:
            self._check_welcome()
            await self.log.require()
            self._allowances.admit(record)
        except StatusError as error:
            self.tally.refused[error.code.name.lower()] += 1
            raise

    def dismiss(self, record: SessionRecord, used: int = 0) -> None:
        """A session that was admitted does not begin. used: tokens that its tenant is charged for all the same."""
        self._allowances.settle(record, used, logged=False)

    def deleted(self, session_id: str) -> None:
        """The log has nothing of the session any more, nor may a verifier, nor does it count."""
        self.pool.forget(session_id)
        self._allowances.deleted(session_id)

    async def begin(self, record: SessionRecord, deadline: float | None, span: Span = NO_SPAN) -> SessionDriver:
        """`open` what was admitted."""
        try:
            return await self.roster.open(record.session_id, self._create_or_dismiss(record, deadline, span))
        except StatusError as error:
            self.tally.refused[error.code.name.lower()] += 1
            raise

    async def _create_or_dismiss(self, record: SessionRecord, deadline: float | None, span: Span) -> SessionDriver:
        try:
            return await self._create(record, deadline, span)
        except BaseException:
            self.dismiss(record)
            raise

    async def _create(self, record: SessionRecord, deadline: float | None, span: Span) -> SessionDriver:
        if deadline is not None:
            record = replace(record, deadline=record.created + deadline)
        await self.pool.learn_home(record.parent)
        await hash_beside(record.prompt)
        try:
            with store_statuses():
                fence = await self.store.create(record, self.options.session_ttl, self.owner, self.options.retention)
        except StatusError as error:
            if not isinstance(error.__cause__, SessionExists):
                raise
            return await self._join(record.session_id)  # the same request id was used elsewhere at the same moment
        driver = self._driver(record, fence, span)
        self._note_begun(record)
        if deadline is not None:
            driver.set_deadline(deadline)
        driver.view.readers.expect()
        driver.verifying.wait()
        self.pool.place(driver)
        return driver

    async def join(self, session_id: str, take_over: bool = False, traceparent: str = "") -> SessionDriver:
        """The session, whoever began it: driven here, or shown as another orchestrator drives it.

        take_over: the caller has lost its connection to the orchestrator that drove it; see
        `orchestrator.ownership`.
        traceparent: of the caller's span, below which the session has one here if it was not here before.

        Raises:
            StatusError: NOT_FOUND; or the log does not answer, or the session is pinned to another model.
        """
        driver = await self.roster.find(session_id)
        if driver is None:
            self._check_welcome()
            return await self.roster.open(session_id, self._join(session_id, take_over, traceparent))
        if driver.view.output.end is not None:
            await self._check_kept(driver)
        elif take_over:
            self._ownership.take_over(driver)
        return driver

    async def _check_kept(self, driver: SessionDriver) -> None:
        """An ended session that is remembered here counts, unless it was deleted elsewhere."""
        try:
            await self.store.tail(driver.view.record.session_id, NONE_OF_IT)
        except DeletedSession as error:
            self._forget(driver)
            raise StatusError(status_of_store(error), str(error)) from error
        except StoreError:
            return

    async def _join(self, session_id: str, take_over: bool = False, traceparent: str = "") -> SessionDriver:
        """Show a session that was begun elsewhere, or was left here."""
        with store_statuses():
            log = await self.store.read(session_id)
        if log is None:
            raise no_session(session_id)
        return await self._show(log, take_over, traceparent=traceparent)

    async def _show(
        self, log: StoredSession, take_over: bool, end: FinishReason | None = None, traceparent: str = ""
    ) -> SessionDriver:
        """See Ownership.join."""
        self.pool.models.tokenizer_of(log.record)  # else it cannot even be shown
        await self.pool.learn_home(log.record.session_id)
        await hash_beside(log.record.prompt)
        left = self.sessions.pop(log.record.session_id, None)
        if left is not None:
            await left.close()
        shown = log.record.session_id[:SHOWN_CHARACTERS]
        span = begin("specwire.session", Side.SERVER, traceparent, session=shown, position=log.length)
        driver = self._driver(log.record, log.fence, span)
        if left is not None:
            driver.view.newest_fence = max(driver.view.newest_fence, left.view.newest_fence)
        try:
            await self._ownership.join(driver, log, take_over, end)
        except BaseException:
            self._forget(driver)
            await driver.close()
            raise
        return driver

    async def end_orphan(self, log: StoredSession, reason: FinishReason) -> bool:
        """End a session that nobody drives in the log, which is as given; returns whether it did.

        A session that is known here is left alone: it is being asked for, or it ended a moment ago and the log was put
        back.

        Raises:
            StatusError: the log does not answer, or the session is pinned to another model.
        """
        session_id = log.record.session_id
        if await self.roster.find(session_id) is not None:
            return False
        self._check_welcome()
        driver = await self.roster.open(session_id, self._show(log, True, reason))
        await driver.view.ended(END_LIMIT_S)
        return driver.view.output.end is not None and not driver.view.abandoned

    def _driver(self, record: SessionRecord, fence: int, span: Span = NO_SPAN) -> SessionDriver:
        scanner = self._scanner_of(record)
        driver = SessionDriver(replace(record, references=()), fence, scanner, self._host, span)
        driver.verifying.references = record.references
        self.sessions[record.session_id] = driver
        return driver

    def _notice(self, driver: SessionDriver, notice: SessionNotice) -> None:
        match notice:
            case SessionNotice.UNPLACED:
                self.pool.place(driver)
            case SessionNotice.CLAIMED:
                self.tally.claims += 1
                self._allowances.adopt(driver.view.record)
                self.pool.place(driver)
            case SessionNotice.FENCED:
                self._fenced(driver)
            case SessionNotice.ENDED:
                self._ended(driver)
            case SessionNotice.UNREAD:
                self._forget(driver)

    def _scanner_of(self, record: SessionRecord) -> OutputText:
        return OutputText(self.pool.models.tokenizer_of(record), record.stop, record.stopping.min_tokens)

    def _prompt_of(self, record: SessionRecord) -> str:
        return self.pool.models.tokenizer_of(record).decode(list(record.prompt))

    def _driven(self) -> Rolls:
        return self.roster.driven(target.info.weights_fingerprint for target in self.pool.models.all())

    def _logs(self) -> list[SessionLog]:
        """States of all sessions, without those that ended a while ago: the log has those."""
        for driver in self.roster.over_for(self.options.retention):
            self._forget(driver)
        return [driver.log for driver in self.sessions.values()]

    def _unfit(self, record: SessionRecord) -> str | None:
        """See `Ownership`."""
        if not self._draining and self.pool.decides_for(record) and self._allowances.may_adopt(record):
            return None
        return self.pool.missing_for(record) or "there is no room to go on with it"

    def _fenced(self, driver: SessionDriver) -> None:
        self.tally.fenced += 1
        self._allowances.leave(driver.view.record)
        if driver.view.readers.count:
            self._ownership.follow(driver)
        else:
            driver.abandon(grpc.StatusCode.UNAVAILABLE, "another orchestrator has the session")

    def _forget(self, driver: SessionDriver) -> None:
        """Nobody reads the session here, and it is driven elsewhere."""
        self._settle(driver.view)
        self.totals.keep(driver.view.stats)
        driver.view.span.end()
        self.roster.forget(driver)

    def _ended(self, driver: SessionDriver) -> None:
        """Keep an ended session for a while for readers that come back; the log keeps it for longer."""
        view = driver.view
        self._settle(view)
        if view.output.end is not None:
            self.totals.count(view.stats, view.output.end.reason)
            self.tally.ended(view.stats)
            self._log_ended(view, view.output.end)
        driver.verifying.references = ()
        if not driver.view.abandoned:
            self._sweeper.note_end(driver.view.record.weights_fingerprint, driver.view.record.session_id)
        self.roster.forget_oldest()

    # What is recorded of them

    def _settle(self, view: SessionView) -> None:
        self._allowances.settle(view.record, len(view.record.prompt) + len(view.output.tokens))

    def _note_begun(self, record: SessionRecord) -> None:
        """A session began here; its tenant was charged when it was admitted."""
        self.tally.begun += 1
        self.tally.prompt_tokens += len(record.prompt)
        if not logger.isEnabledFor(logging.INFO):
            return
        texts = {"prompt": self._prompt_of(record)} if self.options.log_prompts else {}
        tell(logger, record.session_id, "begun with %d tokens", len(record.prompt), texts=texts)

    def _log_ended(self, view: SessionView, end: End) -> None:
        stats = view.stats
        texts = {"output": view.output.text} if self.options.log_prompts else {}
        message = "ended (%s) with %d tokens in %d forwards, %d of %d draft tokens accepted, after %.3f s"
        took = (stats.ended or stats.started) - stats.started
        drafted = stats.shown.accepted, stats.shown.tested
        figures = len(view.output.tokens), stats.target_forwards, *drafted, took
        tell(logger, view.record.session_id, message, end.reason.name.lower(), *figures, texts=texts)
