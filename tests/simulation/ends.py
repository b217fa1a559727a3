"""How a client's request may end, given its scenario's faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc

from specwire.core.messages import FinishReason
from tests.simulation.clients import SimAnswer
from tests.simulation.facts import Facts
from tests.simulation.requests import SimRequest
from tests.simulation.scenario import HARD_LOG_FAULTS, LOG_FAULTS, LOSING, Scenario

# Seconds for which sessions are kept at least where nobody has to fear that they are forgotten.
KEPT = 600.0
# Seconds of silence for which an owner does not give its session up.
TIRED = 20.0
EARLY = (FinishReason.CANCELLED, FinishReason.DEADLINE)


class Judge:
    """What is wrong with the end of a request, one sentence each."""

    def __init__(self, scenario: Scenario, facts: Facts, answers: Sequence[SimAnswer]) -> None:
        self._scenario = scenario
        self._facts = facts
        self._answers = answers

    def all(self) -> Iterable[str]:
        for answer in self._answers:
            if not answer.done:
                yield f"{answer.request} has not ended"
            elif answer.end is not None:
                yield from self._finished(answer)
                yield from self._logged(answer)
            elif not (answer.left or answer.unasked) and answer.error not in self._allowed(answer) | self._hard(answer):
                yield f"{answer.request} failed with {answer.error}: {answer.details}"
            if answer.session_id and is_foreign(self._scenario, answer.request):
                yield f"{answer.request} goes on behind another tenant's session"

    def _finished(self, answer: SimAnswer) -> Iterable[str]:
        assert answer.end is not None
        readers = [each for each in self._answers if each.session_id == answer.session_id]
        known = self._facts.of_session(answer.session_id)
        assert known is not None
        reason, tokens, text = answer.end.reason, tuple(answer.tokens), answer.text
        if answer.end.text_length != len(text):
            yield f"the end says {answer.end.text_length} characters, the text has {len(text)}"
        if answer.end.lossy != known.wish.sampling.lossy:
            yield f"the end says lossy={answer.end.lossy} of {known.wish.sampling.rule}"
        if reason is FinishReason.CANCELLED:
            asked = any(each.cancelled or each.left or each.error or each.deleted for each in readers)
            if not asked and answer.session_id not in self._facts.unread:
                yield "cancelled by nobody"
        elif reason is FinishReason.DEADLINE:
            if all(each.request.timeout is None for each in readers):
                yield "ended by a deadline that nobody set"
        elif (tokens, text, reason) != known.ended(tokens):
            yield f"ended with {(tokens, text, reason)}, not {known.ended(tokens)}"
        if reason in EARLY and text != known.decoded(tokens):
            yield f"ended early with {text!r}, not {known.decoded(tokens)!r}"

    def _logged(self, answer: SimAnswer) -> Iterable[str]:
        """What was shown, to its end, is what the log has taken; after a loss it may have been lost, too."""
        assert answer.end is not None
        shown, logged = (tuple(answer.tokens), answer.end.reason, answer.end.text_length), self._facts.ended
        if shown != logged.get(answer.session_id) and not self._facts.books.losses:
            yield f"shown was {shown}, the log ended with {logged.get(answer.session_id)}"

    def _allowed(self, answer: SimAnswer) -> set[grpc.StatusCode]:
        """Statuses that a request may fail with here."""
        scenario, request, codes = self._scenario, answer.request, set[grpc.StatusCode]()
        if scenario.slots < scenario.sessions:
            codes |= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}  # what a repeated id is told
            if request.library and answer.session_id:
                codes.add(grpc.StatusCode.UNAVAILABLE)  # why it came back, and then found no room
        if request.timeout is not None:
            codes.add(grpc.StatusCode.DEADLINE_EXCEEDED)
        comes_back = request.request_id and request.timeout is None
        if request.library:  # if nobody has answered, the library takes it that nobody is there
            comes_back = bool(answer.session_id) and request.timeout is None
        if not comes_back and any(disturbs(fault.kind, fault.target) for fault in scenario.faults):
            codes.add(grpc.StatusCode.UNAVAILABLE)
        if any(fault.kind in LOSING for fault in scenario.faults) and memory_may_be_lost(scenario, request):
            # The library says why it came back at all.
            codes |= {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE}
            codes |= {grpc.StatusCode.FAILED_PRECONDITION} if request.follows is not None else set()
        if any(each.same_id(request) and not each.same_body(request) for each in scenario.requests):
            codes.add(grpc.StatusCode.ALREADY_EXISTS)
        if self._is_deleted(request) or is_foreign(scenario, request):
            codes.add(grpc.StatusCode.NOT_FOUND)
            codes |= {grpc.StatusCode.UNAVAILABLE} if request.library else set()
        return codes

    def _hard(self, answer: SimAnswer) -> set[grpc.StatusCode]:
        """Those that hardships may bring."""
        scenario, request, codes = self._scenario, answer.request, set[grpc.StatusCode]()
        kinds = {fault.kind for fault in scenario.faults}
        if scenario.unequal:  # nobody is there who has what the session began with
            codes |= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION}
            codes |= set() if answer.session_id else {grpc.StatusCode.INVALID_ARGUMENT}
        if min(scenario.session_ttl, scenario.retention) < KEPT:
            codes |= {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE}
            codes |= {grpc.StatusCode.FAILED_PRECONDITION} if request.follows is not None else set()
        if "log_damaged" in kinds:
            codes |= {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE}
        return codes

    def _is_deleted(self, request: SimRequest) -> bool:
        """Somebody has had it deleted, or what it goes on behind, or means to."""
        requests = self._scenario.requests
        behind = request.follows is not None and self._is_deleted(requests[request.follows])
        shared = any(other.delete_after is not None for other in requests if other.same_id(request))
        return bool(request.delete_after is not None or shared or behind)


def is_foreign(scenario: Scenario, request: SimRequest) -> bool:
    """It would go on behind a session of another tenant."""
    return (
        request.follows is not None
        and scenario.tenants > 1
        and scenario.requests[request.follows].tenant != request.tenant
    )


def memory_may_be_lost(scenario: Scenario, request: SimRequest) -> bool:
    """A log that is lost is written again by the session's owner, if that is there, and has not given up by then; one
    that has ended, by nobody.
    """
    faults = any(fault.target.startswith("orchestrator") for fault in scenario.faults)
    silent = any(fault.kind == "log_down" and fault.seconds > TIRED for fault in scenario.faults)
    full = any(fault.kind == "log_full" for fault in scenario.faults)
    return scenario.orchestrators > 1 or faults or silent or full or request.follows is not None


def disturbs(kind: str, target: str) -> bool:
    """Whether a fault may cost a client its request: not where only services behind the orchestrator have it."""
    if kind == "slow" or kind == "mangle":
        return False
    if kind in (*LOG_FAULTS, *HARD_LOG_FAULTS, "log_cut"):
        return True
    if kind == "clock_set":
        return False
    behind = not target.startswith("orchestrator") or target.split("-")[2:3] in (["verifier"], ["drafter"])
    return not behind
