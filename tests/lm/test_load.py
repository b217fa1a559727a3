"""What a loaded model says of itself, and what is refused at load, in which words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import BloomConfig, PreTrainedConfig

from deploy.cli.diagnosis.checks import Grade
from deploy.cli.diagnosis.doctor_models import check_models, facts_of
from scripts.pages import ROOT
from specwire.core.model import Loading, LoadOptions
from specwire.lm import Feed, ModelError, load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.model_config import quantized_by
from specwire.lm.pretrained import _describe_files, outline
from specwire.lm.runners import vllm
from specwire.lm.runners.hugging_face import HuggingFaceRunner, SlotCache
from tests.lm.models import COMMON, CONTEXT, VOCABULARY, build, config, plain, save


def test_info(tmp_path: Path) -> None:
    words = {f"w{index}": index for index in range(VOCABULARY)}
    folder = save(build(config("llama")), tmp_path / "tiny", words)
    (tmp_path / "tiny" / "chat_template.jinja").write_text("{{ messages }}")
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tiny" / "special_tokens_map.json").write_text(json.dumps(named))
    info = load_model(folder, slots=1, context=20).info
    assert (info.name, info.architecture, info.vocabulary, info.context) == ("tiny", "LlamaForCausalLM", VOCABULARY, 20)
    assert (info.eos_ids, info.dtype, info.device, info.chat_template) == ((2,), "float32", "cpu", "{{ messages }}")
    assert info.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert Tokenizer.from_str(info.tokenizer_json.decode()).encode("w3 w9").ids == [3, 9]
    assert len(info.weights_fingerprint) == len(info.vocabulary_fingerprint) == 64


def test_fingerprints_tell_models_apart_and_vocabularies_together(tmp_path: Path) -> None:
    words = {f"w{index}": index for index in range(VOCABULARY)}
    first = save(build(config("llama")), tmp_path / "a", words)
    copy = save(build(config("llama")), tmp_path / "b", words)
    other = save(build(config("llama"), seed=1), tmp_path / "c", words)
    renamed = save(build(config("llama")), tmp_path / "d", {**words, "w1": 2, "w2": 1})
    a, b, c, d = (load_model(folder, slots=1).info for folder in (first, copy, other, renamed))
    half = load_model(first, slots=1, dtype="bfloat16").info
    assert a.weights_fingerprint == b.weights_fingerprint == d.weights_fingerprint
    assert len({a.weights_fingerprint, c.weights_fingerprint, half.weights_fingerprint}) == 3
    assert a.vocabulary_fingerprint == b.vocabulary_fingerprint == c.vocabulary_fingerprint
    assert a.vocabulary_fingerprint != d.vocabulary_fingerprint


@pytest.mark.parametrize("kind", ["llama", "olmo"])
def test_ids_that_no_token_has_are_masked(kind: str, tmp_path: Path) -> None:
    """The output layer is wider than the tokenizer (Qwen2.5 pads it), and the tokenizer may leave ids out."""
    words = {f"w{index}": index for index in range(40) if index != 17}
    model = build(config(kind))
    lm = load_model(save(model, tmp_path, words), slots=1)
    logits = lm.forward([Feed(0, 0, [1, 2, 3], 1)])
    assert lm.info.vocabulary == 40
    assert logits.shape == (1, 40)
    assert torch.isneginf(logits[0]).nonzero().flatten().tolist() == [17]
    assigned = sorted(words.values())
    torch.testing.assert_close(logits[:, assigned], plain(model, [1, 2, 3])[-1:, assigned], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="tokens: id 40 is outside the vocabulary of 40"):
        lm.forward([Feed(0, 3, [40], 1)])


def _saved_config(made: PreTrainedConfig, folder: Path) -> str:
    made.save_pretrained(folder)
    return str(folder)


def test_a_model_that_states_no_length_needs_one(tmp_path: Path) -> None:
    folder = save(build(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2)), tmp_path)
    with pytest.raises(ModelError, match="the model states no maximum length"):
        load_model(folder, slots=1)
    assert load_model(folder, slots=1, context=32).info.context == 32


@pytest.mark.parametrize("stated", [-1, 0, 1, 10**8, 1 << 63, 1 << 64])
def test_a_length_that_no_model_has_is_refused(stated: int, tmp_path: Path) -> None:
    """Before rotations are made for each position, which would fill memory."""
    folder = save(build(config("llama")), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "max_position_embeddings": stated}))
    with pytest.raises(ModelError, match="context: must be from 2 to 16777216 positions, and the model states"):
        load_model(folder, slots=1)


def test_a_model_that_disagrees_with_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes it: here a cache that forgets."""
    file = SlotCache._file
    folder = save(build(config("gpt2")), tmp_path)
    monkeypatch.setattr(SlotCache, "_file", lambda self, stores, layer, states: file(self, stores, layer, states * 0))
    with pytest.raises(ModelError, match="GPT2LMHeadModel gives other logits with a cache by absolute position"):
        load_model(folder, slots=1)


def test_a_rotation_that_depends_on_the_length_takes_the_generic_path(tmp_path: Path) -> None:
    made = config("llama")
    made.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    lm = load_model(save(build(made), tmp_path), slots=1)
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, HuggingFaceRunner)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots: must be at least 1, not 0"),
        ({"dtype": "int4"}, "dtype: must be one of float32, bfloat16, float16, not 'int4'"),
        ({"device": "warp"}, "device: 'warp' cannot be used here"),
        ({"threads": 0}, "threads: must be at least 1, not 0"),
        ({"deterministic": True, "device": "meta"}, "deterministic: is known to hold on cpu only, not on meta"),
        ({"context": 1}, "context: must be from 2 to 16777216 positions, not 1"),
        ({"context": CONTEXT + 1}, f"context: the model was made for {CONTEXT} positions, not {CONTEXT + 1}"),
    ],
)
def test_bad_options_are_named(options: dict[str, int | str], message: str, tmp_path: Path) -> None:
    folder = save(build(config("llama")), tmp_path)
    with pytest.raises(ModelError, match=message):
        load_model(folder, **{"slots": 1, **options})  # type: ignore[arg-type]  # any field, by name


@pytest.mark.parametrize("spec", ["/no/such/model", "./no-such-model", "~/no/such/model", ""])
def test_an_unknown_path_is_an_error_at_once(spec: str) -> None:
    with pytest.raises(ModelError, match="there is no such directory"):
        load_model(spec, slots=1)


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    for name, told in (("of nothing", ""), ("of a file.gguf", "; name its file: .*of a file.gguf")):
        (tmp_path / name).touch()
        with pytest.raises(ModelError, match=rf"there is no file named config\.json in that directory{told}$"):
            load_model(str(tmp_path), slots=1)
    with pytest.raises(ModelError, match="cannot be loaded as a causal model"):
        load_model(_saved_config(config("llama"), tmp_path), slots=1)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    for content, told in (
        (b"{}", "it is a file, and no .gguf file"),
        (b"GGUF\3", "it is a GGUF file, whose name must end in"),
    ):
        (tmp_path / "model").write_bytes(content)
        with pytest.raises(ModelError, match=f"model '{tmp_path}/model': {told}"):
            load_model(str(tmp_path / "model"), slots=1)


@pytest.mark.parametrize("spec", ["/no/such/model", "./modle"])
def test_whatever_reads_a_model_says_that_it_is_not_there(spec: str) -> None:
    """Trainers, which do not load it as services do, told what a name on the hub may look like."""
    with pytest.raises(ModelError, match=f"^model '{spec}': there is no such directory$"):
        outline(spec)


def test_code_in_a_model_s_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is whoever sits at the terminal asked whether to run it."""
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked"))
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (tmp_path / "own.py").write_text("raise AssertionError('was run')\n")
    with pytest.raises(ModelError, match="has no configuration that can be read.*contains custom code"):
        load_model(str(tmp_path), slots=1)


def test_weights_in_a_pickle_are_refused(tmp_path: Path) -> None:
    folder = Path(save(build(config("llama")), tmp_path / "old", {f"w{i}": i for i in range(VOCABULARY)}))
    (folder / "model.safetensors").unlink()
    torch.save(build(config("llama")).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"cannot be loaded as a causal model: .*no file named model\.safetensors"):
        load_model(str(folder), slots=1)


def test_a_hub_model_that_cannot_be_had() -> None:
    with pytest.raises(
        ModelError, match="^model 'nobody/no-such-model' is no directory here, and as a name of the hub has no config"
    ):
        load_model("nobody/no-such-model", slots=1)


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    try:
        load_model("scripted:1", slots=1, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_eos_ids_of_the_generation_settings_come_first(tmp_path: Path) -> None:
    model = build(config("qwen2"))
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [4, 5]
    assert load_model(save(model, tmp_path), slots=1).info.eos_ids == (4, 5)


def test_learned_positions_are_the_context(tmp_path: Path) -> None:
    assert COMMON["max_position_embeddings"] == load_model(save(build(config("gpt2")), tmp_path), slots=1).info.context


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def in_parts(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    replaced("model.safetensors.index.json", b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')(folder)


def stating(name: str, **changes: object) -> Callable[[Path], object]:
    """Of one of its JSON files."""

    def change(folder: Path) -> None:
        whole = json.loads((folder / name).read_bytes())
        (folder / name).write_text(json.dumps(whole | changes))

    return change


def without_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})


def ending_by_its_config_alone(folder: Path) -> None:
    stating("config.json", eos_token_id=-1)(folder)
    (folder / "generation_config.json").unlink()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "config": (replaced("config.json", b"nonsense"), r"config\.json"),
    "a field of it": (
        replaced("config.json", b'{"model_type": "llama", "hidden_size": "x"}'),
        r"config\.json: .*hidden",
    ),
    "another kind": (replaced("config.json", b'{"model_type": "vit"}'), "vit models are no causal models"),
    "recurrent": (replaced("config.json", b'{"model_type": "zamba"}'), "zamba model has .* cannot be rolled back"),
    "generation": (
        replaced("generation_config.json", b"nonsense"),
        "generation_config.json cannot be read: Exp",
    ),
    "an end": (
        replaced("generation_config.json", b'{"eos_token_id": "x"}'),
        "generation_config.json .*eos_token_id",
    ),
    "an end beyond all ids": (
        stating("generation_config.json", eos_token_id=[2, 10**12]),
        r"generation_config\.json cannot be read: eos_token_id: must be .* from 0 to \d+, not \[2, 1000000000000\]",
    ),
    "an end of config.json": (
        ending_by_its_config_alone,
        r"config\.json cannot be read: eos_token_id: must be .* from 0 to \d+, not -1",
    ),
    "tokenizer": (replaced("tokenizer.json", b"nonsense"), r"tokenizer\.json cannot be read: expected"),
    "its settings": (
        replaced("tokenizer_config.json", b"[]"),
        "tokenizer_config.json cannot be read: must hold",
    ),
    "template": (replaced("chat_template.jinja", b"\xff\xfe"), r"chat_template\.jinja cannot be read: 'utf-8'"),
    "weights": (replaced("model.safetensors", b"nonsense"), r"model\.safetensors cannot be read: its header would end"),
    "no weights": (replaced("model.safetensors", b""), r"model\.safetensors cannot be read: it is empty"),
    "a header cut off": (
        replaced("model.safetensors", (90).to_bytes(8, "little") + b"{"),
        r"model\.safetensors cannot be read: its header would end at byte 98, and it has 9; is it cut off\?",
    ),
    "a header of nothing": (
        replaced("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
        r"model\.safetensors cannot be read: Error while deserializing header",
    ),
    "weights cut off": (cut, r"model\.safetensors cannot be read: it has \d+ of \d+ bytes; is it cut off\?"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), r"there is no file named config\.json in"),
    "a part": (
        in_parts,
        "no file named model-00001-of-00002.safetensors, which model.safetensors.index.json",
    ),
    "more layers than any has": (
        stating("config.json", num_hidden_layers=5000),
        r"config\.json: num_hidden_layers: must be from 0 to 4096, not 5000",
    ),
    "layers below zero": (stating("config.json", num_hidden_layers=-1), r"num_hidden_layers: must be from 0 to 4096"),
    "layers in another object": (
        stating("config.json", text_config={"n_layers": 10**9}),
        r"n_layers: must be from 0 to 4096, not 1e\+09",
    ),
    "more layers than tensors": (
        stating("config.json", num_hidden_layers=300),
        r"config\.json cannot be read: num_hidden_layers: is 300, and the files hold \d+ tensors",
    ),
    "a vocabulary beyond the file": (
        stating("config.json", vocab_size=1 << 40),
        r"config\.json cannot be read: vocab_size: makes 1099511627776 x 32 weights, and the files have \d+ bytes",
    ),
    "a layer beyond the file": (
        stating("config.json", intermediate_size=1 << 24),
        r"config\.json cannot be read: intermediate_size: makes 2 x 32 x 16777216 weights",
    ),
    "heads beyond the file": (
        stating("config.json", head_dim=1 << 30),
        r"config\.json cannot be read: num_attention_heads: makes 2 x 32 x 4 x 1073741824 weights",
    ),
    "an id beyond the file": (
        stating(
            "tokenizer.json", model={"type": "WordLevel", "vocab": {"w0": 0, "far": (1 << 32) - 1}, "unk_token": "w0"}
        ),
        r"tokenizer\.json cannot be read: has an id of 4294967295 in \d+ bytes, which name fewer tokens",
    ),
    "a part elsewhere": (
        replaced("model.safetensors.index.json", b'{"weight_map": {"a": "../model.safetensors"}}'),
        r"weight_map: must name files beside it, not '\.\./model\.safetensors'",
    ),
    "parts": (replaced("model.safetensors.index.json", b"nonsense"), r"model\.safetensors\.index\.json cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named_by_loading_and_by_the_doctor(case: str, tmp_path: Path) -> None:
    """Without the weights: so `specwire doctor` says what `verify` would."""
    breaks, message = BROKEN[case]
    words = {f"w{i}": i for i in range(VOCABULARY)}
    folder = Path(save(build(config("llama")), tmp_path / "model", words))
    breaks(folder)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder), slots=1)
    with pytest.raises(ModelError, match=message):
        facts_of(str(folder), "float32")
    (found,) = check_models(str(folder), [], "float32", 1, None)
    assert found.grade is Grade.BAD
    assert re.search(message, found.text)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    """Transformers draws it at random, with a warning."""
    folder = Path(save(build(config("llama")), tmp_path / "model", {f"w{i}": i for i in range(VOCABULARY)}))
    without_a_tensor(folder)
    with pytest.raises(ModelError, match=r"its files lack model\.norm\.weight"):
        load_model(str(folder), slots=1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"engine": "own"}, "engine: must be one of specwire, vllm, not 'own'"),
        ({"runtime": "openvino"}, "runtime: is not served with --engine vllm"),
        ({"deterministic": True}, "deterministic: is not served"),
        ({"quantization": "int8"}, "quantization: is not served"),
        ({"compiled": True}, "compile: is not served"),
        ({"heads": "self:exit=1"}, "heads: is not served"),
    ],
)
def test_what_vllm_s_worker_does_not_do_is_named(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(save(build(config("llama")), tmp_path), **{"slots": 1, "engine": "vllm", **how})


@pytest.mark.parametrize(
    ("found", "options", "device", "message"),
    [
        ("", {}, "cpu", "vLLM is not installed here; tested with vLLM 0.32"),
        ("0.31.4", {}, "cpu", "vLLM 0.31.4 is not known here; tested with vLLM 0.32"),
        (
            "0.32.1",
            {"max_num_seqs": 3},
            "cpu",
            "engine-options: 'max_num_seqs' is not taken here, but attention_backend",
        ),
        ("0.32.1", {"quantization": "fp8"}, "cpu", "engine-options: 'quantization' is not taken here"),
    ],
)
def test_a_vllm_that_is_not_known_is_named(
    found: str, options: dict[str, Any], device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_version", lambda package: found if package == "vllm" else "")
    with pytest.raises(ModelError, match=message):
        vllm.prepare(device, options)


@pytest.mark.parametrize(("held", "slots"), [(6, 2), (5, 1), (4, 1), (1000, 7)])
def test_slots_of_whole_blocks_fit_into_the_memory_beside_vllm_s_own(held: int, slots: int) -> None:
    assert vllm.VllmMemory(held * 16 * 64, 64).slots(block=16, per_slot=2, most=7) == slots
    told = r"kv_memory: 3 KiB hold 3 blocks of 16 positions; one text takes 2, and vLLM 2 of its own: give more"
    with pytest.raises(ModelError, match=told):
        vllm.VllmMemory(3 << 10, 64).slots(block=16, per_slot=2, most=7)


class OtherArgs:
    """Another release's EngineArgs."""

    def __init__(self, model: str) -> None: ...


class Bare:
    """One that lacks `create_engine_config`."""

    def __init__(self, **options: object) -> None: ...


class Broken(Bare):
    """One in which something of its own is wrong."""

    def create_engine_config(self) -> None:
        raise AttributeError("no heads in this config")


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        (None, r"vLLM 0\.32\.1 lacks what is used of it: .*vllm\.engine\.arg_utils.*; tested with vLLM 0\.32"),
        (OtherArgs, r"lacks what is used of it: .*unexpected keyword argument .*; tested with vLLM 0\.32"),
        (Bare, r"lacks what is used of it: 'Bare' object has no attribute 'create_engine_config'; tested with vLLM 0"),
        (Broken, "engine: vLLM cannot serve this model: no heads in this config"),
    ],
)
def test_a_name_that_vllm_lacks_is_told_from_an_error_of_vllm_s(
    engine_args: type | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms, arguments = ModuleType("vllm.platforms"), ModuleType("vllm.engine.arg_utils")
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(device_type="cpu"), raising=False)
    monkeypatch.setattr(arguments, "EngineArgs", engine_args, raising=False)
    monkeypatch.setitem(sys.modules, platforms.__name__, platforms)
    monkeypatch.setitem(sys.modules, arguments.__name__, arguments if engine_args else None)
    monkeypatch.setattr(vllm, "_version", lambda package: "0.32.1" if package == "vllm" else "")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(ModelError, match=message):
        load_model(save(build(config("llama")), tmp_path), slots=1, dtype="float32", engine="vllm")


def test_the_pages_and_the_environment_of_the_tests_name_the_tested_vllm() -> None:
    told = vllm.tested().removeprefix("tested with ")
    assert f"CPU build of {told};" in " ".join((ROOT / "docs" / "VLLM.md").read_text().split())
    [pinned] = [line for line in (ROOT / "constraints-vllm.txt").read_text().splitlines() if line.startswith("vllm")]
    assert tuple(map(int, pinned.partition("==")[2].split(".")[:2])) in vllm.TESTED


def test_quantised_files_are_described_without_being_loaded(tmp_path: Path) -> None:
    """By their own tensors, in however many files these are."""
    model = build(config("llama"))
    known = []
    for name, size in (("whole", "1GB"), ("cut", "10KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        mark_quantized(tmp_path / name)
        found = outline(str(tmp_path / name))
        assert quantized_by(found.config) == "awq"
        known.append(_describe_files(str(tmp_path / name), found, "float32", "awq")[0])
    assert len([*(tmp_path / "cut").glob("*.safetensors")]) > 1
    whole, cut = known
    assert (whole.architecture, whole.quantization, whole.eos_ids) == ("LlamaForCausalLM", "awq", (2,))
    assert whole.weights_fingerprint == cut.weights_fingerprint
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    other, _ = _describe_files(str(tmp_path / "whole"), outline(str(tmp_path / "whole")), "float32", "awq")
    assert other.weights_fingerprint != whole.weights_fingerprint


def mark_quantized(folder: Path) -> None:
    config_file = folder / "config.json"
    said = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**said, "quantization_config": {"quant_method": "awq", "bits": 4}}))


def test_a_scripted_model_is_served_on_any_engine() -> None:
    assert load_model("scripted:7", slots=1, engine="vllm").info.runtime == "scripted"


def test_each_option_may_be_named() -> None:
    assert LoadOptions.__annotations__.keys() == {each.name for each in fields(Loading)}


SERVICES = """
import asyncio, sys
import draft_service.server, verify_service.server
from specwire.rpc.server_options import ModelServiceOptions

async def serve():
    for server in (draft_service.server, verify_service.server):
        service = await server.start(ModelServiceOptions("scripted:7"))
        await service.stop(0.0)

asyncio.run(serve())
sys.exit("transformers" in sys.modules)
"""


def test_services_of_a_scripted_model_do_not_wait_for_transformers() -> None:
    """Importing it takes seconds, in each of the hundreds of processes that tests start."""
    subprocess.run([sys.executable, "-c", SERVICES], check=True, timeout=120)


@pytest.mark.parametrize("spec", ["scripted:3", "scripted:3:vocab=64"])
def test_a_model_without_an_included_head_is_loaded_where_heads_are_chosen(spec: str) -> None:
    assert load_model(spec, slots=1, heads="auto").info.runtime == "scripted"
