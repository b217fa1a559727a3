"""The plain forward of the Llama family is transformers', and a GGUF file is served without importing that."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specwire.core.model import INT8, ModelError
from specwire.lm.gguf_file import GgufFile, read_gguf
from specwire.lm.gguf_weights import config_of, full_config_of, model_of_file
from specwire.lm.plain_decoder import PlainDecoder
from tests.lm.gguf_files import write
from tests.lm.models import CONTEXT, VOCABULARY, build, config

KINDS = ["llama", "llama-biased-tied", "mistral", "qwen2", "qwen3"]
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
# What transformers pulls in, and what it takes seconds for.
HEAVY = ("transformers", "sympy", "torch._dynamo", "torch.distributed.tensor", "scipy")


def written(kind: str, folder: Path, changed: dict[str, Any]) -> GgufFile:
    """A file, with some entries of its architecture changed."""
    file = read_gguf(write(build(config(kind)), folder / "a.gguf"))
    said = {f"{file.architecture}.{key}": value for key, value in changed.items()}
    return replace(file, metadata={**file.metadata, **said})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [{}, LINEAR], ids=["default", "linear"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_transformers_computes(
    kind: str, changed: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    file = written(kind, tmp_path, changed)
    own, theirs = (model_of_file(file, made, dtype) for made in (config_of(file), full_config_of(file)))
    assert isinstance(own, PlainDecoder)
    assert own.architecture == type(theirs).__name__
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    text = torch.randint(3, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found, expected = (model(input_ids=text, use_cache=False).logits.float() for model in (own, theirs))
    tolerance = 1e-5 if dtype == torch.float32 else 1 / 64
    assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max())


def test_heads_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    file = written("llama", tmp_path, {"attention.head_count": 3})
    with pytest.raises(ModelError, match="num_attention_heads: 3 are no multiple of 2 key heads"):
        config_of(file)


def test_another_rotation_is_left_to_transformers(tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 24}
    file = written("llama", tmp_path, yarn)
    made = config_of(file)
    assert made.rope_parameters["rope_type"] == "yarn"
    assert not isinstance(model_of_file(file, made, torch.float32, INT8), PlainDecoder)


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_what_transformers_imports_is_not_imported_to_serve_a_file(runtime: str, tmp_path: Path) -> None:
    """It takes two seconds of a start, and over a hundred megabytes of each process."""
    pytest.importorskip(runtime)
    path = write(build(config("llama")), tmp_path / "a.gguf")
    code = f"""
import sys
import draft_service.server, verify_service.server
from specwire.lm import load_model
from verify_service.engine.calibration import step_costs
step_costs(load_model({path!r}, slots=2, runtime={runtime!r}))
print(sorted(name for name in {HEAVY} if name in sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
