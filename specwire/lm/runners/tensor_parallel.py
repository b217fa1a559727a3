"""A model that is split over several processes, the ranks: each holds a share of every layer, of its heads' cache too.

Which layers are cut, and how, is the model's own plan in transformers (`tp_plan`); transformers' own way of loading by
it is not used (docs/LOG.md says why). A layer cut by its outputs (colwise) computes some of them from all inputs; the
one behind it, cut by its inputs (rowwise), then has a part of each sum, and the parts of all ranks are added.
"""

# No postponed annotations here: TorchScript reads them as they stand.

import os
import re
import socket
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from specwire.core.model import RANKS, Feed, ModelError, ModelLost, RankGroup, TreeFeed
from specwire.lm.kv_cache import Runner
from specwire.lm.model_config import first_line

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# Limits on waiting for another living rank: to connect, to load (one after the other), in a forward. A rank that dies
# once they are connected is noticed at once.
CONNECT_LIMIT, LOAD_LIMIT, STEP_LIMIT = timedelta(seconds=60), timedelta(minutes=60), timedelta(seconds=60)
# Styles of a plan: cut by outputs, by outputs that are gathered again, by inputs; and layers that every rank has whole.
COLUMNS, GATHERED, ROWS = "colwise", ("colwise_gather_output", "colwise_rep"), "rowwise"
WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "replicate")


class Rank(NamedTuple):
    """One process of those that a model is split over, connected. loading: the same ranks, with more patience."""

    number: int
    size: int
    group: distributed.ProcessGroup
    loading: distributed.ProcessGroup


def join(ranks: RankGroup, device: torch.device) -> Rank:
    """Connect the ranks, all of them on this machine; ModelError where they cannot be."""
    if not distributed.is_available() or device.type not in BACKENDS:
        raise ModelError(f"{RANKS}: this PyTorch cannot connect {ranks.size} ranks on {device.type}")
    if distributed.is_initialized():
        raise ModelError(f"{RANKS}: this process is a rank of another model already")
    stay_on_this_machine()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        distributed.init_process_group(
            BACKENDS[device.type],
            init_method=f"file://{ranks.meet()}",
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=CONNECT_LIMIT,
        )
        ranks.at_end(distributed.destroy_process_group)
        step, load = (distributed.new_group(timeout=limit) for limit in (STEP_LIMIT, LOAD_LIMIT))
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{RANKS}: the ranks cannot connect: {ranks.loss() or first_line(error)}") from error
    return Rank(ranks.rank, ranks.size, step, load)


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
    """The name as plans have it: with a star for each number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cut(model: PreTrainedModel, name: str, style: str, rank: Rank) -> None:
    layer: Any = dict(model.named_modules()).get(name)
    if type(layer) is not nn.Linear or style not in (COLUMNS, *GATHERED, ROWS):
        raise ModelError(f"{RANKS}: {type(model).__name__} splits {name} by {style}, which is not known here")
    cut = layer.weight.shape[1 if style == ROWS else 0]
    if cut % rank.size and style not in GATHERED:
        raise ModelError(f"{RANKS}: {rank.size} ranks cannot share the {cut} units of {name} equally")
    if style == ROWS:
        _cut_inputs(layer, rank)
        return
    _cut_outputs(layer, rank)
    if style in GATHERED:
        whole = joining(rank)
        layer.register_forward_hook(lambda _, __, part: whole(part)[..., :cut])


def _cut_inputs(layer: Any, rank: Rank) -> None:
    layer.weight = _share(layer.weight, 1, rank)
    layer.bias = layer.bias if rank.number == 0 else None  # it must enter the sum once
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


def rank_device(name: str, ranks: RankGroup) -> str:
    """Ranks on cuda take a device each, in order; ModelError where there are too few."""
    if not name.startswith("cuda"):
        return name
    count = torch.cuda.device_count()
    if name not in ("cuda", "cuda:0") or count < ranks.size:
        raise ModelError(f"{RANKS}: {ranks.size} ranks take cuda:0 and those behind it; there are {count}, not {name}")
    return f"cuda:{ranks.rank}"


def stay_on_this_machine() -> None:
    """Let only this machine reach the sockets by which ranks talk."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _loopback())


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


# ----------------------------------------------------------------------------------------------------------------------
# What the ranks do together in a forward, as modules: TorchScript calls them as Python does.


class SingleRank(nn.Module):
    """One process: there is nothing to put together."""

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        return part


class AllReduce(nn.Module):
    """The sum of all ranks' parts, the same bits on each."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        added = torch.ops._c10d_functional.all_reduce(part, "sum", self.group)
        total: torch.Tensor = torch.ops._c10d_functional.wait_tensor(added)
        return total


class AllGather(nn.Module):
    """All ranks' parts (rows, width) as (rows, size x width)."""

    def __init__(self, group: str, size: int) -> None:
        super().__init__()
        self.group, self.size = group, size

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        parts = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(part.contiguous(), self.size, self.group)
        )
        return torch.cat(parts.chunk(self.size), dim=-1)


def adding(rank: Rank | None) -> nn.Module:
    return SingleRank() if rank is None else AllReduce(rank.group.group_name)


def joining(rank: Rank | None) -> nn.Module:
    return SingleRank() if rank is None else AllGather(rank.group.group_name, rank.size)


# ----------------------------------------------------------------------------------------------------------------------
# Rank 0: the runners of the other ranks repeat each call of its runner. Calls are encoded as integers, in order.

RUN, ZERO, COPY, KEEP = range(4)
# In place of the length of a tree's text: there is no tree.
NO_TREE = -1
# int64, for this machine only.
WIDE = "q"


def to_run(feeds: Sequence[Feed]) -> bytes:
    numbers = [RUN]
    for feed in feeds:
        numbers += [feed.slot, feed.start, feed.wanted, len(feed.tokens), *feed.tokens]
        numbers += [NO_TREE] if feed.tree is None else [feed.tree.trunk]
        for ancestors in feed.tree.ancestors if feed.tree else ():
            numbers += [len(ancestors), *ancestors]
    return _packed(numbers)


def to_zero(slot: int, stop: int) -> bytes:
    return _packed([ZERO, slot, stop])


def to_copy(source: int, target: int, stop: int) -> bytes:
    return _packed([COPY, source, target, stop])


def to_keep(slot: int, start: int, rows: Sequence[int]) -> bytes:
    return _packed([KEEP, slot, start, *rows])


def obey(runner: Runner, order: bytes) -> None:
    """Do it on this rank's share; what comes out is rank 0's to use."""
    kind, *numbers = array(WIDE, order)
    if kind == RUN:
        runner.run(list(_feeds(iter(numbers))))
    elif kind == ZERO:
        runner.zero(*numbers)
    elif kind == COPY:
        runner.copy(*numbers)
    else:
        slot, start, *rows = numbers
        runner.keep(slot, start, rows)


def _packed(numbers: Sequence[int]) -> bytes:
    return array(WIDE, numbers).tobytes()


def _feeds(numbers: Iterator[int]) -> Iterator[Feed]:
    for slot in numbers:
        start, wanted, count = (next(numbers) for _ in range(3))
        tokens, trunk = _next(numbers, count), next(numbers)
        tree = None if trunk == NO_TREE else TreeFeed(trunk, tuple(_next(numbers, next(numbers)) for _ in tokens))
        yield Feed(slot, start, tokens, wanted, tree)


def _next(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(count))


class LeadingRunner:
    """`Runner` over all ranks.

    A failure within a forward leaves the ranks at different places in it, so it ends the model: ModelLost.
    """

    def __init__(self, runner: Runner, ranks: RankGroup) -> None:
        self.runner = runner
        self.branches = runner.branches
        self._ranks = ranks

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self._tell(to_run(feeds))
        try:
            return self.runner.run(feeds)
        except Exception as error:
            raise self._lost(error) from error

    def zero(self, slot: int, stop: int) -> None:
        self._tell(to_zero(slot, stop))
        self.runner.zero(slot, stop)

    def copy(self, source: int, target: int, stop: int) -> None:
        self._tell(to_copy(source, target, stop))
        self.runner.copy(source, target, stop)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self._tell(to_keep(slot, start, rows))
        self.runner.keep(slot, start, rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes on all ranks, which hold equal shares."""
        return self.runner.kv_bytes * self._ranks.size

    def _tell(self, order: bytes) -> None:
        try:
            self._ranks.tell(order)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ModelLost:
        return ModelLost(self._ranks.loss() or f"{self._ranks.size} ranks failed together: {first_line(error)}")
