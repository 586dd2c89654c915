"""Writes torch.distributed.checkpoint's files with one tensor in memory at a time, and hashes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from launcher.checkpoint.checksums import FileChecksum, HashingFileSystem
from launcher.checkpoint.ranks import root_cause
from launcher.checkpoint.reader import quietly
from launcher.errors import CheckpointError

Stamps = Mapping[str, FileChecksum]


class CheckpointWriter(dcp.FileSystemWriter):
    """torch's writer with readable errors, and without local paths in the checkpoint.

    Attributes:
        fs: records the checksums of the written files.
    """

    def __init__(self, directory: Path, who: str) -> None:
        super().__init__(directory, sync_files=True, thread_count=1)
        self._who = who
        self.fs: HashingFileSystem = HashingFileSystem()

    def storage_meta(self) -> StorageMeta | None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors to one file, one at a time; torch's writer holds all until the end."""
        try:
            written = self._write_file(f"{plan.storage_data.prefix}0.distcp", plan.items, planner)
        except CheckpointError:  # a source tensor could not be read
            raise
        except Exception as error:
            raise CheckpointError(
                f"The checkpoint could not be written{self._who}: {root_cause(error)}",
                where=str(self.path),
                fix="free some space or save elsewhere; earlier checkpoints are intact",
            ) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        written = []
        with self.fs.written(Path(self.path) / name) as stream:
            for item in items:
                at, tensor = stream.tell(), planner.resolve_data(item)
                assert isinstance(tensor, Tensor)  # nothing else is in a checkpoint
                torch.save(_alone(tensor), cast("IO[bytes]", stream))
                del tensor
                size = stream.tell() - at
                written.append(WriteResult(item.index, size, _StorageInfo(name, at, size)))
            stream.finish()
        return written


class PartialPlanner(dcp.DefaultSavePlanner):
    """torch's planner for ranks that together hold only parts of the tensors."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans = dedup_save_plans(all_plans, self.dedup_save_to_lowest_rank)
        self.global_plan, self.metadata = create_default_global_save_plan(plans)
        return self.global_plan, self.metadata


def write_files(
    directory: Path,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    rank: int | None,
    kind: type[dcp.DefaultSavePlanner] = dcp.DefaultSavePlanner,
) -> tuple[Metadata, Stamps]:
    """Write this rank's tensors to its own file. Collective over `group`; its first rank writes `.metadata`.

    Args:
        directory: may differ between ranks.
        rank: rank of this process; None: no other process takes part.

    Returns:
        The metadata of the tensors of all ranks, and the checksums of this rank's files.
    """
    writer = CheckpointWriter(directory, "" if rank is None else f" on rank {rank}")
    metadata = quietly(
        lambda: dcp.save(
            dict(tensors),
            storage_writer=writer,
            planner=kind(flatten_state_dict=False),
            process_group=group,
            no_dist=rank is None,
        )
    )
    return metadata, writer.fs.stamps


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU with its own storage, because torch.save writes whole storages."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
