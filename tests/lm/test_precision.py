"""What `--dtype auto` means, on machines that are not here."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

import pytest
import torch
from torch.backends import mkldnn

from deploy.cli.diagnosis.doctor_models import check_choices
from specwire.lm import load_model, native_dtype
from specwire.lm.load import native_precision
from tests.lm.models import build, config, save


class Machine:
    """One whose processor has these instructions, and whose GPU, if any, computes bfloat16 or does not."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def is_(self, kind: str, avx512_bf16: bool = False, onednn: bool = False, gpu: bool | None = None) -> None:
        self._patch.setattr(platform, "machine", lambda: kind)
        self._patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
        self._patch.setattr(mkldnn, "is_available", lambda: onednn)
        self._patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn, raising=False)
        self._patch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        self._patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpu)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("kind", "avx512_bf16", "onednn", "dtype", "why"),
    [
        ("x86_64", False, False, "float32", "no AVX512_BF16"),  # AVX2
        ("x86_64", False, True, "float32", "no AVX512_BF16"),  # AVX-512 without: oneDNN would emulate it
        ("x86_64", True, True, "bfloat16", "computes bfloat16"),  # and with AMX, which implies it
        ("AMD64", True, False, "float32", "oneDNN does not"),  # held to less
        ("aarch64", False, False, "float32", "oneDNN does not"),
        ("aarch64", False, True, "bfloat16", "computes bfloat16"),  # ARMv8.6
    ],
)
def test_by_the_processor(machine: Machine, kind: str, avx512_bf16: bool, onednn: bool, dtype: str, why: str) -> None:
    machine.is_(kind, avx512_bf16, onednn)
    assert native_dtype() == dtype
    assert why in native_precision().reason
    told = {each.topic: each.text for each in check_choices()}
    assert told["dtype"] == f"auto is {dtype}: {native_precision().reason}"
    assert told["runtime"].startswith("auto is openvino" if importlib.util.find_spec("openvino") else "auto is torch")
    if importlib.util.find_spec("openvino"):
        assert "as it is installed" in told["runtime"]
        assert told["runtime"].endswith("; torch for others")
        assert told["int8"].startswith("int8-dynamic ")


@pytest.mark.parametrize(("computes", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_by_the_gpu(machine: Machine, computes: bool, dtype: str) -> None:
    machine.is_("x86_64", True, True)
    assert native_dtype("cuda:0") == native_dtype("nonsense") == "float32", "who uses it finds out whether it is there"
    machine.is_("x86_64", True, True, gpu=computes)
    assert native_dtype("cuda:1") == dtype
    told = {each.topic: each.text for each in check_choices()}
    assert told["dtype"].split()[2] == f"{dtype}:"
    assert told["runtime"] == "auto is torch on cuda:0: openvino computes on processors"


def test_a_model_tells_what_was_chosen_and_is_that_one(machine: Machine, tmp_path: Path) -> None:
    """So verifiers of two kinds of machine are two targets, and a cluster never mixes them."""
    folder = save(build(config("llama")), tmp_path)
    machine.is_("x86_64", True, True)
    emulated = load_model(folder, slots=1, dtype="auto").info
    stated = load_model(folder, slots=1, dtype="bfloat16").info
    machine.is_("x86_64")
    plain = load_model(folder, slots=1, dtype="auto").info
    assert (emulated.dtype, plain.dtype) == ("bfloat16", "float32")
    assert emulated.weights_fingerprint == stated.weights_fingerprint != plain.weights_fingerprint
