"""Vocabularies side by side: what two of them share, and a text of one in the other's tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import demo_pair
from specwire.text.tokenizer import TokenizerError
from specwire.text.vocabulary_map import (
    CONTEXT,
    Convention,
    OwnText,
    TokenTable,
    VocabularyMap,
    convention_of,
    whole_characters,
)
from tests.text import other_vocabularies
from tests.text.tokenizers_for_tests import ALL, byte_level, id_of, metaspace, sentencepiece_like

TEXTS = (
    "def area(width, height):\n    return width * height  # für später\n",
    "the quick brown fox; naïve café – 日本語のテキスト 🙂🙃👩‍👩‍👧 and on",
    "Ελληνικά, кириллица, العربية, हिन्दी, 한국어, 中文。 " * 4,
)
SENTENCEPIECE = other_vocabularies.sentencepiece()[0]
DEMO = Tokenizer.from_file(str(demo_pair.TARGET / "tokenizer.json"))


def table(tokenizer: Tokenizer, eos: str = "") -> TokenTable:
    ends = [id_of(tokenizer, eos)] if eos else []
    return TokenTable(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), ends)


def mapped(target: Tokenizer, own: Tokenizer) -> VocabularyMap:
    return VocabularyMap(table(target), table(own))


def test_tokens_are_compared_as_bytes() -> None:
    """Of several for the same bytes the byte token comes last."""
    found = VocabularyMap(table(DEMO, "<|endoftext|>"), table(SENTENCEPIECE, "</s>"))
    for ours, theirs in (("Ġother", "▁other"), ("Ċ", "\n"), ("Ã", "<0xC3>"), ("<|endoftext|>", "</s>")):
        assert found.own_of[id_of(DEMO, ours)] == id_of(SENTENCEPIECE, theirs)


def test_every_pair_of_equal_bytes_is_found_and_no_other() -> None:
    """Held against what the two tokenizers themselves decode."""
    found = mapped(DEMO, SENTENCEPIECE)
    spelt = {SENTENCEPIECE.decode([own]) for own in range(SENTENCEPIECE.get_vocab_size())}
    for token in range(1, DEMO.get_vocab_size()):
        text, own = DEMO.decode([token]), found.own_of[token]
        if "\ufffd" in text or not text.strip():
            continue  # part of a character; a blank, which SentencePiece's decoder strips
        assert own >= 0, text
        assert SENTENCEPIECE.decode([own]) == text.removeprefix(" "), text
        assert text.removeprefix(" ") in spelt
    assert found.share == 1.0


def test_bytes_of_broken_characters_are_shared() -> None:
    found = mapped(DEMO, SENTENCEPIECE)
    own = {found.own.bytes[each] for each in found.own_of if each >= 0}
    assert {bytes([byte]) for byte in range(256)} <= own


def test_what_is_shared_is_told() -> None:
    few = mapped(DEMO, byte_level())
    assert 0.0 < few.share < 0.5
    told = f"{few.shared} of the target's {few.of} tokens are shared ({few.share:.0%} of a text); it drafts in these"
    assert str(few) == told


OTHERS = ("word_level", "word_piece", "end_of_word")


@pytest.mark.parametrize("name", ALL)
def test_what_a_tokens_text_depends_on(name: str) -> None:
    tokenizer, expected = ALL[name](), Convention.OTHER if name in OTHERS else Convention.BYTES
    assert convention_of(tokenizer.to_str().encode()) is expected
    if expected is Convention.OTHER:
        with pytest.raises(TokenizerError, match="^tokenizer_json: its tokens do not stand for bytes"):
            mapped(tokenizer, DEMO)
        with pytest.raises(TokenizerError, match="^this drafter's tokens do not stand for bytes"):
            mapped(DEMO, tokenizer)


def test_what_is_no_tokenizer_is_no_vocabulary() -> None:
    for broken in (b"", b"nonsense", b"\xff\xfe", b'{"model": {"type": "BPE"}}'):
        assert convention_of(broken) is Convention.OTHER
        with pytest.raises(TokenizerError, match="tokenizer_json: "):
            TokenTable(broken, 10, [])


def test_ids_beyond_the_model_are_left_out() -> None:
    narrow = TokenTable(DEMO.to_str().encode(), 300, [5, 4000])
    assert max(narrow.ids.values()) < 300
    assert len(narrow.bytes) == 300
    assert narrow.eos_ids == {5}


# A text in own tokens

PAIRS = [(DEMO, SENTENCEPIECE), (SENTENCEPIECE, DEMO), (DEMO, byte_level()), (DEMO, DEMO)]
PAIRS.append((SENTENCEPIECE, SENTENCEPIECE))
edits = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=40)


def bytes_of(known: TokenTable, tokens: list[int]) -> bytes:
    return b"".join(known.bytes[token] for token in tokens)


@pytest.mark.parametrize("pair", range(len(PAIRS)))
@settings(max_examples=20)
@given(text=st.sampled_from(TEXTS), changes=edits)
def test_a_text_told_in_pieces_is_the_text_told_at_once(pair: int, text: str, changes: list[tuple[int, int]]) -> None:
    """With tokens taken back and others told in between; own tokens said to have stayed have stayed."""
    target, own = PAIRS[pair]
    vocabulary = mapped(target, own)
    tokens = target.encode(text, add_special_tokens=False).ids
    told, known = OwnText(vocabulary), 0
    for back, on in [*changes, (0, len(tokens))]:
        start = max(0, known - back)
        before, stays = list(told.own), told.retell(start, [*tokens[start : start + on // 2], *tokens[:3]])
        assert told.own[:stays] == before[:stays]
        start += len(tokens[start : start + on // 2])
        before, stays = list(told.own), told.retell(start, tokens[start : start + on])
        assert told.own[:stays] == before[:stays]
        known = start + len(tokens[start : start + on])
    whole = OwnText(vocabulary)
    whole.retell(0, tokens)
    assert len(told) == len(whole) == len(tokens)
    assert told.own == whole.own
    data = bytes_of(vocabulary.target, tokens)
    assert bytes_of(vocabulary.own, told.own).removeprefix(b" ") == data.removeprefix(b" ")


@pytest.mark.parametrize("own", [SENTENCEPIECE, DEMO])
def test_own_tokens_are_what_the_own_tokenizer_makes(own: Tokenizer) -> None:
    vocabulary = mapped(DEMO, own)
    for text in TEXTS:
        told = OwnText(vocabulary)
        told.retell(0, DEMO.encode(text).ids)
        assert told.own == own.encode(text, add_special_tokens=False).ids


def test_only_the_end_is_tokenised_again() -> None:
    vocabulary = mapped(DEMO, SENTENCEPIECE)
    tokens = DEMO.encode(TEXTS[1] * 40).ids
    told = OwnText(vocabulary)
    told.retell(0, tokens[:-1])
    seen: list[int] = []
    encode = vocabulary.own.encode

    def counted(text: str) -> tuple[list[int], list[int], int]:
        seen.append(len(text.encode()))
        return encode(text)

    vocabulary.own.encode = counted  # type: ignore[method-assign]
    stays = told.retell(len(tokens) - 1, tokens[-1:])
    assert max(seen) <= 2 * CONTEXT
    assert stays >= len(told.own) - 4


def test_half_a_character_is_told_by_its_bytes() -> None:
    tokens = byte_level().encode("ok 🙃", add_special_tokens=False).ids
    told = OwnText(mapped(byte_level(), SENTENCEPIECE))
    told.retell(0, tokens[:-1])
    assert told.complete
    assert str(SENTENCEPIECE.id_to_token(told.own[-1])).startswith("<0x")
    lacking = OwnText(mapped(byte_level(), metaspace()))
    lacking.retell(0, tokens[:-1])
    assert not lacking.complete
    lacking.retell(len(tokens) - 1, tokens[-1:])
    assert lacking.complete


def test_special_tokens_stay_or_stand_for_nothing() -> None:
    """They part what is tokenised: nothing is joined over them."""
    both, ours = table(byte_level(), "</s>"), table(sentencepiece_like(), "</s>")
    start, end = id_of(byte_level(), "<s>"), id_of(byte_level(), "</s>")
    told = OwnText(VocabularyMap(both, ours))
    words = byte_level().encode("the a").ids
    told.retell(0, [start, *words, end, *words])
    spoken = sentencepiece_like().encode("the a", add_special_tokens=False).ids
    first, last = id_of(sentencepiece_like(), "<s>"), id_of(sentencepiece_like(), "</s>")
    assert told.own == [first, *spoken, last, *spoken]
    assert told.retell(1 + len(words), words) <= 1 + len(spoken)
    assert first in told.own
    assert last not in told.own
    silent = OwnText(VocabularyMap(table(DEMO, "<|endoftext|>"), table(sentencepiece_like())))
    silent.retell(0, [0, *DEMO.encode("the a").ids])
    assert silent.own == spoken


def test_a_text_that_is_rewritten_is_kept_apart_by_what_the_tokenizer_says() -> None:
    """It has no token for most characters: its own tokens stand for other bytes than the text's."""
    told = OwnText(mapped(DEMO, metaspace()))
    tokens = DEMO.encode("日本 and ☃☃ then again and again, " * 8).ids
    for at in range(0, len(tokens), 3):
        told.retell(at, tokens[at : at + 3])
    assert id_of(metaspace(), "<unk>") in told.own
    assert len(told) == len(tokens)


@given(st.text(max_size=12), st.integers(0, 40))
def test_where_the_last_whole_character_ends(text: str, length: int) -> None:
    data = text.encode()[:length]
    whole = data[: whole_characters(data)]
    assert whole == data.decode(errors="ignore").encode()
