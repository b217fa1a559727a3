"""The process in which transformers runs, as its users run it: eager mode, its own cache, one thread per core.

One session at a time, plain or assisted, or several: a static batch padded to the left, or continuous batching.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from bench.peers.answering import Answer, Methods, Request, answer_asker

GGUF = ".gguf"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PLAIN, ASSISTED, STATIC, CONTINUOUS = "plain", "assisted", "static", "continuous"
PADDING = 0
PAGE = 256


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
        self._asked: Request = {}

    @property
    def methods(self) -> Methods:
        return {"load": self.load, "generate": self.generate}

    def load(self, request: Request) -> Answer:
        """`model`, `draft` (for ASSISTED), `mode`, `threads`, `dtype`; for CONTINUOUS `sessions` and their `context`.

        A text's end does not stop them: no row stops early.
        """
        torch.set_num_threads(request["threads"])
        self._asked = request
        roles = ("model", "draft") if request["mode"] == ASSISTED else ("model",)
        self._models = {role: _load(request[role], DTYPES[request["dtype"]]) for role in roles}
        return {}

    def generate(self, request: Request) -> Answer:
        """`tokens` behind each of `prompts`, at `temperature` with `seed`; but for STATIC and CONTINUOUS only one."""
        torch.manual_seed(request["seed"])
        how = {STATIC: self._padded, CONTINUOUS: self._continuous}.get(self._asked["mode"], self._alone)
        return how(request)

    @torch.inference_mode()
    def _alone(self, request: Request) -> Answer:
        (prompt,) = request["prompts"]
        ids = torch.tensor([prompt])
        output, watch, began = self._watched(
            request, ids, torch.ones_like(ids), assistant_model=self._models.get("draft")
        )
        seconds = time.perf_counter() - began
        (first, _), *_ = decided = watch.puts[1:]
        tokens = output[0, len(prompt) :].tolist()
        # Of n tokens that a forward decided the last is the target's own.
        accepted = sum(count - 1 for _, count in decided)
        run = {"tokens": tokens, "seconds": seconds, "first_token_seconds": first - began, "forwards": len(decided)}
        return {"seconds": seconds, "runs": [{**run, "accepted": accepted}]}

    @torch.inference_mode()
    def scores(self, text: Sequence[int]) -> list[float]:
        """Of every id behind a text, from one forward without a cache."""
        logits = self._models["model"](input_ids=torch.tensor([[*text]]), use_cache=False).logits[0, -1]
        found: list[float] = logits.tolist()
        return found

    @torch.inference_mode()
    def judged(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[int, float]:
        """How many tokens of a text are the best ones where they stand, and its log-probability."""
        behind = self._models["model"](input_ids=torch.tensor([[*prompt, *text[:-1]]]), use_cache=False)
        rows, said = behind.logits[0, -len(text) :].float(), torch.tensor([*text])
        own = rows.log_softmax(-1).gather(1, said[:, None])
        return int((rows.argmax(-1) == said).sum()), float(own.sum())

    @torch.inference_mode()
    def _padded(self, request: Request) -> Answer:
        """Every sequence of the batch gets a token in each forward."""
        ids, mask = _padded(request["prompts"])
        output, watch, began = self._watched(request, ids, mask, pad_token_id=PADDING)
        times = [at - began for at, _ in watch.puts[1:]]
        return _answer([row.tolist() for row in output[:, ids.shape[1] :]], [times] * len(ids))

    def _watched(
        self, request: Request, ids: torch.Tensor, mask: torch.Tensor, **more: object
    ) -> tuple[torch.Tensor, Stopwatch, float]:
        """What `generate` wrote, when, and when it began."""
        watch = Stopwatch()
        generate = cast(Callable[..., torch.Tensor], self._models["model"].generate)
        began = time.perf_counter()
        output = generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=request["tokens"],
            use_cache=True,
            streamer=watch,
            **_drawing(request),
            **more,
        )
        return output, watch, began

    def _continuous(self, request: Request) -> Answer:
        """`generate_batch`, its manager kept from call to call.

        The clock stops at the last token, because the call itself also waits for the manager's thread. Its cache holds
        the sessions that were told when it was loaded, and no more: by default it takes most of the memory, which costs
        seconds here.
        """
        most = self._asked["sessions"]
        settings = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=most * ceil(self._asked["context"] / PAGE),
            max_requests_per_batch=most,
            allow_block_sharing=False,  # no row may start from an earlier run's cache
        )
        generate = cast(Callable[..., Mapping[str, Any]], self._models["model"].generate_batch)
        began = time.perf_counter()
        outputs = generate(
            request["prompts"],
            generation_config=GenerationConfig(
                max_new_tokens=request["tokens"], eos_token_id=-1, pad_token_id=PADDING, **_drawing(request)
            ),
            continuous_batching_config=settings,
            record_timestamps=True,
            persistent_manager=True,
        )
        found = list(outputs.values())
        failed = [each.error for each in found if each.error is not None]
        if failed or len(found) != len(request["prompts"]):
            raise RuntimeError(failed[0] if failed else f"{len(found)} requests were answered")
        texts = [list(each.generated_tokens) for each in found]
        return _answer(texts, [[at - began for at in each.timestamps] for each in found])


def _drawing(request: Request) -> dict[str, Any]:
    if not request["temperature"]:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}


def _answer(texts: Sequence[Sequence[int]], times: Sequence[Sequence[float]]) -> Answer:
    """times: when each token of a text came."""
    runs = [
        {"tokens": list(text), "seconds": at[-1], "first_token_seconds": at[0], "forwards": len(at)}
        for text, at in zip(texts, times, strict=True)
    ]
    return {"seconds": max(at[-1] for at in times), "runs": runs}


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (sessions, longest), padded to the left, and the mask that says where."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


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
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns at every call that it is kept
    answer_asker(TransformersPeer().methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
