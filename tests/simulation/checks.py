"""The invariants of ARCHITECTURE.md section 6, held against the parties' real state after every callback.

Only what belongs to the process that has just run is looked at, and of that only what has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.driver import SessionDriver
from orchestrator.store import SessionRecord, StoredSession
from specwire.core.limits import FinishReason
from specwire.core.states import State
from tests.simulation.client import Heard, SimClient
from tests.simulation.library import LibraryClient
from tests.simulation.loop import SimLoop
from tests.simulation.network import party_of
from tests.simulation.oracle import Oracle, plain
from tests.simulation.parties import DrafterParty, OrchestratorParty, VerifierParty
from tests.simulation.services import Model, script
from tests.simulation.store import Books
from verify_service.roster import Held

Watched = VerifierParty | DrafterParty | OrchestratorParty | SimClient | LibraryClient
EARLY = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR)


def is_prefix(part: Sequence[Any], whole: Sequence[Any]) -> bool:
    return len(part) <= len(whole) and tuple(whole[: len(part)]) == tuple(part)


class Checks:
    """`found`: what does not hold, with the time. `credits`: the most that any owner has allowed, by session."""

    def __init__(self, loop: SimLoop, seed: int, books: Books) -> None:
        self.found: list[str] = []
        self.oracles: dict[str, Oracle] = {}
        self.credits: dict[str, int] = {}
        self.checked = self.resumed = 0
        self._loop = loop
        self._books = books
        self._script = script(seed)
        self._tokenizer = Model(self._script, 1, 1.0).tokenizer
        self._seen: dict[Any, Any] = {}
        self._parties: dict[str, Watched] = {}

    def watch(self, name: str, party: Watched) -> None:
        self._parties[name] = party

    def report(self, message: str) -> None:
        self.found.append(f"{self._loop.time():.4f} s, {self._loop.running}: {message}")

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.report(message)

    def oracle(self, record: SessionRecord) -> Oracle:
        known = self.oracles.get(record.session_id)
        if known is None:
            wanted = record.prompt, record.sampling, record.stopping, record.stop
            known = self.oracles[record.session_id] = plain(self._script, self._tokenizer, *wanted)
        return known

    def decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))

    def after_step(self) -> None:
        party = self._parties.get(party_of(self._loop.running))
        match party:
            case OrchestratorParty():
                if party.orchestrator is not None:
                    for driver in list(party.orchestrator.sessions.values()):
                        self._driver(party.process, driver)
            case VerifierParty():
                self._verifier(party)
            case DrafterParty():
                self._drafter(party)
            case SimClient() | LibraryClient():
                self._client(party.heard)
            case None:
                return

    def _new(self, key: Any, *state: Any) -> bool:
        """Whether this state was not seen at the last look."""
        if self._seen.get(key) == state:
            return False
        self._seen[key] = state
        self.checked += 1
        return True

    # A session at its orchestrator

    def _driver(self, process: str, driver: SessionDriver) -> None:
        session, output = driver.session, driver.output
        counters = session.emitted, session.durable, len(session.text), session.credit
        shown = len(output.tokens), len(output.text), output.end
        if not self._new((process, driver.record.session_id, driver.fence), *counters, session.state, *shown):
            return
        oracle = self.oracle(driver.record)
        session_id = driver.record.session_id
        self.credits[session_id] = max(session.credit, self.credits.get(session_id, 0))
        if session.state is not State.FENCED:
            self.require(list(counters) == sorted(counters), f"emitted, durable, decided, credit: {counters}")
            earned = self._earned(process, driver)
            self.require(session.credit <= earned, f"credit {session.credit}, earned are {earned}")
            self.require(session.emitted == len(oracle.prompt) + len(output.tokens), "emitted is not what was shown")
        self.require(is_prefix(session.text.tokens, oracle.raw), f"decided {session.text.tokens}, not {oracle.raw}")
        self._output(driver, oracle)

    def _earned(self, process: str, driver: SessionDriver) -> int:
        """The most credit that log and client have allowed so far: it never falls, the buffer may."""
        key, session = ("earned", process, driver.record.session_id, driver.fence), driver.session
        earned: int = max(self._seen.get(key, 0), min(session.durable, session.taken) + session.buffer)
        self._seen[key] = earned
        return earned

    def _output(self, driver: SessionDriver, oracle: Oracle) -> None:
        output = driver.output
        emitted = len(oracle.prompt) + len(output.tokens)
        session_id = driver.record.session_id
        drives = driver.session.state is not State.FENCED
        acknowledged = self._books.known(session_id, driver.fence if drives else None)
        self.require(emitted <= acknowledged, f"emitted {emitted}, acknowledged under this fence {acknowledged}")
        self.require(is_prefix(output.tokens, oracle.tokens), f"emitted {output.tokens}, not {oracle.tokens}")
        self.require(len(output.tokens) == len(output.outcomes) == len(output.text_ends), "outcomes or ends missing")
        if output.end is None or output.end.reason not in EARLY:
            self.require(is_prefix(output.text, oracle.text), f"text {output.text!r}, not {oracle.text!r}")

    # A session at a verifier

    def _verifier(self, party: VerifierParty) -> None:
        if party.strand is None:
            return
        engine = party.strand.engine
        for held in engine.roster:
            if held.waiting:
                self._held(party.process, held)
                continue
            cached = engine.lm.cached(held.slot)
            at_work = engine.under_way is not None
            key = party.process, held.session_id
            if self._new(key, held.session.position, held.fence, held.attach, cached, at_work):
                self._held(party.process, held)
                if not at_work:
                    self._cache(engine.lm, held, cached)

    def _held(self, process: str, held: Held) -> None:
        oracle = self.oracles.get(held.session_id)
        if oracle is None:
            self.report(f"a verifier holds {held.session_id}, which no owner has begun")
            return
        text, position = held.session.text.tokens, held.session.position
        self.require(is_prefix(text, oracle.raw), f"the verifier decided {text}, not {oracle.raw}")
        credit = self.credits.get(held.session_id, 0)
        self.require(position <= credit, f"the verifier decided {position} tokens, its credit was {credit}")
        self._generation(process, held)
        for chain in held.session.chains._live.values():
            decided = chain.tokens[: max(0, position - chain.base)]
            agrees = text[chain.base : chain.base + len(decided)] == list(decided)
            self.require(agrees, "a chain lives that the text contradicts")

    def _generation(self, process: str, held: Held) -> None:
        """The newest (fence, attach) that was opened here is the one that is served."""
        key = "generation", process, held.session_id
        newest, generation = self._seen.get(key, (0, 0)), (held.fence, held.attach)
        self.require(generation >= newest, f"{generation} is served after {newest}")
        self.resumed += newest != (0, 0) and generation > newest
        self._seen[key] = max(newest, generation)

    def _cache(self, lm: Model, held: Held, cached: int) -> None:
        oracle = self.oracles.get(held.session_id)
        self.require(cached <= held.session.position, "a cache holds more than the text")
        if oracle is not None and 0 < cached <= min(held.session.position, len(oracle.raw)):
            computed = lm._hashes[held.slot][cached - 1]
            self.require(computed == oracle.hashes[cached], "a cache entry was computed from another text")

    # A session at a drafter

    def _drafter(self, party: DrafterParty) -> None:
        if party.strand is None:
            return
        book, lm = party.strand.book, party.strand.lm
        for key, drafting in book._open.items():
            session = drafting.session
            last = self._seen.get((party.process, *key))
            state = len(session.text), session.pace.run_ahead, session.decided, session.chain
            if not self._new((party.process, *key), *state):
                continue
            allowed = session.pace.run_ahead
            if last is not None and len(session.text) > last[0] and allowed == last[1]:
                self.require(session.in_flight <= allowed, f"drafted {session.in_flight} ahead, allowed are {allowed}")
            self._drafters_cache(lm, lm.cached(drafting.slot), drafting.slot, session.text.tokens)

    def _drafters_cache(self, lm: Model, cached: int, slot: int, text: Sequence[int]) -> None:
        self.require(cached <= len(text), "a drafter's cache holds more than the text")
        prefix = 0
        for token in text[:cached]:
            prefix = lm.script.extend(prefix, token)
        if cached:
            self.require(lm._hashes[slot][cached - 1] == prefix, "a drafter's cache is not its text's")

    # The log and the clients

    def log_written(self, log: StoredSession) -> None:
        oracle = self.oracle(log.record)
        self.require(is_prefix(log.tokens, oracle.tokens), f"the log holds {log.tokens}, not {oracle.tokens}")
        self.require(len(log.tokens) == len(log.outcomes), "the log lacks outcomes")
        if log.reason is not None and log.reason not in EARLY:
            self.require(log.tokens == oracle.tokens, f"the log ends with {log.reason!r} after {log.tokens}")
            self.require(log.text_length == len(oracle.text), f"the log says {log.text_length} characters")

    def _client(self, heard: Heard) -> None:
        if not self._new(id(heard), len(heard.tokens), len(heard.text)):
            return
        oracle = self.oracles.get(heard.session_id)
        if oracle is None:
            self.report("a client was told of a session that nobody has begun")
            return
        self.require(is_prefix(heard.tokens, oracle.tokens), f"a client has {heard.tokens}, not {oracle.tokens}")
        if heard.end is None:
            self.require(is_prefix(heard.text, oracle.text), f"a client has {heard.text!r}, not {oracle.text!r}")
