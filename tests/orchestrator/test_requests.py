"""A prompt's text neither holds up other sessions nor is read where it cannot fit."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import cast

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from orchestrator.api import requests
from orchestrator.api.requests import DOCUMENT_PIECE, digest_of, encoded, reference_tokens, single_requests, sources_of
from orchestrator.peers.models import ReadTokenizer, Target
from specwire.core.invalid import InvalidParameter
from specwire.text.tokenizer import LONG_TEXT
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb
from tests.wait import raised


class WatchedTokenizer:
    """Notes the threads that encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.threads: set[int] = set()
        self.characters = 0

    def encode(self, text: str, add_special_tokens: bool) -> object:
        self.threads.add(threading.get_ident())
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
        self.threads.add(threading.get_ident())
        assert max(map(len, texts)) <= DOCUMENT_PIECE
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


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
    await raised(InvalidParameter, encoded("x" * 301, known), "^prompt: 301 bytes")
    assert not watched.threads


@pytest.mark.parametrize("words", [3, LONG_TEXT])
async def test_a_long_text_is_encoded_beside_the_event_loop(words: int) -> None:
    known, watched = target(context=LONG_TEXT + 1)
    assert await encoded("12 " * words, known) == [12] * words
    assert (threading.get_ident() in watched.threads) == (words == 3)


def asked_with(*references: str | list[int]) -> pb.GenerateRequest:
    parts = [
        pb.TextPart(text=each) if isinstance(each, str) else pb.TextPart(tokens=pb.TokenIds(ids=each))
        for each in references
    ]
    return pb.GenerateRequest(references=parts)


async def test_references_may_be_longer_than_a_context_and_are_encoded_beside_the_event_loop() -> None:
    known, watched = target(context=100)
    known.info.vocabulary = 64
    lines = "1 2 3 4 5 6 7\n" * 10_000
    found = await reference_tokens(asked_with("12 13", lines, [5, 6]), known)
    assert list(map(list, found)) == [[12, 13], [1, 2, 3, 4, 5, 6, 7] * 10_000, [5, 6]]
    assert len(watched.threads) > 1
    one_line = await reference_tokens(asked_with("63 " * DOCUMENT_PIECE), known)
    assert len(one_line[0]) >= DOCUMENT_PIECE, "what is cut in two may have another token"


@pytest.mark.parametrize(
    ("references", "message"),
    [
        (["5"] * 65, "references: at most 64 are allowed, not 65"),
        (["5", ""], "references\\[1\\]: must not be empty"),
        ([[], "5"], "references\\[0\\]: must not be empty"),
        ([[5], [64]], "references: token id 64 is outside 0..63"),
        ([[5] * (1 << 20), [5]], "references: at most 1048576 tokens together are allowed, not 1048577"),
        (["x" * (3 << 20), "x"], "references: 3145729 characters of text are more than are read"),
    ],
)
async def test_references_are_refused_by_name(references: list[str | list[int]], message: str) -> None:
    known, watched = target(context=100)
    known.info.vocabulary = 64
    await raised(InvalidParameter, reference_tokens(asked_with(*references), known), f"^{message}")
    assert not (watched.threads and "characters" in message), "it is not read"


async def test_many_short_references_hold_up_no_other_session() -> None:
    known, _ = target(context=100)
    known.info.vocabulary = 64
    turns, reading = 0, asyncio.create_task(reference_tokens(asked_with(*["1 2 3"] * 64), known))
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 64
    assert len(reading.result()) == 64


async def test_no_more_of_a_reference_is_encoded_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_REFERENCE_TOKENS", 4 * DOCUMENT_PIECE)
    known, watched = target(context=100)
    known.info.vocabulary = 64
    with pytest.raises(InvalidParameter, match=r"^references: more than the 262144 tokens that are allowed together$"):
        await reference_tokens(asked_with("1", "7 " * (59 * DOCUMENT_PIECE // 10)), known)
    assert 7 * DOCUMENT_PIECE < watched.characters <= 9 * DOCUMENT_PIECE


def test_long_references_are_not_copied_for_many_sessions() -> None:
    asked = asked_with("x" * (1 << 20))
    asked.n = 15
    assert len(single_requests(asked)) == 15
    asked.n = 16
    with pytest.raises(InvalidParameter, match=r"^references: 10485\d\d bytes for each of 16 sessions are more than"):
        single_requests(asked)


@pytest.mark.parametrize(
    ("asked", "drafters", "ngram"),
    [
        (pb.DRAFTING_UNSPECIFIED, True, True),
        (pb.DRAFTING_AUTOMATIC, True, True),
        (pb.DRAFTING_OFF, False, False),
        (pb.DRAFTING_DRAFTERS, True, False),
        (pb.DRAFTING_NGRAM, False, True),
    ],
)
def test_who_may_propose(asked: pb.Drafting, drafters: bool, ngram: bool) -> None:
    """Heads only where nothing is turned off: they came last."""
    found = sources_of(pb.GenerateRequest(drafting=asked))
    assert (found.drafters, found.ngram, found.heads) == (drafters, ngram, drafters and ngram)


def test_each_kind_of_source_by_itself() -> None:
    for wanted in (pb.Sources(), pb.Sources(heads=True), pb.Sources(ngram=True)):
        assert sources_of(pb.GenerateRequest(sources=wanted)) == wanted
    both = pb.GenerateRequest(drafting=pb.DRAFTING_OFF, sources=pb.Sources())
    unknown = pb.GenerateRequest(drafting=cast(pb.Drafting, 9))
    for asked, message in ((both, "sources: contradicts drafting"), (unknown, "drafting: 9 is not a known value")):
        with pytest.raises(InvalidParameter, match=f"^{message}"):
            sources_of(asked)


def test_what_a_request_id_may_be_repeated_with() -> None:
    """How one call is answered may change, what is asked for may not. From release to release it is the same digest."""
    asked = pb.GenerateRequest(text="a prompt", request_id="r", stop=["x"])
    asked.sampling.logit_bias.update({7: 1.0, 3: -1.0})
    digest = digest_of(asked)
    assert digest == "8d02ac96bf35bcdc0580fc8f0ad13de1"
    for name, value in (("request_id", "other"), ("provisional", True), ("take_over", True), ("n", 1)):
        again = pb.GenerateRequest()
        again.CopyFrom(asked)
        setattr(again, name, value)
        assert digest_of(again) == digest
    others: dict[str, str | int] = {
        "text": "another",
        "priority": 1,
        "echo": True,
        "parent": "p",
        "prediction_text": "a",
    }
    for name, value in others.items():
        other = pb.GenerateRequest()
        other.CopyFrom(asked)
        setattr(other, name, value)
        assert digest_of(other) != digest
    with_references = asked_with("5 6")
    with_references.MergeFrom(asked)
    assert digest_of(with_references) != digest
