"""transformers in this process, with the very same weights: plain, and assisted by the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from transformers import PreTrainedModel

from bench.gpu.decoding import Decoded
from bench.peers.transformers_peer import Stopwatch


class TransformersPair:
    """As its users run it; a fixed number of draft tokens, as the rows beside it have."""

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, tokens: int) -> None:
        self._target, self._draft = target, draft
        settings = draft.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = tokens, "constant"
        settings.assistant_confidence_threshold = 0.0

    @torch.inference_mode()
    def run(self, prompt: Sequence[int], tokens: int, assisted: bool) -> Decoded:
        """From the first token to the last."""
        ids = torch.tensor([list(prompt)], device=self._target.device)
        watch = Stopwatch()
        generate = cast(Callable[..., torch.Tensor], self._target.generate)
        output = generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=tokens,
            assistant_model=self._draft if assisted else None,
            streamer=watch,
        )
        (began, first), *rest = watch.puts[1:]
        text = tuple(output[0, len(prompt) :].tolist())
        ended = rest[-1][0] if rest else began
        accepted = sum(tokens - 1 for _, tokens in watch.puts[1:])
        return Decoded(ended - began, len(text) - first, (text,), 0, accepted if assisted else 0)
