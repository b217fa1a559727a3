"""The log's bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.store.base import SessionRecord
from orchestrator.store.encoding import (
    decode_record,
    encode_record,
    pack_outcomes,
    pack_tokens,
    unpack_outcomes,
    unpack_tokens,
)
from orchestrator.store.scripts import request_key
from specwire.core.acceptance import Outcome
from specwire.core.limits import Stopping
from specwire.core.sampling import Sampling
from tests.orchestrator.test_store import record_of
from tests.rpc.test_convert import samplings, stoppings, uint32

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
    weights_fingerprint=st.text(max_size=9),
    vocabulary_fingerprint=st.text(max_size=9),
    tokenizer_fingerprint=st.text(max_size=9),
    dtype=st.text(max_size=9),
    created=st.floats(0, 1e10),
)


def test_a_record_from_before_there_were_ngrams_goes_by_drafting() -> None:
    record = SessionRecord("s", (1,), Sampling(), Stopping(4, frozenset(), False), drafting=False)
    fields = json.loads(encode_record(record))
    del fields["ngram"]
    assert decode_record(json.dumps(fields).encode(), (1,)).ngram is False


@given(records, st.lists(uint32, max_size=5))
def test_records_there_and_back(record: SessionRecord, decided: list[int]) -> None:
    assert decode_record(encode_record(record), (*record.prompt, *decided)) == record


@given(st.lists(uint32), st.lists(st.sampled_from(Outcome)))
def test_tokens_and_outcomes_there_and_back(tokens: list[int], outcomes: list[Outcome]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tuple(tokens)
    assert unpack_outcomes(pack_outcomes(outcomes)) == tuple(outcomes)


def test_the_layout() -> None:
    assert pack_tokens([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert pack_outcomes([Outcome.ACCEPTED, Outcome.DIRECT]) == b"\x01\x04"
    assert json.loads(encode_record(record_of("s")))["prompt_length"] == 3


def test_another_version_is_refused() -> None:
    fields = json.loads(encode_record(record_of("s")))
    with pytest.raises(ValueError, match="version: this log has 99"):
        decode_record(json.dumps({**fields, "version": 99}).encode(), ())


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_no_two_requests_share_a_key(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (request_key(*one) == request_key(*other)) == (one == other)
