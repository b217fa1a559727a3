"""Tiny random models with the demo pair's tokenizer: what they write is nonsense of every kind."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from demo_pair import TARGET

VOCABULARY = 4096


def tiny(folder: Path, seed: int, like: str = "", noise: float = 0.0) -> str:
    """Save one in `folder`. like: another one of them, of which it is a disturbed copy."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(like, dtype=torch.float32) if like else LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(folder)
    shutil.copy(TARGET / "tokenizer.json", folder)
    return str(folder)


def writer(folder: Path, *texts: str) -> str:
    """Save one that, greedily, goes on as these texts do: by the last token alone, so each of theirs has one next."""
    tiny(folder, 1)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    known = model.model.embed_tokens.weight.detach()
    directions = known / known.norm(dim=1, keepdim=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            for token, following in pairwise(ids):
                model.lm_head.weight[following] += 20.0 * directions[token]
    model.save_pretrained(folder)
    return str(folder)
