"""Texts of other sessions: they save steps, change no token, stay within their scope, and leave with their session."""

from __future__ import annotations

from typing import Any

import pytest

from specwire.core.law.sampling import Sampling
from specwire.core.messages import Outcome, SourceKind
from specwire.core.policy.tunables import TEXT_PRIORS
from specwire.core.verify.shared_texts import FIRST_TOKENS, TOKEN_BYTES
from specwire.v1 import common_pb2
from tests.verify_service.peer import connected, serving
from tests.verify_service.rig import COUPLED, GREEDY, Rig, oracle

# A script whose texts do not repeat themselves.
SPEC = "scripted:5:memory=3:vocab=2000"
PROMPT = tuple(range(40, 60))
LENGTH = 200
# A script that soon repeats itself.
REPEATING = "scripted:2:memory=1:vocab=60"
MEMORY = 16 * FIRST_TOKENS * TOKEN_BYTES
OURS, THEIRS = b"ours", b"theirs"


def rig(memory: int = MEMORY, slots: int = 4) -> Rig:
    return Rig(SPEC, context=1024, growth=0.01, text_memory=memory, slots=slots)


def steps(on: Rig, handle: int, sampling: Sampling = GREEDY, **changes: Any) -> int:
    """Forwards that a session took; its text is the target's."""
    before = on.engine.steps
    fields: dict[str, Any] = {"shared": True, "scope": OURS, **changes}
    on.open(handle, PROMPT, max_tokens=LENGTH, sampling=sampling, **fields)
    on.run()
    assert on.tokens[handle] == oracle(on.lm, PROMPT, LENGTH, sampling)
    return on.engine.steps - before


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_what_a_session_said_the_next_one_is_proposed(sampling: Sampling) -> None:
    on = rig()
    first, second = steps(on, 1, sampling), steps(on, 2, sampling)
    assert first > LENGTH * 0.9, "it repeats nothing of its own"
    assert second < first / 4
    kinds = {each.verdict.kind for report in on.reports for each in report.decided if each.verdict.width}
    assert kinds == {SourceKind.NGRAM}


def test_while_the_first_one_runs() -> None:
    on = rig()
    on.open(1, PROMPT, max_tokens=LENGTH, scope=OURS, shared=True)
    while len(on.tokens.get(1, ())) < LENGTH - 10:
        on.step()
    on.open(2, PROMPT, max_tokens=LENGTH, scope=OURS, shared=True)
    on.run()
    assert on.tokens[1] == on.tokens[2] == oracle(on.lm, PROMPT, LENGTH)
    assert on.outcomes[1].count(Outcome.ACCEPTED) < LENGTH / 10
    assert on.outcomes[2].count(Outcome.ACCEPTED) > LENGTH / 2


@pytest.mark.parametrize(
    "changes", [{"scope": THEIRS}, {"scope": b""}, {"shared": False}, {"ngram": False}], ids=lambda each: str(each)
)
def test_neither_another_scope_nor_who_does_not_share_is_proposed_anything(changes: dict[str, Any]) -> None:
    on = rig()
    first = steps(on, 1)
    assert steps(on, 2, **changes) >= first
    assert steps(on, 3) < first / 4, "ours still is"


def test_who_does_not_share_leaves_nothing() -> None:
    on = rig()
    first = steps(on, 1, shared=False)
    assert steps(on, 2) == first
    assert on.engine.sessions.texts.texts == 1


@pytest.mark.parametrize(("spec", "growth"), [(SPEC, 0.01), (REPEATING, 0.05)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("theirs", [THEIRS, b""])
def test_another_scope_is_told_the_same_whether_or_not_ours_asked_also_after_deletion(
    spec: str, growth: float, shared: bool, theirs: bytes
) -> None:
    """Every verdict of theirs: tokens, widths, outcomes, so that no figure tells of us."""
    told = []
    for ours in (False, True):
        on = Rig(spec, context=1024, growth=growth, text_memory=MEMORY)
        if ours:
            steps(on, 1, shared=shared)
            steps(on, 2, shared=shared)
            for handle in range(5, 15):
                # Too short for a guess that pays.
                on.open(handle, (*PROMPT, handle), max_tokens=4, scope=OURS, shared=shared)
                on.run()
            on.tick(forgotten=("session-2",))
        steps(on, 3, scope=theirs, shared=shared)
        steps(on, 4, scope=theirs, shared=shared)
        mine = [each.verdict for report in on.reports for each in report.decided if each.handle in (3, 4)]
        told.append([(each.position, each.tokens, each.outcomes, each.width, each.kind) for each in mine])
    assert told[0] == told[1]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_how_good_guesses_from_own_texts_are_the_tenant_s_next_session_knows(sampling: Sampling) -> None:
    on = Rig("scripted:5:memory=1:vocab=20", context=1024, growth=0.05, text_memory=MEMORY, slots=4)
    on.open(1, (5, 6, 7), max_tokens=LENGTH, sampling=sampling, scope=OURS, shared=True)
    on.run()
    other = COUPLED if sampling is GREEDY else GREEDY
    openings: list[tuple[Sampling, dict[str, Any]]] = [
        (sampling, {"scope": OURS, "shared": True}),
        (sampling, {"scope": OURS, "shared": False}),
        (sampling, {"scope": THEIRS, "shared": True}),
        (other, {"scope": OURS, "shared": True}),
    ]
    known = []
    for handle, (drawn, fields) in enumerate(openings, 2):
        on.open(handle, (5, 6, 7), sampling=drawn, **fields)
        on.step()
        [held] = [each for each in on.engine.roster if each.handle == handle]
        assert held.session.ngram is not None
        own = held.session.ngram.sources[0]
        known.append([each.rates(1)[0] for each in own.acceptance])
        on.run()
    first, *others = known
    assert others == 3 * [list(TEXT_PRIORS)], "neither by who keeps to himself, nor for others, nor of another law"
    assert first != list(TEXT_PRIORS)


def test_a_deleted_session_is_proposed_no_more() -> None:
    on = rig()
    first = steps(on, 1)
    on.tick(forgotten=("session-1",))
    on.run()
    assert on.engine.sessions.texts.texts == 0
    assert steps(on, 2) == first


def test_deleted_while_it_runs_it_leaves_at_once_and_for_good() -> None:
    on = rig()
    on.open(1, PROMPT, max_tokens=LENGTH, scope=OURS, shared=True)
    while len(on.tokens.get(1, ())) < LENGTH // 2:
        on.step()
    on.tick(forgotten=("session-1",))
    on.run()
    assert on.tokens[1] == oracle(on.lm, PROMPT, LENGTH)
    assert on.engine.sessions.texts.texts == 0


def test_without_memory_for_them_nothing_is_kept() -> None:
    on = rig(memory=0)
    assert steps(on, 1) == steps(on, 2)
    assert on.engine.sessions.texts.size == 0


def test_a_session_opened_again_elsewhere_is_kept_once() -> None:
    on = rig()
    steps(on, 1)
    on.tick(closes=(1,))
    on.run()
    on.open(1, PROMPT, max_tokens=LENGTH, scope=OURS, shared=True, fence=2)
    on.run()
    assert on.engine.sessions.texts.texts == 1


async def test_over_the_wire() -> None:
    stopping = common_pb2.Stopping(max_tokens=LENGTH)
    tested = dict.fromkeys((1, 2, 3, 4), 0)
    async with serving(f"{SPEC}:delay_ms=1") as running, connected(running) as peer:
        asked: list[dict[str, Any]] = [{}, {"share_text": False}, {"cache_scope": THEIRS}, {}]
        for handle, changes in enumerate(asked, 1):
            fields: dict[str, Any] = {"share_text": True, "cache_scope": OURS, **changes}
            await peer.open(handle, PROMPT, stopping=stopping, **fields)
            while handle not in peer.finished:
                for verdict in (await peer.receive()).verdicts:
                    tested[verdict.handle] += verdict.tested
    assert peer.tokens[1] == peer.tokens[2] == peer.tokens[3] == peer.tokens[4]
    assert max(tested[1], tested[2], tested[3]) < LENGTH / 4
    assert tested[4] > LENGTH / 2
