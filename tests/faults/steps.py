"""A verifier's own count of its steps, asked for from outside."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator

import grpc

from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc

LIMIT_S = 120.0


def steps_of(address: str) -> int:
    """How many steps the verifier has taken; asking takes one more."""
    answered = threading.Event()
    with grpc.insecure_channel(address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        info = stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=LIMIT_S)
        try:
            for response in stub.Connect(_requests(_shortest(info), answered), timeout=LIMIT_S):
                if response.HasField("timings"):
                    return int(response.timings.step)
        finally:
            answered.set()
    raise AssertionError("the verifier took no step")


def _requests(opening: verify_pb2.Open, answered: threading.Event) -> Iterator[verify_pb2.ConnectVerifyRequest]:
    """The link is there until it is answered."""
    yield verify_pb2.ConnectVerifyRequest(opens=[opening])
    answered.wait(LIMIT_S)


def _shortest(info: common_pb2.GetModelInfoResponse) -> verify_pb2.Open:
    """A session of one token."""
    return verify_pb2.Open(
        handle=1,
        session_id=secrets.token_hex(16),
        fence=1,
        attach=1,
        tokens=(1,),
        prompt_length=1,
        sampling=common_pb2.Sampling(seed=0),
        stopping=common_pb2.Stopping(max_tokens=1),
        progress=verify_pb2.Progress(durable=1, credit=2),
        vocabulary_fingerprint=info.vocabulary_fingerprint,
    )
