"""What all benchmarks share.

runs        what one timed generation yields
sessions    generations of ours, several at once
interleave  which row runs when, and how far a measurement is
interval    medians with their confidence intervals, percentiles
child       a process that answers in lines of JSON
services    services as processes that may be killed: ours, and Redis as the log
processes   the same function of many things, in a process for each core
report      tables, and bars that hold or not
record      the file that a measurement leaves
machine     what it ran on
entry       arguments, errors, exit codes
certificates  made on the spot, for tests too
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
# Spec-Bench's, if they are beside the checkout.
QUESTIONS = ROOT.parent / "shared" / "data" / "spec_bench" / "questions.jsonl"
