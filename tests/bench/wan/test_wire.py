"""Bytes are shared out among the kinds of parts that a message carries, framing included."""

from __future__ import annotations

import pytest

from bench.harness.runs import BenchError
from bench.relay.frames import HEADER, Count
from bench.wan.wire import hop_of, messages_of
from specwire.v1 import common_pb2, verify_pb2

PROPOSAL = common_pb2.Proposal(handle=1, chain=3, base=600, offset=4, tokens=[20_000] * 4)
REQUEST = verify_pb2.ConnectVerifyRequest


def framed(message: verify_pb2.ConnectVerifyRequest) -> bytes:
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def test_messages_are_cut_apart_and_a_piece_of_one_is_refused() -> None:
    messages = [REQUEST(proposals=[PROPOSAL]), REQUEST(), REQUEST(progress=[verify_pb2.Progress(handle=1, credit=9)])]
    stream = b"".join(map(framed, messages))
    assert [REQUEST.FromString(data) for data in messages_of(stream)] == messages
    with pytest.raises(BenchError, match="in part"):
        list(messages_of(stream[:-1]))


def test_every_byte_is_accounted_for() -> None:
    messages = [
        REQUEST(proposals=[PROPOSAL, PROPOSAL]),
        REQUEST(proposals=[PROPOSAL], progress=[verify_pb2.Progress(handle=1, credit=700, durable=600)]),
    ]
    stream = b"".join(map(framed, messages))
    hop = hop_of("up", [stream], REQUEST, Count(data_frames=2))
    assert hop.messages == 2
    assert hop.tokens == {"proposals": 12, "progress": 0}
    assert sum(hop.bytes.values()) == pytest.approx(len(stream) + 2 * HEADER)
    assert hop.per_token("proposals") == pytest.approx(hop.bytes["proposals"] / 12)
    assert hop.per_token("opens") == 0.0


def test_an_opening_is_left_out_with_its_framing() -> None:
    opening = REQUEST(opens=[verify_pb2.Open(handle=1, tokens=list(range(500)))])
    hop = hop_of("up", [framed(opening)], REQUEST, Count(data_frames=1))
    assert (hop.bytes, hop.tokens) == ({}, {})


def test_a_chunk_of_four_fits_its_allowance_by_itself() -> None:
    """Ids of three bytes, positions of two: with the hash of a chain's first chunk, and all framing."""
    first = common_pb2.Proposal(handle=1, source=1, chain=300, base=600, tokens=[120_000] * 4, prefix_hash=1 << 63)
    size = len(framed(REQUEST(proposals=[first]))) + HEADER
    assert size / 4 <= 16
