"""The process in which transformers runs, as its users run it: eager mode, its own cache, one thread per core.

A process of its own, so that it shares no interpreter with the client and sleeps on a pipe while other rows run.
The end of its standard input ends it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from bench.peers.answering import Answer, Methods, Request, answer_asker

GGUF = ".gguf"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Stopwatch:
    """A streamer, as users have one; notes when how many tokens came. What it hears first is the prompt."""

    def __init__(self) -> None:
        self.puts: list[tuple[float, int]] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.puts.append((time.perf_counter(), tokens.numel()))

    def end(self) -> None:
        """Nothing is held back."""


class TransformersPeer:
    """The target, and perhaps a drafter, in transformers."""

    def __init__(self) -> None:
        self._models: dict[str, PreTrainedModel] = {}
        self._spec = ""
        self._variant: object = None

    @property
    def methods(self) -> Methods:
        return {"load": self.load, "encode": self.encode, "generate": self.generate, "scores": self.scores}

    def load(self, request: Request) -> Answer:
        """Load the models; a text's end does not stop them (no row stops early)."""
        torch.set_num_threads(request["threads"])
        self._spec = request["target"]
        for role in ("target", "draft"):
            if request[role] is not None:
                self._models[role] = _load(request[role], DTYPES[request["dtype"]])
        return {"threads": torch.get_num_threads()}

    def encode(self, request: Request) -> Answer:
        """Token ids of texts, nothing added."""
        tokenizer = AutoTokenizer.from_pretrained(self._spec)
        return {"prompts": [tokenizer.encode(text, add_special_tokens=False) for text in request["texts"]]}

    @torch.inference_mode()
    def generate(self, request: Request) -> Answer:
        """Greedy generation, assisted if the request has a `variant` (settings of the drafter)."""
        prompt = torch.tensor([request["prompt"]])
        assistant = None if request["variant"] is None else self._assistant(request["variant"])
        generate = cast(Callable[..., torch.Tensor], self._models["target"].generate)
        watch = Stopwatch()
        began = time.perf_counter()
        output = generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            use_cache=True,
            max_new_tokens=request["tokens"],
            assistant_model=assistant,
            streamer=watch,
        )
        ended = time.perf_counter()
        decided = watch.puts[1:]
        return {
            "tokens": output[0, prompt.shape[1] :].tolist(),
            "seconds": ended - began,
            "first_token_seconds": decided[0][0] - began,
            "decided": [count for _, count in decided],
        }

    @torch.inference_mode()
    def scores(self, request: Request) -> Answer:
        """Scores of the token after a text, from one forward in float32 without a cache."""
        if "exact" not in self._models:
            self._models["exact"] = _load(self._spec, torch.float32)
        logits = self._models["exact"](input_ids=torch.tensor([request["text"]]), use_cache=False).logits[0, -1]
        top = logits.topk(2)
        return {
            "top": top.indices.tolist(),
            "top_scores": top.values.tolist(),
            "scores": logits[request["of"]].tolist(),
        }

    def _assistant(self, variant: Mapping[str, object]) -> PreTrainedModel:
        """The drafter under a variant's settings; not reset between calls of one variant, for schedules that learn."""
        model = self._models["draft"]
        if variant != self._variant:
            for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
                setattr(model.generation_config, name, variant.get(name))
            self._variant = dict(variant)
        return model


def _load(spec: str, dtype: torch.dtype) -> PreTrainedModel:
    """A directory's model, or a GGUF file's, whose weights are dequantised."""
    model: PreTrainedModel
    if spec.lower().endswith(GGUF):
        model = _of_file(spec, dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(spec, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.eval()
    return model


def _of_file(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """By transformers' own reader; its `from_pretrained` wants a further package for that."""
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    lacking, unknown = model.load_state_dict(read["tensors"], strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    if unknown or [each for each in lacking if each not in tied]:
        raise ValueError(f"{path}: transformers reads other weights of it than its model has: {[*lacking, *unknown]}")
    model.tie_weights()
    return model


def main(_: Sequence[str] = ()) -> int:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    answer_asker(TransformersPeer().methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
