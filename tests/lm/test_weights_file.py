"""Weights in a mapped file: converted once, in memory once, bounded, and no worse where no file can be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from specwire.core.model import INT8
from specwire.lm import Feed, LanguageModel, gguf_weights, load_model
from specwire.lm.gguf_file import read_gguf
from specwire.lm.gguf_weights import GgufTensors, cache_folder, config_of, model_of_file
from specwire.lm.linear import GROUP, round_layers
from tests.lm.gguf_files import write
from tests.lm.models import build, config, plain

TEXT = [3, 17, 44, 8, 29]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a GGUF file; every model is worth a file of weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_weights, "LEAST_BYTES", 0)
    return write(build(config("llama-biased-tied")), tmp_path / "a.gguf")


def rows(lm: LanguageModel) -> torch.Tensor:
    return lm.forward([Feed(0, 0, TEXT, len(TEXT))]).clone()


def files() -> list[Path]:
    return sorted(cache_folder().iterdir())


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_the_second_start_converts_nothing(path: str, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rows(load_model(path, slots=2, runtime=runtime))
    assert float((first - plain(build(config("llama-biased-tied")), TEXT)).abs().max()) < 1e-3
    (kept,) = files()

    def read_into(tensors: GgufTensors, name: str, target: torch.Tensor) -> None:
        raise AssertionError(f"{name} was read again")

    monkeypatch.setattr(GgufTensors, "read_into", read_into)
    assert torch.equal(rows(load_model(path, slots=2, runtime=runtime)), first)
    assert files() == [kept]


def test_each_precision_has_a_file_of_its_own(path: str) -> None:
    for dtype in ("float32", "bfloat16", "float32"):
        load_model(path, slots=1, dtype=dtype)
    assert [each.name.rpartition("-")[2] for each in files()] == ["bfloat16.weights", "float32.weights"]


def test_eight_bits_are_kept_as_they_are_rounded(path: str) -> None:
    """What is read once is what rounding the whole model gives, the output layer that is the embedding, too."""
    file = read_gguf(path)
    kept = model_of_file(file, config_of(file), torch.bfloat16, INT8)
    assert [each.name.rpartition("-")[2] for each in files()] == [f"int8x{GROUP}.weights"]
    whole = model_of_file(file, config_of(file), torch.float32)
    round_layers(whole, dynamic=False)
    expected, found = (dict(model.named_parameters()) for model in (whole, kept))
    assert expected.keys() == found.keys()
    assert any(name.endswith("lm_head.integers") for name in found)
    for name, each in expected.items():  # what is rounded is so from float32, whatever the rest is kept in
        rounded = name.endswith(("integers", "scale"))
        assert torch.equal(found[name], each if rounded else each.bfloat16()), name
    assert whole.get_submodule("lm_head").get_parameter("integers").abs().max() == 127


def test_a_file_that_is_cut_is_made_anew(path: str) -> None:
    first = rows(load_model(path, slots=1))
    (kept,) = files()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-8])
    assert torch.equal(rows(load_model(path, slots=1)), first)
    assert kept.read_bytes() == whole


def test_the_ones_unused_for_longest_go(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(path, slots=1)
    (kept,) = files()
    for age, name in enumerate(("new", "old", "oldest")):
        other = kept.with_name(f"{name}.weights")
        other.write_bytes(bytes(kept.stat().st_size))
        os.utime(other, (1000 - age, 1000 - age))
    monkeypatch.setattr(gguf_weights, "MOST_BYTES", 4 * kept.stat().st_size)
    load_model(path, slots=1, dtype="bfloat16")  # half as long
    assert [each.stem for each in files()] == sorted(
        [kept.stem, kept.stem.replace("float32", "bfloat16"), "new", "old"]
    )


def test_without_a_folder_weights_are_kept_in_memory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", path)  # a file, in which nothing can be made
    assert rows(load_model(path, slots=1)).shape == (len(TEXT), 50)
