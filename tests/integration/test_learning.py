"""What learns while it serves, with real processes: texts stay the target's, and more of its guesses are right."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import grpc
import pytest
from transformers import LlamaConfig

from specwire.client import Client
from specwire.core.law.sampling import Sampling
from specwire.lm.training.online import Learner, LearnerOptions
from specwire.v1 import common_pb2, verify_pb2_grpc
from specwire.versions import VersionFolder
from tests.faults.parts import Parts, parts
from tests.faults.streams import Stream, plain
from tests.integration.stack_process import running
from tests.lm import models
from tests.lm.training.test_head_learning import ignorant
from tests.lm.training.test_online import FIRST, ONE_KIND, SYMBOLS, texts
from tests.orchestrator.redis_for_tests import RedisServer
from tests.wait import LIMIT_S, asked_blocking, eventually

LENGTH, LONG = 40, 400
SAMPLED = Sampling(temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def owned() -> Iterator[Parts]:
    with parts() as owner:
        yield owner


def pair(folder: Path) -> tuple[str, str]:
    """A target that says one token behind another by a rule, and a drafter that knows nothing of it yet."""
    sizes = {"initializer_range": 0.05, "max_position_embeddings": 512}
    made = models.build(LlamaConfig(**{**models.ROTARY, **sizes}))
    draft = models.save(made, folder / "draft", {f"w{id_}": id_ for id_ in range(models.VOCABULARY)})
    options = LearnerOptions(draft, folder / "taught", ("*",), rate=0.01, threads=1)
    teacher = Learner(options, lambda _: None)
    taught = teacher.round(texts(ONE_KIND, 75, 1))
    teacher.close()
    assert taught.version == 1
    return str(VersionFolder(folder / "taught").version(1)), draft


def test_a_drafter_under_load_takes_what_it_has_learnt(owned: Parts, tmp_path: Path) -> None:
    (target, draft), out = pair(tmp_path), tmp_path / "out"
    with RedisServer() as redis:
        verifier = owned.start("verify", target, "--dtype", "float32")
        drafter = owned.start("draft", draft, "--follow", str(out))
        peers = ("--verifier", verifier.ready(), "--drafter", drafter.ready())
        orchestrator = owned.start("orchestrate", *peers, "--redis-url", redis.url)
        address = orchestrator.ready()
        words = ("--learn-from", "*", "--every", "0.5", "--rate", "0.01", "--threads", "1", "--redis-url", redis.url)
        folder, random = VersionFolder(out), Random(1)
        with running("learn", "--draft", draft, "--out", str(out), *words) as learner, Client(address) as client:

            def asked() -> str:
                """Some more texts to learn from, one of each rule beside them; the drafter's name by then."""
                with (
                    Stream(address, max_tokens=LONG, ignore_eos=True) as greedy,
                    Stream(address, max_tokens=LONG, ignore_eos=True, temperature=0.8, seed=5) as coupled,
                    Stream(address, max_tokens=LONG, ignore_eos=True, temperature=1.0, rule="rejection") as weighed,
                ):
                    for _ in range(16):
                        prompt = [random.randrange(FIRST, FIRST + SYMBOLS) for _ in range(2)]
                        done = client.complete(prompt, max_tokens=LENGTH, ignore_eos=True, timeout=LIMIT_S)
                        assert len(done.tokens) == LENGTH
                    assert greedy.rest() == plain(target, LONG)
                    assert coupled.rest() == plain(target, LONG, sampling=SAMPLED)
                    assert len(weighed.rest()) == LONG
                return "".join(known.model for known in client.server_info().drafters)  # none while it is dialled anew

            name = asked_blocking(asked, lambda name: name not in ("", "draft", "draft@0"))
            asked()
            learner.process.send_signal(signal.SIGTERM)
            assert learner.wait() == 0, learner.said()
        assert [service.end() for service in (orchestrator, drafter, verifier)] == ["", "", ""]
    assert name.startswith("draft@")
    used = [entry for entry in folder.history() if entry.version > 0]
    assert used
    assert all(entry.sessions for entry in used)
    assert all((entry.acceptance_after or 0.0) >= (entry.acceptance_before or 0.0) + 0.01 for entry in used)


def test_a_verifier_under_load_takes_what_its_head_has_learnt(owned: Parts, tmp_path: Path) -> None:
    (target, _), out = pair(tmp_path), tmp_path / "out"
    head, folder, random = ignorant(tmp_path / "head", target), VersionFolder(out), Random(1)
    with RedisServer() as redis:
        words = ("--learn-from", "*", "--every", "0.5", "--rate", "0.03", "--threads", "1", "--redis-url", redis.url)
        with running("learn", "--heads", head, "--target", target, "--out", str(out), *words) as learner:
            assert eventually(lambda: folder.current() is not None), learner.said()
            verifier = owned.start("verify", target, "--dtype", "float32", "--heads", str(out), "--no-ngram")
            address = verifier.ready()
            orchestrator = owned.start("orchestrate", "--verifier", address, "--redis-url", redis.url)
            with Client(orchestrator.ready()) as client:

                def asked() -> str:
                    """Some more texts to learn from, one of each rule beside them; the head's name by then."""
                    with (
                        Stream(client.address, max_tokens=LONG, ignore_eos=True) as greedy,
                        Stream(client.address, max_tokens=LONG, ignore_eos=True, temperature=0.8, seed=5) as coupled,
                    ):
                        for _ in range(16):
                            prompt = [random.randrange(FIRST, FIRST + SYMBOLS) for _ in range(2)]
                            client.complete(prompt, max_tokens=LENGTH, ignore_eos=True, timeout=LIMIT_S)
                        assert greedy.rest() == plain(target, LONG)
                        assert coupled.rest() == plain(target, LONG, sampling=SAMPLED)
                    return described(address).learnt.version

                assert asked_blocking(asked, lambda name: name != "head@0").startswith("head@")
                learner.process.send_signal(signal.SIGTERM)
                assert learner.wait() == 0, learner.said()
                again = client.complete([5, 6], max_tokens=LONG, ignore_eos=True, timeout=LIMIT_S)
                assert again.tokens == tuple(plain(target, LONG, (5, 6)))
        assert [service.end() for service in (orchestrator, verifier)] == ["", ""]
    used = [entry for entry in folder.history() if entry.version > 0]
    assert used
    assert all((entry.acceptance_after or 0.0) >= (entry.acceptance_before or 0.0) + 0.01 for entry in used)


def described(address: str) -> common_pb2.GetModelInfoResponse:
    with grpc.insecure_channel(address) as channel:
        found: common_pb2.GetModelInfoResponse = verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(
            common_pb2.GetModelInfoRequest(), timeout=LIMIT_S
        )
    return found
