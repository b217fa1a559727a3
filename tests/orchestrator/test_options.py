"""Options, reports, echo and several completions through the whole stack: what is replayed, shared and refused."""

from __future__ import annotations

import math
from typing import Any

import grpc
import grpc.aio
import pytest

from bench.harness.certificates import Authority
from orchestrator.options import LONGEST_S, MOST_DRAFTERS, OrchestratorOptions
from orchestrator.server import options_of
from orchestrator.tenants import Access
from specwire.client import AsyncClient, Completion, SpecwireError
from specwire.client.events import PartialCompletion
from specwire.client.requests import Prompt, RequestOptions, generate_request
from specwire.core.messages import FinishReason
from specwire.options import VERIFIER_WAIT_S
from specwire.registry.options import CloudOptions, RegistryOptions
from specwire.rpc.keys import Keys
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.options import parsed
from tests.orchestrator.stack import DRAFT, PROMPT, TARGET, stack
from tests.wait import raised

LENGTH = 32


async def test_reports_and_echo_are_replayed_as_they_were_shown() -> None:
    wish = RequestOptions(max_tokens=LENGTH, ignore_eos=True, temperature=0.9, seed=3, logprobs=2, echo=True)
    async with stack(f"{TARGET}:delay_ms=2", DRAFT) as running:
        shown = await running.client.complete(PROMPT, **wish)
        from_start = await gathered(running.client, shown.session_id)
        from_middle = await gathered(running.client, shown.session_id, len(PROMPT) + 11)
    assert shown.prompt is not None
    assert (shown.prompt.tokens, shown.prompt.text) == (PROMPT, "5 6 7")
    assert shown.text == " ".join(map(str, shown.tokens))
    assert (from_start.logprobs, from_start.prompt) == (shown.logprobs, shown.prompt)
    assert (from_middle.tokens, from_middle.logprobs) == (shown.tokens[11:], shown.logprobs[11:])


async def gathered(client: AsyncClient, session_id: str, position: int = 0) -> Completion:
    gathered = PartialCompletion()
    async for event in client.watch(session_id, position):
        gathered.add(event)
    return gathered.completion()


async def test_whoever_leaves_ends_all_of_its_completions() -> None:
    request = generation_pb2.GenerateRequest(n=2)
    request.tokens.ids.extend(PROMPT)
    async with stack(f"{TARGET}:delay_ms=20:eos=0") as running:
        async with grpc.aio.insecure_channel(running.client.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(request, timeout=120.0)
            begun: dict[int, str] = {}
            while len(begun) < 2:
                answer = await call.read()
                if answer.WhichOneof("event") == "started":
                    begun[answer.choice] = answer.started.session_id
            call.cancel()
        for session_id in begun.values():
            assert (await gathered(running.client, session_id)).finish_reason is FinishReason.CANCELLED


REFUSED: list[tuple[Prompt, RequestOptions, dict[str, Any], str]] = [
    ("", RequestOptions(), {}, "prompt: must not be empty"),
    ((5, 64), RequestOptions(), {}, "prompt: token id 64 is outside 0..63"),
    (PROMPT, RequestOptions(temperature=math.nan), {}, "temperature: must be"),
    (PROMPT, RequestOptions(rule="coupled"), {}, "rule: "),
    (PROMPT, RequestOptions(prediction=[64]), {}, "prediction: token id 64 is outside 0..63"),
    (
        PROMPT,
        RequestOptions(logprobs_of="model"),
        {},
        "logprobs_of: says what logprobs are of, which are not asked for",
    ),
    (
        PROMPT,
        RequestOptions(max_tokens=5, min_tokens=6),
        {},
        "min_tokens: must be from 0 to max_tokens, which is 5, not 6",
    ),
    (
        PROMPT,
        RequestOptions(max_tokens=5, min_tokens=1, stop_ids=range(1, 64)),
        {},
        "min_tokens: 1: each of the 64 ids ends",
    ),
    (PROMPT, RequestOptions(), {"n": 65}, "n: must be from 0 to 64, not 65"),
    (PROMPT, RequestOptions(request_id="x"), {"n": 2}, "request_id: stands for one session, so n must be 1, not 2"),
    (PROMPT, RequestOptions(choice=1), {"n": 2}, "choice: must be 0 where n is 2, not 1"),
]
# A field of a newer client, at each level.
UNKNOWN = b"\xa8\x7d\x01"  # number 2005, varint 1


async def test_what_is_wrong_is_refused_by_name_and_value() -> None:
    async with stack() as running, grpc.aio.insecure_channel(running.client.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for prompt, options, fields, message in REFUSED:
            request = generate_request(prompt, **options)
            request.MergeFrom(generation_pb2.GenerateRequest(**fields))
            assert message in await refusal(stub, request)
        for name in ("request", "sampling", "stopping"):
            request = generate_request(PROMPT, max_tokens=3)
            (request if name == "request" else getattr(request, name)).MergeFromString(UNKNOWN)
            assert await refusal(stub, request) == (
                f"{name}: holds field number 2005, which this service does not know"
            )


async def refusal(stub: generation_pb2_grpc.GenerationServiceStub, request: generation_pb2.GenerateRequest) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(request, timeout=120.0):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


async def test_the_client_refuses_what_it_cannot_say() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        for n, options, message in (
            (0, RequestOptions(), "n: must be from 1 to 64, not 0"),
            (2, RequestOptions(request_id="r"), "request_id: is of one completion, not of several: 'r'"),
        ):
            await raised(SpecwireError, client.complete_many(PROMPT, n, **options), message)
        with pytest.raises(SpecwireError, match="logprobs_of: must be model or processed, not 'all'"):
            await client.complete(PROMPT, logprobs=1, logprobs_of="all")


# ----------------------------------------------------------------------------------------------------------------------
# An orchestrator's options: what does not go together, or is out of range, is refused by name.

TOKEN = "the-token-of-somebody"
KEYS = Keys({TOKEN: "somebody"})
CA = Authority()
OPEN = "0.0.0.0:0"
SHOWN = {"tls": CA.server(client_ca=CA)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durability": "redis-fsync"}, "durability: redis-fsync needs a Redis as redis-url"),
        ({"retention": 0.0}, "retention: must be positive, not 0.0"),
        ({"retention": 2 * LONGEST_S}, "retention: must be at most"),
        ({"sse_keep_alive": 0.0}, "sse-keep-alive: must be above 0 and at most"),
        *(({"verifier_wait": wait}, "verifier_wait: must be positive") for wait in (0.0, -1.0, float("nan"))),
        ({"verifier_wait": float("inf")}, "verifier_wait: must be at most"),
        *(
            ({"drafters_per_session": count}, f"drafters-per-session: must be from 1 to 8, not {count}")
            for count in (0, -1, MOST_DRAFTERS + 1)
        ),
        ({"access": Access(KEYS), "accept_drafters": True}, "accept-drafters: with --api-keys it needs --drafter-keys"),
        ({"access": Access(drafter_keys=KEYS)}, "--drafter-keys: needs --accept-drafters"),
        ({"peer_token": TOKEN}, "token: is not sent to far.example:1 unencrypted: give --tls or --tls-ca"),
        ({"peer_token": TOKEN, "verifiers": (), "cloud": CloudOptions("far:1")}, "token: "),
        ({"cloud": CloudOptions("h:1"), "registration": RegistryOptions("redis://h:1")}, "cloud: and --registry"),
        (
            {"listen": OPEN, "tls": CA.server(), "accept_drafters": True},
            "accept-drafters: a drafter is told every prompt.*--tls-client-ca",
        ),
        *(
            ({**shown, "drafter_names": ("a",)}, "drafter-name: is read in certificates")
            for shown in ({"accept_drafters": True}, {"accept_drafters": True, "tls": CA.server()}, SHOWN)
        ),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        OrchestratorOptions(**{"verifiers": ("far.example:1",), **options})


@pytest.mark.parametrize("more", [SHOWN, {"insecure": True}, {"listen": "localhost:0"}])
def test_who_lets_drafters_in_knows_who_they_are_or_that_nobody_is_far(more: dict[str, Any]) -> None:
    OrchestratorOptions(**{"verifiers": ("v:1",), "listen": OPEN, "accept_drafters": True, **more})


def test_the_command_line_says_how_long_things_are_kept_and_waited_for() -> None:
    def read(*words: str) -> OrchestratorOptions:
        return options_of(parsed("orchestrate", "--verifier", "127.0.0.1:1", *words))

    words = ("--redis-url", "redis://host", "--durability", "redis-wait:2", "--retention", "0.5")
    options = read(*words, "--verifier-wait", "600")
    assert (options.redis_url, options.durability, options.retention) == ("redis://host", "redis-wait:2", 0.5)
    assert options.verifier_wait == 600.0
    assert (read().durability, read().verifier_wait) == ("", VERIFIER_WAIT_S)
