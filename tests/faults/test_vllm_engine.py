"""A verifier on vLLM's worker beside one of ours: whatever dies, texts are the target's, up to near-ties.

Without the environment that `make setup-vllm` makes nothing of this runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import distribution
from pathlib import Path

import grpc
import pytest

from bench.harness import ROOT
from bench.harness.child import descendants
from bench.relay.link import RelayLink
from bench.vllm.server import EAGER, MISSING, PYTHON, VLLM
from demo_pair import DRAFT, TARGET
from specwire.client import AsyncClient, Completion
from specwire.client.requests import RequestOptions
from specwire.core.messages import FinishReason, Outcome
from specwire.core.model import RANKS, STAGES
from specwire.lm import Feed, LanguageModel
from specwire.text.constraints import LIBRARY
from specwire.v1 import common_pb2, verify_pb2_grpc
from tests.faults.hostile import ATTACKS, Victim, hostile
from tests.faults.matrix import CELLS, Cell
from tests.faults.parts import parts
from tests.faults.place import Place, place
from tests.faults.scene import BEGUN, PATIENCE_S, Asked
from tests.faults.streams import Stream
from tests.faults.test_demo_pair import LENGTH, WORDS, asked, check_choices, play, target
from tests.orchestrator import test_constrained as constrained
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.test_every_option import ALONE, DRAWN, GREEDY
from tests.text.schemas import fits
from tests.verify_service.peer import Peer
from tests.vllm.walk_in_vllm import FAMILIES, reachable
from tests.wait import eventually

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason=MISSING)

ENGINE = ("--engine", "vllm", "--engine-options", EAGER)
STOPPED_S = 20.0
# Of texts that are compared, and seconds for which a line stays cut: longer than any test.
SHORT, FOR_LONG_S = 160, 3600.0
# More sessions than the verifier has slots for, and how long their texts are.
MANY, FEW_TOKENS = 200, 4
# Texts of each option: as many at once as each verifier has slots; completions of one prompt.
FEW_OF_EACH, SLOTS, SEVERAL = 16, 8, 3
LIES = ("garbage", "right_once", "repeated", "wild_trees", "flood")
# Tokens of a text that is decided by ranks, and of one that outlives one; two scores that are closer are a near-tie.
COUNT, LONG, NEAR_TIE = 48, 800, 1e-4
# Log-probabilities of two engines in float32.
CLOSE = 1e-3
# vLLM takes longer to start than a restarted verifier is waited for unless told.
PLAYED = {
    ("drafter", "SIGKILL"),
    ("verifier", "SIGKILL"),
    ("verifier", "SIGSTOP"),
    ("verifier", "graceful stop"),
    ("orchestrator-verifier", "cut"),
    ("orchestrator-verifier", "reset"),
}
PARAMETERS = [pytest.param(cell, id=cell.name) for cell in CELLS if (cell.where, cell.fault) in PLAYED]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Give the processes: of the two verifiers the first is on vLLM, and `apart` knows only that one."""
    vllm = (with_our_library(tmp_path_factory.mktemp("vllm")), *ENGINE, "--queue", str(MANY))
    with place(str(TARGET), str(DRAFT), *WORDS, vllm=vllm) as present:
        yield present


def with_our_library(folder: Path) -> str:
    """VLLM's Python as of who has put our library for constraints, which vLLM pins to an older one, beside it."""
    installed = distribution(LIBRARY)
    for name in {file.parts[0] for file in installed.files or ()}:
        (folder / name).symlink_to(str(installed.locate_file(name)))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("cell", PARAMETERS)
def test_a_fault(running: Place, cell: Cell) -> None:
    play(running, cell, STOPPED_S)


def test_eight_at_once_are_each_the_target_s_with_drafts_and_without(running: Place) -> None:
    """Behind a near-tie, which is told, a text with drafts may differ from the one without."""
    running.mend()
    assert not any(accepted(together(running.apart.address, asked(8), drafting=False)))
    assert eventually(lambda: any(accepted(together(running.apart.address, asked(8)))))


def together(address: str, many: Sequence[Asked], drafting: bool = True) -> list[Stream]:
    """Read them all to their ends, and hold each to the target."""
    with ExitStack() as stack:
        options = [options_of(one, SHORT, drafting) for one in many]
        pairs = zip(many, options, strict=True)
        streams = [stack.enter_context(Stream(address, one.prompt, PATIENCE_S, **drawn)) for one, drawn in pairs]
        for one, stream in zip(many, streams, strict=True):
            assert len(stream.rest()) == SHORT
            check_choices(one, stream.tokens)
        return streams


def options_of(one: Asked, length: int, drafting: bool = True) -> RequestOptions:
    return RequestOptions(
        max_tokens=length, temperature=one.temperature, seed=one.seed, ignore_eos=True, drafting=drafting, ngram=False
    )


def accepted(streams: Sequence[Stream]) -> list[bool]:
    """Whether a draft token of each was accepted."""
    return [Outcome.ACCEPTED in stream.outcomes for stream in streams]


async def test_many_more_sessions_than_slots_queue_and_all_end(running: Place) -> None:
    running.mend()
    first, _ = asked()
    many = [Asked(first.prompt[:8], temperature=0.8, seed=seed) for seed in range(MANY)]
    async with AsyncClient(running.apart.address) as client:
        done = await asyncio.gather(*(client.complete(one.prompt, **options_of(one, FEW_TOKENS)) for one in many))
    for one, completion in zip(many, done, strict=True):
        assert len(completion.tokens) == FEW_TOKENS
        check_choices(one, completion.tokens)


async def test_every_option_means_the_same_on_either_engine(running: Place) -> None:
    """Each alone, greedily and drawn, each kind of constraint, and several completions; drafted for on vLLM only."""
    running.mend()
    with parts() as owned:
        beside = owned.start("orchestrate", "--verifier", running.verifiers[1].address)
        ours = await completed(beside.ready(), drafting=False)
    for name, done in (await completed(running.apart.address)).items():
        plain = ours[name]
        assert (done.tokens, done.text, done.finish_reason) == (plain.tokens, plain.text, plain.finish_reason), name
        told, expected = ([each.logprob for each in one.logprobs] for one in (done, plain))
        assert told == pytest.approx(expected, abs=CLOSE), name
        if done.finish_reason is FinishReason.EOS and name in constrained.WISHES:
            assert fits(constrained.constraint_of(constrained.WISHES[name]), done.text), name


async def completed(address: str, **changes: bool) -> dict[str, Completion]:
    """By what was asked for; at most as many at once as there are slots."""
    bases = {"greedy": GREEDY, "drawn": DRAWN}
    wishes: dict[str, RequestOptions] = {
        f"{name}, {how}": {"max_tokens": FEW_OF_EACH, **base, **wish}
        for how, base in bases.items()
        for name, wish in ALONE.items()
    }
    for name in constrained.WISHES.keys() - {*constrained.INEXACT}:
        wishes[name] = {"max_tokens": constrained.LENGTH, **constrained.WISHES[name]}
    for choice in range(SEVERAL):
        wishes[f"choice {choice} of several"] = {"max_tokens": FEW_OF_EACH, **DRAWN, "choice": choice}
    places = asyncio.Semaphore(SLOTS)

    async def complete(wish: RequestOptions) -> Completion:
        wish.update(changes)  # type: ignore[typeddict-item]  # who may propose, by name
        async with places:
            return await client.complete(asked()[0].prompt, **wish)

    async with AsyncClient(address) as client:
        done = await asyncio.gather(*map(complete, wishes.values()))
        drawn: RequestOptions = {"max_tokens": FEW_OF_EACH, **DRAWN}
        several = await client.complete_many(asked()[0].prompt, SEVERAL, **drawn)
    found = dict(zip(wishes, done, strict=True))
    assert [each.tokens for each in several] == [found[f"choice {at} of several"].tokens for at in range(SEVERAL)]
    return found


@pytest.mark.parametrize("attack", LIES)
def test_no_drafter_that_lies_changes_a_text(running: Place, attack: str) -> None:
    running.mend()
    greedy, coupled = asked()
    (plain,) = together(running.apart.address, [greedy], drafting=False)
    text = [*greedy.prompt, *plain.tokens]

    def right(tokens: Sequence[int], count: int) -> list[int]:
        return [*text[len(tokens) :], *[0] * count][:count]

    with hostile(ATTACKS[attack], Victim(str(DRAFT), right)) as liar, parts() as owned:
        orchestrator = owned.start("orchestrate", "--verifier", running.verifiers[0].address, "--drafter", liar.address)
        address = orchestrator.ready()
        for one in (greedy, coupled):
            together(address, [one])
        assert liar.attacked()
        assert "Traceback" not in orchestrator.said()
    assert "Traceback" not in running.verifiers[0].said()


@pytest.mark.parametrize("at", [0, 1], ids=["greedy", "coupled"])
def test_a_session_moves_from_ours_to_vllm_and_back(running: Place, at: int) -> None:
    running.mend()
    one = asked()[at]
    with ExitStack() as stack:
        vllm, ours = (stack.enter_context(RelayLink(each.address)) for each in running.verifiers)
        owned = stack.enter_context(parts())
        named = [word for link in (vllm, ours) for word in ("--verifier", link.address)]
        orchestrator = owned.start("orchestrate", *named, "--drafter", running.drafter.address)
        address = orchestrator.ready()
        vllm.cut(FOR_LONG_S)
        stream = stack.enter_context(Stream(address, one.prompt, PATIENCE_S, **options_of(one, LENGTH)))
        stream.until(BEGUN)
        for taken, left in ((vllm, ours), (ours, vllm)):
            taken.cut(0.0)
            left.cut(FOR_LONG_S)
            # What was decided before may still be on its way; text of a second later is the other verifier's.
            stream.until_arrived(time.monotonic() + 1.0)
        tokens = stream.rest()
        assert len(tokens) == LENGTH
        check_choices(one, tokens)
        assert "Traceback" not in orchestrator.said()


def test_no_other_machine_reaches_a_socket_of_vllm_s(running: Place) -> None:
    running.mend()
    pid = running.verifiers[0].process.pid
    assert {each: reachable(each) for each in (pid, *descendants(pid)) if reachable(each)} == {}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_any_interleaving_gives_the_plain_forward(family: str, tmp_path: Path) -> None:
    in_vllm("tests.vllm.walk_in_vllm", family, str(tmp_path))


def test_weights_that_only_vllm_reads_are_served(tmp_path: Path) -> None:
    in_vllm("tests.vllm.quantized_in_vllm", str(tmp_path))


def in_vllm(*words: str) -> None:
    """Run a module of ours in vLLM's environment."""
    done = subprocess.run([PYTHON, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=300.0, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("split", [RANKS, STAGES])
async def test_split_over_two_processes_it_is_the_same_model_and_ends_with_either(split: str) -> None:
    one, prompt = target().model, asked()[0].prompt
    with parts() as owned:
        words = ("--dtype=float32", f"--{split}=2", "--slots=2", *ENGINE)
        verifier = owned.start("verify", str(TARGET), *words, python=PYTHON)
        info, tokens = await written(verifier.ready(), prompt)
        assert info.weights_fingerprint == one.info.weights_fingerprint
        assert len(tokens) == COUNT
        assert largest_gap(one, prompt, tokens) <= NEAR_TIE
        (other,) = ranks_of(verifier.process.pid)
        assert reachable(verifier.process.pid) == reachable(other) == []
        os.kill(other, signal.SIGKILL)
        assert verifier.wait() == 1
        assert "error: rank 1 of 2 ended by SIGKILL" in verifier.said()


async def written(address: str, prompt: Sequence[int]) -> tuple[common_pb2.GetModelInfoResponse, list[int]]:
    """What the verifier says of itself, and COUNT tokens of its behind the prompt."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        info = await stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=PATIENCE_S)
        call = stub.Connect()
        peer = Peer(call, info)
        await peer.open(1, prompt, stopping=common_pb2.Stopping(max_tokens=COUNT, ignore_eos=True))
        await peer.until_finished(1)
        call.cancel()
        return info, peer.tokens[1]


def largest_gap(lm: LanguageModel, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """By how much a token was ever worse than the best one behind the text before it."""
    logits = lm.forward([Feed(0, 0, [*prompt, *tokens[:-1]], len(tokens))])
    chosen = [float(row[token]) for row, token in zip(logits, tokens, strict=True)]
    return max(float(row.max()) - score for row, score in zip(logits, chosen, strict=True))


def test_sessions_move_from_a_split_verifier_that_lost_a_rank_to_a_whole_one() -> None:
    """Of three sessions at two verifiers at least one is at each."""
    words = (str(TARGET), "--dtype=float32", "--threads=1", "--slots=4", "--context=1024")
    with RedisServer() as redis, parts() as owned:
        split = owned.start("verify", *words, f"--{RANKS}=2", *ENGINE, python=PYTHON)
        whole = owned.start("verify", *words)
        named = [word for service in (split, whole) for word in ("--verifier", service.ready())]
        front = owned.start("orchestrate", *named, "--redis-url", redis.url)
        front.ready()
        (rank,) = ranks_of(split.process.pid)
        one = Asked()
        streams = [Stream(front.address, one.prompt, max_tokens=LONG) for _ in range(3)]
        for stream in streams:
            stream.until(1)
        os.kill(rank, signal.SIGKILL)
        assert split.wait() == 1
        assert "rank 1 of 2 ended by SIGKILL" in split.said()
        for stream in streams:
            stream.rest()
            assert stream.error is None
            assert len(stream.tokens) == LONG
            check_choices(one, stream.tokens)


def ranks_of(pid: int) -> list[int]:
    """The processes below that one which are ranks, and not vLLM's own helpers."""
    return [each for each in descendants(pid) if b"rank_process" in Path(f"/proc/{each}/cmdline").read_bytes()]
