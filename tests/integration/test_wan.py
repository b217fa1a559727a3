"""Over a long line: real processes on both sides of a relay that delays, holds back and cuts; the text is the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.child import descendants
from bench.wan import run
from bench.wan.disciplines import DISCIPLINES
from bench.wan.rig import Orchestration, WanPair, WanRig, rig
from specwire.core.law.sampling import Sampling
from tests.faults.streams import Stream, plain

TARGET = "scripted:7:vocab=64:delay_ms=4"
SAMPLED = Sampling(temperature=0.9, seed=11)
TOKENS = 120
TEXTBOOK = Orchestration("lockstep:4", patient=True)


@pytest.fixture(scope="module")
def line() -> Iterator[WanRig]:
    """Give both sides of the line; at the end nothing of them is left."""
    before = set(descendants(os.getpid()))
    pair = WanPair(f"{TARGET}:device=cloud", "scripted:7:vocab=64:agree=0.8:delay_ms=1:device=edge")
    with rig(pair, [Orchestration(), TEXTBOOK]) as started:
        yield started
    assert set(descendants(os.getpid())) <= before


@pytest.fixture(params=[Orchestration(), TEXTBOOK], ids=["default", "textbook"])
def address(line: WanRig, request: pytest.FixtureRequest) -> str:
    return line.addresses[request.param]


@pytest.mark.parametrize("rtt_ms", [0, 40])
def test_the_text_does_not_depend_on_the_line(line: WanRig, address: str, rtt_ms: float) -> None:
    line.shape(rtt_ms)
    with Stream(address, max_tokens=TOKENS) as stream:
        assert stream.rest() == plain(TARGET, TOKENS)
    with Stream(address, max_tokens=TOKENS, temperature=0.9, seed=11) as stream:
        assert stream.rest() == plain(TARGET, TOKENS, sampling=SAMPLED)


def test_jitter_and_a_narrow_line_change_nothing(line: WanRig, address: str) -> None:
    for link in line.links:
        link.shape(20, jitter_ms=15, mbit=1)
    with Stream(address, max_tokens=TOKENS) as stream:
        assert stream.rest() == plain(TARGET, TOKENS)


# ----------------------------------------------------------------------------------------------------------------------
# The measurement over a line in its shortest form: real processes, no word about their speed.


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_quick_measurement_ends_with_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "wan.json"
    before = set(descendants(os.getpid()))

    code = run.main(["--quick", "--tokens", "24", "--out", str(out)])

    printed = capsys.readouterr().out
    assert code == 0, printed
    assert set(descendants(os.getpid())) <= before
    found = json.loads(out.read_text())
    (cell,) = found["emulated"]
    assert cell["name"] == "R80-d8-a0.8-s0-b0.02"
    assert cell["texts_equal"]
    assert len(found["raw"]) == len(DISCIPLINES)
    assert [one["rule"] for one in found["wire"] if not one["trees"]] == list(run.QUICK_RULES)
    assert [one["rule"] for one in found["wire"] if one["trees"]] == ["greedy"]
    assert all(len(one["hops"]) == 4 for one in found["wire"])
    held = {bar["name"]: bar["holds"] for bar in found["bars"]}
    # What does not depend on this machine's speed.
    assert held["R80-d8-a0.8-s0-b0.02: texts that differ"]
    assert all(holds for name, holds in held.items() if name.endswith("bytes per proposed token"))
    assert str(tmp_path) not in out.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "tokens: must be from 1 to 1024, not 0"),
        (["--repeats", "99"], "repeats: must be from 1 to 64, not 99"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(words) == 2
    assert message in capsys.readouterr().err
