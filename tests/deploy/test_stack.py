"""What a stack says before a model is loaded."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import demo_pair
import verify_service.server
from deploy.cli.services import edge
from deploy.cli.services.edge import EdgeOptions
from deploy.stack import stack
from deploy.stack.options import StackError, StackOptions
from orchestrator.options import OrchestratorOptions
from specwire.client import AsyncClient
from specwire.core.invalid import InvalidParameter
from specwire.rpc.server_options import ModelServiceOptions
from tests.orchestrator.stack import plain
from tests.wait import raised

TARGET, DRAFT = str(demo_pair.TARGET), str(demo_pair.DRAFT)
MISMATCH = (
    "^vocabulary mismatch: drafter .* ids\\), target .* both need the same tokenizer, or tokens that stand for bytes$"
)


@pytest.fixture
def foreign(tmp_path: Path) -> str:
    """A model of two words, whose weights could not even be loaded."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    folder.joinpath("tokenizer.json").write_text(Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str())
    folder.joinpath("model.safetensors").write_bytes(b"none")
    return str(folder)


async def test_unlike_vocabularies_are_told_before_weights_load(foreign: str, tmp_path: Path) -> None:
    said: list[str] = []
    for more in ((foreign,), (DRAFT, foreign)):
        options = StackOptions(TARGET, more[0], more_drafts=more[1:], listen="127.0.0.1:0")
        await raised(StackError, stack.start(options, tmp_path, said.append), MISMATCH)
    assert said == []  # nothing was started


def without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_a_broken_one(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("nonsense")


@pytest.mark.parametrize("changed", [without_a_tokenizer, with_a_broken_one])
def test_what_is_not_known_yet_is_left_to_the_services(changed: Callable[[Path], None], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DRAFT, tmp_path / "draft"))
    changed(folder)
    for draft in (str(folder), "maker/not-fetched", "scripted:7", DRAFT, TARGET):
        stack.check_vocabularies(TARGET, [draft])


def test_a_model_that_was_fetched_is_known(foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--maker--words"
    shutil.copytree(foreign, kept / "snapshots" / "12ab")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("12ab")
    with pytest.raises(StackError, match="drafter maker/words has [0-9a-f]{12} \\(2 ids\\)"):
        stack.check_vocabularies(TARGET, ["maker/words"])


@pytest.mark.parametrize("one_process", [False, True])
async def test_further_targets_and_a_log_in_a_file(one_process: bool, tmp_path: Path) -> None:
    """Each is served by its name; the log needs no Redis, and what was said the next process finds again."""
    url, models, kept = f"file:{tmp_path / 'log'}", ("scripted:7", "scripted:8"), list[str]()
    options = StackOptions(models[0], None, also=models[1:], redis_url=url, durability="file-fsync")
    for _ in range(2):
        running = await stack.start(replace(options, one_process=one_process), tmp_path, lambda _: None)
        try:
            assert (sorted(running.services), running.redis_url) == (["verifier", "verifier-2"], url)
            async with AsyncClient(running.address) as client:
                for model in models:
                    done = await client.complete((1, 2), max_tokens=4, ignore_eos=True, model=model)
                    assert list(done.tokens) == plain(model, (1, 2), 4)
                    kept.append(done.session_id)
                [score] = await client.score_text((1, 2), [[(3,)]], model="scripted:8")
                assert len(score.parts[0].logprobs) == 1
                for session, model in zip(kept, models * 2, strict=False):
                    found = await client.get_session(session)
                    assert (found.durability, list(found.tokens[2:])) == ("file-fsync", plain(model, (1, 2), 4))
        finally:
            await running.stop()


async def test_targets_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "HEALTH_LIMIT", 0.5)
    with pytest.raises(InvalidParameter, match="^also: scripted:7 is named twice"):
        StackOptions("scripted:7", None, also=("scripted:7",))
    options = StackOptions("scripted:7", None, also=("scripted:7:delay_ms=1",), redis_url="memory:")
    with pytest.raises(StackError, match="also: 1 of 2 models are served \\(scripted:7\\); names must differ"):
        await stack.start(options, tmp_path, lambda _: None)


def test_what_is_one_models_stays_with_it() -> None:
    options = StackOptions("scripted:7", "scripted:7", also=("scripted:8",), references=("r",), heads="h")
    services = options.services()
    assert list(services) == ["verifier", "verifier-2", "drafter"]
    second = services["verifier-2"]
    assert (second.model, second.references, second.heads) == ("scripted:8", (), "")


async def test_an_edge_is_told_before_its_weights_load(foreign: str) -> None:
    verifier = await verify_service.server.start(ModelServiceOptions("scripted:7"))
    try:
        serving = OrchestratorOptions((verifier.address,))
        await raised(StackError, edge.start(EdgeOptions(ModelServiceOptions(foreign), serving)), MISMATCH)
    finally:
        await verifier.stop()


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "$HOME/h"},
        {"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "~/new"},
    ],
)
def test_the_cache_is_where_the_library_has_it(named: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert str(stack.hub_cache()) == runpy.run_path(constants.__file__)["HF_HUB_CACHE"]
