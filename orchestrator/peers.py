"""The verifiers and drafters that an orchestrator knows: links, descriptions, and which session is on which."""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from orchestrator.experience import Experience
from orchestrator.link import Info, Line, Link
from orchestrator.quota import MOST_RELAYED, Quota
from orchestrator.reports import PeerReport
from orchestrator.tokenizers import Tokenizers
from specwire.core.speed import ForwardTimes
from specwire.rpc.model_info import Identity
from specwire.rpc.tls import ClientTls
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
VerifierLink = Link[verify_pb2.ConnectVerifyRequest, verify_pb2.ConnectVerifyResponse]
DrafterLink = Link[draft_pb2.ConnectDraftRequest, draft_pb2.ConnectDraftResponse]
DrafterLine = Line[draft_pb2.ConnectDraftRequest]

# Seconds for which a session prefers a verifier whose link it lost to another, and how often that may fail meanwhile.
PREFERENCE = 2.0
HOPELESS_FAILURES = 3
# Draft tokens for sessions that were closed while they were under way: of this many sessions at once.
MOST_STRAYS = 64 * MOST_RELAYED
# Answers to an open: one, and as many more as it may be sent again for.
ANSWERS = 16
# Wider forwards are not of one session's window.
MOST_OBSERVED_ROWS = 32


class Breakable(Protocol):
    """A session that a failure of our own ends."""

    def on_broken(self, error: Exception) -> None: ...


@contextmanager
def guarded(subject: Breakable) -> Iterator[None]:
    """What goes wrong with one session is told to that session alone: its link, and with it all others, go on."""
    try:
        yield
    except Exception as error:
        subject.on_broken(error)


class VerifierSubject(Breakable, Protocol):
    """A session, as its verifier's link sees it."""

    def on_verifier_lost(self) -> None: ...
    def on_opened(self, opened: verify_pb2.Opened) -> None: ...
    def on_verdict(self, verdict: verify_pb2.Verdict, timings: verify_pb2.StepTimings, received_ns: int) -> None: ...
    def on_refused_by_verifier(self, refused: common_pb2.Refused) -> None: ...


class DrafterSubject(Breakable, Protocol):
    """A session, as its drafter's link sees it."""

    def on_drafter_lost(self) -> None: ...
    def on_proposal(self, proposal: common_pb2.Proposal) -> None: ...
    def on_refused_by_drafter(self, refused: common_pb2.Refused) -> None: ...


Subject = TypeVar("Subject", bound=Breakable)


class Peer(ABC, Generic[Request, Subject]):
    """A service at the other end of a line. `info` is what it said last; `up` says whether it can be used now.

    `report`: what the registry says of it.

    Invariant: `subjects` holds the sessions whose handles are open on the present connection.
    """

    def __init__(self, link: Line[Request], on_change: Callable[[], None]) -> None:
        self.link = link
        self.info: Info | None = None
        self.refusal: str | None = None
        self.report = PeerReport()
        self.subjects: dict[int, Subject] = {}
        self._handles = itertools.count(1)
        self._on_change = on_change

    @property
    def up(self) -> bool:
        return self.link.up and self.refusal is None

    @property
    def sessions(self) -> int:
        """As far as is known here: ours, and what it said of others'."""
        return len(self.subjects) + self.report.others

    def attach(self, subject: Subject) -> int:
        """A handle for a session on this connection."""
        handle = next(self._handles)
        self.subjects[handle] = subject
        return handle

    def on_up(self, info: Info) -> None:
        self.info = info
        self.report.draining = False  # one that drains takes no connection; the registry may speak of its predecessor
        self.refusal = self._refusal(info)
        if self.refusal is not None:
            logger.warning("%s is not used: %s", self.link.address, self.refusal)
        self._on_change()

    def on_unreachable(self) -> None:
        """An attempt to connect failed; whoever waits for the peer may ask its link why."""
        self._on_change()

    @abstractmethod
    def _refusal(self, info: Info) -> str | None:
        """Why a peer of this description must not be used, or None."""

    def on_down(self) -> None:
        subjects, self.subjects = list(self.subjects.values()), {}
        for subject in subjects:
            with guarded(subject):
                self._tell_lost(subject)
        self._on_change()

    @abstractmethod
    def _tell_lost(self, subject: Subject) -> None:
        """The session's peer is gone."""


class VerifierPeer(Peer[verify_pb2.ConnectVerifyRequest, VerifierSubject]):
    """`forward_times` is V(m) as the verifier measured it, refined from its steps of one session.

    `draining`: it is about to stop, and takes no sessions.
    `identity`: of its model; None before it has said what that is.

    `experience`: what sessions here learnt about their drafters.
    """

    link: VerifierLink

    def __init__(
        self,
        link: VerifierLink,
        on_change: Callable[[], None],
        accept: Callable[[Info], str | None],
    ) -> None:
        super().__init__(link, on_change)
        self.draining = False
        self.identity: Identity | None = None
        self.forward_times = ForwardTimes({1: 10_000.0})
        self.experience = Experience()
        self._accept = accept
        self._lost_at: float | None = None
        self._failures = 0

    @property
    def takes_sessions(self) -> bool:
        return self.up and not (self.draining or self.report.draining)

    def serves(self, identity: Identity, length: int = 0) -> bool:
        """Sessions of such a model, whose texts may become so long."""
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
        """Its link was lost a moment ago, and may be there again in another: it keeps its sessions for them.

        One that has said that it stops takes them along.
        """
        if self.draining or self._lost_at is None or self._failures >= HOPELESS_FAILURES:
            return False
        return time.monotonic() - self._lost_at < PREFERENCE

    def on_up(self, info: Info) -> None:
        self._lost_at = None
        self.draining = False
        before, self.identity = self.identity, Identity.of(info)
        if self.identity != before:
            self.experience = Experience()  # what was learnt is of another model
        super().on_up(info)

    def on_down(self) -> None:
        self._lost_at, self._failures = time.monotonic(), 0
        super().on_down()

    def on_unreachable(self) -> None:
        """Also called for the loss itself."""
        self._failures += 1
        super().on_unreachable()

    def _refusal(self, info: Info) -> str | None:
        measured = {time.rows: max(1.0, float(time.microseconds)) for time in info.forward_times}
        if measured:
            self.forward_times = ForwardTimes(measured)
        return self._accept(info)

    def _tell_lost(self, subject: VerifierSubject) -> None:
        subject.on_verifier_lost()

    def on_message(self, message: verify_pb2.ConnectVerifyResponse) -> None:
        received_ns = time.monotonic_ns()
        if message.draining and not self.draining:
            logger.info("%s is draining", self.link.address)
        self.draining |= message.draining
        timings = message.timings
        if timings.sessions == 1 and timings.rows <= MOST_OBSERVED_ROWS:
            self.forward_times.observe(timings.rows, timings.forward_us + timings.choose_us)
        for opened in message.opened:
            if (subject := self.subjects.get(opened.handle)) is not None:
                with guarded(subject):
                    subject.on_opened(opened)
                    for verdict in opened.tail:
                        subject.on_verdict(verdict, verify_pb2.StepTimings(), received_ns)
        for verdict in message.verdicts:
            if (subject := self.subjects.get(verdict.handle)) is not None:
                with guarded(subject):
                    subject.on_verdict(verdict, timings, received_ns)
        for refused in message.refused:
            if (subject := self.subjects.pop(refused.handle, None)) is not None:
                with guarded(subject):
                    subject.on_refused_by_verifier(refused)

    def forget(self, session_id: str) -> None:
        """The session was deleted: nothing of it is to stay there."""
        if self.up:
            self.link.send(verify_pb2.ConnectVerifyRequest(forgotten=[session_id]))

    def close(self, handle: int) -> None:
        if self.subjects.pop(handle, None) is not None:
            self.link.send(verify_pb2.ConnectVerifyRequest(closes=[common_pb2.Close(handle=handle)]))


class DrafterPeer(Peer[draft_pb2.ConnectDraftRequest, DrafterSubject]):
    """A drafter; it may vanish at any time. `accept` says why a description must not be used, or None.

    `_strays` is what it may say, in tokens or else replies, that no open session's quota is charged for.
    """

    def __init__(self, link: DrafterLine, on_change: Callable[[], None], accept: Callable[[Info], str | None]) -> None:
        super().__init__(link, on_change)
        self._accept = accept
        self._strays = Quota(MOST_STRAYS)

    def _refusal(self, info: Info) -> str | None:
        return self._accept(info)

    def _tell_lost(self, subject: DrafterSubject) -> None:
        subject.on_drafter_lost()

    def on_up(self, info: Info) -> None:
        self._strays = Quota(MOST_STRAYS)
        super().on_up(info)

    def attach(self, subject: DrafterSubject) -> int:
        self._strays.ask(ANSWERS)
        return super().attach(subject)

    def on_message(self, message: draft_pb2.ConnectDraftResponse) -> None:
        if not self._hear(message):
            self.link.cut("the drafter sent replies for sessions that it was not asked for")

    def _hear(self, message: draft_pb2.ConnectDraftResponse) -> bool:
        """Whether all of it was asked for; what follows the first part that was not is not heard."""
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
                self._strays.ask(MOST_RELAYED)  # what it had on its way may follow
                with guarded(subject):
                    subject.on_refused_by_drafter(refused)
            elif not self._strays.take(1):
                return False
        return True

    def close(self, handle: int, owed: int) -> None:
        """`owed`: draft tokens that it was asked for and has not sent; they may cross the close."""
        if self.subjects.pop(handle, None) is not None:
            self._strays.ask(max(MOST_RELAYED, owed))
            self.link.send(draft_pb2.ConnectDraftRequest(closes=[common_pb2.Close(handle=handle)]))


def verifier_link(
    address: str, tls: ClientTls | None, token: str = "", tokenizers: Tokenizers | None = None
) -> VerifierLink:
    return Link(
        address,
        lambda channel: verify_pb2_grpc.VerifyServiceStub(channel).Connect(),
        lambda channel, request: verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(request),
        tls,
        token,
        tokenizers,
    )


def drafter_link(address: str, tls: ClientTls | None, token: str = "") -> DrafterLink:
    return Link(
        address,
        lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Connect(),
        lambda channel, request: draft_pb2_grpc.DraftServiceStub(channel).GetModelInfo(request),
        tls,
        token,
    )
