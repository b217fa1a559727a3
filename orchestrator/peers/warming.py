"""Tells a verifier that has started what tenants' ended sessions said, from the log, for it to propose from.

A verifier keeps texts in memory only, so one that starts knows none. It gets the latest ones, of each tenant in turns,
and only what it would have kept: of sessions that let their text be shared, did not fail, and were not deleted. They go
to it in small messages, from a task that ends with the link. Nothing waits for that, and no text depends on it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import NamedTuple

from orchestrator.peers.models import Info
from orchestrator.peers.peer import VerifierPeer
from orchestrator.store import DamagedLog, MissingSession, SessionStore, StoredSession, StoreError
from orchestrator.tenants import Access
from specwire.core.messages import FinishReason
from specwire.v1 import verify_pb2

logger = logging.getLogger(__name__)

# Tokens that a verifier is told at most, and the part of its room that they may take: the rest is for what it decides
# itself. A text gets no larger part of that: others are to have some, too.
MOST_TOLD = 1 << 18
PART = 4
# Sessions of one tenant that are considered, the latest.
MOST_OF_A_TENANT = 256
# Seconds for finding and reading texts in the log. What was read by then is told.
READING_LIMIT_S = 10.0
# Tokens of one message, and seconds from one to the next, at least a round trip: what sessions say goes between.
MESSAGE_TOKENS, PAUSE_S = 4096, 0.02


class LoggedText(NamedTuple):
    """ended: when its session did, Unix time in seconds by the log's clock."""

    ended: float
    text: verify_pb2.EarlierText


class Warming:
    """Owns a task for each verifier that is being told.

    Args:
        verifiers: those that there are now.
    """

    def __init__(self, store: SessionStore, access: Access, verifiers: Callable[[], Sequence[VerifierPeer]]) -> None:
        self._store = store
        self._access = access
        self._verifiers = verifiers
        self._tasks: dict[VerifierPeer, asyncio.Task[None]] = {}
        # The log is searched for one verifier at a time.
        self._turn = asyncio.Lock()
        self._stopped = False

    def look(self) -> None:
        """Begin with verifiers that have started, and end with those whose link is lost."""
        usable = [each for each in self._verifiers() if each.takes_sessions]
        for peer, task in self._tasks.items():
            if peer not in usable:
                task.cancel()
        if self._stopped or not self._tenants:
            return
        for peer in usable:
            if peer.wants_texts and peer not in self._tasks:
                self._tasks[peer] = asyncio.create_task(self._warm(peer), name="texts for a verifier")
                self._tasks[peer].add_done_callback(partial(self._done, peer))

    def _done(self, peer: VerifierPeer, _: asyncio.Task[None]) -> None:
        del self._tasks[peer]
        self.look()  # it may be back by now

    async def stop(self) -> None:
        """End all tasks."""
        self._stopped = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _warm(self, peer: VerifierPeer) -> None:
        """Once for each start of a verifier, unless its link is lost meanwhile."""
        info, address = peer.info, peer.link.address
        if info is None:
            return
        try:
            async with self._turn:
                texts = await self._texts(info)
            await self._tell(peer, [each.text for each in texts])
            logger.info("%s was told %d texts of ended sessions", address, len(texts))
        except StoreError as error:
            logger.info("%s is told no texts of ended sessions: %s", address, error)
        except Exception:  # a bug of ours: the verifier does without
            logger.exception("%s is told no texts of ended sessions", address)
        peer.texts_told(info)

    async def _tell(self, peer: VerifierPeer, texts: Sequence[verify_pb2.EarlierText]) -> None:
        for message in _messages(texts):
            peer.link.send(message)
            await asyncio.sleep(max(PAUSE_S, peer.link.round_trip_us / 1e6))

    async def _texts(self, info: Info) -> list[LoggedText]:
        """What a verifier is told, the oldest first: what came last it takes for the latest."""
        found: list[LoggedText] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(READING_LIMIT_S):
                await self._read(info, found)
        return sorted(found, key=lambda each: each.ended)

    async def _read(self, info: Info, found: list[LoggedText]) -> None:
        """Add texts to `found`, the latest first, until one does not fit any more."""
        room = most = min(MOST_TOLD, info.text_room // PART)
        for ended, session_id in await self._latest():
            text = await self._text(session_id, info)
            if text is None or len(text.tokens) > most // PART:
                continue
            room -= len(text.tokens)
            if room < 0:
                break
            found.append(LoggedText(ended, text))

    async def _latest(self) -> list[tuple[float, str]]:
        """When sessions ended, and their ids: each tenant's latest one, then the second latest, and so on."""
        latest: dict[str, set[tuple[float, str]]] = {tenant: set() for tenant in self._tenants}
        async with aclosing(self._store.known_sessions()) as known:
            async for each in known:
                tenant, private = each.whose or ("", True)
                if each.state != "ended" or private or tenant not in latest:
                    continue
                latest[tenant].add((each.ended, each.session_id))
                if len(latest[tenant]) > 2 * MOST_OF_A_TENANT:
                    latest[tenant] = set(heapq.nlargest(MOST_OF_A_TENANT, latest[tenant]))
        in_turns = [
            (rank, -ended, session_id)
            for kept in latest.values()
            for rank, (ended, session_id) in enumerate(heapq.nlargest(MOST_OF_A_TENANT, kept))
        ]
        return [(-negative, session_id) for _, negative, session_id in sorted(in_turns)]

    async def _text(self, session_id: str, info: Info) -> verify_pb2.EarlierText | None:
        """None where there is none by now, or it is not to be told."""
        try:
            stored = await self._store.read(session_id)
        except (MissingSession, DamagedLog):
            return None
        if stored is None or not self._shared(stored):
            return None
        record = stored.record
        if record.vocabulary_fingerprint != info.vocabulary_fingerprint or stored.length > info.context:
            return None
        return verify_pb2.EarlierText(
            session_id=session_id,
            cache_scope=self._access.cache_scope(record.tenant),
            tokens=[*record.prompt, *stored.tokens],
            vocabulary_fingerprint=record.vocabulary_fingerprint,
        )

    def _shared(self, stored: StoredSession) -> bool:
        """Whether a verifier that decided the session would have kept its text."""
        record = stored.record
        kept = record.ngram and record.sampling.guessed and not record.private
        return kept and record.tenant in self._tenants and stored.reason not in (None, FinishReason.ERROR)

    @property
    def _tenants(self) -> frozenset[str]:
        """Those that may call now."""
        return frozenset() if self._access.keys is None else self._access.keys.names


def _messages(texts: Sequence[verify_pb2.EarlierText]) -> Iterator[verify_pb2.ConnectVerifyRequest]:
    """All of them, in messages of MESSAGE_TOKENS or of one text."""
    message, tokens = verify_pb2.ConnectVerifyRequest(), 0
    for text in texts:
        if tokens and tokens + len(text.tokens) > MESSAGE_TOKENS:
            yield message
            message, tokens = verify_pb2.ConnectVerifyRequest(), 0
        message.texts.append(text)
        tokens += len(text.tokens)
    if tokens:
        yield message
