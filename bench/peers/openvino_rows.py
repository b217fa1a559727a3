"""Rows (e), for those who have installed the extra `openvino-genai`: how far a CPU can go on the same weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from bench.harness.child import BenchChild
from bench.harness.rows import GENAI, GENAI_DRAFT, GENAI_LOOKUP, LOAD_LIMIT, RUN_LIMIT, exactly
from bench.harness.runs import Run

PACKAGES = ("openvino", "openvino_genai", "openvino_tokenizers")
NOT_INSTALLED = (
    "(e) OpenVINO GenAI was not measured: the extra `openvino-genai` is not installed "
    "(pip install -e '.[openvino-genai]')."
)
SETTINGS_NOTE = "(e) OpenVINO GenAI: cache in the rows' precision (default: 8 bits), prefix cache off (default: on)."


@dataclass(frozen=True, slots=True)
class OpenvinoRow:
    """OpenVINO GenAI in one of its modes: plain, draft (a draft model) or lookup (n-grams of the text so far).

    settings: of what proposes, as the library's GenerationConfig names them.
    """

    peer: BenchChild
    key: str
    label: str
    mode: str
    settings: dict[str, int | float] = field(default_factory=dict)

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        request = {
            "do": "generate",
            "prompt": list(prompt),
            "tokens": tokens,
            "mode": self.mode,
            "settings": self.settings,
        }
        answer = self.peer.ask(request, RUN_LIMIT)
        return Run(
            tokens=exactly(tokens, answer["tokens"], self.label),
            seconds=answer["seconds"],
            first_token_seconds=answer["first_token_seconds"],
            forwards=answer["forwards"],
        )


def plain_row(peer: BenchChild) -> OpenvinoRow:
    return OpenvinoRow(peer, GENAI, "OpenVINO GenAI", "plain")


def draft_rows(peer: BenchChild) -> list[OpenvinoRow]:
    """The ways to use a draft model, of which the fastest takes part."""
    label = "OpenVINO GenAI, draft model"
    return [
        *(OpenvinoRow(peer, GENAI_DRAFT, f"{label}, k = {k}", "draft", {"num_assistant_tokens": k}) for k in (3, 5, 8)),
        OpenvinoRow(peer, GENAI_DRAFT, f"{label}, confidence 0.4", "draft", {"assistant_confidence_threshold": 0.4}),
    ]


def lookup_rows(peer: BenchChild) -> list[OpenvinoRow]:
    """The ways to use prompt lookup, of which the fastest takes part."""
    label = "OpenVINO GenAI, prompt lookup"
    return [
        OpenvinoRow(peer, GENAI_LOOKUP, f"{label}, k = {k}", "lookup", {"num_assistant_tokens": k, "max_ngram_size": 3})
        for k in (3, 5, 8)
    ]


def installed() -> bool:
    return all(find_spec(name) for name in PACKAGES)


def start(target: str, draft: str, dtype: str, threads: int, folder: str) -> BenchChild:
    """OpenVINO GenAI with both models exported into `folder` and loaded.

    CI=true: to the library a word that it shall send no usage statistics.
    """
    peer = BenchChild("OpenVINO GenAI", ["env", "CI=true", sys.executable, "-m", "bench.peers.openvino_peer"])
    request = {"do": "load", "target": target, "draft": draft, "dtype": dtype, "threads": threads, "folder": folder}
    try:
        peer.ask(request, LOAD_LIMIT)
    except BaseException:
        peer.stop()
        raise
    return peer
