"""No number that a peer or a client can send ends a process, a link or another's session, whatever it is of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from google.protobuf.message import Message

from orchestrator.peers.peer import DrafterPeer, Peer, VerifierPeer
from specwire.client import Completion, SpecwireError
from specwire.core.law.sampling import Sampling
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, verify_pb2
from tests.fuzz.http import tell
from tests.fuzz.messages import METHODS
from tests.fuzz.numbers import NumberField, asking, deciding, drafting, numbers, put, put_into
from tests.fuzz.requests import Raw
from tests.fuzz.services import VOCABULARY, Failures, Services, services
from tests.fuzz.targets import targets
from tests.orchestrator.stack import SLOW_TARGET, Stack, plain, stack

SAMPLING = Sampling(temperature=0.9, seed=3, logprobs=1)


@pytest.fixture(scope="module")
def running() -> Iterator[Services]:
    with services() as started:
        yield started


# ----------------------------------------------------------------------------------------------------------------------
# To a service.


def of_verifier(running: Services, field: NumberField) -> list[list[Message]]:
    """A call, with a session for each value."""
    names = zip(count(1), field.values)
    return [
        [
            put(deciding(running.fingerprint, handle, f"{field}-{handle}", SAMPLING), field.path, value)
            for handle, value in names
        ]
    ]


def of_drafter(running: Services, field: NumberField) -> list[list[Message]]:
    messages = (drafting(running.fingerprint, handle) for handle in count(1))
    return [[put(message, field.path, value) for message, value in zip(messages, field.values, strict=False)]]


def of_hub(running: Services, field: NumberField) -> list[list[Message]]:
    """A drafter for each value; what it says of sessions is said behind a model that fits."""
    model = common_pb2.GetModelInfoResponse(vocabulary=VOCABULARY, vocabulary_fingerprint=running.fingerprint)
    hello = draft_pb2.JoinRequest(model=model)
    if field.path[0] == "model":
        return [[put(hello, field.path, value)] for value in field.values]
    return [[hello, put(draft_pb2.JoinRequest(), field.path, value)] for value in field.values]


def each_alone(request: Callable[[Services], Message]) -> Made:
    """A call for each value."""
    return lambda running, field: [[put(request(running), field.path, value)] for value in field.values]


PART = generation_pb2.TextPart(tokens=generation_pb2.TokenIds(ids=[1, 2]))
SCORED = verify_pb2.ScoreRequest(tokens=[1, 2, 3], from_position=1, top=1, others=[{"tokens": [2]}])
TEXTS = generation_pb2.ScoreTextRequest(prefix=PART, continuations=[generation_pb2.ScoredText(parts=[PART])])
Made = Callable[[Services, NumberField], list[list[Message]]]
ASKED: dict[str, Made] = {
    "VerifyService.Connect": of_verifier,
    "VerifyService.Score": each_alone(lambda _: SCORED),
    "DraftService.Connect": of_drafter,
    "DraftHubService.Join": of_hub,
    "GenerationService.Generate": each_alone(lambda _: asking()),
    "GenerationService.Watch": each_alone(lambda known: generation_pb2.WatchRequest(session_id=known.sessions[0])),
    "GenerationService.ScoreText": each_alone(lambda _: TEXTS),
}


@pytest.mark.parametrize("name", ASKED)
def test_no_number_of_a_request_hurts_anybody_else(running: Services, name: str) -> None:
    """A session of another caller runs meanwhile, and writes its text."""
    (target,) = (each for each in targets(running) if each.name == name)
    for field in numbers(METHODS[name].input_type):
        for at, data in enumerate(ASKED[name](running, field)):
            try:
                replace(target, beside=at == 0).call(running, [each.SerializeToString() for each in data])
            except AssertionError as error:
                raise AssertionError(f"{name}: {field}: {error}") from error
    running.check()


JSON_NUMBERS = (
    *("0", "-1", "0.5", "2147483648", "9223372036854775807", "18446744073709551616"),
    *("1e999", "-1e308", "5e-324", "NaN", "1" * 400),
)
HTTP_KEYS = (
    *("max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "timeout"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "priority", "stop_token_ids", "logit_bias"),
)
WRITTEN = {"stop_token_ids": "[%s]", "logit_bias": '{"5": %s}'}


def test_no_number_of_a_body_hurts_anybody_else(running: Services) -> None:
    for key in HTTP_KEYS:
        for number in JSON_NUMBERS:
            value = WRITTEN.get(key, "%s") % number
            body = f'{{"prompt": [5, 6, 7], "max_tokens": 3, "{key}": {value}}}'.encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            sent = f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body
            seen = tell(running, key, Raw(sent, whole=True))
            own = "504" if key == "timeout" else "400"  # its own has passed
            assert seen["200"] or seen["400"] or seen[own], (key, number, seen)
    running.check()


# ----------------------------------------------------------------------------------------------------------------------
# From a peer, to an orchestrator: what it says of one session, or of all at once, hurts no other session.

GUILTY, NEIGHBOUR = (7, 3), (5, 6, 7)
LENGTH = 12


class Altered:
    """Puts `values` into one field of what a peer says: of each guilty session its own, of a step one after the other.

    Guilty are the sessions of prompts that begin so; which value is theirs, the next token says.
    """

    def __init__(self, field: NumberField) -> None:
        self.field = field
        self.put = 0
        self._next = cycle(field.values)

    def apply(self, peer: Peer[Any, Any], message: Message) -> None:
        part, *rest = self.field.path
        known = message.DESCRIPTOR.fields_by_name[part]
        if not known.is_repeated:
            put_into(message, self.field.path, next(self._next))
            self.put += 1
            return
        if part == "refused":
            self._refuse(peer, message)
        for each in getattr(message, part):
            value = self._value(peer.subjects.get(each.handle))
            if value is not None:
                put_into(each, tuple(rest), value)
                self.put += 1

    def _refuse(self, peer: Peer[Any, Any], message: Any) -> None:
        """Nobody is, unless a test says so."""
        said = message.verdicts if isinstance(message, verify_pb2.ConnectVerifyResponse) else message.proposals
        message.refused.extend(
            common_pb2.Refused(handle=each.handle, code=grpc.StatusCode.ABORTED.value[0], message="put there")
            for each in said
            if self._value(peer.subjects.get(each.handle)) is not None
        )

    def _value(self, subject: Any) -> float | None:
        view = getattr(subject, "_view", None)
        record = subject._record if view is None and subject is not None else getattr(view, "record", None)
        if record is None or tuple(record.prompt[: len(GUILTY)]) != GUILTY:
            return None
        at = record.prompt[len(GUILTY)]
        return self.field.values[at] if at < len(self.field.values) else None  # else of another field


async def beside_guilty(running: Stack, field: NumberField, kind: type[Peer[Any, Any]]) -> int:
    """A session of each value, and one that none is put into, whose text is right; how many were put in."""
    altered, hear = Altered(field), kind.on_message  # type: ignore[attr-defined]  # of both peers

    def heard(peer: Peer[Any, Any], message: Message) -> None:
        altered.apply(peer, message)
        hear(peer, message)

    with patch.object(kind, "on_message", heard):
        guilty = [
            asyncio.create_task(
                running.client.complete(
                    (*GUILTY, number), max_tokens=LENGTH, ignore_eos=True, temperature=0.9, seed=3, logprobs=1
                )
            )
            for number in range(len(field.values))
        ]
        done = await running.client.complete(NEIGHBOUR, max_tokens=LENGTH, ignore_eos=True)
    assert list(done.tokens) == plain(SLOW_TARGET, NEIGHBOUR, LENGTH), field
    _, waiting = await asyncio.wait(guilty, timeout=0.05)
    for each in waiting:
        each.cancel()  # what it was to be told never came
    for ended in await asyncio.gather(*guilty, return_exceptions=True):
        if isinstance(ended, SpecwireError):
            assert ended.code is not grpc.StatusCode.INTERNAL, (field, ended)
        else:
            assert isinstance(ended, Completion | asyncio.CancelledError), (field, ended)
    return altered.put


@pytest.fixture
def failures() -> Iterator[Failures]:
    logged = Failures()
    logging.getLogger().addHandler(logged)
    yield logged
    logging.getLogger().removeHandler(logged)


SAID: list[tuple[type[Message], type[Peer[Any, Any]]]] = [
    (verify_pb2.ConnectVerifyResponse, VerifierPeer),
    (draft_pb2.ConnectDraftResponse, DrafterPeer),
]


@pytest.mark.parametrize(("kind", "peer"), SAID, ids=["verifier", "drafter"])
async def test_no_number_that_a_peer_says_hurts_another_session(
    kind: type[Message], peer: type[Peer[Any, Any]], failures: Failures
) -> None:
    put_in = 0
    async with stack(SLOW_TARGET, SLOW_TARGET, plan="stream:2,4", patient=True) as running:
        (verifier,) = running.orchestrator.orchestrator.pool.verifiers
        link = verifier.link.channel
        for field in numbers(kind.DESCRIPTOR):
            put_in += await beside_guilty(running, field, peer)
        assert verifier.link.channel is link, "the link was lost"
    assert put_in > 300
    assert failures.take() == []


async def test_no_number_of_a_description_hurts_sessions(failures: Failures) -> None:
    """A verifier that describes itself so may get no session; what it describes rightly again is used again."""
    async with stack(SLOW_TARGET) as running:
        (verifier,) = running.orchestrator.orchestrator.pool.verifiers
        known = verifier.info
        assert known is not None
        for field in numbers(common_pb2.GetModelInfoResponse.DESCRIPTOR):
            for value in field.values:
                verifier.on_up(put(known, field.path, value))
                await running.client.server_info()
                verifier.on_up(known)
        done = await running.client.complete(NEIGHBOUR, max_tokens=LENGTH, ignore_eos=True)
    assert list(done.tokens) == plain(SLOW_TARGET, NEIGHBOUR, LENGTH)
    assert failures.take() == []
