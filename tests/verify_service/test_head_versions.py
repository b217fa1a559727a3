"""A verifier whose head learns: it takes each version while sessions run, and drafts for tenants that agreed."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.core.policy.costs import StepCosts
from specwire.rpc import versions
from specwire.rpc.server import ListenError
from specwire.rpc.server_options import ModelServiceOptions
from specwire.telemetry.metrics import Registry
from specwire.v1 import common_pb2, verify_pb2
from specwire.versions import HEAD, Current, HistoryEntry, VersionFolder
from tests.lm.heads.by_hand import nearly_bigram
from tests.verify_service.peer import Peer, connected
from tests.wait import asked
from verify_service import server
from verify_service.engine import calibration
from verify_service.engine.calibration import step_costs
from verify_service.engine.shares import TenantShares
from verify_service.server import RunningVerifier, start

CONTEXT, LENGTH = 512, 300
PROMPT = (3, 14, 15, 9, 26)
ONE = ("ada",)
WHOLE = common_pb2.Stopping(max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return nearly_bigram(tmp_path / "pair", CONTEXT)


@pytest.fixture
def folder(pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VersionFolder:
    """Give a learner's folder with its first version. Tests say when a verifier looks."""
    monkeypatch.setattr(versions, "WATCH_S", 3600.0)
    made = VersionFolder(tmp_path / "out")
    made.claim(ONE, "f")
    publish(made, 0, Path(pair[1]))
    return made


def publish(folder: VersionFolder, number: int, head: Path, tenants: tuple[str, ...] = ONE) -> None:
    before = max(0, number - 1)
    folder.add(lambda path: shutil.copytree(head, path, dirs_exist_ok=True), HistoryEntry(number, before, before, ()))
    folder.use(Current(number, "some/head", tenants, "learnt", 0.5, 0.75, HEAD, 2.0, 1.5))


def options_of(target: str, folder: VersionFolder) -> ModelServiceOptions:
    return ModelServiceOptions(target, slots=2, context=CONTEXT, ngram=False, heads=str(folder.path))


@asynccontextmanager
async def serving(target: str, folder: VersionFolder, patient: bool = False) -> AsyncIterator[RunningVerifier]:
    running = await start(options_of(target, folder), patient)
    try:
        yield running
    finally:
        await running.stop()


async def look(running: RunningVerifier) -> None:
    assert running._versions is not None
    assert running._versions._follower is not None
    await running._versions._follower.look()


def figures(running: RunningVerifier) -> dict[str, float]:
    assert running._versions is not None
    registry = Registry()
    registry.add("verifier", running._versions.families)
    return {sample.name: sample.value for family in registry.collect() for sample in family.samples}


async def written(peer: Peer, handle: int, agreed: bool = True) -> list[int]:
    await peer.open(handle, PROMPT, stopping=WHOLE, agreed=agreed)
    await peer.until_finished(handle)
    return peer.tokens[handle]


async def test_sessions_go_on_while_a_version_is_taken(folder: VersionFolder, pair: tuple[str, str]) -> None:
    target, head = pair
    async with serving(target, folder) as running, connected(running) as peer:
        first = running.info.learnt
        assert (first.version, list(first.tenants)) == ("head@0", ["ada"])
        plain = await written(peer, 1, agreed=False)
        some = verify_pb2.Progress(credit=len(PROMPT) + LENGTH // 2)
        await peer.open(2, PROMPT, stopping=WHOLE, agreed=True, progress=some)
        while len(peer.tokens.get(2, [])) < LENGTH // 2:
            await peer.receive()
        publish(folder, 1, Path(head))
        await look(running)
        await peer.send(progress=[verify_pb2.Progress(handle=2, credit=1 << 20)])
        told = [message.learnt async for message in until_finished(peer, 2) if message.HasField("learnt")]
        assert [(each.version, each.acceptance_after, each.loss_after) for each in told] == [("head@1", 0.75, 1.5)]
        assert peer.tokens[2] == plain
        assert await written(peer, 3) == plain
        assert not peer.refused
        assert running.info.learnt.version == "head@1"
        taken = figures(running)
    assert taken["specwire:head_version"] == taken["specwire:head_version_swaps_total"] == 1


async def until_finished(peer: Peer, handle: int) -> AsyncIterator[verify_pb2.ConnectVerifyResponse]:
    while handle not in peer.finished:
        yield await peer.receive()


async def test_it_drafts_for_those_that_agreed_alone(folder: VersionFolder, pair: tuple[str, str]) -> None:
    """As a session's orchestrator says; an older one does not. On a busy machine the head is tried in a later text."""
    async with serving(pair[0], folder) as running, connected(running) as peer:
        handles = itertools.count(1)

        async def outcomes(agreed: bool) -> set[int]:
            handle = next(handles)
            assert await written(peer, handle, agreed) == peer.tokens[1]
            return set(peer.outcomes[handle])

        assert common_pb2.OUTCOME_ACCEPTED not in await outcomes(agreed=False)
        await asked(partial(outcomes, agreed=True), lambda found: common_pb2.OUTCOME_ACCEPTED in found)
        assert common_pb2.OUTCOME_ACCEPTED not in await outcomes(agreed=False)


async def test_a_version_that_cannot_be_loaded_is_told_once_and_the_present_one_stays(
    folder: VersionFolder, pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head = pair
    broken = tmp_path / "broken"
    shutil.copytree(head, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    async with serving(target, folder) as running:
        publish(folder, 1, broken)
        for _ in range(2):
            await look(running)
        assert running.info.learnt.version == "head@0"
        publish(folder, 2, Path(head))
        await look(running)
        assert running.info.learnt.version == "head@2"
        taken = figures(running)
    assert (taken["specwire:head_version"], taken["specwire:head_version_failures_total"]) == (2, 1)
    told = [line for line in capsys.readouterr().err.splitlines() if "heads" in line]
    assert len(told) == 1
    assert "specwire verify: heads: version 1 cannot be taken: " in told[0]


async def test_what_is_told_is_what_drafts(
    folder: VersionFolder, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what came into use, or broke, while the target was measured."""

    def published(*arguments: object) -> StepCosts:
        publish(folder, 1, Path(pair[1]))
        (folder.path / "current").rename(folder.path / "later")
        (folder.path / "current").write_text("{")
        return step_costs(*arguments)  # type: ignore[arg-type]  # whatever it is called with

    monkeypatch.setattr(calibration, "step_costs", published)
    async with serving(pair[0], folder) as running:
        assert running.info.learnt.version == "head@0"
        (folder.path / "later").rename(folder.path / "current")
        await look(running)
        assert running.info.learnt.version == "head@1"


async def test_a_folder_for_others_is_not_followed(
    folder: VersionFolder, pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Sessions that run are of tenants of the one before."""
    async with serving(pair[0], folder) as running:
        publish(folder, 1, Path(pair[1]), ("bob",))
        for _ in range(2):
            await look(running)
        assert (running.info.learnt.version, list(running.info.learnt.tenants)) == ("head@0", ["ada"])
    told = [line for line in capsys.readouterr().err.splitlines() if "heads" in line]
    why = "tenants: are bob by now, not ada: restart to follow them"
    assert told == [f"specwire verify: heads: version 1 cannot be taken: {why}"]


async def test_a_patient_verifier_follows_none(folder: VersionFolder, pair: tuple[str, str]) -> None:
    async with serving(pair[0], folder, patient=True) as running:
        assert running._versions is None
        assert not running.info.HasField("learnt")


async def test_a_verifier_that_cannot_listen_follows_no_more(
    folder: VersionFolder, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[bool] = []

    async def failing(*_: object, **__: object) -> None:
        followed.append(following())
        raise ListenError("taken")

    def following() -> bool:
        return any(task.get_name() == "versions" for task in asyncio.all_tasks())

    monkeypatch.setattr(server, "serve", failing)
    with pytest.raises(ListenError):
        await start(options_of(pair[0], folder))
    assert followed == [True]
    assert not following()


async def test_orchestrators_that_are_tenants_themselves_are_not_trusted_with_that(
    folder: VersionFolder, pair: tuple[str, str]
) -> None:
    options = ModelServiceOptions(pair[0], heads=str(folder.path))
    with pytest.raises(InvalidParameter, match="heads: .*out is a learner's folder, not served with --tenants"):
        await start(options, shares=TenantShares({}))
