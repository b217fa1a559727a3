"""OpenVINO GenAI itself, on tiny models, against transformers. Collected where its extra is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.harness.child import BenchChild
from bench.peers import openvino_rows
from bench.peers.transformers_peer import TransformersPeer
from tests.bench.tiny import save_pair

PROMPT = list(b"def walk(tree):\n    for node in ")
TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = save_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


@pytest.fixture(scope="module")
def openvino(models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchChild]:
    with openvino_rows.start(*models, "float32", 1, str(tmp_path_factory.mktemp("exported"))) as peer:
        yield peer


@pytest.fixture(scope="module")
def expected(models: tuple[str, str]) -> tuple[int, ...]:
    peer = TransformersPeer()
    peer.load({"target": models[0], "draft": None, "dtype": "float32", "threads": 1})
    tokens = peer.generate({"prompt": PROMPT, "tokens": TOKENS, "variant": None})["tokens"]
    assert isinstance(tokens, list)
    return tuple(tokens)


def test_all_modes_say_what_transformers_says(openvino: BenchChild, expected: tuple[int, ...]) -> None:
    plain, *others = [
        openvino_rows.plain_row(openvino),
        *openvino_rows.draft_rows(openvino),
        *openvino_rows.lookup_rows(openvino),
    ]
    run = plain.run(PROMPT, TOKENS)
    assert run.tokens == expected
    assert run.forwards == TOKENS
    for row in others:
        run = row.run(PROMPT, TOKENS)
        assert run.tokens == expected, row.label
        assert 1 <= run.forwards <= TOKENS
        assert 0 < run.first_token_seconds <= run.seconds
