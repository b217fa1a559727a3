"""The demo target with 8-bit weights, and activations rounded on the way, over vLLM's worker: ``FOLDER``.

The weights are in a format that only vLLM reads here (compressed-tensors, W8A8). Its logits are held to those of the
target's own modules with the same rounding. Run by the environment that `make setup-vllm` makes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo_pair import TARGET, held_out_prompts
from specwire.lm import Feed, load_model
from specwire.lm.model_files import CONFIG, WEIGHTS
from specwire.lm.runners.select import DYNAMIC_TOLERANCE
from specwire.text.tokenizer import load_tokenizer

METHOD, LARGEST, OUTPUT = "compressed-tensors", 127, "lm_head"
SCHEME = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZED = {
    "quant_method": METHOD,
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": [OUTPUT],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**SCHEME, "strategy": "channel", "dynamic": False},
            "input_activations": {**SCHEME, "strategy": "token", "dynamic": True},
        }
    },
}
CONTEXT, TOKENS = 256, 64
# On processors with AMX vLLM's kernel for 8 bits takes no float32.
DTYPE = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"


def round_and_write(model: PreTrainedModel, folder: Path) -> None:
    """Write the model with rounded linear layers, and leave it computing what the files say."""
    tensors = dict(model.state_dict())
    tensors.pop(f"{OUTPUT}.weight")  # it is the embedding's
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != OUTPUT:
            scale = layer.weight.abs().amax(dim=1, keepdim=True) / LARGEST
            rounded = (layer.weight / scale).round()
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = rounded.to(torch.int8), scale.clone()
            layer.weight.copy_(rounded * scale)
            layer.register_forward_pre_hook(lambda _, given: rounded_tokens(*given))
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "quantization_config": QUANTIZED}))


def rounded_tokens(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (values / scale).round() * scale


@torch.no_grad()
def main(folder: Path) -> None:
    """Raises AssertionError where the logits are others, or the model says of itself what it is not."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    model: PreTrainedModel = loaded.eval()
    round_and_write(model, folder)
    how: dict[str, Any] = {"slots": 2, "dtype": DTYPE, "context": CONTEXT, "engine": "vllm"}
    lm = load_model(str(folder), **how, engine_options={"enforce_eager": True})
    assert lm.info.quantization == METHOD
    assert (lm.info.architecture, lm.info.eos_ids) == (type(model).__name__, (0,))
    prompt = held_out_prompts()[0].text
    text = load_tokenizer(lm.info.tokenizer_json).encode(prompt, add_special_tokens=False).ids[:TOKENS]
    rows = lm.forward([Feed(0, 0, text, len(text))])
    expected = model(torch.tensor([text])).logits[0, :, : lm.info.vocabulary]
    off = float((rows - expected).abs().max() / expected.abs().max())
    assert off <= DYNAMIC_TOLERANCE, off
    same = int((rows.argmax(dim=1) == expected.argmax(dim=1)).sum())
    assert same >= 0.9 * len(text), f"{same} of {len(text)} choices are the same"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
