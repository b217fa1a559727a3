"""The process that walks over texts, in this one: it counts what it should, and says the same on each runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.step.peer import StepPeer
from tests.bench.tiny import save_pair

PROMPT = list(b"def walk(tree):\n    for node in ")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))[0]


def loaded(target: Path, runtime: str) -> StepPeer:
    peer = StepPeer()
    options = {"slots": 3, "dtype": "float32", "threads": 1, "runtime": runtime}
    assert peer.load({"target": str(target), **options}) == {"runtime": runtime}
    return peer


def steps(peer: StepPeer, sessions: int, windows: list[int], text: list[int]) -> list[float]:
    answer: dict[str, Any] = peer.steps(
        {"prompt": PROMPT, "text": text, "sessions": sessions, "windows": windows},
    )
    return list(answer["seconds"])


def test_both_runtimes_decode_the_same_text(target: Path) -> None:
    texts = [loaded(target, runtime).decode({"prompt": PROMPT, "tokens": 12}) for runtime in ("torch", "openvino")]
    assert texts[0] == texts[1]


def test_the_forward_alone_says_what_the_target_says(target: Path) -> None:
    peer = loaded(target, "torch")
    expected = peer.decode({"prompt": PROMPT, "tokens": 12})["tokens"]
    for _ in range(2):  # what the last one left is no help
        answer: dict[str, Any] = peer.generate({"prompt": PROMPT, "tokens": 12})
        assert answer["tokens"] == expected
        assert 0 < answer["first_token_seconds"] < answer["seconds"]


@pytest.mark.parametrize(
    ("sessions", "windows", "expected"), [(1, [1], 10), (1, [4], 2), (1, [1, 5], 3), (3, [1], 10), (3, [10], 1)]
)
def test_a_walk_takes_whole_windows_only(target: Path, sessions: int, windows: list[int], expected: int) -> None:
    peer = loaded(target, "torch")
    text = peer.decode({"prompt": PROMPT, "tokens": 10})["tokens"]
    assert isinstance(text, list)
    for _ in range(2):  # the second time the prompt is held already
        taken = steps(peer, sessions, windows, text)
        assert len(taken) == expected
        assert min(taken) > 0


def test_nothing_is_loaded() -> None:
    with pytest.raises(RuntimeError, match="nothing is loaded"):
        StepPeer().decode({"prompt": PROMPT, "tokens": 1})
