"""The invariants of PROTOCOL.md section 14, held against the parties' real state after every callback.

Only what belongs to the process that has just run is looked at, and of that only what has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from draft_service.sessions import DraftingSession
from orchestrator.session.driver import SessionDriver
from orchestrator.store import StoredSession
from specwire.core.draft import DraftSession
from specwire.core.messages import FinishReason, Proposal
from specwire.core.session import State
from specwire.core.text import Text, hash_of
from specwire.core.verify.chains import Chains, Offer
from tests.core.branching import Sent
from tests.simulation.clients import LibraryClient, SimAnswer, SimClient
from tests.simulation.expected import Expected, is_prefix
from tests.simulation.facts import Facts
from tests.simulation.loop import EPOCH, process_of
from tests.simulation.network import party_of
from tests.simulation.parties import DrafterParty, OrchestratorParty, VerifierParty
from tests.simulation.services import HeadedModel, Model
from verify_service.engine.sessions import Held

Watched = VerifierParty | DrafterParty | OrchestratorParty | SimClient | LibraryClient
EARLY = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR)
# Seconds by which a timer may be late in a process that is slow.
SLACK = 0.5
# Seconds between two callbacks of an orchestrator that runs, and within which it knows that its log takes nothing.
AWAKE = 2.0
TOLD_WITHIN = 8.0


class Checks:
    """The parties, and the checks of each."""

    def __init__(self, facts: Facts, detach_grace: float) -> None:
        self.facts = facts
        self._orchestrators = OrchestratorChecks(facts, detach_grace)
        self._verifiers = VerifierChecks(facts)
        self._drafters = DrafterChecks(facts)
        self.readers = ReaderChecks(facts)
        self._parties: dict[str, Watched] = {}

    def watch(self, name: str, party: Watched) -> None:
        """name: of a party in all its incarnations, or of a client's process."""
        self._parties[name] = party

    def after_step(self) -> None:
        process = process_of(self.facts.loop.running)
        party = self._parties.get(process) or self._parties.get(party_of(process))
        match party:
            case OrchestratorParty():
                self._orchestrators.check(party)
            case VerifierParty():
                self._verifiers.check(party)
            case DrafterParty():
                self._drafters.check(party)
            case SimClient() | LibraryClient():
                for answer in party.answers:
                    self.readers.check(answer)
            case None:
                return


@contextmanager
def overheard(facts: Facts) -> Iterator[None]:
    """Notes what drafters send, and what is offered to verifiers' sessions, as it happens."""
    offer, take_proposal = Chains.offer, DraftSession.take_proposal

    def offered(self: Chains, proposal: Proposal, text: Text) -> Offer:
        result = offer(self, proposal, text)
        facts.hold(facts.heard.note, self, proposal)
        facts.branched += bool(proposal.parents) and result is Offer.EXTENDED
        return result

    def taken(self: DraftSession) -> Proposal | None:
        proposal = take_proposal(self)
        if proposal is not None:
            _, sent = facts.sent.setdefault(id(self), (self, Sent()))
            facts.hold(sent.note, proposal, tuple(self.text.tokens))
        return proposal

    with patch.object(Chains, "offer", offered), patch.object(DraftSession, "take_proposal", taken):
        yield


class OrchestratorChecks:
    def __init__(self, facts: Facts, detach_grace: float) -> None:
        self._facts = facts
        self._grace = detach_grace

    def check(self, party: OrchestratorParty) -> None:
        running = party.running
        if running is None:
            return
        drivers = running.orchestrator.sessions
        if party.stopping:
            self._stopping(party)
        self._readiness(party)
        for driver in list(drivers.values()):
            self._driver(party.process, driver)

    def _stopping(self, party: OrchestratorParty) -> None:
        """It says so from its first moment on, and begins nothing more than what it has let in."""
        facts, running = self._facts, party.running
        assert running is not None
        accounts = running.orchestrator._allowances._accounts.values()
        admitted = {session_id for account in accounts for session_id in account.running}
        drivers = running.orchestrator.sessions.values()
        # One that is followed stays so when it has ended.
        begun = {driver.view.record.session_id for driver in drivers if driver.session.state is not State.FENCED}
        opening = set(running.orchestrator.roster._opening)
        known = facts.seen.setdefault(("stopping", party.process), begun | admitted | opening)
        facts.require(begun <= known, "a session was begun by an orchestrator that stops")
        facts.require(running.orchestrator.unready is not None, "it is ready for sessions, and stops")
        facts.require(not party.serving, "health checks are told that it serves, and it stops")

    def _readiness(self, party: OrchestratorParty) -> None:
        """Soon after its log takes no more writes it is not ready. A process that was stopped cannot know."""
        facts, now, key = self._facts, self._facts.loop.time(), ("log", party.process)
        since, last = facts.seen.get(key, (now, now))
        known = facts.store.troubled(party.name) and now - last < AWAKE
        facts.seen[key] = (since if known else now), now
        late = known and now - since > TOLD_WITHIN
        assert party.running is not None
        facts.require(
            not late or party.running.orchestrator.unready is not None, "it is ready, and its log takes nothing"
        )

    def _driver(self, process: str, driver: SessionDriver) -> None:
        facts, session, output = self._facts, driver.session, driver.view.output
        session_id = driver.view.record.session_id
        if driver.view.readers.count:
            facts.seen["read", process, session_id] = facts.loop.time()
        counters = session.emitted, session.durable, len(session.text), session.credit
        shown = len(output.tokens), len(output.text), output.end
        key = process, session_id, driver.fence
        if not facts.new(key, *counters, session.state, driver.view.stats.cached_tokens, *shown):
            return
        known = facts.of_record(driver.view.record)
        facts.credits[session_id] = max(session.credit, facts.credits.get(session_id, 0))
        if session.state is not State.FENCED:
            facts.require(list(counters) == sorted(counters), "emitted, durable, decided, credit:", counters)
            earned = self._earned(process, driver)
            facts.require(session.credit <= earned, "credit beyond what is earned:", session.credit, earned)
            facts.require(session.emitted == len(known.prompt) + len(output.tokens), "emitted is not what was shown")
            self._durable(driver, known)
        facts.require(known.decided(session.text.tokens), "decided what cannot be:", session.text.tokens, known)
        self._output(driver, known)
        self._cached(driver)
        if output.end is not None and output.end.reason is FinishReason.CANCELLED:
            self._cancelled(process, driver)

    def _earned(self, process: str, driver: SessionDriver) -> int:
        """The most credit that log and client have allowed so far: it never falls, the buffer may."""
        facts, session = self._facts, driver.session
        key = "earned", process, driver.view.record.session_id, driver.fence
        earned: int = max(facts.seen.get(key, 0), min(session.durable, session.taken) + session.buffer)
        facts.seen[key] = earned
        return earned

    def _durable(self, driver: SessionDriver, known: Expected) -> None:
        """What the owner takes for durable was acknowledged under its fence, and is what the log holds.

        So it is where a session is opened, which is from all of that.
        """
        facts, session, session_id = self._facts, driver.session, driver.view.record.session_id
        acknowledged = facts.books.known(session_id, driver.fence)
        facts.require(session.durable <= acknowledged, "durable, acknowledged:", session.durable, acknowledged)
        output = session.text.tokens[len(known.prompt) : session.durable]
        facts.require(facts.is_durable(session_id, output), "taken for durable, and not in the log:", output)

    def _output(self, driver: SessionDriver, known: Expected) -> None:
        facts, output = self._facts, driver.view.output
        emitted = len(known.prompt) + len(output.tokens)
        session_id = driver.view.record.session_id
        drives = driver.session.state is not State.FENCED
        acknowledged = facts.books.known(session_id, driver.fence if drives else None)
        facts.require(emitted <= acknowledged, "emitted, acknowledged under this fence:", emitted, acknowledged)
        facts.require(known.shown(output.tokens), "emitted what cannot be:", output.tokens, known)
        facts.require(facts.is_durable(session_id, output.tokens), "emitted, and not in the log:", output.tokens)
        facts.require(len(output.tokens) == len(output.outcomes) == len(output.text_ends), "outcomes or ends missing")
        reported = len(output.tokens) if known.wish.sampling.logprobs is not None else 0
        facts.require(len(output.logprobs) == reported, "log-probabilities, due:", len(output.logprobs), reported)
        if output.end is None or output.end.reason not in EARLY:
            facts.require(
                known.readable(output.tokens, output.text), "text, of tokens:", output.text, output.tokens, known
            )

    def _cached(self, driver: SessionDriver) -> None:
        """A prompt's keys and values come from sessions of the same tenant only."""
        facts, cached, session_id = self._facts, driver.view.stats.cached_tokens, driver.view.record.session_id
        first = facts.seen.setdefault(("first fence", session_id), driver.fence)
        if cached and facts.new(("cached", session_id), cached):
            facts.shared += 1
            again = driver.session.attach > 1 or driver.fence != first
            fits = facts.may_share(session_id, cached, again)
            facts.require(fits, "cached, and never had by a session of the tenant:", cached)

    def _cancelled(self, process: str, driver: SessionDriver) -> None:
        """Cancelled by somebody who may do so, or because nobody has read it for the grace."""
        facts, session_id = self._facts, driver.view.record.session_id
        if session_id in facts.books.orphaned:
            facts.unread.add(session_id)
            return
        if session_id in facts.ending or driver.following or not facts.new(("cancelled", process, session_id), True):
            return
        grace = self._grace if driver.view.record.request_id else 0.0
        away = facts.loop.time() - facts.seen.get(("read", process, session_id), 0.0)
        facts.require(away >= grace - SLACK, "cancelled by nobody, so long after it was read:", away)
        if driver.view.record.request_id and away >= grace - SLACK:
            facts.unread.add(session_id)


# Verifiers and drafters


class VerifierChecks:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def check(self, party: VerifierParty) -> None:
        if party.strand is None:
            return
        engine, process = party.strand.engine, party.process
        if party.stopping:
            self._stopping(party)
        if party.strand.head is not None:
            self._head(process, party.strand.head)
        self._turns(process, list(engine.roster))
        at_work = engine.computing
        for held in engine.roster:
            if held.waiting:
                self._held(process, held)
                continue
            cached = engine.lm.cached(held.slot)
            key = process, held.session_id
            if self._facts.new(key, held.session.position, held.fence, held.attach, cached, at_work):
                self._held(process, held)
                if not at_work:
                    self._cache(party.strand.lm, held.slot, held.session.text.tokens, cached)
        if not at_work:
            self._kept(party)

    def _stopping(self, party: VerifierParty) -> None:
        """It opens no more sessions."""
        facts, key, opened = self._facts, ("stopping", party.process), set(party.opened)
        facts.require(opened <= facts.seen.get(key, opened), "a session was opened at a verifier that stops")
        facts.seen[key] = opened

    def _turns(self, process: str, roster: list[Held]) -> None:
        """Among one tenant's waiting sessions none is overtaken by a less urgent or a later one."""
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
        facts.note_text(held.session_id, tuple(text))
        credit = facts.credits.get(held.session_id, 0)
        facts.require(position <= credit, "a verifier decided, its credit:", position, credit)
        self._generation(process, held)
        self._drafted_for(held)
        facts.hold(facts.heard.check, session.chains, session.text)

    def _head(self, process: str, lm: HeadedModel) -> None:
        """It is asked behind what its slots hold, and never again once it has failed."""
        facts, wrong = self._facts, lm.wrong
        facts.switched_off += lm.failures > 0 and facts.new(("failed", process), lm.failures)
        while wrong:
            facts.report(wrong.pop())

    def _drafted_for(self, held: Held) -> None:
        """By a head, which rules that look at draft tokens have no use for."""
        facts, head, sampling = self._facts, held.session.head, held.session.sampling
        facts.require(head is None or sampling.guessed, "a head drafts under a rule that looks at it:", sampling.rule)
        if head is not None and head.proposed:
            facts.headed.add(held.session_id)
        elif head is None and held.session_id in facts.headed:
            facts.passed_on.add(held.session_id)

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
                lm._rows[slot][cached - 1].prefix == cache_hash(lm, text[:cached]),
                "a cache entry was computed from another text",
            )

    def _kept(self, party: VerifierParty) -> None:
        """Kept slots hold the texts that they are registered with."""
        assert party.strand is not None
        lm, kept = party.strand.lm, party.strand.engine.sessions.slot_queue.slots._kept
        for slot, each in kept.items():
            if self._facts.new(("kept", party.process, slot), each.session_id, each.prefix.length, lm.cached(slot)):
                self._cache(lm, slot, each.prefix.tokens[: each.prefix.length], lm.cached(slot))


def cache_hash(lm: Model, text: Sequence[int]) -> int:
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
            session, cached = drafting.session, lm.cached(drafting.slot)
            last = facts.seen.get((party.process, *key))
            state = session.in_flight, session.allowed, session.decided, session.chain, cached
            if not facts.new((party.process, *key), *state):
                continue
            allowed = session.allowed
            if last is not None and session.in_flight > last[0] and allowed == last[1]:
                facts.require(session.in_flight <= allowed, "drafted ahead, allowed:", session.in_flight, allowed)
            self._cache(lm, drafting)

    def _cache(self, lm: Model, drafting: DraftingSession) -> None:
        """The slot holds the text's beginning, then nodes that are live, each computed behind its own path."""
        session, rows, held = drafting.session, drafting.rows, lm._rows[drafting.slot]
        text, trunk = session.text.tokens, lm.cached(drafting.slot) - len(rows)
        self._facts.require(0 <= trunk <= len(text), "a drafter's cache holds more than the text")
        paths: list[tuple[int, ...]] = [()]
        for node in rows:
            if not node.live:
                self._facts.report("a drafter's cache holds a node that was pruned")
                return
            paths.append(session.path(node))
        for row, path in enumerate(paths, trunk - 1):
            if row >= 0:
                behind = text if path else text[:trunk]
                is_its = held[row].prefix == cache_hash(lm, [*behind, *path])
                self._facts.require(is_its, "a drafter's cache is not its text's")


# The log whenever it is written, and clients whenever they are told something


class ReaderChecks:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def log_written(self, log: StoredSession) -> None:
        """It only grows, and ends once. After a loss it does not contradict what was shown."""
        facts, session_id = self._facts, log.record.session_id
        known, before = facts.of_record(log.record), facts.durable.get(session_id, ())
        facts.require(known.shown(log.tokens), "the log holds what cannot be:", log.tokens, known)
        grows = facts.books.losses > 0 or is_prefix(before, log.tokens)
        facts.require(grows, "the log held, and now holds:", before, log.tokens)
        facts.durable[session_id] = log.tokens
        again = log.reason is None and session_id in facts.ended and not facts.books.losses
        facts.require(not again, "a session that had ended runs again:", facts.ended.get(session_id))
        if log.reason is not None:
            facts.ended[session_id] = log.tokens, log.reason, log.text_length
        facts.require(len(log.tokens) == len(log.outcomes), "the log lacks outcomes")
        reported = len(log.tokens) if known.wish.sampling.logprobs is not None else 0
        facts.require(len(log.logprobs) == reported, "the log lacks log-probabilities")
        gone = session_id in facts.deleted and not facts.books.losses
        facts.require(not gone, "the log of a session that was deleted is written")
        if len(log.tokens) > len(before):
            self._timely(log)
        if log.reason is not None and log.reason not in EARLY:
            end = known.ended(log.tokens)
            right = end is not None and (log.tokens, log.text_length, log.reason) == (end[0], len(end[1]), end[2])
            facts.require(right, "the log ends:", log.tokens, log.text_length, log.reason, known)

    def _timely(self, log: StoredSession) -> None:
        """Nothing is added long after the deadline, or after somebody was told that it is cancelled, or deleted."""
        facts, deadline = self._facts, log.record.deadline
        passed = bool(deadline) and facts.is_late(deadline - EPOCH + facts.skew)
        facts.require(not passed, "a session goes on after its deadline:", deadline - EPOCH)
        cancelled = facts.cancelled.get(log.record.session_id)
        facts.require(cancelled is None or not facts.is_late(cancelled), "it goes on, cancelled at:", cancelled)
        deleted = facts.deleted.get(log.record.session_id)
        facts.require(deleted is None or not facts.is_late(deleted), "it goes on, deleted at:", deleted)

    # A client

    def check(self, answer: SimAnswer) -> None:
        facts, session_id = self._facts, answer.session_id
        if not session_id or not facts.new(id(answer), len(answer.tokens), len(answer.text), session_id):
            return
        known = facts.of_session(session_id)
        if known is None:
            facts.report("a client was told of a session that nobody has begun")
            return
        self._asked(answer)
        facts.require(known.shown(answer.tokens), "a client has what cannot be:", answer.tokens, known)
        facts.require(facts.is_durable(session_id, answer.tokens), "a client has what the log has not:", answer.tokens)
        if answer.end is None:
            readable = known.readable(answer.tokens, answer.text)
            facts.require(readable, "a client reads:", answer.text, answer.tokens, known)
        self._reported(answer)

    def _asked(self, answer: SimAnswer) -> None:
        """The session is the one that was asked for: this tenant's, this prompt, these parameters, this choice."""
        facts, started = self._facts, answer.started
        if started is None or not facts.new(("asked", id(answer)), answer.session_id):
            return
        record, request = facts.records[answer.session_id], answer.request
        facts.require(record.tenant == answer.tenant, "a client reads a session of", record.tenant)
        facts.require(record.prompt == answer.prompt, "the prompt, asked for:", record.prompt, answer.prompt)
        facts.require(started.prompt_tokens == len(answer.prompt), "the prompt's length:", started.prompt_tokens)
        facts.require(started.prompt_hash == hash_of(answer.prompt), "the prompt's hash is another")
        wanted = request.sampling(answer.choice)
        facts.require(record.sampling == wanted, "sampling, asked for:", record.sampling, wanted)
        facts.require(
            record.stopping == request.stopping and record.stop == request.stop, "it stops otherwise than asked"
        )
        facts.require(started.lossy == wanted.lossy, "lossy, by rule:", started.lossy, wanted.rule)
        echoed = tuple(started.prompt) if started.prompt is not None else ()
        facts.require(echoed == (answer.prompt if request.echo else ()), "echoed:", echoed)

    def _reported(self, answer: SimAnswer) -> None:
        """Log-probabilities, one for each token, of what it was drawn from."""
        facts, request = self._facts, answer.request
        wanted = len(answer.tokens) if request.logprobs is not None else 0
        facts.require(len(answer.logprobs) == wanted, "log-probabilities, due:", len(answer.logprobs), wanted)
        known = facts.of_session(answer.session_id)
        if known is None:
            return
        first = facts.seen.get(("reported", id(answer)), 0)
        for index, reported in enumerate(answer.logprobs[first:], first):
            right = known.reports([*answer.prompt, *answer.tokens[: index + 1]], reported)
            facts.require(right, "a log-probability is not its token's:", reported)
        facts.seen["reported", id(answer)] = len(answer.logprobs)
