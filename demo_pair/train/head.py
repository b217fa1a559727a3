"""Train heads for the demo target: python -m demo_pair.train.head --work DIR [--kind eagle3 medusa hydra mtp]

Half of the windows are the corpus, half the target's own text, as for the drafter (`demo_pair.train.draft`). Each head
goes into a folder of its kind in DIR, with what is kept meanwhile: a training that was ended goes on from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo_pair import TARGET
from demo_pair.train.corpus import read_corpus
from demo_pair.train.data import batches, encode, held_out_windows, training_stream
from demo_pair.train.draft import load_own_windows, mixed, own_batches
from demo_pair.train.losses import tell
from specwire.lm.heads import eagle3, medusa, mtp
from specwire.lm.training.course import Course, begun, write
from specwire.lm.training.distillation import Schedule, train
from specwire.lm.training.record import this_run, write_record

ROWS, SEED, DEPTH = 8, 20261123, 4
DRAFT_VOCABULARY = 2048
# Streams that enter these of the target's six layers: early, middle, and the last that is not the output itself.
TAPS = (1, 3, 5)
EVALUATED = 32
KINDS = (eagle3.KIND, medusa.MEDUSA, medusa.HYDRA, mtp.KIND)


def run(work: Path, kinds: Sequence[str], schedule: Schedule) -> None:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(TARGET)
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    files = read_corpus()
    stream = training_stream(files, tokenizer)
    held_out = held_out_windows(encode([f for f in files if f.held_out], tokenizer), EVALUATED)
    own = load_own_windows(work, target, tokenizer)
    for kind in kinds:
        tell(f"training {kind}")
        course = Course(
            "demo_pair/target",
            (),
            work / kind,
            kind=kind,
            steps=schedule.steps,
            rows=ROWS,
            depth=DEPTH,
            rate=schedule.peak,
            draft_vocabulary=DRAFT_VOCABULARY,
            taps=TAPS,
        )
        windows = mixed(batches(stream, ROWS, SEED), own_batches(own, ROWS, SEED))
        torch.manual_seed(SEED)
        head = begun(course, target, torch.from_numpy(stream).long())
        course.out.mkdir(exist_ok=True)
        here = this_run(course.device)
        trained = train(head, target, windows, held_out, schedule, course.out, depth=DEPTH, here=here, tell=tell)
        write(head, course.out, course.target)
        write_record(course.out, SEED, _arguments(course, schedule), trained)


def _arguments(course: Course, schedule: Schedule) -> dict[str, Any]:
    """For the record. Of EAGLE-3 alone: draft-vocabulary, taps."""
    own = {"draft-vocabulary": course.draft_vocabulary, "taps": course.taps} if course.kind == eagle3.KIND else {}
    shared = {name: getattr(course, name) for name in ("target", "kind", "steps", "rows", "depth", "rate")}
    return shared | {"decay": schedule.decay, "warm-up": schedule.warmup} | own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=[eagle3.KIND])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--decay", type=int, default=500)
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    run(arguments.work, arguments.kind, Schedule(arguments.peak, 50, arguments.steps, arguments.decay))


if __name__ == "__main__":
    main()
