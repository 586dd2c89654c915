"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: sequence-parallel groups created by scripts.

This module can be passed as the `mpu` of `initialize()`; the script's model then exchanges tokens itself."""

from __future__ import annotations

from typing import Any

from launcher.errors import ArgumentsError
from launcher.sequence.groups import WHERE, SequenceGroups

_newest: list[SequenceGroups] = []


def use(groups: SequenceGroups) -> SequenceGroups:
    """Make the functions of this module return values for these groups."""
    _newest[:] = [groups]
    return groups


def newest() -> SequenceGroups | None:
    """Return the groups that were created last, or None."""
    return _newest[0] if _newest else None


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Create groups of `sequence_parallel_size` neighbouring ranks. Every rank must call this."""
    use(SequenceGroups.of(sequence_parallel_size))


def _made() -> SequenceGroups:
    if not _newest:
        raise ArgumentsError(
            "the sequence-parallel groups have not been created yet", where=WHERE, fix="call it first"
        )
    return _newest[0]


def get_sequence_parallel_group() -> Any:
    return _made().group


def get_sequence_parallel_world_size() -> int:
    return _made().get_sequence_parallel_world_size()


def get_sequence_parallel_rank() -> int:
    return _made().get_sequence_parallel_rank()


def get_sequence_data_parallel_group() -> Any:
    return _made().every


def get_sequence_data_parallel_world_size() -> int:
    return _made().get_sequence_data_parallel_world_size()


def get_sequence_data_parallel_rank() -> int:
    return _made().get_sequence_data_parallel_rank()


# DeepSpeed's aliases, which treat the ranks that share a sequence as a model-parallel group.
get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank
