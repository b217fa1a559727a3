"""The benchmarks around vLLM in short: `LLM.generate`, the account of a step, the law of texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.laws import vllm as laws
from bench.vllm import profile
from bench.vllm.server import VLLM, VllmLibrary
from bench.vllm.service import ENGINE, ENGINE_OFF
from demo_pair import TARGET
from scripts.figures.exact import laws_table
from scripts.figures.speed import vllm_profile_table
from tests.faults.test_demo_pair import asked, check_choices

pytestmark = [pytest.mark.bench, pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make setup-vllm")]


def test_vllm_as_a_library_writes_the_target_s_texts(tmp_path: Path) -> None:
    library, (one, *_) = VllmLibrary(TARGET, tmp_path, sessions=2), asked()
    try:
        library.ready()
        texts = library.generate([one.prompt, one.prompt[:-3]], 24, 0.0)
    finally:
        library.end()
    for prompt, tokens in zip((one.prompt, one.prompt[:-3]), texts, strict=True):
        assert len(tokens) == 24
        check_choices(type(one)(prompt), tokens)


def test_a_step_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    words = ["--prompts", "4", "--tokens", "24", "--sessions", "1", "4", "--out", str(out)]
    assert profile.main(words) == 0
    assert "vLLM's forward" in capsys.readouterr().out
    found = json.loads(out.read_text())
    accounts = {(each["row"], each["level"]): each for each in found["accounts"]}
    assert set(accounts) == {(row, level) for row in ("off", ENGINE_OFF, ENGINE[0]) for level in (1, 4)}
    for (row, level), each in accounts.items():
        assert 0 < each["tokens"] <= 24 * level
        assert (row == "off") == (not each["parts_ms"])
        assert sum(each["parts_ms"].values()) == pytest.approx(each["step_ms"] if each["parts_ms"] else 0.0)
        assert all(value >= 0 for value in each["cpu_ms"].values())
    assert "from one to the next" in vllm_profile_table(found)


def test_the_law_of_few_texts(tmp_path: Path) -> None:
    out = tmp_path / "laws.json"
    assert laws.main(["--sessions", "400", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [bar["holds"] for bar in found["bars"]] == [True] * 4 + [False]
    assert laws.ELSEWHERE in laws_table(found)
