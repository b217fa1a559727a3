"""The sessions of a drafter: one model, one slot of its cache for each, all drafted for in one forward.

Belongs to one thread, which looks for commands before every token, so that an advance that contradicts a tree takes
effect at the next one. A session's slot holds a prefix of its text, and behind all of that rows of draft tokens that
descend from it. What is decided of them moves to the front, what is pruned goes; where the text goes back the slot is
lowered, an integer, and the next feed starts there. Replies gather until they are delivered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import exp
from typing import Any, NamedTuple, Protocol, TypeVar

from specwire.core.draft import (
    MOST_CANDIDATES,
    CandidateRates,
    Desynchronised,
    DraftNode,
    DraftRow,
    DraftSession,
    Drawn,
    check_pace,
    check_tokens,
)
from specwire.core.invalid import Code, InvalidParameter
from specwire.core.law.constraint import Mask, Matcher, open_ids
from specwire.core.law.sampling import Sampling, Seen, seen_in
from specwire.core.messages import Pace, Proposal
from specwire.core.model import Feed, SlotModel, TreeFeed
from specwire.core.text import extend_hash
from specwire.rpc.service_thread import Inbox, Stop
from specwire.telemetry.tally import DrafterTally

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# What the event loop tells the drafter's thread, and what that thread tells links.
#
# All of it is validated, but for the ids of an advance: the thread knows whose vocabulary they are of.


@dataclass(frozen=True, slots=True)
class Opened:
    handle: int


@dataclass(frozen=True, slots=True)
class DraftedProposal:
    """A chunk of a session's chain."""

    handle: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Dropped:
    """The session is refused or dropped, with a gRPC status code (its number) and one sentence."""

    handle: int
    code: int
    message: str


Reply = Opened | DraftedProposal | Dropped


class ReplyLink(Protocol):
    """A connected orchestrator, whose handles mean nothing on another link."""

    def send(self, replies: list[Reply]) -> None:
        """Say them, in order; called in the event loop, never blocks."""
        ...


# What the drafter's thread reports at a time.
Replies = dict[ReplyLink, list[Reply]]


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Draft for a text; replaces the session of an open handle.

    prompt_length: None where it is unknown. number: of this opening; a BeginSession with that number follows where the
    session has a constraint. vocabulary: digest of the target's, as it was told; "" where it is the drafter's own.
    """

    link: ReplyLink
    handle: int
    tokens: tuple[int, ...]
    sampling: Sampling
    pace: Pace
    epoch: int = 0
    prompt_length: int | None = None
    number: int = 0
    vocabulary: str = ""


@dataclass(frozen=True, slots=True)
class BeginSession:
    """The constraint of a session; None: draft without one, and let the target refuse what is not allowed."""

    link: ReplyLink
    handle: int
    number: int
    matcher: Matcher | None


@dataclass(frozen=True, slots=True)
class AdvanceSession:
    link: ReplyLink
    handle: int
    position: int
    tokens: tuple[int, ...]
    pace: Pace
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class LearnVocabulary:
    """A target's vocabulary, which is not the drafter's. `digest` is over all of it; width: ids are below that.

    tokenizer_zlib: not trusted.
    """

    digest: str
    tokenizer_zlib: bytes
    width: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class CloseSession:
    link: ReplyLink
    handle: int


@dataclass(frozen=True, slots=True)
class LoseLink:
    """The link is gone, and its sessions with it."""

    link: ReplyLink


Command = OpenSession | BeginSession | AdvanceSession | CloseSession | LoseLink | LearnVocabulary


# ----------------------------------------------------------------------------------------------------------------------
# What the thread drafts with.

# How long after a forward a constraint may answer before its token is drafted without.
MOST_LATE_S = 0.02
# A longer feed is part of a long text. After an advance a feed is the corrected token, and one more.
LONGEST_OWN_FEED = 2
# Rows of long texts fed at once, all sessions together: others' next tokens wait no longer than for these.
LONG_TEXT_ROWS = 256
# What a forward's further nodes count for, as a share of their probability: a level that takes longer delays all that
# stands on the likeliest path. Less than half is best where rows cost much, and as good as 1 where they do not
# (simulated cells).
FURTHER_WORTH = 0.3
# Of the times of forwards by their rows: the share of its weight that one keeps with each new one; how many times as
# long as expected one may count; and the variance of the rows from which on a row's share is told.
KEPT_SHARE, LONGEST_COUNTED, LEAST_SPREAD = 0.98, 3.0, 0.25

# What a session is told that ends by a fault of the drafter's.
FAILED = "the drafter failed at this text; its log says why"

Key = tuple[ReplyLink, int]
T = TypeVar("T")


class Computed(NamedTuple):
    """What a forward returned: what follows the i-th wanted row is in `answers`, or in row at[i] of `rows`.

    A model that takes texts in others' ids returns it (`draft_service.translation`).
    """

    rows: Any
    at: Sequence[int]
    answers: dict[int, Drawn]


@dataclass(slots=True)
class DraftingSession:
    """One session: `spent_ns` counts since its last proposal.

    number: of its opening. unready: its constraint is being compiled. matcher: that constraint, behind a part of the
    output; None where there is none, or it is unknown here. rows: the draft tokens that the slot holds behind the text.
    vocabularies: the target's and the drafter's, where these differ (`specwire.text.vocabulary_map.VocabularyMap`); all
    ids of the session are the target's.
    """

    link: ReplyLink
    handle: int
    slot: int
    sampling: Sampling
    session: DraftSession
    prompt_length: int
    number: int = 0
    unready: bool = False
    matcher: Matcher | None = None
    spent_ns: int = 0
    rows: list[DraftNode] = field(default_factory=list)
    vocabularies: Any = None

    @property
    def wants_token(self) -> bool:
        return self.session.wants_token and not self.unready

    def _catch_up(self, node: DraftNode) -> bool:
        """Let the matcher take the text up to `node`; False where the constraint forbids it or has not answered."""
        if self.matcher is None or not self.matcher.heard(MOST_LATE_S):
            return False
        missing = self._text(node)[self.prompt_length + self.matcher.length :]
        return self.matcher.take(missing) == len(missing)

    def _text(self, node: DraftNode) -> list[int]:
        return [*self.session.text.tokens, *self.session.path(node)]

    def ask(self, node: DraftNode) -> None:
        """Announce that `allowed` will be wanted, so that it is computed during the forward."""
        if self.matcher is not None and self._catch_up(node):
            self.matcher.ask(())

    def allowed(self, node: DraftNode) -> Mask | None:
        """The ids allowed behind the text up to `node`; None for any, also where that itself violates the constraint.

        A session with a constraint drafts chains: a matcher knows one line.
        """
        if self.matcher is None or not self._catch_up(node):
            return None
        return open_ids(self.matcher.masks(())[0], ())

    def kept(self, length: int) -> None:
        """The text has changed from position `length` on."""
        if self.matcher is not None:
            self.matcher.rollback(max(0, length - self.prompt_length))

    def seen(self, node: DraftNode) -> Seen | None:
        """The text up to `node`, where penalties look at it."""
        return seen_in(self._text(node), self.prompt_length) if self.sampling.penalised else None


class Expansion(NamedTuple):
    """A place to draft behind: a session's text up to `node`. most: candidates to tell."""

    drafting: DraftingSession
    node: DraftNode
    most: int

    @property
    def position(self) -> int:
        """Where the candidates stand."""
        return self.node.position + 1

    @property
    def path(self) -> tuple[int, ...]:
        """The draft tokens that lead there from the decided text."""
        return self.drafting.session.path(self.node)

    def row(self) -> DraftRow:
        """What its row of logits is for."""
        drafting, session = self.drafting, self.drafting.session
        prefix = reduce(extend_hash, self.path, session.text.hash_at(session.decided)) if session.weighed else None
        own = self.most, prefix, session.epoch, drafting.vocabularies
        return DraftRow(self.position, drafting.sampling, drafting.seen(self.node), drafting.allowed(self.node), *own)


# What may follow each of the places, from its row of what a forward returned: `rows` says from which. Of tensors:
# `specwire.lm.guesses.guesses`.
Draw = Callable[[Any, Sequence[int], Sequence[Expansion]], list[Drawn]]


class DraftForward(NamedTuple):
    """What a forward feeds: of each session of `batch`, the nodes that it extends, and its feed.

    rows: of all that is fed. short: nothing in it catches up with a long text.
    """

    batch: list[DraftingSession]
    chosen: list[list[DraftNode]]
    feeds: list[Feed]
    rows: int
    short: bool
    began_ns: int


def weight(command: Command) -> int:
    """See `Inbox`."""
    return 1 + len(command.tokens) if isinstance(command, AdvanceSession | OpenSession) else 1


class RowTimes:
    """How long a forward of so many rows takes: a line, fitted to decayed sums; microseconds.

    As long as forwards of different widths were not seen lately, rows are thought to cost nothing: then a wide one is
    tried, and one that was measured in a bad moment is tried again.
    """

    def __init__(self) -> None:
        self._count = self._rows = self._times = self._squares = self._products = 0.0
        self.row_us = 0.0

    def observe(self, rows: int, time_us: float) -> None:
        """Note a forward. Schedulers have hiccups: it counts for at most LONGEST_COUNTED times what was expected."""
        if self._count:
            time_us = min(time_us, LONGEST_COUNTED * self.at(rows))
        self._count = KEPT_SHARE * self._count + 1.0
        self._rows = KEPT_SHARE * self._rows + rows
        self._times = KEPT_SHARE * self._times + time_us
        self._squares = KEPT_SHARE * self._squares + rows * rows
        self._products = KEPT_SHARE * self._products + rows * time_us
        spread = self._squares - self._rows**2 / self._count
        shared = self._products - self._rows * self._times / self._count
        self.row_us = max(0.0, shared / spread) if spread > LEAST_SPREAD * self._count else 0.0

    def at(self, rows: int) -> float:
        """What a forward of so many rows is expected to take; 1.0 where none was seen."""
        if not self._count:
            return 1.0
        mean = self._rows / self._count
        return max(1.0, self._times / self._count + self.row_us * (rows - mean))


class Sessions:
    """Invariant: the slots of open sessions and the free ones are 0 .. model.slots - 1, each once.

    Commands go into `inbox`, from any thread; `deliver` gets the replies for each link, and must not block.
    texts: makes of the model one that takes texts in the target's ids, once a session told another vocabulary.
    """

    def __init__(
        self,
        model: SlotModel,
        draw: Draw,
        deliver: Callable[[Replies], None],
        now_ns: Callable[[], int] = time.perf_counter_ns,
        texts: Callable[[SlotModel], Any] | None = None,
    ) -> None:
        self._draw = draw
        self._now_ns = now_ns
        self.inbox: Inbox[Command] = Inbox(weight)
        self.step_began_s: float | None = None
        self._deliver = deliver
        self._lm, self._texts = model, texts
        self._model: Any = model
        self._context, self._vocabulary = model.info.context, model.info.vocabulary
        self._free = list(range(model.slots))
        self._open: dict[Key, DraftingSession] = {}
        self._replies: Replies = {}
        # By whether the text is greedy: elsewhere a candidate's score contains the target's noise.
        self._rates = {greedy: CandidateRates() for greedy in (True, False)}
        self._row_times = RowTimes()
        self.tally = DrafterTally()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def wanting(self) -> int:
        """How many sessions want a token."""
        return sum(drafting.wants_token for drafting in self._open.values())

    def run(self) -> None:
        """Run steps until a Stop arrives."""
        while self._take_commands():
            self.step_began_s = time.monotonic()
            self.step()
            self.step_began_s = None
            self.deliver()

    # Commands

    def _take_commands(self) -> bool:
        """Apply waiting commands, and wait if there is nothing else to do; False once asked to stop."""
        while not self.inbox.empty() or not self.wanting:
            command = self.inbox.get()
            if isinstance(command, Stop):
                return False
            self.apply(command)
            if self.inbox.empty():
                self.deliver()
        return True

    def apply(self, command: Command) -> None:
        match command:
            case AdvanceSession():
                self._advance(command)
            case OpenSession():
                self._start(command)
            case LearnVocabulary():
                self._learn(command)
            case BeginSession():
                self._begin(command)
            case CloseSession():
                self._end((command.link, command.handle))
            case LoseLink():
                self._lose(command.link)

    def _learn(self, command: LearnVocabulary) -> None:
        """Once a vocabulary was told, slots may hold texts in its ids; before, nobody asks whose they are."""
        if self._model is self._lm and self._texts is not None:
            self._model = self._texts(self._lm)
        self._model.learn(command)

    def _start(self, command: OpenSession) -> None:
        key = (command.link, command.handle)
        old = self._open.get(key)
        # Proposals of the old session may still be under way: the new session's chains must supersede them.
        chain = old.session.chain + 1 if old else 0
        self._end(key)
        if not self._free:
            message = f"all {self._model.slots} slots of this drafter are taken"
            self._drop(key, Code.RESOURCE_EXHAUSTED, message)
            return
        try:
            vocabularies = self._model.vocabularies_of(command.vocabulary) if command.vocabulary else None
        except ValueError as error:
            self._drop(key, Code.FAILED_PRECONDITION, f"vocabulary_fingerprint: {error}")
            return
        sampling = command.sampling
        branching = self._model.branches and sampling.guessed and sampling.constraint is None and vocabularies is None
        session = DraftSession(
            command.tokens,
            command.pace,
            chain,
            self._context if vocabularies is None else None,
            sampling.weighed,
            command.epoch,
            branching=branching,
            rates=self._rates[sampling.temperature == 0.0],
        )
        self.tally.opened += 1
        prompt_length = len(command.tokens) if command.prompt_length is None else command.prompt_length
        slot = self._free.pop()
        if vocabularies is not None:
            self._model.translate(slot, vocabularies)
        self._open[key] = drafting = DraftingSession(
            command.link, command.handle, slot, sampling, session, prompt_length, command.number
        )
        drafting.unready, drafting.vocabularies = sampling.constraint is not None, vocabularies
        self._reply(command.link, Opened(command.handle))

    def _begin(self, command: BeginSession) -> None:
        """Begin a session, unless the handle belongs to another one by now."""
        drafting = self._open.get((command.link, command.handle))
        if drafting is not None and drafting.number == command.number:
            drafting.matcher, drafting.unready = command.matcher, False

    def _advance(self, command: AdvanceSession) -> None:
        """An unknown handle is no fault of the sender: a Dropped may be on its way to it."""
        key = (command.link, command.handle)
        drafting = self._open.get(key)
        if drafting is None:
            return
        vocabularies = drafting.vocabularies
        limit = self._vocabulary if vocabularies is None else vocabularies.target.width
        try:
            check_pace(command.pace, drafting.sampling)
            check_tokens(command.tokens, limit)
        except InvalidParameter as error:
            self._drop(key, Code.INVALID_ARGUMENT, str(error))
            return
        due, late = drafting.session.lateness(command.position + len(command.tokens))
        self.tally.due += due
        self.tally.late += late
        try:
            kept = drafting.session.advance(command.position, command.tokens, command.pace, command.epoch)
        except Desynchronised as error:
            self._drop(key, Code.FAILED_PRECONDITION, f"position: {error}")
            return
        drafting.kept(kept)
        self._settle(drafting, kept)
        self._propose(drafting)

    def _settle(self, drafting: DraftingSession, kept: int) -> None:
        """Let the slot hold what is left: of the text what was there before, then the draft tokens that are live.

        Decided ones are the first rows of those that stay, since a token is fed behind its parent.
        """
        slot, cached = drafting.slot, self._model.cached(drafting.slot)
        trunk = cached - len(drafting.rows)
        stay = [at for at, node in enumerate(drafting.rows) if node.live or node.decided]
        if kept < trunk:
            stay = []
        rest = min(kept, trunk) + len(stay)
        if stay and stay[-1] >= len(stay):
            self._model.keep(slot, trunk, [trunk + at for at in stay])
        elif rest < cached:
            self._model.rollback(slot, rest)
        self.tally.rollbacks += rest < cached
        drafting.rows = [node for at in stay if not (node := drafting.rows[at]).decided]
        for row, node in enumerate(drafting.rows):
            node.row = row

    def _end(self, key: Key) -> None:
        drafting = self._open.pop(key, None)
        if drafting is not None:
            self._model.discard(drafting.slot)
            self._free.append(drafting.slot)

    def _lose(self, link: ReplyLink) -> None:
        for key in [key for key in self._open if key[0] is link]:
            self._end(key)
        self._replies.pop(link, None)

    def _drop(self, key: Key, code: Code, message: str) -> None:
        self.tally.refused[code.name.lower()] += 1
        self._end(key)
        self._reply(key[0], Dropped(key[1], code, message))

    # Drafting

    def step(self) -> None:
        """One forward: the next token of every session that wants one, or the next part of its text."""
        forward = self.begin()
        if forward is not None:
            self.end(forward)

    def begin(self) -> DraftForward | None:
        """Choose what the next forward feeds; None while no session wants a token.

        `end` must follow before any command is applied.
        """
        batch = [drafting for drafting in self._open.values() if drafting.wants_token]
        if not batch:
            return None
        began_ns = self._now_ns()
        lacking = [self._lacks(drafting) for drafting in batch]
        long = sum(lacks > LONGEST_OWN_FEED for lacks in lacking)
        portion = max(LONGEST_OWN_FEED, LONG_TEXT_ROWS // max(1, long))
        pairs = zip(batch, lacking, strict=True)
        chosen = [[] if lacks > portion else [drafting.session.take()] for drafting, lacks in pairs]
        if not long:
            self._branch(batch, chosen)
        feeds = [self._feed(drafting, nodes, portion) for drafting, nodes in zip(batch, chosen, strict=True)]
        return DraftForward(batch, chosen, feeds, sum(len(feed.tokens) for feed in feeds), not long, began_ns)

    def end(self, forward: DraftForward) -> None:
        """Compute a forward, and take in what it says."""
        batch, chosen, feeds = forward.batch, forward.chosen, forward.feeds
        try:
            drawn = self._forward(batch, chosen, feeds)
        except Exception as error:  # the model's failure costs these sessions their drafter, nothing else
            log.exception("a forward of %d sessions failed", len(batch))
            self._drop_all(batch, Code.INTERNAL, f"the drafter's model failed: {type(error).__name__}")
            return
        spent = self._now_ns() - forward.began_ns
        self.tally.step(spent, forward.rows, len(drawn))
        if forward.short:
            self._row_times.observe(forward.rows, spent / 1000)
        for drafting, feed in zip(batch, feeds, strict=True):
            # A prompt, or text missed while paused, is fed once; a draft token's time is that of a feed of its own.
            own = feed.tree is not None or len(feed.tokens) <= LONGEST_OWN_FEED
            drafting.spent_ns += spent if own else spent // len(feed.tokens)
        for drafting, node, found in drawn:
            self._contained(drafting, drafting.session.extend, node, found)
        for drafting, nodes in zip(batch, chosen, strict=True):
            if nodes and self._holds(drafting):
                self._contained(drafting, self._forward_ended, drafting)

    def _forward_ended(self, drafting: DraftingSession) -> None:
        drafting.session.forward_ended()
        self._propose(drafting)

    def _holds(self, drafting: DraftingSession) -> bool:
        return self._open.get((drafting.link, drafting.handle)) is drafting

    def _contained(self, drafting: DraftingSession, act: Callable[..., T], *args: object) -> T | None:
        """What `act` returns; None where it fails, which costs this session its drafter, and no other."""
        try:
            return act(*args)
        except Exception:  # a bug of ours, at this text: the others draft on
            log.exception("a session failed")
            if self._holds(drafting):
                self._drop((drafting.link, drafting.handle), Code.INTERNAL, FAILED)
            return None

    def _branch(self, batch: Sequence[DraftingSession], chosen: Sequence[list[DraftNode]]) -> None:
        """Extend more nodes as long as each raises the tokens that are expected to be decided per time of drafting.

        A node's tokens are of use where its path is decided. The forward's time grows with its rows, as measured.
        """
        rows, worth = len(batch), 0.0
        for drafting, nodes in zip(batch, chosen, strict=True):
            root = drafting.session.root
            worth += sum(exp(node.chance - root.chance) for node in nodes)
        next_best = [_further(drafting, nodes) for drafting, nodes in zip(batch, chosen, strict=True)]
        now_us = self._row_times.at(rows)
        while True:
            chance = max(next_best)
            gained, then_us = FURTHER_WORTH * chance, self._row_times.at(rows + 1)
            if chance == 0.0:
                return
            if (worth + gained) * now_us <= worth * then_us:
                return
            best = next_best.index(chance)
            chosen[best].append(batch[best].session.take())
            worth, rows, now_us = worth + gained, rows + 1, then_us
            next_best[best] = _further(batch[best], chosen[best])

    def _forward(
        self, batch: list[DraftingSession], chosen: Sequence[list[DraftNode]], feeds: list[Feed]
    ) -> list[tuple[DraftingSession, DraftNode, Drawn]]:
        """What the forward of these feeds says of the chosen nodes."""
        places = [
            Expansion(drafting, node, MOST_CANDIDATES if drafting.session.branches > 1 else 1)
            for drafting, nodes in zip(batch, chosen, strict=True)
            for node in nodes
        ]
        for place in places:
            self._contained(place.drafting, place.drafting.ask, place.node)
        found = self._model.forward(feeds)
        computed = found if isinstance(found, Computed) else Computed(found, range(len(places)), {})
        if self._model.failed:
            broken = [drafting for drafting in batch if drafting.slot in self._model.failed]
            # Neither request nor service is at fault, and the same text would fail again here.
            self._drop_all(broken, Code.ABORTED, "the drafter's logits are not finite")
        rows = {row: place for row, place in enumerate(places) if self._holds(place.drafting)}
        drawn = computed.answers | self._drawn(
            computed, {row: place for row, place in rows.items() if row not in computed.answers}
        )
        return [(place.drafting, place.node, drawn[row]) for row, place in rows.items() if self._holds(place.drafting)]

    def _drawn(self, computed: Computed, places: Mapping[int, Expansion]) -> dict[int, Drawn]:
        """What follows these places, by row. Where it cannot be drawn together, each is drawn alone."""
        if not places:
            return {}
        try:
            found = self._draw(computed.rows, [computed.at[row] for row in places], list(places.values()))
            return dict(zip(places, found, strict=True))
        except Exception:  # drawn alone, each shows whether it was the one that failed
            if len(places) == 1:
                raise
        drawn: dict[int, Drawn] = {}
        for row, place in places.items():
            drawn |= self._contained(place.drafting, self._drawn, computed, {row: place}) or {}
        return drawn

    def _lacks(self, drafting: DraftingSession) -> int:
        """How many tokens of its decided text the slot lacks."""
        cached: int = self._model.cached(drafting.slot)
        return max(0, drafting.session.decided - cached)

    def _feed(self, drafting: DraftingSession, nodes: Sequence[DraftNode], portion: int) -> Feed:
        """The nodes to extend; while that is the text's last token, the part of the text that the slot lacks.

        Text is fed in portions, of which the last asks for logits. After an advance that went back the slot may hold
        the whole text: then its last token is fed again, for its logits.
        """
        session, cached = drafting.session, self._model.cached(drafting.slot)
        if not nodes or nodes[0] is session.root:
            tokens = session.text.tokens
            start = min(cached, len(tokens) - 1)
            stop = min(len(tokens), start + portion)
            return Feed(drafting.slot, start, tokens[start:stop], len(nodes))
        for row, node in enumerate(nodes, len(drafting.rows)):
            node.row = row
        drafting.rows.extend(nodes)
        fed = [node.token for node in nodes]
        if len(nodes) == 1 and nodes[0].position == cached:
            return Feed(drafting.slot, cached, fed, 1)  # all rows behind the text are its line
        ancestors = tuple(_ancestors(node, session) for node in nodes)
        return Feed(drafting.slot, cached, fed, len(fed), TreeFeed(session.decided, ancestors))

    def _drop_all(self, batch: list[DraftingSession], code: Code, message: str) -> None:
        for drafting in batch:
            self._drop((drafting.link, drafting.handle), code, message)

    # Replies

    def _propose(self, drafting: DraftingSession) -> None:
        """Reply with every chunk that is due."""
        while (proposal := drafting.session.take_proposal()) is not None:
            self.tally.proposed += len(proposal.tokens)
            timed = replace(proposal, draft_us=drafting.spent_ns // 1000)
            self._reply(drafting.link, DraftedProposal(drafting.handle, timed))
            drafting.spent_ns = 0

    def _reply(self, link: ReplyLink, reply: Reply) -> None:
        self._replies.setdefault(link, []).append(reply)

    def deliver(self) -> None:
        """Hand the gathered replies to the links."""
        if self._replies:
            gathered, self._replies = self._replies, {}
            self._deliver(gathered)


def _further(drafting: DraftingSession, nodes: Sequence[DraftNode]) -> float:
    """The probability of what its forward may extend beside these nodes; 0 where it may extend none."""
    session = drafting.session
    if not 0 < len(nodes) < session.branches or nodes[0] is session.root or not session.wants_token:
        return 0.0
    return session.probability or 0.0


def _ancestors(node: DraftNode, session: DraftSession) -> tuple[int, ...]:
    """The slot's rows of the draft tokens that lead to a node."""
    rows, parent = [], node.parent
    while parent is not None and parent is not session.root:
        rows.append(session.decided + parent.row)
        parent = parent.parent
    return tuple(reversed(rows))
