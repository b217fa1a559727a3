"""Rules by name: what is lossy must be asked for, and a contradiction is refused."""

from __future__ import annotations

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import Acceptance, Rule, Sampling, with_rule


@pytest.mark.parametrize("name", ["rejection", "block", "threshold(0.3)", "typical(0.3,0.09)"])
def test_a_rule_reads_as_it_is_written(name: str) -> None:
    assert str(Acceptance.parse(name)) == name
    assert with_rule(Sampling(1.0), name).rule_name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "eager",
            "must be one of greedy, coupled, rejection, block, threshold\\(t\\), typical\\(epsilon,delta\\), not",
        ),
        ("threshold", "takes t, not 0 numbers"),
        ("threshold(0.1,0.2)", "takes t, not 2 numbers"),
        ("typical(0.3)", "takes epsilon and delta, not 1 numbers"),
        ("rejection(1)", "takes no number"),
        ("threshold(x)", "no number"),
        ("threshold(0)", "t of threshold must be above 0 and at most 1, not 0.0"),
        ("threshold(nan)", "at most 1, not nan"),
        ("typical(0.3,2)", "delta of typical must be above 0 and at most 1, not 2.0"),
        ("threshold(0.3", "must be one of"),
        ("Rejection", "must be one of"),
    ],
)
def test_another_is_refused_with_what_is_wrong(name: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as raised:
        with_rule(Sampling(1.0), name)
    assert raised.value.field == "rule"


@pytest.mark.parametrize(
    ("temperature", "name", "message"),
    [
        (1.0, "greedy", "contradicts temperature 1.0, which needs coupled"),
        (0.0, "coupled", "contradicts temperature 0.0, which needs greedy"),
        (0.0, "rejection", "contradicts temperature 0.0, which needs greedy"),
        (0.0, "block", "contradicts temperature 0.0, which needs greedy"),
    ],
)
def test_a_contradiction_to_the_temperature_is_refused(temperature: float, name: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        with_rule(Sampling(temperature), name)


@pytest.mark.parametrize(
    ("name", "rule", "guessed", "weighed", "lossy"),
    [
        ("", Rule.COUPLED, True, False, False),
        ("coupled", Rule.COUPLED, True, False, False),
        ("rejection", Rule.REJECTION, False, True, False),
        ("block", Rule.BLOCK, False, True, False),
        ("threshold(0.3)", Rule.THRESHOLD, False, False, True),
        ("typical(0.3,0.09)", Rule.TYPICAL, False, False, True),
    ],
)
def test_what_a_rule_is(name: str, rule: Rule, guessed: bool, weighed: bool, lossy: bool) -> None:
    sampling = with_rule(Sampling(0.7), name)
    assert (sampling.rule, sampling.guessed, sampling.weighed, sampling.lossy) == (rule, guessed, weighed, lossy)


def test_the_default_s_name_is_the_default() -> None:
    assert with_rule(Sampling(1.0), "coupled") == with_rule(Sampling(1.0), "") == Sampling(1.0)
    assert with_rule(Sampling(0.0), "threshold(0.5)").lossy, "a lossy rule may be asked for at temperature 0, too"
