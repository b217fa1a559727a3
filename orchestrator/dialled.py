"""The peers that an orchestrator dials, each with a link that a task keeps up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from orchestrator.link import Info
from orchestrator.peers import DrafterLink, DrafterPeer, VerifierLink, VerifierPeer, drafter_link, verifier_link
from orchestrator.tokenizers import Tokenizers
from specwire.rpc.tls import ClientTls

AnyPeer = VerifierPeer | DrafterPeer
Accept = Callable[[Info], str | None]


class Dialled:
    """Owns the tasks; `stop` ends them all, those that are being ended included.

    Args:
        tls, token, tokenizers: see Link.
        on_change: a peer can be used now, or cannot any more.
    """

    def __init__(
        self, tls: ClientTls | None, token: str, tokenizers: Tokenizers, on_change: Callable[[], None]
    ) -> None:
        self._tokenizers = tokenizers
        self._tls = tls
        self._token = token
        self._on_change = on_change
        self._links: dict[AnyPeer, VerifierLink | DrafterLink] = {}
        self._runs: dict[AnyPeer, Callable[[], Coroutine[None, None, None]]] = {}
        self._tasks: dict[AnyPeer, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def verifier(self, address: str, accept: Accept) -> VerifierPeer:
        """One that is to be dialled once it is started. accept: why it must not be used, or None."""
        link = verifier_link(address, self._tls, self._token, self._tokenizers)
        peer = VerifierPeer(link, self._on_change, accept)
        self._links[peer], self._runs[peer] = link, lambda: link.run(peer)
        return peer

    def drafter(self, address: str, accept: Accept) -> DrafterPeer:
        """As `verifier`."""
        link = drafter_link(address, self._tls, self._token)
        peer = DrafterPeer(link, self._on_change, accept)
        self._links[peer], self._runs[peer] = link, lambda: link.run(peer)
        return peer

    def start(self, peer: AnyPeer) -> None:
        self._tasks[peer] = asyncio.create_task(self._runs[peer]())

    def drop(self, peer: AnyPeer) -> None:
        """Its link ends, and it is dialled no longer."""
        del self._links[peer], self._runs[peer]
        task = self._tasks.pop(peer, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        for peer in list(self._links):
            self.drop(peer)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def trouble(self, peer: AnyPeer) -> str | None:
        """Why the link is down; None where it is up."""
        link = self._links[peer]
        return None if link.up else link.trouble

    def hopeless(self, peer: AnyPeer) -> str | None:
        """Why waiting for it does not help, or None."""
        link = self._links[peer]
        if peer.refusal is not None:
            return f"{link.address}: {peer.refusal}"
        return link.trouble if link.distrusted else None
