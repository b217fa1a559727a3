"""Which peer a session is given: what an orchestrator knows of its peers, turned into a wish and candidates."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.options import OrchestratorOptions
from orchestrator.peers.discovery import RegistryFeed, SessionAffinity
from orchestrator.peers.peer import DrafterPeer, VerifierPeer
from orchestrator.pool import Pool
from orchestrator.session.driver import SessionDriver
from orchestrator.store import SessionRecord
from specwire.core.law.sampling import Sampling
from specwire.core.placement import Reason
from specwire.core.text import Stopping
from specwire.registry.options import RegistryOptions
from specwire.v1 import common_pb2
from tests.orchestrator.test_driver import SilentLink

OLD, NEW, WORDS, TEXT = "aa", "bb", "cc", "dd"


def described(weights: str = OLD, **more: Any) -> common_pb2.GetModelInfoResponse:
    known = {"vocabulary_fingerprint": WORDS, "eos_ids": [0], "tokenizer_hash": TEXT, "slots": 4, "context": 11}
    return common_pb2.GetModelInfoResponse(weights_fingerprint=weights, **{**known, **more})


def verifier(name: str, weights: str = OLD, **more: Any) -> VerifierPeer:
    peer = VerifierPeer(SilentLink(), lambda: None, lambda _: None)
    peer.link.address = name
    peer.on_up(described(weights, **more))
    return peer


def drafter(name: str, vocabulary: str = WORDS, region: str = "") -> DrafterPeer:
    link = SilentLink()
    link.address = name
    peer = DrafterPeer(link, lambda: None, lambda _: None)
    peer.on_up(common_pb2.GetModelInfoResponse(vocabulary_fingerprint=vocabulary, region=region, slots=4))
    return peer


class Session:
    """As much of a session as placing looks at."""

    def __init__(self, parent: str = "") -> None:
        record = SessionRecord(
            "session",
            (1, 2),
            Sampling(),
            Stopping(9),
            weights_fingerprint=OLD,
            vocabulary_fingerprint=WORDS,
            tokenizer_fingerprint=TEXT,
            eos_ids=(0,),
            parent=parent,
        )
        self.view = SimpleNamespace(record=record)
        self.verifying = SimpleNamespace(peer=None, former=None, refusals=Counter())
        self.drafters = SimpleNamespace(refusals=Counter(), has=lambda _: False, missing=1)

    @property
    def driver(self) -> SessionDriver:
        return cast(SessionDriver, self)


@pytest.fixture
async def placing() -> Pool:
    return Pool(OrchestratorOptions(("a:1",), registration=RegistryOptions(region="here")), list)


# In each respect in which a verifier may not be equal: what another one says.
UNEQUAL = [
    {"weights_fingerprint": NEW},
    {"vocabulary_fingerprint": NEW},
    {"tokenizer_hash": NEW},
    {"eos_ids": [2]},
    {"eos_ids": [0, 2]},
    {"eos_ids": []},
    {"context": 10},
]
# In which it may differ all the same.
EQUAL = [
    {"context": 12},
    {"eos_ids": [0, 0]},
    {"model": "other"},
    {"dtype": "float16", "device": "cuda:0", "runtime": "openvino"},
    {"deterministic": True, "slots": 9, "host_id": "there", "chat_template": "{{ messages }}"},
]


@pytest.mark.parametrize("unequal", UNEQUAL)
def test_a_session_goes_back_to_its_former_verifier_unless_that_is_another_model_now(
    placing: Pool, unequal: dict[str, Any]
) -> None:
    session, former, other = Session(), verifier("former"), verifier("other")
    session.verifying.former = former
    assert placing.verifier_for(session.driver, [other, former]) is former
    assert placing.affinity.of("session") == "former"
    former.on_down()
    changed = described()
    changed.ClearField(next(iter(unequal)))
    changed.MergeFrom(common_pb2.GetModelInfoResponse(**unequal))
    former.on_up(changed)
    assert placing.verifier_for(session.driver, [former, other]) is other
    assert placing.affinity.of("session") == "other"


@pytest.mark.parametrize("unequal", UNEQUAL)
def test_nobody_will_do_who_is_not_equal(placing: Pool, unequal: dict[str, Any]) -> None:
    weights = unequal.get("weights_fingerprint", OLD)
    rest = {name: value for name, value in unequal.items() if name != "weights_fingerprint"}
    assert placing.verifier_for(Session().driver, [verifier("new", weights, **rest)]) is None


@pytest.mark.parametrize("equal", EQUAL)
def test_whoever_only_rounds_otherwise_will_do(placing: Pool, equal: dict[str, Any]) -> None:
    other = verifier("other", **equal)
    assert placing.verifier_for(Session().driver, [other]) is other


def test_what_another_orchestrator_has_told_counts_once(placing: Pool) -> None:
    """Where a session was held it needs no room; once it has been placed here, its home is a home like any other."""
    full, free = verifier("full", slots=1), verifier("free")
    full.report.others = 1
    placing.affinity.learn("session", "full")
    session = Session()
    assert placing.verifier_for(session.driver, [free, full]) is full
    assert placing.verifier_for(session.driver, [free, full]) is free


def test_a_turn_goes_to_its_parent_where_there_is_room(placing: Pool) -> None:
    home, other = verifier("home", slots=1), verifier("other")
    placing.affinity.note("parent", "home")
    assert placing.verifier_for(Session("parent").driver, [other, home]) is home
    home.report.others = 1
    assert placing.verifier_for(Session("parent").driver, [other, home]) is other


def test_near_here_then_near_the_drafter_then_anywhere(placing: Pool) -> None:
    here, there, far = (verifier(name, region=name) for name in ("here", "there", "far"))
    remote = drafter("remote", region="there")
    placing.drafters = [remote]
    assert placing.verifier_for(Session().driver, [far, there, here]) is here
    assert placing.verifier_for(Session().driver, [far, there]) is there
    placing.drafters = []
    assert placing.verifier_for(Session().driver, [far, there]) is far
    assert placing.placed == {Reason.NEAR: 2, Reason.LOAD: 1}


def test_a_drafter_of_the_vocabulary_near_here_or_near_the_verifier(placing: Pool) -> None:
    session = Session()
    session.verifying.peer = verifier("v", region="there")
    wrong, far = drafter("wrong", "dd", "here"), drafter("far", region="far")
    there, here = drafter("there", region="there"), drafter("here", region="here")
    placing.drafters = [wrong, far, there, here]
    assert placing.drafter_for(session.driver) is here
    placing.drafters = [wrong, far, there]
    assert placing.drafter_for(session.driver) is there
    placing.drafters = [wrong, far]
    assert placing.drafter_for(session.driver) is far
    placing.drafters = [wrong]
    assert placing.drafter_for(session.driver) is None


def test_two_are_drawn_where_others_place_too(placing: Pool) -> None:
    feed: Any = SimpleNamespace(orchestrators=("one", "other"), shared=True)
    verifiers = [verifier(f"10.0.0.{number}:1") for number in range(8)]
    placing.feed = cast(RegistryFeed, feed)
    chosen = placing.verifier_for(Session().driver, verifiers)
    feed.shared = False
    placing.affinity = SessionAffinity()
    alone = placing.verifier_for(Session().driver, verifiers)
    assert alone is verifiers[0]
    assert chosen is not None
    assert chosen is not verifiers[0]  # by the session's and the services' names
