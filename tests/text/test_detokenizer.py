"""Pieces joined equal the whole decode, for every tokenizer family and any sequence of ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specwire.text import Detokenizer, TokenizerError, encode, load_tokenizer
from specwire.text.output import WINDOW, WindowPieces
from specwire.text.tokenizer import BYTE_OF
from tests.text.tokenizers_for_tests import ALL, CORPUS, byte_level, id_of, sentencepiece_like


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


def whole(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("family", ALL)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_joined_equal_the_whole_decode_for_random_ids(family: str, data: st.DataObject) -> None:
    tokenizer = ALL[family]()
    beyond = tokenizer.get_vocab_size() + 2
    tokens = data.draw(st.lists(st.integers(0, beyond), max_size=40))
    assert "".join(pieces(tokenizer, tokens)) == whole(tokenizer, tokens)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_byte_level_text_survives_and_no_half_character_is_released(text: str) -> None:
    tokenizer = byte_level()
    tokens = encode(tokenizer, text)
    parts = pieces(tokenizer, tokens)
    assert "".join(parts) == whole(tokenizer, tokens)
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece_like", "metaspace"])
@settings(max_examples=150, deadline=None)
@given(chunks=st.lists(st.sampled_from([*CORPUS, " ", "🙂", "é", "the", "\n"]), max_size=6))
def test_real_text_round_trips(family: str, chunks: list[str]) -> None:
    tokenizer = ALL[family]()
    tokens = encode(tokenizer, "".join(chunks))
    assert "".join(pieces(tokenizer, tokens)) == whole(tokenizer, tokens)


def test_a_character_is_released_by_its_last_byte() -> None:
    tokenizer = byte_level()
    alphabet = {byte: id_of(tokenizer, character) for character, byte in BYTE_OF.items()}
    parts = pieces(tokenizer, [alphabet[byte] for byte in "a🙂".encode()])
    assert parts == ["a", "", "", "", "🙂", ""]


def test_incomplete_bytes_become_one_replacement_at_the_end() -> None:
    tokenizer = byte_level()
    alphabet = {byte: id_of(tokenizer, character) for character, byte in BYTE_OF.items()}
    parts = pieces(tokenizer, [alphabet[byte] for byte in "🙂".encode()[:3]])
    assert parts == ["", "", "", "\ufffd"]


def test_a_run_of_byte_tokens_is_released_when_it_ends() -> None:
    tokenizer = sentencepiece_like()
    run = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert pieces(tokenizer, [*run, id_of(tokenizer, "a")]) == ["", "", "", "", "🙂a", ""]
    broken = [*run, run[0], id_of(tokenizer, "a")]
    assert "".join(pieces(tokenizer, broken)) == whole(tokenizer, broken) == "\ufffd" * 5 + "a"


def test_special_tokens_in_the_middle_do_not_eat_the_next_space() -> None:
    tokenizer = sentencepiece_like()
    the, special = id_of(tokenizer, "▁the"), id_of(tokenizer, "</s>")
    tokens = [the] + [special] * 20 + [the]
    assert "".join(pieces(tokenizer, tokens)) == "the the"


@pytest.mark.parametrize("family", ["sentencepiece_like", "metaspace", "word_level", "word_piece", "end_of_word"])
def test_the_window_stays_short(family: str) -> None:
    tokenizer = ALL[family]()
    content = {"sentencepiece_like": "▁the", "word_level": "red", "word_piece": "play", "end_of_word": "w</w>"}
    token = id_of(tokenizer, content.get(family, "a"))
    detokenizer = Detokenizer(tokenizer)
    window = detokenizer._pieces
    assert isinstance(window, WindowPieces)
    for _ in range(200):
        detokenizer.push(token)
        assert len(window._window) <= WINDOW + 1


def test_a_flushed_detokenizer_starts_anew() -> None:
    tokenizer = sentencepiece_like()
    detokenizer = Detokenizer(tokenizer)
    the = id_of(tokenizer, "▁the")
    assert detokenizer.push(the) + detokenizer.flush() == detokenizer.push(the) + detokenizer.flush() == "the"


def test_load_refuses_what_is_no_tokenizer_and_never_cuts_a_prompt() -> None:
    for bad in (b"", b"{}", b"\xff\xfe", b"[1]"):
        with pytest.raises(TokenizerError, match="tokenizer_json"):
            load_tokenizer(bad)
    cutting = Tokenizer.from_str(byte_level().to_str())
    cutting.enable_truncation(2)
    loaded = load_tokenizer(cutting.to_str().encode())
    assert whole(loaded, encode(loaded, CORPUS[0])) == CORPUS[0]
