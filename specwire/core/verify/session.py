"""A session at its verifier: windows are tested, tokens decided, verdicts kept until they are acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from specwire.core.invalid import Code
from specwire.core.law.acceptance import Judge, decide
from specwire.core.law.constraint import Mask, Matcher, open_ids
from specwire.core.law.noise import seed_behind
from specwire.core.law.sampling import History, Rule, Sampling, Seen
from specwire.core.messages import (
    MOST_WINDOW,
    AssignedDrafter,
    Decision,
    DraftToken,
    FinishReason,
    Proposal,
    SourceKind,
    SourcePace,
    TokenLogprobs,
    Verdict,
)
from specwire.core.policy.costs import Ledger
from specwire.core.policy.drafters import DrafterPacing, Due, LearntDrafter, PlannedStep
from specwire.core.policy.estimates import AcceptanceByPosition
from specwire.core.policy.tunables import ENOUGH
from specwire.core.policy.windows import Guess, StepCandidate
from specwire.core.text import Ending, Text, extend_hash
from specwire.core.verify.chains import BestPath, Chains, Offer
from specwire.core.verify.references import References
from specwire.core.verify.text_sources import HeadSource, NgramSource, TextSource, promise

# ----------------------------------------------------------------------------------------------------------------------
# Verdicts that a session's owner may not have yet: after a lost connection the next one gets them.


class Tail:
    """The latest verdicts of a session. Invariant: each begins where the one before it ends."""

    def __init__(self) -> None:
        self._verdicts: deque[Verdict] = deque()

    def add(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)

    def forget(self, durable: int) -> None:
        """Forget what the log holds, the tokens before `durable`. The end is kept: a length does not tell it."""
        while self._verdicts and self._verdicts[0].end <= durable and self._verdicts[0].finish is None:
            self._verdicts.popleft()

    def behind(self, position: int, end: int) -> Sequence[Verdict] | None:
        """Everything from `position` to `end`, where the text ends; None where a part of it is forgotten."""
        start = self._verdicts[0].position if self._verdicts else end
        if position < start:
            return None
        later = [each for each in self._verdicts if each.end > position or each.finish is not None]
        return [each.behind(position) for each in later]


# ----------------------------------------------------------------------------------------------------------------------
# A verifier's part of one session: the decided text, the live chains, and how far it may go.
#
# The engine asks for a window, runs a forward, and hands the target's choices to `resolve`, which alone extends the
# text.


@dataclass(slots=True)
class Allowance:
    """What the orchestrator allows: the text length that the log holds, and up to which to decide."""

    durable: int
    credit: int


@dataclass(slots=True)
class VerifySession:
    """Invariant: len(text) <= max(allowance.credit at any time, length at open) and <= ending.end.

    drafters: by source, how they draft. ngram, head: the verifier's own sources; None: they take no part. references:
    of the request, a part of `ngram`. tail: what was decided since the log last acknowledged. history: the text's ids,
    where penalties look at them, else None. tested_us: the time it had spent when a window was last tested.
    matcher: the constraint of `sampling` behind the output; nothing is decided before it is there. stuck: no token is
    allowed at the next position, so the text can neither go on nor end.
    """

    text: Text
    sampling: Sampling
    ending: Ending
    allowance: Allowance
    chains: Chains
    ledger: Ledger = field(default_factory=Ledger)
    finish: FinishReason | None = None
    trusting: bool = True
    drafters: dict[int, DrafterPacing] = field(default_factory=dict)
    ngram: TextSource | None = None
    references: References | None = None
    head: HeadSource | None = None
    guess: Guess | None = None
    tail: Tail = field(default_factory=Tail)
    history: History | None = None
    matcher: Matcher | None = None
    stuck: bool = False
    tested_us: float = 0.0

    @classmethod
    def opened(
        cls,
        tokens: Sequence[int],
        prompt_length: int,
        sampling: Sampling,
        ending: Ending,
        allowance: Allowance,
        vocabulary: int,
        ngram: bool = False,
        epoch: int = 0,
        prediction: Sequence[int] = (),
        head: AcceptanceByPosition | None = None,
        others: Callable[[Sequence[int]], Sequence[NgramSource]] | None = None,
        own_text: bool = True,
        references: Callable[[], References | None] = lambda: None,
        learnt: Callable[[], Sequence[AcceptanceByPosition] | None] = lambda: None,
    ) -> VerifySession:
        """Take over the text `tokens`; it may already hold its end (the owner died between append and finish).

        ngram: also guess from texts, under rules that look at no proposal. Other rules need the distribution that a
            draft token was drawn from, and a guess from a text has none.
        head: likewise take what a head proposes, of which this is known; None: take nothing.
        epoch: see `specwire.core.law.noise`.
        prediction: what the client expects of the output; a source of guesses, like the text.
        others: further sources of guesses for the text, which grows; asked for where `ngram` takes effect.
        own_text: False leaves out the text itself, its prediction and its references; `others` still guess.
        references: likewise gives what the request brought along. learnt: likewise what is known of guesses from the
            own texts of sessions like this one, by class of match.
        """
        chains = Chains(vocabulary, weighed=sampling.weighed, epoch=epoch, branching=sampling.guessed)
        session = cls(Text(tokens), sampling, ending, allowance, chains)
        if ngram and sampling.guessed:
            text = session.text.tokens
            further = list(others(text)) if others is not None else []
            session.references = references() if own_text else None
            if session.references is not None:
                further.insert(0, session.references.source(text))
            if own_text or further:
                known = learnt() if own_text else None
                session.ngram = TextSource(text, prompt_length, prediction, others=further, own=own_text, learnt=known)
        if head is not None and sampling.guessed:
            session.head = HeadSource(session.text.tokens, head)
        if sampling.penalised:
            session.history = History(tokens[:prompt_length], tokens[prompt_length:])
        if len(tokens) > prompt_length:
            session.finish = ending.cut(prompt_length, tokens[prompt_length:])[1]
        return session

    @property
    def position(self) -> int:
        """The next position to decide."""
        return len(self.text.tokens)

    @property
    def room(self) -> int:
        """How many tokens may be decided now."""
        if self.finish is not None or self.stuck or not self.ready:
            return 0
        return max(0, min(self.allowance.credit, self.ending.end) - len(self.text.tokens))

    @property
    def ready(self) -> bool:
        """Whether its constraint, if it has one, is compiled."""
        return self.sampling.constraint is None or self.matcher is not None

    @property
    def plain(self) -> bool:
        """Whether its next tokens are drawn by their position only, without penalties or bans."""
        sampling = self.sampling
        looks_back = self.history is not None or sampling.constraint is not None or sampling.acceptance is not None
        return not looks_back and len(self.text.tokens) >= self.ending.least

    def begin(self, matcher: Matcher) -> None:
        """Decide from now on; `matcher` has taken the output so far. An earlier matcher stays."""
        if self.matcher is None:
            self.matcher = matcher

    @property
    def can_mistrust(self) -> bool:
        """Whether the session may go on without windows because of a window's content.

        Under `block` it may not: the way a block is judged would depend on its content.
        """
        return not self._by_blocks

    @property
    def _by_blocks(self) -> bool:
        """Whether chunks are judged whole or not at all."""
        acceptance = self.sampling.acceptance
        return acceptance is not None and acceptance.rule is Rule.BLOCK

    def mistrust(self) -> None:
        """Feed no draft token to the target from now on.

        Under a rule that weighs draft tokens, one at a time is still tested against the last row: leaving it untested
        because of what stood behind it, and drawing in its place, would favour other tokens.
        """
        self.trusting = False
        if not self.sampling.weighed:
            self.chains.clear()

    def allow(self, allowance: Allowance) -> None:
        self.allowance = allowance
        self.tail.forget(allowance.durable)

    def assign(self, drafters: Sequence[AssignedDrafter], learnt: Callable[[str], LearntDrafter], waits: bool) -> None:
        """Have these drafters from now on. learnt: what is known of one, by what it is known by. waits: the verifier
        can wait for proposals.
        """
        before, self.drafters = self.drafters, {}
        for each in drafters:
            pacing = before.get(each.source)
            if pacing is None:
                pacing = DrafterPacing(each, learnt(each.known_by), not self.sampling.guessed, waits)
            self.drafters[each.source] = pacing
        self.chains.agreements = {source: pacing.learnt.agreement for source, pacing in self.drafters.items()}

    @property
    def due(self) -> int:
        """Draft tokens that are expected behind each verdict: the most that one of the drafters owes."""
        return max((each.plan.due for each in self.drafters.values()), default=0) if self.trusting else 0

    def awaited(self, plain_us: float) -> tuple[int, Due] | None:
        """The source, and its answer to the last verdict, that is worth waiting for; None if all are here, or none was
        asked for. Of those that are likely, half as likely as any other, it is the first.
        """
        due = [(source, due) for source, each in self.drafters.items() if (due := each.due(plain_us)) is not None]
        likely = max((each.chance for _, each in due), default=0.0)
        return min((each for each in due if 2 * each[1].chance >= likely), key=lambda each: each[1], default=None)

    @property
    def in_turns(self) -> bool:
        """Whether the verifier takes turns with one of its drafters, on the same cores."""
        return any(each.in_turns for each in self.drafters.values())

    def detach(self) -> None:
        """Lose the connection: tokens up to the credit are still decided, but no draft token will come."""
        self.drafters = {}

    def resume(self, tokens: Sequence[int], allowance: Allowance, epoch: int = 0) -> Sequence[Verdict] | None:
        """Go on for a new connection whose log holds the text `tokens`; returns what was decided beyond them.

        Returns None and changes nothing where this session cannot go on: its text differs, is shorter or exceeds the
        credit, or what it decided is forgotten. Sources number their chains anew.
        """
        agrees = self.text.common_prefix(0, tokens) == len(tokens)
        if not agrees or self.position > max(allowance.credit, len(tokens)):
            return None
        verdicts = self.tail.behind(len(tokens), self.position)
        if verdicts is not None:
            self.chains.forget()
            self.chains.epoch = epoch
            self.allow(allowance)
        return verdicts

    @property
    def untested_us(self) -> float:
        """Time spent since a window was last tested."""
        return self.ledger.elapsed_us - self.tested_us

    def offer(self, proposal: Proposal) -> Offer:
        return self.chains.offer(proposal, self.text)

    def look(self, search: bool = True) -> Guess | None:
        """The best present proposal of the verifier's own sources; `guess` until the next look.

        search: the text, too. A head has drafted because it decides more in a time: so what counts is what as many
        tokens of the text's guess would decide, which may be longer and less sure.
        """
        copied = self.ngram.look() if self.ngram is not None and search and self.trusting else None
        drafted = self.head.look() if self.head is not None and self.trusting else None
        if drafted is None or copied is None:
            self.guess = drafted or copied
        else:
            better = promise(drafted) > promise(copied, len(drafted.tokens))
            self.guess = drafted if better else copied
        return self.guess

    def window(self, most: int, kind: SourceKind = SourceKind.DRAFTER) -> tuple[int, ...]:
        """Draft tokens to test in the next forward: at most `most`, and one position fewer than there is room for.

        From the best live chain, or from the guess of the last `look`.
        """
        if kind is SourceKind.DRAFTER:
            return tuple(draft.token for draft in self.drafts(most))
        guess = self.guess
        most = max(0, min(most, self.room - 1)) if self.trusting else 0
        return guess.tokens[:most] if guess is not None and guess.position == self.position else ()

    def drafts(self, most: int) -> tuple[DraftToken, ...]:
        """Likewise from the best live chain, with what the tokens were drawn from."""
        path = self.best
        return path.drafts(self.width(path, most))

    @property
    def best(self) -> BestPath:
        """Of the live chains, the path that a window would be taken from now."""
        return self.chains.best(self.position)

    def width(self, path: BestPath, most: int) -> int:
        """How much of the best path a window may hold, at most `most`; under `block` whole chunks only."""
        if not self.trusting:
            return 0
        most = max(0, min(most, self.room - 1, len(path.nodes)))
        widths = self.whole(most)
        return most if widths is None else max(widths, default=0)

    def whole(self, most: int) -> tuple[int, ...] | None:
        """Widths, up to `most`, that a chain's window may have; None where it may have any."""
        return self.chains.whole(self.position, most) if self._by_blocks else None

    def clipped(self, window: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a fed window for which there is still room; nothing where it must be whole."""
        if not window:
            return window
        kept = window[: self.room - 1]
        return kept if not self._by_blocks or kept == window else ()

    def sampling_behind(self, window: Sequence[int]) -> Sampling:
        """How the target's token behind `window` is drawn; with its place's seed where draft tokens are weighed."""
        if not self.sampling.weighed:
            return self.sampling
        prefix = self.text.hash_at(self.position)
        for token in window:
            prefix = extend_hash(prefix, token)
        return replace(self.sampling, seed=seed_behind(self.sampling.seed, self.chains.epoch, prefix))

    def seen(self, window: Sequence[int]) -> Seen | None:
        """The text as it would stand behind `window`, where penalties look at it."""
        return None if self.history is None else self.history.seen(window)

    def ask(self, window: Sequence[int]) -> None:
        """Ask for `allowed(window)` early, so that it is computed during the forward."""
        if self.matcher is not None:
            self.matcher.ask(window)

    def heard(self, limit_s: float = 0.0) -> bool:
        """See Matcher."""
        return self.matcher is None or self.matcher.heard(limit_s)

    def foreseen(self, window: tuple[DraftToken, ...]) -> tuple[DraftToken, ...]:
        """The part of a window whose masks are known already; a late answer is used.

        Where draft tokens are weighed it is all or nothing: what is tested may not depend on the tokens.
        """
        known = self.matcher.known if self.matcher is not None else None
        if known is None:
            return window
        common = 0
        while common < min(len(known), len(window)) and known[common] == window[common].token:
            common += 1
        return window[:common] if common == len(known) or not self.sampling.weighed else window

    def allowed(self, window: Sequence[int]) -> list[Mask | None]:
        """The ids that the constraint allows behind the first 0, 1, ..., len(window) tokens of `window`; None for any.

        None also where no id is allowed: `resolve` refuses the token drawn there.
        """
        if self.matcher is None:
            return [None] * (len(window) + 1)
        masks = self.matcher.masks(window)
        banned = (self.ending.banned(self.position + index) for index in range(len(masks)))
        return [open_ids(mask, ids) for mask, ids in zip(masks, banned, strict=True)]

    @property
    def dead_end(self) -> tuple[Code, str]:
        """Why a stuck session can neither go on nor end: its constraint allows nothing here, or asks for too much, or
        what computes it is gone.
        """
        kind = self.sampling.constraint.kind if self.sampling.constraint is not None else ""
        if self.matcher is not None and self.matcher.trouble:
            code = Code.INTERNAL if self.matcher.broken else Code.INVALID_ARGUMENT
            return code, f"{kind}: {self.matcher.trouble}, at position {self.position}"
        return Code.OUT_OF_RANGE, f"{kind}: the text may neither go on nor end at position {self.position}"

    @property
    def source(self) -> int | None:
        """The source whose chain a window would be taken from now."""
        return self.best.source

    def resolve(
        self,
        chosen: Sequence[int],
        window: Sequence[int],
        kind: SourceKind = SourceKind.DRAFTER,
        source: int | None = None,
        report: Callable[[Sequence[int]], tuple[TokenLogprobs, ...]] | None = None,
        judge: Judge | None = None,
    ) -> Verdict:
        """Decide `window` against the target's choices (one more than the window) and extend the text.

        The last row meets a live chain's token if that has arrived by now. Nothing follows the session's end, even
        inside an accepted run. Where the constraint allows nothing to follow, the session is stuck: the verdict has
        fewer tokens than were decided, maybe none.

        source: whose chain the window was taken from; None: the one that it would be taken from now.
        report: log-probabilities of the tokens decided here, at least one, where the session reports them.
        judge: decides where the rule looks at proposals, in place of a comparison.
        """
        position = self.position
        drafted = kind is SourceKind.DRAFTER and len(window) > 0
        tested = (self.source if source is None else source) if drafted else None
        met, late = self.chains.behind(position, window, chosen[len(window)] if len(chosen) > len(window) else None)
        if judge is not None:
            decision = judge(len(window), late)
        else:
            decision = decide(chosen, window, None if late is None else late.token)
        decision = self._kept(decision)
        if window:
            self.tested_us = self.ledger.elapsed_us
        self._learn(decision, len(window), tested, None if late is None else met)
        self.text.extend(decision.tokens)
        if self.history is not None:
            self.history.extend(decision.tokens)
        self.chains.advance(self.text)
        for own in (self.ngram, self.head):
            if own is not None:
                own.text_grew()
        if self.finish is not None and self.ngram is not None:
            self.ngram.text_ended()
        logprobs = report(decision.tokens) if report is not None and decision.tokens else ()
        reached = late is not None and len(decision.tokens) > len(window)
        verdict = Verdict(
            position,
            decision.tokens,
            decision.outcomes,
            len(window),
            self.finish,
            kind,
            tested or 0,
            logprobs,
            met if reached else 0,
        )
        self.tail.add(verdict)
        return verdict

    def _kept(self, decision: Decision) -> Decision:
        """The part that belongs to the text, and whether the text ends or is stuck there."""
        kept, finish = self.ending.cut(self.position, decision.tokens)
        if self.matcher is not None:
            taken = self.matcher.take(decision.tokens[:kept])
            self.stuck = taken < kept
            kept, finish = taken, None if self.stuck else finish
        self.finish = finish
        return decision if kept == len(decision.tokens) else decision.clipped(kept)

    def _learn(self, decision: Decision, width: int, tested: int | None, met: int | None) -> None:
        """Note how often the sources are right. Positions of the window behind the text's end were not tested.

        met: the source whose token met the last row. So a step without a window tests a chain, too.
        """
        if tested is not None:
            kept, accepted = min(width, len(decision.tokens)), min(width, decision.accepted)
            self.chains.acceptance(tested).observe(kept, accepted)
            if kept and (pacing := self.drafters.get(tested)) is not None:
                pacing.tested(kept, accepted)
        if self.sampling.guessed:
            self.chains.learn(decision.tokens, tested)
        elif met is not None and width == 0:
            self.chains.acceptance(met).observe(1, decision.accepted)


# ----------------------------------------------------------------------------------------------------------------------
# A session in an engine: what its next step may cost it, and its charges. Pure; microseconds throughout.

LIVE = (Offer.STARTED, Offer.EXTENDED)


@dataclass(slots=True, eq=False)
class RunningSession:
    """since_us: the beginning of the time that the session's next verdict is charged for.

    waited_us: what it is charged of it for waiting: see `part_of`. proposed: something was, since the last verdict.
    unheard: verdicts since then for which a drafter owed a turn.
    """

    session: VerifySession
    since_us: float
    waited_us: float = 0.0
    proposed: bool = False
    unheard: int = 0

    def propose(self, proposal: Proposal, arrived_us: float, forwards: Iterable[tuple[float, float]] = ()) -> Offer:
        """A proposal arrived. forwards: when the last ones began and ended."""
        self.proposed, self.unheard = True, 0
        offer = self.session.offer(proposal)
        if pacing := self.session.drafters.get(proposal.source):
            live = offer in LIVE
            pacing.proposed(proposal, arrived_us, live, live or offer is Offer.CONTRADICTED, forwards)
        return offer

    @property
    def disturbs(self) -> bool:
        """Whether a drafter on the verifier's cores may be at work: its turn was not waited for.

        One that was silent for ENOUGH verdicts is taken to do nothing.
        """
        return not self.proposed and self.unheard < ENOUGH and self.session.in_turns

    def allow(self, allowance: Allowance, arrived_us: float) -> None:
        """Progress arrived. Time without room is charged to nobody."""
        paused = self.session.room == 0
        self.session.allow(allowance)
        if paused:
            self._charge_from(arrived_us)

    def begin(self, matcher: Matcher, now_us: float) -> None:
        """See VerifySession.begin. Time before it is charged to nobody."""
        self.session.begin(matcher)
        self._charge_from(now_us)

    def resume(
        self, tokens: Sequence[int], allowance: Allowance, now_us: float, epoch: int = 0
    ) -> Sequence[Verdict] | None:
        """See VerifySession.resume. The ledger's balance stays: it is newer."""
        paused = self.session.room == 0
        verdicts = self.session.resume(tokens, allowance, epoch)
        if verdicts is not None and paused:
            self._charge_from(now_us)
        return verdicts

    def _charge_from(self, now_us: float) -> None:
        """Forget the time and the waits before."""
        self.since_us, self.waited_us = now_us, 0.0

    def candidate(
        self,
        slot: int,
        cached: int,
        plain_us: float,
        look: bool = True,
        most: int = MOST_WINDOW,
    ) -> StepCandidate:
        """The session as `schedule` sees it.

        plain_us: of the batch. look: for what the verifier itself may guess. most: the longest window.
        """
        session = self.session
        path, room = session.best, session.room
        # Tokens of a chunk too long for any window have arrived, so they are not missing.
        missing = max(0, min(session.due, most, room - 1) - len(path.nodes))
        due = session.awaited(plain_us) if missing > 0 else None
        source = path.source
        if source is None:
            source = due[0] if due is not None else 0
        spare_us = session.ledger.spare_us(plain_us) - self.waited_us
        guess = session.look(look and most > 0)
        if guess is not None and len(guess.tokens) > most:
            guess = guess._replace(tokens=guess.tokens[:most]) if most else None
        return StepCandidate(
            slot,
            room,
            session.position - cached,
            session.width(path, most),
            spare_us,
            session.chains.acceptance(source),
            None if due is None else due[1],
            missing,
            guess,
            untested_us=session.untested_us,
            whole=session.whole(most),
        )

    def decided(self, now_us: float, tokens: int, plain_us: float | None, windows_us: float = 0.0) -> None:
        """A verdict of `tokens` goes out, and is charged for the time since the last one.

        plain_us: the plain step of the same batch. None: this step was it (no draft token tested, nothing waited for),
        or a prompt shared it. windows_us: its charge for what windows take, see `StepCosts.windows_us` and `part_of`.
        """
        spent_us, ledger = now_us - self.since_us, self.session.ledger
        if plain_us is None:
            ledger.charge(spent_us, tokens, spent_us / tokens)
        else:
            if self.waited_us:
                ledger.charge(0.0, 0, 0.0, self.waited_us)
            ledger.charge(spent_us, tokens, plain_us, plain_us + windows_us)
        self._charge_from(now_us)
        self.unheard = 0 if self.proposed or not self.session.in_turns else self.unheard + 1
        self.proposed = False
        for pacing in self.session.drafters.values():
            pacing.asked(self.session.position, now_us)

    def planned(self, verdict: Verdict, step: PlannedStep) -> tuple[SourcePace, ...]:
        """Plan its drafters behind a verdict; what they are to be told."""
        if not self.session.drafters:
            return ()
        tested = verdict.source if verdict.kind is SourceKind.DRAFTER and verdict.width else 0
        for source, pacing in self.session.drafters.items():
            pacing.verdict(verdict.width if source == tested else 0, step)
        return self.new_paces()

    def new_paces(self) -> tuple[SourcePace, ...]:
        """Of its drafters, those that were not told yet."""
        paces = [pacing.take_pace() for pacing in self.session.drafters.values()]
        return tuple([pace for pace in paces if pace is not None])

    def nothing_decided(self, now_us: float) -> None:
        """Charge a step that decided no token, for the time since the last verdict."""
        self.session.ledger.charge(now_us - self.since_us, 0, 0.0)
        self._charge_from(now_us)
