"""Real models in float32: whoever is killed, the text is the one that nobody was killed for, up to near-ties."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from demo_pair import DRAFT, TARGET, held_out_prompts
from deploy.near_tie import examine, first_difference
from specwire.core.limits import FinishReason
from specwire.rpc.process import say
from tests.faults.matrix import CELLS, Cell
from tests.faults.place import Place, place
from tests.faults.scene import Asked, Scene
from tests.faults.streams import Stream

LENGTH = 600
PROMPTS = 2

pytestmark = pytest.mark.whole_matrix


@pytest.fixture(scope="module")
def played() -> Iterator[Place]:
    """Give the processes, which are gone afterwards."""
    with place(str(TARGET), str(DRAFT)) as running:
        yield running


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    """Prompts whose sessions share the verifiers evenly."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [Asked(tuple(tokenizer.encode(prompt.text).ids)) for prompt in held_out_prompts()[:PROMPTS]]


@pytest.fixture(scope="module")
def undisturbed(played: Place, asked: list[Asked]) -> list[list[int]]:
    """Give plain decoding's texts."""
    texts = []
    for one in asked:
        with Stream(played.first.address, one.prompt, max_tokens=LENGTH, drafting=False) as stream:
            texts.append(stream.rest())
    return texts


@pytest.mark.parametrize("where", ["verifier", "orchestrator"])
def test_killed(played: Place, asked: list[Asked], undisturbed: list[list[int]], where: str) -> None:
    scene = Scene(played, killed(where), asked, LENGTH)
    scene.play()
    for one, stream, expected in zip(asked, scene.streams, undisturbed, strict=True):
        assert stream.error is None
        assert stream.finished is not None
        assert stream.finished.reason is FinishReason.LENGTH
        assert len(stream.tokens) == LENGTH
        assert list(played.log(stream.session_id).tokens) == stream.tokens
        assert_equal_but_for_a_near_tie(one, stream.tokens, expected)


def killed(where: str) -> Cell:
    return next(cell for cell in CELLS if (cell.where, cell.fault) == (where, "SIGKILL"))


def assert_equal_but_for_a_near_tie(asked: Asked, tokens: list[int], expected: list[int]) -> None:
    """Behind the first difference the texts are different ones."""
    at = first_difference(tokens, expected)
    if at is None:
        return
    parting = examine(str(TARGET), "float32", [*asked.prompt, *tokens[:at]], (tokens[at], expected[at]))
    say(f"near-tie: {parting}")
    assert parting.near_tie, str(parting)
