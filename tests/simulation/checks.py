"""The invariants of ARCHITECTURE.md section 6, held against the parties' real state after every callback.

Only what belongs to the process that has just run is looked at, and of that only what has changed.
"""

from __future__ import annotations

from orchestrator.session.driver import SessionDriver
from specwire.core.messages import FinishReason
from specwire.core.session import State
from tests.simulation.checks_of_readers import ReaderChecks
from tests.simulation.checks_of_services import DrafterChecks, VerifierChecks
from tests.simulation.client import SimClient
from tests.simulation.expected import Expected
from tests.simulation.facts import Facts
from tests.simulation.library import LibraryClient
from tests.simulation.loop import process_of
from tests.simulation.network import party_of
from tests.simulation.parties import DrafterParty, OrchestratorParty, VerifierParty

Watched = VerifierParty | DrafterParty | OrchestratorParty | SimClient | LibraryClient
EARLY = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR)
# Seconds by which a timer may be late in a process that is slow.
SLACK = 0.5
# Seconds between two callbacks of an orchestrator that runs, and within which it knows that its log takes nothing.
AWAKE = 2.0
TOLD_WITHIN = 8.0


class Checks:
    """Who is looked at, and by what."""

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
                for heard in party.hearings:
                    self.readers.check(heard)
            case None:
                return


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
        begun = {driver.record.session_id for driver in drivers if driver.session.state is not State.FENCED}
        opening = set(running.orchestrator.roster._opening)
        known = facts.seen.setdefault(("stopping", party.process), begun | admitted | opening)
        facts.require(begun <= known, "a session was begun by an orchestrator that stops")
        facts.require(running.orchestrator.unready is not None, "it is ready for sessions, and stops")
        facts.require(not party.serving, "health checks are told that it serves, and it stops")

    def _readiness(self, party: OrchestratorParty) -> None:
        """Soon after its log has ceased to take anything it is not ready. Who was stopped for a while knows nothing."""
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
        facts, session, output = self._facts, driver.session, driver.output
        session_id = driver.record.session_id
        if driver.readers.count:
            facts.seen["read", process, session_id] = facts.loop.time()
        counters = session.emitted, session.durable, len(session.text), session.credit
        shown = len(output.tokens), len(output.text), output.end
        key = process, session_id, driver.fence
        if not facts.new(key, *counters, session.state, driver.stats.cached_tokens, *shown):
            return
        known = facts.of_record(driver.record)
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
        key = "earned", process, driver.record.session_id, driver.fence
        earned: int = max(facts.seen.get(key, 0), min(session.durable, session.taken) + session.buffer)
        facts.seen[key] = earned
        return earned

    def _durable(self, driver: SessionDriver, known: Expected) -> None:
        """What the owner takes for durable was acknowledged under its fence, and is what the log holds.

        So it is where a session is opened, which is from all of that.
        """
        facts, session, session_id = self._facts, driver.session, driver.record.session_id
        acknowledged = facts.books.known(session_id, driver.fence)
        facts.require(session.durable <= acknowledged, "durable, acknowledged:", session.durable, acknowledged)
        output = session.text.tokens[len(known.prompt) : session.durable]
        facts.require(facts.is_durable(session_id, output), "taken for durable, and not in the log:", output)

    def _output(self, driver: SessionDriver, known: Expected) -> None:
        facts, output = self._facts, driver.output
        emitted = len(known.prompt) + len(output.tokens)
        session_id = driver.record.session_id
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
        facts, cached, session_id = self._facts, driver.stats.cached_tokens, driver.record.session_id
        first = facts.seen.setdefault(("first fence", session_id), driver.fence)
        if cached and facts.new(("cached", session_id), cached):
            facts.shared += 1
            again = driver.session.attach > 1 or driver.fence != first
            fits = facts.may_share(session_id, cached, again)
            facts.require(fits, "cached, and never had by a session of the tenant:", cached)

    def _cancelled(self, process: str, driver: SessionDriver) -> None:
        """By somebody who has the right to; or nobody has read it here for as long as readers may be away."""
        facts, session_id = self._facts, driver.record.session_id
        if session_id in facts.books.orphaned:
            facts.unread.add(session_id)
            return
        if session_id in facts.ending or driver.following or not facts.new(("cancelled", process, session_id), True):
            return
        grace = self._grace if driver.record.request_id else 0.0
        away = facts.loop.time() - facts.seen.get(("read", process, session_id), 0.0)
        facts.require(away >= grace - SLACK, "cancelled by nobody, so long after it was read:", away)
        if driver.record.request_id and away >= grace - SLACK:
            facts.unread.add(session_id)
