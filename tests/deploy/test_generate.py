"""What `specwire generate --json` prints: all that is known of a completion, under the names that the pages use."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

from deploy.cli.clients.generate import as_object, by_source, summary
from specwire.client import Completion, SamplingInForce, Stats
from specwire.core.messages import FinishReason, Outcome, TokenLogprobs

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "CLI.md").read_text()
STATS = Stats(
    output_tokens=4, duration_us=2_000_000, time_to_first_token_us=1_500, tested_at=(2, 1), accepted_at=(1, 1)
)


def test_every_figure_is_told() -> None:
    sampling = SamplingInForce(0.0, 0, 1.0, 0, "greedy")
    outcomes = (Outcome.DIRECT,) * 4
    done = Completion("s", 1, sampling, "text", (1, 2, 3, 4), outcomes, FinishReason.LENGTH, "", STATS)
    told = json.loads(json.dumps(as_object(done)))["stats"]
    known = {each.name.replace("_us", "_ms") for each in fields(Stats)}
    assert told.keys() == known | {"tokens_per_second"}
    assert (told["tokens_per_second"], told["duration_ms"], told["time_to_first_token_ms"]) == (2.0, 2000.0, 1.5)
    assert (told["tested_at"], told["accepted_at"]) == ([2, 1], [1, 1])
    rows = PAGE.partition("| figure in `stats` |")[2].partition("\n\n")[0]
    named = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert len(named) == 6
    assert named <= told.keys()


def test_what_json_cannot_say_is_as_openai_says_it() -> None:
    """Under a lossy rule a token may be decided that what is drawn from leaves out."""
    sampling = SamplingInForce(1.0, 0, 1.0, 0, "threshold(0.1)", logprobs=1)
    told = (TokenLogprobs(-math.inf, ((3, -0.5),)),)
    done = Completion("s", 1, sampling, "x", (4,), (Outcome.ACCEPTED,), FinishReason.LENGTH, "", STATS, logprobs=told)
    assert as_object(done)["logprobs"] == [{"logprob": -9999.0, "top": [[3, -0.5]]}]


def test_a_head_has_its_figures_in_the_summary() -> None:
    own = Stats(proposed_head=9, tested_head=7, accepted_head=5, tested_ngram=3, accepted_ngram=2)
    assert by_source(own) == " (head 5 of 7, n-grams 2 of 3)"
    assert by_source(Stats(proposed_head=4)) == ""
    stats = replace(STATS, proposed=12, tested=10, accepted=7, tested_head=7, accepted_head=5)
    sampling = SamplingInForce(0.0, 0, 1.0, 0, "greedy")
    done = Completion("s", 1, sampling, "text", (1,), (Outcome.ACCEPTED,), FinishReason.LENGTH, "", stats)
    assert "7 of 10 tested draft tokens accepted (head 5 of 7), end: length" in summary(done)
