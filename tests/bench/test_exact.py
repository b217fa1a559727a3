"""bench.exact: a text that changes is counted under what changed it, and fails the bench where none may change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import exact
from bench.exact import AGAIN, DRAFTED, IN_COMPANY, KILLED, Written
from demo_pair import TARGET
from tests.lm.gguf_files import written

PROMPTS = 18


class Rig:
    """Texts that are their prompts, but for the last prompt's where it is written as `spoilt` says."""

    def __init__(self, spoilt: str) -> None:
        self._spoilt, self._known = spoilt, set[tuple[float, int]]()

    def _written(self, prompt: Sequence[int], how: str, accepted: int = 0) -> Written:
        changed = how == self._spoilt and prompt[0] == PROMPTS - 1
        return Written((*prompt, 99) if changed else tuple(prompt), accepted)

    def alone(self, prompt: Sequence[int], temperature: float, *, drafting: bool) -> Written:
        known = (temperature, prompt[0]) in self._known
        self._known.add((temperature, prompt[0]))
        return self._written(prompt, DRAFTED if drafting else AGAIN if known else "plain", 2 * drafting)

    def together(self, prompts: Sequence[Sequence[int]], temperature: float, *, kill: bool = False) -> list[Written]:
        assert len(prompts) in (16, PROMPTS - 16)
        return [self._written(prompt, KILLED if kill else IN_COMPANY) for prompt in prompts]


@pytest.mark.parametrize("how", ["", AGAIN, DRAFTED, IN_COMPANY, KILLED])
def test_a_text_that_changes_is_counted(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[number, number + 1] for number in range(PROMPTS)]
    monkeypatch.setattr(exact, "prompts_of", lambda _: prompts)
    monkeypatch.setattr(exact, "Rig", lambda *_: Rig(how))
    out = tmp_path / "out.json"
    asked = ["--target", written(TARGET, tmp_path / "demo.gguf"), "--out", str(out)]
    for way, code in (("default", 1 if how else 0), ("llamacpp", 0)):
        assert exact.main([*asked, "--ways", way]) == code
        rows = json.loads(out.read_text())["rows"]
        assert [row["temperature"] for row in rows] == [0.0, 0.8]
        for row in rows:
            assert row["changed"] == {each: int(each == how) for each in (AGAIN, DRAFTED, IN_COMPANY, KILLED)}
            assert (row["way"], row["texts"], row["accepted"]) == (way, PROMPTS, 2 * PROMPTS)
    assert AGAIN in capsys.readouterr().out
