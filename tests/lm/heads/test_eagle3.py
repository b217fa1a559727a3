"""EAGLE-3: the step against a loop written from the paper, both file formats, and files that are refused."""

from __future__ import annotations

import json
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
from tests.lm.heads.original_eagle3 import OriginalEagle3, original_of


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
    steps, plain = list(unrolled(head, tokens, taps, depth)), reader_of(head)
    for place in range(length):
        plain.forget()
        out = plain.extend(plain.fuse(taps[0, : place + 1]), tokens[0, 1 : place + 2])[-1:]
        for step, logits in enumerate(steps):
            assert torch.allclose(logits[0, place], plain.logits(out)[0], atol=1e-4), (place, step)
            out = plain.extend(out, tokens[0, place + step + 2 :][:1])


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


# The original format, against a reader of it that shares nothing with ours.

# Which of transformers' hidden states (0: the embedding) each convention of config.json means of 8 layers.
TAP_READERS = {"paper": (2, 4, 5), "entering": (1, 3, 6), "sglang": (2, 4, 7)}
TEXT = [3, 17, 8, 29, 11, 5, 23, 40]


def original(folder: Path, reader: str, normed: bool) -> Path:
    """A head of random weights for a target of 8 layers."""
    shape: dict[str, Any] = {"hidden": 32, "vocabulary": models.VOCABULARY, "norm_before_residual": normed}
    save(head_of(replace(CONFIG, **shape, taps=TAP_READERS[reader]), 1), folder / "ours", "", with_embedding=True)
    original_of(folder / "ours", folder, nested=reader == "sglang")
    if reader == "paper":  # which ids are meant goes without saying
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({key: said[key] for key in said if key != TAP_IDS}))
    return folder


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
    shape = models.config("llama")
    shape.num_hidden_layers = 8
    target = models.build(shape)
    where = models.save(target, tmp_path / "target")
    head = original(tmp_path / "head", reader, normed)
    told = target(input_ids=torch.tensor([TEXT[:-1]]), output_hidden_states=True).hidden_states
    drafted = {
        states: OriginalEagle3(head).draft(torch.cat([told[at][0] for at in states], dim=-1), TEXT, 5)[0]
        for states in TAP_READERS.values()
    }
    wanted = drafted[TAP_READERS[reader]]
    assert list(drafted.values()).count(wanted) == 1, "else no reader would be told from another"
    assert drafts(where, head, runtime, 5) == wanted
    save(load(head, 8, torch.zeros(0, 0)), tmp_path / "converted", where, with_embedding=True)
    original_of(tmp_path / "converted", tmp_path / "back", nested=reader == "sglang")
    for folder in (tmp_path / "converted", tmp_path / "back") if runtime == "torch" else ():
        assert drafts(where, folder, runtime, 5) == wanted, folder
