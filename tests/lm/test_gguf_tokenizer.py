"""Tokenizers of GGUF files' tables: llama.cpp's own tokens, of texts that tokenizers cut in unlike ways."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from demo_pair import DRAFT
from deploy.cli.diagnosis.checks import Grade
from deploy.cli.diagnosis.doctor_models import check_models
from specwire.core.model import LLAMACPP, ModelError
from specwire.lm import load_model
from specwire.lm.gguf_file import read_gguf
from specwire.lm.gguf_tokenizer import CUTS, text_of, tokenizer_of
from specwire.text.tokenizer import encode, load_tokenizer, vocabulary_fingerprint, vocabulary_map
from tests.lm.gguf_files import written
from tests.real_models import GEMMA, NAMES, QWEN, SMOL, real_model
from tests.text import other_vocabularies

with_llamacpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not there: make setup-llamacpp"
)
TEXTS = (
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n\n",
    "It's 12345.678 % of what we'll have; DON'T  they say?!  \t\r\n  (yes)...",
    "Grüße, naïve café \u2014 日本語のテキスト, русский текст, ไทย, العربية 🙂👍🏽",
    "   leading,  double   triple\n\n\n\nand trailing   ",
    "\t\ttabs\tand\r\nreturns\r\r\n",
    "x=1;y=22;z=333;w=4444;v=55555",
    "HelloWorld camelCase XMLHttpRequest SCREAMING_CASE",
    "e\u0301 combining \u200d joiner \ufeff mark \u00a0 no break",
    "½ ² Ⅷ ٣٤٥ १२३ 一二三",
    "I'M you'Re WE'LL he'd 'tis 's",
    "a/b\\c//d\n/e",
    "…。，、।۔، $$ ++ <=> ^^ ~~ || ``",
    "한국어 文字列 עברית हिन्दी 👩\u200d👩\u200d👧\u200d👦 🇦🇹",
    '<b>&amp;</b> {"k": [1, 2]}',
    " ",
    "\n",
    "ab" * 50,
)


def check_against_llamacpp(path: str, added: tuple[str, ...] = ()) -> None:
    """added: to a text, where that is asked for."""
    from specwire.lm.runners.llamacpp.runner import GgufWeights

    file = read_gguf(path)
    weights, tokenizer = GgufWeights(file), load_tokenizer(text_of(file).tokenizer_json)
    for text in TEXTS:
        ids = encode(tokenizer, text)
        assert ids == weights.tokens(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("one").tokens == [*added, *tokenizer.encode("one", add_special_tokens=False).tokens]


@with_llamacpp
@pytest.mark.parametrize("cut", CUTS)
def test_each_way_to_cut_makes_llama_cpps_own_tokens(cut: str, tmp_path: Path) -> None:
    """And gives the text back."""
    check_against_llamacpp(written(DRAFT, tmp_path / "demo.gguf", Type.Q8_0, cut=cut))


@with_llamacpp
def test_a_table_of_pieces_makes_llama_cpps_own_tokens(tmp_path: Path) -> None:
    folder = Path(other_vocabularies.save(tmp_path / "pieces", other_vocabularies.sentencepiece))
    check_against_llamacpp(written(folder, tmp_path / "pieces.gguf"))


@with_llamacpp
@pytest.mark.parametrize("name", NAMES)
def test_real_files_make_llama_cpps_own_tokens(name: str) -> None:
    check_against_llamacpp(real_model(name), ("<bos>",) if name == GEMMA else ())


def test_the_tokenizer_has_the_files_vocabulary(tmp_path: Path) -> None:
    file = read_gguf(written(DRAFT, tmp_path / "demo.gguf", Type.Q8_0))
    assert vocabulary_fingerprint(vocabulary_map(text_of(file).tokenizer_json, 0)) == vocabulary_fingerprint(
        file.tokens
    )


def test_a_real_pair_of_unlike_vocabularies_is_good() -> None:
    """Their tokenizers are made of their tables."""
    found = list(check_models(real_model(QWEN), [real_model(SMOL)], "float32", 1, 64 << 30))
    (pair,) = [each for each in found if each.topic == "pair"]
    assert pair.grade is not Grade.BAD
    assert "are shared" in pair.text


def test_a_cut_that_is_not_known_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(DRAFT, tmp_path / "demo.gguf", Type.Q8_0, cut="deepseek-coder")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre: cutting texts as 'deepseek-coder' is not known here"):
        tokenizer_of(read_gguf(path))
    with caplog.at_level(logging.WARNING):
        assert text_of(read_gguf(path)).tokenizer_json == b""
    assert "demo.gguf: tokenizer.ggml.pre: cutting texts as 'deepseek-coder'" in caplog.text
    assert "without tokenizer.json beside it it serves ids only" in caplog.text


@with_llamacpp
def test_a_file_with_an_unknown_cut_is_served_without_text(tmp_path: Path) -> None:
    path = written(DRAFT, tmp_path / "demo.gguf", Type.Q8_0, cut="deepseek-coder")
    assert load_model(path, slots=1, context=64, runtime=LLAMACPP).info.tokenizer_json == b""
