"""Others' benchmarks, unmodified: what AIPerf and `vllm bench serve` read of speculation is what the server counted.

AIPerf takes 0.9 GB, so no target installs it: where it is wanted, make an environment `.venv/aiperf` that has it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bench.vllm.server import MISSING, VLLM
from demo_pair import DRAFT, TARGET
from tests.orchestrator.http.front import Front, front
from tests.orchestrator.http.test_figures import benchmark_reading
from tests.wait import asked_blocking

T = TypeVar("T")

# The command `vllm bench serve`: vLLM's build for CPUs has another name, which its command line does not find.
BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

AIPERF = Path(sys.prefix, "aiperf", "bin", "aiperf")
LIMIT_S = 300.0
REQUESTS, TOKENS = 4, 48


@pytest.fixture(scope="module")
def door() -> Iterator[Front]:
    with front(str(TARGET), str(DRAFT)) as running:
        yield running


def told_by(tool: Path, *arguments: str, folder: Path) -> str:
    """What the tool, which must succeed, says. It finds the pair's tokenizer as one of a hub that it cannot ask."""
    cached = folder / "hub" / "models--demo--pair"
    (cached / "refs").mkdir(parents=True, exist_ok=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(TARGET, cached / "snapshots" / ("0" * 40), dirs_exist_ok=True)
    alone = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        (str(tool), *arguments),
        cwd=folder,
        env={**os.environ, **alone},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def counts_between(door: Front, run: Callable[[], T]) -> tuple[T, dict[str, int]]:
    """What `run` gives, and by how much the counters of /metrics rose meanwhile, once draft tokens were accepted."""

    def both() -> tuple[T, dict[str, int]]:
        before = benchmark_reading(door.client.get("/metrics").text)
        found = run()
        after = benchmark_reading(door.client.get("/metrics").text)
        return found, {name: count - before.get(name, 0) for name, count in after.items()}

    return asked_blocking(both, lambda each: each[1]["accepted"] > 0)


@pytest.mark.skipif(not AIPERF.exists(), reason="AIPerf is not there: an environment .venv/aiperf")
def test_aiperf_reads_what_speculation_did_for_each_request(door: Front, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"text": "def add_{number}(a, b):"}}\n' for number in range(REQUESTS)))
    arguments = ["profile", "--model", door.model, "--tokenizer", "demo/pair", "--url", door.url]
    arguments += ["--use-server-token-count", "--endpoint-type", "chat", "--streaming", "--input-file", str(prompts)]
    arguments += ["--custom-dataset-type", "single_turn", "--request-count", str(REQUESTS), "--concurrency", "2"]
    arguments += ["--extra-inputs", f'{{"max_tokens": {TOKENS}, "ignore_eos": true, "temperature": 0}}']
    arguments += ["--export-level", "records", "--ui", "none", "--artifact-dir", str(tmp_path / "out")]

    def run() -> str:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return told_by(AIPERF, *arguments, folder=tmp_path)

    said, counted = counts_between(door, run)
    assert "malformed" not in said
    lines = (tmp_path / "out" / "profile_export.jsonl").read_text().splitlines()
    records = [json.loads(line)["spec_decode_acceptance"] for line in lines]
    assert [each["completion_tokens"] for each in records] == [TOKENS] * REQUESTS
    assert sum(each["num_spec_steps"] for each in records) == counted["drafts"]
    assert sum(each["num_draft_tokens"] for each in records) == counted["draft_tokens"]
    assert sum(each["num_accepted_draft_tokens"] for each in records) == counted["accepted"]


@pytest.mark.skipif(not VLLM.exists(), reason=MISSING)
def test_vllms_benchmark_reads_acceptance(door: Front, tmp_path: Path) -> None:
    arguments = ["--backend", "openai", "--base-url", door.url, "--model", door.model]
    arguments += ["--tokenizer", str(TARGET), "--dataset-name", "random", "--random-input-len", "24"]
    arguments += ["--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS), "--ignore-eos"]
    arguments += ["--temperature", "0", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "out.json"]

    def run() -> dict[str, Any]:
        told_by(VLLM.parent / "bin" / "python", "-c", BENCH_SERVE, *arguments, folder=tmp_path)
        found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        return found

    told, counted = counts_between(door, run)
    assert (told["completed"], told["total_output_tokens"]) == (REQUESTS, REQUESTS * TOKENS)
    assert told["spec_decode_num_drafts"] == counted["drafts"]
    assert told["spec_decode_draft_tokens"] == counted["draft_tokens"]
    assert told["spec_decode_accepted_tokens"] == counted["accepted"]
    assert told["spec_decode_acceptance_length"] == pytest.approx(1 + counted["accepted"] / counted["drafts"])
    rates = told["spec_decode_per_position_acceptance_rates"]
    assert rates[0] == pytest.approx(counted["at 0"] / counted["drafts"])
