"""The test on other engines: transformers' generator, and whatever serves completions over HTTP."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.harness.runs import BenchError
from bench.laws import peer
from bench.laws.pair import LETTERS, PROMPT, SEEDS, joint, model, write
from bench.laws.peer import EngineWay, server_way, transformers_ways
from scripts.figures.exact import peers_table
from tests.orchestrator.http.front import front

TEXTS = 150
# Of what a sampler of another law would be refused with.
LIMIT = 1e-5


def test_the_law_is_one_and_no_even_one() -> None:
    law = joint(model(SEEDS[0]), 2)
    assert len(law) == len(LETTERS) ** 2
    assert sum(law.values()) == pytest.approx(1.0)
    assert max(law.values()) > 3 / len(law)
    assert law != joint(model(SEEDS[1]), 2)


def test_the_test_accepts_plain_sampling_and_refuses_another_model_s() -> None:
    plain, assisted = transformers_ways()
    assert (plain.control, assisted.control) == (True, False)
    (right,) = peer.judged([plain], TEXTS)
    assert not right.refused
    other = EngineWay(
        "transformers", "the drafter alone", False, lambda count: peer._generated(model(SEEDS[1]), None, count)
    )
    assert peer.judged([other], TEXTS)[0].p < LIMIT
    assert sum(assisted.texts(3).values()) == 3


def test_a_server_s_texts_are_judged_alike(tmp_path: Path) -> None:
    """Our own, whose law is the target's with a drafter of another one."""
    target, draft = write(tmp_path)
    with front(str(target), str(draft)) as door:
        url = f"{door.url}/v1"
        for more in ({}, {"rule": "rejection"}):
            (verdict,) = peer.judged([server_way(url, "target", more)], TEXTS)
            assert not verdict.refused
        with pytest.raises(BenchError, match=r"refuses: .*frob"):
            server_way(url, "target", {"frob": 1}).texts(1)
        with pytest.raises(BenchError, match=f"not 6 of the letters {LETTERS}"):
            server_way(url, "target", {"max_tokens": 2}).texts(1)
    with pytest.raises(BenchError, match="does not answer"):
        server_way(url, "target", {}).texts(1)
    assert len(PROMPT) == 2


def test_what_is_found_is_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ways() -> list[EngineWay]:
        return [EngineWay("some engine", "plain", True, lambda count: Counter({(0, 0, 0): count}))]

    monkeypatch.setattr(peer, "transformers_ways", ways)
    monkeypatch.setattr(peer, "openvino_ways", list)
    out = tmp_path / "peers.json"
    assert peer.main(["--sessions", "500", "--out", str(out)]) == 1, "a control that is refused"
    found = json.loads(out.read_text())
    assert "| some engine | plain | 500 |" in peers_table(found)
    (row,) = found["rows"]
    assert (row["engine"], row["refused"], row["texts"]) == ("some engine", True, 500)
    assert "refused" in capsys.readouterr().out
    assert peer.main(["--write", str(tmp_path)]) == 0
    assert (tmp_path / "draft" / "tokenizer.json").exists()
    assert peer.main(["--sessions", "0"]) == 2
    assert peer.main(["--url", "http://127.0.0.1:9/v1"]) == 1
