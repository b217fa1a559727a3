"""Train the demo target's EAGLE-3 head: python -m demo_pair.train.head --work DIR

Half of the windows are the corpus, half the target's own text, as for the drafter (`demo_pair.train.draft`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo_pair import TARGET
from demo_pair.train.corpus import read_corpus
from demo_pair.train.data import batches, encode, held_out_windows, training_stream
from demo_pair.train.draft import load_own_windows, mixed, own_batches
from demo_pair.train.losses import tell
from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config, save
from specwire.lm.training.distillation import Schedule, draft_ids, train

ROWS, SEED, DEPTH = 8, 20261123, 4
DRAFT_VOCABULARY = 2048
# Streams that enter these of the target's six layers: early, middle, and the last that is not the output itself.
TAPS = (1, 3, 5)
EVALUATED = 32


def config(vocabulary: int, hidden: int) -> Eagle3Config:
    return Eagle3Config(
        hidden=hidden,
        inner=768,
        heads=6,
        key_heads=2,
        head_dim=64,
        vocabulary=vocabulary,
        draft_vocabulary=DRAFT_VOCABULARY,
        taps=TAPS,
        norm_before_residual=True,
    )


def run(work: Path, schedule: Schedule) -> None:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(TARGET)
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    files = read_corpus()
    stream = training_stream(files, tokenizer)
    held_out = held_out_windows(encode([f for f in files if f.held_out], tokenizer), EVALUATED)
    own = load_own_windows(work, target, tokenizer)
    windows = mixed(batches(stream, ROWS, SEED), own_batches(own, ROWS, SEED))
    torch.manual_seed(SEED)
    embed = target.get_input_embeddings().weight.detach().clone()
    head = Eagle3(config(len(embed), embed.shape[1]), embed)
    counts = torch.bincount(torch.from_numpy(stream).long(), minlength=len(embed))
    head.d2t.copy_(draft_ids(counts, DRAFT_VOCABULARY))
    with torch.no_grad():  # begin from what the target says of a hidden state
        head.lm_head.weight.copy_(target.lm_head.weight[torch.arange(DRAFT_VOCABULARY) + head.d2t])
    curve = train(head, target, windows, held_out, schedule, work, depth=DEPTH, tell=tell)
    save(head.bfloat16(), work / "head", "demo_pair/target")
    (work / "head" / "training.json").write_text(json.dumps({"held_out_acceptance": curve}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--decay", type=int, default=500)
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    run(arguments.work, Schedule(arguments.peak, 50, arguments.steps, arguments.decay))


if __name__ == "__main__":
    main()
