"""A real model by its name, through the whole stack on llama.cpp: what README's reader types first."""

from __future__ import annotations

import importlib.util

import pytest

from specwire.client import Client
from tests.integration.stack_process import running
from tests.real_models import SMOL, real_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not there: make setup-llamacpp"
)


def test_a_named_model_answers_through_the_whole_stack() -> None:
    """Its tokenizer is made of the file's table."""
    real_model(SMOL)
    words = ("up", "--target", SMOL, "--runtime", "llamacpp", "--kv-type", "f16", "--slots", "2")
    with running(*words, "--no-draft", "--target-threads", "1", "--listen", "127.0.0.1:0", "--json") as command:
        ready = command.ready()
        assert ready["target"] == SMOL
        with Client(ready["address"]) as client:
            told = client.complete("The capital of France is", max_tokens=8, timeout=120.0)
            assert "Paris" in told.text
            assert told.tokens == client.complete("The capital of France is", max_tokens=8, timeout=120.0).tokens
