"""The benchmarks around vLLM in short: `LLM.generate`, and the law of texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.laws import vllm as laws
from bench.vllm import run
from bench.vllm.run import IDLE, LEAST_TURNS, LIBRARY, OFF, TEMPERATURES
from bench.vllm.server import MISSING, VLLM, VllmLibrary
from demo_pair import TARGET
from scripts.figures.exact import laws_table
from tests.faults.test_demo_pair import asked, check_choices

pytestmark = [pytest.mark.bench, pytest.mark.skipif(not VLLM.exists(), reason=MISSING)]


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


def test_a_few_rows_are_measured_alone_and_not_into_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--only", IDLE]) == 2
    assert "--out must name another file" in capsys.readouterr().err
    out = tmp_path / "few.json"
    words = ["--prompts", "1", "--tokens", "16", "--repeats", "1", "--sessions", "1", "--out", str(out)]
    assert run.main([*words, "--only", LIBRARY]) in (0, 1)
    lines = json.loads(out.read_text())["lines"]
    assert [(line["row"], line["temperature"]) for line in lines] == [
        (row, temperature) for temperature in TEMPERATURES for row in (OFF, LIBRARY)
    ]
    turns = [turn for _, _, turn, row, _ in json.loads(out.read_text())["seconds_of_turns"] if row == LIBRARY]
    assert len(turns) == len(TEMPERATURES) * LEAST_TURNS


def test_the_law_of_few_texts(tmp_path: Path) -> None:
    out = tmp_path / "laws.json"
    assert laws.main(["--sessions", "400", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [bar["holds"] for bar in found["bars"]] == [True] * 4 + [False]
    assert laws.ELSEWHERE in laws_table(found)
