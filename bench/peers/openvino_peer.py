"""The process in which OpenVINO GenAI runs: plain, with a draft model, with prompt lookup.

It computes and keeps its cache in the precision of the other rows (its default for the cache is 8 bits), and forgets
every prompt (by default it would recognise one that it has seen). The end of its standard input ends it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
import torch
from openvino_tokenizers import convert_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from bench.peers.answering import Answer, Methods, Request, answer_asker
from bench.peers.stateless import HuggingFaceStateless
from bench.peers.transformers_peer import DTYPES
from specwire.lm.runners.openvino.graph import PRECISIONS, computed_in, stateful

LONGEST_PREFILL = 1 << 16  # tokens in one forward: a prompt is not cut up
DEVICE = "CPU"


def export(spec: str, folder: Path) -> None:
    """Write the model `spec` (a path or hub id) to a folder: a graph that keeps its KV cache, and a tokenizer.

    The weights are stored as float32, which loses nothing. In which precision they are computed with is said when they
    are loaded.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(spec, dtype=torch.float32, attn_implementation="sdpa")
    folder.mkdir()
    openvino.save_model(stateful(HuggingFaceStateless(model)), folder / "openvino_model.xml", compress_to_fp16=False)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(spec), with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


class TokenStopwatch(openvino_genai.StreamerBase):  # type: ignore[misc]  # OpenVINO is an extra: its types may be absent
    """Notes when how many tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[tuple[float, int]] = []

    def write(self, token: int | Sequence[int]) -> openvino_genai.StreamingStatus:
        self.puts.append((time.perf_counter(), 1 if isinstance(token, int) else len(token)))
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is held back."""


class OpenvinoPeer:
    """A pipeline for each way to decode, over the same exported models."""

    def __init__(self) -> None:
        self._pipelines: dict[str, openvino_genai.LLMPipeline] = {}

    @property
    def methods(self) -> Methods:
        return {"load": self.load, "generate": self.generate}

    def load(self, request: Request) -> Answer:
        """Export both models into `folder`, then load them."""
        torch.set_num_threads(1)  # it only traces, and its threads would be in the way later
        target, draft = Path(request["folder"], "target"), Path(request["folder"], "draft")
        export(request["target"], target)
        export(request["draft"], draft)
        options = _options(PRECISIONS[computed_in(DTYPES[request["dtype"]])], request["threads"])
        drafter = openvino_genai.draft_model(draft, DEVICE, **options)
        self._pipelines = {
            "plain": openvino_genai.LLMPipeline(target, DEVICE, **options),
            "draft": openvino_genai.LLMPipeline(target, DEVICE, draft_model=drafter, **options),
            "lookup": openvino_genai.LLMPipeline(target, DEVICE, prompt_lookup=True, **options),
        }
        return {"threads": request["threads"]}

    def generate(self, request: Request) -> Answer:
        """Generation in a `mode`, greedy unless the `settings` say otherwise; the end of a text does not stop it."""
        prompt = openvino.Tensor(np.array([request["prompt"]], dtype=np.int64))
        config = openvino_genai.GenerationConfig(
            max_new_tokens=request["tokens"],
            ignore_eos=True,
            apply_chat_template=False,
            **{"do_sample": False, **request["settings"]},
        )
        watch = TokenStopwatch()
        began = time.perf_counter()
        result = self._pipelines[request["mode"]].generate(prompt, config, watch)
        ended = time.perf_counter()
        return {
            "tokens": list(result.tokens[0]),
            "seconds": ended - began,
            "first_token_seconds": watch.puts[0][0] - began,
            "forwards": len(watch.puts),
        }


def _options(precision: str, threads: int) -> dict[str, object]:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.enable_prefix_caching = False
    scheduling.max_num_batched_tokens = LONGEST_PREFILL
    return {
        "scheduler_config": scheduling,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": threads,
    }


def main() -> int:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    answer_asker(OpenvinoPeer().methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
