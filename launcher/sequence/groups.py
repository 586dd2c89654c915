"""Process groups of ranks that share sequences, for use before an engine exists and as its `mpu`.

Scripts pass the groups to `initialize()` as `mpu`, as with DeepSpeed's
`runtime/sequence_parallel/parallel_state_sp.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from launcher.errors import ArgumentsError

WHERE = "initialize_sequence_parallel()"


@dataclass(frozen=True)
class SequenceGroups:
    """Process groups in which neighbouring ranks share a sequence.

    Args:
        group: the ranks that share this rank's sequences.
        every: all ranks; gradients are averaged over them.
    """

    group: dist.ProcessGroup
    every: dist.ProcessGroup

    @classmethod
    def of(cls, degree: int, **more: Any) -> SequenceGroups:
        """Create the groups. Every rank must call it.

        Args:
            degree: number of ranks that share a sequence.

        Raises:
            ArgumentsError: the degree does not divide the world size.
        """
        world = dist.get_world_size()
        if degree < 1 or world % degree:
            raise ArgumentsError(
                f"sequence-parallel size {degree} does not divide the world size {world}",
                where=WHERE,
                fix=f"start a multiple of {degree} ranks, or set the size (sequence_parallel_size, sp_size) to "
                f"{' or '.join(str(n) for n in range(1, world + 1) if world % n == 0)}",
            )
        lines = torch.arange(world).view(-1, degree).tolist()
        group, every = dist.new_subgroups_by_enumeration(lines)[0], dist.group.WORLD
        assert group is not None and every is not None
        return cls(group, every, **more)

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_sequence_parallel_world_size(self) -> int:
        return self.group.size()

    def get_sequence_parallel_rank(self) -> int:
        return self.group.rank()

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        return self.every

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.every.size()

    def get_sequence_data_parallel_rank(self) -> int:
        return self.every.rank()


@dataclass(frozen=True)
class SlicedSequences(SequenceGroups):
    """Groups whose ranks call a model with slices of the batch; `initialize(mpu=...)` prepares the model.

    Args:
        shares_in_eval: also shard sequences in evaluation; else every rank evaluates full batches of its own.
    """

    shares_in_eval: bool = True
