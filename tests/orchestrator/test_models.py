"""Several models side by side: each request to its own, each drafter to its vocabulary, whoever asks and however."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from orchestrator.peers.models import KEPT_S, Models, Tokenizers, identity_of
from orchestrator.server import RunningOrchestrator
from orchestrator.store import SessionRecord
from specwire.client import AsyncClient, SpecwireError
from specwire.client.requests import RequestOptions
from specwire.core.law.sampling import Sampling
from specwire.core.text import Stopping
from specwire.rpc.errors import StatusError
from specwire.v1 import common_pb2
from tests.orchestrator.stack import PROMPT, TURNS, Services, drafted, plain
from tests.wait import until

SEVEN, EIGHT = "scripted:7:vocab=64", "scripted:8:vocab=32"
MODELS = (SEVEN, EIGHT)
NAMES = ["scripted:7", "scripted:8"]
# So that drafting pays.
SLOW = ":delay_ms=8"


@asynccontextmanager
async def two_models(**more: Any) -> AsyncIterator[tuple[RunningOrchestrator, AsyncClient]]:
    async with AsyncExitStack() as parts:
        services = Services(parts)
        verifiers = [await services.verifier(f"{each}{SLOW}", patient=True) for each in MODELS]
        drafters = [await services.drafter(f"{model}:agree=0.8") for model in (EIGHT, SEVEN)]
        named = [each.address for each in verifiers], [each.address for each in drafters]
        running = await services.orchestrator(*named, **more)
        client = await services.client(running)
        await until(lambda: serves_both(client))
        yield running, client


async def serves_both(client: AsyncClient) -> bool:
    """An orchestrator is ready with its first verifier."""
    return len((await client.server_info()).targets) == 2


async def test_each_request_goes_to_its_model_with_its_drafter() -> None:
    async with two_models(plan=TURNS) as (_, client):
        for model, name in zip(MODELS, NAMES, strict=True):
            wish = RequestOptions(max_tokens=60, ignore_eos=True, model=name, ngram=False)
            done = await drafted(partial(client.complete, PROMPT, **wish))
            assert list(done.tokens) == plain(model, PROMPT, 60)
            assert [each.model for each in done.stats.drafters] == [name]
            turn = await client.complete((4, 5), max_tokens=5, ignore_eos=True, parent=done.session_id)
            assert list(turn.tokens) == plain(model, (*PROMPT, *done.tokens, 4, 5), 5)


async def test_a_model_must_be_known_and_named() -> None:
    async with two_models() as (_, client):
        info = await client.server_info()
        assert [each.model for each in info.targets] == NAMES
        assert info.target == info.targets[0]
        assert not any(each.tokenizer_json for each in info.targets)
        with pytest.raises(
            SpecwireError, match="model: 'gpt' is not served here; 'scripted:7', 'scripted:8' are"
        ) as no:
            await client.complete(PROMPT, max_tokens=1, model="gpt")
        assert no.value.code is grpc.StatusCode.NOT_FOUND
        with pytest.raises(SpecwireError, match="model: must be named: 'scripted:7', 'scripted:8' are served") as which:
            await client.complete(PROMPT, max_tokens=1)
        assert which.value.code is grpc.StatusCode.INVALID_ARGUMENT
        first = await client.complete(PROMPT, max_tokens=1, model=NAMES[0])
        with pytest.raises(SpecwireError, match="parent: session '.*' has another vocabulary") as other:
            await client.complete(PROMPT, max_tokens=1, parent=first.session_id, model=NAMES[1])
        assert other.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_http_lists_and_serves_all() -> None:
    async with two_models(http="127.0.0.1:0") as (running, _), httpx.AsyncClient(base_url=str(running.http)) as client:
        listed = (await client.get("/v1/models")).json()
        assert [each["id"] for each in listed["data"]] == NAMES
        assert (await client.get("/v1/models/scripted:8")).json()["id"] == NAMES[1]
        for model, name in zip(MODELS, NAMES, strict=True):
            body = {"model": name, "prompt": list(PROMPT), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["model"] == name
            more = {**body, "parent": answer["choices"][0]["specwire"]["session_id"], "model": None}
            assert (await client.post("/v1/completions", json=more)).json()["model"] == name
            assert answer["choices"][0]["text"] == " ".join(map(str, plain(model, PROMPT, 5)))
        for path in ("/v1/completions", "/tokenize"):
            unknown = await client.post(path, json={"model": "gpt", "prompt": "1"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            unnamed = await client.post(path, json={"prompt": "1"})
            assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        assert (await client.get("/console/status")).json()["target"]["model"] == NAMES[0]


def tokenizer(token: str) -> bytes:
    vocabulary = {token: 0}
    return Tokenizer(WordLevel(vocabulary, unk_token=token)).to_str().encode()


def described(name: str, weights: str, text: bytes = b"") -> common_pb2.GetModelInfoResponse:
    text = text or tokenizer("a")
    told = hashlib.sha256(text).hexdigest()
    return common_pb2.GetModelInfoResponse(
        model=name, weights_fingerprint=weights, tokenizer_hash=told, tokenizer_json=text, context=10
    )


class Shown:
    """Models, and verifiers that show theirs."""

    def __init__(self) -> None:
        self._tokenizers = Tokenizers()
        self.models = Models(self._tokenizers)

    async def learn(self, info: common_pb2.GetModelInfoResponse, versions: bool = True) -> str | None:
        await self._tokenizers.take(info)
        return self.models.learn(info, versions)


async def test_one_name_may_have_several_versions_only_where_that_is_meant() -> None:
    known = Shown()
    assert await known.learn(described("llama", "aa"), versions=False) is None
    assert await known.learn(described("llama", "aa"), versions=False) is None
    refused = await known.learn(described("llama", "bb"), versions=False)
    assert refused == "serves weights bb, but sessions here are pinned to aa"
    assert await known.learn(described("qwen", "cc"), versions=False) is None
    assert await known.learn(described("llama", "bb"), versions=True) is None
    assert known.models.names() == ["llama", "qwen"]
    assert [each.info.weights_fingerprint for each in known.models.named("llama")] == ["aa", "bb"]


async def test_a_model_is_known_for_a_while_after_its_last_verifier() -> None:
    known = Shown()
    await known.learn(described("llama", "aa"), versions=True)
    await known.learn(described("qwen", "cc"), versions=True)
    gone, stays = (target.identity for target in known.models.all())
    known.models.sweep({stays}, 0.0)
    known.models.sweep({stays}, KEPT_S)
    assert known.models.version(gone) is not None
    known.models.sweep({gone, stays}, KEPT_S + 1)  # it was there again
    known.models.sweep({stays}, KEPT_S + 2)
    known.models.sweep({stays}, 2 * KEPT_S)
    assert known.models.names() == ["llama", "qwen"]
    known.models.sweep({stays}, 2 * KEPT_S + 3)
    assert known.models.names() == ["qwen"]


async def test_a_session_can_be_read_long_after_its_models_last_verifier() -> None:
    """Its tokenizer is still there. A model that only shares the tokenizer is another one all the same."""
    known = Shown()
    await known.learn(described("llama", "aa"), versions=True)
    (target,) = known.models.all()
    identity = target.identity
    begun = SessionRecord("s", (1,), Sampling(), Stopping(4), weights_fingerprint="aa")
    record = replace(begun, tokenizer_fingerprint=identity.tokenizer, eos_ids=identity.eos_ids)
    for now in (0.0, KEPT_S + 1):
        known.models.sweep((), now)
    assert known.models.all() == []
    assert known.models.tokenizer_of(record) is target.tokenizer
    await known.learn(described("qwen", "cc"), versions=True)
    assert known.models.tokenizer_of(record) is target.tokenizer
    with pytest.raises(StatusError, match="pinned to weights dd, which no verifier here has had") as refused:
        known.models.tokenizer_of(replace(record, weights_fingerprint="dd"))
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_versions_share_a_tokenizer() -> None:
    known = Shown()
    first = described("llama", "aa")
    assert await known.learn(first) is None
    assert not first.tokenizer_json  # it is kept once
    second = described("llama", "bb")
    second.ClearField("tokenizer_json")  # as of a verifier that was told that it is known
    second.context = 30
    assert await known.learn(second) is None
    targets = known.models.named("llama")
    assert targets[0].tokenizer is targets[1].tokenizer
    assert [each.most_prompt_bytes for each in targets] == [20, 60]


async def test_a_tokenizer_that_is_none_is_refused() -> None:
    known = Shown()
    assert "tokenizer_json: " in (await known.learn(described("a", "aa", b"{")) or "")
    unsent = described("b", "bb", tokenizer("b"))
    unsent.ClearField("tokenizer_json")
    wrong = described("c", "cc", tokenizer("c"))
    wrong.tokenizer_hash = unsent.tokenizer_hash
    assert await known.learn(unsent) == "tokenizer_json: did not come"
    assert await known.learn(wrong) == "tokenizer_json: is another one than its hash says"
    none = described("d", "dd")
    none.ClearField("tokenizer_json")
    none.tokenizer_hash = hashlib.sha256(b"").hexdigest()
    assert (await known.learn(none) or "").startswith("tokenizer_json: the model has none, or none that its server can")
    assert known.models.names() == []
    assert await known.learn(described("b", "bb", tokenizer("b"))) is None  # nobody has taken its hash


async def test_what_a_version_differs_in_is_said() -> None:
    known = Shown()
    first = described("llama", "aa")
    first.eos_ids.extend([2, 0])
    assert await known.learn(first, versions=False) is None
    same = described("llama", "aa")
    same.eos_ids.extend([0, 2, 2])
    same.context, same.runtime, same.device = 4096, "openvino", "cuda:0"
    assert await known.learn(same, versions=False) is None
    ends = described("llama", "aa")
    assert await known.learn(ends, versions=False) == "serves EOS ids [], but sessions here are pinned to [0, 2]"
    text = described("llama", "aa", tokenizer("b"))
    text.eos_ids.extend([0, 2])
    assert re.fullmatch("serves tokenizer [0-9a-f]{12}, but .* to [0-9a-f]{12}", str(await known.learn(text, False)))
    both = described("llama", "bb")
    refused = "serves weights bb and EOS ids [], but sessions here are pinned to aa and [0, 2]"
    assert await known.learn(both, versions=False) == refused


async def test_a_session_goes_on_with_its_own_version_and_text() -> None:
    known = Shown()
    infos = [described("llama", "aa", tokenizer(word)) for word in ("b", "c")]
    for end, info in enumerate(infos):
        info.eos_ids.append(end)
        await known.learn(info)
    first, second = known.models.all()
    begun = SessionRecord("s", (1,), Sampling(), Stopping(4), weights_fingerprint="aa")
    for target in (first, second):
        record = replace(begun, tokenizer_fingerprint=target.identity.tokenizer, eos_ids=target.identity.eos_ids)
        assert known.models.tokenizer_of(record) is target.tokenizer
        crossed = replace(record, eos_ids=(7,))  # of a version that is not there any more
        assert known.models.version(identity_of(crossed)) is None
        assert known.models.tokenizer_of(crossed) is target.tokenizer
    lost = replace(begun, tokenizer_fingerprint="ff", eos_ids=(0,))
    with pytest.raises(StatusError, match="session_id: the session's text is of tokenizer ff, which is not served"):
        known.models.tokenizer_of(lost)
