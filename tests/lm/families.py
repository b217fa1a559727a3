"""The model families that are tested, tiny and random, and those that are refused: docs/MODELS.md lists both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import (
    BambaConfig,
    BloomConfig,
    FalconConfig,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    SmolLM3Config,
    T5Config,
)

from tests.lm.models import COMMON, CONTEXT, ROTARY, VOCABULARY

# A window that texts of CONTEXT positions slide past.
WINDOW = 16
PADDED: dict[str, Any] = {**ROTARY, "pad_token_id": 0}
SHORT: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 2}
MULTI_HEAD: dict[str, Any] = {key: value for key, value in ROTARY.items() if key != "num_key_value_heads"}
BLOCKS: dict[str, Any] = {"n_layer": 2, "n_head": 4}
LAYERS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True, slots=True)
class Family:
    """One family: as the documentation calls it, and a tiny configuration of it."""

    name: str
    config: Callable[[], PreTrainedConfig]


SERVED = [
    Family("Llama", lambda: LlamaConfig(**ROTARY)),
    Family("Qwen2", lambda: Qwen2Config(**ROTARY)),
    Family("Qwen3", lambda: Qwen3Config(**ROTARY, head_dim=16)),
    Family("Mistral", lambda: MistralConfig(**ROTARY, sliding_window=None)),
    Family("Gemma", lambda: GemmaConfig(**ROTARY, head_dim=16)),
    Family("Phi-3", lambda: Phi3Config(**PADDED)),
    Family("GPT-2", lambda: GPT2Config(**COMMON, **BLOCKS, n_embd=32)),
    Family("OPT", lambda: OPTConfig(**SHORT, **LAYERS, init_std=0.3, ffn_dim=48, word_embed_proj_dim=32)),
    Family("GPT-NeoX", lambda: GPTNeoXConfig(**MULTI_HEAD)),
    Family("Falcon", lambda: FalconConfig(**COMMON, **LAYERS)),
    Family("OLMo-2", lambda: Olmo2Config(**PADDED)),
    Family("SmolLM3", lambda: SmolLM3Config(**PADDED)),
    Family("MPT", lambda: MptConfig(**SHORT, d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT)),
    Family("Mixtral", lambda: MixtralConfig(**ROTARY, num_local_experts=4, num_experts_per_tok=2)),
    Family(
        "Qwen3-MoE",
        lambda: Qwen3MoeConfig(**ROTARY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    ),
]
# Sliding windows, shorter than the texts.
SLIDING = [
    Family("Mistral", lambda: MistralConfig(**ROTARY, sliding_window=WINDOW)),
    Family("Mixtral", lambda: MixtralConfig(**ROTARY, sliding_window=WINDOW, num_local_experts=2)),
    Family("Phi-3", lambda: Phi3Config(**PADDED, sliding_window=WINDOW)),
    Family("Gemma 2", lambda: Gemma2Config(**ROTARY, head_dim=16, sliding_window=WINDOW)),
    Family(
        "Gemma 3", lambda: Gemma3TextConfig(**{**ROTARY, "num_hidden_layers": 6}, head_dim=8, sliding_window=WINDOW)
    ),
    Family(
        "Qwen2",
        lambda: Qwen2Config(**ROTARY, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    Family(
        "Qwen3",
        lambda: Qwen3Config(**ROTARY, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, head_dim=8),
    ),
]
# Position biases that the model computes itself (ALiBi): one text at a time.
ALONE = [
    Family("BLOOM", lambda: BloomConfig(**SHORT, **BLOCKS, hidden_size=32)),
    Family("Falcon with ALiBi", lambda: FalconConfig(**COMMON, **LAYERS, alibi=True)),
]

RECURRENT = "cannot be rolled back to a position"
REFUSED = [
    (Family("Mamba", lambda: MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)), RECURRENT),
    (
        Family(
            "Mamba-2",
            lambda: Mamba2Config(
                vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_heads=2, head_dim=16, state_size=8
            ),
        ),
        RECURRENT,
    ),
    (
        Family("Falcon-Mamba", lambda: FalconMambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)),
        RECURRENT,
    ),
    (Family("RWKV", lambda: RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2)), RECURRENT),
    (
        Family("Jamba", lambda: JambaConfig(**PADDED, num_experts=2, attn_layer_period=2, attn_layer_offset=1)),
        RECURRENT,
    ),
    (
        Family("Bamba", lambda: BambaConfig(**PADDED, attn_layer_indices=[1], mamba_n_heads=2, mamba_d_head=32)),
        RECURRENT,
    ),
    (Family("RecurrentGemma", lambda: RecurrentGemmaConfig(**PADDED)), RECURRENT),
    (Family("Qwen3-Next", lambda: Qwen3NextConfig(**ROTARY)), RECURRENT),
    (Family("Llama 4", lambda: Llama4TextConfig(**PADDED, head_dim=16)), RECURRENT),
    (
        Family(
            "GPT-Neo",
            lambda: GPTNeoConfig(
                **{**COMMON, **LAYERS, "num_layers": 2, "num_heads": 4},
                attention_types=[[["global", "local"], 1]],
                window_size=WINDOW,
            ),
        ),
        f"sliding window of {WINDOW} positions, shorter than the context",
    ),
    (
        Family("gpt-oss", lambda: GptOssConfig(**PADDED, head_dim=16, num_local_experts=4, sliding_window=WINDOW)),
        f"sliding window of {WINDOW} positions, shorter than the context",
    ),
    (Family("T5", lambda: T5Config(vocab_size=VOCABULARY, d_model=16, num_layers=1)), "have an encoder"),
]
