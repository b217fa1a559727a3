"""What a drafter or a head has learnt of some tenants is proposed to these alone, and told to operators."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2 as httpx

import draft_service.server
import orchestrator.server
import verify_service.server
from deploy.cli.diagnosis.top import StatusSample, as_object, page
from orchestrator.api.status import StatusApi
from orchestrator.options import OrchestratorOptions
from orchestrator.server import RunningOrchestrator
from orchestrator.tenants import Access
from specwire.client import AsyncClient
from specwire.client.events import Stats
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import status_pb2 as pb
from specwire.versions import DRAFT, HEAD, Current, HistoryEntry, Kind, VersionFolder
from tests.lm.heads.by_hand import nearly_bigram
from tests.lm.models import VOCABULARY
from tests.orchestrator.test_scopes import KEYS, LIMIT_S, TOKENS
from tests.wait import asked

WORDS = {f"w{index}": index for index in range(VOCABULARY)}
PROMPT, LENGTH = (5, 6, 7), 200


def learnt(folder: Path, kind: Kind, model: str) -> str:
    """A learner's folder with one version, which ada's texts made."""
    made = VersionFolder(folder)
    made.claim(("ada",), "f")
    made.add(lambda path: shutil.copytree(model, path, dirs_exist_ok=True), HistoryEntry(4, 4, 4, ()))
    made.use(Current(4, f"some/{kind}", ("ada",), "learnt", 0.5, 0.75, kind, 2.0, 1.5))
    made.release()
    return str(folder)


@asynccontextmanager
async def serving(folder: Path, heads: bool) -> AsyncIterator[RunningOrchestrator]:
    """A head that has learnt beside the target, or else a drafter, of the target's own weights."""
    target, head = nearly_bigram(folder / "pair", 512, WORDS)
    async with AsyncExitStack() as parts:
        beside = learnt(folder / "head", HEAD, head) if heads else ""
        verifier = await verify_service.server.start(ModelServiceOptions(target, heads=beside))
        parts.push_async_callback(verifier.stop, 0.0)
        drafters = []
        if not heads:
            follow = Path(learnt(folder / "draft", DRAFT, target))
            drafters.append(await draft_service.server.start(ModelServiceOptions(target), follow=follow))
            parts.push_async_callback(drafters[-1].stop, 0.0)
        options = OrchestratorOptions(
            (verifier.address,),
            tuple(each.address for each in drafters),
            plan="lockstep:3",
            access=Access(KEYS),
            http="127.0.0.1:0",
        )
        running = await orchestrator.server.start(options)
        parts.push_async_callback(running.stop, 0.0)
        yield running


async def stats(door: RunningOrchestrator, tenant: str, ngram: bool = True) -> Stats:
    async with AsyncClient(door.address, token=TOKENS[tenant]) as client:
        done = await client.complete(
            PROMPT, max_tokens=LENGTH, ignore_eos=True, timeout=LIMIT_S, temperature=1.0, seed=3, ngram=ngram
        )
    assert len(done.tokens) == LENGTH
    return done.stats


async def console(door: RunningOrchestrator) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {TOKENS['bob']}"}
    async with httpx.AsyncClient(base_url=str(door.http), timeout=LIMIT_S, headers=headers) as client:
        told: dict[str, object] = (await client.get("/console/status")).json()
    return told


async def test_a_drafter_drafts_for_tenants_that_agreed(tmp_path: Path) -> None:
    async with serving(tmp_path, heads=False) as door:
        await asked(lambda: stats(door, "ada", ngram=False), lambda told: told.tested > 0)
        assert (await stats(door, "bob", ngram=False)).proposed == 0
        seen = await console(door)
        status = await StatusApi(door.orchestrator).GetStatus(pb.GetStatusRequest(), None)  # type: ignore[arg-type]
    measured = {"acceptance_before": 0.5, "acceptance_after": 0.75, "loss_before": 2.0, "loss_after": 1.5}
    verifiers, drafters = seen["verifiers"], seen["drafters"]
    assert isinstance(verifiers, list)
    assert isinstance(drafters, list)
    assert [each["learnt"] for each in verifiers] == [None]
    assert [each["learnt"] for each in drafters] == [{"version": "draft@4", **measured}]
    sample = StatusSample(status, 0.0)
    services = as_object(sample, None)["services"]
    assert isinstance(services, list)
    assert services[1]["learnt"] == {"version": "draft@4", "tenants": ["ada"], **measured}
    assert "draft@4 (50 % to 75 %)" in page(sample, None, "here")


async def test_a_head_drafts_for_tenants_that_agreed(tmp_path: Path) -> None:
    async with serving(tmp_path, heads=True) as door:
        await asked(lambda: stats(door, "ada"), lambda told: told.tested_head > 0)
        assert (await stats(door, "bob")).proposed_head == 0
        status = await StatusApi(door.orchestrator).GetStatus(pb.GetStatusRequest(), None)  # type: ignore[arg-type]
    assert ", head head@4 (50 % to 75 %)" in page(StatusSample(status, 0.0), None, "here")
