"""What is believed of what stands in the registry."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.registry.entry import (
    MOST_BYTES,
    InvalidEntry,
    Load,
    Role,
    ServedModel,
    ServiceEntry,
    ServiceState,
    checked_address,
    decode,
    encode,
)

ID = "0123456789abcdef" * 2
WHOLE = ServiceEntry(
    ID,
    Role.VERIFIER,
    "10.0.0.1:50061",
    region="eu-1",
    models=(ServedModel("llama", "ab" * 32, "cd" * 32, "ef" * 32),),
    slots=16,
    kv_bytes=1 << 34,
    load=Load(3, 2, 13, 0.5),
    state=ServiceState.DRAINING,
    started=1.7e9,
    beat=7,
)


def test_an_entry_comes_back_as_it_was() -> None:
    assert decode(ID, encode(WHOLE)) == WHOLE
    bare = ServiceEntry(ID, Role.ORCHESTRATOR, "[::1]:7000")
    assert decode(ID, encode(bare)) == bare


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(encode(WHOLE)), **values}).encode()


@pytest.mark.parametrize("name", sorted(json.loads(encode(WHOLE))))
def test_one_that_lacks_a_field_is_not_believed(name: str) -> None:
    lacking = json.loads(encode(WHOLE))
    del lacking[name]
    with pytest.raises(InvalidEntry):
        decode(ID, json.dumps(lacking).encode())


LOAD = {"running": 1, "waiting": 0, "free": 3}


def test_what_is_not_known_is_left_out() -> None:
    assert decode(ID, changed(colour="blue")) == WHOLE


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (changed(v=2), "newer"),
        (changed(v=0), "invalid"),
        (changed(v=True), "invalid"),
        (changed(id="f" * 32), "invalid"),
        (changed(role="king"), "invalid"),
        (changed(state="gone"), "invalid"),
        (changed(address="10.0.0.1"), "invalid"),
        (changed(address="unix:/tmp/socket:1"), "invalid"),
        (changed(region="a b"), "invalid"),
        (changed(models="llama"), "invalid"),
        (changed(models=[{"name": "a\nb", "weights": "", "vocabulary": ""}]), "invalid"),
        (changed(models=[{"name": "a", "weights": "xyz", "vocabulary": ""}]), "invalid"),
        (changed(models=[{"name": "a", "weights": "", "vocabulary": ""}] * 65), "invalid"),
        (changed(slots=-1), "invalid"),
        (changed(slots=1.5), "invalid"),
        (changed(load=[1, 2, 3]), "invalid"),
        (changed(load={"running": 1, "waiting": 0}), "invalid"),
        (changed(load=LOAD | {"queue_s": -1}), "invalid"),
        (changed(load=LOAD | {"queue_s": "1"}), "invalid"),
        (changed(started=1e300), "invalid"),
        (encode(WHOLE).replace(b"1700000000.0", b"NaN"), "invalid"),
        (b"", "invalid"),
        (b"[]", "invalid"),
        (b"[" * 10_000, "invalid"),
        (b"\xff", "invalid"),
        (b"9" * 5000, "invalid"),
        (changed(colour="x" * MOST_BYTES), "invalid"),
    ],
)
def test_what_is_none_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidEntry) as refused:
        decode(ID, data)
    assert refused.value.reason == reason


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(json.loads(encode(WHOLE)))), VALUES)
def test_any_value_of_any_field_is_taken_or_refused(name: str, value: Any) -> None:
    try:
        entry = decode(ID, changed(**{name: value}))
    except InvalidEntry:
        return
    assert decode(ID, encode(entry)) == entry


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    with pytest.raises(InvalidEntry):
        decode(ID, data)


@pytest.mark.parametrize("address", ["a:1", "10.0.0.1:65535", "[::1]:80", "pod-0.svc.local:50061"])
def test_an_address_is_host_and_port(address: str) -> None:
    assert checked_address("address", address) == address


@pytest.mark.parametrize(
    "address", ["", ":1", "a:0", "a:65536", "a:١", "a b:1", "a:1,b:2", "u@h:1", "a\n:1", "x" * 300 + ":1"]
)
def test_what_cannot_be_dialled_is_none(address: str) -> None:
    with pytest.raises(InvalidEntry):
        checked_address("address", address)


def test_all_that_changes_is_told() -> None:
    assert encode(replace(WHOLE, beat=8)) != encode(WHOLE)
