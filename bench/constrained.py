"""Count what a drafter's copy of a constraint is worth: python -m bench.constrained --help.

The target writes constrained texts behind held-out prompts. At each of their positions the drafter guesses the next
token, once from what the constraint allows and once from all tokens. How often it is right is its acceptance there.
These are counts, not times, so a busy machine does not disturb them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.harness import RESULTS, record
from bench.harness.interleave import tracked
from bench.harness.report import table
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.core.draft import DraftRow
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.constraint import Constraint, ConstraintKind, Mask, open_ids
from specwire.core.law.sampling import Sampling
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.guesses import draw
from specwire.lm.law.sampler import choose
from specwire.text.constraint_process import Grammars

OUT = RESULTS / "constrained.json"
CONTEXT, PROMPT_TOKENS = 512, 200

ARGUMENTS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["positional", "keyword", "variadic"]},
        "default": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"type": "string", "maxLength": 16}]},
        "annotations": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "kind", "default", "annotations"],
    "additionalProperties": False,
}
LISP = 'start: "(" WORD (" " item){0,4} ")"\nitem: WORD | NUMBER | start\nWORD: /[a-z_]{1,10}/\nNUMBER: /[0-9]{1,3}/\n'
CHOICES = ("return None", "return False", "return self", "raise ValueError", "raise NotImplementedError", "pass")
FORMS = {
    "JSON schema": Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(ARGUMENTS),)),
    "regular expression": Constraint(
        ConstraintKind.REGEX,
        (r"def [a-z_]{3,20}\((self|[a-z]{1,8})(, [a-z]{1,8}){0,3}\):\n    return [a-z_.]{1,30}\n",),
    ),
    "choice": Constraint(ConstraintKind.CHOICES, CHOICES),
    "grammar": Constraint(ConstraintKind.GRAMMAR, (LISP,)),
}
SAMPLINGS = {"greedy": Sampling(), "coupled, temperature 1": Sampling(temperature=1.0, seed=7)}


@dataclass(frozen=True, slots=True)
class Counted:
    """Positions, and at how many of them the drafter was right. forced: of the positions, those with one allowed id."""

    form: str
    rule: str
    positions: int
    forced: int
    with_mask: int
    without: int

    @property
    def cells(self) -> tuple[str, ...]:
        shares = (f"{count / self.positions:.3f}" for count in (self.with_mask, self.without))
        return f"{self.form}, {self.rule}", str(self.positions), f"{self.forced / self.positions:.3f}", *shares


class ConstrainedPair:
    """Target and drafter over one text at a time."""

    def __init__(self) -> None:
        self.target = load_model(str(TARGET), slots=1, context=CONTEXT, dtype="float32")
        self.draft = load_model(str(DRAFT), slots=1, context=CONTEXT, dtype="float32")
        info = self.target.info
        self.grammars = Grammars(info.tokenizer_json, info.vocabulary, info.eos_ids)

    def count(self, prompt: Sequence[int], form: str, rule: str, most: int) -> Counted:
        matching, sampling = self.grammars.begin(FORMS[form]), SAMPLINGS[rule]
        text = list(prompt)
        forced = with_mask = without = 0
        while len(text) - len(prompt) < most:
            mask = open_ids(matching.masks(())[0], ())
            if mask is None:
                break
            row = RowSampling(len(text), sampling, allowed=mask)
            (token,) = choose(_logits(self.target, text), [row])
            guess, plain = (self._guess(text, sampling, allowed) for allowed in (mask, None))
            forced += int(mask.sum() == 1)
            with_mask += guess == token
            without += plain == token
            matching.take([token])
            text.append(token)
            if token in self.target.info.eos_ids:
                break
        return Counted(form, rule, len(text) - len(prompt), forced, with_mask, without)

    def _guess(self, text: Sequence[int], sampling: Sampling, allowed: Mask | None) -> int:
        ((token, _),) = draw(_logits(self.draft, text), [DraftRow(len(text), sampling, False, None, allowed)])
        return token


def _logits(lm: LanguageModel, text: Sequence[int]) -> torch.Tensor:
    """Behind the text, of which all but the last token may be cached."""
    start = min(lm.cached(0), len(text) - 1)
    return lm.forward([Feed(0, start, text[start:], 1)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.constrained", description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=12, metavar="N", help="held-out prompts (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=96, metavar="N", help="of each text, at most (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: %(default)s")
    args = parser.parse_args()
    if record.refused(args, ("prompts", "tokens")):
        return 2
    pair, tokenizer = ConstrainedPair(), Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt.text).ids[:PROMPT_TOKENS] for prompt in held_out_prompts()[: args.prompts]]
    kinds = [(form, rule) for form in FORMS for rule in SAMPLINGS]
    counted = [_sum(pair, prompts, *kind, args.tokens) for kind in tracked(kinds, len(kinds))]
    head = ("constraint, rule", "positions", "only one id allowed", "right with the mask", "right without")
    print("\n".join(table(head, [each.cells for each in counted])))
    record.write(args.out, {"rows": [asdict(each) for each in counted]}, args, ("prompts", "tokens"))
    return 0


def _sum(pair: ConstrainedPair, prompts: Sequence[Sequence[int]], form: str, rule: str, most: int) -> Counted:
    parts = []
    for prompt in prompts:
        for lm in (pair.target, pair.draft):
            lm.discard(0)
        parts.append(pair.count(prompt, form, rule, most))
    totals = (sum(getattr(part, name) for part in parts) for name in ("positions", "forced", "with_mask", "without"))
    return Counted(form, rule, *totals)


if __name__ == "__main__":
    raise SystemExit(main())
