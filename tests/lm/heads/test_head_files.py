"""Files of heads that are broken, or of a kind that is not served: each is refused in a sentence, none silently."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specwire.core.model import ModelError
from specwire.lm.heads.eagle3 import default_taps, load, save
from specwire.lm.heads.files import ConfigKeys
from tests.lm.heads.by_hand import CONFIG, LAYERS, head_of

# Of a target.
EMBEDDING = torch.zeros(CONFIG.vocabulary, CONFIG.hidden)
TAPS = "eagle_aux_hidden_state_layer_ids"
Q, FC = "layers.0.self_attn.q_proj.weight", "fc.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    save(head_of(CONFIG), tmp_path, "a target")
    return tmp_path


def said(head: Path, **changes: Any) -> None:
    """Change keys of config.json, those of its layer where they are there; ... takes one away."""
    path = head / "config.json"
    whole = json.loads(path.read_text())
    for key, value in changes.items():
        within = whole["transformer_layer_config"] if key in LAYER_KEYS else whole
        within[key] = value
        if value is ...:
            del within[key]
    path.write_text(json.dumps(whole))


LAYER_KEYS = {
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("num_hidden_layers", "rms_norm_eps", "rope_parameters", "rope_scaling", "hidden_act", "attention_bias"),
    *("mlp_bias", "layer_types", "model_type"),
}


def stored(head: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = head / "model.safetensors"
    save_file(change(load_file(path)), path)


def refused(head: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as found:
        load(head, LAYERS, EMBEDDING)
    assert str(head) in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "raw",
    [b"[1, 2]", b'"x"', b"null", b"3", b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"],
)
def test_a_configuration_that_is_no_object_is_named(raw: bytes, head: Path) -> None:
    (head / "config.json").write_bytes(raw)
    refused(head, "config.json: cannot be read: ")


@pytest.mark.parametrize("raw", [b"", b"no tensors", b"\xff" * 8 + b"{}", b"\x02\0\0\0\0\0\0\0{}", None])
def test_weights_that_are_none_or_cut_short_are_named(raw: bytes | None, head: Path) -> None:
    path = head / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if raw is None else raw)
    refused(head, "model.safetensors: ")


SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "num_hidden_layers")
OTHER_SIZES = ("num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Values that a key cannot have, by what is said of them.
WRONG: dict[str, tuple[Iterable[str], Iterable[Any]]] = {
    r"must be (a whole number|at least 1), not ": ([*SIZES, *OTHER_SIZES], ["32", [32], {}, 32.0, 2.5, True, -32, 0]),
    "must be a whole number, not None": (SIZES, [None, ...]),
    "must be a number above 0, not ": (
        ["rms_norm_eps", "rope_theta"],
        ["a", [1], {}, True, -1, 0, float("nan"), float("inf"), 10**400],
    ),
    "must be true or false, not ": (FLAGS, ["false", "no", 0, 2, []]),
    "must be an object, not ": (["transformer_layer_config", "eagle_config", "rope_parameters"], ["x", [1]]),
    "must be a list of whole numbers, not ": ([TAPS], [5, True, "012", {"a": 1}, [0, 1, True], [0, 1, 2.0], [[0]] * 3]),
    "must be 3 of the target's layers 0 to 6, not ": (
        [TAPS],
        [[0, 1], [0, 1, 2, 3], [0, 1, -1], [0, 1, 7], [1, 2, 10**30]],
    ),
}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [(key, value, message) for message, of in WRONG.items() for key, value in product(*of)],
)
def test_a_value_that_a_key_cannot_have_is_named(key: str, value: Any, message: str, head: Path) -> None:
    said(head, **({"rope_parameters": {key: value}} if key == "rope_theta" else {key: value}))
    refused(head, rf"config.json: \S*{key}: {message}")


@pytest.mark.parametrize("key", [*SIZES, *OTHER_SIZES])
@pytest.mark.parametrize("value", [10**12, 10**30])
def test_a_size_that_is_too_large_allocates_nothing(key: str, value: int, head: Path) -> None:
    said(head, **{key: value})
    refused(head, "num_hidden_layers: only|is .* not |cannot share|must be at ")


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_scaling", "hidden_act"])
def test_null_is_as_if_it_were_not_there(key: str, head: Path) -> None:
    save(head_of(replace(CONFIG, heads=2, key_heads=2)), head, "a target")
    said(head, **{key: None})
    config = load(head, LAYERS, EMBEDDING).config
    assert (config.key_heads, config.head_dim, config.eps, config.rope) == (2, 8, 1e-6, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: only heads of 1 layer are served, not 2"),
        ({"intermediate_size": 32}, r"layers.0.mlp.gate_proj.weight: is \(24, 16\), not \(32, 16\)"),
        ({"speculators_model_type": "mlp_speculator"}, "speculators_model_type: only eagle3 is served"),
        ({"model_type": "mixtral"}, "model_type: only layers of llama and qwen3 are served, not 'mixtral'"),
        ({"hidden_act": "gelu"}, "hidden_act: only silu is served, not 'gelu'"),
        ({"attention_bias": True}, "attention_bias: only false is served, not True"),
        ({"mlp_bias": True}, "mlp_bias: only false is served, not True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: only .*full_attention.* is served"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 3.0}}}, "full_attention: only one rotation is served"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: only 1.0 is served, not 0.5"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_type: must be text, not 3"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling: is linear, and rope_parameters are def"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm: cannot be beside norm_before_fc"),
        ({"draft_vocab_size": 41}, "draft_vocab_size: must be at most vocab_size, 40"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 4 heads cannot share 3"),
        ({"head_dim": 7}, "head_dim: must be even, not 7"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state: only true is served"),
        ({"eagle_config": {"eh_proj_before_attn": True}}, "eagle_config.eh_proj_before_attn: only false is served"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step: only 1 is served, not 4"),
        ({"eagle_config": {TAPS: [0, 1, 6]}}, f"eagle_config.{TAPS}: must be 3 of the target's layers -1 to 5"),
        ({"model_type": "qwen3"}, "q_norm.weight: is not there"),
        ({"norm_before_fc": True}, "input_norm.weight: is not there"),
        ({"fc_norm": True}, "fc_norm.0.weight: is not there"),
        ({"target_hidden_size": 32}, r"fc.weight: is \(16, 48\), not \(16, 96\)"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str, head: Path) -> None:
    said(head, **changes)
    refused(head, message)


DRAFT = CONFIG.draft_vocabulary


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", torch.full((DRAFT,), 0.5), "is stored as F32, and ids only as I64, I32"),
        ("d2t", torch.zeros(DRAFT, dtype=torch.bool), "is stored as BOOL"),
        *(
            ("d2t", torch.zeros(shape, dtype=torch.int64), r"is \(.*, not \(20,\)")
            for shape in ((DRAFT - 1,), (1,), (0,), (), (DRAFT, 1), (DRAFT, DRAFT))
        ),
        *(
            ("d2t", torch.full((DRAFT,), offset), "points beyond the vocabulary of 40")
            for offset in (-1, 21, 40, 2**62, 2**63 - 1, -(2**63))
        ),
        ("d2t", None, "is not there, and the head says 20 of 40 ids"),
        (FC, None, "is not there"),
        (FC, torch.zeros(17, 49), r"is \(17, 49\), not \(16, 48\)"),
        (FC, torch.tensor(1.0), r"is \(\), not \(16, 48\)"),
        (FC, torch.zeros(16, 48, dtype=torch.int8), "is stored as I8, and weights only as F64, F32, F16, BF16"),
        (FC, torch.zeros(16, 48).to(torch.float8_e4m3fn), "is stored as F8_E4M3"),
        (FC, torch.full((16, 48), torch.nan), "has values that are not finite"),
        ("norm.weight", torch.full((16,), torch.inf), "has values that are not finite"),
        ("lm_head.weight", torch.full((20, 16), -torch.inf, dtype=torch.bfloat16), "has values that are not finite"),
        ("embed_tokens.weight", torch.zeros(39, 16), r"is \(39, 16\), not \(40, 16\)"),
        ("layers.0.self_attn.q_proj.bias", torch.zeros(32), "is not part of an EAGLE-3 head as its config.json"),
        ("layers.0.self_attn.q_norm.weight", torch.zeros(8), "is not part of an EAGLE-3 head"),
        ("layers.1.input_layernorm.weight", torch.zeros(16), "is not part of an EAGLE-3 head"),
        ("fc_norm.0.weight", torch.zeros(16), "is not part of an EAGLE-3 head"),
        ("midlayer.hidden_norm.weight", torch.zeros(16), "is there twice, also as "),
    ],
)
def test_a_tensor_that_cannot_be_right_is_named(
    name: str, tensor: torch.Tensor | None, message: str, head: Path
) -> None:
    stored(
        head,
        lambda tensors: {key: each for key, each in {**tensors, name: tensor}.items() if each is not None},
    )
    refused(head, message)


def test_a_head_as_narrow_as_no_embedding_is_refused(head: Path) -> None:
    save(head_of(replace(CONFIG, target_hidden=32)), head, "a target")
    with pytest.raises(
        ModelError, match=r"embed_tokens.weight: is not there, and the target's is \(40, 32\), not \(40, 16"
    ):
        load(head, LAYERS, torch.zeros(40, 32))


def test_a_pickle_is_refused_with_what_to_do(head: Path) -> None:
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    refused(head, "pytorch_model.bin: is a pickle, which is not read; docs/MODELS.md says how to convert it")


def test_it_is_read_without_what_says_nothing_more(head: Path) -> None:
    more = {"verifier_norm.weight": torch.zeros(16), "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    stored(head, lambda tensors: {**tensors, **more})
    load(head, LAYERS, EMBEDDING)


@pytest.mark.parametrize("layers", range(1, 40))
def test_taps_that_are_not_told_are_of_the_target_s_layers(layers: int, head: Path) -> None:
    said(head, **{TAPS: ... if layers % 2 else []})
    taps = load(head, layers, EMBEDDING).config.taps
    assert taps == default_taps(layers)
    assert all(0 <= tap <= layers for tap in taps)
    if layers >= 4:
        assert sorted(set(taps)) == list(taps), "each says something of its own"
    if layers >= 7:
        assert taps == (2, layers // 2, layers - 3)


def test_flags_may_be_within_eagle_config(head: Path) -> None:
    save(head_of(replace(CONFIG, norm_before_fc=True)), head, "a target")
    inside = {"norm_before_fc": True, "norm_before_residual": True, "return_hidden_post_norm": True}
    said(head, norm_before_fc=..., eagle_config=inside)
    config = load(head, LAYERS, EMBEDDING).config
    assert config.norm_before_fc
    assert config.norm_before_residual
    assert config.norm_output


def test_what_an_error_shows_of_a_file_is_short() -> None:
    keys = ConfigKeys(Path("config.json"), {"a": "x" * 10**6, "b": [1] * 10**6})
    for wrong in (lambda: keys.whole_number("a"), lambda: keys.flag("b"), lambda: keys.whole_numbers("a")):
        with pytest.raises(ModelError) as found:
            wrong()
        assert len(str(found.value)) < 200


def test_tensors_may_be_in_several_files_with_an_index(head: Path) -> None:
    whole = load(head, LAYERS, EMBEDDING).state_dict()
    tensors = load_file(head / "model.safetensors")
    parts = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, head / file)
    (head / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (head / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load(head, LAYERS, EMBEDDING).state_dict()
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("norms", [False, True])
def test_a_flat_file_of_qwen3_has_norms_of_heads_where_they_are_there(norms: bool, tmp_path: Path) -> None:
    """Heads of the original format say their target's type, and many are Llama's layers all the same."""
    save(head_of(replace(CONFIG, head_norms=norms)), tmp_path, "a target")
    whole = json.loads((tmp_path / "config.json").read_text())
    layer = whole.pop("transformer_layer_config")
    del whole["speculators_model_type"]
    (tmp_path / "config.json").write_text(json.dumps({**whole, **layer, "model_type": "qwen3"}))
    assert load(tmp_path, LAYERS, EMBEDDING).config.head_norms is norms
