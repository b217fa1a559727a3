"""All sessions of one orchestrator."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace

import grpc

from orchestrator.cancelling import Cancellations
from orchestrator.driver import SessionDriver
from orchestrator.leases import keep_leases
from orchestrator.options import OrchestratorOptions
from orchestrator.ownership import Ownership
from orchestrator.pool import Pool
from orchestrator.statuses import status_of_store, store_statuses
from orchestrator.store import (
    DeletedSession,
    MissingSession,
    SessionExists,
    SessionRecord,
    SessionStore,
    StoredSession,
    StoreError,
)
from orchestrator.store.errors import deleted
from orchestrator.sweeping import Patience, Sweeper
from orchestrator.tally import Tally
from orchestrator.tenants import Allowances, no_session
from orchestrator.totals import Totals
from specwire.core.effects import End
from specwire.core.limits import FinishReason
from specwire.rpc.errors import StatusError
from specwire.telemetry.logs import SHOWN_CHARACTERS, of_session
from specwire.telemetry.metrics import Registry
from specwire.telemetry.tracing import NO_SPAN, Side, Span, begin
from specwire.text import OutputText

logger = logging.getLogger(__name__)

# What of ended sessions is remembered here, beside the log: how many, and for how many seconds.
FINISHED_KEPT = 256
REMEMBERED_S = 60.0
# Seconds for the last append of a session that is cancelled at shutdown.
LEAVE_LIMIT = 2.0
# Seconds that a session which is to be deleted, or that nobody drives, has for its end to reach the log.
END_LIMIT_S = 5.0
# Of an orchestrator's name in the log, drawn anew at each start: a successor at the same address is somebody else.
OWNER_BYTES = 8
# Whose figures they are.
ORCHESTRATOR = "orchestrator"


class Orchestrator:
    """Begins sessions, joins those of others, keeps them while they run, leaves them.

    `pool`: the peers they get. `registry`: where this process's figures are read (`orchestrator.metrics`).
    """

    def __init__(self, options: OrchestratorOptions, store: SessionStore) -> None:
        self.options = options
        self.store = store
        self.sessions: dict[str, SessionDriver] = {}
        self.pool = Pool(options, lambda: list(self.sessions.values()))
        self.owner = secrets.token_hex(OWNER_BYTES)
        self._ownership = Ownership(
            store, self.owner, options.store_timeout, self._scanner_of, self._take_up, self._forget, self._can_drive
        )
        self.totals = Totals()
        self.tally = Tally()
        self.registry = Registry()
        self._allowances = Allowances(options.access, asyncio.get_running_loop().time)
        self._opening: dict[str, asyncio.Task[SessionDriver]] = {}
        self._sweeper = Sweeper(
            store,
            self._driven,
            self.end_orphan,
            Patience(options.store_timeout, options.detach_grace),
            options.session_ttl,
        )
        self._cancellations = Cancellations(store)
        self._keeping: list[asyncio.Task[None]] = []
        self._draining = False

    async def start(self) -> None:
        """Raises StartError: see Pool.start."""
        self._keeping.append(asyncio.create_task(keep_leases(self.store, self._remembered)))
        await self.pool.start()
        self._keeping.append(asyncio.create_task(self._sweeper.run()))
        self._keeping.append(asyncio.create_task(self._cancellations.run()))

    async def find(self, session_id: str) -> SessionDriver | None:
        """The session's driver, also where another call is just opening it. Raises as `open`."""
        opening = self._opening.get(session_id)
        if opening is not None:
            return await self._opened(opening)
        driver = self.sessions.get(session_id)
        return None if driver is None or driver.abandoned else driver

    def knows(self, session_id: str) -> bool:
        """It is driven or shown here, or is just being opened."""
        driver = self.sessions.get(session_id)
        return session_id in self._opening or (driver is not None and not driver.abandoned)

    async def join(self, session_id: str, take_over: bool = False, traceparent: str = "") -> SessionDriver:
        """The session, whoever began it: driven here, or shown as another orchestrator drives it.

        take_over: the caller has lost its connection to the orchestrator that drove it; see `orchestrator.ownership`.
        traceparent: of the caller's span, below which the session has one here if it was not here before.

        Raises:
            StatusError: NOT_FOUND; or the log does not answer, or the session is pinned to another model.
        """
        driver = await self.find(session_id)
        if driver is None:
            self._check_welcome()
            return await self._begin(session_id, self._join(session_id, take_over, traceparent))
        if driver.output.end is not None:
            await self._check_kept(driver)
        elif take_over:
            self._ownership.take_over(driver)
        return driver

    async def _check_kept(self, driver: SessionDriver) -> None:
        """What is remembered here of an ended session counts, unless somebody had it deleted elsewhere."""
        try:
            await self.store.read(driver.record.session_id)
        except DeletedSession as error:
            self._forget(driver)
            raise StatusError(status_of_store(error), str(error)) from error
        except StoreError:
            return

    def _driven(self) -> dict[str, set[str]]:
        """The running sessions that are driven here, by model; the models that are served are named in any case."""
        rolls: dict[str, set[str]] = {target.info.weights_fingerprint: set() for target in self.pool.models.all()}
        for session_id, driver in self.sessions.items():
            if driver.output.end is None and not driver.following:
                rolls.setdefault(driver.record.weights_fingerprint, set()).add(session_id)
        return rolls

    def _remembered(self) -> list[SessionDriver]:
        """All sessions, without those that ended a while ago: they can be read in the log as long as it keeps them."""
        now, kept = asyncio.get_running_loop().time(), min(REMEMBERED_S, self.options.retention)
        for driver in list(self.sessions.values()):
            if driver.output.end is not None and driver.stats.ended is not None and now - driver.stats.ended > kept:
                self._forget(driver)
        return list(self.sessions.values())

    async def open(self, record: SessionRecord, deadline: float | None, span: Span = NO_SPAN) -> SessionDriver:
        """Create the session in the log and set it going; a call for one that has begun joins it.

        span: the session's, if it begins here.

        Its caller's leaving does not interrupt this: the log would hold a session that nobody drives.

        Raises:
            StatusError: the log does not answer.
        """
        known = await self.find(record.session_id)
        if known is not None:
            return known
        self.admit(record)
        return await self.begin(record, deadline, span)

    def admit(self, record: SessionRecord) -> None:
        """Let a new session in, and charge its tenant: it is to `begin`, or to be dismissed.

        Raises:
            StatusError: UNAVAILABLE, none is welcome; RESOURCE_EXHAUSTED, the tenant has no room.
            InvalidParameter: the tenant can never have room for it.
        """
        try:
            self._check_welcome()
            self._allowances.admit(record)
        except StatusError as error:
            self.tally.refused[error.code.name.lower()] += 1
            raise

    def dismiss(self, record: SessionRecord) -> None:
        """A session that was admitted does not begin."""
        self._allowances.settle(record, 0)

    async def begin(self, record: SessionRecord, deadline: float | None, span: Span = NO_SPAN) -> SessionDriver:
        """`open` what was admitted."""
        try:
            return await self._begin(record.session_id, self._create_or_dismiss(record, deadline, span))
        except StatusError as error:
            self.tally.refused[error.code.name.lower()] += 1
            raise

    async def _create_or_dismiss(self, record: SessionRecord, deadline: float | None, span: Span) -> SessionDriver:
        try:
            return await self._create(record, deadline, span)
        except BaseException:
            self.dismiss(record)
            raise

    def _check_welcome(self) -> None:
        if self._draining:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping")

    async def _begin(self, session_id: str, coroutine: Coroutine[None, None, SessionDriver]) -> SessionDriver:
        task = asyncio.create_task(coroutine)
        self._opening[session_id] = task
        task.add_done_callback(lambda done: self._begun(session_id, done))
        return await self._opened(task)

    def _begun(self, session_id: str, done: asyncio.Task[SessionDriver]) -> None:
        """Whoever waits for it is told how it went; where nobody does any more, a failure is nobody's."""
        del self._opening[session_id]
        if not done.cancelled():
            done.exception()

    async def _opened(self, opening: asyncio.Task[SessionDriver]) -> SessionDriver:
        timeout = self.options.store_timeout
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(opening)
        except TimeoutError:
            message = f"the session log did not take the session within {timeout:g} s"
            raise StatusError(grpc.StatusCode.UNAVAILABLE, message) from None

    async def _create(self, record: SessionRecord, deadline: float | None, span: Span) -> SessionDriver:
        if deadline is not None:
            record = replace(record, deadline=record.created + deadline)
        await self.pool.learn_home(record.parent)
        try:
            with store_statuses():
                ttl, retention = self.options.session_ttl, self.options.retention
                fence = await self.store.create(record, ttl, self.owner, retention)
        except StatusError as error:
            if not isinstance(error.__cause__, SessionExists):
                raise
            return await self._join(record.session_id)  # the same request id was used elsewhere at the same moment
        driver = self._driver(record, fence, span)
        self.tally.begun += 1
        self.tally.prompt_tokens += len(record.prompt)
        self._log_begun(record)
        if deadline is not None:
            driver.set_deadline(deadline)
        driver.readers.expect()
        driver.verifying.wait()
        self.pool.place(driver)
        return driver

    async def cancel(self, session_id: str) -> None:
        """Ask whoever drives the session for its end; a session that nobody drives is ended here.

        Raises:
            StatusError: NOT_FOUND, or the log does not answer.
        """
        driver = await self.find(session_id)
        if driver is not None and not driver.following:
            driver.cancel()
            with suppress(StoreError):  # what is promised now holds also where this process ends before the session
                await self.store.cancel(session_id)
            return
        with store_statuses():
            try:
                await self._cancellations.ask(session_id)
            except MissingSession:
                raise no_session(session_id) from None
            log = await self.store.read(session_id)
        if log is not None and log.reason is None and (log.abandoned or log.owner == self.owner):
            await self.join(session_id)

    async def delete(self, session_id: str) -> None:
        """Remove the session from the log; where it runs, its readers learn that it has ended.

        Raises:
            StatusError: NOT_FOUND, or the log does not answer.
        """
        driver = await self.find(session_id)
        if driver is not None and not driver.following:
            driver.cancel()
            await driver.ended(END_LIMIT_S)
        with store_statuses():
            await self.store.delete(session_id)
        self.pool.forget(session_id)
        left = self.sessions.pop(session_id, None)
        if left is not None:
            gone = deleted(session_id)
            left.abandon(status_of_store(gone), str(gone))  # its readers, if another one has driven it until now
            await left.close()

    async def _join(self, session_id: str, take_over: bool = False, traceparent: str = "") -> SessionDriver:
        """Show a session that was begun elsewhere, or was left here."""
        with store_statuses():
            log = await self.store.read(session_id)
        if log is None:
            raise no_session(session_id)
        return await self._show(log, take_over, traceparent=traceparent)

    async def end_orphan(self, log: StoredSession, reason: FinishReason) -> bool:
        """Have a session that nobody drives end in the log, which is as given; whether it has.

        Not if it is known here: it is asked for just now, or ended a moment ago, and the log was put back since.

        Raises:
            StatusError: the log does not answer, or the session is pinned to another model.
        """
        session_id = log.record.session_id
        if await self.find(session_id) is not None:
            return False
        self._check_welcome()
        driver = await self._begin(session_id, self._show(log, True, reason))
        await driver.ended(END_LIMIT_S)
        return driver.output.end is not None and not driver.abandoned

    async def _show(
        self, log: StoredSession, take_over: bool, end: FinishReason | None = None, traceparent: str = ""
    ) -> SessionDriver:
        """See Ownership.join."""
        self.pool.target_of(log.record)  # it goes on with the model that it was begun with, or not at all
        await self.pool.learn_home(log.record.session_id)
        left = self.sessions.pop(log.record.session_id, None)
        if left is not None:
            await left.close()
        shown = log.record.session_id[:SHOWN_CHARACTERS]
        span = begin("specwire.session", Side.SERVER, traceparent, session=shown, position=log.length)
        driver = self._driver(log.record, log.fence, span)
        try:
            await self._ownership.join(driver, log, take_over, end)
        except BaseException:
            self._forget(driver)
            await driver.close()
            raise
        return driver

    def _driver(self, record: SessionRecord, fence: int, span: Span = NO_SPAN) -> SessionDriver:
        scanner = self._scanner_of(record)
        calls = (self.pool.place, self._ended, self._fenced)
        of_all = (self.owner, self.tally, span)
        driver = SessionDriver(record, fence, scanner, self.store, self.options, *calls, *of_all)
        self.sessions[record.session_id] = driver
        return driver

    def _scanner_of(self, record: SessionRecord) -> OutputText:
        return OutputText(self.pool.target_of(record).tokenizer, record.stop)

    def _fenced(self, driver: SessionDriver) -> None:
        """Another orchestrator has claimed the session, or the log has gone another way."""
        self.tally.fenced += 1
        self._allowances.leave(driver.record)
        if driver.readers.count:
            self._ownership.follow(driver)
        else:
            driver.abandon(grpc.StatusCode.UNAVAILABLE, "another orchestrator has the session")

    def _can_drive(self, record: SessionRecord) -> bool:
        return not self._draining and self.pool.decides_for(record) and self._allowances.may_adopt(record)

    def _take_up(self, driver: SessionDriver) -> None:
        """A session that another orchestrator drove is driven here from now on."""
        self.tally.claims += 1
        self._allowances.adopt(driver.record)
        self.pool.place(driver)

    def _forget(self, driver: SessionDriver) -> None:
        """Nobody reads the session here, and it is driven elsewhere."""
        self._settle(driver)
        self.totals.keep(driver.stats)
        driver.span.end()
        if self.sessions.get(driver.record.session_id) is driver:
            del self.sessions[driver.record.session_id]

    def _settle(self, driver: SessionDriver) -> None:
        self._allowances.settle(driver.record, len(driver.record.prompt) + len(driver.output.tokens))

    def _ended(self, driver: SessionDriver) -> None:
        """Keep an ended session a little for readers that come back; the log keeps it for longer."""
        self._settle(driver)
        if not driver.abandoned:
            self._sweeper.note_end(driver.record.weights_fingerprint, driver.record.session_id)
        if driver.output.end is not None:
            self.totals.count(driver.stats, driver.output.end.reason)
            self.tally.ended(driver.stats)
            self._log_ended(driver, driver.output.end)
        ended = [s for s, d in self.sessions.items() if d.output.end is not None]
        for session_id in ended[: max(0, len(ended) - FINISHED_KEPT)]:
            del self.sessions[session_id]

    def _log_begun(self, record: SessionRecord) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        texts, shown = {}, record.session_id[:8]
        if self.options.log_prompts:
            texts["prompt"] = self.pool.target_of(record).tokenizer.decode(list(record.prompt))
        logger.info("session %s: begun with %d tokens", shown, len(record.prompt), extra=of_session(shown, **texts))

    def _log_ended(self, driver: SessionDriver, end: End) -> None:
        stats, shown = driver.stats, driver.record.session_id[:8]
        texts = {"output": driver.output.text} if self.options.log_prompts else {}
        message = "session %s: ended (%s) with %d tokens, %d of %d draft tokens accepted, after %.3f s"
        took = (stats.ended or stats.started) - stats.started
        figures = (len(driver.output.tokens), stats.accepted, stats.proposed, took)
        logger.info(message, shown, end.reason.name.lower(), *figures, extra=of_session(shown, **texts))

    @property
    def unready(self) -> str | None:
        """Why new sessions are not wanted here now, or None."""
        if self._draining:
            return "the orchestrator is stopping"
        return None if self.pool.decides else "no verifier is there"

    async def drain(self, grace: float) -> None:
        """Take no new sessions; give those that are driven here `grace` seconds to end, then leave the rest to others.

        Whoever reads one that is left is told so.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._all_ended()
        await self._leave()

    async def _all_ended(self) -> None:
        """Until what is driven here, or is just about to be, has ended."""
        opening = list(self._opening.values())
        if opening:
            await asyncio.wait(opening)
        for driver in list(self.sessions.values()):
            if not driver.following:
                await driver.output.ended()

    async def _leave(self) -> None:
        drivers = list(self.sessions.values())
        for driver in drivers:
            driver.leave()
        await asyncio.gather(*(driver.ended(timeout=LEAVE_LIMIT) for driver in drivers))

    async def stop(self) -> None:
        """Leave what still runs, then close links and log; every task has ended when this returns."""
        self._draining = True
        opening = list(self._opening.values())
        for each in opening:
            each.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await self._leave()
        drivers = list(self.sessions.values())
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self.pool.stop()
        await asyncio.gather(*(driver.close() for driver in drivers))
        await self.store.close()
