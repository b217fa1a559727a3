"""The transformers side, in this process, on tiny models."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from bench.peers.answering import answer_requests
from bench.peers.forward_peer import PAUSED, ForwardPeer
from bench.peers.transformers_peer import ASSISTED, CONTINUOUS, PLAIN, STATIC, TransformersPeer
from tests.bench.tiny import save_pair

PROMPT = list(b"def walk(tree):\n    for node in ")
OTHER = list(b"import os\n")
TOKENS = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def loaded(models: tuple[Path, Path], mode: str) -> TransformersPeer:
    target, draft = models
    peer = TransformersPeer()
    loading = {"model": str(target), "draft": str(draft), "mode": mode, "threads": 1, "dtype": "float32"}
    peer.load({**loading, "sessions": 2, "context": 128})
    return peer


def generate(peer: TransformersPeer | ForwardPeer, *prompts: list[int], temperature: float = 0.0) -> dict[str, Any]:
    asked = {"prompts": prompts or (PROMPT,), "tokens": TOKENS, "temperature": temperature, "seed": 1}
    return peer.generate(asked)


def test_plain_decoding_takes_a_forward_for_each_token(models: tuple[Path, Path]) -> None:
    (run,) = generate(loaded(models, PLAIN))["runs"]
    assert (len(run["tokens"]), run["forwards"], run["accepted"]) == (TOKENS, TOKENS, 0)
    assert 0 < run["first_token_seconds"] <= run["seconds"]


def test_others_say_the_same(models: tuple[Path, Path]) -> None:
    plain = loaded(models, PLAIN)
    wanted = [generate(plain, prompt)["runs"][0]["tokens"] for prompt in (PROMPT, OTHER)]
    (assisted,) = generate(loaded(models, ASSISTED))["runs"]
    assert assisted["tokens"] == wanted[0]
    assert assisted["forwards"] + assisted["accepted"] == TOKENS
    together = generate(loaded(models, STATIC), PROMPT, OTHER)
    assert [run["tokens"] for run in together["runs"]] == wanted
    assert {run["forwards"] for run in together["runs"]} == {TOKENS}
    assert together["seconds"] == max(run["seconds"] for run in together["runs"])


def test_a_seed_draws_the_same_text_again(models: tuple[Path, Path]) -> None:
    peer = loaded(models, PLAIN)
    one, again = (generate(peer, temperature=0.8)["runs"][0]["tokens"] for _ in range(2))
    assert one == again != generate(peer)["runs"][0]["tokens"]


def test_the_end_of_text_does_not_end_a_text(models: tuple[Path, Path], tmp_path: Path) -> None:
    wanted = generate(loaded(models, PLAIN))["runs"][0]["tokens"]
    ending = save_pair(tmp_path)
    for model in ending:
        settings = json.loads((model / "generation_config.json").read_text())
        (model / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": wanted[0]}))
    for mode in (PLAIN, ASSISTED):
        assert generate(loaded(ending, mode))["runs"][0]["tokens"] == wanted


def test_the_forward_alone_says_what_transformers_says(models: tuple[Path, Path]) -> None:
    peer = ForwardPeer()
    peer.load({"model": str(models[0]), "mode": PAUSED, "threads": 1, "dtype": "float32"})
    wanted = generate(loaded(models, PLAIN))["runs"][0]["tokens"]
    for _ in range(2):  # nothing is kept of the first
        (run,) = generate(peer)["runs"]
        assert (run["tokens"], run["forwards"]) == (wanted, TOKENS)


def test_a_failed_request_is_answered_and_the_next_one_served(models: tuple[Path, Path]) -> None:
    load = {"do": "load", "model": str(models[0]), "mode": PLAIN, "dtype": "float32", "threads": 1}
    asked = {"do": "generate", "prompts": [PROMPT], "tokens": 2, "temperature": 0.0, "seed": 1}
    requests = [{**load, "dtype": "float7"}, {**load, "mode": CONTINUOUS, "model": "/no/such"}, load, asked]
    answers = io.StringIO()
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    answer_requests(TransformersPeer().methods, lines, answers)
    failed, missing, whole, generated = (json.loads(line) for line in answers.getvalue().splitlines())
    assert "float7" in failed["error"]
    assert "error" in missing
    assert whole == {}
    assert len(generated["runs"][0]["tokens"]) == 2
