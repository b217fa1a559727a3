"""The same test on other engines: `python -m bench.laws.peer`.

Without options on transformers' assisted generation, and on OpenVINO GenAI where that is installed. On any other engine
with an HTTP API like OpenAI's in two steps: --write DIR leaves a target and a drafter of four ids, with random weights
from fixed seeds, so that the exact law of the first tokens can be computed from the target's logits; served by the
engine, in float32, --url URL asks it. Plain sampling is the control: if it is refused too, the test is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from scipy.stats import chi2
from transformers import LlamaForCausalLM

from bench.harness import RESULTS, record
from bench.harness.report import table
from bench.harness.runs import BenchError
from bench.laws.exact import chi_square
from bench.laws.pair import LETTERS, PROMPT, SEEDS, Text, joint, model, write
from bench.peers.library import PEERS, PRECISIONS, exported, start
from specwire.rpc.process import say

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
        written = write(Path(folder), special=LETTERS[-1])
        target, draft = (exported(str(each), Path(folder, f"exported-{each.name}")) for each in written)
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


OUT = RESULTS / "laws_peers.json"
ALPHA = 1e-5


@dataclass(frozen=True, slots=True)
class EngineTest:
    """What the test says of one way in which an engine decodes."""

    engine: str
    way: str
    control: bool
    texts: int
    p: float

    @property
    def refused(self) -> bool:
        return self.p < ALPHA

    @property
    def cells(self) -> tuple[str, ...]:
        return self.engine, self.way, str(self.texts), f"{self.p:.2g}", "refused" if self.refused else "accepted"


def judged(ways: Iterable[EngineWay], count: int) -> list[EngineTest]:
    law, verdicts = joint(model(SEEDS[0]), FIRSTS), []
    for way in ways:
        say(f"bench: {way.engine}, {way.name}: {count} texts")
        statistic, freedom = chi_square(way.texts(count), law, count)
        verdicts.append(EngineTest(way.engine, way.name, way.control, count, float(chi2.sf(statistic, freedom))))
    return verdicts


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.laws.peer", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--sessions", type=int, default=10_000, metavar="N", help="of each (default: %(default)s)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON; not written with --url")
    line.add_argument("--write", type=Path, metavar="DIR", help="write DIR/target and DIR/draft, and do nothing else")
    line.add_argument("--url", metavar="URL", help="of a server, up to /v1, that serves what --write has written")
    line.add_argument("--served", default="target", metavar="NAME", help="of the model there (default: %(default)s)")
    line.add_argument("--more", type=json.loads, default={}, metavar="JSON", help="more fields of the request to it")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    """Print the p-values; fails only where a control is refused: what a peer does is for the reader."""
    args = parser().parse_args(argv)
    if record.refused(args, ("sessions",)):
        return 2
    if args.write is not None:
        print("\n".join(map(str, write(args.write))))
        return 0
    torch.set_num_threads(1)
    own = [server_way(args.url, args.served, args.more)] if args.url else [*transformers_ways(), *openvino_ways()]
    try:
        verdicts = judged(own, args.sessions)
    except BenchError as error:
        say(f"bench: error: {error}")
        return 1
    print("\n".join(table(("engine", "", "texts", f"p, first {FIRSTS}", ""), [each.cells for each in verdicts])))
    if not args.url:
        rows = [{**asdict(each), "refused": each.refused} for each in verdicts]
        record.save(args.out, {"rows": rows, "alpha": ALPHA}, {"sessions": args.sessions})
    return 1 if any(each.control and each.refused for each in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
