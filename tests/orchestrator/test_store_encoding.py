"""The log's bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.store.base import DamagedLog, SessionRecord
from orchestrator.store.encoding import (
    decode_record,
    encode_record,
    pack_logprobs,
    pack_outcomes,
    pack_tokens,
    stored_session,
    unpack_logprobs,
    unpack_outcomes,
    unpack_tokens,
)
from orchestrator.store.scripts import Reply, request_key
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Outcome, TokenLogprobs
from tests.orchestrator.test_store import record_of
from tests.rpc.test_convert import reports, samplings, stoppings, uint32

records = st.builds(
    SessionRecord,
    session_id=st.text(max_size=9),
    prompt=st.lists(uint32, max_size=5).map(tuple),
    sampling=samplings,
    stopping=stoppings,
    tenant=st.text(max_size=9),
    request_id=st.text(max_size=9),
    stop=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    drafting=st.booleans(),
    ngram=st.booleans(),
    echo=st.booleans(),
    weights_fingerprint=st.text(max_size=9),
    vocabulary_fingerprint=st.text(max_size=9),
    tokenizer_fingerprint=st.text(max_size=9),
    eos_ids=st.lists(uint32, max_size=3).map(tuple),
    model=st.text(max_size=9),
    dtype=st.text(max_size=9),
    created=st.floats(0, 1e10),
)


@given(records, st.lists(uint32, max_size=5))
def test_records_there_and_back(record: SessionRecord, decided: list[int]) -> None:
    assert decode_record(encode_record(record), (*record.prompt, *decided)) == record


@given(st.lists(uint32), st.lists(st.sampled_from(Outcome)))
def test_tokens_and_outcomes_there_and_back(tokens: list[int], outcomes: list[Outcome]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tuple(tokens)
    assert unpack_outcomes(pack_outcomes(outcomes)) == tuple(outcomes)


@given(reports)
def test_logprobs_there_and_back(reported: TokenLogprobs) -> None:
    assert unpack_logprobs(pack_logprobs(reported)) == reported


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"version": 1, "tenant": 5}', "^tenant: expected `str`, got `int`, not 5$"),
        (b'{"version": 1, "tenant": 5, [', "^tenant: expected `str`, got `int`$"),  # that it is no JSON comes later
        (b'{"version": 1, "tenant": 5, "x": ' + b"[" * 10_000, "^tenant: expected `str`, got `int`$"),
        (b'{"tenant": ""}', "^Object missing required field `version`$"),
        (b'{"x": ' + b"[" * 10_000, "^is nested too deeply$"),
    ],
)
def test_what_is_wrong_is_told_by_its_name(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        decode_record(data, ())


@pytest.mark.parametrize("told", [[], [None], [b"odd"], [b"\0\0\0\0", b"\0\0\0\0"], [b"\0\0\xc0\x7f"]])
def test_reports_that_are_not_one_a_token_are_a_damaged_log(told: list[bytes | None]) -> None:
    asked = encode_record(record_of("s", sampling=Sampling(logprobs=0)))
    with pytest.raises(DamagedLog, match="logprobs: "):
        stored_session("s", [*reply_of([asked, *FIELDS[1:]])[:-2], told, 0])
    stored_session("s", [*reply_of([asked, *FIELDS[1:]])[:-2], [b"\0\0\0\0"], 0])


def test_the_layout() -> None:
    assert pack_logprobs(TokenLogprobs(-1.0, ((258, 0.0),))) == b"\0\0\x80\xbf" + b"\x02\x01\0\0" + b"\0\0\0\0"
    assert pack_tokens([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert pack_outcomes([Outcome.ACCEPTED, Outcome.DIRECT]) == b"\x01\x04"
    assert json.loads(encode_record(record_of("s")))["prompt_length"] == 3


def test_another_version_is_refused() -> None:
    fields = json.loads(encode_record(record_of("s")))
    with pytest.raises(ValueError, match="version: this log has 99"):
        decode_record(json.dumps({**fields, "version": 99}).encode(), ())


GOOD = encode_record(record_of("s"))
FIELDS = [GOOD, b"17", b"me", b"60000", b"1700000000000000", b"0", None, None, None, b"60000"]
TEXT = pack_tokens([5, 0, 4_000_000_000, 7])


def reply_of(fields: list[bytes | None]) -> Reply:
    return [0, fields, 50_000, TEXT, b"\x01", [], len(TEXT)]


def test_a_sound_log_is_read() -> None:
    log = stored_session("s", reply_of(FIELDS))
    assert (log.record, log.fence, log.owner, log.tokens, log.silent_s) == (record_of("s"), 17, "me", (7,), 10.0)
    with pytest.raises(DamagedLog, match="fence: must be from 0 to "):
        stored_session("s", reply_of([GOOD, b"-1", *FIELDS[2:]]))


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_no_two_requests_share_a_key(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (request_key(*one) == request_key(*other)) == (one == other)
