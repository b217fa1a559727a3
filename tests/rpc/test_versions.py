"""Whose sessions get what was learnt of whom."""

from __future__ import annotations

import pytest

from specwire.rpc.versions import agreed, learnt_of
from specwire.v1 import common_pb2
from specwire.versions import Current


@pytest.mark.parametrize(
    ("learnt", "tenant", "holds"),
    [
        (("ada",), "ada", True),
        (("ada",), "bob", False),
        (("ada", "bob"), "bob", True),
        (("ada",), "", False),
        (("*",), "", True),
        (("*",), "ada", False),
        ((), "ada", False),
    ],
)
def test_tenants_that_agreed_alone(learnt: tuple[str, ...], tenant: str, holds: bool) -> None:
    info = common_pb2.GetModelInfoResponse(learnt=learnt_of(Current(3, "some/draft", learnt, "learnt", 0.5)))
    assert agreed(info, tenant) is holds


def test_what_learns_nothing_is_for_everybody() -> None:
    assert agreed(None, "ada")
    assert agreed(common_pb2.GetModelInfoResponse(), "")


def test_what_was_not_measured_is_not_told() -> None:
    found = learnt_of(Current(3, "some/draft", ("*",), "learnt", 0.5, loss_after=1.5))
    assert (found.version, found.acceptance_before, found.loss_after) == ("draft@3", 0.5, 1.5)
    assert not found.HasField("acceptance_after")
    assert not found.HasField("loss_before")
