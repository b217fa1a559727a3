"""A drafter that follows a learner's folder: links move to the new version, and one that is broken changes nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from draft_service import server
from draft_service.server import RunningDrafter, load, start
from draft_service.versions import first_model, followed
from specwire.core.invalid import InvalidParameter
from specwire.core.model import ModelError
from specwire.rpc import versions
from specwire.rpc.server_options import ModelServiceOptions
from specwire.versions import Current, HistoryEntry, VersionError, VersionFolder
from tests.draft_service.peer import connected, continuation, tokens_of
from tests.orchestrator.tiny import tiny

TEXT = [11, 12, 13]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [tiny(tmp_path_factory.mktemp("models") / str(seed), seed) for seed in range(3)]


@pytest.fixture
def folder(models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VersionFolder:
    """Give a learner's folder with its first version. Tests say when a drafter looks."""
    monkeypatch.setattr(versions, "WATCH_S", 3600.0)
    made = VersionFolder(tmp_path / "out")
    made.claim(("*",), "f")
    publish(made, 0, models[0])
    return made


def publish(folder: VersionFolder, number: int, model: str) -> None:
    before = max(0, number - 1)
    folder.add(lambda path: shutil.copytree(model, path, dirs_exist_ok=True), HistoryEntry(number, before, before, ()))
    folder.use(Current(number, "some/draft", ("*",), "learnt", 0.5, 0.6))


@asynccontextmanager
async def following(folder: VersionFolder, model: str) -> AsyncIterator[RunningDrafter]:
    running = await start(ModelServiceOptions(model, slots=2), follow=folder.path)
    try:
        yield running
    finally:
        await running.stop(0.0)


async def look(running: RunningDrafter) -> None:
    assert running.follower is not None
    await running.follower.look()


async def drafted(running: RunningDrafter) -> list[int]:
    async with connected(running) as peer:
        await peer.open(1, TEXT)
        return tokens_of(await peer.proposal(1))


async def test_links_end_and_new_ones_get_the_new_version(folder: VersionFolder, models: list[str]) -> None:
    async with following(folder, models[2]) as running:
        async with connected(running) as peer:
            first = await peer.info()
            await peer.open(1, TEXT)
            assert tokens_of(await peer.proposal(1)) == continuation(models[0], TEXT, 4)
            publish(folder, 1, models[1])
            await look(running)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await peer.proposal(1)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert raised.value.details() == "the drafter takes another version of its model"
        async with connected(running) as peer:
            second = await peer.info()
            await peer.open(1, TEXT)
            assert tokens_of(await peer.proposal(1)) == continuation(models[1], TEXT, 4)
    assert (first.model, second.model) == ("draft@0", "draft@1")
    assert (second.learnt.version, list(second.learnt.tenants)) == ("draft@1", ["*"])
    assert (second.learnt.acceptance_after, second.learnt.HasField("loss_after")) == (0.6, False)
    assert first.weights_fingerprint != second.weights_fingerprint
    assert first.vocabulary_fingerprint == second.vocabulary_fingerprint
    assert running.follower is not None
    assert (running.follower.number, running.follower.swaps, running.follower.failures) == (1, 1, 0)


async def test_a_former_version_that_does_not_stop_keeps_none_from_serving(
    folder: VersionFolder, models: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def failing() -> None:
        raise ZeroDivisionError

    drafters: list[int] = []
    monkeypatch.setattr(server, "keep_loaded", lambda: drafters.append(threads()))
    async with following(folder, models[0]) as running:
        before = threads()
        monkeypatch.setattr(running._served.now.handler, "stop", failing)
        publish(folder, 1, models[1])
        await look(running)
        assert await drafted(running) == continuation(models[1], TEXT, 4)
        assert running.follower is not None
        assert (running.follower.number, running.follower.swaps, running.follower.failures) == (1, 1, 0)
    assert drafters == [before], "what it frees has ended by then"
    assert "specwire draft: follow: the former version did not stop: ZeroDivisionError" in capsys.readouterr().err


def threads() -> int:
    """Drafters that there are."""
    return sum(each.name == server.DRAFTER for each in threading.enumerate())


async def test_a_version_that_cannot_be_loaded_is_told_once_and_the_present_one_stays(
    folder: VersionFolder, models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models[1], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    other = tmp_path / "other"
    shutil.copytree(models[1], other)
    (other / "tokenizer.json").unlink()
    async with following(folder, models[0]) as running:
        async with connected(running) as peer:
            for number, model in ((1, str(broken)), (2, str(other))):
                publish(folder, number, model)
                for _ in range(2):
                    await look(running)
            await peer.open(1, TEXT)
            assert tokens_of(await peer.proposal(1)) == continuation(models[0], TEXT, 4)
            assert running.follower is not None
            assert (running.follower.number, running.follower.swaps, running.follower.failures) == (0, 0, 2)
        publish(folder, 3, models[1])
        await look(running)
        assert await drafted(running) == continuation(models[1], TEXT, 4)
        (folder.path / "current").write_text("{")
        with pytest.raises(VersionError):
            await look(running)
    told = [line for line in capsys.readouterr().err.splitlines() if "follow" in line]
    assert len(told) == 2
    assert "follow: version 1 cannot be taken: model " in told[0]
    assert "follow: version 2 cannot be taken: vocabulary: is another one than this drafter's" in told[1]


async def test_it_serves_another_model_until_there_is_a_version(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "WATCH_S", 3600.0)
    folder = VersionFolder(tmp_path / "out")
    async with following(folder, models[2]) as running:
        assert await drafted(running) == continuation(models[2], TEXT, 4)
        folder.claim(("*",), "f")
        publish(folder, 0, models[0])
        await look(running)
        assert await drafted(running) == continuation(models[0], TEXT, 4)


async def test_it_ends_while_a_version_loads(folder: VersionFolder, models: list[str]) -> None:
    async with following(folder, models[0]) as running:
        publish(folder, 1, models[1])
        assert running.follower is not None
        await running.follower.stop()
    assert running.follower.number in (0, 1)


async def test_a_learner_s_folder_in_place_of_a_model_is_followed(folder: VersionFolder, models: list[str]) -> None:
    """So `up --draft DIR` does. What loads a drafter into its own process says that it does not."""
    options = ModelServiceOptions(str(folder.path), slots=2)
    running = await start(options)
    try:
        assert await drafted(running) == continuation(models[0], TEXT, 4)
        publish(folder, 1, models[1])
        await look(running)
        assert await drafted(running) == continuation(models[1], TEXT, 4)
    finally:
        await running.stop(0.0)
    with pytest.raises(ModelError, match="has a learner's versions; `specwire draft --follow DIR` serves them"):
        await load(options)


def test_a_learner_s_folder_without_a_version_is_no_model(tmp_path: Path) -> None:
    VersionFolder(tmp_path).claim(("*",), "f")
    assert followed(str(tmp_path)) == followed(str(tmp_path), tmp_path) == tmp_path
    assert followed("a/model") is followed(None) is None
    with pytest.raises(InvalidParameter, match="follow: .* has no version yet"):
        first_model(tmp_path, str(tmp_path))


def test_a_learner_s_folder_beside_another_one_that_is_followed_is_no_model(tmp_path: Path) -> None:
    """It was told that a model was missing, which it had named."""
    one, other = tmp_path / "one", tmp_path / "other"
    VersionFolder(other).claim(("*",), "f")
    with pytest.raises(InvalidParameter, match=f"MODEL: {other} is a learner's folder, and --follow {one} another"):
        first_model(one, str(other))
    with pytest.raises(InvalidParameter, match="follow: .* has no version yet"):
        first_model(tmp_path / "one" / ".." / "other", str(other))


def test_without_a_version_there_must_be_a_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="follow: .* has no version yet: start `specwire learn --out "):
        first_model(tmp_path, None)
    assert first_model(tmp_path, "a/model") == ("a/model", None)
    (tmp_path / "current").write_text('{"version": 0, "draft": "h", "tenants": ["*"], "why": "", "kind": "head"}')
    with pytest.raises(InvalidParameter, match="follow: .*has versions of a head, not of a draft"):
        first_model(tmp_path, "a/model")
    (tmp_path / "current").write_text("[]")
    with pytest.raises(InvalidParameter, match="follow: .*current: cannot be read"):
        first_model(tmp_path, "a/model")
