"""All sessions of one orchestrator, and the peers that serve them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc
from tokenizers import Tokenizer

from orchestrator.driver import SessionDriver
from orchestrator.link import Info
from orchestrator.options import OrchestratorOptions
from orchestrator.peers import (
    DrafterLine,
    DrafterLink,
    DrafterPeer,
    VerifierLink,
    VerifierPeer,
    drafter_link,
    guarded,
    least_loaded,
    least_refusing,
    verifier_link,
)
from orchestrator.statuses import store_statuses
from orchestrator.store import SessionRecord, SessionStore
from specwire.core.states import State
from specwire.rpc.errors import StatusError
from specwire.text import OutputText, TokenizerError, load_tokenizer

logger = logging.getLogger(__name__)

FINISHED_KEPT = 256


class StartError(RuntimeError):
    """The orchestrator cannot start: a peer does not answer, or does not fit."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that this orchestrator serves: of the first verifier that answered; others must equal it."""

    info: Info
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    most_prompt_bytes: int

    @classmethod
    def of(cls, info: Info) -> Target:
        """Raises TokenizerError."""
        tokenizer = load_tokenizer(info.tokenizer_json)
        # One byte more a token: for the separator that tokenizers of words drop.
        longest = 1 + max((len(token.encode()) for token in tokenizer.get_vocab()), default=0)
        return cls(info, tokenizer, frozenset(info.eos_ids), info.context * longest)


class Orchestrator:
    """Assigns sessions to peers and keeps them while they run.

    Invariant: a running session without a verifier is in state WAITING and has a timer that ends it.
    """

    def __init__(self, options: OrchestratorOptions, store: SessionStore) -> None:
        self.options = options
        self.store = store
        self.target: Target | None = None
        self.sessions: dict[str, SessionDriver] = {}
        tls = options.peer_tls
        self.verifiers = [
            VerifierPeer(verifier_link(a, tls), self._rebalance, self._accept_target) for a in options.verifiers
        ]
        self._drafter_links = [drafter_link(a, tls) for a in options.drafters]
        self.drafters = [self._drafter(link) for link in self._drafter_links]
        self._opening: dict[str, asyncio.Task[SessionDriver]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    # Peers

    async def start(self) -> None:
        """Connect to all peers; waits for one verifier and for every drafter.

        Raises:
            StartError: a needed peer did not answer in time, or was refused.
        """
        for verifier in self.verifiers:
            self._tasks.append(asyncio.create_task(verifier.link.run(verifier)))
        for drafter, link in zip(self.drafters, self._drafter_links, strict=True):
            self._tasks.append(asyncio.create_task(link.run(drafter)))
        try:
            async with asyncio.timeout(self.options.start_timeout):
                await self._until_ready()
        except TimeoutError:
            reasons = [link.trouble for link in self._links() if not link.up]
            raise StartError(f"not ready within {self.options.start_timeout:g} s: {'; '.join(reasons)}") from None

    def _links(self) -> list[VerifierLink | DrafterLink]:
        return [*(verifier.link for verifier in self.verifiers), *self._drafter_links]

    async def _until_ready(self) -> None:
        while not (any(v.up for v in self.verifiers) and all(d.up for d in self.drafters)):
            hopeless = [_hopeless(v, v.link) for v in self.verifiers]
            reasons = [_hopeless(d, link) for d, link in zip(self.drafters, self._drafter_links, strict=True)]
            if all(hopeless):
                reasons += hopeless
            reason = next(filter(None, reasons), None)
            if reason is not None:
                raise StartError(reason)
            self._changed.clear()
            await self._changed.wait()

    def _accept_target(self, info: Info) -> str | None:
        """Why a verifier must not be used here, or None; the first one defines what is served."""
        if self.target is None:
            try:
                self.target = Target.of(info)
            except TokenizerError as error:
                return str(error)
            for drafter in self.drafters:
                drafter.refusal = None if drafter.info is None else vocabulary_mismatch(info, drafter.info)
        served, offered = self.target.info.weights_fingerprint, info.weights_fingerprint
        if served != offered:
            return f"serves weights {offered[:12]}, but sessions here are pinned to {served[:12]}"
        return None

    def _accept_drafter(self, info: Info) -> str | None:
        """Why a drafter must not be used here, or None; before the target is known every drafter may wait."""
        return None if self.target is None else vocabulary_mismatch(self.target.info, info)

    def admit(self, line: DrafterLine, info: Info) -> DrafterPeer:
        """Use a drafter that did not have to be dialled, for as long as it stays; its `refusal` says if it is not."""
        drafter = self._drafter(line)
        self.drafters.append(drafter)
        drafter.on_up(info)
        return drafter

    def dismiss(self, drafter: DrafterPeer) -> None:
        """Its line, which must not be up any more, has ended."""
        self.drafters.remove(drafter)
        drafter.on_down()

    def _drafter(self, line: DrafterLine) -> DrafterPeer:
        return DrafterPeer(line, self._rebalance, self._accept_drafter)

    def _rebalance(self) -> None:
        """Give waiting sessions a verifier, and sessions without one a drafter, if there are any."""
        self._changed.set()
        for driver in list(self.sessions.values()):
            self.place(driver)

    def place(self, driver: SessionDriver) -> None:
        """Assign what the session lacks from what is up."""
        with guarded(driver):
            self._place(driver)

    def _place(self, driver: SessionDriver) -> None:
        if driver.session.state is State.WAITING and driver.verifier is None:
            peer = self._verifier_for(driver)
            if peer is not None and peer.info is not None:
                driver.use_verifier(peer, self._shares_host(peer.info))
        if driver.wants_drafter:
            drafter = least_refusing(self.drafters, driver.refusals)
            if drafter is not None:
                driver.use_drafter(drafter)

    def _verifier_for(self, driver: SessionDriver) -> VerifierPeer | None:
        """The one that has the session already, while it is expected back; else the one with the fewest sessions."""
        former = driver.former
        if former is not None and (former.up or former.expected_back):
            return former if former.up else None
        return least_loaded(self.verifiers)

    def _shares_host(self, verifier: Info) -> bool:
        """Whether a drafter would compete with the verifier for cores; one that dialled in is not asked where it is."""
        place = (verifier.host_id, verifier.device)
        drafters = [d.info for d in self.drafters if d.up and d.info is not None]
        return any(info.host_id and (info.host_id, info.device) == place for info in drafters)

    # Sessions

    def require_target(self) -> Target:
        """The served model, once a verifier has said what it is."""
        if self.target is None:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "no verifier has answered yet")
        return self.target

    async def find(self, session_id: str) -> SessionDriver | None:
        """The session's driver, also where another call is just opening it. Raises as `open`."""
        opening = self._opening.get(session_id)
        return self.sessions.get(session_id) if opening is None else await self._opened(opening)

    async def open(self, record: SessionRecord, deadline: float | None) -> SessionDriver:
        """Create the session in the log and set it going; a call for one that has begun joins it.

        Its caller's leaving does not interrupt this: the log would hold a session that nobody drives.

        Raises:
            StatusError: the log does not answer.
        """
        known = await self.find(record.session_id)
        if known is not None:
            return known
        task = asyncio.create_task(self._create(record, deadline))
        self._opening[record.session_id] = task
        task.add_done_callback(lambda _: self._opening.pop(record.session_id))
        return await self._opened(task)

    async def _opened(self, opening: asyncio.Task[SessionDriver]) -> SessionDriver:
        timeout = self.options.store_timeout
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(opening)
        except TimeoutError:
            message = f"the session log did not take the session within {timeout:g} s"
            raise StatusError(grpc.StatusCode.UNAVAILABLE, message) from None

    async def _create(self, record: SessionRecord, deadline: float | None) -> SessionDriver:
        with store_statuses():
            fence = await self.store.create(record, self.options.retention)
        scanner = OutputText(self.require_target().tokenizer, record.stop)
        driver = SessionDriver(record, fence, scanner, self.store, self.options, self.place, self._ended)
        self.sessions[record.session_id] = driver
        if deadline is not None:
            driver.set_deadline(deadline)
        driver.expect_reader()
        driver.wait_for_verifier()
        self.place(driver)
        return driver

    def _ended(self, _: SessionDriver) -> None:
        """Keep an ended session a little for readers that come back; the log keeps it for longer."""
        ended = [s for s, d in self.sessions.items() if d.output.end is not None]
        for session_id in ended[: max(0, len(ended) - FINISHED_KEPT)]:
            del self.sessions[session_id]

    async def stop(self) -> None:
        """Leave what still runs, then close links and log; every task has ended when this returns."""
        opening = list(self._opening.values())
        for each in opening:
            each.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        drivers = list(self.sessions.values())
        for driver in drivers:
            driver.leave()
        await asyncio.gather(*(driver.ended(timeout=2.0) for driver in drivers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(driver.close() for driver in drivers))
        await self.store.close()


def _hopeless(peer: VerifierPeer | DrafterPeer, link: VerifierLink | DrafterLink) -> str | None:
    """Why waiting for a peer does not help, or None."""
    if peer.refusal is not None:
        return f"{link.address}: {peer.refusal}"
    return link.trouble if link.distrusted else None


def vocabulary_mismatch(target: Info, drafter: Info) -> str | None:
    """Why the drafter's ids do not mean what the target's mean, or None if they do."""
    if target.vocabulary_fingerprint == drafter.vocabulary_fingerprint:
        return None
    return (
        f"vocabulary mismatch: drafter {drafter.model} has {drafter.vocabulary_fingerprint[:12]} "
        f"({drafter.vocabulary} ids), target {target.model} has {target.vocabulary_fingerprint[:12]} "
        f"({target.vocabulary} ids); both need the same tokenizer"
    )
