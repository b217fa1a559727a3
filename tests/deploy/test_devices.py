"""Which device each model of `specwire up` is on, and whether it is compiled, reaches the model's own service."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

import demo_pair
import verify_service.server
from deploy.stack.hosts import PlainService
from deploy.stack.options import DRAFTER, VERIFIER, StackOptions, included_head, stack_options
from specwire.core.invalid import InvalidParameter
from specwire.options import STACK, add_options
from specwire.rpc.server_options import ModelServiceOptions, model_options


def asked(*words: str) -> StackOptions:
    line = argparse.ArgumentParser()
    add_options(line, STACK)
    return stack_options(line.parse_args(words))


def told(options: ModelServiceOptions) -> ModelServiceOptions:
    """What a service reads from the command line that a child process of the stack is started with."""
    line = argparse.ArgumentParser()
    verify_service.server.add_arguments(line)
    _, _, _, *words = PlainService(VERIFIER, options, 1.0, pytest.fail)._command(options.listen)
    args = line.parse_args(words)
    return model_options(args)


# One of each option, none of which is its default.
EVERY = {
    "model": "m",
    "listen": "127.0.0.1:7",
    "dtype": "bfloat16",
    "device": "cuda:1",
    "runtime": "openvino",
    "threads": 3,
    "slots": 5,
    "context": 64,
    "insecure": True,
    "ngram": False,
    "text_memory": 0,
    "references": ("a", "b"),
    "quantization": "int8",
    "heads": "h",
    "kv_memory": 1 << 20,
    "metrics": "127.0.0.1:8",
    "compiled": True,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "engine": "vllm",
    "engine_options": '{"enforce_eager": true}',
    "kv_type": "q8_0",
    "gpu_layers": 3,
}


def test_every_option_reaches_a_child_process() -> None:
    assert {each.name for each in fields(ModelServiceOptions)} == {*EVERY, "deterministic", "tls", "keys"}
    every = ModelServiceOptions(**EVERY)  # type: ignore[arg-type]  # each of its own type
    assert told(every) == every
    exact = ModelServiceOptions("m", deterministic=True)
    assert told(exact) == exact
    assert "--deterministic" not in PlainService(DRAFTER, exact, 1.0, pytest.fail)._command(exact.listen)


@pytest.mark.parametrize(
    ("words", "target", "draft", "compiled"),
    [
        ((), "cpu", "cpu", False),
        (("--device", "cuda:0", "--compile"), "cuda:0", "cuda:0", True),
        (("--device", "cuda:1", "--draft-device", "cpu"), "cuda:1", "cpu", False),
        (("--draft-device", "cuda:0"), "cpu", "cuda:0", False),
    ],
)
def test_they_reach_the_services(words: tuple[str, ...], target: str, draft: str, compiled: bool) -> None:
    services = asked(*words).services()
    assert (services[VERIFIER].device, services[DRAFTER].device) == (target, draft)
    assert {each.compiled for each in services.values()} == {compiled}
    for each in services.values():
        assert told(each) == each


def test_a_target_without_a_device_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="device: must not be empty"):
        asked("--device", "")


@pytest.mark.parametrize(
    "words",
    [
        ("--no-heads",),
        ("--heads", ""),
        ("--compile",),
        ("--deterministic",),
        ("--device", "cuda:0"),
    ],
)
def test_the_included_head_comes_with_its_target(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the demo, where the target is served as heads can be, nothing else is said, and the head is there."""

    def included(*said: str) -> str:
        parser = argparse.ArgumentParser()
        add_options(parser, STACK)
        return included_head(parser.parse_args([*said]))

    monkeypatch.setattr(demo_pair, "HEAD", tmp_path)
    assert included() == included("--no-draft", "--no-ngram") == str(tmp_path)
    if words[0] != "--heads":
        assert included(*words) == ""
    assert included("--target", "t") == asked("--target", "t").heads == asked().heads == "auto"
    assert asked("--target", "t", "--no-heads").heads == asked("--target", "t", "--heads", "").heads == ""
    assert asked("--target", "t", "--heads", "h").heads == asked("--heads", "h").heads == "h"
    monkeypatch.setattr(demo_pair, "HEAD", tmp_path / "none")
    assert included() == ""
