"""Keys of running processes change in their files: who is revoked is ended, texts of others go on to their end."""

from __future__ import annotations

import json
from http.client import IncompleteRead
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest

from specwire.client import Chunk, Client, Finished, SpecwireError
from tests.faults.parts import Parts, ServiceProcess
from tests.faults.streams import LIMIT_S, PROMPT, plain
from tests.options import private
from tests.ports import free_address
from tests.wait import eventually, limits

TARGET, PLAIN = "scripted:7:vocab=64:delay_ms=8", "scripted:7:vocab=64"
DRAFT = "scripted:7:vocab=64:agree=0.8"
ADA, BOB, FIRST, ATTIC, CELLAR = (
    f"the-token-of-{name}" for name in ("ada", "bob", "one-orchestrator", "the-attic", "the-cellar")
)
RENEWED = [f"the-same-one-s-token-number-{number}" for number in (2, 3, 4)]
LENGTH = 1200


def said(service: ServiceProcess, *words: str) -> bool:
    """Whether a line of its log has all of the words; waits for it."""
    return eventually(lambda: any(all(word in line for word in words) for line in service.said().splitlines()))


def renewed(folder: Path, orchestrator: ServiceProcess) -> bool:
    """Give orchestrator and verifier another key until a link was ended for the old one.

    A link that a busy machine has broken just then is dialled with the new one, and nothing ends it.
    """
    for token, limit_s in zip(RENEWED, limits(10.0), strict=False):
        private(folder / "shown", token)
        private(folder / "peers", f"orchestrator {token}\n")
        if eventually(lambda: "lost: UNAUTHENTICATED" in orchestrator.said(), limit_s):
            return True
    return False


def streamed(url: str, token: str) -> Request:
    body = {"prompt": list(PROMPT), "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    return Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)


def test_keys_change_under_running_texts(owned: Parts, tmp_path: Path) -> None:
    def put(name: str, text: str) -> str:
        return private(tmp_path / name, text)

    http = free_address()
    peers, shown = put("peers", f"orchestrator {FIRST}\n"), put("shown", FIRST)
    clients, drafters = put("clients", f"ada {ADA}\nbob {BOB}\n"), put("drafters", f"attic {ATTIC}\n")
    verifier = owned.start("verify", TARGET, "--patient", "--api-keys", peers)
    orchestrator = owned.start(
        "orchestrate",
        *("--verifier", verifier.ready(), "--token-file", shown, "--api-keys", clients, "--http", http),
        *("--accept-drafters", "--drafter-keys", drafters),
    )
    address = orchestrator.ready()
    drafting = put("drafting", ATTIC)
    drafter = owned.start("draft", DRAFT, "--connect", address, "--token-file", drafting)
    drafter.ready()
    ada, bob = Client(address, token=ADA, patience=0.0), Client(address, token=BOB, patience=0.0)
    with ada, bob, urlopen(streamed(f"http://{http}", ADA), timeout=LIMIT_S) as hers_too:
        hers, his = (
            each.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True, timeout=2 * LIMIT_S) for each in (ada, bob)
        )
        text: list[int] = []
        for stream, taken in ((hers, []), (his, text)):
            while not taken:
                event = next(stream)
                taken += event.tokens if isinstance(event, Chunk) else ()
        assert hers_too.readline().startswith(b"data: ")

        put("clients", f"bob {BOB}\n")
        with pytest.raises(SpecwireError) as ended:
            list(hers)
        assert ended.value.code is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(IncompleteRead):
            hers_too.read()
        with pytest.raises(HTTPError) as refused:
            urlopen(streamed(f"http://{http}", ADA), timeout=LIMIT_S)
        assert refused.value.code == 401

        put("drafters", f"cellar {CELLAR}\n")
        assert said(drafter, "refused this drafter: authorization: this token is not known here; dialling again")
        put("drafting", CELLAR)
        assert said(drafter, f"joined {address} again")

        assert renewed(tmp_path, orchestrator)
        assert said(orchestrator, verifier.address, "is there again")

        ends = []
        for event in his:
            text += event.tokens if isinstance(event, Chunk) else ()
            ends += [event] if isinstance(event, Finished) else []
    assert text == plain(PLAIN, LENGTH)
    assert len(ends) == 1
