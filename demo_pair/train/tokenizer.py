"""The pair's shared tokenizer: byte-level BPE whose pieces follow the shape of Python source."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"

# A newline with the indentation that follows it is one piece: it becomes one token for the common depths,
# and a drafter that knows the depth of a block gets the whole line start right at once.
PIECES = r" ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9_]+|\s*\n[ \t]*| +(?=\S)|\s+"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn `VOCABULARY` merges from `texts`; every byte string can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
