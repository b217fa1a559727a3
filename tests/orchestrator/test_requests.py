"""A prompt's text neither holds up other sessions nor is read where it cannot fit."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import cast

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from orchestrator.api.requests import LONG_TEXT, digest_of, encoded, sources_of
from orchestrator.peers.models import ReadTokenizer, Target
from specwire.core.invalid import InvalidParameter
from specwire.v1 import common_pb2, generation_pb2


class WatchedTokenizer:
    """Notes the threads that encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.threads: set[int] = set()

    def encode(self, text: str, add_special_tokens: bool) -> object:
        self.threads.add(threading.get_ident())
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> object:
        self.threads.add(threading.get_ident())
        return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)


def target(context: int) -> tuple[Target, WatchedTokenizer]:
    words = Tokenizer(WordLevel({str(n): n for n in range(64)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    read = ReadTokenizer.of(words.to_str().encode())
    known = Target.of(common_pb2.GetModelInfoResponse(context=context), read)
    watched = WatchedTokenizer(known.tokenizer)
    return replace(known, tokenizer=cast(Tokenizer, watched)), watched


async def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    known, watched = target(context=100)
    assert known.most_prompt_bytes == 300
    with pytest.raises(InvalidParameter, match="^prompt: 301 bytes"):
        await encoded("x" * 301, known)
    assert not watched.threads


@pytest.mark.parametrize("words", [3, LONG_TEXT])
async def test_a_long_text_is_encoded_beside_the_event_loop(words: int) -> None:
    known, watched = target(context=LONG_TEXT + 1)
    assert await encoded("12 " * words, known) == [12] * words
    assert (threading.get_ident() in watched.threads) == (words == 3)


@pytest.mark.parametrize(
    ("asked", "drafters", "ngram"),
    [
        (generation_pb2.DRAFTING_UNSPECIFIED, True, True),
        (generation_pb2.DRAFTING_AUTOMATIC, True, True),
        (generation_pb2.DRAFTING_OFF, False, False),
        (generation_pb2.DRAFTING_DRAFTERS, True, False),
        (generation_pb2.DRAFTING_NGRAM, False, True),
    ],
)
def test_who_may_propose(asked: generation_pb2.Drafting, drafters: bool, ngram: bool) -> None:
    """Heads only where nothing is turned off: they came last."""
    found = sources_of(generation_pb2.GenerateRequest(drafting=asked))
    assert (found.drafters, found.ngram, found.heads) == (drafters, ngram, drafters and ngram)


def test_each_kind_of_source_by_itself() -> None:
    for wanted in (generation_pb2.Sources(), generation_pb2.Sources(heads=True), generation_pb2.Sources(ngram=True)):
        assert sources_of(generation_pb2.GenerateRequest(sources=wanted)) == wanted
    both = generation_pb2.GenerateRequest(drafting=generation_pb2.DRAFTING_OFF, sources=generation_pb2.Sources())
    with pytest.raises(InvalidParameter, match="^sources: contradicts drafting"):
        sources_of(both)


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="^drafting: 9 is not a known value"):
        sources_of(generation_pb2.GenerateRequest(drafting=cast(generation_pb2.Drafting, 9)))


def test_what_a_request_id_may_be_repeated_with() -> None:
    """How one call is answered may change, what is asked for may not. From release to release it is the same digest."""
    asked = generation_pb2.GenerateRequest(text="a prompt", request_id="r", stop=["x"])
    asked.sampling.logit_bias.update({7: 1.0, 3: -1.0})
    digest = digest_of(asked)
    assert digest == "8d02ac96bf35bcdc0580fc8f0ad13de1"
    for name, value in (("request_id", "other"), ("provisional", True), ("take_over", True), ("n", 1)):
        again = generation_pb2.GenerateRequest()
        again.CopyFrom(asked)
        setattr(again, name, value)
        assert digest_of(again) == digest
    for name, value in (
        ("text", "another"),
        ("priority", 1),
        ("echo", True),
        ("parent", "p"),
        ("prediction_text", "a"),
    ):
        other = generation_pb2.GenerateRequest()
        other.CopyFrom(asked)
        setattr(other, name, value)
        assert digest_of(other) != digest
