"""Wire <-> core: there and back is the same, and what is out of range is refused with the field's name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.core.law.sampling import LogprobsOf, Rule, Sampling
from specwire.core.messages import (
    AssignedDrafter,
    FinishReason,
    Outcome,
    Pace,
    Proposal,
    SourceKind,
    SourcePace,
    TokenLogprobs,
    Verdict,
)
from specwire.core.text import Stopping, Text, hash_of
from specwire.core.verify.chains import Chains, Offer
from specwire.rpc import convert
from specwire.v1 import common_pb2, draft_pb2, verify_pb2

uint32 = st.integers(0, (1 << 32) - 1)
uint64 = st.integers(0, (1 << 64) - 1)
samplings = st.builds(
    Sampling,
    temperature=st.just(0.0) | st.floats(1e-4, 100),
    top_k=uint32,
    top_p=st.floats(0, 1, exclude_min=True),
    seed=uint64,
    choice=uint32,
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(uint32, st.floats(-100, 100), max_size=4).map(lambda bias: tuple(sorted(bias.items()))),
)
samplings |= st.builds(replace, samplings, logprobs=st.integers(0, 20), logprobs_of=st.sampled_from(LogprobsOf))
stoppings = st.builds(
    Stopping,
    max_tokens=st.integers(1, (1 << 32) - 1),
    stop_ids=st.frozensets(uint32, max_size=5),
    ignore_eos=st.booleans(),
    min_tokens=st.just(0) | st.just(1),
)
constraints = st.one_of(
    st.sampled_from(["{}", '{"type": "object", "x-é": [1]}']).map(
        lambda text: Constraint(ConstraintKind.JSON_SCHEMA, (text,))
    ),
    st.text(min_size=1, max_size=9).map(lambda text: Constraint(ConstraintKind.REGEX, (text,))),
    st.text(min_size=1, max_size=9).map(lambda text: Constraint(ConstraintKind.GRAMMAR, (text,))),
    st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4).map(
        lambda texts: Constraint(ConstraintKind.CHOICES, tuple(texts))
    ),
)
constraints |= st.builds(replace, constraints, behind=st.text(max_size=5))
samplings |= st.builds(replace, samplings, constraint=constraints)
float32 = st.floats(width=32, allow_nan=False)
reports = st.builds(TokenLogprobs, float32, st.lists(st.tuples(uint32, float32), max_size=4).map(tuple))
proposals = st.builds(
    Proposal,
    source=uint32,
    chain=uint64,
    base=uint32,
    offset=uint32,
    tokens=st.lists(uint32, max_size=8).map(tuple),
    prefix_hash=st.none() | uint64,
    draft_us=uint32,
)


@given(samplings)
def test_sampling_there_and_back(sampling: Sampling) -> None:
    wire = common_pb2.Sampling.FromString(convert.sampling_to_wire(sampling).SerializeToString())
    assert convert.sampling_from_wire(wire) == sampling


@given(stoppings)
def test_stopping_there_and_back(stopping: Stopping) -> None:
    wire = common_pb2.Stopping.FromString(convert.stopping_to_wire(stopping).SerializeToString())
    assert convert.stopping_from_wire(wire) == stopping


@given(st.lists(reports, max_size=3).map(tuple))
def test_logprobs_there_and_back(reported: tuple[TokenLogprobs, ...]) -> None:
    wire = [
        common_pb2.TokenLogprobs.FromString(each.SerializeToString()) for each in convert.logprobs_to_wire(reported)
    ]
    assert convert.logprobs_from_wire(wire) == reported


@given(proposals, uint32)
def test_proposals_there_and_back(proposal: Proposal, handle: int) -> None:
    wire = common_pb2.Proposal.FromString(convert.proposal_to_wire(proposal, handle).SerializeToString())
    assert (convert.proposal_from_wire(wire), wire.handle) == (proposal, handle)


@given(uint32, st.lists(st.tuples(uint32, uint32), max_size=8))
def test_distances_to_parents_are_their_numbers_possible_or_not(offset: int, nodes: list[tuple[int, int]]) -> None:
    tokens, distances = [token for token, _ in nodes], [distance for _, distance in nodes]
    sent = common_pb2.Proposal(offset=offset, tokens=tokens, parents=distances)
    proposal = convert.proposal_from_wire(sent)
    assert [number - parent for number, parent in enumerate(proposal.parents, offset)] == distances
    assert list(convert.proposal_to_wire(proposal, 0).parents) == distances


@given(st.integers(0, 3), st.lists(uint32, max_size=4), st.lists(uint32, max_size=4))
def test_impossible_distances_make_a_proposal_out_of_range(offset: int, tokens: list[int], parents: list[int]) -> None:
    """A node before -1, itself, or one for too many or too few: counted, no exception."""
    sent = common_pb2.Proposal(chain=1, base=1, offset=offset, tokens=tokens, parents=parents, prefix_hash=hash_of([9]))
    offered = Chains(1 << 32).offer(convert.proposal_from_wire(sent), Text([9]))
    fitting = len(parents) in (0, len(tokens))
    possible = fitting and all(1 <= distance <= number + 1 for number, distance in enumerate(parents, offset))
    assert (offered is not Offer.OUT_OF_RANGE) == possible


def test_a_node_takes_at_most_16_bytes() -> None:
    """In pieces of eight, each in a message and an HTTP/2 frame of its own, with large ids, numbers and positions."""
    text = Text(range(200))
    for offset, base in ((0, 200), (100_000, 150_000)):
        tokens = tuple(range(149_993, 150_001))
        parents = tuple(offset + index - 64 for index in range(8)) if offset else (-1,) * 8
        prefix = text.hash_at(200) if offset == 0 else None
        piece = Proposal(3, 1 << 20, base, offset, tokens, prefix, parents=parents)
        wire = convert.proposal_to_wire(replace(piece, draft_us=80_000), handle=300)
        message = draft_pb2.ConnectDraftResponse(proposals=[wire])
        framing = 5 + 9  # of a gRPC message, of an HTTP/2 frame
        assert (message.ByteSize() + framing) / len(tokens) <= 16


@pytest.mark.parametrize("branches", [0, 1, 2, 16])
def test_no_branches_are_one(branches: int) -> None:
    pace = convert.pace_from_wire(draft_pb2.Pace(chunk=2, run_ahead=3, branches=branches))
    assert pace == Pace(2, 3, branches=max(1, branches))
    assert convert.pace_from_wire(convert.pace_to_wire(pace)) == pace


def test_the_cores_numbers_are_the_wires() -> None:
    assert {f"OUTCOME_{outcome.name}": outcome.value for outcome in Outcome} == {
        name: number for name, number in common_pb2.Outcome.items() if number
    }
    assert {f"FINISH_REASON_{reason.name}": reason.value for reason in FinishReason} == {
        name: number for name, number in common_pb2.FinishReason.items() if number
    }


def test_what_is_absent_takes_its_default() -> None:
    assert convert.sampling_from_wire(common_pb2.Sampling(), default_seed=0) == Sampling()
    sampled = convert.sampling_from_wire(common_pb2.Sampling(temperature=1, seed=0), default_seed=7)
    assert (sampled.seed, sampled.top_p, sampled.rule) == (0, 1.0, Rule.COUPLED)


def test_kinds_of_sources_are_those_of_the_wire_and_one_that_is_not_known_is_a_drafter_s() -> None:
    names = {value.number: value.name for value in common_pb2.SourceKind.DESCRIPTOR.values}
    for kind in SourceKind:
        assert names[kind] == f"SOURCE_KIND_{kind.name}"
        assert convert.kind_from_wire(kind) is kind
    assert convert.kind_from_wire(4) is SourceKind.HEAD
    assert [convert.kind_from_wire(value) for value in (0, 5, -1)] == [SourceKind.DRAFTER] * 3


@pytest.mark.parametrize(("told", "counts"), [((1 << 63) - 1, 1 << 40), (-(1 << 63), -(1 << 40)), (-5, -5)])
def test_a_ledger_counts_as_the_nearest_balance_in_its_range(told: int, counts: int) -> None:
    assert convert.verdict_from_wire(verify_pb2.Verdict(ledger_us=told)).ledger_us == counts
    verdict = Verdict(3, (), (), 0, ledger_us=told * 2)
    written = convert.verdict_to_wire(verdict, 1, 1)
    assert written.ledger_us == max(-(1 << 40), min(1 << 40, told * 2))


PACES = (SourcePace(3, Pace(2, 9, branches=4), "stream: gain 2.00"), SourcePace(1, Pace(1, 0), ""))
DRAFTERS = (AssignedDrafter(1, "greedy a b", True, "lockstep:4"), AssignedDrafter(2))


def test_what_a_verifier_plans_and_whom_it_plans_for_there_and_back() -> None:
    verdict = Verdict(3, (), (), 0, paces=PACES)
    wire = verify_pb2.Verdict.FromString(convert.verdict_to_wire(verdict, 1, 1).SerializeToString())
    assert convert.verdict_from_wire(wire).paces == PACES
    assert convert.drafters_from_wire(convert.drafters_to_wire(DRAFTERS)) == DRAFTERS
    assert convert.drafters_from_wire([verify_pb2.Drafter(source=2)]) == (AssignedDrafter(2, plan="auto"),)


@pytest.mark.parametrize(
    ("value", "told"), [(math.nan, 0), (math.inf, (1 << 32) - 1), (-math.inf, 0), (2.5e9, 2500000000)]
)
def test_what_was_measured_is_told_in_range(value: float, told: int) -> None:
    assert convert.saturated(value) == told


# ----------------------------------------------------------------------------------------------------------------------
# What is out of range, or does not go together, is refused by its name.

TOLD = common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[3, 4], top_logprobs=[-0.25, -2.0])
UNMATCHED = common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[3, 4], top_logprobs=[-0.25])
LISTED: dict[str, Any] = {"top_ids": [64], "top_logprobs": [-1.0]}
Call = Callable[[], object]


def sampled(**fields: Any) -> Call:
    return lambda: convert.sampling_from_wire(common_pb2.Sampling(**fields), default_seed=0, vocabulary=64)


def stopped(**fields: Any) -> Call:
    return lambda: convert.stopping_from_wire(common_pb2.Stopping(**fields), vocabulary=9)


def reported(**fields: Any) -> Call:
    return lambda: convert.logprobs_from_wire([common_pb2.TokenLogprobs(**fields)])


def decided(**changes: Any) -> Verdict:
    fields: dict[str, Any] = {"tokens": [63], "outcomes": [4], "tested": 256, "logprobs": [{"logprob": -0.5}]}
    return convert.verdict_from_wire(verify_pb2.Verdict(**{**fields, **changes}), 1, 64)


def both_decided(*told: common_pb2.TokenLogprobs, wanted: int | None = 2) -> Verdict:
    """Two tokens, and what was told of them."""
    return convert.verdict_from_wire(verify_pb2.Verdict(tokens=[7, 8], outcomes=[1, 3], logprobs=told), wanted)  # type: ignore[list-item]  # the numbers are those of the wire


def paced(*paces: verify_pb2.SourcePace) -> Call:
    return lambda: convert.paces_from_wire(paces)


def drafting(*drafters: verify_pb2.Drafter) -> Call:
    return lambda: convert.drafters_from_wire(drafters)


def test_what_is_in_range_is_taken_over() -> None:
    assert decided().tokens == (63,)
    assert both_decided(TOLD, TOLD).logprobs == (TokenLogprobs(-0.5, ((3, -0.25), (4, -2.0))),) * 2
    assert both_decided(wanted=None).logprobs == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (sampled(constraint_behind="x"), "constraint_behind: needs a constraint"),
        (sampled(regex="a", constraint_behind="x" * 257), "constraint_behind: at most 256 bytes"),
        (sampled(logprobs_of=common_pb2.LOGPROBS_OF_MODEL), "logprobs_of: says what logprobs are of, which"),
        (sampled(logprobs=1, logprobs_of=9), "logprobs_of: 9 is not a known value"),
        (sampled(repetition_penalty=0.0), "repetition_penalty: must be from 0.01 to 100"),
        (sampled(logit_bias={64: 1.0}), "logit_bias: token id 64 is outside 0..63"),
        *((sampled(temperature=value), "temperature: ") for value in (math.nan, -1.0, math.inf)),
        *((sampled(top_p=value), "top_p: ") for value in (0.0, math.nan)),
        (sampled(rule="greedy", temperature=1.0), "rule: "),
        (sampled(rule="best"), "rule: "),
        (lambda: convert.sampling_from_wire(common_pb2.Sampling()), "seed: "),
        (stopped(), "max_tokens: "),
        (stopped(max_tokens=1, stop_ids=[9]), "stop_ids: "),
        (lambda: convert.outcomes_from_wire([1, 0]), "outcomes: "),
        (lambda: convert.reason_from_wire(99), "finish_reason: "),
        (reported(top_ids=[1, 2], top_logprobs=[-0.5]), "logprobs: 1 values for 2 ids"),
        (reported(logprob=math.nan), "logprobs: NaN is no number"),
        (reported(top_ids=[1], top_logprobs=[math.nan]), "logprobs: NaN is no number"),
        (lambda: decided(tokens=[64]), "tokens: token id 64 is outside 0..63"),
        (lambda: decided(tested=257), "tested: must be at most 256, not 257"),
        (lambda: decided(logprobs=[{"logprob": math.inf}]), "logprobs: must be at most 0, not inf"),
        (lambda: decided(logprobs=[LISTED]), "logprobs: token id 64 is outside"),
        (lambda: decided(outcomes=[9]), "outcomes: 9 is not a valid Outcome"),
        (lambda: both_decided(), "logprobs: 0 for 2 tokens, 2 asked for"),
        (lambda: both_decided(TOLD), "logprobs: 1 for 2 tokens, 2 asked for"),
        (lambda: both_decided(TOLD, TOLD, wanted=None), "logprobs: 2 for 2 tokens, None asked for"),
        (lambda: both_decided(TOLD, TOLD, wanted=1), "logprobs: more than the 1 ids that were asked for"),
        (lambda: both_decided(TOLD, UNMATCHED), "logprobs: 1 values for 2 ids"),
        (paced(*[verify_pb2.SourcePace()] * 65), "paces: must be at most 64, not 65"),
        (paced(verify_pb2.SourcePace()), "pace.chunk: must be at least 1, not 0"),
        (
            paced(verify_pb2.SourcePace(pace=draft_pb2.Pace(chunk=1, run_ahead=129))),
            "pace.run_ahead: must be at most 128, not 129",
        ),
        (drafting(*[verify_pb2.Drafter()] * 65), "drafters: must be at most 64, not 65"),
        (drafting(verify_pb2.Drafter(known_by="a" * 257)), "known_by: must have at most 256 characters, not 257"),
        (drafting(verify_pb2.Drafter(plan="fast")), "plan: must be auto"),
        (drafting(verify_pb2.Drafter(plan="stream:9,4")), "plan: 'stream:9,4': the run-ahead"),
    ],
)
def test_what_is_out_of_range_or_does_not_go_together_is_refused_by_its_name(call: Call, message: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{message}"):
        call()


@given(st.lists(st.sampled_from(Outcome), max_size=9))
def test_outcomes_there_and_back(outcomes: list[Outcome]) -> None:
    assert convert.outcomes_from_wire(convert.outcomes_to_wire(outcomes)) == tuple(outcomes)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_reasons_there_and_back(reason: FinishReason | None) -> None:
    assert convert.reason_from_wire(convert.reason_to_wire(reason)) is reason
