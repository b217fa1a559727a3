"""Drafters of specwire for an unmodified `vllm serve`: its texts stay its own, whatever becomes of a drafter.

The drafter wants certificates and a token, which vLLM's process is told of as a user would tell it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.harness.certificates import Authority
from bench.vllm.server import MISSING, START_S, VLLM, VllmServer, running
from demo_pair import DRAFT, TARGET
from tests.faults.parts import Parts, ServiceProcess
from tests.faults.test_demo_pair import asked, check_choices
from tests.options import private
from tests.ports import free_address
from tests.wait import eventually

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason=MISSING)

LENGTH, TOKEN = 160, "the-token-of-vllm"
ACCEPTED, TESTED = "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with certificates and a token."""
    folder, authority = tmp_path_factory.mktemp("keys"), Authority()
    authority.save(folder, "ca")
    authority.sign().save(folder, "own")
    private(folder / "keys", f"vllm {TOKEN}\n")
    private(folder / "token", TOKEN)
    return folder


@pytest.fixture(scope="module")
def drafter(owned: Parts, files: Path) -> ServiceProcess:
    """Give a drafter of the pair."""
    own = ("--tls-cert", f"{files}/own.pem", "--tls-key", f"{files}/own.key", "--tls-client-ca", f"{files}/ca.pem")
    keys = ("--api-keys", f"{files}/keys")
    service = owned.start("draft", str(DRAFT), "--threads", "1", "--slots", "8", *own, *keys)
    service.ready()
    return service


@pytest.fixture(scope="module")
def server(drafter: ServiceProcess, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Give vLLM with that drafter, and nothing proposed from the texts themselves.

    The drafter streams whatever that brings: here it has vLLM's cores, and is off most of the time by itself.
    """
    shown = f"--tls-client-cert {files}/own.pem --tls-client-key {files}/own.key --token-file {files}/token"
    told = f"--drafter {drafter.address} --no-ngram --plan stream:1,8 --tls-ca {files}/ca.pem {shown}"
    with running(VllmServer(TARGET, tmp_path_factory.mktemp("vllm"), free_address(), proposer=told)) as one:
        yield one


def drafted(server: VllmServer) -> bool:
    """Whether a drafter's token was accepted in a text that is written now, which is the target's own."""
    before = server.counted(ACCEPTED)
    tokens = server.complete(asked()[0].prompt, LENGTH)
    check_choices(asked()[0], tokens)
    return server.counted(ACCEPTED) > before


def test_a_drafter_far_away_drafts_for_it(server: VllmServer) -> None:
    assert eventually(lambda: drafted(server))


def test_texts_at_once_are_each_their_own(server: VllmServer) -> None:
    prompt = asked()[0].prompt
    prompts = [prompt[: len(prompt) - cut] for cut in range(6)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        told = list(clients.map(lambda each: server.complete(each, LENGTH), prompts))
    for each, tokens in zip(prompts, told, strict=True):
        assert len(tokens) == LENGTH
        check_choices(type(asked()[0])(each), tokens)


def test_its_own_sampling_goes_on(server: VllmServer) -> None:
    before = server.counted(TESTED)
    assert eventually(
        lambda: (
            len(server.complete(asked()[0].prompt, LENGTH, temperature=0.8)) == LENGTH
            and server.counted(TESTED) > before
        )
    )


def test_a_drafter_dies_in_the_middle_of_a_text_and_comes_back(server: VllmServer, drafter: ServiceProcess) -> None:
    assert eventually(lambda: drafted(server))
    with ThreadPoolExecutor(1) as client:
        told = client.submit(server.complete, asked()[0].prompt, 4 * LENGTH)
        written = server.counted("generation_tokens")
        assert eventually(lambda: server.counted("generation_tokens") > written + LENGTH)
        drafter.kill()
        tokens = told.result()
    assert len(tokens) == 4 * LENGTH
    check_choices(asked()[0], tokens)
    assert not drafted(server)
    drafter.restart()
    drafter.ready()
    assert eventually(lambda: drafted(server))


def test_with_nobody_to_draft_the_texts_propose_for_themselves(tmp_path: Path) -> None:
    with running(VllmServer(TARGET, tmp_path, free_address())) as alone:
        assert eventually(lambda: drafted(alone))


def test_options_that_cannot_be_are_named_at_start(tmp_path: Path) -> None:
    server = VllmServer(TARGET, tmp_path, free_address(), proposer="--draftor a:1")
    try:
        assert server.process.process.wait(START_S) != 0
        assert "SPECWIRE_PROPOSER: unrecognized arguments: --draftor" in server.process.said()
    finally:
        server.end()
