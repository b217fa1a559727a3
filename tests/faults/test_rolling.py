"""Every part of a deployment is restarted in turn while clients generate: none of them sees more than a pause."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.http_streams import HttpStream
from tests.faults.parts import Parts, ServiceProcess, check_keys_expire, check_ports_are_free, parts
from tests.faults.stack import DRAFT, PLAIN, TARGET
from tests.faults.streams import LIMIT_S, Stream, plain
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_address

LENGTH = 80
# How each client calls: all at once.
KINDS: Sequence[type[Stream]] = (Stream, Stream, Stream, HttpStream, HttpStream)
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

    def __init__(self, serving: Sequence[ServiceProcess]) -> None:
        self.done = 0
        self._addresses = {Stream: [each.address for each in serving], HttpStream: [each.http for each in serving]}
        self._stopping = threading.Event()
        self._counted = threading.Condition()
        self._pool = ThreadPoolExecutor(len(KINDS))
        self._clients = [self._pool.submit(self._generate, kind, number) for number, kind in enumerate(KINDS)]

    def _generate(self, kind: type[Stream], number: int) -> None:
        while not self._stopping.is_set():
            prompt = (number + 2, self.done % 60)
            with kind(_from(self._addresses[kind], number), prompt, LIMIT_S, max_tokens=LENGTH) as stream:
                stream.check_whole(plain(PLAIN, LENGTH, prompt))
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


def _from(addresses: Sequence[str], number: int) -> list[str]:
    """Each client asks another one first."""
    first = number % len(addresses)
    return [*addresses[first:], *addresses[:first]]


def roll(service: ServiceProcess) -> None:
    """Ask it to stop, then start it again."""
    service.send(signal.SIGTERM)
    assert service.wait() == 0
    service.restart()
    service.ready()


def test_a_rolling_restart_fails_no_request(owned: Parts) -> None:
    """One drafter dials in, the other and the verifiers are found by a registry, in the same Redis as the log. Clients
    are served by an orchestrator and by an edge, which drafts itself.
    """
    with RedisServer() as log:
        found = ("--registry", log.url)
        peers = [*(owned.start("verify", TARGET, *found, *GRACE) for _ in "12"), owned.start("draft", DRAFT, *found)]
        known = (*found, "--redis-url", log.url, *GRACE)
        fronts = (("orchestrate", "--accept-drafters"), ("edge", "--draft", DRAFT))
        serving = [owned.start(*words, *known, "--http", free_address()) for words in fronts]
        for each in (*peers, *serving):
            each.ready()
        joined = owned.start("draft", DRAFT, "--connect", serving[0].address)
        joined.ready()
        load = Load(serving)
        try:
            load.more(len(KINDS))
            for service in (*peers, joined, *serving):
                roll(service)
                load.more(len(KINDS))
            log.end()  # saves everything first
            log.start()
            load.more(2 * len(KINDS))
            load.stop()
        finally:
            load.close()
        for service in (*serving, *peers, joined):
            service.send(signal.SIGTERM)
            assert service.wait() == 0
            assert "Traceback" not in service.said()
        check_ports_are_free(*(each.address for each in (*serving, *peers)), *(each.http for each in serving))
        check_keys_expire(log)
