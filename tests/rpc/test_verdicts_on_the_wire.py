"""What a verifier says is checked before a session believes it."""

from __future__ import annotations

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.core.messages import TokenLogprobs
from specwire.rpc.convert import verdict_from_wire
from specwire.v1 import common_pb2, verify_pb2

TOLD = common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[3, 4], top_logprobs=[-0.25, -2.0])
UNMATCHED = common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[3, 4], top_logprobs=[-0.25])


def verdict(*told: common_pb2.TokenLogprobs) -> verify_pb2.Verdict:
    outcomes = [common_pb2.OUTCOME_ACCEPTED, common_pb2.OUTCOME_BONUS]
    return verify_pb2.Verdict(attach=1, position=5, tokens=[7, 8], outcomes=outcomes, logprobs=told)


def test_reports_are_taken_over() -> None:
    event = verdict_from_wire(verdict(TOLD, TOLD), wanted=2)
    assert event.logprobs == (TokenLogprobs(-0.5, ((3, -0.25), (4, -2.0))),) * 2
    assert verdict_from_wire(verdict()).logprobs == ()


@pytest.mark.parametrize(
    ("told", "wanted", "message"),
    [
        ((), 2, "logprobs: 0 for 2 tokens, 2 asked for"),
        ((TOLD,), 2, "logprobs: 1 for 2 tokens, 2 asked for"),
        ((TOLD, TOLD), None, "logprobs: 2 for 2 tokens, None asked for"),
        ((TOLD, TOLD), 1, "logprobs: more than the 1 ids that were asked for"),
        ((TOLD, UNMATCHED), 2, "logprobs: 1 values for 2 ids"),
    ],
)
def test_reports_that_were_not_asked_for_or_are_missing_are_refused(
    told: tuple[common_pb2.TokenLogprobs, ...], wanted: int | None, message: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        verdict_from_wire(verdict(*told), wanted)
    assert str(caught.value) == message
