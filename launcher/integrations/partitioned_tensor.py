"""`deepspeed.runtime.utils`: tensors that scripts partition over a process group themselves.

Megatron partitions the tensors that pipeline stages exchange in this way. The engine's own shards are in
`launcher.zero`."""

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
    """This rank's part of a tensor that is partitioned over a group.

    Args:
        tensor: the full tensor, the same on every rank.
        group: the ranks to partition it over.
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
        """Build from the `to_meta()` and `data()` of the rank with the same index in another group.

        Raises:
            LauncherError: the tensor was partitioned for another group size, or for another rank.
        """
        dims, *numbers = meta.tolist()
        size, (parts, rank), partition = numbers[:dims], numbers[dims : dims + 2], numbers[dims + 2 :]
        made = cls(local_part.new_empty(0), group)
        if (parts, rank) != (made.num_parts, made.rank):
            raise LauncherError(
                f"the tensor was partitioned for rank {rank} of {parts}, but this is rank {made.rank} of "
                f"{made.num_parts}",
                where="PartitionedTensor.from_meta()",
                fix="pass a group whose ranks correspond to those that partitioned it",
            )
        made.orig_size, made.orig_device = size, torch.device(device or local_part.device)
        made.partition, made.local_data = partition, local_part.detach()
        return made

    def to_meta(self) -> Tensor:
        """Return the layout: number of dimensions, sizes, number of parts, this rank, and part boundaries."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def full(self, device: Any = None) -> Tensor:
        """Return the full tensor. Every rank of the group must call this."""
        flat = self.local_data.new_zeros(math.prod(self.orig_size))
        flat[slice(*self.partition[self.rank : self.rank + 2])] = self.local_data
        dist.all_reduce(flat, group=self.group)  # parts may differ by one element; a sum with zeros is exact
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
    """All-gather flat buffers after each rank has updated its own part.

    Args:
        groups_flat: flat buffers, each with equal parts for the ranks of its group.
        partitioned_param_groups: the parts of each buffer, as views of it.
        dp_process_group: the process group of each buffer.
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
    """Gather each buffer with a single `all_gather_into_tensor`; the bucket size is ignored."""
    all_gather_into_tensor_dp_groups(groups_flat, partitioned_param_groups, dp_process_group)
