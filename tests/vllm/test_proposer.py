"""The class that vLLM loads: its options, its thread, and that nothing of it ends a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from demo_pair import TARGET
from specwire.core.invalid import InvalidParameter
from specwire.lm import load_model
from specwire.lm.runners import vllm
from specwire.lm.scripted import Script
from specwire.vllm import Proposer, proposer
from specwire.vllm.drafting import DraftingOptions, VllmRow, VllmTarget
from specwire.vllm.proposer import MOST_WAIT_S, ProposerThread, UnknownEngine, describe, options_of
from tests.vllm.batch import Batch, rows_of

SCRIPT = "scripted:7:memory=2:vocab=8"
NOBODY = DraftingOptions()
INFO = load_model(SCRIPT, slots=1).info
ENGINE = VllmTarget(
    "target", INFO.vocabulary, INFO.vocabulary_fingerprint, context=256, most=4, leads=True, device="gpu"
)


def config(**changed: Any) -> Any:
    """Make what is read of a VllmConfig."""
    model = {
        "model": str(TARGET),
        "tokenizer": str(TARGET),
        "tokenizer_revision": None,
        "trust_remote_code": False,
        "skip_tokenizer_init": False,
        "max_model_len": 512,
        "get_vocab_size": lambda: 4096,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**(model | changed)),
        speculative_config=SimpleNamespace(num_speculative_tokens=5),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a vLLM of a tested version be installed."""
    monkeypatch.setattr(vllm, "_version", lambda _: "0.32.0+cpu")


@pytest.fixture
def thread() -> Iterator[ProposerThread]:
    one = ProposerThread(ENGINE, NOBODY)
    yield one
    one.stop()
    one.stop()
    assert not one._thread.is_alive()


def test_the_engine_is_described_as_a_verifier_of_ours_would(tested: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_model(str(TARGET), slots=1, context=64).info
    told = describe(config())
    assert (told.vocabulary, told.vocabulary_fingerprint) == (own.vocabulary, own.vocabulary_fingerprint)
    assert (told.model, told.context, told.most, told.leads, told.device) == ("target", 512, 5, True, "cpu")
    monkeypatch.setattr(proposer, "TOKENIZER", "no such file")  # transformers reads it then
    assert describe(config()) == told
    without = config()
    del without.speculative_config.num_speculative_tokens
    with pytest.raises(UnknownEngine, match="num_speculative_tokens.*tested with"):
        describe(without)


def test_an_untested_vllm_is_refused_with_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_version", lambda _: "9.1.0")
    with pytest.raises(UnknownEngine, match=r"specwire\.vllm: vLLM 9\.1\.0 is not known here; tested with vLLM 0\.32"):
        describe(config())


def test_options_are_those_of_a_command_line() -> None:
    told = "--drafter 10.0.0.2:50052 --drafter [::1]:7 --plan stream:1,8 --no-ngram"
    options = options_of({"SPECWIRE_PROPOSER": told})
    assert options == DraftingOptions("stream:1,8", ngram=False, drafters=("10.0.0.2:50052", "[::1]:7"))
    assert options_of({}) == NOBODY


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("--drafter nowhere", "drafter: must be HOST:PORT.*'nowhere'"),
        ("--draftor a:1", "unrecognized arguments: --draftor"),
        ("--plan twice", "plan: must be auto.*'twice'"),
        ("--tls-ca /no/such/file", "tls-ca: /no/such/file cannot be read"),
        ("--drafter 10.0.0.2:1", r"token: is not sent to 10\.0\.0\.2:1 unencrypted"),
    ],
)
def test_wrong_options_are_named(told: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        options_of({"SPECWIRE_PROPOSER": told, "SPECWIRE_TOKEN": "secret-secret-secret"})


def batch(thread: ProposerThread) -> Batch:
    return Batch(Script.parse(SCRIPT), ENGINE, lambda *told: thread.propose(rows_of(*told)))


def test_a_text_that_repeats_itself_takes_fewer_steps(thread: ProposerThread) -> None:
    served = batch(thread)
    text = served.add((1, 2, 3))
    while len(text.output) < 120:
        served.step()
        time.sleep(0.002)
    assert text.output == served.plain(text.prompt, len(text.output))
    assert served.steps < 90


def test_an_error_of_ours_switches_proposing_off_and_ends_nothing(
    thread: ProposerThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(rows: object) -> list[list[int]]:
        raise ValueError("a bug")

    served = batch(thread)
    text = served.add((1, 2, 3))
    served.step()
    monkeypatch.setattr(thread._drafting, "step", fail)
    for _ in range(5):
        served.step()
        assert text.window == []
    assert len([record for record in caplog.records if "is off from now on" in record.getMessage()]) == 1
    assert thread._drafting._requests == {}


def test_a_step_does_not_wait_for_a_thread_that_hangs(thread: ProposerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    served = batch(thread)
    text = served.add((1, 2, 3))

    def hang(rows: Sequence[VllmRow]) -> list[list[int]]:
        time.sleep(1.0)
        return [[7] for _ in rows]

    monkeypatch.setattr(thread._drafting, "step", hang)
    began = time.monotonic()
    served.step()
    assert time.monotonic() - began < 0.9
    assert text.window == []
    assert MOST_WAIT_S < 0.1


def test_of_several_ranks_only_the_first_dials(tested: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer, "_leads", lambda parallel: False)
    one = Proposer(config())
    nothing = one.propose([[1], []], np.array([3, 2]), np.zeros((2, 8), np.int32))
    assert nothing == [[], []]
