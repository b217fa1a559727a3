"""A session's three parties, its log and its client, joined by links that fail: the machine that the proofs run.

Every action is an event that may happen at any time; where it cannot happen now, it does nothing. `step` performs one
and then checks every invariant of PROTOCOL.md section 14 against facts that the world records by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from specwire.core import messages
from specwire.core.draft import DraftNode, DraftSession, Drawn
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason, Pace, Proposal, SourceKind, SourcePace, Verdict
from specwire.core.session import Session, State
from specwire.core.text import Ending, Stopping, Text, hash_of
from specwire.core.verify.session import Allowance, VerifySession
from tests.core.facts import Facts, Seat, Violation, is_prefix, require
from tests.core.script import EOS, VOCABULARY, LetterScanner, Script

PROGRESS = (
    "verifier_ready", "verifier_receives", "orchestrator_receives", "begin_forward", "end_forward", "drafter_ready",
    "drafter_receives", "draft", "relay", "offer", "acknowledge", "client_takes", "deliver_stale", "decide_unheard",
)  # fmt: skip
FAULTS = (
    "cut_verifier", "kill_verifier", "cut_drafter", "lose", "duplicate", "offer_garbage", "change_pace", "take_over",
)  # fmt: skip
# Of a drafter's guesses, in nats.
SCORES = (0.0, -0.5, -1.0)
# Sizes of the random runs that the core must pass, and that every known mistake fails.
SEEDS = range(150)


class World(Facts):
    """One session from its first owner to its end.

    Args:
        script: the target and its first drafter.
        prompt: at least one token.
        buffer: the session's credit beyond what is durable and taken.
        other: how often the second drafter is right; there is none before the first `drafter_ready` of an odd number.
    """

    def __init__(
        self,
        script: Script,
        prompt: Sequence[int] = (1,),
        max_tokens: int = 24,
        stops: Sequence[str] = (),
        buffer: int = 8,
        other: int = 6,
    ) -> None:
        ending = Ending.of(Stopping(max_tokens), len(prompt), frozenset({EOS}), context=10_000)
        super().__init__(script, prompt, ending, stops, buffer)
        self.seats = [Seat(script, 0), Seat(replace(script, quality=other), 1)]
        self.paces = [Pace(2, 4), Pace(2, 6, branches=3)]
        self.planned: dict[int, SourcePace] = {}
        self.paces_changed = 0
        self.source = 0
        self.decided = self.resumed = self.delivered = self.branched = 0
        self.session = self._own()

    def _own(self) -> Session:
        """An owner's start: nothing but the log; the client has what the log holds. A verifier keeps what it has."""
        self.scanner = LetterScanner(self.stops)
        released = self.scanner.push(self.log[len(self.prompt) :]).text
        require(is_prefix(self.told_text, released), f"replay says {released!r}, the client had {self.told_text!r}")
        self.told_text, self.told_tokens = released, list(self.log)
        self.verifier_up = False
        self.to_verifier: deque[messages.OpenVerifier | messages.SendProgress | messages.CloseVerifier] = deque()
        self.from_verifier: deque[messages.VerifierOpened | messages.VerdictArrived] = deque()
        self.stale: list[messages.VerifierOpened | messages.VerdictArrived] = []
        self.drafted: list[Proposal] = []
        self.relayed: list[Proposal] = []
        self.kept = self.verifier or self.kept
        self.verifier = None
        self.attach = 0
        self.seats = [seat.emptied() for seat in self.seats]
        return Session(Text(self.log), len(self.prompt), self.scanner, self.buffer)

    # One step

    def step(self, action: str, number: int = 0) -> None:
        getattr(self, action)(number)
        self.check()

    def handle(self, event: messages.Event) -> None:
        for effect in self.session.handle(event):
            self.run(effect)

    def run(self, effect: messages.Effect) -> None:
        match effect:
            case messages.OpenVerifier():
                require(list(effect.tokens) == self.log, "a verifier is opened from something else than the log")
                self.to_verifier.append(effect)
            case messages.SendProgress():
                require(effect.durable <= len(self.log), "progress says durable what the log has not")
                self.to_verifier.append(effect)
            case messages.CloseVerifier():
                self.to_verifier.append(effect)
            case messages.OpenDrafter() | messages.AdvanceDrafter() | messages.CloseDrafter():
                self._tell_drafter(effect)
            case messages.RelayProposal(proposal=Proposal() as proposal):
                self.relayed.append(proposal)
            case messages.Append():
                self._append(effect)
            case messages.Emit():
                self._emit(effect)
            case messages.EmitEnd():
                self._finish(effect)

    def _tell_drafter(self, effect: messages.OpenDrafter | messages.AdvanceDrafter | messages.CloseDrafter) -> None:
        seat = next((seat for seat in self.seats if seat.up and seat.source == effect.source), None)
        if seat is None:
            raise Violation(f"{effect} for a drafter that is not there")
        match effect:
            case messages.OpenDrafter():
                seat.advised = list(effect.tokens)
            case messages.AdvanceDrafter():
                require(effect.position <= len(seat.advised), "an advance leaves a gap")
                seat.advised[effect.position :] = effect.tokens
            case messages.CloseDrafter():
                seat.up = False
        seat.to_drafter.append(effect)

    def _append(self, effect: messages.Append) -> None:
        require(self.pending is None, "two appends in flight")
        require(not self.over, "an append after the end")
        require(effect.position == len(self.log), f"append at {effect.position}, the log ends at {len(self.log)}")
        self.pending = effect

    def _emit(self, effect: messages.Emit) -> None:
        require(not self.over, "emitted after the end")
        require(effect.position == len(self.told_tokens), "emitted tokens overlap or leave a gap")
        end = effect.position + len(effect.tokens)
        require(tuple(self.log[effect.position : end]) == effect.tokens, "emitted what the log has not acknowledged")
        require(len(effect.tokens) == len(effect.outcomes) == len(effect.text_ends), "one outcome and end per token")
        self.told_tokens += effect.tokens
        self.outcomes += effect.outcomes
        self.told_text += effect.text

    def _finish(self, effect: messages.EmitEnd) -> None:
        require(not self.over, "ended twice")
        self.told_text += effect.text
        require(effect.end.text_length == len(self.told_text), "the end's text length is not the text's")
        self.end = effect.end

    # The verifier's link: in order, but it may be cut. There are two verifiers: of the one that was left, `kept` is the
    # session, which goes on without a link.

    def verifier_ready(self, _: int) -> None:
        if not self.verifier_up and self.session.state is State.WAITING:
            self.verifier_up = True
            self.handle(messages.VerifierReady())

    def cut_verifier(self, number: int) -> None:
        """What was under way is lost, or (odd numbers) comes out of some buffer later. The session is kept."""
        if not self.verifier_up:
            return
        if number % 2:
            self.stale += self.from_verifier
        self.from_verifier.clear()
        self.to_verifier.clear()
        if self.verifier is not None:
            self.verifier.detach()
            self.kept = self.verifier
        self.verifier, self.verifier_up = None, False
        self.handle(messages.VerifierLost())

    def kill_verifier(self, number: int) -> None:
        """The link is lost, and everything that is kept with it."""
        self.cut_verifier(number)
        self.kept = None

    def deliver_stale(self, number: int) -> None:
        if self.stale:
            self.handle(self.stale.pop(number % len(self.stale)))

    def verifier_receives(self, number: int) -> None:
        """An odd one opens at the other verifier, which knows nothing of the session."""
        if not self.to_verifier:
            return
        match self.to_verifier.popleft():
            case messages.OpenVerifier() as opening:
                if self.verifier is not None:  # once more, for another epoch
                    self.verifier.detach()
                    self.kept, self.verifier = self.verifier, None
                self._open_verifier(opening, fresh=number % 2 == 1)
            case messages.SendProgress() as progress:
                if self.verifier is not None:
                    require(progress.credit >= self.verifier.allowance.credit, "credit was taken back")
                    self.verifier.allow(Allowance(progress.durable, progress.credit))
            case messages.CloseVerifier():
                self.verifier = None

    def _open_verifier(self, opening: messages.OpenVerifier, fresh: bool) -> None:
        allowance = Allowance(opening.durable, opening.credit)
        self.attach = opening.attach
        self.from_verifier.append(messages.VerifierOpened(self.attach, len(opening.tokens)))
        if not fresh and self.kept is not None:
            before = list(self.kept.text.tokens)
            tail = self.kept.resume(opening.tokens, allowance)
            require(self.kept.text.tokens == before, "a text was changed in taking it over")
            self.verifier, self.kept = (None if tail is None else self.kept), None
            self._deliver_tail(tail or ())
        if self.verifier is None:
            self.verifier = VerifySession.opened(
                opening.tokens, len(self.prompt), Sampling(), self.ending, allowance, VOCABULARY, ngram=True
            )
            if self.verifier.finish is not None:
                self._send(Verdict(len(opening.tokens), (), (), 0, self.verifier.finish))

    def _deliver_tail(self, tail: Sequence[Verdict]) -> None:
        self.resumed += self.verifier is not None
        self.delivered += sum(len(verdict.tokens) for verdict in tail)
        for verdict in tail:
            self._send(verdict)

    def _send(self, verdict: Verdict) -> None:
        paces, self.planned = tuple(self.planned.values()), {}
        self.from_verifier.append(messages.VerdictArrived(self.attach, verdict._replace(paces=paces)))

    def orchestrator_receives(self, _: int) -> None:
        if self.from_verifier:
            self.handle(self.from_verifier.popleft())

    def begin_forward(self, number: int) -> None:
        if self.verifier is not None and self.verifier.room > 0 and self.forward is None:
            self.forward = self.verifier, *self._window(self.verifier, number)

    def end_forward(self, _: int) -> None:
        """The step may have begun before the link was cut."""
        if self.forward is None:
            return
        (session, window, kind), self.forward = self.forward, None
        if session is not self.verifier and session is not self.kept:
            return
        verdict = self._decide(session, window, kind)
        if session is self.verifier:
            self._send(verdict)

    def decide_unheard(self, number: int) -> None:
        """A step of the session that has no link."""
        if self.kept is not None and self.kept.room > 0 and self.forward is None:
            self._decide(self.kept, *self._window(self.kept, number))

    def _window(self, session: VerifySession, number: int) -> tuple[tuple[int, ...], SourceKind]:
        """Of a chain, or every other time copied from the text."""
        session.look()
        kind = SourceKind.NGRAM if number % 2 else SourceKind.DRAFTER
        return session.window(number, kind), kind

    def _decide(self, session: VerifySession, window: Sequence[int], kind: SourceKind) -> Verdict:
        rows = [self.script.next([*session.text.tokens, *window[:index]]) for index in range(len(window) + 1)]
        verdict = session.resolve(rows, window, kind)
        require(len(verdict.tokens) >= 1, "a step decided nothing")
        self.decided += len(verdict.tokens)
        return verdict

    # The drafters' links: in order towards a drafter; proposals may be lost, repeated and overtaken. Even numbers are
    # the first drafter's, odd ones the second's.

    def drafter_ready(self, number: int) -> None:
        """Of numbers from 4 on it wants an epoch of its own."""
        seat = self.seats[number % 2]
        if not seat.up and self.session.state in (State.WAITING, State.OPENING, State.RUNNING):
            self.source += 1
            seat.up, seat.source = True, self.source
            self.handle(messages.DrafterReady(self.source, self.paces[seat.number], renews=number >= 4))
            seat.up = seat.source in self.session.drafters

    def cut_drafter(self, number: int) -> None:
        seat = self.seats[number % 2]
        if seat.up:
            self.seats[number % 2] = seat.emptied()
            self.handle(messages.DrafterLost(seat.source))

    def drafter_receives(self, number: int) -> None:
        seat = self.seats[number % 2]
        if not seat.to_drafter:
            return
        match seat.to_drafter.popleft():
            case messages.OpenDrafter() as opening:
                chain = seat.drafter.chain + 1 if seat.drafter else 0
                seat.drafter = DraftSession(opening.tokens, opening.pace, chain, branching=True)
                seat.decided, seat.cache = list(opening.tokens), list(opening.tokens)
            case messages.AdvanceDrafter() as advance:
                self._advance_drafter(seat, advance)
            case messages.CloseDrafter():
                seat.drafter = None

    def _advance_drafter(self, seat: Seat, advance: messages.AdvanceDrafter) -> None:
        if seat.drafter is None:
            return
        drafter = seat.drafter
        seat.decided[advance.position :] = advance.tokens
        kept = drafter.advance(advance.position, advance.tokens, advance.pace)
        # What a cache holds of a tree is looked at where there is one: tests/simulation/checks.py.
        seat.cache = seat.cache[: min(kept, drafter.decided) if seat.branched else kept]
        require(seat.branched or is_prefix(seat.cache, drafter.line), "a drafter's cache is not its text's")

    def draft(self, number: int) -> None:
        seat = self.seats[number % 2]
        if seat.drafter is None:
            return
        drafter = seat.drafter
        nodes: list[DraftNode] = []
        while drafter.wants_token and len(nodes) < drafter.branches:
            nodes.append(drafter.take())
        for node in nodes:
            guesses = seat.script.guesses([*drafter.text.tokens, *drafter.path(node)], seat.number)
            several = drafter.branches > 1
            drafter.extend(node, Drawn(guesses, scores=SCORES) if several else Drawn(guesses[:1]))
            seat.branched = seat.branched or several
        if nodes:
            drafter.forward_ended()
            require(drafter.in_flight <= drafter.allowed, "drafted beyond the run-ahead")
        seat.cache = list(drafter.line)
        while proposal := drafter.take_proposal():
            seat.sent.note(proposal, tuple(drafter.text.tokens))
            self.branched += bool(proposal.parents)
            self.drafted.append(replace(proposal, source=seat.source))

    def relay(self, number: int) -> None:
        if self.drafted:
            self.handle(messages.ProposalArrived(self.drafted.pop(number % len(self.drafted))))

    def offer(self, number: int) -> None:
        if self.relayed and self.verifier is not None:
            self._offer(self.verifier, self.relayed.pop(number % len(self.relayed)))

    def _offer(self, verifier: VerifySession, proposal: Proposal) -> None:
        verifier.offer(proposal)
        self.heard.note(verifier.chains, proposal)

    def lose(self, number: int) -> None:
        for bag in (self.drafted, self.relayed):
            if bag and number % 2:
                bag.pop(number % len(bag))

    def duplicate(self, number: int) -> None:
        for bag in (self.drafted, self.relayed):
            if bag:
                bag.append(bag[number % len(bag)])

    def offer_garbage(self, number: int) -> None:
        """A hostile proposal that gets everything right but its tokens, and some of its parents."""
        if self.verifier is not None:
            base = max(0, self.verifier.position - number % 3)
            tokens = tuple((number + index) % (VOCABULARY + number % 2) for index in range(1 + number % 5))
            prefix_hash = hash_of(self.verifier.text.tokens[:base])
            parents = tuple(number * (index + 3) % (index + 2) - 1 for index in range(len(tokens)) if number % 3)
            wild = Proposal(self.source + number % 2, number, base, 0, tokens, prefix_hash, parents=parents)
            self._offer(self.verifier, wild)

    # The log, the client, the planner, other owners

    def acknowledge(self, _: int) -> None:
        if self.pending is None:
            return
        done, self.pending = self.pending, None
        self.log += done.tokens
        self.handle(messages.Appended())

    def client_takes(self, number: int) -> None:
        """The client's stream reports what is new, once."""
        position = min(len(self.told_tokens), self.session.taken + number)
        if position > self.session.taken:
            self.handle(messages.ClientTook(position))

    def change_pace(self, number: int) -> None:
        """The verifier plans the drafters in turns; they hear of it with its next verdict."""
        seat = self.seats[self.paces_changed % 2]
        self.paces_changed += 1
        pace = self.paces[seat.number] = Pace(1 + number % 3, number, branches=1 + number % 4)
        if seat.up:
            self.planned[seat.source] = SourcePace(seat.source, pace)

    def cancel(self, _: int) -> None:
        self.cancelled = self.cancelled or not self.over
        self.handle(messages.EndRequested(FinishReason.CANCELLED))

    def take_over(self, number: int) -> None:
        """Another orchestrator claims the session; the append under way reached the log (odd numbers) or did not."""
        if self.over:
            return
        pending, self.pending = self.pending, None
        if pending is not None and number % 2:
            self.log += pending.tokens
            self.end = pending.end
        before = list(self.told_tokens)
        self.handle(messages.OwnerLost())
        require(not self.append_under_way and self.told_tokens == before, "a fenced owner went on")
        if self.end is not None:
            self.told_tokens = list(self.log)
            self.told_text = self.whole_text()[: self.end.text_length]
            return
        self.session = self._own()

    # Without faults

    def round(self, number: int) -> None:
        """All messages under way arrive, and each party does a piece of work."""
        for seat in self.seats:
            while seat.to_drafter:
                self.drafter_receives(seat.number)
            for _ in range(4):
                self.draft(seat.number)
        while self.drafted:
            self.relay(0)
        while self.to_verifier:
            self.verifier_receives(0)
        while self.relayed and self.verifier is not None:
            self.offer(0)
        self.begin_forward(number)
        self.end_forward(0)
        while self.from_verifier:
            self.orchestrator_receives(0)
        self.acknowledge(0)
        self.client_takes(len(self.told_tokens))

    def finish(self) -> None:
        """A tail without faults ends the session with the oracle's text."""
        for _ in range(4 * len(self.oracle.raw) + 20):
            if self.over:
                break
            self.step("verifier_ready")
            self.step("round", 4)
        require(self.end is not None, f"stuck: {self.session}")
        self.check_end()


STOPS: tuple[tuple[str, ...], ...] = ((), ("bab",), ("aab", "ba"), ("cac", "bb"))


def random_world(random: Random) -> World:
    return World(
        Script(random.randrange(2**32), quality=random.choice((0, 5, 7, 8))),
        prompt=[random.randrange(VOCABULARY) for _ in range(random.randint(1, 3))],
        max_tokens=random.randint(1, 60),
        stops=random.choice(STOPS),
        buffer=random.randint(1, 12),
        other=random.choice((0, 5, 7, 8)),
    )


def random_run(seed: int, steps: int = 400) -> World:
    """A run under a seeded scheduler, with a tail without faults; raises Violation."""
    random = Random(seed)
    world = random_world(random)
    for _ in range(steps):
        action = random.choice(PROGRESS if random.random() < 0.9 else FAULTS)
        world.step(action, random.randrange(8))
        if random.random() < 0.0005:
            world.step("cancel")
    world.finish()
    return world
