"""A real model's text is the same to the bit: with and without drafting, beside others, asked again, taken over."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from specwire.client import Client
from specwire.client.requests import RequestOptions
from specwire.lm import load_model
from specwire.lm.gguf_file import read_gguf
from tests.faults.parts import Parts, ServiceProcess, parts
from tests.faults.streams import Stream
from tests.lm.gguf_files import rounds_alike
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_port
from tests.real_models import SMOL, real_model

# Runtimes, and their packages; threads: llama.cpp's wait for each other by spinning.
PACKAGES = {"openvino": "openvino", "llamacpp": "llama_cpp"}
THREADS = {"openvino": "2", "llamacpp": "1"}
LENGTH, CONTEXT = 120, 512
WORDS = ("--deterministic", "--slots", "6", "--context", str(CONTEXT))
# Texts that repeat themselves, so that n-grams have something to guess.
QUESTIONS = (
    "Write a list of ten short sentences that all begin with the words: The old house by the river.",
    "Count from one to forty in words, one number a line, and begin each line with the word number.",
    "What is the capital of France? Answer, and then say the same answer again four times.",
)


class Bits:
    """Two verifiers on one log, and what orchestrates them."""

    def __init__(self, owned: Parts, redis: RedisServer, runtime: str) -> None:
        words = ("--runtime", runtime, "--threads", THREADS[runtime], *WORDS)
        self.verifiers: list[ServiceProcess] = [owned.start("verify", SMOL, *words) for _ in range(2)]
        for each in self.verifiers:
            each.ready()
        named = [word for each in self.verifiers for word in ("--verifier", each.address)]
        self.orchestrator = owned.start("orchestrate", *named, "--redis-url", f"redis://{redis.tcp}")
        self.orchestrator.ready()


@pytest.fixture(scope="module", params=PACKAGES)
def bits(request: pytest.FixtureRequest) -> Iterator[Bits]:
    """Give the processes, which are gone afterwards."""
    real_model(SMOL)
    runtime = request.param
    if importlib.util.find_spec(PACKAGES[runtime]) is None:
        pytest.skip(f"{runtime} is not there: pip install 'specwire[{runtime}]'")
    if runtime == "openvino":
        from specwire.lm.runners.openvino.runner import rounds_activations

        if not rounds_activations():
            pytest.skip("the processor has no VNNI, and products of 8 bits and floats change with the rows")
    else:
        from specwire.lm.runners.llamacpp.runner import GgufWeights

        if not rounds_alike(GgufWeights(read_gguf(real_model(SMOL)))):
            pytest.skip("this build of llama.cpp rounds a row by how many are computed with it")
    with RedisServer(port=free_port()) as redis, parts() as owned:
        yield Bits(owned, redis, runtime)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Questions in the model's own template."""
    tokenizer = Tokenizer.from_str(load_model(real_model(SMOL), slots=1, context=2).info.tokenizer_json.decode())
    asked = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in QUESTIONS]
    return [tokenizer.encode(each).ids for each in asked]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_neither_drafting_nor_others_nor_a_killed_verifier_change_a_real_text(
    bits: Bits, prompts: list[list[int]], temperature: float
) -> None:
    wanted: RequestOptions = {"max_tokens": LENGTH, "temperature": temperature, "seed": 7, "ignore_eos": True}
    with Client(bits.orchestrator.address) as client:
        plainly: RequestOptions = {**wanted, "drafting": False}
        plain = [client.complete(each, **plainly).tokens for each in prompts]
        again = [client.complete(each, **wanted) for each in prompts]
    assert [each.tokens for each in again] == plain
    if temperature == 0.0:
        assert sum(each.stats.accepted_ngram for each in again) > 0
    at_once = [Stream(bits.orchestrator.address, each, **wanted) for each in (*prompts, *prompts)]
    for stream in at_once:
        stream.until(LENGTH // 4)
    bits.verifiers[0].send(signal.SIGKILL)
    texts = [tuple(stream.rest()) for stream in at_once]
    for stream in at_once:
        stream.close()
    bits.verifiers[0].restart()
    bits.verifiers[0].ready()
    assert texts == [*plain, *plain]
    assert f"link to {bits.verifiers[0].address} lost" in bits.orchestrator.said()
