"""A target, a drafter and a head of a few thousand random weights, and a tokenizer: a token for each byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specwire.lm.heads.eagle3 import save
from tests.lm.heads.by_hand import CONFIG, head_of

# As wide as the target.
HEAD = replace(CONFIG, hidden=32, inner=24, vocabulary=257, draft_vocabulary=64, taps=(0, 1, 2))


def save_pair(folder: Path) -> tuple[Path, Path]:
    """Write a target and a drafter that agrees with it on part of the text; their folders."""
    target, draft = folder / "target", folder / "draft"
    for path, layers in ((target, 2), (draft, 1)):
        torch.manual_seed(11)
        LlamaForCausalLM(_config(layers)).save_pretrained(path)
        _tokenizer().save_pretrained(path)
    return target, draft


def save_head(folder: Path, target: Path) -> Path:
    """Write an EAGLE-3 head of that target; its folder."""
    save(head_of(HEAD), folder / "head", str(target), with_embedding=True)
    return folder / "head"


def _config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1536,
        eos_token_id=256,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=True,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({**{byte: index for index, byte in enumerate(alphabet)}, "<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
