"""A target with recurrent layers: its verifier dies mid-sentence, a client leaves, and each text is the target's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import Qwen3_5TextConfig

from specwire.core.messages import FinishReason
from tests.faults.parts import LOADED_AGAIN, parts
from tests.faults.streams import PROMPT, Stream, plain
from tests.lm.families import DELTA, PADDED, Family
from tests.lm.generated import without_end
from tests.lm.models import VOCABULARY, save
from tests.orchestrator.redis_for_tests import RedisServer

CONTEXT, LENGTH, BEFORE = 1024, 400, 60
OTHER = (9, 9)
# Of the target's weights, by which the drafter's are off.
NOISE = 0.01
WORDS = {f"w{index}": index for index in range(VOCABULARY)}
LOADING = ("--dtype", "float32", "--threads", "1", "--slots", "2")
FAMILY = Family("Qwen3.5", lambda: Qwen3_5TextConfig(**{**PADDED, "max_position_embeddings": CONTEXT}, **DELTA))


def test_a_text_goes_on_at_another_verifier_and_another_is_given_up(tmp_path: Path) -> None:
    model = without_end(FAMILY)
    target = save(model, tmp_path / "target", WORDS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn_like(parameter))
    draft = save(model, tmp_path / "draft", WORDS)
    with ExitStack() as owned:
        redis, processes = owned.enter_context(RedisServer()), owned.enter_context(parts())
        verifier = processes.start("verify", target, *LOADING)
        drafter = processes.start("draft", draft, *LOADING)
        peers = ("--verifier", verifier.address, "--drafter", drafter.address)
        orchestrator = processes.start("orchestrate", *peers, "--redis-url", redis.url, *LOADED_AGAIN)
        expected = plain(target, LENGTH)
        for service in (verifier, drafter, orchestrator):
            service.ready()
        with Stream(orchestrator.address, max_tokens=LENGTH) as stays:
            with Stream(orchestrator.address, OTHER, max_tokens=LENGTH) as leaves:
                leaves.until(BEFORE)
                assert leaves.tokens == plain(target, LENGTH, OTHER)[: len(leaves.tokens)]
            stays.until(BEFORE)
            verifier.restart()
            assert stays.rest() == expected
            assert stays.finished is not None
            assert stays.finished.reason is FinishReason.LENGTH
        # What it began with lies in a slot, and its states.
        with Stream(orchestrator.address, [*PROMPT, *expected[:BEFORE]], max_tokens=BEFORE) as again:
            assert again.rest() == expected[BEFORE : 2 * BEFORE]
        assert "MiB of recurrent layers' states" in verifier.said()
