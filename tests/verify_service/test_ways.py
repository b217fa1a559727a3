"""How a verifier computes, from the command line to what it says of itself."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.stack.options import DRAFTER, VERIFIER, stack_options
from specwire.core.invalid import InvalidParameter
from specwire.options import STACK, add_options
from specwire.rpc.server_options import ModelServiceOptions
from tests.verify_service.peer import connected, serving
from verify_service.server import start


@pytest.mark.parametrize(
    ("runtime", "quantization", "deterministic"), [("openvino", "int8", False), ("torch", "none", True)]
)
async def test_a_verifier_tells_its_quantization_and_that_it_is_deterministic(
    runtime: str, quantization: str, deterministic: bool, llama: Path
) -> None:
    options = ModelServiceOptions(str(llama), slots=2, runtime=runtime)
    running = await start(replace(options, quantization=quantization, deterministic=deterministic))
    try:
        assert running.info.quantization == quantization
        assert running.info.deterministic or not deterministic
        whole = await start(options)
        await whole.stop()
        assert whole.info.quantization == "none"
        assert (whole.info.weights_fingerprint == running.info.weights_fingerprint) is (quantization == "none")
        assert whole.info.vocabulary_fingerprint == running.info.vocabulary_fingerprint
    finally:
        await running.stop()


def test_flags_reach_the_services_that_they_are_for() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, STACK)
    words = ["--target", "scripted:1", "--draft", "scripted:1", "--deterministic", "--quantization", "int8"]
    services = stack_options(parser.parse_args(words)).services()
    for role, deterministic in ((VERIFIER, True), (DRAFTER, False)):
        assert services[role].deterministic is deterministic
        assert services[role].quantization == "int8"


def test_a_quantization_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="quantization: must be one of none, .*, bfloat16, not 'int2'"):
        ModelServiceOptions("scripted:1", quantization="int2")


async def test_a_scripted_model_is_told_as_it_is() -> None:
    async with serving("scripted:5", slots=2) as running, connected(running) as peer:
        assert (peer.info.quantization, peer.info.deterministic) == ("none", False)
