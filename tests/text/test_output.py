"""Tokens in, text and cut out: pieces that are the whole decode, for every tokenizer; stop strings; both together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specwire.core.invalid import InvalidParameter
from specwire.text.output import (
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
    WINDOW,
    Detokenizer,
    OutputText,
    StopScanner,
    WindowPieces,
)
from specwire.text.tokenizer import BYTE_OF, TokenizerError, encode, load_tokenizer
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


def test_a_character_is_released_by_its_last_byte_and_an_incomplete_one_at_the_end() -> None:
    tokenizer = byte_level()
    alphabet = {byte: id_of(tokenizer, character) for character, byte in BYTE_OF.items()}
    for data, parts in (("a🙂".encode(), ["a", "", "", "", "🙂", ""]), ("🙂".encode()[:3], ["", "", "", "\ufffd"])):
        assert pieces(tokenizer, [alphabet[byte] for byte in data]) == parts


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


# ----------------------------------------------------------------------------------------------------------------------
# The scanner cuts where a whole-text search would, however the text is cut into pieces.


def oracle(text: str, stops: list[str]) -> int | None:
    """Where the text is cut: the stop completed first, of those the one that starts first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.text("ab.", max_size=5), max_size=10),
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4),
)
def test_agrees_with_a_search_of_the_whole_text(parts: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    results = [scanner.push(part) for part in parts]
    released = "".join(text for text, _ in results) + scanner.flush()
    text = "".join(parts)
    cut = oracle(text, stops)
    assert scanner.stopped_at == cut
    assert released == text[:cut]
    assert scanner.push("more")[0] + scanner.flush() == ("more" if cut is None else "")


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_holds_back_exactly_what_may_begin_a_stop(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    released = "".join(scanner.push(character)[0] for character in text)
    if scanner.stopped_at is None:
        rest = text[len(released) :]
        suffixes = (text[start:] for start in range(len(text) + 1))
        assert rest == next(tail for tail in suffixes if any(stop.startswith(tail) for stop in stops))


def test_offsets_are_code_points() -> None:
    scanner = StopScanner(["🙂!"])
    assert [scanner.push(part) for part in ("é🙃", "🙂", "!")] == [("é🙃", None), ("", None), ("", 2)]


def test_bad_stops_are_named() -> None:
    for bad in ([""], ["x"] * (MOST_STOPS + 1), ["x" * (MOST_STOP_CHARACTERS + 1)]):
        with pytest.raises(InvalidParameter, match="stop: "):
            StopScanner(bad)


# ----------------------------------------------------------------------------------------------------------------------
# Both together.


def test_kept_ends_with_the_token_that_completes_the_stop() -> None:
    tokenizer = byte_level()
    tokens = [id_of(tokenizer, token) for token in ("a", "b", ";", "c", "d")]
    output = OutputText(tokenizer, ["b;"])
    release = output.push(tokens)
    assert (release.text, release.kept, release.stopped_at) == ("a", 3, 1)
    assert release.text_ends == (1, 2, 3)
    assert output.length == 1
    assert output.push(tokens).kept == 0
    assert output.finish() == ""


def test_what_is_held_back_comes_with_finish() -> None:
    tokenizer = byte_level()
    output = OutputText(tokenizer, ["}\n}"])
    tokens = encode(tokenizer, "x}")
    release = output.push(tokens)
    assert (release.text, release.kept, release.text_ends[-1]) == ("x", len(tokens), 2)
    assert (output.finish(), output.length, output.stopped_at) == ("}", 2, None)


def test_a_stop_completed_by_the_end_itself() -> None:
    tokenizer = sentencepiece_like()
    run = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "🙂".encode()]
    output = OutputText(tokenizer, ["🙂"])
    assert output.push([id_of(tokenizer, "a"), *run]).text == "a"
    assert output.finish() == ""
    assert output.stopped_at == output.length == 1


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rebuilding_in_one_push_gives_the_same_state(data: st.DataObject) -> None:
    tokenizer = byte_level()
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    stops = data.draw(st.lists(st.sampled_from(["e", "th", "\n", "ing ", "\ufffd"]), max_size=3))
    step, once = OutputText(tokenizer, stops), OutputText(tokenizer, stops)
    releases = [step.push([token]) for token in tokens]
    whole = once.push(tokens)
    assert "".join(release.text for release in releases) == whole.text
    assert sum(release.kept for release in releases) == whole.kept
    assert tuple(end for release in releases for end in release.text_ends) == whole.text_ends
    assert step.finish() == once.finish()
    assert step.length == once.length


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_stop_counts_that_is_completed_before_min_tokens(data: st.DataObject) -> None:
    tokenizer = byte_level()
    tokens = data.draw(st.lists(st.sampled_from([id_of(tokenizer, each) for each in "ab;"]), max_size=12))
    stops = data.draw(st.lists(st.text("ab;", min_size=1, max_size=4), max_size=3))
    least = data.draw(st.integers(0, 12))
    text = tokenizer.decode(tokens)  # each token is one character
    ends = [end for end in range(least + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    output = OutputText(tokenizer, stops, least)
    release = output.push(tokens)
    if ends:
        start = min(ends[0] - len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert (release.text, release.kept, output.stopped_at) == (text[:start], ends[0], start)
    else:
        assert (release.text + output.finish(), release.kept, output.stopped_at) == (text, len(tokens), None)
