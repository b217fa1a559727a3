"""The model families that are tested, tiny and random, and those that are refused: docs/MODELS.md lists both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import (
    BambaConfig,
    BloomConfig,
    FalconConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NemotronHConfig,
    Olmo2Config,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    SmolLM3Config,
    Starcoder2Config,
    T5Config,
    Zamba2Config,
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
    Family("gpt-oss", lambda: GptOssConfig(**PADDED, head_dim=16, num_local_experts=4, sliding_window=WINDOW)),
]
# Attention within chunks, shorter than the texts.
CHUNKS: dict[str, Any] = {**PADDED, "head_dim": 16, "num_local_experts": 2, "attention_chunk_size": WINDOW}
CHUNKED = [Family("Llama 4", lambda: Llama4TextConfig(**CHUNKS, no_rope_layer_interval=2))]
# Positions that layers count themselves: one text at a time.
OWN = [
    Family("Llama 4 with scaled queries", lambda: Llama4TextConfig(**CHUNKS, no_rope_layer_interval=2, floor_scale=8)),
    Family(
        "GPT-Neo",
        lambda: GPTNeoConfig(
            **{**COMMON, **LAYERS, "num_layers": 2, "num_heads": 4},
            attention_types=[[["global", "local"], 1]],
            window_size=WINDOW,
        ),
    ),
]
# Position biases that the model computes itself (ALiBi): one text at a time.
ALONE = [
    Family("BLOOM", lambda: BloomConfig(**SHORT, **BLOCKS, hidden_size=32)),
    Family("Falcon with ALiBi", lambda: FalconConfig(**COMMON, **LAYERS, alibi=True)),
]

# Recurrent layers, alone or beside attention. Chunks shorter than the texts.
SSM: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
ALTERNATING = ["linear_attention", "full_attention"]
DELTA: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ALTERNATING,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 8}
HYBRID = [
    Family("Mamba", lambda: MambaConfig(**SMALL, initializer_range=0.3)),
    Family(
        "Mamba-2",
        lambda: Mamba2Config(**SMALL, initializer_range=0.3, num_heads=4, head_dim=8, n_groups=2, chunk_size=16),
    ),
    Family("Falcon-Mamba", lambda: FalconMambaConfig(**SMALL, initializer_range=0.3)),
    Family(
        "Jamba",
        lambda: JambaConfig(**PADDED, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    ),
    Family("Bamba", lambda: BambaConfig(**PADDED, **SSM, attn_layer_indices=[1])),
    Family("Qwen3-Next", lambda: Qwen3NextConfig(**PADDED, **DELTA, **EXPERTS)),
    Family("Qwen3.5", lambda: Qwen3_5TextConfig(**PADDED, **DELTA)),
    Family("Qwen3.5-MoE", lambda: Qwen3_5MoeTextConfig(**PADDED, **DELTA, **EXPERTS)),
    Family(
        "Kimi-Linear",
        lambda: KimiLinearConfig(
            **{**PADDED, "num_key_value_heads": 4},
            layer_types=ALTERNATING,
            mlp_layer_types=["dense", "dense"],
            linear_head_dim=8,
            linear_num_heads=4,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
        ),
    ),
    Family(
        "OLMo-Hybrid",
        lambda: OlmoHybridConfig(
            **PADDED, layer_types=ALTERNATING, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8
        ),
    ),
    Family("LFM2", lambda: Lfm2Config(**PADDED, layer_types=["conv", "full_attention"])),
    Family(
        "LFM2-MoE",
        lambda: Lfm2MoeConfig(
            **PADDED,
            layer_types=["conv", "full_attention"],
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        ),
    ),
    Family("Falcon-H1", lambda: FalconH1Config(**PADDED, **SSM, mamba_d_ssm=64)),
    Family(
        "Granite 4",
        lambda: GraniteMoeHybridConfig(
            **PADDED,
            **SSM,
            layer_types=ALTERNATING,
            num_local_experts=2,
            num_experts_per_tok=1,
            shared_intermediate_size=16,
        ),
    ),
    Family(
        "Nemotron-H",
        lambda: NemotronHConfig(
            **PADDED,
            layers_block_type=["linear_attention", "mlp", "full_attention"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=16,
            head_dim=8,
        ),
    ),
    Family(
        "Zamba2",
        lambda: Zamba2Config(
            **PADDED,
            layers_block_type=["linear_attention", "hybrid"],
            mamba_d_state=8,
            mamba_ngroups=2,
            n_mamba_heads=4,
            chunk_size=16,
            use_mem_rope=True,
            time_step_min=1e-6,
        ),
    ),
]

RECURRENT = "cannot be rolled back to a position"
REFUSED = [
    (Family("MiniMax", lambda: MiniMaxConfig(**PADDED, layer_types=ALTERNATING)), RECURRENT),
    (Family("RecurrentGemma", lambda: RecurrentGemmaConfig(**PADDED)), RECURRENT),
    (Family("RWKV", lambda: RwkvConfig(**{**SHORT, "hidden_size": 16, "num_hidden_layers": 2})), RECURRENT),
    (
        Family("StarCoder2", lambda: Starcoder2Config(**PADDED, sliding_window=WINDOW)),
        f"sliding window of {WINDOW} positions, shorter than the context",
    ),
    (Family("T5", lambda: T5Config(vocab_size=VOCABULARY, d_model=16, num_layers=1)), "have an encoder"),
]
