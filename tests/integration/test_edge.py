"""specwire edge as a process: TLS to its verifier, drafting in process, clients as everywhere, clean ends."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import demo_pair
from bench.harness.certificates import Authority
from specwire.client import AsyncClient, Chunk
from tests.faults.parts import Parts, ServiceProcess
from tests.faults.streams import Stream, plain
from tests.integration.stack_process import failure, running
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import plain as decoded
from tests.ports import free_address
from tests.text import other_vocabularies
from tests.wait import asked_blocking, eventually, limits, until

TARGET = "scripted:7:vocab=64:delay_ms=10"
DRAFT = "scripted:7:vocab=64:agree=0.8"
PROMPT = "1 2 3"
ANY_PORT = ("--listen", "127.0.0.1:0")
LENGTH = ("--max-tokens", "60", "--ignore-eos")
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Give the paths of certificates, keys and authorities by name."""
    folder = tmp_path_factory.mktemp("tls")
    ours, others = Authority(), Authority("another authority")
    paths = {"ca": ours.save(folder, "ca"), "other-ca": others.save(folder, "other-ca")}
    for name, authority in (("server", ours), ("drafter", ours), ("stranger", others)):
        paths[name], paths[f"{name}-key"] = authority.sign().save(folder, name)
    return paths


@pytest.fixture(scope="module")
def cloud(owned: Parts, files: dict[str, str]) -> ServiceProcess:
    """Give a verifier that listens with TLS."""
    service = owned.start("verify", TARGET, "--tls-cert", files["server"], "--tls-key", files["server-key"])
    service.ready()
    return service


def generated(address: str, *more: str, prompt: str = PROMPT) -> list[int]:
    """What `specwire generate` brings from there, drafts having been accepted."""

    def done() -> Any:
        with running("generate", prompt, "--address", address, *LENGTH, "--json", *more) as command:
            assert command.wait(LIMIT_S) == 0, command.said()
            return json.loads(command.line())

    tokens: list[int] = asked_blocking(done, lambda told: told["stats"]["accepted"])["tokens"]
    return tokens


def expected() -> list[int]:
    return plain(TARGET, 60, prompt=(1, 2, 3))


def edge(verifier: str, *more: str) -> tuple[str, ...]:
    return ("edge", "--verifier", verifier, "--draft", DRAFT, *ANY_PORT, "--json", *more)


# The edge


def test_edge_draft_cloud_verify(cloud: ServiceProcess, files: dict[str, str]) -> None:
    with running(*edge(cloud.address, "--tls-ca", files["ca"])) as command:
        told = command.ready()
        assert (told["draft"], told["verifiers"], told["durable"]) == (DRAFT, [cloud.address], False)
        assert generated(told["address"]) == expected()
        assert list(command.family()) == [command.process.pid]
        command.process.send_signal(signal.SIGINT)
        assert command.wait(LIMIT_S) == 0
        assert command.said().splitlines()[-1] == "specwire edge: draining"
        assert command.nothing_left()


async def test_an_edge_finds_its_cloud_and_outlives_its_verifiers(owned: Parts) -> None:
    """All it is told is where to ask. Each verifier is killed in turn, so the one that decides is, too."""
    with RedisServer() as redis:
        first, second = (owned.start("verify", TARGET, "--registry", redis.url) for _ in range(2))
        cloud = owned.start("registry", "--registry", redis.url)
        await asyncio.to_thread(lambda: [each.ready() for each in (first, second, cloud)])
        with running("edge", "--cloud", cloud.address, "--draft", DRAFT, *ANY_PORT, "--json") as command:
            line = await asyncio.to_thread(command.ready)
            assert (line["cloud"], line["verifiers"], line["registry"]) == (cloud.address, [], "")
            tokens, killed = list[int](), list[ServiceProcess]()
            async with (
                AsyncClient(line["address"]) as client,
                aclosing(client.generate((1, 2, 3), max_tokens=600, ignore_eos=True, timeout=LIMIT_S)) as events,
            ):
                async for event in events:
                    tokens += event.tokens if isinstance(event, Chunk) else ()
                    if len(tokens) > 40 and not killed:
                        first.kill()
                        killed.append(first)
                        first.restart()
                        assert await asyncio.to_thread(first.ready)
                        await until(lambda: f"link to {first.address} is there again" in command.said())
                    elif len(tokens) > 240 and second not in killed:
                        second.kill()
                        killed.append(second)
            assert killed == [first, second]
            assert tokens == plain(TARGET, 600, prompt=(1, 2, 3))
            command.process.send_signal(signal.SIGINT)
            assert command.wait(LIMIT_S) == 0
            assert "Traceback" not in command.said()


def test_killed_and_started_again_its_text_goes_on(
    cloud: ServiceProcess, files: dict[str, str], tmp_path: Path
) -> None:
    address, length = free_address(), 200
    log = f"file:{tmp_path / 'log'}"
    words = (*edge(cloud.address, "--tls-ca", files["ca"], "--redis-url", log), "--listen", address)
    with running(*words) as first:
        first.ready()
        with Stream(address, patience=LIMIT_S, max_tokens=length) as stream:
            stream.until(40)
            first.process.kill()
            first.wait()
            with running(*words) as second:
                assert second.ready()["durable"]
                assert stream.rest() == plain(TARGET, length)
                assert stream.error is None


def test_a_second_signal_ends_it_at_once(cloud: ServiceProcess, files: dict[str, str]) -> None:
    """Its ready line, for people, says what a crash loses."""
    with running(*(word for word in edge(cloud.address, "--tls-ca", files["ca"]) if word != "--json")) as command:
        said, _, more = command.line().partition(" (")
        address = said.removeprefix("specwire edge: ready on ")
        assert more == f"draft {DRAFT}, verifier {cloud.address}, log in memory: lost in a crash)\n"
        with running("generate", PROMPT, "--address", address, "--max-tokens", "2000", "--ignore-eos") as reader:
            assert reader.process.stdout is not None
            assert reader.process.stdout.read(1)  # it is under way, so that the first signal drains for a while
            command.process.send_signal(signal.SIGINT)
            assert eventually(lambda: "draining" in command.said(), LIMIT_S)
            command.process.send_signal(signal.SIGINT)
            assert command.wait(LIMIT_S) == 128 + signal.SIGINT
            assert command.nothing_left()
            reader.process.send_signal(signal.SIGINT)  # else its patience is waited for
            assert reader.wait(LIMIT_S) == 128 + signal.SIGINT
            assert "Traceback" not in reader.said()


def test_it_waits_for_its_verifier(owned: Parts, dead_address: str) -> None:
    with running(*edge(dead_address)) as command:
        assert eventually(lambda: f"cannot connect to {dead_address}" in command.said(), LIMIT_S)
        owned.start("verify", TARGET, at=dead_address)
        assert generated(command.ready()["address"]) == expected()


def test_a_start_that_waits_can_be_given_up(dead_address: str) -> None:
    with running(*edge(dead_address)) as command:
        assert eventually(lambda: f"cannot connect to {dead_address}" in command.said(), LIMIT_S)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(LIMIT_S) == 0
        assert command.nothing_left()
        assert "Traceback" not in command.said()


def test_a_verifier_that_is_never_there(dead_address: str) -> None:
    """Its start ends at its limit, and says why: once that is long enough for a busy machine to learn it."""
    waits = limits(0.5)

    def said() -> tuple[str, float]:
        limit = next(waits)
        return failure(*edge(dead_address), "--start-timeout", f"{limit:g}"), limit

    told, limit = asked_blocking(said, lambda answer: "does not answer" not in answer[0])
    assert told == f"specwire edge: error: not ready within {limit:g} s: cannot connect to {dead_address}"


def test_a_drafter_with_another_tokenizer(owned: Parts, tmp_path: Path) -> None:
    verifier = owned.start("verify", str(demo_pair.TARGET))
    drafter = owned.start("draft", other_vocabularies.save(tmp_path / "pieces", other_vocabularies.sentencepiece))
    text = "# naïve 日本語 🙂\nimport os\n\ndef area(width, height):\n    "
    prompt = Tokenizer.from_file(str(demo_pair.TARGET / "tokenizer.json")).encode(text).ids
    at = ("--verifier", verifier.ready(), "--drafter", drafter.ready(), "--plan", "lockstep:3")
    orchestrator = owned.start("orchestrate", *at)
    tokens = generated(orchestrator.ready(), "--no-ngram", prompt=text)
    assert tokens == decoded(str(demo_pair.TARGET), prompt, len(tokens))
    assert "are shared (100% of a text); it drafts in these" in drafter.said()
    for part in (orchestrator, drafter, verifier):
        part.kill()


# Drafters that dial in


@pytest.fixture(scope="module")
def hub(owned: Parts, cloud: ServiceProcess, files: dict[str, str]) -> ServiceProcess:
    """Give an orchestrator that drafters with a certificate may join."""
    served = ("--tls-cert", files["server"], "--tls-key", files["server-key"], "--tls-client-ca", files["ca"])
    peers = ("--verifier", cloud.address, "--tls-ca", files["ca"])
    service = owned.start("orchestrate", *peers, *served, "--accept-drafters", at="0.0.0.0:0")
    service.ready()
    return service


def certified(files: dict[str, str]) -> tuple[str, ...]:
    return ("--tls-ca", files["ca"], "--tls-client-cert", files["drafter"], "--tls-client-key", files["drafter-key"])


def test_a_drafter_behind_nat(hub: ServiceProcess, files: dict[str, str]) -> None:
    with running("draft", DRAFT, "--connect", hub.address, *certified(files), "--json") as drafter:
        assert drafter.ready() == {"service": "draft", "connected": hub.address, "model": DRAFT}
        assert generated(hub.address, *certified(files)) == expected()
        hub.restart()
        assert hub.ready()
        assert eventually(lambda: f"joined {hub.address} again" in drafter.said(), LIMIT_S), drafter.said()
        assert generated(hub.address, *certified(files)) == expected()
        drafter.process.send_signal(signal.SIGTERM)
        assert drafter.wait(LIMIT_S) == 0
        assert drafter.nothing_left()


def test_a_drafter_that_is_refused_ends(hub: ServiceProcess, files: dict[str, str]) -> None:
    said = failure("draft", "scripted:7:vocab=65", "--connect", hub.address, *certified(files))
    assert said.startswith(f"specwire draft: error: {hub.address} refused this drafter: vocabulary mismatch: ")
