"""bench.reference: a wrong token is found, and only a near-tie is forgiven."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import reference
from bench.harness import entry
from bench.peers.library import NO_PEERS
from bench.reference import FLOAT32_TIE, ReferenceSettings, Scores, TextDifference, compared
from demo_pair import TARGET
from specwire.core.invalid import InvalidParameter
from specwire.core.model import TORCH, Feed
from specwire.lm import load_model
from tests.lm.gguf_files import written

TOKENS = 8


class Fixed:
    """A library that says the same scores after any text."""

    def __init__(self, scores: Sequence[float], tolerance: float) -> None:
        self.told = np.array(scores, np.float32), tolerance
        self.asked: list[list[int]] = []

    def text(self, prompt: Sequence[int], tokens: int) -> list[int]:
        return [int(self.told[0].argmax())] * tokens

    def scores(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[Scores, float]:
        self.asked.append([*prompt, *text])
        return self.told


@pytest.mark.parametrize(("tolerance", "near"), [(0.25, True), (0.125, False)])
def test_a_difference_is_a_near_tie_where_both_tokens_are_almost_the_best(tolerance: float, near: bool) -> None:
    library = Fixed([1.0, 4.0, 3.75, 0.0], tolerance)
    count, found = compared("torch", library, 7, [5, 6], [1, 1, 1], [1, 2, 1])
    assert (count, library.asked) == (2, [[5, 6, 1]])
    assert found == TextDifference("torch", 7, 1, 1, 2, 0.25, 0.25, tolerance)
    assert found.near_tie is near
    assert compared("torch", library, 7, [5, 6], [1, 1, 1], [1, 1, 1]) == (3, None)
    # A token that is far behind is no near-tie, however close the two best are.
    _, found = compared("torch", Fixed([1.0, 4.0, 4.0], tolerance), 0, [5], [1], [0])
    assert found is not None
    assert (found.margin, found.behind, found.near_tie) == (0.0, 3.0, False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(written(TARGET, tmp_path_factory.mktemp("file") / "demo.gguf"))


@contextmanager
def served(file: Path, spoilt: int) -> Iterator[Any]:
    """What a client of the file's stack would get; one text with its last token spoilt."""
    lm, count = load_model(str(file), slots=1, runtime=TORCH, dtype="float32", context=512), 0

    def complete(prompt: Sequence[int], max_tokens: int, **_: object) -> Any:
        nonlocal count
        text, start = [*prompt], 0
        lm.rollback(0, 0)
        for _step in range(max_tokens):
            text.append(int(lm.forward([Feed(0, start, text[start:], 1)])[0].argmax()))
            start = len(text) - 1
        text[-1] += count == spoilt
        count += 1
        return SimpleNamespace(tokens=tuple(text[len(prompt) :]))

    yield SimpleNamespace(complete=complete)


@pytest.mark.parametrize(("spoilt", "wrong"), [(-1, 0), (1, 1)])
def test_texts_are_held_to_transformers_own(
    spoilt: int, wrong: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(entry, "QUESTIONS", tmp_path / "nowhere")
    monkeypatch.setattr(reference, "client_of", lambda *_: served(file, spoilt))
    monkeypatch.setattr(reference, "PEERS", tmp_path / "nowhere")
    out = tmp_path / "found.json"
    asked = ["--prompts", "3", "--tokens", str(TOKENS), "--runtimes", TORCH, "--out", str(out)]
    assert reference.main(["--target", str(file), *asked]) == wrong
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert row == {
        "runtime": TORCH,
        "expected": "transformers",
        "texts": 3,
        "equal": 3 - wrong,
        "compared": 3 * TOKENS,
    }
    assert [(one["prompt"], one["at"], one["near_tie"]) for one in found["raw"]] == [(1, TOKENS - 1, False)] * wrong
    assert all(one["tolerance"] == FLOAT32_TIE < one["behind"] for one in found["raw"])
    (own,) = found["own_texts"]
    assert (own["whose"], own["tokens"], own["best"]) == ("default", 3 * TOKENS, 3 * TOKENS - wrong)
    assert -math.log(64) < own["nats"] < 0.0
    assert found["notes"] == [f"OpenVINO GenAI was left out: {NO_PEERS}"]
    assert found["bars"][0]["holds"] is not bool(wrong)
    assert "texts on torch that differ from those of transformers" in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"target": TARGET}, "target: must be a GGUF file"), ({"tokens": 0}, "tokens: must be at least 1, not 0")],
)
def test_wrong_settings_are_refused(changed: dict[str, Any], message: str, file: Path) -> None:
    with pytest.raises(InvalidParameter, match=message):
        ReferenceSettings(**{"target": file, "prompts": 1, "tokens": 1, **changed})
