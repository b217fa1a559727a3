"""A real head in the engine: texts are what the target writes without it, whatever comes together in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random

import pytest

from specwire.core.law.sampling import Sampling
from specwire.core.messages import Outcome, SourceKind
from specwire.lm.heads.slots import HeadedModel
from tests.lm import models
from tests.lm.heads.by_hand import nearly_bigram
from tests.verify_service.rig import GREEDY, Rig

CONTEXT, SLOTS = 1024, 4
# Of prompts: short ones, one that is read in one go, and those that are fed in several chunks.
LENGTHS = (5, 40, 300, 700, 90, 620)
TOKENS = 60
WITHOUT, CANCELLED = (2, 4), 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return nearly_bigram(tmp_path_factory.mktemp("pair"), CONTEXT)


def prompts() -> Iterator[list[int]]:
    random = Random(5)
    for length in LENGTHS:
        yield [random.randrange(3, models.VOCABULARY) for _ in range(length)]


def sampling(handle: int, temperature: float) -> Sampling:
    return Sampling(temperature=temperature, seed=handle) if temperature else GREEDY


def written(pair: tuple[str, str], headed: bool, temperature: float) -> Rig:
    """More sessions than slots, which begin one after the other; one is cancelled in the middle, some go without."""
    where, head = pair
    rig = Rig(where, slots=SLOTS, context=CONTEXT, ngram=False, heads=head if headed else None, growth=0.0)
    waiting, cancelled = dict(enumerate(prompts())), list[int]()

    def meanwhile() -> None:
        for handle in list(waiting)[: SLOTS - rig.held_slots()]:
            rig.open(
                handle,
                waiting.pop(handle),
                sampling=sampling(handle, temperature),
                max_tokens=TOKENS,
                head=handle not in WITHOUT,
            )
            return
        if len(rig.tokens.get(CANCELLED, [])) > TOKENS // 3 and not cancelled:
            cancelled.append(CANCELLED)
            rig.tick(closes=(CANCELLED,))

    rig.run(before_step=meanwhile)
    assert not waiting
    assert cancelled
    return rig


def widths(rig: Rig) -> Mapping[int, set[SourceKind]]:
    """Of each session whose tokens its windows had."""
    found: dict[int, set[SourceKind]] = {}
    for report in rig.reports:
        for decided in report.decided:
            found.setdefault(decided.handle, set()).update([decided.verdict.kind] if decided.verdict.width else [])
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_are_those_without_it(temperature: float, pair: tuple[str, str]) -> None:
    plain, drafted = written(pair, False, temperature), written(pair, True, temperature)
    assert isinstance(drafted.lm, HeadedModel)
    for handle in range(len(LENGTHS)):
        texts = plain.tokens[handle], drafted.tokens[handle]
        if handle == CANCELLED:
            least = min(map(len, texts))
            texts = texts[0][:least], texts[1][:least]
            assert least > TOKENS // 3
        else:
            assert len(texts[0]) == TOKENS
        assert texts[0] == texts[1], handle
    assert widths(plain) == {handle: set() for handle in range(len(LENGTHS))}
    for handle, kinds in widths(drafted).items():
        assert kinds == (set() if handle in WITHOUT else {SourceKind.HEAD}), handle
    for handle in set(range(len(LENGTHS))) - {*WITHOUT, CANCELLED}:
        outcomes = drafted.outcomes[handle]
        assert outcomes.count(Outcome.ACCEPTED) > TOKENS // 6, handle
        assert Outcome.RECOVERED in outcomes, handle
    assert drafted.engine.steps < plain.engine.steps


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_text_that_another_verifier_began_goes_on_with_a_head(temperature: float, pair: tuple[str, str]) -> None:
    """What was decided is fed like a prompt, and the head reads it. The first verifier may have had one, or none."""
    where, head = pair
    prompt, texts = next(prompts()), dict[bool, list[int]]()
    for headed in (False, True):
        first = Rig(where, slots=1, context=CONTEXT, ngram=False, heads=head if headed else None)
        first.open(0, prompt, sampling=sampling(1, temperature), max_tokens=TOKENS)
        while len(first.tokens.get(0, [])) < TOKENS // 2:
            first.step()
        texts[headed] = first.tokens[0][: TOKENS // 2]
        first.run()
        second = Rig(where, slots=1, context=CONTEXT, ngram=False, heads=head)
        second.open(0, prompt, sampling=sampling(1, temperature), max_tokens=TOKENS, decided=texts[headed])
        second.run()
        assert [*texts[headed], *second.tokens[0]] == first.tokens[0]
        assert widths(second) == {0: {SourceKind.HEAD}}
        assert second.outcomes[0].count(Outcome.ACCEPTED) > TOKENS // 12
    assert texts[False] == texts[True]
