"""The verifiers and drafters of one orchestrator, and which session gets which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from orchestrator.driver import SessionDriver
from orchestrator.homes import Homes
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
from orchestrator.target import Target, vocabulary_mismatch
from specwire.core.states import State
from specwire.rpc.errors import StatusError
from specwire.text import TokenizerError


class StartError(RuntimeError):
    """The orchestrator cannot start: a peer does not answer, or does not fit."""


class Pool:
    """Assigns sessions to peers: those that are dialled, and drafters that dial in.

    Args:
        sessions: all that may lack a peer.

    `target`: of the first verifier that answered; others must equal it.

    Invariant: a running session without a verifier is in state WAITING and has a timer that ends it.
    """

    def __init__(self, options: OrchestratorOptions, sessions: Callable[[], Sequence[SessionDriver]]) -> None:
        self.target: Target | None = None
        self._sessions = sessions
        self._start_timeout = options.start_timeout
        tls, token = options.peer_tls, options.peer_token
        self.verifiers = [
            VerifierPeer(verifier_link(a, tls, token), self._rebalance, self._accept_target) for a in options.verifiers
        ]
        self._drafter_links = [drafter_link(a, tls, token) for a in options.drafters]
        self.drafters = [self._drafter(link) for link in self._drafter_links]
        self._homes = Homes()
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

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
            async with asyncio.timeout(self._start_timeout):
                await self.until_ready()
        except TimeoutError:
            reasons = [link.trouble for link in self._links() if not link.up]
            raise StartError(f"not ready within {self._start_timeout:g} s: {'; '.join(reasons)}") from None

    def _links(self) -> list[VerifierLink | DrafterLink]:
        return [*(verifier.link for verifier in self.verifiers), *self._drafter_links]

    async def until_ready(self) -> None:
        """Raises StartError as soon as waiting is of no use."""
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
        for driver in self._sessions():
            self.place(driver)

    def place(self, driver: SessionDriver) -> None:
        """Assign what the session lacks from what is up."""
        with guarded(driver):
            self._place(driver)

    def _place(self, driver: SessionDriver) -> None:
        if driver.session.state is State.WAITING and driver.verifying.peer is None:
            peer = self._verifier_for(driver)
            if peer is not None and peer.info is not None:
                self._homes.note(driver.record.session_id, peer)
                driver.use_verifier(peer)
        for _ in range(driver.drafters_missing):
            free = [drafter for drafter in self.drafters if not driver.drafters.has(drafter)]
            chosen = least_refusing(free, driver.drafters.refusals)
            if chosen is None:
                return
            driver.drafters.add(chosen)

    def _verifier_for(self, driver: SessionDriver) -> VerifierPeer | None:
        """The one that has the session already, while it is expected back; the one that had its parent; or the one with
        the fewest sessions.
        """
        former = driver.verifying.former
        if former is not None and (former.takes_sessions or former.expected_back):
            return former if former.takes_sessions else None
        return self._homes.of(driver.record.parent) or least_loaded(self.verifiers)

    def forget(self, session_id: str) -> None:
        """The session was deleted. A verifier that cannot be reached now keeps what it has until it needs the room."""
        for verifier in self.verifiers:
            verifier.forget(session_id)

    def require_target(self) -> Target:
        """The served model, once a verifier has said what it is. Raises StatusError (UNAVAILABLE)."""
        if self.target is None:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "no verifier has answered yet")
        return self.target

    @property
    def decides(self) -> bool:
        """A verifier is there."""
        return any(verifier.up for verifier in self.verifiers)

    async def stop(self) -> None:
        """Close the links that were dialled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _hopeless(peer: VerifierPeer | DrafterPeer, link: VerifierLink | DrafterLink) -> str | None:
    """Why waiting for a peer does not help, or None."""
    if peer.refusal is not None:
        return f"{link.address}: {peer.refusal}"
    return link.trouble if link.distrusted else None
