"""A request's references: they save steps, change no token, end where they end, serve their session only, and leave."""

from __future__ import annotations

import gc
import random
import re
import weakref
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest

from specwire.core.invalid import MOST_REFERENCE_TOKENS, MOST_REFERENCES, Code, InvalidParameter
from specwire.core.law.sampling import Acceptance, Rule, Sampling
from specwire.core.messages import Outcome, SourceKind
from specwire.core.verify.references import BESIDE_A_STEP, References, capacity_of, check_lengths, checked_ids
from specwire.core.verify.session import Allowance, VerifySession
from specwire.core.verify.shared_texts import FIRST_TOKENS, TOKEN_BYTES
from specwire.v1 import common_pb2, verify_pb2
from tests.verify_service.peer import open_message
from tests.verify_service.rig import COUPLED, GREEDY, Rig, oracle
from verify_service.engine.messages import LinkLost
from verify_service.engine.sessions import Held
from verify_service.service import tick_from_wire

# A script whose texts do not repeat themselves.
SPEC = "scripted:5:memory=3:vocab=2000"
PROMPT = tuple(range(40, 60))
LENGTH = 200
INFO = common_pb2.GetModelInfoResponse(vocabulary=2000, context=1024)
MEMORY = 16 * FIRST_TOKENS * TOKEN_BYTES


def rig(memory: int = MEMORY, **changes: Any) -> Rig:
    return Rig(SPEC, context=1024, growth=0.01, text_memory=memory, **changes)


def strange(length: int, seed: int = 1) -> array[int]:
    drawn = random.Random(seed)
    return array("I", [drawn.randrange(2000) for _ in range(length)])


def ask(on: Rig, handle: int, documents: Sequence[Sequence[int]], part: int = 100, **changes: Any) -> None:
    """Open a session, and send its references in parts."""
    on.open(handle, PROMPT, max_tokens=LENGTH, references=tuple(map(len, documents)), **changes)
    send(on, handle, documents, part)


def send(on: Rig, handle: int, documents: Sequence[Sequence[int]], part: int = 100, link: int = 0) -> None:
    whole = [token for document in documents for token in document]
    parts = (array("I", whole[start : start + part]) for start in range(0, len(whole), part))
    on.tick(link, references=tuple((handle, each) for each in parts))


def steps(on: Rig, handle: int, documents: Sequence[Sequence[int]], **changes: Any) -> int:
    """Forwards that a session took; its text is the target's."""
    before, sampling = on.engine.steps, changes.get("sampling", GREEDY)
    ask(on, handle, documents, **changes)
    on.run()
    assert on.tokens[handle] == oracle(on.lm, PROMPT, LENGTH, sampling)
    return on.engine.steps - before


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_a_guess_from_the_second_reference_is_accepted_and_counts_as_predicted(sampling: Sampling) -> None:
    on = rig()
    text = oracle(on.lm, PROMPT, LENGTH, sampling)
    alone = steps(on, 1, [], sampling=sampling)
    quoted = steps(on, 2, [strange(300), text[20:150]], sampling=sampling)
    assert quoted < alone / 2
    kinds = {each.verdict.kind for report in on.reports for each in report.decided if each.verdict.width}
    assert kinds == {SourceKind.PREDICTION}


def test_no_guess_runs_across_the_end_of_a_document() -> None:
    on = References([6, 6])
    on.add(array("I", [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]))
    while on.unread:
        on.read(100)
    text = [50, 2, 3]
    source = on.source(text)
    for said, expected in (((4,), (5, 6)), ((5,), (6,)), ((6,), None), ((7,), None), ((8,), (9, 1, 2, 3))):
        text.extend(said)
        source.text_grew()
        guess = source.look()
        assert (None if guess is None else guess.tokens) == expected


def test_parts_may_end_anywhere() -> None:
    drawn = random.Random(2)
    documents = [strange(length, length) for length in (1, 2, 30, 31, 500, 3)]
    whole = array("I", [token for document in documents for token in document])
    for _ in range(20):
        on, at = References(list(map(len, documents))), 0
        while at < len(whole):
            taken = drawn.randrange(1, 200)
            on.add(whole[at : at + taken])
            at += taken
            on.read(drawn.randrange(1, 100))
        while on.unread:
            on.read(1000)
        on.add(array("I", [1, 2, 3]))  # what was not announced is ignored
        assert not on.unread
        assert on.tokens == len(whole)
        for document in documents[2:5]:
            guess = on.source(list(document[:20])).look()
            assert guess is not None
            assert guess.tokens == tuple(document[20:36])


def test_what_comes_anew_after_a_resumption_is_known() -> None:
    documents = [strange(50, 1), strange(60, 2)]
    on = References([50, 60])
    on.add(documents[0][:30])
    on.restart([50, 60])
    on.add(documents[0] + documents[1][:10])
    on.restart([50, 60])
    on.add(documents[0] + documents[1])
    while on.unread:
        on.read(1000)
    assert on.tokens == 110
    on = References([50, 60])
    on.add(documents[0])
    on.restart([60, 50])
    on.add(documents[1] + documents[0])
    while on.unread:
        on.read(1000)
    assert on.tokens == 50, "others than before are ignored"


def test_they_are_proposed_to_no_other_session() -> None:
    on = rig()
    text = oracle(on.lm, PROMPT, LENGTH)
    alone = steps(on, 1, [])
    ask(on, 2, [text], scope=b"ours", shared=True)
    for _ in range(5):
        on.step()
    on.open(3, PROMPT, max_tokens=LENGTH, scope=b"ours")
    on.open(4, PROMPT, max_tokens=LENGTH, scope=b"theirs", shared=True)
    on.run()
    assert on.tokens[2] == on.tokens[3] == on.tokens[4] == text
    accepted = [on.outcomes[handle].count(Outcome.ACCEPTED) for handle in (2, 3, 4)]
    assert accepted[0] > LENGTH / 2 > LENGTH / 10 > max(accepted[1:])
    assert steps(on, 5, []) == alone


@pytest.mark.parametrize("how", ["ends", "is closed", "is deleted", "fails over", "gives way"])
def test_a_session_that_leaves_gives_their_memory_back(how: str) -> None:
    on = rig(slots=1)
    ask(on, 1, [oracle(on.lm, PROMPT, LENGTH), strange(5000)])
    for _ in range(5):
        on.step()
    held = on.engine.roster.get(0, 1)
    assert held is not None
    assert held.session.references is not None
    texts = weakref.ref(held.session.references._texts._slots)
    assert on.engine.sessions.references.size == 8192 * TOKEN_BYTES
    del held
    if how == "is closed":
        on.tick(closes=(1,))
    elif how == "is deleted":
        on.tick(forgotten=("session-1",))
        on.step()
        assert texts() is None, "while it runs on"
    elif how == "fails over":
        on.open(1, PROMPT, max_tokens=LENGTH, decided=[1, 2, 3], attach=2)
    elif how == "gives way":
        on.engine.inbox.put(LinkLost(0))
        on.open(2, PROMPT, max_tokens=LENGTH, link=1)
    on.run()
    gc.collect()
    assert texts() is None
    assert on.engine.sessions.references.size == 0


def test_what_finds_no_room_is_left_out_and_another_session_may_have_it_later() -> None:
    on = rig(memory=FIRST_TOKENS * TOKEN_BYTES)
    text = oracle(on.lm, PROMPT, LENGTH)
    alone = steps(on, 1, [])
    ask(on, 2, [text])
    ask(on, 3, [text])
    on.run()
    assert on.tokens[2] == on.tokens[3] == text
    assert on.outcomes[2].count(Outcome.ACCEPTED) > LENGTH / 2 > 0 == on.outcomes[3].count(Outcome.ACCEPTED)
    assert on.engine.sessions.counts["references of a request: without room"] == 1
    assert steps(on, 4, [text]) < alone / 2
    assert steps(rig(memory=0), 1, [text]) == alone


def test_a_session_that_is_opened_with_another_text_has_the_room_of_its_former_references() -> None:
    on = rig(memory=FIRST_TOKENS * TOKEN_BYTES)
    text = oracle(on.lm, PROMPT, LENGTH)
    ask(on, 1, [text])
    for _ in range(5):
        on.step()
    others = tuple(text[:3])
    on.open(1, (*PROMPT, 7), max_tokens=LENGTH, attach=2, references=(len(others),))
    on.tick(references=((1, array("I", others)),))
    for _ in range(3):
        on.step()
    held = on.engine.roster.get(0, 1)
    assert held is not None
    assert held.session.references is not None
    assert held.session.references.tokens == len(others)
    assert not on.engine.sessions.counts["references of a request: without room"]


def test_their_memory_can_be_told_while_sessions_come_and_go() -> None:
    """Whoever asks for figures does so beside the engine's thread."""
    on = rig()
    ask(on, 1, [strange(100)])
    ask(on, 2, [strange(100)])
    on.step()
    sessions = on.engine.sessions
    known = sessions.roster._by_id
    first = known["session-1"]

    class Going:
        @property
        def session(self) -> VerifySession:
            known.pop("session-2", None)
            return first.session

    known["session-1"] = cast(Held, Going())
    assert sessions.references.size == 2 * FIRST_TOKENS * TOKEN_BYTES


@pytest.mark.parametrize("how", ["asked for", "verifier", "rule"])
def test_without_guesses_from_texts_there_is_no_memory_for_them(how: str) -> None:
    on = rig(ngram=how != "verifier")
    rejection = Sampling(temperature=1.0, seed=1, acceptance=Acceptance(Rule.REJECTION)) if how == "rule" else GREEDY
    ask(on, 1, [strange(100)], ngram=how != "asked for", sampling=rejection)
    on.step()
    assert on.engine.sessions.references.size == 0
    on.run()
    assert len(on.tokens[1]) == LENGTH


def test_the_same_orchestrator_sends_them_anew_to_whoever_has_the_session() -> None:
    on = rig()
    text = oracle(on.lm, PROMPT, LENGTH)
    on.open(1, PROMPT, max_tokens=LENGTH, references=(len(text),))
    on.tick(references=((1, array("I", text[:77])),))
    for _ in range(3):
        on.step()
    decided = list(on.tokens[1])
    on.open(1, PROMPT, max_tokens=LENGTH, decided=decided, attach=2, references=(len(text),))
    before = on.engine.steps
    send(on, 1, [text])
    on.run()
    assert on.tokens[1] == text
    assert on.engine.steps - before < LENGTH // 2


def test_a_million_tokens_keep_neither_others_nor_their_own_session_from_their_steps() -> None:
    """While it is taken in every step decides for all, and takes in no more than a bounded part."""
    on = rig(memory=MOST_REFERENCE_TOKENS * TOKEN_BYTES)
    text = oracle(on.lm, PROMPT, LENGTH)
    documents = [strange(MOST_REFERENCE_TOKENS - LENGTH), text]
    on.open(2, PROMPT, max_tokens=LENGTH)
    on.step()
    ask(on, 1, documents, part=8192)
    taken: list[int] = []
    while 2 not in on.finished:
        lengths = {handle: len(on.tokens.get(handle, ())) for handle in (1, 2)}
        on.step()
        held = on.engine.roster.get(0, 1)
        if held is not None and held.session.references is not None:
            taken.append(held.session.references._texts.tokens)
            assert all(len(on.tokens[handle]) > before for handle, before in lengths.items() if handle in on.tokens)
    assert 0 < taken[-1] < MOST_REFERENCE_TOKENS, "it is not all there yet"
    grown = [after - before for before, after in pairwise(taken)]
    assert max(grown, default=0) <= BESIDE_A_STEP
    on.run()
    assert on.tokens[1] == on.tokens[2] == text


def test_idle_or_not_all_is_taken_in_and_sessions_take_turns() -> None:
    on = rig(memory=1 << 26)
    text = oracle(on.lm, PROMPT, LENGTH)
    ask(on, 1, [strange(20000, 1), text], allowance=Allowance(0, 0))
    ask(on, 2, [strange(500, 2), text], allowance=Allowance(0, 0))
    on.step()
    on.step()
    on.step()
    read = {handle: on.engine.roster.get(0, handle).session.references for handle in (1, 2)}  # type: ignore[union-attr]
    assert read[2] is not None
    assert read[2].tokens >= 500, "it does not wait for the long one"
    on.run()
    assert [each.tokens for each in read.values() if each is not None] == [20000 + LENGTH, 500 + LENGTH]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1] * (MOST_REFERENCES + 1), "references: at most 64 are allowed, not 65"),
        ([3, 0], "references[1]: must not be empty"),
        ([MOST_REFERENCE_TOKENS, 1], "references: at most 1048576 tokens together are allowed, not 1048577"),
    ],
)
def test_lengths_are_refused_by_name(lengths: list[int], message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        check_lengths(lengths)
    _, refused = tick_from_wire(0, _ask(reference_lengths=lengths), INFO, 0.0)
    assert [(each.handle, each.code, each.message) for each in refused] == [(1, Code.INVALID_ARGUMENT, message)]


def _ask(**changes: Any) -> verify_pb2.ConnectVerifyRequest:
    return verify_pb2.ConnectVerifyRequest(opens=[open_message(1, PROMPT, INFO, **changes)])


def test_a_part_with_an_id_outside_the_vocabulary_closes_its_session() -> None:
    part = verify_pb2.ReferencePart(handle=3, tokens=[1, INFO.vocabulary])
    tick, refused = tick_from_wire(0, verify_pb2.ConnectVerifyRequest(references=[part]), INFO, 0.0)
    assert tick.references == ()
    assert tick.closes == (3,)
    assert [each.message for each in refused] == [
        f"references: token id {INFO.vocabulary} is outside 0..{INFO.vocabulary - 1}"
    ]
    assert checked_ids([0, INFO.vocabulary - 1], INFO.vocabulary) == array("I", [0, INFO.vocabulary - 1])


def test_room_is_a_power_of_two_that_all_of_them_fit_into() -> None:
    assert [capacity_of(lengths) for lengths in ([1] * 64, [4097], [1 << 19, 1 << 19])] == [4096, 8192, 1 << 20]
    on = References([1 << 12])
    on.add(strange(1 << 12))
    while on.unread:
        on.read(1000)
    assert on._texts.size <= on.capacity * TOKEN_BYTES
    assert (on._texts.evicted, on.tokens) == (0, 1 << 12)
