"""A target and a drafter of four ids with random weights from fixed seeds, and the exact law of the target's texts."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# An id each.
LETTERS = "abcd"
VOCABULARY = len(LETTERS)
PROMPT = (1, 2)
# Of the target's weights, and of the drafter's.
SEEDS = (1, 2)
# Of the random weights: enough for tokens of unequal probability.
SCALE = 0.3
Text = tuple[int, ...]


def model(seed: int) -> LlamaForCausalLM:
    """A Llama of one small layer, its one head of a size that engines have kernels for; no id ends its texts."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
        initializer_range=SCALE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    llama: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return llama


def write(folder: Path, special: str | None = None) -> tuple[Path, Path]:
    """Target and drafter as directories, for an engine to load; a text's letters are its ids.

    special: a letter that the tokenizer calls an end of sequence; some engines' converters need one.
    """
    words = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    target, draft = folder / "target", folder / "draft"
    for path, seed in zip((target, draft), SEEDS, strict=True):
        model(seed).save_pretrained(path)
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=special).save_pretrained(path)
    return target, draft


@torch.inference_mode()
def joint(target: LlamaForCausalLM, length: int) -> dict[Text, float]:
    """The exact law of the first `length` tokens behind PROMPT at temperature 1."""
    law: dict[Text, float] = {}
    for text in product(range(VOCABULARY), repeat=length):
        logits = target(torch.tensor([[*PROMPT, *text]])).logits[0].double().log_softmax(dim=1)
        at = range(len(PROMPT) - 1, len(PROMPT) + length - 1)
        law[text] = float(torch.stack([logits[row, token] for row, token in zip(at, text, strict=True)]).sum().exp())
    return law
