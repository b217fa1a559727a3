"""transformers with several sessions at once, in this process, on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest

from bench.batch.peer import BatchPeer
from bench.batch.rows import PADDED, PeerRow
from tests.bench.tiny import save_pair

PROMPTS = [list(b"def walk(tree):"), list(b"x = "), list(b"for node in tree: print(")]
TOKENS = 9


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> BatchPeer:
    target, _ = save_pair(tmp_path_factory.mktemp("pair"))
    peer = BatchPeer()
    peer.load({"target": str(target), "draft": None, "dtype": "float32", "threads": 1})
    return peer


@pytest.mark.parametrize("do", ["padded", "continuous"])
def test_each_session_says_what_it_says_alone(peer: BatchPeer, do: str) -> None:
    alone = [peer.generate({"prompt": prompt, "tokens": TOKENS, "variant": None})["tokens"] for prompt in PROMPTS]
    request = {"prompts": PROMPTS, "tokens": TOKENS, "longest": max(map(len, PROMPTS)), "most": 4}
    answer: dict[str, Any] = dict(peer.methods[do](request))
    assert answer["tokens"] == alone
    for times in answer["times"]:
        assert len(times) == TOKENS
        assert 0 < times[0] <= times[-1] <= answer["seconds"]
        assert times == sorted(times)


class Answering:
    """In place of the process."""

    def __init__(self, peer: BatchPeer) -> None:
        self.peer = peer

    def ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        return dict(self.peer.methods[request["do"]](request))


def test_a_row_tells_when_each_token_came(peer: BatchPeer) -> None:
    row = PeerRow(PADDED, Answering(peer), longest=30, most=4)  # type: ignore[arg-type]  # a process's stand-in
    together = row.run(PROMPTS[:2], TOKENS)
    assert [len(run.tokens) for run in together.runs] == [TOKENS] * 2
    assert together.runs[0].forwards == len(together.runs[0].arrivals) == TOKENS
    assert together.seconds >= together.runs[0].seconds
