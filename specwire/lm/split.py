"""A model that is split over several processes, the ranks: each holds a share of every layer, of its heads' cache too.

Which layers are cut, and how, is the model's own plan in transformers (`tp_plan`); transformers' own way of loading by
it is not used (docs/LOG.md says why). A layer cut by its outputs (colwise) computes some of them from all inputs; the
one behind it, cut by its inputs (rowwise), then has a part of each sum, and the parts of all ranks are added.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from transformers import PreTrainedConfig, PreTrainedModel

from specwire.lm.checks import first_line
from specwire.lm.interface import NONE, OPENVINO, TORCH, ModelError
from specwire.lm.party import FIELD, Party, Rank
from specwire.lm.runners import How
from specwire.lm.together import adding, joining

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# How long a rank may wait for another that is there to connect, to load (one after the other), and in a forward. One
# that dies once they are connected is noticed at once.
CONNECT_LIMIT, LOAD_LIMIT, STEP_LIMIT = timedelta(seconds=60), timedelta(minutes=60), timedelta(seconds=60)
# Styles of a plan: cut by outputs, by outputs which are put together again, by inputs; and what every rank has whole.
COLUMNS, GATHERED, ROWS = "colwise", ("colwise_gather_output", "colwise_rep"), "rowwise"
WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "replicate")


def split_way(config: PreTrainedConfig, how: How, size: int) -> How:
    """How each rank computes; ModelError unless it can be so, with whole heads and the same number on each rank."""
    for name, given, needed in (
        ("quantization", how.quantization, NONE),
        ("compile", how.compiled, False),
        ("deterministic", how.deterministic, False),
        ("runtime", OPENVINO if how.runtime == OPENVINO else TORCH, TORCH),
    ):
        if given != needed:
            raise ModelError(f"{FIELD}: {size} ranks need {name} to be {needed}, not {given}")
    text: Any = config.get_text_config()
    if not (getattr(config, "base_model_tp_plan", None) or getattr(text, "base_model_tp_plan", None)):
        raise ModelError(f"{FIELD}: {config.model_type} models have no plan by which to split them over {size} ranks")
    heads = text.num_attention_heads
    for kind, count in (("attention", heads), ("key", getattr(text, "num_key_value_heads", None) or heads)):
        if count % size:
            raise ModelError(f"{FIELD}: {size} ranks cannot share the {count} {kind} heads of this model equally")
    return how._replace(runtime=TORCH)


def join(party: Party, device: torch.device) -> Rank:
    """Connect the ranks, all of them on this machine; ModelError where they cannot be."""
    if not distributed.is_available() or device.type not in BACKENDS:
        raise ModelError(f"{FIELD}: this PyTorch cannot connect {party.size} ranks on {device.type}")
    if distributed.is_initialized():
        raise ModelError(f"{FIELD}: this process is a rank of another model already")
    for library in ("GLOO", "NCCL"):  # nobody else is to reach what they listen on
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _loopback())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        distributed.init_process_group(
            BACKENDS[device.type],
            init_method=f"file://{party.meet()}",
            rank=party.rank,
            world_size=party.size,
            timeout=CONNECT_LIMIT,
        )
        party.at_end(distributed.destroy_process_group)
        step, load = (distributed.new_group(timeout=limit) for limit in (STEP_LIMIT, LOAD_LIMIT))
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{FIELD}: the ranks cannot connect: {party.loss() or first_line(error)}") from error
    return Rank(party.rank, party.size, step, load)


@contextmanager
def turn(rank: Rank | None) -> Iterator[None]:
    """One rank at a time, in order: each has the whole model in memory for a moment. Ends when all have had theirs."""
    if rank is None:
        yield
        return
    for _ in range(rank.number):
        distributed.barrier(rank.loading)
    yield
    for _ in range(rank.number, rank.size):
        distributed.barrier(rank.loading)


@torch.no_grad()
def split(model: PreTrainedModel, rank: Rank) -> None:
    """Leave this rank's share of a whole model; ModelError where the model's plan cannot be followed."""
    plan = dict(model.tp_plan)
    names = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    for name in names:
        style = plan.get(_general(name))
        if style is not None and style not in WHOLE:
            _cut(model, name, style, rank)


def _general(name: str) -> str:
    """As plans have it: with a star for each number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cut(model: PreTrainedModel, name: str, style: str, rank: Rank) -> None:
    layer: Any = dict(model.named_modules()).get(name)
    if type(layer) is not nn.Linear or style not in (COLUMNS, *GATHERED, ROWS):
        raise ModelError(f"{FIELD}: {type(model).__name__} splits {name} by {style}, which is not known here")
    cut = layer.weight.shape[1 if style == ROWS else 0]
    if cut % rank.size and style not in GATHERED:
        raise ModelError(f"{FIELD}: {rank.size} ranks cannot share the {cut} units of {name} equally")
    if style == ROWS:
        _cut_inputs(layer, rank)
        return
    _cut_outputs(layer, rank)
    if style in GATHERED:
        whole = joining(rank)
        layer.register_forward_hook(lambda _, __, part: whole(part)[..., :cut])


def _cut_inputs(layer: Any, rank: Rank) -> None:
    layer.weight = _share(layer.weight, 1, rank)
    layer.bias = layer.bias if rank.number == 0 else None  # it is to be in the sum once
    total = adding(rank)
    layer.register_forward_hook(lambda _, __, part: total(part))


def _cut_outputs(layer: Any, rank: Rank) -> None:
    layer.weight = _share(layer.weight, 0, rank)
    layer.bias = None if layer.bias is None else _share(layer.bias, 0, rank)


def _share(whole: torch.Tensor, axis: int, rank: Rank) -> nn.Parameter:
    """Part of a rank along an axis, in memory of its own. The last ones are padded with zeros to the others' size."""
    size = -(-whole.shape[axis] // rank.size)
    begin = min(rank.number * size, whole.shape[axis])
    part = whole.narrow(axis, begin, min(size, whole.shape[axis] - begin))
    shape = list(whole.shape)
    shape[axis] = size
    share = whole.new_zeros(shape)
    share.narrow(axis, 0, part.shape[axis]).copy_(part)
    return nn.Parameter(share, requires_grad=False)


def rank_device(name: str, party: Party) -> str:
    """Ranks on cuda take a device each, in order; ModelError where there are too few."""
    if not name.startswith("cuda"):
        return name
    count = torch.cuda.device_count()
    if name not in ("cuda", "cuda:0") or count < party.size:
        raise ModelError(f"{FIELD}: {party.size} ranks take cuda:0 and those behind it; there are {count}, not {name}")
    return f"cuda:{party.rank}"


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")
