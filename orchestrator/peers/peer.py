"""The peers that an orchestrator dials: what is known of each, and how much it may send."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from orchestrator.peers.models import Info, Target, Tokenizers, maps_vocabulary
from orchestrator.store import SessionRecord
from specwire.core.invalid import InvalidParameter
from specwire.registry.directory import HEARTBEAT_S
from specwire.registry.entry import ServiceEntry, ServiceState
from specwire.rpc.convert import MOST_KNOWN_BY
from specwire.rpc.errors import RETRY_AFTER, StatusError, readable, retry_after
from specwire.rpc.keys import Token
from specwire.rpc.link import Line, Link, LocalPeer
from specwire.rpc.model_info import Identity
from specwire.rpc.tls import ClientTls
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

# ----------------------------------------------------------------------------------------------------------------------
# What the registry says of a peer, for placement. Whether a peer can be used, its connection tells.

# Seconds without a heartbeat after which a report is stale: two are missed, and a bit.
STALE_S = 2.5 * HEARTBEAT_S
# Seconds for which a service that is neither registered nor connected is still dialled.
GIVEN_UP_S = 10.0


@dataclass(slots=True)
class PeerReport:
    """What is known of one peer; the defaults are for one that was named.

    others: its sessions of other orchestrators, as it last said. started: Unix time in seconds.
    fresh: its latest heartbeat came in time. missing_since: since when it is not registered; None where it is.
    """

    others: int = 0
    started: float = 0.0
    draining: bool = False
    fresh: bool = True
    missing_since: float | None = None
    beat: tuple[str, int] = ("", 0)
    beat_at: float = 0.0

    def hear(self, entry: ServiceEntry, own: int, now: float) -> None:
        """own: sessions that this orchestrator has there."""
        self.missing_since = None
        if (entry.id, entry.beat) != self.beat:
            self.beat, self.beat_at = (entry.id, entry.beat), now
            self.others = max(0, entry.load.running + entry.load.waiting - own)
            self.started = entry.started
            self.draining = entry.state is ServiceState.DRAINING
        self.fresh = now - self.beat_at <= STALE_S

    def miss(self, now: float) -> None:
        """It is not registered. It stays in use as long as its connection is up."""
        if self.missing_since is None:
            self.missing_since = now
        self.fresh = False

    def is_given_up(self, now: float) -> bool:
        return self.missing_since is not None and now - self.missing_since > GIVEN_UP_S


# ----------------------------------------------------------------------------------------------------------------------
# What a verifier is told of a session's drafter.


def known_by(session: SessionRecord, drafter: Info) -> str:
    """Names a drafter among its tenant's: by its weights and host, so that one that connects again is the same, and by
    the rule that its tokens are tested by.
    """
    return f"{session.sampling.rule_name} {drafter.weights_fingerprint} {drafter.host_id}"[:MOST_KNOWN_BY]


def share_host(verifier: Info, drafter: Info) -> bool:
    """Whether the drafter competes with the verifier for cores; a drafter that dialled in is taken not to."""
    together = bool(drafter.host_id) and (drafter.host_id, drafter.device) == (verifier.host_id, verifier.device)
    apart = drafter.cores and verifier.cores and set(drafter.cores).isdisjoint(verifier.cores)
    return together and not apart


# ----------------------------------------------------------------------------------------------------------------------
# How much a drafter may send: what it was asked for, and no more.

# Most draft tokens of one session that are relayed in a burst: 32 advances of the longest run-ahead (MOST_RUN_AHEAD in
# specwire.core.messages), because requests add up while answers are under way.
MOST_RELAYED = 4096
# A line that stalls for as long as a connection survives may hold back more than that, without any peer's fault.
MOST_OWED = 64 * MOST_RELAYED


class Quota:
    """Draft tokens that a session's drafter still owes.

    An open or an advance asks for at most `run_ahead` tokens, and a drafter that keeps to PROTOCOL.md section 5 sends
    no more for it. A drafter that sends more floods us and, through us, the verifier. At most `most` are owed.
    """

    def __init__(self, most: int = MOST_OWED) -> None:
        self.owed = 0
        self._most = most

    def ask(self, run_ahead: int) -> None:
        """An open or an advance goes out."""
        self.owed = min(self._most, self.owed + run_ahead)

    def take(self, tokens: int) -> bool:
        """Whether a proposal of `tokens` was asked for; if so it is charged, an empty one as one token."""
        cost = max(1, tokens)
        if cost > self.owed:
            return False
        self.owed -= cost
        return True


# ----------------------------------------------------------------------------------------------------------------------
# The verifiers and drafters that an orchestrator knows: links, descriptions, and which session is on which.

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
VerifierLink = Link[verify_pb2.ConnectVerifyRequest, verify_pb2.ConnectVerifyResponse]
DrafterLink = Link[draft_pb2.ConnectDraftRequest, draft_pb2.ConnectDraftResponse]
DrafterLine = Line[draft_pb2.ConnectDraftRequest]

# Seconds for which a session prefers a verifier whose link it lost to another, and how often that may fail meanwhile.
PREFERENCE = 2.0
HOPELESS_FAILURES = 3
# Sessions whose draft tokens may still arrive after they were closed.
MOST_STRAYS = 64 * MOST_RELAYED
# Answers to an open: one, and one for each time that it may be sent again.
ANSWERS = 16


class Breakable(Protocol):
    """A session that a bug of ours may end."""

    def on_broken(self, error: Exception) -> None: ...


@contextmanager
def guarded(subject: Breakable) -> Iterator[None]:
    """An error in one session is told to that session alone; the link and all others go on."""
    try:
        yield
    except Exception as error:
        subject.on_broken(error)


class PeerSubject(Breakable, Protocol):
    """A session, as its peer's link sees it."""

    def on_lost(self) -> None:
        """The peer is gone."""


class VerifierSubject(PeerSubject, Protocol):
    def on_opened(self, opened: verify_pb2.Opened) -> None: ...
    def on_verdict(
        self, verdict: verify_pb2.Verdict, timings: verify_pb2.StepTimings, received_ns: int, more: bool = False
    ) -> None: ...
    def on_refused(self, refused: common_pb2.Refused) -> None: ...


class DrafterSubject(PeerSubject, Protocol):
    def on_proposal(self, proposal: common_pb2.Proposal) -> None: ...
    def on_refused(self, refused: common_pb2.Refused) -> None: ...


Subject = TypeVar("Subject", bound=PeerSubject)


class Peer(Generic[Request, Subject]):
    """A service at the other end of a connection. `info` is what it said last; `up` says whether it can be used now.

    `report`: what the registry says of it. accept: says why a peer of this description must not be used, or None.

    Invariant: `subjects` holds the sessions whose handles are open on the present connection.
    """

    def __init__(
        self, link: Line[Request], on_change: Callable[[], None], accept: Callable[[Info], str | None]
    ) -> None:
        self.link = link
        self.info: Info | None = None
        self.refusal: str | None = None
        self.report = PeerReport()
        self.subjects: dict[int, Subject] = {}
        self._handles = itertools.count(1)
        self._on_change = on_change
        self._accept = accept

    @property
    def up(self) -> bool:
        return self.link.up and self.refusal is None

    @property
    def sessions(self) -> int:
        """Its known sessions: ours, and those of other orchestrators that it reported."""
        return len(self.subjects) + self.report.others

    def attach(self, subject: Subject) -> int:
        """A handle for a session on this connection."""
        handle = next(self._handles)
        self.subjects[handle] = subject
        return handle

    def on_up(self, info: Info) -> None:
        self.info = info
        self.report.draining = False  # one that drains takes no connection; the registry may mean its predecessor
        self.refusal = self._accept(info)
        if self.refusal is not None:
            logger.warning("%s is not used: %s", self.link.address, self.refusal)
        self._on_change()

    def on_unreachable(self) -> None:
        """An attempt to connect failed; the link's `trouble` says why."""
        self._on_change()

    def on_down(self) -> None:
        subjects, self.subjects = list(self.subjects.values()), {}
        for subject in subjects:
            with guarded(subject):
                subject.on_lost()
        self._on_change()


class VerifierPeer(Peer[verify_pb2.ConnectVerifyRequest, VerifierSubject]):
    """`step_us`: of a plain step of one session, as the verifier measured it at start.

    `draining`: it is about to stop, and takes no sessions. `identity`: of its model; None until it is known.
    """

    link: VerifierLink

    def __init__(self, link: VerifierLink, on_change: Callable[[], None], accept: Callable[[Info], str | None]) -> None:
        super().__init__(link, on_change, accept)
        self.draining = False
        self.identity: Identity | None = None
        self.step_us = 10_000.0
        self._lost_at: float | None = None
        self._failures = 0

    @property
    def takes_sessions(self) -> bool:
        return self.up and not (self.draining or self.report.draining)

    def serves(self, identity: Identity, length: int = 0) -> bool:
        """Whether it serves sessions of this model with texts of this length."""
        return self.info is not None and self.identity == identity and self.info.context >= length

    @property
    def has_room(self) -> bool:
        return self.info is not None and self.sessions < self.info.slots

    @property
    def crowded(self) -> bool:
        """Some of its sessions wait there for a slot."""
        return self.info is not None and self.sessions > self.info.slots

    @property
    def expected_back(self) -> bool:
        """Whether its link was lost a moment ago and may soon be back: the verifier keeps its sessions.

        One that said that it stops does not.
        """
        if self.draining or self._lost_at is None or self._failures >= HOPELESS_FAILURES:
            return False
        return time.monotonic() - self._lost_at < PREFERENCE

    def on_up(self, info: Info) -> None:
        self._lost_at = None
        self.draining = False
        self.identity = Identity.of(info)
        measured = [time.microseconds for time in info.forward_times if time.rows == 1]
        self.step_us = max(1.0, float(measured[0])) if measured else self.step_us
        super().on_up(info)

    def on_down(self) -> None:
        self._lost_at, self._failures = time.monotonic(), 0
        super().on_down()

    def on_unreachable(self) -> None:
        """Count a failure to reach the peer, its loss included."""
        self._failures += 1
        super().on_unreachable()

    def on_message(self, message: verify_pb2.ConnectVerifyResponse) -> None:
        received_ns = time.monotonic_ns()
        if message.draining and not self.draining:
            logger.info("%s is draining", self.link.address)
        self.draining |= message.draining
        timings = message.timings
        for opened in message.opened:
            self._hear_opened(opened, received_ns)
        last = {(verdict.handle, verdict.attach): at for at, verdict in enumerate(message.verdicts)}
        for at, verdict in enumerate(message.verdicts):
            if (subject := self.subjects.get(verdict.handle)) is not None:
                with guarded(subject):
                    subject.on_verdict(verdict, timings, received_ns, at < last[verdict.handle, verdict.attach])
        for refused in message.refused:
            if (subject := self.subjects.pop(refused.handle, None)) is not None:
                with guarded(subject):
                    subject.on_refused(refused)

    def _hear_opened(self, opened: verify_pb2.Opened, received_ns: int) -> None:
        if (subject := self.subjects.get(opened.handle)) is not None:
            with guarded(subject):
                subject.on_opened(opened)
                for verdict in opened.tail:
                    if self.subjects.get(opened.handle) is not subject:
                        break  # what came before it has ended the session here
                    subject.on_verdict(verdict, verify_pb2.StepTimings(), received_ns)

    async def score(self, request: verify_pb2.ScoreRequest) -> verify_pb2.ScoreResponse:
        """Log-probabilities of given tokens, by a call beside the sessions.

        Raises:
            StatusError: the verifier's own; UNAVAILABLE, the link is down.
        """
        channel = self.link.channel
        if channel is None:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "no verifier is there", RETRY_AFTER)
        try:
            told = await verify_pb2_grpc.VerifyServiceStub(channel).Score(request)
            response: verify_pb2.ScoreResponse = await readable(told)
            return response
        except InvalidParameter as error:
            raise StatusError(grpc.StatusCode.ABORTED, f"what the verifier answered cannot be taken: {error}") from None
        except grpc.aio.AioRpcError as error:
            raise StatusError(error.code(), error.details() or "", retry_after(error)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "the verifier's link was lost", RETRY_AFTER) from None

    def forget(self, session_id: str) -> None:
        """The session was deleted: nothing of it may stay there."""
        if self.up:
            self.link.send(verify_pb2.ConnectVerifyRequest(forgotten=[session_id]))

    def close(self, handle: int) -> None:
        if self.subjects.pop(handle, None) is not None:
            self.link.send(verify_pb2.ConnectVerifyRequest(closes=[common_pb2.Close(handle=handle)]))


class DrafterPeer(Peer[draft_pb2.ConnectDraftRequest, DrafterSubject]):
    """A drafter; it may vanish at any time.

    targets: the models that it may draft for. A drafter of another vocabulary than one of theirs is told that.

    `_strays`: what it may still say for sessions that were closed, in tokens or replies.
    """

    def __init__(
        self,
        link: DrafterLine,
        on_change: Callable[[], None],
        accept: Callable[[Info], str | None],
        targets: Callable[[], Sequence[Target]] = tuple,
    ) -> None:
        super().__init__(link, on_change, accept)
        self._targets = targets
        self._told: set[str] = set()
        self._strays = Quota(MOST_STRAYS)

    def on_up(self, info: Info) -> None:
        self._strays = Quota(MOST_STRAYS)
        self._told.clear()
        super().on_up(info)
        self.introduce()

    def maps(self, vocabulary: str) -> Target | None:
        """The target of this vocabulary, if it is another one than the drafter's, which can map it."""
        if self.info is None or self.info.vocabulary_fingerprint == vocabulary:
            return None
        found = (each for each in self._targets() if each.identity.vocabulary == vocabulary)
        return next((each for each in found if maps_vocabulary(each.info, self.info)), None)

    def tell_vocabulary(self, vocabulary: str) -> None:
        """Before a session is opened whose vocabulary is another one than the drafter's."""
        target = self.maps(vocabulary) if vocabulary not in self._told else None
        if target is not None:
            self._told.add(vocabulary)
            self.link.send(draft_pb2.ConnectDraftRequest(vocabularies=[target.vocabulary]))

    def introduce(self) -> None:
        """Tell the vocabularies of all targets there are: the first session need not wait for the drafter's map."""
        for target in self._targets() if self.up else ():
            self.tell_vocabulary(target.identity.vocabulary)

    def attach(self, subject: DrafterSubject) -> int:
        self._strays.ask(ANSWERS)
        return super().attach(subject)

    def on_message(self, message: draft_pb2.ConnectDraftResponse) -> None:
        if not self._hear(message):
            self.link.cut("the drafter sent replies for sessions that it was not asked for")

    def _hear(self, message: draft_pb2.ConnectDraftResponse) -> bool:
        """Whether all of it was asked for; everything after the first part that was not is ignored."""
        opened = len(message.opened)
        empty = not (opened or message.proposals or message.refused)
        if (opened or empty) and not self._strays.take(opened):
            return False
        for proposal in message.proposals:
            if (subject := self.subjects.get(proposal.handle)) is not None:
                with guarded(subject):
                    subject.on_proposal(proposal)
            elif not self._strays.take(len(proposal.tokens)):
                return False
        for refused in message.refused:
            if (subject := self.subjects.pop(refused.handle, None)) is not None:
                self._strays.ask(MOST_RELAYED)  # proposals under way may follow
                with guarded(subject):
                    subject.on_refused(refused)
            elif not self._strays.take(1):
                return False
        return True

    def close(self, handle: int, owed: int) -> None:
        """`owed`: draft tokens that were asked for and not sent yet; they may cross the close."""
        if self.subjects.pop(handle, None) is not None:
            self._strays.ask(max(MOST_RELAYED, owed))
            self.link.send(draft_pb2.ConnectDraftRequest(closes=[common_pb2.Close(handle=handle)]))


AnyPeer = VerifierPeer | DrafterPeer
Accept = Callable[[Info], str | None]


class Dialled:
    """Owns the tasks; `stop` ends them all.

    Args:
        tls, token, tokenizers: see Link.
        on_change: is called when a peer becomes usable or unusable.
        local: peers in this process, by address.
    """

    def __init__(
        self,
        tls: ClientTls | None,
        token: Token | str,
        tokenizers: Tokenizers,
        on_change: Callable[[], None],
        local: Mapping[str, LocalPeer],
    ) -> None:
        self._local = local
        self._tokenizers = tokenizers
        self._tls = tls
        self._token = token
        self._on_change = on_change
        self._links: dict[AnyPeer, Link[Any, Any]] = {}
        self._tasks: dict[AnyPeer, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def verifier(self, address: str, accept: Accept) -> VerifierPeer:
        """A verifier that is dialled once it is started. accept: returns why it must not be used, or None."""
        stub, local = verify_pb2_grpc.VerifyServiceStub, self._local.get(address)
        link: VerifierLink = Link(address, stub, self._tls, self._token, self._tokenizers, local)
        peer = VerifierPeer(link, self._on_change, accept)
        self._links[peer] = link
        return peer

    def drafter(self, address: str, accept: Accept, targets: Callable[[], Sequence[Target]] = tuple) -> DrafterPeer:
        """Like `verifier`, for a drafter. targets: see DrafterPeer."""
        stub, local = draft_pb2_grpc.DraftServiceStub, self._local.get(address)
        link: DrafterLink = Link(address, stub, self._tls, self._token, local=local)
        peer = DrafterPeer(link, self._on_change, accept, targets)
        self._links[peer] = link
        return peer

    def start(self, peer: AnyPeer) -> None:
        self._tasks[peer] = asyncio.create_task(self._links[peer].run(peer))

    def drop(self, peer: AnyPeer) -> None:
        """End its link, and dial it no more."""
        del self._links[peer]
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
        """Why it does not help to wait for it, or None."""
        link = self._links[peer]
        if peer.refusal is not None:
            return f"{link.address}: {peer.refusal}"
        return link.trouble if link.distrusted else None
