"""The process in which OpenVINO GenAI serves a GGUF file, which it reads itself, or an exported folder.

With its own defaults, but for threads and for the cache of prompts, which is off: every row computes every prompt. It
runs in an environment of its own (`make setup-peers`) and imports nothing that is not there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.answering import Answer, Methods, Request, answer_asker

DEVICE = "CPU"
PLAIN, DRAFT, LOOKUP = "plain", "draft", "lookup"
# As in the examples of its documents.
ASSISTANT_TOKENS, NGRAM_SIZE = 5, 3
ALL_IDS = 1 << 20


class PutWatch(openvino_genai.StreamerBase):  # type: ignore[misc]  # OpenVINO is an extra: its types may be absent
    """Notes when tokens came: once for each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[float] = []

    def write(self, token: int | Sequence[int]) -> openvino_genai.StreamingStatus:
        self.puts.append(time.perf_counter())
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is held back."""


class OpenvinoPeer:
    """One pipeline, for one session at a time."""

    def __init__(self) -> None:
        self._pipeline: Any = None
        self._mode = PLAIN

    @property
    def methods(self) -> Methods:
        return {"load": self.load, "generate": self.generate}

    def load(self, request: Request) -> Answer:
        """`model`, `draft` (for DRAFT), `mode` (PLAIN, LOOKUP, DRAFT), `threads`; `precision`, None for its own."""
        self._mode = request["mode"]
        options = _options(request)
        if self._mode == LOOKUP:
            options["prompt_lookup"] = True
        if self._mode == DRAFT:
            options["draft_model"] = _draft_model(Path(request["draft"]), request)
        self._pipeline = openvino_genai.LLMPipeline(request["model"], DEVICE, **options)
        return {}

    def generate(self, request: Request) -> Answer:
        """The only one of `prompts`, `tokens` behind it, at `temperature` with `seed`."""
        (prompt,) = request["prompts"]
        assisting = {} if self._mode == PLAIN else {"num_assistant_tokens": ASSISTANT_TOKENS}
        if self._mode == LOOKUP:
            assisting["max_ngram_size"] = NGRAM_SIZE
        drawing: dict[str, object] = {"do_sample": False}
        if request["temperature"]:
            drawing = {"do_sample": True, "temperature": request["temperature"], "rng_seed": request["seed"]}
            drawing |= {"top_p": 1.0, "top_k": ALL_IDS}
        config = openvino_genai.GenerationConfig(
            max_new_tokens=request["tokens"], ignore_eos=True, apply_chat_template=False, **assisting, **drawing
        )
        watch, ids = PutWatch(), openvino.Tensor(np.array([prompt], dtype=np.int64))
        began = time.perf_counter()
        result = self._pipeline.generate(ids, config, watch)
        seconds = time.perf_counter() - began
        run = {"tokens": list(result.tokens[0]), "seconds": seconds, "forwards": len(watch.puts)}
        return {"seconds": seconds, "runs": [{**run, "first_token_seconds": watch.puts[0] - began}]}


def _options(request: Request) -> dict[str, Any]:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.enable_prefix_caching = False
    options = {"scheduler_config": scheduling, "INFERENCE_NUM_THREADS": request["threads"]}
    if precision := request.get("precision"):
        options |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    return options


def _draft_model(model: Path, request: Request) -> Any:
    """It is read from no GGUF file, but from the folder that the library writes of one."""
    if model.is_dir():
        return openvino_genai.draft_model(model, DEVICE, **_options(request))
    with TemporaryDirectory(prefix="specwire-draft-") as folder:
        linked = Path(folder) / model.name
        linked.symlink_to(model)
        openvino_genai.LLMPipeline(linked, DEVICE, enable_save_ov_model=True)
        return openvino_genai.draft_model(Path(folder), DEVICE, **_options(request))


def main() -> int:
    answer_asker(OpenvinoPeer().methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
