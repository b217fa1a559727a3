"""What holds at verifiers and drafters after every callback of theirs."""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.facts import Facts
from tests.simulation.parties import DrafterParty, VerifierParty
from tests.simulation.services import Model
from verify_service.engine.sessions import Held


class VerifierChecks:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def check(self, party: VerifierParty) -> None:
        if party.strand is None:
            return
        engine, process = party.strand.engine, party.process
        if party.stopping:
            self._stopping(party)
        self._turns(process, list(engine.roster))
        at_work = engine.under_way is not None
        for held in engine.roster:
            if held.waiting:
                self._held(process, held)
                continue
            cached = engine.lm.cached(held.slot)
            key = process, held.session_id
            if self._facts.new(key, held.session.position, held.fence, held.attach, cached, at_work):
                self._held(process, held)
                if not at_work:
                    self._cache(engine.lm, held.slot, held.session.text.tokens, cached)
        if not at_work:
            self._kept(party)

    def _stopping(self, party: VerifierParty) -> None:
        """It opens no more sessions."""
        facts, key, opened = self._facts, ("stopping", party.process), set(party.opened)
        facts.require(opened <= facts.seen.get(key, opened), "a session was opened at a verifier that stops")
        facts.seen[key] = opened

    def _turns(self, process: str, roster: list[Held]) -> None:
        """Of one tenant's sessions that wait, nobody is passed over by a less urgent one, or by one that came later."""
        facts = self._facts
        waits = [(held.scope, -held.priority, held) for held in roster if held.waiting]
        before = facts.seen.get(("turns", process), [])
        facts.seen["turns", process] = waits
        if not before or waits == before:
            return
        facts.queued += 1
        seated = [held for held in roster if not held.waiting]
        for number, (scope, urgency, who) in enumerate(before):
            if who in seated:
                others = [(u, n, w) for n, (s, u, w) in enumerate(before) if s == scope and (s, u, w) in waits]
                passed = any((u, n) < (urgency, number) for u, n, _ in others)
                facts.require(not passed, "a session got a slot before another one of its tenant, whose turn it was")

    def _held(self, process: str, held: Held) -> None:
        facts, session = self._facts, held.session
        known = facts.of_session(held.session_id)
        if known is None:
            facts.report(f"a verifier holds {held.session_id}, which no owner has begun")
            return
        text, position = session.text.tokens, session.position
        facts.require(known.decided(text), "a verifier decided what cannot be:", text, known)
        if len(text) > len(facts.texts.get(held.session_id, ())):
            facts.texts[held.session_id] = tuple(text)
        credit = facts.credits.get(held.session_id, 0)
        facts.require(position <= credit, "a verifier decided, its credit:", position, credit)
        self._generation(process, held)
        for chain in session.chains._live.values():
            decided = chain.tokens[: max(0, position - chain.base)]
            agrees = text[chain.base : chain.base + len(decided)] == list(decided)
            facts.require(agrees, "a chain lives that the text contradicts")

    def _generation(self, process: str, held: Held) -> None:
        """The newest (fence, attach) that was opened here is the one that is served. A new one begins with the log."""
        facts, key = self._facts, ("generation", process, held.session_id)
        newest, generation = facts.seen.get(key, (0, 0)), (held.fence, held.attach)
        facts.require(generation >= newest, "generation served, after:", generation, newest)
        facts.resumed += newest != (0, 0) and generation > newest
        facts.seen[key] = max(newest, generation)

    def _cache(self, lm: Model, slot: int, text: Sequence[int], cached: int) -> None:
        facts = self._facts
        facts.require(cached <= len(text), "a cache holds more than the text")
        if 0 < cached <= len(text):
            facts.require(
                lm._hashes[slot][cached - 1] == hash_of(lm, text[:cached]),
                "a cache entry was computed from another text",
            )

    def _kept(self, party: VerifierParty) -> None:
        """What is kept for others is what it is taken for."""
        assert party.strand is not None
        lm, kept = party.strand.engine.lm, party.strand.engine.reception.seating.slots._kept
        for slot, each in kept.items():
            if self._facts.new(("kept", party.process, slot), each.session_id, each.prefix.length, lm.cached(slot)):
                self._cache(lm, slot, each.prefix.tokens[: each.prefix.length], lm.cached(slot))


def hash_of(lm: Model, text: Sequence[int]) -> int:
    value = 0
    for token in text:
        value = lm.script.extend(value, token)
    return value


class DrafterChecks:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def check(self, party: DrafterParty) -> None:
        if party.strand is None:
            return
        facts, book, lm = self._facts, party.strand.book, party.strand.lm
        for key, drafting in book._open.items():
            session = drafting.session
            last = facts.seen.get((party.process, *key))
            state = len(session.text), session.pace.run_ahead, session.decided, session.chain
            if not facts.new((party.process, *key), *state):
                continue
            allowed = session.pace.run_ahead
            if last is not None and len(session.text) > last[0] and allowed == last[1]:
                facts.require(session.in_flight <= allowed, "drafted ahead, allowed:", session.in_flight, allowed)
            self._cache(lm, lm.cached(drafting.slot), drafting.slot, session.text.tokens)

    def _cache(self, lm: Model, cached: int, slot: int, text: Sequence[int]) -> None:
        self._facts.require(cached <= len(text), "a drafter's cache holds more than the text")
        if cached:
            is_its = lm._hashes[slot][cached - 1] == hash_of(lm, text[:cached])
            self._facts.require(is_its, "a drafter's cache is not its text's")
