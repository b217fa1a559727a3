"""The verifiers and drafters of one orchestrator, and which session gets which."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import grpc

from orchestrator.options import OrchestratorOptions
from orchestrator.peers.discovery import Place, RegistryFeed, SessionAffinity
from orchestrator.peers.models import Info, Models, Target, Tokenizers, identity_of, vocabulary_mismatch
from orchestrator.peers.peer import AnyPeer, Dialled, DrafterLine, DrafterPeer, VerifierPeer, guarded
from orchestrator.session.driver import SessionDriver
from orchestrator.store import SessionRecord
from specwire.core.placement import TWO, PlacementCandidate, PlacementRequest, Reason, place
from specwire.core.session import State
from specwire.registry.directory import Directory
from specwire.registry.entry import Role
from specwire.registry.service import RemoteDirectory
from specwire.rpc.channel import check_token_is_safe
from specwire.rpc.errors import RETRY_AFTER, StatusError
from specwire.rpc.link import ALL_ELSEWHERE, LocalPeer
from specwire.rpc.model_info import Identity

# ----------------------------------------------------------------------------------------------------------------------
# Which of an orchestrator's peers a session gets: peers as candidates (`specwire.core.placement`).

NOBODY = Info()


def verifier_candidate(peer: VerifierPeer, refusals: int) -> PlacementCandidate:
    """refusals: of the session, for want of a slot."""
    info = peer.info or NOBODY
    return PlacementCandidate(
        peer.link.address,
        "" if peer.identity is None else peer.identity.digest,
        up=peer.up and not peer.draining,
        draining=peer.report.draining,
        fresh=peer.report.fresh,
        slots=info.slots,
        sessions=peer.sessions,
        region=info.region,
        context=info.context,
        round_trip_us=peer.link.round_trip_us,
        refusals=refusals,
    )


def drafter_candidate(peer: DrafterPeer, refusals: int, vocabulary: str) -> PlacementCandidate:
    """refusals: of the session. vocabulary: the session's."""
    info, mapped = peer.info or NOBODY, peer.maps(vocabulary) is not None
    return PlacementCandidate(
        peer.link.address,
        vocabulary if mapped else info.vocabulary_fingerprint,
        up=peer.up and not peer.report.draining,
        fresh=peer.report.fresh,
        slots=info.slots,
        sessions=peer.sessions,
        region=info.region,
        refusals=refusals,
        mapped=mapped,
    )


def chosen_drafter(
    peers: Sequence[DrafterPeer], refusals: Counter[DrafterPeer], wish: PlacementRequest
) -> DrafterPeer | None:
    """Refusals count before load: a drafter that refuses everything has no sessions and would always be first."""
    choice = place([drafter_candidate(each, refusals[each], wish.fingerprint) for each in peers], wish)
    return None if choice is None else peers[choice.index]


logger = logging.getLogger(__name__)

# Seconds that a start waits for the other peers that were named, once a verifier is there: its model can be served
# without them.
OTHERS_WITHIN_S = 10.0


class StartError(RuntimeError):
    """The orchestrator cannot start: a peer does not answer, or does not fit."""


def _directory(options: OrchestratorOptions) -> Directory | RemoteDirectory | None:
    """Where peers are looked for beside those that were named."""
    registration = options.registration
    if options.cloud.address:
        shown = (options.peer_tls, options.peer_token)
        return RemoteDirectory(options.cloud, Role.VERIFIER, *shown, region=registration.region)
    return Directory.at(registration.url) if registration.url else None


class Pool:
    """Assigns sessions to peers: named ones, registered ones, and drafters that dial in.

    Args:
        sessions: all that may lack a peer.
        local: peers in this process, by the addresses that `options` name them with.

    `models`: of the verifiers here. `feed`: of the registry; None without one. `affinity`: where sessions were placed
    last. `placed`: how many sessions were given a verifier, by why to that one.

    Invariant: a running session without a verifier is in state WAITING and has a timer that ends it.
    """

    def __init__(
        self,
        options: OrchestratorOptions,
        sessions: Callable[[], Sequence[SessionDriver]],
        local: Mapping[str, LocalPeer] = ALL_ELSEWHERE,
    ) -> None:
        tokenizers = Tokenizers()
        self.models = Models(tokenizers)
        self._options = options
        self._sessions = sessions
        self.affinity = SessionAffinity()
        self._dialled = Dialled(options.peer_tls, options.peer_token, tokenizers, self._rebalance, local)
        self._feeding: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.verifiers = [self._dialled.verifier(address, self._accept_target) for address in options.verifiers]
        self._named = [
            self._dialled.drafter(address, self._accept_drafter, self.models.all) for address in options.drafters
        ]
        self.drafters = list(self._named)
        directory = _directory(options)
        known = (self.affinity, self._find, self._dial, self._drop, self._looked)
        self.feed = None if directory is None else RegistryFeed(directory, *known)
        self.placed: Counter[Reason] = Counter()

    # Links

    async def start(self) -> None:
        """Connect to all peers; waits for one verifier and for every peer that was named.

        Once a verifier is there, the others are waited for briefly only. Where services are registered a verifier may
        come later, too: after the start timeout nobody waits for it.

        Raises:
            StartError: a needed peer did not answer in time, or was refused.
        """
        named: list[AnyPeer] = [*self.verifiers, *self._named]
        for peer in named:
            self._dialled.start(peer)
        if self.feed is not None:
            self._feeding = asyncio.create_task(self.feed.run(), name="registry")
        await self.until_ready()

    async def until_ready(self) -> None:
        """Raises StartError as soon as waiting does not help, or took too long."""
        limit_s = self._options.start_timeout
        try:
            async with asyncio.timeout(limit_s):
                await self._until(lambda: any(verifier.up for verifier in self.verifiers))
        except TimeoutError:
            self._check_verifiers()
        named = [each for each in self.verifiers if each.link.address in self._options.verifiers]
        try:
            async with asyncio.timeout(min(limit_s, OTHERS_WITHIN_S)):
                await self._until(
                    lambda: (
                        all(each.up or self._dialled.hopeless(each) for each in named)
                        and all(drafter.up for drafter in self._named)
                    )
                )
        except TimeoutError:
            if lacking := self._troubles(self._named):
                logger.warning("until drafters come, sessions run plainly: %s", lacking)
        if lacking := self._troubles(named):
            logger.warning("models of verifiers that are not there are refused: %s", lacking)

    def _check_verifiers(self) -> None:
        """There is none. Raises StartError, unless one may still be registered."""
        waited = f"not ready within {self._options.start_timeout:g} s"
        if self.feed is None or self._options.verifiers:
            raise StartError(f"{waited}: {self._troubles([*self.verifiers, *self._named])}") from None
        logger.warning("%s: %s", waited, self.feed.trouble or "no verifier is registered that can be used")

    def _troubles(self, peers: Sequence[AnyPeer]) -> str:
        return "; ".join(filter(None, (self._dialled.hopeless(each) or self._dialled.trouble(each) for each in peers)))

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Raises StartError as soon as waiting does not help."""
        while not ready():
            hopeless = [self._dialled.hopeless(verifier) for verifier in self.verifiers]
            reasons = [self._dialled.hopeless(drafter) for drafter in self._named]
            if all(hopeless) and self.feed is None:
                reasons += hopeless
            reason = next(filter(None, reasons), None)
            if reason is not None:
                raise StartError(reason)
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """Close the links that were dialled."""
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
        await self._dialled.stop()
        if self.feed is not None:
            await self.feed.close()

    # What is registered

    def _find(self, place: Place) -> AnyPeer | None:
        role, address = place
        peers: Sequence[AnyPeer] = self.verifiers if role is Role.VERIFIER else self._named
        return next((peer for peer in peers if peer.link.address == address), None)

    def _dial(self, place: Place) -> AnyPeer:
        role, address = place
        check_token_is_safe(address, self._options.peer_tls, self._options.peer_token)
        peer: AnyPeer
        if role is Role.VERIFIER:
            peer = self._dialled.verifier(address, self._accept_version)
            self.verifiers.append(peer)
        else:
            peer = self._dialled.drafter(address, self._accept_drafter, self.models.all)
            self.drafters.append(peer)
        self._dialled.start(peer)
        return peer

    def _drop(self, peer: AnyPeer) -> None:
        if isinstance(peer, VerifierPeer):
            self.verifiers.remove(peer)
        else:
            self.drafters.remove(peer)
        self._dialled.drop(peer)

    def _looked(self, now: float) -> None:
        self._relieve()
        self.models.sweep({each.identity for each in self.verifiers if each.identity is not None}, now)

    # What fits

    def _accept_target(self, info: Info) -> str | None:
        """Why a named verifier must not be used here, or None.

        It has to equal the known ones of its name, unless all of them have changed: then that was meant.
        """
        known = {target.identity for target in self.models.named(info.model)}
        return self._learn(info, versions=known.isdisjoint(each.identity for each in self.verifiers))

    def _accept_version(self, info: Info) -> str | None:
        """Why a verifier that is registered must not be used here, or None."""
        return self._learn(info, versions=True)

    def _learn(self, info: Info, versions: bool) -> str | None:
        refusal = self.models.learn(info, versions)
        for verifier in self.verifiers if refusal is None else ():
            if verifier.identity == Identity.of(info):
                verifier.refusal = None  # it came with it before that was wanted
        for drafter in self.drafters:
            drafter.refusal = None if drafter.info is None else self._accept_drafter(drafter.info)
            drafter.introduce()
        return refusal

    def _accept_drafter(self, info: Info) -> str | None:
        """Why a drafter must not be used here, or None; a verifier that has said nothing yet may be the one for it."""
        if any(verifier.info is None for verifier in self.verifiers):
            return None
        mismatches = [vocabulary_mismatch(target.info, info) for target in self.models.all()]
        return mismatches[0] if mismatches and all(mismatches) else None

    def admit(self, line: DrafterLine, info: Info) -> DrafterPeer:
        """Use a drafter that dialled in, for as long as it stays; its `refusal` says why it is not used."""
        drafter = DrafterPeer(line, self._rebalance, self._accept_drafter, self.models.all)
        self.drafters.append(drafter)
        drafter.on_up(info)
        return drafter

    def dismiss(self, drafter: DrafterPeer) -> None:
        """Its line, which must not be up any more, has ended."""
        self.drafters.remove(drafter)
        drafter.on_down()

    # Who gets whom

    def _rebalance(self) -> None:
        """Give waiting sessions a verifier, and sessions without one a drafter, if there are any."""
        self._changed.set()
        for driver in self._sessions():
            self.place(driver)
        self._relieve()

    def _relieve(self) -> None:
        """Move sessions that wait for a slot to verifiers with a free one, such as one that has just come."""
        queued = [driver for driver in self._sessions() if driver.verifying.queued]
        for driver in sorted(queued, key=lambda each: bool(each.view.output.tokens)):  # whose cache may be there, last
            if driver.verifying.queued:
                with guarded(driver):
                    self._move(driver)

    def _move(self, driver: SessionDriver) -> None:
        free = [each for each in self.verifiers if each.takes_sessions and each.has_room]
        peer = self.verifier_for(driver, free)
        if peer is not None:
            driver.verifying.give_up_place()
            driver.use_verifier(peer)

    def place(self, driver: SessionDriver) -> None:
        """Assign what the session lacks from what is up."""
        with guarded(driver):
            self._place(driver)

    def _place(self, driver: SessionDriver) -> None:
        if driver.session.state is State.WAITING and driver.verifying.peer is None:
            peer = self.verifier_for(driver, self.verifiers)
            if peer is not None:
                driver.use_verifier(peer)
        for _ in range(driver.drafters.missing):
            chosen = self.drafter_for(driver)
            if chosen is None:
                return
            driver.drafters.add(chosen)

    def verifier_for(self, driver: SessionDriver, verifiers: Sequence[VerifierPeer]) -> VerifierPeer | None:
        """The verifier that was lost a moment ago, while it is expected back; else the best one."""
        record, former = driver.view.record, driver.verifying.former
        identity = identity_of(record)
        if former is not None and not former.serves(identity, record.end):
            former = None  # it is back with another model
        if former is not None and former.takes_sessions:
            return self._chosen(driver, former, Reason.HOLDER)
        if former is not None and former.expected_back:
            return None
        drafter = self.drafter_for(driver) if driver.drafters.missing else None
        wish = PlacementRequest(
            record.session_id,
            identity.digest,
            held_by=self.affinity.held(record.session_id),
            parent_at=self.affinity.of(record.parent),
            near=self._near(drafter),
            draws=self._draws,
            context=record.end,
        )
        refusals = driver.verifying.refusals
        choice = place([verifier_candidate(each, refusals[each]) for each in verifiers], wish)
        return None if choice is None else self._chosen(driver, verifiers[choice.index], choice.reason)

    def drafter_for(self, driver: SessionDriver) -> DrafterPeer | None:
        """One more drafter for the session, if there is one."""
        record, refusals = driver.view.record, driver.drafters.refusals
        near = self._near(driver.verifying.peer)
        wish = PlacementRequest(record.session_id, record.vocabulary_fingerprint, near=near, draws=self._draws)
        free = [each for each in self.drafters if not driver.drafters.has(each)]
        if record.sampling.weighed:
            free = [drafter for drafter in free if drafter.maps(record.vocabulary_fingerprint) is None]
        return chosen_drafter(free, refusals, wish)

    def _chosen(self, driver: SessionDriver, peer: VerifierPeer, reason: Reason) -> VerifierPeer:
        self.placed[reason] += 1
        self.affinity.note(driver.view.record.session_id, peer.link.address)
        return peer

    def _near(self, other: VerifierPeer | DrafterPeer | None) -> tuple[str, ...]:
        """Regions: the orchestrator's, then that of the session's other peer."""
        there = other.info.region if other is not None and other.info is not None else ""
        return tuple(dict.fromkeys(region for region in (self._options.registration.region, there) if region))

    @property
    def _draws(self) -> int:
        """How many drawn candidates are compared by load; 0: all."""
        return TWO if self.feed is not None and self.feed.shared else 0

    async def learn_home(self, session_id: str) -> None:
        """Look up, before `place`, which verifier had a session or its parent at another orchestrator."""
        if self.feed is not None and session_id:
            await self.feed.learn_home(session_id)

    def forget(self, session_id: str) -> None:
        """The session was deleted. A verifier that cannot be reached now keeps its cache until it needs the slot."""
        for verifier in self.verifiers:
            verifier.forget(session_id)

    # What is served

    def target_named(self, model: str = "") -> Target:
        """The target for new sessions of a model; "" names the only one.

        Of several versions it is the one that came last, if it has room: a new version is brought in to be used.

        Raises:
            StatusError: UNAVAILABLE, no verifier has said what it is; NOT_FOUND, the model is not known.
            InvalidParameter: there are several models, and none is named.
        """
        return self._as_served(max(self.models.named(self.models.meant(model)), key=self._preference))

    def _as_served(self, target: Target) -> Target:
        """The model as its present verifiers have it, described by the one that came last."""
        peers = [peer for peer in self.verifiers if peer.serves(target.identity)]
        usable = [peer for peer in peers if peer.takes_sessions] or peers
        infos = [peer.info for peer in sorted(usable, key=lambda each: each.report.started) if peer.info is not None]
        if not infos:
            return target
        context = max(peer.info.context for peer in peers if peer.info is not None)
        return replace(target, info=infos[-1], context=context, context_now=max(info.context for info in infos))

    def _preference(self, target: Target) -> tuple[bool, bool, float]:
        peers = [peer for peer in self.verifiers if peer.serves(target.identity)]
        usable = [peer for peer in peers if peer.takes_sessions]
        came = min((peer.report.started for peer in peers), default=0.0)
        return bool(usable), any(peer.has_room for peer in usable), came

    def targets(self) -> list[Target]:
        """The target for new sessions of every model, by rising name."""
        return [self.target_named(name) for name in self.models.names()]

    def require_target(self) -> Target:
        """The served model, of several the first. Raises StatusError (UNAVAILABLE) before any verifier has answered."""
        return self.target_named(next(iter(self.models.names()), ""))

    def scoring_peer(self, identity: Identity, length: int) -> VerifierPeer:
        """The verifier with the fewest sessions for each slot that may score a text of this length.

        Raises StatusError (UNAVAILABLE).
        """
        peers = [each for each in self.verifiers if each.takes_sessions and each.serves(identity, length)]
        if not peers:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "no verifier is there", RETRY_AFTER)
        return min(peers, key=lambda each: each.sessions / max(1, each.info.slots if each.info else 1))

    @property
    def decides(self) -> bool:
        """Whether a verifier is there."""
        return any(verifier.up for verifier in self.verifiers)

    def decides_for(self, record: SessionRecord) -> bool:
        """Whether a verifier is there that may go on with the session."""
        identity = identity_of(record)
        return any(each.up and each.serves(identity, record.end) for each in self.verifiers)

    def missing_for(self, record: SessionRecord) -> str:
        """For people: why no verifier takes the session; "" where one might."""
        identity, named = identity_of(record), f"model {record.model or 'of the session'!r}"
        infos = [each.info for each in self.verifiers if each.up and each.serves(identity) and each.info is not None]
        most = max((info.context for info in infos), default=0)
        if infos:
            known = f"no verifier of {named} holds a text of {record.end} tokens, the most is {most}"
            return "" if record.end <= most else known
        others = [each.identity for each in self.verifiers if each.link.up and each.identity is not None]
        unequal = [each for each in others if each != identity and each.vocabulary == identity.vocabulary]
        if not unequal:
            return f"no verifier is there for {named}"
        ours, theirs = identity.beside(unequal[-1])
        return f"no verifier serves {ours} of {named}, which the session began with; {theirs} is served"
