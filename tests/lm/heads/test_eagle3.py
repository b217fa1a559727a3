"""EAGLE-3: the step against a loop written from the paper, both file formats, and files that are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed
from specwire.lm import load_model
from specwire.lm.heads.eagle3 import TAP_IDS, load, save
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.training.head import unrolled
from tests.lm import models
from tests.lm.heads.by_hand import CONFIG, LAYERS, head_of, reader_of
from tests.lm.heads.golden import DEPTH, GOLDEN, HEADS, LENGTH, OURS, SAID
from tests.lm.heads.original_eagle3 import OriginalEagle3, original_of, write_original


@torch.no_grad()
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("norm", ["none", "norm_before_fc", "fc_norm"])
@pytest.mark.parametrize("head_norms", [False, True])
def test_steps_are_those_of_a_loop(norm_before_residual: bool, norm_output: bool, norm: str, head_norms: bool) -> None:
    """At each place: the text's rows up to there, then three guesses, each behind the one before."""
    config = replace(
        CONFIG,
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
        norm_before_fc=norm == "norm_before_fc",
        fc_norm=norm == "fc_norm",
        head_norms=head_norms,
    )
    head = head_of(config)
    length, depth = 5, 3
    taps = torch.randn(1, length + depth, config.fused)
    tokens = torch.randint(config.vocabulary, (1, length + depth + 1))
    check_steps(list(unrolled(head, tokens, taps, depth)), reader_of(head), taps[0], tokens[0])


def check_steps(steps: Sequence[torch.Tensor], plain: OriginalEagle3, taps: torch.Tensor, tokens: torch.Tensor) -> None:
    """At each place: the text's rows up to there, then guesses, each behind the given token before."""
    for place in range(len(tokens) - len(steps) - 1):
        plain.forget()
        out = plain.extend(plain.fuse(taps[: place + 1]), tokens[1 : place + 2])[-1:]
        for step, logits in enumerate(steps):
            assert torch.allclose(logits[0, place], plain.logits(out)[0], atol=1e-4), (place, step)
            out = plain.extend(out, tokens[place + step + 2 :][:1])


@torch.no_grad()
@pytest.mark.parametrize("norm", ["norm_before_fc", "fc_norm"])
def test_it_is_read_as_it_was_written(norm: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {norm: True}
    head = head_of(replace(CONFIG, norm_before_residual=True, norm_output=True, head_norms=True, **more))
    save(head, tmp_path, "a target")
    again = load(tmp_path, LAYERS, head.embed_tokens.weight.detach())
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    said = load_file(tmp_path / "model.safetensors")["t2d"]
    assert said.nonzero().flatten().tolist() == list(range(0, 40, 2))


@torch.no_grad()
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("name", [OURS, *HEADS])
def test_logits_are_those_of_speculators_own_model(name: str, original: bool, tmp_path: Path) -> None:
    """Of files that it wrote, and of one that it read; in both formats. Place t reads features t and token t + 1."""
    folder = GOLDEN / name
    if original:
        original_of(folder, tmp_path, nested=True)
    head = load(tmp_path if original else folder, LAYERS, torch.zeros(40, 16)).float()
    said = load_file(folder / SAID)
    tokens = torch.cat([torch.zeros(1, 1, dtype=torch.long), said["tokens"]], dim=1)
    found = list(unrolled(head, tokens, said["features"], DEPTH))
    assert len(found) == len(said["logits"]) == DEPTH
    for logits, expected in zip(found, said["logits"], strict=True):
        assert logits.shape == (1, LENGTH - DEPTH, 20)
        assert torch.allclose(logits[0], expected[: LENGTH - DEPTH], atol=1e-5)
        assert expected.std() > 0.2


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
@pytest.mark.parametrize(("reader", "entered"), [("speculators", (0, 1, 2)), ("eagle_config", (1, 2, 3))])
@torch.no_grad()
def test_it_reads_the_hidden_states_of_the_layers_that_each_reader_means(
    reader: str, entered: tuple[int, ...], runtime: str, tmp_path: Path
) -> None:
    """Of one list of ids VLLM and speculators take what enters those layers, SGLang what leaves them."""
    shape = models.config("llama")
    shape.num_hidden_layers = 4
    target = models.build(shape)
    where = models.save(target, tmp_path / "target")
    head = head_of(replace(CONFIG, hidden=32, vocabulary=models.VOCABULARY, taps=(0, 1, 2)))
    save(head, tmp_path / "head", where, with_embedding=True)
    path = tmp_path / "head" / "config.json"
    whole = json.loads(path.read_text())
    if reader == "eagle_config":
        whole["eagle_config"] = {TAP_IDS: whole.pop(TAP_IDS)}
    path.write_text(json.dumps(whole))
    lm = load_model(where, slots=1, heads=str(path.parent), runtime=runtime, threads=1)
    assert isinstance(lm, HeadedModel)
    text = [3, 17, 8, 29, 11]
    lm.forward([Feed(0, 0, text, 1)])
    told = target(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    states = torch.cat([told[layer][0] for layer in entered], dim=-1)
    # OpenVINO's graph multiplies them by the head's first matrix.
    expected = states if runtime == "torch" else head.fuse(states)
    assert torch.allclose(lm.runner.tapped, expected, atol=1e-4)


@pytest.mark.parametrize("name", [OURS, *HEADS])
def test_a_head_in_the_original_format_is_written_as_speculators_has_it(name: str, tmp_path: Path) -> None:
    """By loading and saving it: the same tensors and the same settings as before it was in the original one."""
    before = load(GOLDEN / name, LAYERS, torch.zeros(40, 16))
    original_of(GOLDEN / name, tmp_path / "original", nested=True)
    save(load(tmp_path / "original", LAYERS, torch.zeros(40, 16)), tmp_path / "again", "a target", with_embedding=True)
    again = load(tmp_path / "again", LAYERS, torch.zeros(40, 16))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["speculators_model_type"] == "eagle3"
    assert again.config == before.config
    assert again.state_dict().keys() == before.state_dict().keys()
    for part, tensor in before.state_dict().items():
        assert torch.equal(again.state_dict()[part], tensor), part


def test_what_speculators_has_read_is_what_is_written(tmp_path: Path) -> None:
    folder = GOLDEN / OURS
    save(load(folder, LAYERS, torch.zeros(40, 16)), tmp_path, "a target", with_embedding=True)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    again, before = (load_file(each / "model.safetensors") for each in (tmp_path, folder))
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)


# The original format, against a reader of it that shares nothing with ours.

# config.json's ids of taps, and which of transformers' hidden states (0: the embedding) they mean of 8 layers.
TAP_READERS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "paper": ({}, (2, 4, 5)),
    "entering": ({TAP_IDS: [1, 3, 6]}, (1, 3, 6)),
    "sglang": ({"eagle_config": {TAP_IDS: [1, 3, 6]}}, (2, 4, 7)),
}
TEXT = [3, 17, 8, 29, 11, 5, 23, 40]


def deep_target(folder: Path) -> tuple[Any, str]:
    """Of 8 layers; where it is."""
    shape = models.config("llama")
    shape.num_hidden_layers = 8
    target = models.build(shape)
    return target, models.save(target, folder / "target")


def original(folder: Path, target: Any, reader: str, normed: bool) -> Path:
    more = TAP_READERS[reader][0]
    nested = more.get("eagle_config")
    flag = {"norm_before_residual": normed}
    write_original(folder, target.config, 24, 20, more | ({"eagle_config": nested | flag} if nested else flag))
    return folder


def taps_of(target: Any, text: list[int], states: tuple[int, ...]) -> torch.Tensor:
    told = target(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([told[at][0] for at in states], dim=-1)


def drafts(where: str, head: Path, runtime: str, depth: int) -> list[int]:
    lm = load_model(where, slots=1, heads=str(head), runtime=runtime, threads=1)
    assert isinstance(lm, HeadedModel)
    lm.forward([Feed(0, 0, TEXT[:-1], 1)])
    (drafted,) = lm.draft([HeadRequest(0, TEXT, Sampling(), depth)])
    return drafted


@torch.no_grad()
@pytest.mark.parametrize("runtime", ["torch", "openvino"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("reader", TAP_READERS)
def test_the_original_format_is_served_as_another_reader_computes_it(
    reader: str, normed: bool, runtime: str, tmp_path: Path
) -> None:
    """Five guesses in a row, behind taps of transformers' target; on torch converted there and back, too."""
    target, where = deep_target(tmp_path)
    head = original(tmp_path / "head", target, reader, normed)
    wanted, _ = OriginalEagle3(head).draft(taps_of(target, TEXT[:-1], TAP_READERS[reader][1]), TEXT, 5)
    assert drafts(where, head, runtime, 5) == wanted
    save(load(head, 8, torch.zeros(0, 0)), tmp_path / "converted", where, with_embedding=True)
    original_of(tmp_path / "converted", tmp_path / "back", nested=reader == "sglang")
    for folder in (tmp_path / "converted", tmp_path / "back") if runtime == "torch" else ():
        assert drafts(where, folder, runtime, 5) == wanted, folder


@torch.no_grad()
def test_each_convention_of_the_original_format_says_other_tokens(tmp_path: Path) -> None:
    """Else the test above would not tell them apart."""
    target, _ = deep_target(tmp_path)
    said = set[tuple[int, ...]]()
    for reader, (_, states) in TAP_READERS.items():
        for normed in (False, True):
            head = OriginalEagle3(original(tmp_path / f"{reader}{normed}", target, reader, normed))
            said.add(tuple(head.draft(taps_of(target, TEXT[:-1], states), TEXT, 5)[0]))
    assert len(said) == 2 * len(TAP_READERS)


@torch.no_grad()
@pytest.mark.parametrize("normed", [False, True])
def test_logits_of_the_original_format_are_those_of_another_reader(normed: bool, tmp_path: Path) -> None:
    """At every place, each step behind given tokens; of the files as they are, and converted there and back."""
    target, depth = models.build(models.config("llama")), 4
    head = original(tmp_path / "head", target, "paper", normed)
    save(load(head, 8, torch.zeros(0, 0)), tmp_path / "converted", "a target", with_embedding=True)
    original_of(tmp_path / "converted", tmp_path / "back")
    taps, tokens = torch.randn(1, 12, 96), torch.randint(models.VOCABULARY, (1, 12))
    for folder in (head, tmp_path / "converted", tmp_path / "back"):
        steps = list(unrolled(load(folder, 8, torch.zeros(0, 0)), tokens, taps, depth))
        plain = OriginalEagle3(head if folder.name == "converted" else folder)
        check_steps(steps, plain, taps[0], tokens[0])
        own = torch.arange(20)
        assert torch.equal(load(folder, 8, torch.zeros(0, 0)).target_ids(own), plain.target_ids(own))


@torch.no_grad()
def test_the_other_reader_says_what_speculators_model_says_of_a_converted_head(tmp_path: Path) -> None:
    """So the two formats' readers agree with each other, not only with ours."""
    original_of(GOLDEN / "plain", tmp_path)
    said, plain = load_file(GOLDEN / "plain" / SAID), OriginalEagle3(tmp_path)
    for place in range(LENGTH - DEPTH):
        plain.forget()
        out = plain.extend(plain.fuse(said["features"][0, : place + 1]), said["tokens"][0, : place + 1])[-1:]
        for step in range(DEPTH):
            assert torch.allclose(said["logits"][step][place], plain.logits(out)[0], atol=1e-5)
            out = plain.extend(out, said["tokens"][0, place + step + 1 :][:1])
