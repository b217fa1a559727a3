"""An MTP layer in each format: what it drafts against a plain loop and against transformers' own modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.messages import MOST_WINDOW
from specwire.core.model import Feed, ModelError
from specwire.lm import load_model
from specwire.lm.heads.mtp import MtpRunner
from specwire.lm.heads.openvino_heads import MtpOpenvino
from specwire.lm.heads.slots import HeadedModel, waiting_bytes
from specwire.lm.kv_cache import position_bytes
from specwire.lm.runners.hybrid import state_bytes
from tests.lm import models
from tests.lm.families import DELTA, PADDED
from tests.lm.heads.walk import walk

GREEDY = Sampling()
SLOTS = 3
RUNTIMES = pytest.mark.parametrize("runtime", ["torch", "openvino"])


@dataclass(frozen=True)
class Format:
    """Names in the files."""

    kind: str
    layer: str
    enorm: str
    hnorm: str
    fuse: str
    norm: str
    state_first: bool = False
    normed: bool = True
    gated: bool = False


QWEN = Format("qwen3", "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
LLAMA = replace(QWEN, kind="llama")
MIMO = Format(
    "qwen2",
    "model.mtp_layers.0.",
    "model.mtp_layers.0.token_layernorm",
    "model.mtp_layers.0.hidden_layernorm",
    "model.mtp_layers.0.input_proj",
    "model.mtp_layers.0.final_layernorm",
    state_first=True,
    normed=False,
)
FORMATS = {"llama": LLAMA, "mimo": MIMO, "qwen3": QWEN, "qwen3-next": replace(QWEN, gated=True)}
LAYERS: dict[str, type[nn.Module]] = {
    "llama": LlamaDecoderLayer,
    "qwen2": Qwen2DecoderLayer,
    "qwen3": Qwen3DecoderLayer,
}
PARTIAL = 0.5


def module(made: Format, target: PreTrainedModel) -> MtpLayer:
    """Transformers' module, with random weights."""
    torch.manual_seed(7)
    config: Any = next_config(target.config) if made.gated else target.config
    kind = Qwen3NextDecoderLayer if made.gated else LAYERS[made.kind]
    norm = Qwen3NextRMSNorm if made.gated else LlamaRMSNorm
    config.mtp_hidden_states_first = made.state_first
    layer = MtpLayer(config, kind, norm, 0).eval()
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.3)
        else:
            nn.init.normal_(parameter, 0.0, 0.3)
    return layer


def next_config(config: Any) -> Qwen3NextConfig:
    """Of a Qwen3-Next model with the target's widths and dense layers, which attend."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": PARTIAL}
    made = Qwen3NextConfig(
        **{name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
        layer_types=["full_attention"] * config.num_hidden_layers,
        num_experts=0,
    )
    made._attn_implementation = "eager"
    return made


def stored(made: Format, layer: MtpLayer) -> dict[str, torch.Tensor]:
    """Under the format's names."""
    tensors = dict[str, torch.Tensor]()
    parts = {"enorm": made.enorm, "hnorm": made.hnorm, "eh_proj": made.fuse, "post_norm": made.norm}
    for name, tensor in layer.state_dict().items():
        part, _, rest = name.partition(".")
        tensors[f"{made.layer}{rest}" if part == "mtp_block" else f"{parts[part]}.{rest}"] = tensor.clone()
    return tensors


def built(made: Format, folder: Path) -> tuple[PreTrainedModel, MtpLayer, str]:
    """A target whose checkpoint has an MTP layer beside its own; where it is."""
    target = models.build(models.config(made.kind))
    layer = module(made, target)
    where = models.save(target, folder / "target")
    change(where, stored(made, layer))
    return target, layer, where


def headed(target: str, heads: str, runtime: str = "torch") -> HeadedModel:
    lm = load_model(target, slots=SLOTS, runtime=runtime, heads=heads, threads=1)
    assert isinstance(lm, HeadedModel)
    assert type(lm._head) is (MtpOpenvino if runtime == "openvino" else MtpRunner)
    return lm


def beside(made: Format, where: str, folder: Path, target: PreTrainedModel) -> str:
    """What --heads names: the target's own folder, or one with the configuration that the layer was made with."""
    if not made.gated:
        return where
    head = folder / "head"
    head.mkdir()
    tensors = load_file(Path(where) / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if name.startswith("mtp.")}, head / "model.safetensors")
    next_config(target.config).save_pretrained(head)
    return str(head)


# As the report has it: the layer over the whole text, without a cache.


@torch.no_grad()
def state_of(made: Format, target: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """(positions, hidden) of all tokens, as the layer reads it."""
    held: list[torch.Tensor] = []
    norm = target.get_submodule("model.norm")
    hooks = [
        norm.register_forward_pre_hook(lambda _, inputs: held.append(inputs[0][0])),
        norm.register_forward_hook(lambda _, inputs, out: held.append(out[0])),
    ]
    target(input_ids=torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return held[1] if made.normed else held[0]


Row = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def expected(made: Format, target: PreTrainedModel, layer: Any, text: list[int], depth: int, run: Row) -> list[int]:
    """Row t: from the state of t and the token at t + 1. The layer then reads its own last rows."""
    embedding, output = target.get_input_embeddings(), target.get_output_embeddings()
    states = read = state_of(made, target, text[:-1])
    tokens, found = text[1:], list[int]()
    for step in range(depth):
        if step:
            read, tokens = torch.cat((read, states[-1:])), [*tokens, found[-1]]
        states = run(layer, embedding(torch.tensor(tokens)), read)
        found.append(int(output(states[-1]).argmax()))
    return found


def by_transformers(target: PreTrainedModel, gated: bool) -> Row:
    config: Any = next_config(target.config) if gated else target.config
    rotary = Qwen3NextRotaryEmbedding(config) if gated else LlamaRotaryEmbedding(config)

    def run(layer: MtpLayer, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        count = len(embedded)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        found: torch.Tensor = layer(
            embedded[None], states[None], rotary(embedded[None], positions), mask, positions, None
        )
        return found[0]

    return run


@RUNTIMES
@pytest.mark.parametrize("name", FORMATS)
def test_it_does_so_after_any_windows_rollbacks_copies_and_other_texts(name: str, runtime: str, tmp_path: Path) -> None:
    made = FORMATS[name]
    target, layer, where = built(made, tmp_path)
    run = by_transformers(target, made.gated)
    walk(
        headed(where, beside(made, where, tmp_path, target), runtime),
        lambda text, depth, _: expected(made, target, layer, text, depth, run),
        steps=80,
    )


def beside_recurrent(made: Callable[..., PreTrainedConfig], folder: Path) -> tuple[PreTrainedModel, MtpLayer, str]:
    """As `built`, of a target with recurrent layers; in its own folder, as published."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": PARTIAL}
    dense = {"num_experts": 0} if made is Qwen3NextConfig else {}
    target = models.build(made(**PADDED, **DELTA, **dense, rope_parameters=rope))
    layer, where = module(FORMATS["qwen3-next"], target), models.save(target, folder / "target")
    change(where, stored(FORMATS["qwen3-next"], layer))
    return target, layer, where


@pytest.mark.parametrize("made", [Qwen3NextConfig, Qwen3_5TextConfig])
def test_it_does_so_beside_recurrent_layers(made: Callable[..., PreTrainedConfig], tmp_path: Path) -> None:
    target, layer, where = beside_recurrent(made, tmp_path)
    run, lm = by_transformers(target, gated=True), headed(where, where)
    assert lm.most_window == MOST_WINDOW
    walk(lm, lambda text, depth, _: expected(FORMATS["qwen3-next"], target, layer, text, depth, run), steps=60)


def test_it_needs_the_states_of_a_window(tmp_path: Path) -> None:
    target = models.build(Qwen3_5TextConfig(**PADDED, **DELTA))
    where = models.save(target, tmp_path / "target")
    change(where, stored(FORMATS["qwen3-next"], module(FORMATS["qwen3-next"], target)))
    positions = models.CONTEXT * (position_bytes(target.config, torch.float32) + 2 * 2 * 8 * 4)
    least = positions + waiting_bytes(32) + 3 * state_bytes(target)
    assert load_model(where, slots=1, heads=where, kv_memory=least).most_window == 1
    with pytest.raises(ModelError, match="heads: kv_memory has no room for the states of a window"):
        load_model(where, slots=1, heads=where, kv_memory=least - 1)


@RUNTIMES
def test_ids_that_are_no_tokens_are_not_said(runtime: str, tmp_path: Path) -> None:
    """An output layer which would rather say what stands behind the words of the tokenizer."""
    target, _, where = built(LLAMA, tmp_path)
    models.save(target, tmp_path / "words", {f"w{index}": index for index in range(31)})
    (tmp_path / "words" / "tokenizer.json").rename(Path(where) / "tokenizer.json")
    text, drafted = [3, 17, 8, 29, 11], []
    output = target.get_parameter("lm_head.weight").detach().clone()
    for louder in (1.0, 100.0):
        output[31:] *= louder
        change(where, {"lm_head.weight": output})
        lm = headed(where, where, runtime)
        lm.forward([Feed(0, 0, text[:-1], 1)])
        drafted += lm.draft([HeadRequest(0, text, GREEDY, 5)])
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) == 5
    assert all(token < 31 for token in drafted[0])


@RUNTIMES
def test_other_rotations_are_the_target_s(runtime: str, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    config: Any = models.config("llama")
    config.rope_parameters = {**rope, "original_max_position_embeddings": 16}
    target = models.build(config)
    layer = module(LLAMA, target)
    where = models.save(target, tmp_path / "target")
    change(where, stored(LLAMA, layer))
    lm, text = headed(where, where, runtime), [3 + 7 * index % 40 for index in range(30)]
    lm.forward([Feed(0, 0, text[:-1], 1)])
    wanted = expected(LLAMA, target, layer, text, 3, by_transformers(target, gated=False))
    assert lm.draft([HeadRequest(0, text, GREEDY, 3)]) == [wanted]


LAYER = LLAMA.layer


def change(where: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Replace tensors of a checkpoint; None: take it away."""
    path = Path(where) / "model.safetensors"
    changed = {name: each for name, each in {**load_file(path), **tensors}.items() if each is not None}
    save_file(changed, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"mtp.fc.weight": None}, "target: mtp.fc.weight: is not there"),
        ({f"{LAYER}mlp.up_proj.weight": None}, rf"target: {LAYER}mlp.up_proj.weight: is not there"),
        ({"mtp.norm.weight": torch.ones(9)}, r"mtp.norm.weight: is \(9,\), not \(32,\)"),
        ({"mtp.layers.1.mlp.up_proj.weight": torch.ones(48, 32)}, "layers.1.mlp.up_proj.weight: is of a second layer"),
        ({f"{LAYER}self_attn.v_proj.weight": torch.ones(8, 32)}, r"v_proj.weight: is \(8, 32\), not \(16, 32\)"),
        ({f"{LAYER}mlp.down_proj.weight": torch.ones(32, 48).to(torch.float8_e4m3fn)}, "is stored as F8_E4M3"),
        ({f"{LAYER}mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, r"up_proj.weight: is of a mixture of experts"),
        ({f"{LAYER}mlp.gate.weight": torch.ones(2, 2)}, "gate.weight: is of a mixture of experts"),
        ({f"{LAYER}self_attn.sinks": torch.ones(2)}, "sinks: is of something other than a Llama's layer"),
        ({f"{LAYER}self_attn.q_norm.weight": torch.ones(8)}, r"k_norm.weight: is not there"),
    ],
)
def test_layers_that_are_not_served_are_refused_by_name(
    tensors: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    _, _, where = built(LLAMA, tmp_path)
    change(where, tensors)
    with pytest.raises(ModelError, match=message):
        headed(where, where)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, "config.json: hidden_act: only silu"),
        ({"num_attention_heads": "four"}, "config.json: num_attention_heads: must be a whole number"),
        ({"num_key_value_heads": 3}, "config.json: num_key_value_heads: 4 heads cannot share 3"),
        ({"rms_norm_eps": "small"}, "config.json: rms_norm_eps: must be a number above 0"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_type: yarn is not served in MTP layers: the target's is def",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 7}}, "partial_rotary_factor: 56 of 8 dimensions"),
        ({"vocab_size": 60}, "vocab_size is 60, and target needs 50"),
        ({"num_hidden_layers": 7}, "num_hidden_layers is 7, and target needs 2"),
        ({"hidden_size": 64, "head_dim": 8}, "hidden_size is 64, and target needs 32"),
        ({"intermediate_size": 64}, r"gate_proj.weight: is \(48, 32\), not \(64, 32\)"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, _, where = built(LLAMA, tmp_path)
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_bytes((Path(where) / "model.safetensors").read_bytes())
    whole = json.loads((Path(where) / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**whole, **config}))
    with pytest.raises(ModelError, match=message) as refused:
        headed(where, str(head))
    assert str(head) in str(refused.value)


WITHOUT_FILE = b'{"weight_map": {"mtp.layers.0.self_attn.q_proj.weight": "a"}}'


def test_broken_files_are_named(tmp_path: Path) -> None:
    _, _, where = built(LLAMA, tmp_path)
    head = tmp_path / "head"
    head.mkdir()
    for name, content, message in (
        ("config.json", b"{}", "head/config.json: num_hidden_layers: must be a whole number, not None"),
        ("model.safetensors", b"cut", "head/model.safetensors: cannot be read"),
        ("model.safetensors.index.json", b"[]", "head/model.safetensors.index.json: cannot be read"),
        ("model.safetensors.index.json", b'{"weight_map": {"mtp.fc.weight": 7}}', "index.json: cannot be read"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"mtp.fc.weight": "a"}}',
            "head/config.json: hidden_size: must",
        ),
        (
            "config.json",
            (Path(where) / "config.json").read_bytes(),
            "head: mtp.layers.0.self_attn.q_proj.weight: is not",
        ),
        ("model.safetensors.index.json", WITHOUT_FILE, r"head/a: mtp.layers.0.self_attn.q_proj.weight: cannot be read"),
    ):
        (head / name).write_bytes(content)
        with pytest.raises(ModelError, match=message):
            headed(where, str(head))


def test_a_directory_without_any_head_says_so(tmp_path: Path) -> None:
    where = models.save(models.build(models.config("llama")), tmp_path / "target")
    with pytest.raises(ModelError, match="target: holds neither an EAGLE-3, Medusa or Hydra head nor MTP layers"):
        headed(where, where)


def test_a_target_that_tells_no_features_is_refused(tmp_path: Path) -> None:
    _, _, where = built(LLAMA, tmp_path)
    models.save(models.build(models.config("gpt2")), tmp_path / "gpt2")
    with pytest.raises(
        ModelError, match="heads: a GPT2LMHeadModel is not computed by a runner that tells its features"
    ):
        headed(str(tmp_path / "gpt2"), where)


# MiMo's own files, whose configuration transformers does not know without code in the folder.

FOREIGN_CODE = {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}


def mimo(folder: Path, theta: float = 640.0) -> tuple[PreTrainedModel, MtpLayer, str]:
    """A Qwen2 and where it is, with an MTP layer, as MiMo's folders say it; code there would fail if it were run."""
    config: Any = models.config("qwen2")
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    target = models.build(config)
    layer, where = module(MIMO, target), models.save(target, folder / "mimo")
    change(where, stored(MIMO, layer))
    path = folder / "mimo" / "config.json"
    said = {key: each for key, each in json.loads(path.read_text()).items() if key not in ("rope_parameters", "dtype")}
    own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "auto_map": FOREIGN_CODE, "rope_theta": theta}
    more = {"attention_bias": True, "num_nextn_predict_layers": 1, "head_dim": 8, "torch_dtype": "float32"}
    path.write_text(json.dumps({**said, **own, **more}))
    for name in ("configuration_mimo.py", "modeling_mimo.py"):
        (path.parent / name).write_text("raise AssertionError('was run')\n")
    return target, layer, where


@RUNTIMES
def test_mimo_s_own_files_are_served_as_a_qwen2_with_a_head(runtime: str, tmp_path: Path) -> None:
    target, layer, where = mimo(tmp_path)
    text, lm = [3, 17, 8, 29, 11, 5, 23], headed(where, where, runtime)
    rows = lm.forward([Feed(0, 0, text[:-1], len(text) - 1)])
    assert torch.allclose(rows, models.plain(target, text[:-1]), atol=models.TOLERANCE)
    wanted = expected(MIMO, target, layer, text, 4, by_transformers(target, gated=False))
    assert lm.draft([HeadRequest(0, text, GREEDY, 4)]) == [wanted]
