"""Every hop with TLS, certificates on both sides and tokens, as the command line sets it up, between real processes."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from bench.harness.certificates import Authority
from specwire.client import Client, ClientTls, SpecwireError
from tests.faults.parts import Parts, ServiceProcess
from tests.faults.streams import LIMIT_S, PROMPT, plain
from tests.options import private
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.redis_tls import encrypted, url_of
from tests.ports import free_address
from tests.wait import asked_blocking

TARGET, PLAIN = "scripted:7:vocab=64:delay_ms=8", "scripted:7:vocab=64"
DRAFT = "scripted:7:vocab=64:agree=0.8"
ADA, BOB, SERVING, ATTIC = (f"the-token-of-{name}" for name in ("ada", "bob", "the-orchestrator", "the-attic"))
LENGTH = 60


class Files:
    """Certificates and tokens in a folder, as flags."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self._ca = self.authority.save(folder, "ca")
        self._cert, self._key = self.authority.sign().save(folder, "own")

    @property
    def tls(self) -> ClientTls:
        return self.authority.client(self.authority.sign())

    def log(self, address: str) -> tuple[str, ...]:
        """The session log behind TLS."""
        url = url_of(address, self.authority, self.folder, self.authority)
        return "--redis-url", url

    def private(self, name: str, text: str) -> str:
        return private(self.folder / name, text)

    def listening(self) -> tuple[str, ...]:
        return "--tls-cert", self._cert, "--tls-key", self._key, "--tls-client-ca", self._ca

    def dialling(self, name: str, token: str) -> tuple[str, ...]:
        shown = ("--token-file", self.private(f"token-of-{name}", token))
        return "--tls-ca", self._ca, "--tls-client-cert", self._cert, "--tls-client-key", self._key, *shown


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Give what all processes of this file use."""
    return Files(tmp_path_factory.mktemp("secured"))


@pytest.fixture(scope="module")
def log(redis: RedisServer, files: Files) -> Iterator[str]:
    """Give the address of the session log, where everybody must show a certificate."""
    with encrypted(redis, files.authority, files.folder, mutual=True) as address:
        yield address


@pytest.fixture(scope="module")
def figures() -> str:
    """Give the address where the orchestrator tells its figures."""
    return free_address()


@pytest.fixture(scope="module")
def serving(owned: Parts, files: Files, log: str, figures: str) -> ServiceProcess:
    """Give an orchestrator between a log, a verifier, a drafter that it dials and one that dials in."""
    peers = files.private("orchestrators", f"orchestrator {SERVING}\n")
    verifier = owned.start("verify", TARGET, "--patient", *files.listening(), "--api-keys", peers)
    near = owned.start("draft", DRAFT, *files.listening(), "--api-keys", peers)
    orchestrator = owned.start(
        "orchestrate",
        *("--verifier", verifier.ready(), "--drafter", near.ready(), "--plan", "lockstep:3"),
        *files.listening(),
        *files.dialling("orchestrator", SERVING),
        *("--api-keys", files.private("clients", f"ada {ADA}\nbob {BOB}\n")),
        *("--accept-drafters", "--drafter-keys", files.private("drafters", f"attic {ATTIC}\n")),
        *files.log(log),
        *("--metrics", figures),
    )
    orchestrator.ready()
    return orchestrator


def test_who_has_certificate_and_token_is_served(serving: ServiceProcess, files: Files) -> None:
    with Client(serving.address, tls=files.tls, token=ADA) as ada:
        done = asked_blocking(
            lambda: ada.complete(PROMPT, max_tokens=LENGTH, ignore_eos=True, timeout=LIMIT_S),
            lambda told: told.stats.accepted > told.stats.accepted_ngram,  # a drafter's: it is reached
        )
        assert list(done.tokens) == plain(PLAIN, LENGTH)
        assert ada.get_session(done.session_id, timeout=LIMIT_S).prompt_tokens == len(PROMPT)
    with Client(serving.address, tls=files.tls, token=BOB) as bob, pytest.raises(SpecwireError) as unknown:
        bob.get_session(done.session_id, timeout=LIMIT_S)
    assert unknown.value.code is grpc.StatusCode.NOT_FOUND


def test_who_lacks_either_is_not(serving: ServiceProcess, files: Files) -> None:
    stranger = Authority("another authority")
    lacking = [
        (None, ADA, grpc.StatusCode.UNAVAILABLE),
        (files.authority.client(), ADA, grpc.StatusCode.UNAVAILABLE),
        (files.authority.client(stranger.sign()), ADA, grpc.StatusCode.UNAVAILABLE),
        (files.tls, "", grpc.StatusCode.UNAUTHENTICATED),
        (files.tls, ATTIC, grpc.StatusCode.UNAUTHENTICATED),
        (files.tls, SERVING, grpc.StatusCode.UNAUTHENTICATED),
    ]
    for tls, token, code in lacking:
        with Client(serving.address, tls=tls, token=token, patience=0.0) as client, pytest.raises(SpecwireError) as no:
            client.complete(PROMPT, max_tokens=5, timeout=LIMIT_S)
        assert no.value.code is code


@pytest.mark.usefixtures("serving")
def test_figures_are_told_to_who_shows_a_certificate(files: Files, figures: str) -> None:
    nobody = ssl.create_default_context(cadata=files.authority.pem.decode())
    known = ssl.create_default_context(cadata=files.authority.pem.decode())
    known.load_cert_chain(*files.authority.sign().save(files.folder, "prometheus"))
    with urlopen(f"https://{figures}/metrics", timeout=LIMIT_S, context=known) as page:
        assert b'specwire:links_up{role="verifier",service="orchestrator"} ' in page.read()
    with pytest.raises(OSError):  # which of TLS's errors depends on who is quicker
        urlopen(f"https://{figures}/metrics", timeout=LIMIT_S, context=nobody)


def test_the_command_line_shows_a_token(serving: ServiceProcess, files: Files, owned: Parts) -> None:
    asked = ("-m", "deploy", "generate", "5 6 7", "--address", serving.address, "--max-tokens", "5", "--ignore-eos")
    code, out, _ = owned.run(*asked, *files.dialling("client", BOB))
    assert (code, out) == (0, " ".join(map(str, plain(PLAIN, 5))) + "\n")
    code, _, said = owned.run(*asked, *files.dialling("client", "the-token-of-nobody"))
    assert code == 1
    assert said.splitlines()[-1] == "specwire generate: error: authorization: this token is not known here"


def test_up_takes_both(files: Files, owned: Parts) -> None:
    keys = files.private("clients-of-up", f"ada {ADA}\n")
    flags = ("--target", TARGET, "--no-draft", *files.listening(), "--api-keys", keys, "--grace", "0")
    address = owned.start("up", *flags).ready()
    with Client(address, tls=files.tls, token=ADA) as ada:
        done = ada.complete(PROMPT, max_tokens=5, ignore_eos=True, timeout=LIMIT_S)
    assert list(done.tokens) == plain(PLAIN, 5)
    with Client(address, tls=files.tls, patience=0.0) as nobody, pytest.raises(SpecwireError) as refused:
        nobody.complete(PROMPT, max_tokens=5, timeout=LIMIT_S)
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
