"""OpenVINO GenAI itself, on tiny models, against transformers, where `make setup-peers` has run; what it is given.

The form that is exported says what the model says, however the text is cut up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.harness.runs import BenchError
from bench.peers.library import NO_PEERS, PEERS, PRECISIONS, command, exported, start
from bench.peers.openvino_export import Stateless
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


TEXT = torch.tensor([list(b"for name in names:\n    pri"), list(b"def walk(tree):\n    for no")])
LENGTH = TEXT.shape[1]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    target, _ = save_pair(tmp_path_factory.mktemp("pair"))
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    loaded.eval()
    return loaded


def run(stateless: Stateless, pieces: list[int], beams: list[int]) -> torch.Tensor:
    """Logits of the text fed in pieces; `beams` at the last of them."""
    config = stateless.model.config
    size = config.hidden_size // config.num_attention_heads
    past = tuple(torch.zeros(2, config.num_key_value_heads, 0, size) for _ in range(2 * config.num_hidden_layers))
    rows, at = [], 0
    for piece in pieces:
        end = at + piece
        order = beams if end == LENGTH else [0, 1]
        logits, *cache = stateless(
            TEXT[:, at:end],
            torch.ones(2, end, dtype=torch.int64),
            torch.arange(at, end).repeat(2, 1),
            torch.tensor(order),
            *past,
        )
        past, at = tuple(cache), end
        rows.append(logits)
    return torch.cat(rows, dim=1)


@torch.inference_mode()
@pytest.mark.parametrize("pieces", [[LENGTH], [1] * LENGTH, [10, 1, LENGTH - 11]])
def test_any_cut_gives_the_logits_of_the_whole(model: PreTrainedModel, pieces: list[int]) -> None:
    expected = model(input_ids=TEXT, use_cache=False).logits
    torch.testing.assert_close(run(Stateless(model), pieces, [0, 1]), expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_a_session_goes_on_from_the_row_that_it_is_told(model: PreTrainedModel) -> None:
    swapped = torch.cat((TEXT.flip(0)[:, :-1], TEXT[:, -1:]), dim=1)
    expected = model(input_ids=swapped, use_cache=False).logits[:, -1]
    found = run(Stateless(model), [LENGTH - 1, 1], [1, 0])[:, -1]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
