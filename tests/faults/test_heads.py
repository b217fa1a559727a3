"""A verifier dies mid-sentence, and one with or without a head goes on; the training of a head is killed, and goes on.

Texts are the target's own, up to near-ties.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo_pair import HEAD, TARGET
from deploy.cli.main import main
from specwire.client import Client
from specwire.client.requests import RequestOptions
from specwire.core.messages import FinishReason
from specwire.lm.training import loop
from specwire.rpc.process import say
from tests.deploy.test_train_heads import TEXTS, command
from tests.faults.parts import LOADED_AGAIN, ServiceProcess, parts
from tests.faults.streams import Stream
from tests.faults.test_demo_pair import WORDS, asked, check_choices
from tests.integration.stack_process import ROOT, START_LIMIT
from tests.lm.training.answering import keep_answers, save_target
from tests.orchestrator.redis_for_tests import RedisServer
from tests.wait import asked_blocking

# Long enough before the fault and behind it that the head has a part in the texts.
LENGTH, BEFORE = 400, 200
# Layers of the target: with so many the head pays on any machine, however busy.
LAYERS = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the pair's target with further layers that add nothing: its logits, in several times its forwards' time."""
    folder = tmp_path_factory.mktemp("deeper") / "target"
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    for layer in range(config["num_hidden_layers"], LAYERS):
        for name in [name for name in weights if name.startswith(last)]:
            weights[name.replace(last, f"model.layers.{layer}.")] = torch.zeros_like(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    return folder


@pytest.mark.parametrize("first", [True, False], ids=["with, then without", "without, then with"])
def test_a_text_goes_on_though_only_one_verifier_has_a_head(first: bool, target: Path) -> None:
    with ExitStack() as owned:
        redis, processes = owned.enter_context(RedisServer()), owned.enter_context(parts())

        def verify(headed: bool, at: str = "") -> ServiceProcess:
            own = ("--heads", str(HEAD)) if headed else ()
            verifier = processes.start("verify", str(target), *WORDS, "--no-ngram", *own, at=at)
            verifier.ready()
            return verifier

        verifier = verify(first)
        peers = ("--verifier", verifier.address)
        orchestrator = processes.start("orchestrate", *peers, "--redis-url", redis.url, *LOADED_AGAIN)
        orchestrator.ready()
        client = owned.enter_context(Client(orchestrator.address))
        if first:
            _until_it_drafts(client)
        streams = []
        for one in asked():
            options = RequestOptions(max_tokens=LENGTH, temperature=one.temperature, seed=one.seed)
            streams.append(owned.enter_context(Stream(orchestrator.address, one.prompt, **options)))
        for stream in streams:
            stream.until(BEFORE)
        verifier.kill()
        verify(not first, at=verifier.address)
        for one, stream in zip(asked(), streams, strict=True):
            tokens = stream.rest()
            assert stream.error is None
            assert stream.finished is not None
            assert stream.finished.reason is FinishReason.LENGTH
            assert len(tokens) == LENGTH
            check_choices(one, tokens)
        say(f"tokens of the head: {[stream.finished.stats.tested_head for stream in streams if stream.finished]}")
        if not first:
            _until_it_drafts(client)


def _until_it_drafts(client: Client) -> None:
    """Its tokens are tested, in this text or the next one: a machine that is busy bears a try later."""
    prompt = asked()[0].prompt
    asked_blocking(lambda: client.complete(prompt, max_tokens=LENGTH // 2), lambda told: told.stats.tested_head)


KILLED = """
import os, signal, sys
from deploy.cli.main import main
from specwire.lm.training import loop
loop.EVALUATE_EVERY = loop.SAVE_EVERY = 2
step = loop.Optimiser.step
def killed(self, index):
    if index == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, index)
loop.Optimiser.step = killed
main(sys.argv[1:])
"""


def test_a_training_that_is_killed_comes_to_the_same_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its fifth step of six; four were kept."""
    target, answers = save_target(tmp_path / "target"), tmp_path / "answers"
    keep_answers(target, answers, TEXTS)
    whole, halves = (command(target, answers, tmp_path / name, "--steps", "6") for name in ("whole", "halves"))
    died = subprocess.run([sys.executable, "-c", KILLED, *halves], cwd=ROOT, timeout=START_LIMIT, check=False)
    assert died.returncode == -signal.SIGKILL
    assert not (tmp_path / "halves" / "training.json").exists()
    monkeypatch.setattr(loop, "EVALUATE_EVERY", 2)
    monkeypatch.setattr(loop, "SAVE_EVERY", 2)
    steps, step = list[int](), loop.Optimiser.step

    def counted(self: loop.Optimiser, index: int) -> None:
        steps.append(index)
        step(self, index)

    monkeypatch.setattr(loop.Optimiser, "step", counted)
    assert main(halves) == 0
    assert steps == [4, 5]
    assert main(whole) == 0
    curves = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("halves", "whole")]
    assert curves[0] == curves[1]
    assert [each["step"] for each in curves[0]["held_out_acceptance"]] == [2, 4, 6]
