"""Engines beside this one, each asked for the first tokens of many texts at temperature 1."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from transformers import LlamaForCausalLM

from bench.harness.runs import BenchError
from bench.laws.pair import LETTERS, PROMPT, SEEDS, Text, model, write
from bench.peers.library import PEERS, PRECISIONS, exported, start

# Tokens that are looked at, and asked for: what is drafted may reach beyond those that are looked at.
FIRSTS, ASKED = 3, 6
AT_ONCE = 8
LIMIT_S = 120.0


class EngineWay(NamedTuple):
    """How an engine decodes; `texts` gives the first tokens of so many. control: without speculation."""

    engine: str
    name: str
    control: bool
    texts: Callable[[int], Counter[Text]]


def transformers_ways() -> list[EngineWay]:
    target, assistant = map(model, SEEDS)
    plain = EngineWay("transformers", "plain sampling", True, lambda count: _generated(target, None, count))
    assisted = EngineWay(
        "transformers", "assisted generation", False, lambda count: _generated(target, assistant, count)
    )
    return [plain, assisted]


def _generated(target: LlamaForCausalLM, assistant: LlamaForCausalLM | None, count: int) -> Counter[Text]:
    """From the library's own generator, whose numbers are the global ones."""
    torch.manual_seed(0)
    prompt = torch.tensor([PROMPT])
    generate = cast(Callable[..., torch.Tensor], cast(Any, target).generate)
    found: Counter[Text] = Counter()
    for _ in range(count):
        answer = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=assistant,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=ASKED,
        )
        found[tuple(answer[0, len(PROMPT) : len(PROMPT) + FIRSTS].tolist())] += 1
    return found


def openvino_ways() -> list[EngineWay]:
    """OpenVINO GenAI, where `make setup-peers` has run."""
    if not PEERS.exists():
        return []
    return [
        EngineWay("OpenVINO GenAI", "plain sampling", True, lambda count: _by_openvino("plain", count)),
        EngineWay("OpenVINO GenAI", "draft model", False, lambda count: _by_openvino("draft", count)),
    ]


def _by_openvino(mode: str, count: int) -> Counter[Text]:
    """Each text with a seed of its own, and all of the vocabulary."""
    with TemporaryDirectory() as folder:
        target, draft = (exported(str(model), Path(folder, f"exported-{model.name}")) for model in write(Path(folder)))
        loading = {"model": target, "draft": draft, "mode": mode, "threads": 1, "precision": PRECISIONS["float32"]}
        with start("openvino", loading) as peer:
            found: Counter[Text] = Counter()
            for seed in range(count):
                request = {"do": "generate", "prompts": [list(PROMPT)], "tokens": ASKED, "temperature": 1.0}
                (run,) = peer.ask({**request, "seed": seed + 1}, LIMIT_S)["runs"]
                found[tuple(run["tokens"][:FIRSTS])] += 1
            return found


def server_way(url: str, served: str, more: Mapping[str, object]) -> EngineWay:
    """Whatever serves /completions below `url` as OpenAI's API has it, with a model that `pair.write` has written.

    more: fields of the request. Filters that some servers have on by default are off unless it says otherwise.
    """
    body = {"model": served, "prompt": list(PROMPT), "max_tokens": ASKED, "temperature": 1.0, "top_p": 1.0}
    asked = {**body, "top_k": 0, "min_p": 0.0, **more}

    def texts(count: int) -> Counter[Text]:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return Counter(threads.map(lambda seed: _completed(url, {**asked, "seed": seed}), range(count)))

    return EngineWay(url, served, False, texts)


def _completed(url: str, body: Mapping[str, object]) -> Text:
    """The first tokens of one answer. BenchError where there is none."""
    request = urllib.request.Request(
        f"{url.rstrip('/')}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            text = json.load(answer)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        raise BenchError(f"{url} refuses: {error.read().decode(errors='replace')[:300]}") from None
    except (OSError, ValueError, LookupError) as error:
        raise BenchError(f"{url} does not answer as OpenAI's API does: {error}") from error
    tokens = tuple(LETTERS.index(letter) for letter in text if letter in LETTERS)
    if len(tokens) < FIRSTS:
        raise BenchError(f"{url} answers {text!r:.80}: not {ASKED} of the letters {LETTERS}")
    return tokens[:FIRSTS]
