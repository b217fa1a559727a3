"""What holds for the log whenever it is written, and for clients whenever they are told something."""

from __future__ import annotations

from orchestrator.store import StoredSession
from specwire.core.messages import FinishReason
from specwire.core.text import hash_of
from tests.simulation.expected import is_prefix
from tests.simulation.facts import Facts
from tests.simulation.hearing import Heard
from tests.simulation.loop import EPOCH

EARLY = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR)


class ReaderChecks:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def log_written(self, log: StoredSession) -> None:
        """It only grows, and ends once. What the log holds after a loss was shown to nobody otherwise."""
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

    def check(self, heard: Heard) -> None:
        facts, session_id = self._facts, heard.session_id
        if not session_id or not facts.new(id(heard), len(heard.tokens), len(heard.text), session_id):
            return
        known = facts.of_session(session_id)
        if known is None:
            facts.report("a client was told of a session that nobody has begun")
            return
        self._asked(heard)
        facts.require(known.shown(heard.tokens), "a client has what cannot be:", heard.tokens, known)
        facts.require(facts.is_durable(session_id, heard.tokens), "a client has what the log has not:", heard.tokens)
        if heard.end is None:
            readable = known.readable(heard.tokens, heard.text)
            facts.require(readable, "a client reads:", heard.text, heard.tokens, known)
        self._reported(heard)

    def _asked(self, heard: Heard) -> None:
        """The session is the one that was asked for: this tenant's, this prompt, these parameters, this choice."""
        facts, started = self._facts, heard.started
        if started is None or not facts.new(("asked", id(heard)), heard.session_id):
            return
        record, ask = facts.records[heard.session_id], heard.ask
        facts.require(record.tenant == heard.tenant, "a client reads a session of", record.tenant)
        facts.require(record.prompt == heard.prompt, "the prompt, asked for:", record.prompt, heard.prompt)
        facts.require(started.prompt_tokens == len(heard.prompt), "the prompt's length:", started.prompt_tokens)
        facts.require(started.prompt_hash == hash_of(heard.prompt), "the prompt's hash is another")
        wanted = ask.sampling(heard.choice)
        facts.require(record.sampling == wanted, "sampling, asked for:", record.sampling, wanted)
        facts.require(record.stopping == ask.stopping and record.stop == ask.stop, "it stops otherwise than asked")
        facts.require(started.lossy == wanted.lossy, "lossy, by rule:", started.lossy, wanted.rule)
        echoed = tuple(started.prompt) if started.prompt is not None else ()
        facts.require(echoed == (heard.prompt if ask.echo else ()), "echoed:", echoed)

    def _reported(self, heard: Heard) -> None:
        """Log-probabilities, one for each token, of what it was drawn from."""
        facts, ask = self._facts, heard.ask
        wanted = len(heard.tokens) if ask.logprobs is not None else 0
        facts.require(len(heard.logprobs) == wanted, "log-probabilities, due:", len(heard.logprobs), wanted)
        known = facts.of_session(heard.session_id)
        if known is None:
            return
        first = facts.seen.get(("reported", id(heard)), 0)
        for index, reported in enumerate(heard.logprobs[first:], first):
            right = known.reports([*heard.prompt, *heard.tokens[: index + 1]], reported)
            facts.require(right, "a log-probability is not its token's:", reported)
        facts.seen["reported", id(heard)] = len(heard.logprobs)
