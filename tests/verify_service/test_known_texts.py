"""Documents that a verifier is given: they save steps at a text's beginning, and change no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from demo_pair import TARGET, held_out_prompts
from specwire.core.law.sampling import Sampling
from specwire.core.model import ModelError, ModelInfo
from specwire.core.verify.shared_texts import VOTED_PRIORS, ScopeTexts, SharedIndex
from specwire.core.verify.text_sources import NgramSource
from specwire.lm import load_model
from tests.verify_service.rig import COUPLED, GREEDY, Rig, oracle
from tests.verify_service.test_shared_texts import LENGTH, PROMPT, SPEC
from verify_service.server import known_texts

VOCABULARY = 2000


def truth(sampling: Sampling) -> list[int]:
    return [*PROMPT, *oracle(Rig(SPEC).lm, PROMPT, LENGTH, sampling)]


def references(*documents: Sequence[int]) -> ScopeTexts:
    texts = ScopeTexts(lambda _: True)
    for number, document in enumerate(documents):
        SharedIndex(texts, document, str(number)).read()
    return texts


def steps(
    known: ScopeTexts | None,
    sampling: Sampling,
    prompt: Sequence[int] = PROMPT,
    own_text: bool = True,
    asked: bool = True,
) -> int:
    """own_text: as --no-ngram leaves it. asked: whether the request may be proposed texts."""
    on = Rig(SPEC, context=1024, growth=0.01, ngram=own_text, known=known)
    on.open(1, prompt, max_tokens=LENGTH, sampling=sampling, ngram=asked)
    on.run()
    assert on.tokens[1] == oracle(on.lm, prompt, LENGTH, sampling)
    return on.engine.steps


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_right_ones_save_steps_and_wrong_ones_change_nothing(sampling: Sampling) -> None:
    without, right = steps(None, sampling), truth(sampling)
    assert steps(references([7, 8, 9] * 50, right), sampling) < without / 4
    wrong = [(token + 1) % VOCABULARY for token in right]
    mixed = [each for pair in zip(right, wrong, strict=True) for each in pair]
    assert steps(references(mixed), sampling) <= without


def test_they_are_proposed_where_the_text_itself_is_not() -> None:
    """--no-ngram leaves out the text itself; a request that wants no texts is proposed none of these either."""
    right = truth(GREEDY)
    without = steps(None, GREEDY, own_text=False)
    known = references(right)
    assert steps(known, GREEDY, own_text=False) < without / 2
    assert steps(known, GREEDY, own_text=False, asked=False) == without
    repeating = [*right, *PROMPT]
    without = steps(None, GREEDY, repeating, own_text=False)
    assert steps(None, GREEDY, repeating) < without / 2, "all of it stands in the prompt"
    assert steps(references([7, 8, 9] * 50), GREEDY, repeating, own_text=False) == without


def test_what_one_session_learns_of_them_no_other_is_told() -> None:
    known = references(truth(GREEDY))
    text = list(PROMPT)
    source = NgramSource(text, index=SharedIndex(known, text), priors=VOTED_PRIORS)
    before = [each.rates(4) for each in source.acceptance]
    for _ in range(20):
        assert source.look() is not None
        text += [1, *PROMPT]
        source.text_grew()
    assert [each.rates(4) for each in source.acceptance] != before
    another = NgramSource(list(PROMPT), index=SharedIndex(known, PROMPT), priors=VOTED_PRIORS)
    assert [each.rates(4) for each in another.acceptance] == before


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    scripted = load_model(SPEC, slots=1, context=64).info
    return replace(scripted, vocabulary=4096, tokenizer_json=(TARGET / "tokenizer.json").read_bytes())


def test_documents_are_read_with_the_target_s_tokenizer(info: ModelInfo, tmp_path: Path) -> None:
    for number, prompt in enumerate(held_out_prompts()[:3]):
        (tmp_path / f"{number}.py").write_text(prompt.text)
    known = known_texts(info, [str(tmp_path)])
    assert known is not None
    assert len(known) == 3
    ids = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(held_out_prompts()[0].text).ids
    found = SharedIndex(known, ids[:40]).find(8)
    assert found is not None
    assert list(found.tokens) == ids[40:48]


@pytest.mark.parametrize(
    ("reference", "named"),
    [
        ("nowhere", "reference: there is no .*nowhere"),
        ("empty", "reference: nothing to read in .*empty"),
        ("binary.txt", "binary.txt: cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(info: ModelInfo, tmp_path: Path, reference: str, named: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match=named):
        known_texts(info, [str(tmp_path / reference)])
    with pytest.raises(ModelError, match="reference: this target has no tokenizer"):
        known_texts(replace(info, tokenizer_json=b""), [str(tmp_path)])
