"""The transformers side, in this process, on tiny models."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness.rows import VARIANTS
from bench.peers.answering import answer_requests
from bench.peers.transformers_peer import TransformersPeer
from tests.bench.tiny import save_pair

PROMPT = list(b"def walk(tree):\n    for node in ")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def peer(models: tuple[Path, Path]) -> TransformersPeer:
    target, draft = models
    peer = TransformersPeer()
    peer.load({"target": str(target), "draft": str(draft), "dtype": "float32", "threads": 1})
    return peer


def generate(peer: TransformersPeer, variant: dict[str, Any] | None) -> dict[str, Any]:
    return peer.generate({"prompt": PROMPT, "tokens": 20, "variant": variant})


def test_plain_decoding_takes_a_forward_for_each_token(peer: TransformersPeer) -> None:
    answer = generate(peer, None)
    assert len(answer["tokens"]) == 20
    assert answer["decided"] == [1] * 20
    assert 0 < answer["first_token_seconds"] <= answer["seconds"]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_assisted_generation_says_the_same(peer: TransformersPeer, variant: Any) -> None:
    answer = generate(peer, variant.settings)
    assert answer["tokens"] == generate(peer, None)["tokens"]
    assert sum(answer["decided"]) == 20
    assert variant.schedule != "constant" or max(answer["decided"]) <= variant.k + 1


def test_the_end_of_text_does_not_end_a_text(peer: TransformersPeer, tmp_path: Path) -> None:
    wanted = generate(peer, None)["tokens"]
    target, draft = save_pair(tmp_path)
    for model in (target, draft):
        settings = json.loads((model / "generation_config.json").read_text())
        (model / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": wanted[0]}))
    ending = TransformersPeer()
    ending.load({"target": str(target), "draft": str(draft), "dtype": "float32", "threads": 1})
    assert generate(ending, None)["tokens"] == wanted
    assert generate(ending, VARIANTS[0].settings)["tokens"] == wanted


def test_scores_are_those_that_decoding_saw(peer: TransformersPeer) -> None:
    first, second, *_ = generate(peer, None)["tokens"]
    answer: dict[str, Any] = peer.scores({"text": [*PROMPT, first], "of": [second, 0]})
    assert answer["top"][0] == second
    assert answer["scores"][0] == answer["top_scores"][0] >= answer["top_scores"][1]


def test_a_failed_request_is_answered_and_the_next_one_served(models: tuple[Path, Path]) -> None:
    load = {"do": "load", "target": str(models[0]), "draft": None, "dtype": "float32", "threads": 1}
    requests = [{**load, "dtype": "float7"}, load, {"do": "encode", "texts": ["ab"]}]
    answers = io.StringIO()
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    answer_requests(TransformersPeer().methods, lines, answers)
    failed, loaded, encoded = (json.loads(line) for line in answers.getvalue().splitlines())
    assert "float7" in failed["error"]
    assert loaded == {"threads": 1}
    assert len(encoded["prompts"][0]) == 2
