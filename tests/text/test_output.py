"""Tokens in, text and cut out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.text import OutputText, encode
from tests.text.tokenizers_for_tests import byte_level, id_of, sentencepiece_like


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
