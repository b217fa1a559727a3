"""What drafters and the texts propose for the requests of a vLLM server: an orchestrator's part of drafting, beside it.

vLLM tells after each step what it decided, row by row, and takes what to test next. A row has no name, so a request is
known by its text. All of it runs in one event loop, which owns it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from orchestrator.peers.discovery import Place, RegistryFeed, SessionAffinity
from orchestrator.peers.models import Info, Tokenizers, vocabulary_mismatch
from orchestrator.peers.peer import AnyPeer, Dialled, DrafterPeer
from orchestrator.pool import chosen_drafter
from orchestrator.session.drafters import RETRY, SessionDrafter
from orchestrator.store import SessionRecord
from specwire.core import messages
from specwire.core.law.sampling import Sampling
from specwire.core.messages import MOST_WINDOW, Pace, SourceKind, Verdict
from specwire.core.placement import PlacementRequest
from specwire.core.policy.costs import StepCosts, part_of
from specwire.core.policy.drafters import LearntDrafters, PlannedStep
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.policy.windows import divided
from specwire.core.text import Ending, Stopping
from specwire.core.verify.session import Allowance, RunningSession, VerifySession
from specwire.registry.directory import Directory
from specwire.registry.entry import Role
from specwire.rpc import convert
from specwire.rpc.channel import check_token_is_safe
from specwire.rpc.keys import Token
from specwire.rpc.model_info import core_numbers, host_id
from specwire.rpc.renewal import Renewal
from specwire.rpc.tls import ClientTls
from specwire.telemetry.tally import DrafterCounts
from specwire.telemetry.tracing import NO_SPAN
from specwire.v1 import common_pb2

logger = logging.getLogger("vllm.specwire")  # below vLLM's own logger, which has handlers

# Drafters are not told how a request is drawn, for vLLM does not say: they draft what is most probable.
GREEDY = Sampling()
# A row belongs to a request if so many of the last tokens agree.
COMPARED = 32
# Seconds for which a request that is in no step is kept: it may have been preempted.
KEPT_S = 2.0
# Steps without draft tokens from which V(1) is taken, before anything is proposed, and what a further row is thought to
# add to it until it is measured.
FIRST_STEPS = 4
ROW_SHARE = 0.02
# Tokens that a drafter which is off is told of at once.
MOST_UNTOLD = 64
# All requests know of the drafters what others learnt.
OWN = b"vllm"
# A step that takes this many times as long as V(1) is no step: nothing was computed in between.
PAUSE = 20.0


class VllmRow(NamedTuple):
    """A row of vLLM's batch: the text's ids, of which `length` are valid, and the last ones of these just decided."""

    ids: Any
    length: int
    decided: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VllmTarget:
    """What drafting has to know of a vLLM server.

    vocabulary: number of ids. context: longest text in tokens. most: draft tokens that a step may test of a request.
    leads: of the worker's processes, this is the one whose proposals count. device: on which vLLM computes.
    """

    model: str
    vocabulary: int
    vocabulary_fingerprint: str
    context: int
    most: int
    leads: bool
    device: str


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """plan: see `specwire.core.messages.parse_plan`. ngram: propose from the text itself, too.

    drafters: HOST:PORT each. registry: URL of Redis, where more are found. tls, token: for all of them.
    """

    plan: str = "auto"
    ngram: bool = True
    drafters: tuple[str, ...] = ()
    registry: str = ""
    tls: ClientTls | None = None
    token: Token | str = ""


class Request:
    """A request of vLLM: its text, what is proposed for it, and the drafter that drafts for it.

    window: what its next step tests, of a source of `kind`. told, paced: the length of the text, and the pace, that its
    drafter knows.
    rests: drafters that refused it, and until when.
    """

    def __init__(self, number: int, row: VllmRow, engine: VllmTarget, ngram: bool, now_s: float) -> None:
        tokens = row.ids[: row.length].tolist()
        self.number = number
        self.row = -1
        self.seen_s = now_s
        self.window: tuple[int, ...] = ()
        self.kind = SourceKind.DRAFTER
        self.source: int | None = None
        self.drafter: SessionDrafter | None = None
        self.pace = self.paced = Pace()
        self.told = 0
        self.sources = itertools.count(1)
        self.rests: dict[DrafterPeer, float] = {}
        self.refusals: Counter[DrafterPeer] = Counter()
        ending = Ending(engine.context, frozenset(), frozenset())
        session = VerifySession.opened(
            tokens, len(tokens), GREEDY, ending, self._allowance(len(tokens), engine), engine.vocabulary, ngram
        )
        self.running = RunningSession(session, now_s * 1e6)
        self.record = SessionRecord(
            f"vllm-{number}",
            tuple(tokens),
            GREEDY,
            Stopping(engine.context),
            vocabulary_fingerprint=engine.vocabulary_fingerprint,
        )
        self._engine = engine

    @staticmethod
    def _allowance(length: int, engine: VllmTarget) -> Allowance:
        """Room for a window, and for the token behind it."""
        return Allowance(length, length + engine.most + 1)

    @property
    def session(self) -> VerifySession:
        return self.running.session

    def is_at(self, row: VllmRow) -> bool:
        """Whether this row goes on with the request's text."""
        known = self.session.text.tokens
        start = row.length - len(row.decided)
        if start != len(known):
            return False
        tail = known[-COMPARED:]
        compared: list[int] = row.ids[start - len(tail) : start].tolist()
        return compared == tail

    def decide(self, decided: tuple[int, ...]) -> Verdict:
        """Take in what vLLM decided. It may have tested less than the window: for want of room in the step, say."""
        window = self.window
        right = next((at for at, (a, b) in enumerate(zip(decided, window, strict=False)) if a != b), len(decided))
        if right == len(decided) <= len(window):
            window = window[: len(decided) - 1]
        chosen = (*decided, *(-1 for _ in range(len(window) + 1 - len(decided))))
        verdict = self.session.resolve(chosen, window, self.kind, self.source)
        self.session.allow(self._allowance(self.session.position, self._engine))
        return verdict


class Drafting:
    """All requests of one vLLM server, and the drafters. now_s: a monotonic clock."""

    def __init__(
        self, engine: VllmTarget, options: DraftingOptions, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._options = options
        self._now_s = now_s
        self._info = Info(
            model=engine.model,
            vocabulary=engine.vocabulary,
            vocabulary_fingerprint=engine.vocabulary_fingerprint,
            device=engine.device,
            host_id=host_id(),
            cores=core_numbers(),
        )
        self._learnt = LearntDrafters()
        self._costs: StepCosts | None = None
        self._first_us: list[float] = []
        self._numbers = itertools.count(1)
        self._requests: dict[int, Request] = {}
        # Of the last step: rows' requests, what their drafters are to be told, and when it ended.
        self._rows: list[Request | None] = []
        self._untold: list[Request] = []
        self._ended_us: float | None = None
        self._offered = False
        self._dialled = Dialled(options.tls, options.token, Tokenizers(), lambda: None, {})
        self.drafters = [self._dialled.drafter(address, self._accept) for address in options.drafters]
        self._feed: RegistryFeed | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._renewal: Renewal | None = None

    # Drafters

    def start(self) -> None:
        """Dial the drafters."""
        tls, token, registry = self._options.tls, self._options.token, self._options.registry
        shown = [None if tls is None else tls.origin, token.origin if isinstance(token, Token) else None]
        self._renewal = Renewal(shown)
        for peer in self.drafters:
            self._dialled.start(peer)
        if registry:
            self._feed = RegistryFeed(
                Directory.at(registry), SessionAffinity(), self._find, self._dial, self._drop, lambda _: None
            )
            self._feeding = asyncio.get_running_loop().create_task(self._feed.run())

    async def stop(self) -> None:
        """End every session and link."""
        self.leave()
        if self._renewal is not None:
            await self._renewal.stop()
        if self._feeding is not None and self._feed is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
            await self._feed.close()
        await self._dialled.stop()

    def leave(self) -> None:
        """Forget all requests; drafters are told."""
        for request in list(self._requests.values()):
            self._forget(request)

    def _accept(self, info: Info) -> str | None:
        return vocabulary_mismatch(self._info, info)

    def _find(self, place: Place) -> AnyPeer | None:
        role, address = place
        found = (peer for peer in self.drafters if role is Role.DRAFTER and peer.link.address == address)
        return next(found, None)

    def _dial(self, place: Place) -> AnyPeer:
        _, address = place
        check_token_is_safe(address, self._options.tls, self._options.token)
        peer = self._dialled.drafter(address, self._accept)
        self.drafters.append(peer)
        self._dialled.start(peer)
        return peer

    def _drop(self, peer: AnyPeer) -> None:
        self.drafters = [each for each in self.drafters if each is not peer]
        self._dialled.drop(peer)

    # A step

    @property
    def idle(self) -> bool:
        """Whether nobody could propose anything."""
        return not self._options.ngram and not any(peer.up for peer in self.drafters)

    @property
    def nothing_offered(self) -> bool:
        """Whether nothing is there to be proposed: vLLM need not wait for `step`. May be asked in any thread."""
        return not (self._options.ngram or self._offered)

    def step(self, rows: Sequence[VllmRow]) -> list[list[int]]:
        """Take in a step of vLLM; returns, row by row, what the next one is to test. `settle` goes behind it."""
        requests = self._heard(rows, self._now_s() * 1e6)
        windows = self._windows([each for each in requests if each is not None and each.number in self._requests])
        proposed = [list(windows.get(each.number, ())) if each is not None else [] for each in requests]
        self._ended_us = self._now_s() * 1e6
        return proposed

    def note(self, rows: Sequence[VllmRow], ended_s: float) -> None:
        """Take in a step of vLLM that ended then, and did not wait: the next one tests nothing. Then `settle`.

        ended_s: by the clock of this object.
        """
        self._heard(rows, ended_s * 1e6)
        self._ended_us = ended_s * 1e6

    def _heard(self, rows: Sequence[VllmRow], now_us: float) -> list[Request | None]:
        """Take in what was decided, by then; nothing is to be tested yet. Returns each row's request."""
        took_us = None if self._ended_us is None else now_us - self._ended_us
        requests = self._identified(rows)
        alike = requests == self._rows and all(each is not None and each.row >= 0 for each in requests)
        self._decided(rows, requests, now_us, took_us if alike else None)
        self._rows = requests
        for request in requests:
            if request is not None:
                request.window = ()
        return requests

    def settle(self) -> None:
        """Tell drafters what the step decided, and find one for who has none: vLLM does not wait for that."""
        untold, self._untold = self._untold, []
        for request in untold:
            with self._containing(request):
                if request.drafter is not None:
                    self._advance(request, request.drafter)
        self._offered = any(each is not None and each.session.best.nodes for each in self._rows)
        if self._costs is not None and self.drafters:
            now_s = self._now_s()
            for each in self._rows:
                if each is not None and each.drafter is None and each.number in self._requests:
                    with self._containing(each):
                        self._assign(each, now_s)

    @contextmanager
    def _containing(self, request: Request) -> Iterator[None]:
        """What fails for one request ends what is proposed for it, until its text is met again."""
        try:
            yield
        except Exception as error:
            self._break_off(request, error)

    def _break_off(self, request: Request, error: Exception) -> None:
        position = request.session.position
        logger.error("specwire: proposing failed for a request at position %d", position, exc_info=error)
        request.window = ()
        if request.number in self._requests:
            self._forget(request)

    def _identified(self, rows: Sequence[VllmRow]) -> list[Request | None]:
        """The request of each row that a token was decided for; a new one where none has its text."""
        found: list[Request | None] = [None] * len(rows)
        left: list[int] = []
        for at, row in enumerate(rows):
            if not row.decided:
                continue
            known = self._rows[at] if at < len(self._rows) else None
            if known is not None and known.number in self._requests and known.is_at(row):
                found[at] = known
            else:
                left.append(at)
        if left:
            taken = {each.number for each in found if each is not None}
            by_length: defaultdict[int, list[Request]] = defaultdict(list)
            for request in self._requests.values():
                if request.number not in taken:
                    by_length[request.session.position].append(request)
            for at in left:
                alike = by_length[rows[at].length - len(rows[at].decided)]
                match = next((each for each in alike if each.is_at(rows[at])), None)
                if match is not None:
                    alike.remove(match)
                    match.row = -1
                found[at] = match or self._begun(rows[at])
        return found

    def _begun(self, row: VllmRow) -> Request:
        request = Request(next(self._numbers), row, self._engine, self._options.ngram, self._now_s())
        self._requests[request.number] = request
        return request

    def _decided(
        self, rows: Sequence[VllmRow], requests: Sequence[Request | None], now_us: float, took_us: float | None
    ) -> None:
        """took_us: what the step took that these rows had to themselves; None where others shared it."""
        decoding = [each for each in requests if each is not None]
        windows, sessions = sum(len(each.window) for each in decoding), len(decoding)
        plain_us = self._measured(sessions, windows, took_us)
        charged = self._costs if windows else None
        windows_us = 0.0 if charged is None else charged.windows_us(sessions, sessions + windows)
        for at, (row, request) in enumerate(zip(rows, requests, strict=True)):
            if request is None:
                continue
            request.seen_s, fresh = now_us / 1e6, request.row < 0 and request.session.position == row.length
            request.row = at
            if fresh:
                continue  # it begins with this text
            with self._containing(request):
                part = part_of(len(request.window), windows, sessions)
                verdict = request.decide(row.decided)
                request.running.decided(now_us, len(verdict.tokens), plain_us, part * windows_us)
                self._plan(request, verdict, sessions)
                if request.drafter is not None:
                    self._untold.append(request)

    def _plan(self, request: Request, verdict: Verdict, sessions: int) -> None:
        if self._costs is None:
            return
        spare_us = request.session.ledger.spare_us(self._costs.plain(1))
        for each in request.running.planned(verdict, PlannedStep(sessions, self._costs.of, spare_us)):
            request.pace = each.pace

    def _measured(self, sessions: int, windows: int, took_us: float | None) -> float | None:
        """Learn what steps take. Returns a plain step's time where this was none."""
        if took_us is None or not sessions:
            return None
        if self._costs is None:
            if not windows:
                self._learn_first(took_us)
            return None
        costs = self._costs
        if took_us > PAUSE * costs.plain(sessions):
            costs.interrupted()
            return None
        return costs.observe(sessions, sessions + windows, took_us, 0.0, waited=False)

    def _learn_first(self, took_us: float) -> None:
        self._first_us.append(took_us)
        if len(self._first_us) == FIRST_STEPS:
            plain_us = sorted(self._first_us)[FIRST_STEPS // 2]
            widths = range(1, MOST_WINDOW + 2)
            self._costs = StepCosts(ForwardTimes({m: plain_us * (1 + ROW_SHARE * (m - 1)) for m in widths}))

    def _windows(self, requests: Sequence[Request]) -> dict[int, tuple[int, ...]]:
        costs = self._costs
        if costs is not None and (self._options.ngram or any(each.session.best.nodes for each in requests)):
            plain_us = costs.plain(1)
            candidates = []
            for each in requests:
                with self._containing(each):
                    if each.session.room > 1:
                        candidates.append(each.running.candidate(each.number, each.session.position - 1, plain_us))
            most_rows = len(candidates) if costs.seen(len(requests)).plain_due else math.inf
            windows = divided(candidates, costs.of(len(requests)), most_rows) if candidates else None
            for request in requests:
                if windows is not None and request.number in self._requests:
                    with self._containing(request):
                        width, request.kind = windows.of(request.number)
                        request.source = request.session.source if request.kind is SourceKind.DRAFTER else None
                        request.window = request.session.window(width, request.kind)
        return {request.number: request.window for request in requests}

    # A request's drafter

    def _assign(self, request: Request, now_s: float) -> None:
        """Let a drafter that has room draft for it, if there is one."""
        request.rests = {peer: until for peer, until in request.rests.items() if until > now_s}
        able = [peer for peer in self.drafters if peer.up and peer not in request.rests]
        wish = PlacementRequest(request.record.session_id, self._engine.vocabulary_fingerprint)
        peer = chosen_drafter(able, request.refusals, wish) if able else None
        if peer is None:
            return
        source = next(request.sources)
        counts = DrafterCounts(source, peer.info.model if peer.info is not None else "")
        request.drafter = drafter = SessionDrafter(
            source,
            peer,
            request.record,
            self._options.plan,
            counts,
            lambda said: self._hear(request, said),
            lambda lost: self._part(request, lost),
            lambda refuser, _: self._refused(request, refuser),
            lambda error: self._break_off(request, error),
        )
        request.session.assign([drafter.told(self._info)], partial(self._learnt.of, OWN), waits=False)
        drafter.begin(self._info)
        for each in request.running.new_paces():
            request.pace = each.pace

    def _advance(self, request: Request, drafter: SessionDrafter) -> None:
        """Tell its drafter what was decided; one that knows that it is off hears it when it is to draft again."""
        session = request.session
        drafts = request.pace.run_ahead or request.paced.run_ahead
        if drafts or session.position - request.told >= MOST_UNTOLD:
            tokens = tuple(session.text.tokens[request.told :])
            drafter.advance(messages.AdvanceDrafter(drafter.source, request.told, tokens, request.pace), epoch=0)
            request.told, request.paced = session.position, request.pace

    def _hear(self, request: Request, said: messages.Event) -> None:
        """Hear what a drafter's part in the request reports."""
        match said:
            case messages.DrafterReady(source, pace):
                request.pace = pace
                if request.drafter is not None:
                    tokens = tuple(request.session.text.tokens)
                    request.told, request.paced = len(tokens), pace
                    request.drafter.open(messages.OpenDrafter(source, tokens, pace), 0, NO_SPAN)
            case messages.ProposalArrived(common_pb2.Proposal() as proposal):
                request.running.propose(convert.proposal_from_wire(proposal), self._now_s() * 1e6)
                self._offered = True

    def _part(self, request: Request, lost: SessionDrafter) -> None:
        """Its drafter is gone: another one takes over at the next step."""
        if request.drafter is lost:
            request.session.chains.drop(lost.source)
            request.session.assign([], partial(self._learnt.of, OWN), waits=False)
            request.drafter = None

    def _refused(self, request: Request, refuser: SessionDrafter) -> None:
        request.refusals[refuser.peer] += 1
        request.rests[refuser.peer] = self._now_s() + RETRY * 2 ** min(5, request.refusals[refuser.peer] - 1)
        self._part(request, refuser)

    # Requests that have ended

    def sweep(self) -> None:
        """Forget requests that are in no step any more."""
        now_s = self._now_s()
        for request in list(self._requests.values()):
            if now_s - request.seen_s > KEPT_S:
                self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.number]
        if (drafter := request.drafter) is not None:
            drafter.close()
            request.drafter = None
