"""GGUF files of small models of the Llama family, written as llama.cpp's own converter would."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, PreTrainedModel

Array = npt.NDArray[Any]
# Elements of a block of Q8_0 and Q4_0.
BLOCK = 32
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def write(
    model: PreTrainedModel,
    path: Path,
    kind: Type = Type.F32,
    tokenizer: Path | None = None,
    padding: int = 0,
    changed: dict[str, int] | None = None,
    cut: str = "gpt-2",
) -> str:
    """Write the model in `kind`, where a row has whole blocks, else in float32; the path.

    tokenizer: a tokenizer.json of byte-level BPE, or of BPE as SentencePiece has it; None for none. padding: ids behind
    its own. changed: entries of the architecture. cut: how a byte-level tokenizer cuts texts, by its name.
    """
    architecture = ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, model, architecture, changed or {})
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(model.config.vocab_size)
    else:
        _add_tokenizer(writer, tokenizer, padding, cut)
    for name, values in _tensors(model, architecture):
        own = kind if _fits(values, kind) else Type.F32
        writer.add_tensor(name, quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def written(folder: Path, path: Path, kind: Type = Type.F32, cut: str = "gpt-2") -> str:
    """A GGUF file, in float32 first, of a saved model with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return write(model, path, kind, folder / "tokenizer.json", cut=cut)


@torch.no_grad()
def rounded(model: PreTrainedModel, kind: Type) -> None:
    """Let the model have the weights that a file in `kind` has."""
    for _, parameter in model.named_parameters():
        values = parameter.numpy()
        if _fits(values, kind):
            parameter.copy_(torch.from_numpy(dequantize(quantize(values, kind), kind).reshape(values.shape)))


def _fits(values: Array, kind: Type) -> bool:
    return values.ndim == 2 and (kind == Type.F16 or values.shape[1] % BLOCK == 0)


def _describe(writer: gguf.GGUFWriter, model: PreTrainedModel, architecture: str, changed: dict[str, int]) -> None:
    config: Any = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in changed.items():
        writer.add_uint32(f"{architecture}.{key}", value)


def _add_tokenizer(writer: gguf.GGUFWriter, path: Path, padding: int, cut: str) -> None:
    told = json.loads(path.read_text())
    tokens = {id_: token for token, id_ in told["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for added in told["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    width = max(tokens) + 1 + padding
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in told["model"]["merges"]]
    if told["model"]["byte_fallback"]:
        types |= {id_: gguf.TokenType.BYTE for id_, token in tokens.items() if token.startswith("<0x")}
        types[0] = gguf.TokenType.UNKNOWN
        ranks = {merge.replace(" ", ""): rank for rank, merge in enumerate(merges)}
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(ranks.get(tokens.get(id_, ""), width)) for id_ in range(width)])
        writer.add_unk_token_id(0)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_merges(merges)
    writer.add_token_list([tokens.get(id_, f"[PAD{id_}]") for id_ in range(width)])
    writer.add_token_types([types.get(id_, gguf.TokenType.UNUSED) for id_ in range(width)])
    writer.add_eos_token_id(min(added["id"] for added in told["added_tokens"]))


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, Array]]:
    config: Any = model.config
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = _in_pairs(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = _in_pairs(values, config.num_key_value_heads)
        yield _name(name), values


def _in_pairs(values: Array, heads: int) -> Array:
    """Rows of queries or keys, with what is rotated together side by side: Hugging Face has it half a head apart."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *parts, last = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(parts)]}.{last}"


def ids_of(path: str) -> Sequence[str]:
    """The tokens of a file by gguf's own reader."""
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
    return [str(bytes(field.parts[at]), "utf-8") for at in field.data]


def rounds_alike(weights: Any) -> bool:
    """Whether llama.cpp by itself gives a text of 32 tokens the same bits whole and in halves. weights: `GgufWeights`.

    Flash attention and a cache of 16 bits, as with `--deterministic`; nothing of our runner is asked.
    """
    llama, blocks = weights.library.functions, []
    for rows in (32, 16):
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 256
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context, batch = llama.llama_init_from_model(weights.model, params), llama.llama_batch_init(rows, 0, 1)
        found = []
        for begin in range(0, 32, rows):
            for at in range(rows):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = 1 + begin + at, begin + at, 1
                batch.seq_id[at][0], batch.logits[at] = 0, True
            batch.n_tokens = rows
            assert llama.llama_decode(context, batch) == 0
            found.append(np.ctypeslib.as_array(llama.llama_get_logits(context), (rows, weights.width)).copy())
        blocks.append(np.concatenate(found))
        llama.llama_batch_free(batch)
        llama.llama_free(context)
    whole, halves = blocks
    return bool(np.array_equal(whole, halves, equal_nan=True))
