"""A prompt's text neither holds up other sessions nor is read where it cannot fit."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from orchestrator.admission import LIMITS, LONG_BYTES, Admission
from orchestrator.api import requests
from orchestrator.api.requests import DOCUMENT_PIECE, digest_of, encoded, reference_tokens, single_requests, sources_of
from orchestrator.peers.models import ReadTokenizer, Target
from orchestrator.store import StoredSession
from orchestrator.tenants import Access, Allowances
from specwire.core.invalid import InvalidParameter
from specwire.rpc.errors import StatusError
from specwire.text.tokenizer import LONG_TEXT
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb
from tests.orchestrator.stack import PROMPT, stack
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


# ----------------------------------------------------------------------------------------------------------------------
# The table of limits, and what is done beside the event loop.

PAGE = Path(__file__).resolve().parents[2] / "docs" / "SECURITY.md"


def test_the_page_has_the_table() -> None:
    rows = [f"| {each.what} | {each.most:,} | {each.counted} | {each.told} |" for each in LIMITS]
    assert "\n".join(["| --- | --- | --- | --- |", *rows, ""]) in PAGE.read_text()
    assert len({each.what for each in LIMITS}) == len(LIMITS)


async def test_what_is_long_is_done_by_one_thread_and_tenants_take_turns() -> None:
    admission = Admission(lambda tenant, tokens: None)
    order: list[str] = []
    go_on = threading.Event()

    def work(name: str) -> str:
        order.append(name)
        go_on.wait(60.0)
        return threading.current_thread().name

    asked = [("bob", "b1"), ("bob", "b2"), ("bob", "b3"), ("ada", "a1")]
    tasks = [asyncio.create_task(admission.aside(tenant, LONG_BYTES, work, name)) for tenant, name in asked]
    await asyncio.sleep(0.01)
    go_on.set()
    assert set(await asyncio.gather(*tasks)) == {"aside_0"}
    assert order.index("a1") == 1
    here = await admission.aside("ada", LONG_BYTES - 1, lambda: threading.current_thread().name)
    assert here == threading.current_thread().name
    await raised(ZeroDivisionError, admission.aside("", LONG_BYTES, lambda: 1 // 0))
    admission.stop()


def test_reading_is_charged_by_its_size() -> None:
    now = 0.0
    admission = Admission(Allowances(Access(tokens_per_minute=100), lambda: now).charge)
    admission.charge("ada", 90 * 1024)
    admission.charge("ada", 10 * 1024)
    admission.charge("ada", 1023)
    with pytest.raises(StatusError, match="100 tokens a minute are used up"):
        admission.charge("ada", 0, least=1)
    admission.charge("bob", 0, least=1)
    admission.stop()


NOTE_BYTES = 1 << 20


async def test_whoever_names_a_session_reads_no_more_of_its_log_than_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls of 150 bytes had a note of megabytes read on the event loop, which nobody paid for."""
    async with stack(access=Access(tokens_per_minute=10**6)) as parts:
        orchestrator, store = parts.orchestrator.orchestrator, parts.orchestrator.orchestrator.store
        ids, one = pb.TokenIds(ids=PROMPT), common_pb2.Stopping(max_tokens=1)
        async with grpc.aio.insecure_channel(parts.orchestrator.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            charged: list[int] = []
            monkeypatch.setattr(orchestrator.admission, "_charge", lambda tenant, tokens: charged.append(tokens))
            events = [
                each
                async for each in stub.Generate(pb.GenerateRequest(tokens=ids, stopping=one, note="x" * NOTE_BYTES))
            ]
            session_id = events[0].started.session_id
            assert sum(charged) == NOTE_BYTES // 1024
            charged.clear()
            read: list[str] = []
            whole = store.read

            async def noted(session_id: str) -> StoredSession | None:
                read.append(session_id)
                return await whole(session_id)

            monkeypatch.setattr(store, "read", noted)
            watched = pb.WatchRequest(session_id=session_id, from_position=len(PROMPT) + 2, prefix_hash=7)
            for again in (stub.Watch(pb.WatchRequest(session_id=session_id)), stub.Watch(watched)):
                with suppress(grpc.aio.AioRpcError):
                    [each async for each in again]
            await stub.Cancel(pb.CancelRequest(session_id=session_id))
            assert (read, charged) == ([], [])
            await stub.GetSession(pb.GetSessionRequest(session_id=session_id))
            assert (len(read), sum(charged)) == (1, 1 + NOTE_BYTES // 1024)
            refused = stub.Generate(pb.GenerateRequest(parent=session_id, tokens=ids, stopping=one, priority=10**6))
            with pytest.raises(grpc.aio.AioRpcError, match="priority"):
                [each async for each in refused]
            assert (len(read), sum(charged)) == (2, 2 * (1 + NOTE_BYTES // 1024))


async def test_many_short_references_hold_up_no_other_session() -> None:
    known, _ = target(context=100)
    known.info.vocabulary = 64
    turns, reading = 0, asyncio.create_task(reference_tokens(asked_with(*["1 2 3"] * 64), known))
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 64
    assert len(reading.result()) == 64
