"""The process in which transformers generates for several sessions at once, as its users run it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, cast

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from bench.peers.answering import Answer, Methods, Request, answer_asker
from bench.peers.transformers_peer import Stopwatch, TransformersPeer

PADDING = 0
PAGE = 256


class BatchPeer(TransformersPeer):
    """A static batch padded to the left, or continuous batching."""

    @property
    def methods(self) -> Methods:
        return {**super().methods, "padded": self.padded, "continuous": self.continuous}

    @torch.inference_mode()
    def padded(self, request: Request) -> Answer:
        """Greedy `generate`: every sequence of the batch gets a token in each forward."""
        prompts, tokens = request["prompts"], request["tokens"]
        ids, mask = _padded(prompts)
        generate = cast(Callable[..., torch.Tensor], self._models["target"].generate)
        watch = Stopwatch()
        began = time.perf_counter()
        output = generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            use_cache=True,
            max_new_tokens=tokens,
            pad_token_id=PADDING,
            streamer=watch,
        )
        seconds = time.perf_counter() - began
        times = [at - began for at, _ in watch.puts[1:]]
        return {"tokens": output[:, ids.shape[1] :].tolist(), "times": [times] * len(prompts), "seconds": seconds}

    def continuous(self, request: Request) -> Answer:
        """Greedy `generate_batch`, its manager kept from call to call.

        The clock stops at the last token, because the call itself also waits for the manager's thread. `most`
        sessions fit into its cache, and no more: by default it takes most of the memory, which costs seconds here.
        """
        prompts, tokens = request["prompts"], request["tokens"]
        pages = ceil((request["longest"] + tokens) / PAGE)
        settings = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=request["most"] * pages,
            max_requests_per_batch=request["most"],
            allow_block_sharing=False,  # no row may start from an earlier run's cache
        )
        generate = cast(Callable[..., Mapping[str, Any]], self._models["target"].generate_batch)
        began = time.perf_counter()
        outputs = generate(
            prompts,
            generation_config=GenerationConfig(
                max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=PADDING
            ),
            continuous_batching_config=settings,
            record_timestamps=True,
            persistent_manager=True,
        )
        found = list(outputs.values())
        failed = [each.error for each in found if each.error is not None]
        if failed or len(found) != len(prompts):
            raise RuntimeError(failed[0] if failed else f"{len(found)} of {len(prompts)} requests were answered")
        times = [[at - began for at in each.timestamps] for each in found]
        return {
            "tokens": [list(each.generated_tokens) for each in found],
            "times": times,
            "seconds": max(each[-1] for each in times),
        }


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (sessions, longest), padded to the left, and the mask that says where."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def main() -> int:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns at every call that it is kept
    answer_asker(BatchPeer().methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
