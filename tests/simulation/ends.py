"""How a client's request may end, given what its scenario did to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import grpc

from specwire.core.limits import FinishReason
from tests.simulation.client import Heard
from tests.simulation.oracle import Oracle
from tests.simulation.scenario import LOG_FAULTS, Scenario

LOSING = ("log_behind", "log_emptied")


def judge(
    scenario: Scenario, heard: Heard, all_heard: Sequence[Heard], oracle: Oracle | None, decoded: Callable[..., str]
) -> Iterable[str]:
    """What is wrong with the end of `heard`, one sentence each."""
    if not heard.done:
        yield f"{heard.ask} has not ended"
    elif heard.end is not None and oracle is not None:
        yield from _finished(heard, [h for h in all_heard if h.session_id == heard.session_id], oracle, decoded)
    elif not heard.left and heard.error not in allowed(scenario, heard):
        yield f"{heard.ask} failed with {heard.error}: {heard.details}"


def _finished(heard: Heard, readers: Sequence[Heard], oracle: Oracle, decoded: Callable[..., str]) -> Iterable[str]:
    assert heard.end is not None
    reason = FinishReason(heard.end.reason)
    tokens, text = tuple(heard.tokens), heard.text
    if heard.end.text_length != len(text):
        yield f"the end says {heard.end.text_length} characters, the text has {len(text)}"
    if reason is FinishReason.CANCELLED:
        if not any(reader.cancelled or reader.left or reader.error for reader in readers):
            yield "cancelled by nobody"
    elif reason is FinishReason.DEADLINE:
        if all(reader.ask.timeout is None for reader in readers):
            yield "ended by a deadline that nobody set"
    elif (tokens, text, reason) != (oracle.tokens, oracle.text, oracle.reason):
        yield f"ended with {(tokens, text, reason)}, not {(oracle.tokens, oracle.text, oracle.reason)}"
    if reason in (FinishReason.CANCELLED, FinishReason.DEADLINE) and text != decoded(tokens):
        yield f"ended early with {text!r}, not {decoded(tokens)!r}"


def allowed(scenario: Scenario, heard: Heard) -> set[grpc.StatusCode]:
    """Statuses that a request may fail with here."""
    codes = set()
    if scenario.slots < len(scenario.asks):
        codes |= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}  # what a repeated request id is told
        if heard.ask.library and heard.session_id:
            codes.add(grpc.StatusCode.UNAVAILABLE)  # why it came back, and then found no room
    if heard.ask.timeout is not None:
        codes.add(grpc.StatusCode.DEADLINE_EXCEEDED)
    comes_back = heard.ask.request_id and heard.ask.timeout is None
    if heard.ask.library:  # if nobody has answered, the library takes it that nobody is there
        comes_back = bool(heard.session_id) and heard.ask.timeout is None
    if not comes_back and any(disturbs(scenario, heard, fault.kind, fault.target) for fault in scenario.faults):
        codes.add(grpc.StatusCode.UNAVAILABLE)
    if any(fault.kind in LOSING for fault in scenario.faults) and memory_may_be_lost(scenario):
        # The library says why it came back at all.
        codes |= {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE}
    return codes


def memory_may_be_lost(scenario: Scenario) -> bool:
    """A log that is lost is written again by the session's owner, if that is there."""
    return scenario.orchestrators > 1 or any(fault.target.startswith("orchestrator") for fault in scenario.faults)


def disturbs(scenario: Scenario, heard: Heard, kind: str, target: str) -> bool:
    """Whether a fault may cost a client its request: not where only services behind the orchestrator have it."""
    if kind == "slow" or kind == "mangle":
        return False
    if kind in LOG_FAULTS:
        return True
    behind = not target.startswith("orchestrator") or target.split("-")[2:3] in (["verifier"], ["drafter"])
    return not behind
