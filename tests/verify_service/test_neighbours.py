"""What goes wrong with one session is told to that session; the others' texts do not change by one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from specwire.core.invalid import Code
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Proposal
from specwire.core.text import hash_of
from specwire.core.verify.session import Allowance
from specwire.lm import Feed
from tests.lm.models import CONTEXT, build, config, poison, save
from tests.verify_service.rig import COUPLED, FAR, GREEDY, Rig, chain, oracle
from verify_service.engine.messages import LinkLost

SYSTEM = tuple(index % 50 + 3 for index in range(24))
PROMPTS = {handle: (*SYSTEM, handle) for handle in (1, 2, 3)}
SAMPLINGS = {1: GREEDY, 2: COUPLED, 3: Sampling(0.8, 5, 0.9, 3)}
# An id that the real model below has no finite embedding of.
POISON = 7


def malformed(rig: Rig, handle: int) -> None:
    """Of every kind that the wire can carry."""
    text = (*PROMPTS[handle], *rig.tokens[handle])
    rig.propose(
        handle,
        Proposal(0, 1 << 60, len(text), 0, (1 << 31, 5), None),
        Proposal(-1, -1, -1, -1, (), 0),
        Proposal(7, 3, 1 << 40, 1 << 40, (1,) * 300, 5),
        Proposal(0, 9, len(text), 0, (63,) * 200, 12345),
        chain(10, text, [63] * 255),
        Proposal(0, 11, len(text), 0, (1, 2), hash_of(text), parents=(0, 5)),
        Proposal(0, 11, len(text), 0, (1, 2), hash_of(text), parents=(-1,)),
        Proposal(0, 11, len(text), 0, tuple(range(60)) * 4, hash_of(text), parents=(-1,) * 240),
        Proposal(0, 11, len(text), 240, (1, 2), None, parents=(200, -1)),
    )


def closed(rig: Rig, handle: int) -> None:
    rig.tick(link=handle, closes=(handle,))


def lost(rig: Rig, handle: int) -> None:
    rig.engine.inbox.put(LinkLost(handle))


def unread(rig: Rig, handle: int) -> None:
    """Its client takes nothing any more: no credit comes for it."""
    rig.tick(link=handle, progress=((handle, Allowance(0, len(PROMPTS[handle]) + len(rig.tokens[handle]))),))


def replaced(rig: Rig, handle: int) -> None:
    rig.open(handle, SYSTEM[::-1], link=handle, session_id="another", max_tokens=3)


Fault = Callable[[Rig, int], None]


def begun(ngram: bool = True) -> Rig:
    rig = Rig(ngram=ngram)
    for handle, prompt in PROMPTS.items():
        allowance = Allowance(0, len(prompt) + 4) if handle == 2 else FAR
        rig.open(handle, prompt, link=handle, sampling=SAMPLINGS[handle], allowance=allowance, scope=b"a")
    for _ in range(3):
        rig.step()
    return rig


def check_others(rig: Rig) -> None:
    for handle in (1, 3):
        assert rig.tokens[handle] == oracle(rig.lm, PROMPTS[handle], 40, SAMPLINGS[handle])
    assert {1, 3} <= rig.finished.keys()


@pytest.mark.parametrize("fault", [malformed, closed, lost, unread, replaced])
@pytest.mark.parametrize("during", [False, True], ids=["between", "during"])
def test_a_fault_of_one_session_changes_no_other_s_text(fault: Fault, during: bool) -> None:
    rig = begun()
    if during:
        rig.during(lambda: fault(rig, 2))
    else:
        fault(rig, 2)
    rig.run()
    check_others(rig)
    assert rig.refused == []
    if fault is malformed:
        rig.tick(link=2, progress=((2, FAR),))
        rig.run()
        assert rig.tokens[2] == oracle(rig.lm, PROMPTS[2], 40, COUPLED)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("drafted", [False, True])
def test_logits_of_one_row_that_are_not_finite_are_its_session_s_alone(value: float, drafted: bool) -> None:
    """And nobody is ever given what its slot held, though others begin alike. Where a draft token may have done it the
    session goes on without any.
    """
    rig = begun(ngram=False)
    rig.tick(link=2, progress=((2, FAR),))
    rig.step()
    if drafted:
        proposal = chain(0, (*PROMPTS[2], *rig.tokens[2]), [5, 6])
        rig.tick(link=2, proposals=((2, proposal),))
    [broken] = [held.slot for held in rig.engine.roster if held.handle == 2]
    forward = rig.lm.forward

    def poisoned(feeds: Sequence[Feed]) -> torch.Tensor:
        rig.lm.forward = forward  # type: ignore[method-assign]
        logits = forward(feeds)
        first = 0
        for feed in feeds:
            if feed.slot == broken:
                assert (feed.wanted > 1) == drafted
                logits[first : first + feed.wanted] = value
            first += feed.wanted
        rig.lm.failed = frozenset({broken})  # type: ignore[misc]
        rig.lm.discard(broken)
        return logits

    rig.lm.forward = poisoned  # type: ignore[method-assign]
    rig.step()
    rig.lm.failed = frozenset()  # type: ignore[misc]
    if drafted:
        assert rig.refused == []
        rig.run()
        assert rig.tokens[2] == oracle(rig.lm, PROMPTS[2], 40, COUPLED)
    else:
        assert [(each.handle, each.code) for each in rig.refused] == [(2, Code.ABORTED)]
        rig.open(2, (*PROMPTS[2], 9), link=2, session_id="next", scope=b"a", max_tokens=5)
        rig.run()
        assert rig.tokens[2][-5:] == oracle(rig.lm, (*PROMPTS[2], 9), 5)
    check_others(rig)


def served(folder: str, prompts: Mapping[int, tuple[int, ...]], proposed: Sequence[int] = ()) -> Rig:
    """A real model serves these sessions together; `proposed` to session 2, behind its first token."""
    rig = Rig(folder, slots=3, context=CONTEXT)
    for handle, prompt in prompts.items():
        rig.open(handle, prompt, sampling=SAMPLINGS[handle], max_tokens=20, scope=b"a")
    rig.step()
    if proposed:
        rig.propose(2, chain(10, (*prompts[2], *rig.tokens[2]), proposed))
    rig.run()
    return rig


@pytest.mark.parametrize("proposed", [False, True], ids=["prompt", "proposal"])
def test_what_poisons_one_text_of_a_real_model_reaches_no_other(proposed: bool, tmp_path: Path) -> None:
    """One attention reads the keys and values of all of them: what is not finite stays where it was computed."""
    model = build(config("llama"))
    poison(model, POISON, float("nan"))
    folder = save(model, tmp_path)
    prompts = {handle: (5, 17, 3, 9 + handle) for handle in (1, 2, 3)}
    alone = {handle: served(folder, {handle: prompt}).tokens[handle] for handle, prompt in prompts.items()}
    if proposed:
        together = served(folder, prompts, (POISON, 4))
        assert (together.refused, together.tokens) == ([], alone)
    else:
        together = served(folder, {**prompts, 2: (*prompts[2], POISON)})
        assert [(each.handle, each.code) for each in together.refused] == [(2, Code.ABORTED)]
        assert {handle: together.tokens[handle] for handle in (1, 3)} == {handle: alone[handle] for handle in (1, 3)}
