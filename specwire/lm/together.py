"""What the ranks of a split model do together in a forward, as modules: TorchScript calls them as Python does."""

# No postponed annotations here: TorchScript reads them as they stand.

import torch
from torch import nn

from specwire.lm.party import Rank


class Alone(nn.Module):
    """One process: there is nothing to put together."""

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        return part


class Summed(nn.Module):
    """The sum of all ranks' parts, the same bits on each."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        added = torch.ops._c10d_functional.all_reduce(part, "sum", self.group)
        total: torch.Tensor = torch.ops._c10d_functional.wait_tensor(added)
        return total


class Concatenated(nn.Module):
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
    return Alone() if rank is None else Summed(rank.group.group_name)


def joining(rank: Rank | None) -> nn.Module:
    return Alone() if rank is None else Concatenated(rank.group.group_name, rank.size)
