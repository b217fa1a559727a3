"""Make golden EAGLE-3 heads: tiny ones with random weights, and what speculators' own model says of random features.

speculators needs other versions than this project, so it has an environment of its own. From the project's root, with
the build of torch that is for CPUs:

    python3.11 -m venv build/speculators
    build/speculators/bin/python -m pip install torch==2.13.0
    build/speculators/bin/python -m pip install speculators==0.9.0 torch==2.13.0
    build/speculators/bin/python -m pip uninstall --yes torchvision torchaudio
    .venv/bin/python -m tests.lm.heads.golden ours
    build/speculators/bin/python tests/lm/heads/golden.py

torchvision and torchaudio come with it, of a build that does not suit; nothing here needs them. The last command but
one writes a head as this project does, which speculators then reads; the last one writes all others. Each is a folder
in `golden_heads/`, with the answers in `said.safetensors`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

GOLDEN = Path(__file__).parent / "golden_heads"
OURS, SAID = "ours", "said.safetensors"
LENGTH, DEPTH, SEED = 12, 3, 7
HIDDEN = 16
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
# By folder: type of the layer, and what the head says of itself.
HEADS: dict[str, tuple[str, dict[str, bool]]] = {
    "plain": ("llama", {}),
    "normed": ("llama", {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}),
    "qwen3": ("qwen3", {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
}


def write_ours() -> None:
    # What speculators' environment lacks.
    from specwire.lm.heads.eagle3 import save
    from tests.lm.heads.by_hand import CONFIG, head_of

    config = replace(CONFIG, norm_before_residual=True, fc_norm=True, eps=1e-5)
    save(head_of(config, SEED).bfloat16(), GOLDEN / OURS, "a target", with_embedding=True)


def write_theirs(name: str, kind: str, flags: dict[str, bool]) -> None:
    configs, eagle3 = import_module("speculators"), import_module("speculators.models.eagle3")
    layer = (LlamaConfig if kind == "llama" else Qwen3Config)(**SIZES)
    greedy = import_module("speculators.proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=DEPTH)
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=20,
        eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        speculators_config=configs.SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[greedy],
            default_proposal_method="greedy",
            verifier=configs.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    model = eagle3.Eagle3DraftModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.d2t.copy_(torch.arange(20))
    model.t2d.copy_(torch.arange(40) % 2 == 0)
    model.bfloat16().save_pretrained(GOLDEN / name)
    (GOLDEN / name / "config.py").unlink()  # its own source


def answer(folder: Path) -> None:
    """What speculators says of the head in a folder."""
    eagle3 = import_module("speculators.models.eagle3")
    config = eagle3.Eagle3SpeculatorConfig(**json.loads((folder / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = eagle3.Eagle3DraftModel(config).eval()
    missing, foreign = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not foreign, foreign
    assert all(name.startswith("verifier_") for name in missing), missing
    features = torch.randn(1, LENGTH, 3 * HIDDEN)
    tokens, said = torch.randint(40, (1, LENGTH)), list[torch.Tensor]()
    model.lm_head.register_forward_hook(lambda _layer, _given, logits: said.append(logits[0]))
    with torch.no_grad():
        model(features, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=DEPTH)
    save_file({"features": features, "tokens": tokens, "logits": torch.stack(said)}, folder / SAID)


def main() -> None:
    torch.manual_seed(SEED)
    if sys.argv[1:] == [OURS]:
        write_ours()
        return
    for name, (kind, flags) in HEADS.items():
        write_theirs(name, kind, flags)
    for folder in sorted(each for each in GOLDEN.iterdir() if each.is_dir()):
        answer(folder)


if __name__ == "__main__":
    main()
