"""Every part of a stack is restarted in turn while clients generate: none of them sees more than a pause."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from specwire.client import Client
from specwire.core.limits import FinishReason
from tests.faults.parts import Parts, Service, parts
from tests.faults.stack import DRAFT, PLAIN, TARGET
from tests.faults.streams import LIMIT_S, plain
from tests.orchestrator.redis_for_tests import RedisServer

LENGTH = 80
CLIENTS = 3
# Less than a generation takes: some are handed over, some end.
GRACE = ("--grace", "0.3")


@pytest.fixture
def owned() -> Iterator[Parts]:
    """Give the owner of the processes."""
    with parts() as owner:
        yield owner
    assert owner.living() == []


class Load:
    """Clients that generate one text after the other until `stop`; each result is checked."""

    def __init__(self, addresses: list[str]) -> None:
        self.done = 0
        self._addresses = addresses
        self._stopping = threading.Event()
        self._counted = threading.Condition()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._generate, number) for number in range(CLIENTS)]

    def _generate(self, number: int) -> None:
        with Client(self._addresses, patience=LIMIT_S) as client:
            while not self._stopping.is_set():
                prompt = (number + 2, self.done % 60)
                done = client.complete(prompt, max_tokens=LENGTH, ignore_eos=True, timeout=2 * LIMIT_S)
                assert (done.finish_reason, list(done.tokens)) == (FinishReason.LENGTH, plain(PLAIN, LENGTH, prompt))
                with self._counted:
                    self.done += 1
                    self._counted.notify_all()

    def more(self, texts: int) -> None:
        """Wait for so many more; raises what a client has failed with."""
        wanted = self.done + texts
        with self._counted:
            while self.done < wanted:
                came = self._counted.wait(LIMIT_S)
                self._raise()
                assert came, "no text came"

    def _raise(self) -> None:
        for client in self._clients:
            if client.done():
                client.result()

    def stop(self) -> None:
        self._stopping.set()
        for client in self._clients:
            client.result(2 * LIMIT_S)

    def close(self) -> None:
        self._stopping.set()
        self._pool.shutdown(wait=False)


def roll(service: Service) -> None:
    """Ask it to stop, then start it again."""
    service.send(signal.SIGTERM)
    assert service.wait() == 0
    service.restart()
    service.ready()


def test_a_rolling_restart_fails_no_request(owned: Parts) -> None:
    with RedisServer() as log:
        peers = [*(owned.start("verify", TARGET, *GRACE) for _ in "12"), *(owned.start("draft", DRAFT) for _ in "12")]
        flags = ("--verifier", "--verifier", "--drafter", "--drafter")
        named = [word for flag, peer in zip(flags, peers, strict=True) for word in (flag, peer.ready())]
        serving = [owned.start("orchestrate", *named, "--redis-url", log.url, *GRACE) for _ in "12"]
        load = Load([each.ready() for each in serving])
        try:
            load.more(CLIENTS)
            for service in (*peers, *serving):
                roll(service)
                load.more(CLIENTS)
            load.stop()
        finally:
            load.close()
        for service in (*peers, *serving):
            assert "Traceback" not in service.said()
