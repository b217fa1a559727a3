"""A drafter of another vocabulary than the target's, in a whole stack: accepted tokens, and the target's own text."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable

import grpc
import pytest
from tokenizers import Tokenizer

import demo_pair
import draft_service.server
from orchestrator.peers.models import maps_vocabulary, vocabulary_mismatch
from specwire.client import AsyncClient, Completion
from specwire.core.law.sampling import Sampling, with_rule
from specwire.core.placement import PlacementCandidate, PlacementRequest, place
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import common_pb2, draft_pb2
from tests.draft_service.peer import connected, pace, serving
from tests.orchestrator.stack import TURNS, drafted, plain, stack
from tests.text import other_vocabularies

TARGET = str(demo_pair.TARGET)
TOKENIZER = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
PROMPTS = ("def area(width, height):\n    ", "# für später: naïve 日本語 🙂\nimport os\n\nclass Server:\n    def ")
SEED = 5
LENGTH = 32
GREEDY = Sampling()
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}'

Info = common_pb2.GetModelInfoResponse


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo drafter in two other vocabularies, of which one stands for bytes."""
    folder = tmp_path_factory.mktemp("models")
    made = {"pieces": other_vocabularies.sentencepiece, "words": other_vocabularies.word_piece}
    return {name: other_vocabularies.save(folder / name, how) for name, how in made.items()}


@pytest.fixture
def way(folders: dict[str, str]) -> str:
    return folders["pieces"]


def expected(prompt: str, sampling: Sampling, length: int = LENGTH) -> list[int]:
    return plain(TARGET, TOKENIZER.encode(prompt).ids, length, sampling)


def asking(client: AsyncClient, prompt: str, sampling: Sampling = GREEDY) -> Callable[[], Awaitable[Completion]]:
    return lambda: client.complete(
        prompt, max_tokens=LENGTH, ignore_eos=True, temperature=sampling.temperature, seed=sampling.seed
    )


def accepted(told: Completion) -> int:
    return sum(drafter.accepted for drafter in told.stats.drafters)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "coupled"])
async def test_the_text_is_the_targets_own(way: str, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=SEED)
    async with stack(TARGET, way, plan=TURNS) as running:
        for prompt in PROMPTS:
            done = await drafted(asking(running.client, prompt, sampling))
            assert list(done.tokens) == expected(prompt, sampling)
            assert accepted(done) > 0


async def test_options_that_the_drafter_leaves_to_the_target(way: str) -> None:
    """A constraint is applied by the target alone; bias and penalties are of the target's ids."""

    def ask(client: AsyncClient) -> Awaitable[Completion]:
        return client.complete(
            PROMPTS[0], max_tokens=40, json_schema=SCHEMA, repetition_penalty=1.3, logit_bias={7: 2.0}
        )

    async with stack(TARGET) as running:
        alone = await ask(running.client)
    async with stack(TARGET, way, plan=TURNS) as running:
        await drafted(asking(running.client, PROMPTS[0]))
        done = await ask(running.client)
    assert done.tokens == alone.tokens


# What is refused


async def test_a_drafter_whose_tokens_stand_for_no_bytes_drafts_for_its_equals_alone(folders: dict[str, str]) -> None:
    async with serving(folders["words"]) as running, connected(running) as peer:
        assert running.info.token_text == OLDER
        peer.fingerprint = "theirs"
        opening = peer.opening(1, [1, 2, 3], pace())
        await peer.send(draft_pb2.ConnectDraftRequest(opens=[opening], vocabularies=[vocabulary()]))
        said = "vocabulary_fingerprint: this drafter's tokens do not stand for bytes"
        assert (await peer.refused(1)).message.startswith(said)


async def test_under_rules_that_weigh_a_text_has_no_such_drafter(folders: dict[str, str]) -> None:
    async with stack(TARGET, folders["pieces"], plan=TURNS) as running:
        await drafted(asking(running.client, PROMPTS[0]))
        done = await running.client.complete(PROMPTS[0], max_tokens=8, temperature=1.0, rule="rejection")
    assert len(done.tokens) == 8
    assert not done.stats.drafters


def vocabulary(width: int = 4096) -> draft_pb2.TargetVocabulary:
    text = zlib.compress(TOKENIZER.to_str().encode())
    return draft_pb2.TargetVocabulary(fingerprint="theirs", tokenizer_zlib=text, vocabulary=width, eos_ids=[0])


@pytest.mark.parametrize(
    ("told", "sampling", "said"),
    [
        (vocabulary(), with_rule(Sampling(temperature=1.0), "block"), "sampling.rule: block needs a drafter of "),
        (vocabulary(0), Sampling(), "vocabulary_fingerprint: the verifier's vocabulary is theirs"),
        (vocabulary((1 << 20) + 1), Sampling(), "vocabulary_fingerprint: the verifier's vocabulary is theirs"),
    ],
)
async def test_a_drafter_says_what_it_cannot_do(
    folders: dict[str, str], told: draft_pb2.TargetVocabulary, sampling: Sampling, said: str
) -> None:
    async with serving(folders["pieces"]) as running, connected(running) as peer:
        peer.fingerprint = "theirs"
        opening = peer.opening(1, [1, 2, 3], pace(), sampling)
        await peer.send(draft_pb2.ConnectDraftRequest(opens=[opening], vocabularies=[told]))
        refused = await peer.refused(1)
        assert refused.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert refused.message.startswith(said)


async def test_ids_are_checked_against_the_vocabulary_that_was_told(folders: dict[str, str]) -> None:
    async with serving(folders["pieces"]) as running, connected(running) as peer:
        own, peer.fingerprint = peer.fingerprint, "theirs"
        await peer.send(draft_pb2.ConnectDraftRequest(vocabularies=[vocabulary(300)]))
        await peer.open(1, [1, 300])
        assert (await peer.refused(1)).message == "tokens: token id 300 is outside 0..299"
        await peer.open(2, [1, 2, 3])
        await peer.proposal(2)
        await peer.advance(2, 3, [4000])
        assert (await peer.refused(2)).message == "tokens: token id 4000 is outside 0..299"
        peer.fingerprint = own
        await peer.open(3, [1, 4000])
        assert all(token < running.info.vocabulary for token in (await peer.proposal(3)).tokens)


async def test_a_link_tells_so_many_vocabularies(folders: dict[str, str]) -> None:
    async with serving(folders["pieces"]) as running, connected(running) as peer:
        for number in range(9):
            told = vocabulary()
            told.fingerprint = f"number {number}"
            await peer.send(draft_pb2.ConnectDraftRequest(vocabularies=[told]))
        peer.fingerprint = "number 8"
        await peer.open(1, [1, 2, 3])
        assert (await peer.refused(1)).message.startswith(
            "vocabulary_fingerprint: the verifier's vocabulary is number 8"
        )
        peer.fingerprint = "number 7"
        await peer.open(2, [1, 2, 3])
        assert (await peer.proposal(2)).tokens


# Who fits whom

BYTES, NEIGHBOURS = common_pb2.TOKEN_TEXT_BYTES, common_pb2.TOKEN_TEXT_NEIGHBOURS
OLDER = common_pb2.TOKEN_TEXT_UNSPECIFIED


@pytest.mark.parametrize(
    ("target", "drafter", "fits"),
    [
        (BYTES, BYTES, True),
        (BYTES, NEIGHBOURS, False),
        (BYTES, OLDER, False),
        (OLDER, BYTES, False),
        (NEIGHBOURS, BYTES, False),
        (OLDER, OLDER, False),
    ],
)
def test_peers_that_say_nothing_of_their_tokens_are_refused(
    target: common_pb2.TokenText, drafter: common_pb2.TokenText, fits: bool
) -> None:
    one = Info(model="large", vocabulary_fingerprint="a", token_text=target)
    other = Info(model="small", vocabulary_fingerprint="b", token_text=drafter)
    assert maps_vocabulary(one, other) is fits
    refused = vocabulary_mismatch(one, other)
    assert (refused is None) is fits
    if refused is not None:
        assert refused.startswith("vocabulary mismatch: drafter small has b ")
    other.vocabulary_fingerprint = "a"
    assert vocabulary_mismatch(one, other) is None


def test_a_drafter_of_the_same_vocabulary_comes_first() -> None:
    wish = PlacementRequest("key", "a", near=("here",))
    mapped = PlacementCandidate("mapped", "a", region="here", mapped=True)
    same = PlacementCandidate("same", "a", sessions=0)
    chosen = place([mapped, same], wish)
    assert chosen is not None
    assert chosen.index == 1
    full = PlacementCandidate("same", "a", sessions=1)
    chosen = place([mapped, full], wish)
    assert chosen is not None
    assert chosen.index == 0


async def test_a_drafter_may_dial_in(folders: dict[str, str]) -> None:
    async with stack(TARGET, plan=TURNS, accept_drafters=True) as running:
        address = running.orchestrator.address
        drafter = await draft_service.server.dial_in(ModelServiceOptions(folders["pieces"]), address, None)
        done = await drafted(asking(running.client, PROMPTS[1]))
        await drafter.stop()
    assert list(done.tokens) == expected(PROMPTS[1], Sampling())
