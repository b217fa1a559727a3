"""Documents and tables that a verifier is given: they save steps at a text's beginning, and change no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from demo_pair import TARGET, held_out_prompts
from deploy.cli import main as cli
from specwire.core.law.sampling import Sampling
from specwire.core.model import ModelError, ModelInfo
from specwire.core.verify.shared_texts import ScopeTexts, SharedIndex
from specwire.core.verify.table import KnownTexts, NgramTable
from specwire.lm import load_model
from tests.verify_service.rig import COUPLED, GREEDY, Rig, oracle
from tests.verify_service.test_shared_texts import LENGTH, PROMPT, SPEC
from verify_service.known_texts import known_texts

VOCABULARY = 2000


def truth(sampling: Sampling) -> list[int]:
    return [*PROMPT, *oracle(Rig(SPEC).lm, PROMPT, LENGTH, sampling)]


def references(*documents: Sequence[int]) -> KnownTexts:
    texts = ScopeTexts(lambda _: True)
    for number, document in enumerate(documents):
        SharedIndex(texts, document, str(number)).read()
    return KnownTexts(VOCABULARY, references=texts)


def table(order: int, *documents: Sequence[int]) -> KnownTexts:
    return KnownTexts(VOCABULARY, table=NgramTable.built(documents, order, ""))


def steps(
    known: KnownTexts | None,
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
    assert steps(table(4, right, right), sampling) < without / 2
    wrong = [(token + 1) % VOCABULARY for token in right]
    mixed = [each for pair in zip(right, wrong, strict=True) for each in pair]
    assert steps(references(mixed), sampling) <= without
    assert steps(table(2, mixed), sampling) <= without


def test_they_are_proposed_where_the_text_itself_is_not() -> None:
    """--no-ngram leaves out the text itself; a request that wants no texts is proposed none of these either."""
    right = truth(GREEDY)
    without = steps(None, GREEDY, own_text=False)
    for known in (references(right), table(4, right, right)):
        assert steps(known, GREEDY, own_text=False) < without / 2
        assert steps(known, GREEDY, own_text=False, asked=False) == without
    repeating = [*right, *PROMPT]
    without = steps(None, GREEDY, repeating, own_text=False)
    assert steps(None, GREEDY, repeating) < without / 2, "all of it stands in the prompt"
    assert steps(references([7, 8, 9] * 50), GREEDY, repeating, own_text=False) == without


def test_what_one_session_learns_of_them_no_other_is_told() -> None:
    known = references(truth(GREEDY))
    text = list(PROMPT)
    [source] = known.sources(text)
    before = [each.rates(4) for each in source.acceptance]
    for _ in range(20):
        assert source.look() is not None
        text += [1, *PROMPT]
        source.text_grew()
    assert [each.rates(4) for each in source.acceptance] != before
    [another] = known.sources(list(PROMPT))
    assert [each.rates(4) for each in another.acceptance] == before


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    scripted = load_model(SPEC, slots=1, context=64).info
    return replace(scripted, vocabulary=4096, tokenizer_json=(TARGET / "tokenizer.json").read_bytes())


def test_documents_and_a_table_are_read_with_the_target_s_tokenizer(
    info: ModelInfo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus").mkdir()
    for number, prompt in enumerate(held_out_prompts()[:3]):
        (tmp_path / "corpus" / f"{number}.py").write_text(prompt.text)
    built = ["table", "build", str(tmp_path / "corpus"), "--tokenizer", str(TARGET), "--out", str(tmp_path / "table")]
    assert cli.main([*built, "--order", "3"]) == 0
    assert "order 3" in capsys.readouterr().err
    known = known_texts(info, [str(tmp_path / "corpus")], str(tmp_path / "table"))
    assert known.table is not None
    assert known.references is not None
    assert len(known.references) == 3
    assert len(known.told()) == 2
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(held_out_prompts()[0].text).ids
    for source in known.sources(ids[:40]):
        guess = source.look()
        assert guess is not None
        assert guess.tokens[0] < 4096
    assert known.sources(ids[:40])[0].index.find(8) is not None


@pytest.mark.parametrize(
    ("reference", "table_file", "named"),
    [
        ("nowhere", "", "reference: there is no .*nowhere"),
        ("empty", "", "reference: nothing to read in .*empty"),
        ("binary.txt", "", "binary.txt: cannot be read"),
        ("", "nowhere", "table: .*No such file"),
        ("", "binary.txt", "table: .*binary.txt is no table of n-grams"),
    ],
)
def test_what_cannot_be_read_is_named(
    info: ModelInfo, tmp_path: Path, reference: str, table_file: str, named: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    documents = [str(tmp_path / reference)] if reference else []
    with pytest.raises(ModelError, match=named):
        known_texts(info, documents, str(tmp_path / table_file) if table_file else "")


def test_a_table_of_another_tokenizer_is_refused(info: ModelInfo, tmp_path: Path) -> None:
    from specwire.text.table_file import save_table

    save_table(NgramTable.built([[1, 2, 3]], 2, "f" * 64), tmp_path / "table")
    with pytest.raises(ModelError, match="was made with the tokenizer ffffffffffff, the target's is "):
        known_texts(info, [], str(tmp_path / "table"))
    with pytest.raises(ModelError, match="table: this target has no tokenizer"):
        known_texts(replace(info, tokenizer_json=b""), [], str(tmp_path / "table"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--order", "6"], "order: must be from 2 to 5, not 6"),
        (["--out", "/nowhere/table"], "out: there is no folder /nowhere"),
        (["--tokenizer", "/nowhere/model"], "tokenizer"),
    ],
)
def test_a_table_that_cannot_be_built(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "a.py"
    corpus.write_text("x = 1\n")
    line = ["table", "build", str(corpus), "--tokenizer", str(TARGET), "--out", str(tmp_path / "table"), *words]
    assert cli.main(line) in (1, 2)
    assert named in capsys.readouterr().err
    assert not (tmp_path / "table").exists()
