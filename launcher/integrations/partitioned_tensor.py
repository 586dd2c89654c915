"""`deepspeed.runtime.utils`: tensors that scripts cut over a process group themselves, as Megatron cuts what stages
send each other. The engine's own shards are in `launcher.zero`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import LauncherError
from launcher.integrations.utilities import partition_uniform


class PartitionedTensor:
    """This rank's part of a tensor that every rank of a group has.

    Args:
        tensor: the whole one, the same on every rank.
        group: the ranks that share it.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.shape), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        begin, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[begin:end].clone()

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> PartitionedTensor:
        """Build from what `to_meta()` and `data()` gave on a rank of another group that has the same place in it.

        Raises:
            LauncherError: it was cut for another number of ranks, or for another rank.
        """
        dims, *numbers = meta.tolist()
        size, (parts, rank), partition = numbers[:dims], numbers[dims : dims + 2], numbers[dims + 2 :]
        made = cls(local_part.new_empty(0), group)
        if (parts, rank) != (made.num_parts, made.rank):
            raise LauncherError(
                f"the tensor was cut for rank {rank} of {parts}, and this is rank {made.rank} of {made.num_parts}",
                where="PartitionedTensor.from_meta()",
                fix="give the group whose ranks correspond to those that cut it",
            )
        made.orig_size, made.orig_device = size, torch.device(device or local_part.device)
        made.partition, made.local_data = partition, local_part.detach()
        return made

    def to_meta(self) -> Tensor:
        """Return how it was cut: number of dimensions, sizes, parts, this rank, where parts begin, and the end."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def full(self, device: Any = None) -> Tensor:
        """Return the whole tensor. Every rank of the group must ask."""
        flat = self.local_data.new_zeros(math.prod(self.orig_size))
        flat[slice(*self.partition[self.rank : self.rank + 2])] = self.local_data
        dist.all_reduce(flat, group=self.group)  # parts may differ by one element: a sum with zeros is exact
        return flat.view(self.orig_size).to(device or self.orig_device)

    def data(self) -> Tensor:
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size


def all_gather_into_tensor_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
) -> None:
    """Fill flat buffers whose parts ranks have changed.

    Args:
        groups_flat: buffers, each with equal parts for the ranks of its group.
        partitioned_param_groups: the parts of each, views of it.
        dp_process_group: the group of each.
    """
    for flat, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group, strict=True):
        if dist.get_world_size(group) > 1:
            own = parts[dist.get_rank(group)].detach().clone()
            dist.all_gather_into_tensor(flat.detach(), own, group=group)


def all_gather_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """Gather as `all_gather_into_tensor` does; in one piece, whatever the size of buckets."""
    all_gather_into_tensor_dp_groups(groups_flat, partitioned_param_groups, dp_process_group)
