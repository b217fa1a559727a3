"""GGUF files on torch and OpenVINO: logits of the model that they were written of, weights as transformers reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from deploy.cli.diagnosis.doctor_models import measure
from specwire.core.model import INT8, Loading
from specwire.lm import Feed, LanguageModel, ModelError, gguf_weights, load, load_model
from specwire.lm.gguf_file import GgufFile, read_gguf
from specwire.lm.gguf_weights import GgufTensors, cache_folder, config_of, full_config_of, model_of_file
from specwire.lm.linear import GROUP, round_layers
from specwire.lm.load import computes_gguf
from specwire.lm.plain_decoder import PlainDecoder
from tests.lm.gguf_files import rounded, write
from tests.lm.models import CONTEXT, TOLERANCE, VOCABULARY, build, config, plain
from tests.lm.walk import Texts

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["llama", "llama-biased-tied", "mistral", "qwen2", "qwen3"]
RUNTIMES = ["torch", *(["openvino"] if find_spec("openvino") else [])]
REAL = ROOT / "build" / "models" / "smollm2-135m.gguf"
GEMMA = REAL.with_name("gemma-3-270m.gguf")
# "What is the capital of France?" behind the model's template.
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_the_logits_of_the_model_that_it_was_written_of(kind: str, runtime: str, tmp_path: Path) -> None:
    model = build(config(kind))
    lm = load_model(write(model, tmp_path / "a.gguf"), slots=3, runtime=runtime)
    assert lm.info.runtime == runtime
    texts = Texts(model, lm, seed=len(kind))
    for _ in range(20):
        texts.step()


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q4_1, Type.Q5_0])
def test_quantised_weights_are_those_that_the_file_says(kind: Type, tmp_path: Path) -> None:
    model = build(config("llama"))
    path = write(model, tmp_path / "a.gguf", kind)
    rounded(model, kind)
    text = [3, 17, 44, 8, 29]
    got = load_model(path, slots=1).forward([Feed(0, 0, text, len(text))])
    assert float((got - plain(model, text)).abs().max()) < TOLERANCE * float(got.abs().max())


def test_the_same_file_has_another_fingerprint_in_another_precision(tmp_path: Path) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    first, again = (load_model(path, slots=1).info for _ in range(2))
    half = load_model(path, slots=1, dtype="bfloat16").info
    assert first.weights_fingerprint == again.weights_fingerprint != half.weights_fingerprint
    assert first.vocabulary_fingerprint == half.vocabulary_fingerprint


@pytest.mark.parametrize(
    ("options", "computed"),
    [
        ({"runtime": "torch"}, "torch"),
        ({"runtime": "llamacpp", "kv_type": "f16"}, "llamacpp"),
        ({"runtime": "auto", "kv_type": "f16"}, "llamacpp"),
        ({"runtime": "auto", "deterministic": True}, "auto"),
        ({"runtime": "auto", "heads": "folder"}, "auto"),
        ({"runtime": "auto", "quantization": "int8"}, "auto"),
    ],
)
def test_the_runtime_is_one_that_serves_what_was_asked_for(options: dict[str, Any], computed: str) -> None:
    assert computes_gguf("large.gguf", Loading(slots=1, **options)) == computed


@pytest.mark.parametrize(
    ("family", "precision", "size", "computed"),
    [
        ("llama", "bfloat16", 1 << 20, "auto"),
        ("llama", "bfloat16", 1, "llamacpp"),
        ("llama", "float32", 1 << 20, "llamacpp"),
        ("qwen2", "bfloat16", 1 << 20, "llamacpp"),
    ],
)
def test_a_small_file_of_the_family_is_openvino_s_where_that_computes_it_quickly(
    family: str, precision: str, size: int, computed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """family: what OpenVINO computes, of which the file is or not. size: up to which files are small."""
    path = write(build(config("llama")), tmp_path / "a.gguf")
    monkeypatch.setattr("specwire.lm.runners.llama.MODEL_TYPES", {family})
    monkeypatch.setattr(load, "find_spec", lambda _name: object())
    monkeypatch.setattr(load, "native_dtype", lambda: precision)
    monkeypatch.setattr(load, "SMALL", size)
    assert computes_gguf(path, Loading(slots=1, runtime="auto")) == computed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"rope.dimension_count": 4},
            "runtime: a GGUF file that turns 4 of 8 dimensions is computed by llamacpp alone",
        ),
        ({"feed_forward_length": 40}, r"its tensor blk\.0\.ffn_gate\.weight has the shape \[48, 32\], not \[40, 32\]"),
        ({"block_count": 3}, r"its tensor blk\.2\.attn_q\.weight is missing"),
        ({"attention.head_count": 3}, "num_attention_heads: 3 are no multiple of 2 key heads"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(write(build(config("llama")), tmp_path / "a.gguf", changed=changed), slots=1)


@pytest.mark.skipif("openvino" not in RUNTIMES, reason="openvino is not there")
@pytest.mark.parametrize("integers", [True, False])
def test_a_quantised_file_keeps_8_bits_where_openvino_computes_it(
    integers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And multiplies integers where the processor does."""
    from specwire.lm.runners.openvino import runner

    if integers and not runner.rounds_activations():
        pytest.skip("the processor has no VNNI")
    monkeypatch.setattr(runner, "rounds_activations", lambda: integers)
    kept = "int8-dynamic" if integers else "int8"
    path = write(build(config("llama")), tmp_path / "a.gguf", Type.Q8_0)
    monkeypatch.setattr("specwire.lm.load.find_spec", lambda name: None if name == "llama_cpp" else find_spec(name))
    monkeypatch.setattr(load, "rows_are_free", lambda: False)
    for options, runtime, quantization in (
        ({"runtime": "auto"}, "openvino", kept),
        ({"runtime": "openvino"}, "openvino", kept),
        ({"runtime": "auto", "dtype": "float32"}, "openvino", "none"),
        ({"runtime": "auto", "heads": "self:skip=1"}, "torch", "none"),
    ):
        info = load_model(path, slots=1, **{"dtype": "auto", **options}).info  # type: ignore[arg-type]  # by name
        assert (info.runtime, info.quantization) == (runtime, quantization), options

    def unsuited(*_: object) -> None:
        raise ModelError("runtime: openvino cannot run this")

    monkeypatch.setattr("specwire.lm.runners.select._openvino_runner", unsuited)
    info = load_model(path, slots=1, dtype="auto", runtime="auto").info
    assert (info.runtime, info.quantization) == ("torch", "none")


def test_options_of_llama_cpp_are_not_for_other_runtimes(tmp_path: Path) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=r"kv-type: is for \.gguf files that llamacpp computes, not for .* on torch"):
        load_model(path, slots=1, runtime="torch", kv_type="f16")


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama_cpp is not there: make setup-llamacpp")
def test_the_doctor_times_each_runtime_that_computes_the_file(tmp_path: Path) -> None:
    told = [each.text for each in measure(write(build(config("llama")), tmp_path / "a.gguf"), "float32")]
    assert [text.partition(":")[0] for text in told] == ["openvino", "llamacpp", "torch"]
    assert re.fullmatch(r"torch: V\(1\) \d+\.\d ms, V\(4\) \d+\.\d ms, V\(8\) \d+\.\d ms; guesses .*", told[-1])
    assert all(text.endswith(("; guesses change no bit", "; guesses may tip near-ties")) for text in told)
    # Its trial is of a short text, where it gives equal bits; from some 300 positions on it does not.
    assert told[1].endswith("guesses may tip near-ties")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(each, marks=pytest.mark.skipif(not each.exists(), reason=f"make setup-models MODELS={each.stem}"))
        for each in (REAL, GEMMA)
    ],
    ids=lambda path: path.stem,
)
def test_weights_and_configuration_of_real_files_are_those_that_transformers_reads(path: Path) -> None:
    file = read_gguf(str(path))
    own = model_of_file(file, config_of(file), torch.float32)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=own)
    theirs = AutoConfig.for_model(**read["config"])
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rope_parameters",
    ):
        assert getattr(own.config, name) == getattr(theirs, name)
    assert own.config.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    weights = own.state_dict()
    assert len(read["tensors"]) == len(dict(own.named_parameters()))
    for name, tensor in read["tensors"].items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.skipif(not REAL.exists(), reason="smollm2-135m is not there: make setup-models MODELS=smollm2-135m")
@pytest.mark.skipif("openvino" not in RUNTIMES, reason="openvino is not there")
def test_smollm2_is_served_with_rounded_activations() -> None:
    """In thirty layers rounding moves its logits by more than a sixteenth of the largest."""
    from specwire.lm.runners.openvino.runner import rounds_activations

    if not rounds_activations():
        pytest.skip("the processor has no VNNI")
    lm = load_model(str(REAL), slots=1, context=256, runtime="openvino", quantization="int8-dynamic")
    row = lm.forward([Feed(0, 0, PROMPT, 1)])[0]
    assert int(row.argmax()) == 504  # " The", as in float32


# ----------------------------------------------------------------------------------------------------------------------
# The plain forward of the Llama family is transformers', and a GGUF file is served without importing that.

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


# ----------------------------------------------------------------------------------------------------------------------
# Weights in a mapped file: converted once, in memory once, bounded, and no worse where no file can be had.

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


def test_eight_bits_are_kept_as_they_are_rounded(path: str) -> None:
    """What is read once is what rounding the whole model gives, the output layer that is the embedding, too."""
    file = read_gguf(path)
    kept = model_of_file(file, config_of(file), torch.bfloat16, INT8)
    whole = model_of_file(file, config_of(file), torch.float32)
    assert [each.name.rpartition("-")[2] for each in files()] == [f"int8x{GROUP}.weights", "float32.weights"]
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
    first = rows(load_model(path, slots=1))

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert torch.equal(rows(load_model(path, slots=1)), first)
