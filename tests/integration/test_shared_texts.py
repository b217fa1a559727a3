"""What a tenant's sessions said is proposed in its others: also by a verifier that was killed and started again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest

from specwire.client import Client
from specwire.client.events import Stats
from tests.faults.parts import Parts, parts
from tests.faults.streams import plain
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_address
from tests.wait import LIMIT_S, eventually

# Texts of this script do not repeat themselves, and depend on the last three tokens.
PLAIN = "scripted:5:memory=3:vocab=2000"
TARGET = f"{PLAIN}:delay_ms=1"
KEPT, DELETED, PRIVATE = (tuple(range(first, first + 20)) for first in (40, 140, 240))
LENGTH = 120
ADA, BOB = "the-token-of-ada", "the-token-of-bob"


@pytest.fixture(scope="module")
def owned() -> Iterator[Parts]:
    with parts() as owner:
        yield owner


def texts_known(metrics: str) -> int:
    """Texts that a verifier keeps, by its figures; -1 while it does not answer."""
    try:
        with urlopen(f"http://{metrics}/metrics", timeout=LIMIT_S) as answer:
            found = re.search(r"^specwire:shared_texts\{.*\} ([0-9.]+)$", answer.read().decode(), re.MULTILINE)
    except OSError:
        return -1
    return int(float(found[1])) if found else -1


def asked(address: str, token: str, prompt: Sequence[int], private: bool = False) -> tuple[str, Stats]:
    """A session's id and figures. What it says does not depend on what stands before the last three tokens."""
    with Client(address, token=token) as client:
        done = client.complete(prompt, max_tokens=LENGTH, ignore_eos=True, private=private, timeout=LIMIT_S)
    assert list(done.tokens) == plain(PLAIN, LENGTH, tuple(prompt))
    return done.session_id, done.stats


def test_a_verifier_that_starts_again_is_told_from_the_log(owned: Parts, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"ada {ADA}\nbob {BOB}\n")
    metrics = free_address()
    with RedisServer() as redis:
        verifier = owned.start("verify", TARGET, "--metrics", metrics)
        words = ("--verifier", verifier.ready(), "--redis-url", redis.url, "--api-keys", str(keys))
        address = owned.start("orchestrate", *words).ready()
        _, first = asked(address, ADA, KEPT)
        deleted, _ = asked(address, ADA, DELETED)
        with Client(address, token=ADA) as client:
            client.delete_session(deleted)
        asked(address, ADA, PRIVATE, private=True)
        verifier.restart()
        verifier.ready()
        assert eventually(lambda: texts_known(metrics) == 1)
        assert asked(address, ADA, (7, *KEPT))[1].accepted_ngram > LENGTH / 2
        for token, prompt in ((BOB, KEPT), (ADA, DELETED), (ADA, PRIVATE)):
            assert asked(address, token, (7, *prompt))[1].accepted_ngram < LENGTH / 10
    assert first.accepted_ngram < LENGTH / 10
