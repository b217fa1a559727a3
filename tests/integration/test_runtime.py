"""Drafter and verifier on OpenVINO: the text is that of the same models on torch, up to near-ties."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.client import Client
from specwire.lm import Feed, LanguageModel, load_model, native_dtype
from specwire.text.tokenizer import encode, load_tokenizer
from tests.integration.stack_process import running

TOKENS, NEAR_TIE = 48, 1e-4


def test_both_models_on_openvino_give_the_text_of_torch() -> None:
    up = ["up", "--json", "--listen", "127.0.0.1:0", "--target", str(TARGET), "--draft", str(DRAFT)]
    lm = load_model(str(TARGET), slots=1)
    prompt = encode(load_tokenizer(lm.info.tokenizer_json), held_out_prompts()[0].text)
    with running(*up, "--runtime", "openvino") as command:
        ready = command.ready()
        for part in ("-m verify_service", "-m draft_service"):
            assert "libopenvino" in Path(f"/proc/{command.pid_of(part)}/maps").read_text()
        with Client(ready["address"]) as client:
            plain, drafted = (
                client.complete(prompt, max_tokens=TOKENS, ignore_eos=True, drafting=drafting, timeout=120.0)
                for drafting in (False, True)
            )
    expected = decode(lm, prompt)
    for completion in (plain, drafted):
        pairs = enumerate(zip(expected, completion.tokens, strict=True))
        at = next((index for index, (one, other) in pairs if one != other), None)
        if at is not None:
            lm.rollback(0, 0)
            scores = lm.forward([Feed(0, 0, [*prompt, *expected[:at]], 1)])[0]
            assert scores.max() - scores[completion.tokens[at]] < NEAR_TIE


def test_by_default_a_stack_is_on_openvino_in_what_the_processor_computes() -> None:
    """Nothing is said of dtype and runtime; the services tell what they made of it."""
    up = ["up", "--json", "--listen", "127.0.0.1:0", "--target", str(TARGET), "--draft", str(DRAFT)]
    environment = {"SPECWIRE_DTYPE": "", "SPECWIRE_RUNTIME": ""}  # an empty variable counts as none
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with running(*up) as command:
            ready = command.ready()
            with Client(ready["address"]) as client:
                info = client.server_info()
                completion = client.complete("def f(n):", max_tokens=8, ignore_eos=True, timeout=120.0)
    assert (info.target.dtype, info.target.runtime) == (native_dtype(), "openvino")
    assert [(each.dtype, each.runtime) for each in info.drafters] == [(native_dtype(), "openvino")]
    assert len(completion.tokens) == 8


def decode(lm: LanguageModel, prompt: Sequence[int]) -> list[int]:
    """What the model says greedily, token by token."""
    text = list(prompt)
    for _ in range(TOKENS):
        held = lm.cached(0)
        text.append(int(lm.forward([Feed(0, held, text[held:], 1)]).argmax()))
    return text[len(prompt) :]
