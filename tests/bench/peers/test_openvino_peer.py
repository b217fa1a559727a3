"""OpenVINO GenAI itself, on tiny models, against transformers; where `make setup-peers` has run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.harness.runs import BenchError
from bench.peers.library import NO_PEERS, PEERS, PRECISIONS, command, exported, start
from bench.peers.transformers_peer import PLAIN, TransformersPeer
from tests.bench.tiny import save_pair

PROMPT = list(b"def walk(tree):\n    for node in ")
TOKENS = 24
ASKED = {"do": "generate", "prompts": [PROMPT], "tokens": TOKENS, "temperature": 0.0, "seed": 1}
LIMIT_S = 300.0


@pytest.mark.skipif(not PEERS.exists(), reason=NO_PEERS)
def test_all_modes_say_what_transformers_says(tmp_path: Path) -> None:
    folders = save_pair(tmp_path)
    target, draft = (exported(str(folder), tmp_path / f"exported-{folder.name}") for folder in folders)
    own = TransformersPeer()
    own.load({"model": str(folders[0]), "mode": PLAIN, "threads": 1, "dtype": "float32"})
    expected: Any = own.generate(ASKED)
    for mode in ("plain", "lookup", "draft"):
        loading = {"model": target, "draft": draft, "mode": mode, "threads": 1, "precision": PRECISIONS["float32"]}
        with start("openvino", loading) as peer:
            (run,) = peer.ask(ASKED, LIMIT_S)["runs"]
        assert run["tokens"] == expected["runs"][0]["tokens"], mode
        assert run["forwards"] == TOKENS if mode == "plain" else 1 <= run["forwards"] <= TOKENS
        assert 0 < run["first_token_seconds"] <= run["seconds"]


@pytest.mark.skipif(not PEERS.exists(), reason=NO_PEERS)
def test_a_model_that_it_cannot_take_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="OpenVINO does not take"):
        exported(str(tmp_path), tmp_path / "exported")


def test_without_its_environment_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="make setup-peers"):
        command("openvino", tmp_path / "python")
    assert command("transformers", tmp_path / "python")[-1] == "bench.peers.transformers_peer"
