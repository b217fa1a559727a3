"""The process in which vLLM is a library, `LLM.generate`, in its own environment; `bench.harness.child` asks it."""

from __future__ import annotations

import signal
import sys

from vllm import LLM, SamplingParams, TokensPrompt

from bench.peers.answering import Answer, Methods, Request, answer_asker


class VllmInProcess:
    """One model. Whole texts come back, of all prompts at once."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    @property
    def methods(self) -> Methods:
        return {"load": self.load, "generate": self.generate}

    def load(self, request: Request) -> Answer:
        """options: of LLM, `model` among them."""
        self._llm = LLM(**request["options"])
        return {}

    def generate(self, request: Request) -> Answer:
        """The ids behind each prompt, `tokens` of them."""
        if self._llm is None:
            raise RuntimeError("asked before a model was loaded")
        drawn = SamplingParams(
            temperature=request["temperature"], max_tokens=request["tokens"], ignore_eos=True, seed=request["seed"]
        )
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
        written = self._llm.generate(prompts, drawn, use_tqdm=False)
        return {"texts": [[*each.outputs[0].token_ids] for each in written]}


if __name__ == "__main__":
    # An exit in order: vLLM ends its engine's process then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    answer_asker(VllmInProcess().methods)
