"""Which models an absolute-position cache can serve. The others are refused in a sentence, before they load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specwire.lm.cached import Runner
from specwire.lm.interface import Feed, ModelError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

# Tokens of the trial at load: long enough to cross a rollback, a ragged batch and a page of a cache in pages, short
# enough to cost little.
TRIAL_TOKENS = 40
# Different ids among them.
TRIAL_IDS = 12
# Largest deviation from the model's own cache-less forward, relative to the largest logit (at least 1).
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1 / 64, torch.bfloat16: 1 / 16}


def context_of(config: PreTrainedConfig, wanted: int | None) -> int:
    """Positions to serve: what was asked for, at most what the model was made for; ModelError if that is nothing."""
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise ModelError("context: the model states no maximum length, so one must be given")
        return limit
    if wanted < 2:
        raise ModelError(f"context: must be at least 2 positions, not {wanted}")
    if limit is not None and wanted > limit:
        raise ModelError(f"context: the model was made for {limit} positions, not {wanted}")
    return wanted


def check_kind(config: PreTrainedConfig) -> None:
    """ModelError unless every layer keeps keys and values by position."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} models have an encoder; a causal, decoder-only model is needed")
    for layer in sorted(set(getattr(config.get_text_config(), "layer_types", None) or ())):
        if layer not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise ModelError(f"this {kind} model has {layer} layers, whose state cannot be rolled back to a position")


def check_window(config: PreTrainedConfig, context: int) -> None:
    """ModelError if a layer forgets positions of the context."""
    window = _sliding_window(config.get_text_config())
    if window is not None and window < context:
        raise ModelError(
            f"this {config.model_type} model attends to a sliding window of {window} positions, shorter than the "
            f"context of {context}: what it has slid past cannot be rolled back; give a context of at most {window}"
        )


def _sliding_window(config: PreTrainedConfig) -> int | None:
    """Shortest window that a layer uses, None if every layer sees everything."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    slides = SLIDING_ATTENTION in types if types else getattr(config, "use_sliding_window", True)
    return window if isinstance(window, int) and slides else None


def first_line(error: BaseException) -> str:
    """What a library's error says first, for a sentence of ours."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def check_model(model: PreTrainedModel) -> None:
    """ModelError for recurrent models, which say so on their class."""
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{type(model).__name__} is recurrent: its state cannot be rolled back to a position")


@torch.inference_mode()
def deviation(
    model: PreTrainedModel, runner: Runner, slots: int, context: int, vocabulary: int, dtype: torch.dtype
) -> float:
    """How far the runner is from the model's own cache-less forward, in units of the dtype's tolerance (<= 1 is equal).

    The trial extends, rolls back and extends again, beside a shorter feed in another slot where there is one.
    """
    count = min(TRIAL_TOKENS, context)
    text = [(7 * (index % TRIAL_IDS) + 3) % vocabulary for index in range(count)]
    split, last = count // 2, slots - 1
    device = next(model.parameters()).device
    expected = model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0].float()
    runner.run([Feed(last, 0, text[:split] + text[:1], 1)])
    feeds = [Feed(last, split, text[split:], count - split)]
    if last > 0:
        feeds.append(Feed(0, 0, text[:split], split))
    got = runner.run(feeds).float()
    order = [*range(split, count), *range(split)] if last > 0 else [*range(split, count)]
    error = (got[:, :vocabulary] - expected[order, :vocabulary]).abs().max()
    _clean(runner, feeds, split + 1)
    return float(error / expected.abs().max().clamp(min=1.0)) / TOLERANCES[dtype]


def _clean(runner: Runner, feeds: Sequence[Feed], written: int) -> None:
    for feed in feeds:
        runner.zero(feed.slot, max(feed.stop, written))
